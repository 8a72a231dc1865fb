"""Every series that the operator reads is one that the engine exposes, with the labels that it groups by."""

from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate_engine.metrics import EngineMetrics, FinishedRequest, Snapshot, render
from tidegate_engine.request import FinishReason
from tidegate_engine.settings import DEFAULT_PATTERNS, ISL_EDGES, OSL_EDGES, BatchSettings
from tidegate_engine.steptime import StepModel
from tidegate_operator.demand import TERMS, Term, parse_exposition

SETTINGS = BatchSettings(64, 4096, 1024)
SNAPSHOT = Snapshot(
    running=3,
    waiting=2,
    waiting_prompt_tokens=700,
    running_context_tokens=900,
    running_output_past_edges=dict.fromkeys(OSL_EDGES, 1),
    kv_used=5,
    kv_cached=6,
    kv_free=7,
    preemptions={"kv": 1, "policy": 0},
    spec=SETTINGS,
    effective=SETTINGS,
    capacity=SETTINGS,
    settings_generation=4,
    step_model=StepModel(0.01, 96, 1e-5, 1e-7, 1e-5, 1e-9, 1e-8),
    step_model_residual_ratio=0.1,
    step_model_samples=99,
    memory_bytes={"weights": 1},
    start_seconds={"weights": 1.0},
)


@pytest.fixture(scope="module")
def page() -> str:
    metrics = EngineMetrics(DEFAULT_PATTERNS)
    metrics.first_token(3, ttft_seconds=0.2, queue_seconds=0.1)
    metrics.counts.itl[3].observe(0.02)
    metrics.finished(FinishedRequest(1500, 20, FinishReason.STOP, 1.0, 0.2, 0.02))
    return render(metrics.counts, SNAPSHOT, model_name="m", block_tokens=16).decode()


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_every_term_is_a_series_of_the_engine_with_its_labels(term: Term, page: str) -> None:
    exposed = {
        sample.name: set(sample.labels) for family in text_string_to_metric_families(page) for sample in family.samples
    }
    assert term.metric in exposed
    if term.series not in ("step_model_residual_ratio", "step_model_samples"):  # whose `term` label may be absent
        assert set(term.labels) <= exposed[term.metric]


def test_the_operator_reads_the_numbers_that_the_engine_wrote(page: str) -> None:
    values = parse_exposition(page, at=1.0).values
    assert values["running",] == 3
    assert values["waiting_prompt_tokens",] == 700
    assert values["finished", "1024", "16"] == 1
    assert values["kv_blocks", "cached"] == 6
    assert {key[1] for key in values if key[0] == "finished"} == {str(edge) for edge in ISL_EDGES}


def test_the_terms_of_the_step_model_are_the_fields_of_the_formula(page: str) -> None:
    values = parse_exposition(page, at=1.0).values
    assert {key[1] for key in values if key[0] == "step_model"} == {term.name for term in fields(StepModel)}
