"""What the engine counts and exposes: the names of the contract, truthful numbers, no series for what is unknown."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tidegate_engine.metrics import (
    Counts,
    EngineMetrics,
    FinishedRequest,
    Histogram,
    HostUse,
    Snapshot,
    add_counts,
    add_up,
    isl_cell,
    new_counts,
    render,
)
from tidegate_engine.request import FinishReason
from tidegate_engine.serve import Process
from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    ISL_EDGES,
    ITL_BUCKETS_SECONDS,
    OSL_EDGES,
    SETTING_NAMES,
    TTFT_BUCKETS_SECONDS,
    BatchSettings,
)
from tidegate_engine.steptime import TERMS, Profile, StepModel

StartEngine = Callable[..., Awaitable[Process]]

CONTRACT: dict[str, set[str]] = {
    "requests_arrived_total": {"isl"},
    "requests_finished_total": {"isl", "osl", "reason"},
    "requests_running": set(),
    "requests_waiting": set(),
    "waiting_prompt_tokens": set(),
    "running_context_tokens": set(),
    "running_output_tokens": {"osl"},
    "ttft_seconds_bucket": {"isl", "le"},
    "itl_seconds_bucket": {"isl", "le"},
    "queue_seconds_bucket": {"isl", "le"},
    "finished_ttft_seconds_bucket": {"pattern", "le"},
    "finished_itl_seconds_bucket": {"pattern", "le"},
    "e2e_seconds_bucket": {"pattern", "le"},
    "prompt_tokens_total": set(),
    "cached_prompt_tokens_total": set(),
    "generation_tokens_total": set(),
    "kv_blocks": {"state"},
    "preemptions_total": {"cause"},
    "batching_limit": {"name", "kind"},
    "settings_generation": set(),
    "corrupted_requests_total": set(),
    "draft_tokens_total": set(),
    "accepted_draft_tokens_total": set(),
    "step_model": {"term"},
    "step_model_residual_ratio": set(),
    "step_model_samples": set(),
    "memory_bytes": {"kind"},
    "tokenizer_characters_total": set(),
    "tokenizer_tokens_total": set(),
    "tokenizer_seconds_total": set(),
    "kv_waste_ratio": set(),
    "start_seconds": {"phase"},
}
ALIASES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "corrupted_requests_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
)


def snapshot() -> Snapshot:
    limits = BatchSettings(4, 1024, 256)
    return Snapshot(
        running=6,
        waiting=2,
        waiting_prompt_tokens=300,
        running_context_tokens=900,
        running_output_past_edges=dict.fromkeys(OSL_EDGES, 1),
        kv_used=10,
        kv_cached=5,
        kv_free=15,
        preemptions={"kv": 3, "policy": 0},
        spec=limits,
        effective=limits,
        capacity=replace(limits, max_num_seqs=256),
        settings_generation=7,
        step_model=StepModel(*(0.5,) * len(TERMS)),
        step_model_residual_ratio=0.03,
        step_model_samples=12,
        memory_bytes={"weights": 100},
        start_seconds={"weights": 1.5},
        kv_waste_ratio=0.02,
    )


def samples_of(counts: Counts | None = None, now: Snapshot | None = None) -> list[Sample]:
    page = render(
        counts or new_counts(DEFAULT_PATTERNS), now or snapshot(), model_name="some-model", block_tokens=16
    ).decode()
    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]


def value(samples: list[Sample], name: str, /, **labels: str) -> float:
    found = [sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return float(found[0])


def test_every_name_of_the_contract_is_exposed_with_its_labels_from_the_start() -> None:
    samples = samples_of()
    for name, labels in CONTRACT.items():
        found = [sample for sample in samples if sample.name == f"tidegate_engine_{name}"]
        assert found, name
        assert all(set(sample.labels) == labels for sample in found), name


def test_the_vllm_aliases_are_exposed_with_vllms_labels() -> None:
    samples = samples_of()
    for name in ALIASES:
        found = [sample for sample in samples if sample.name == f"vllm:{name}"]
        assert found, name
        assert all({"model_name", "engine"} <= set(sample.labels) for sample in found), name
    assert value(samples, "vllm:kv_cache_usage_perc") == pytest.approx(10 / 30)
    assert value(samples, "vllm:cache_config_info", block_size="16", num_gpu_blocks="30") == 1


def test_the_cells_are_the_contracts_edges_and_buckets() -> None:
    samples = samples_of()
    arrived = {sample.labels["isl"] for sample in samples if sample.name == "tidegate_engine_requests_arrived_total"}
    assert arrived == {str(edge) for edge in ISL_EDGES}
    joint = [sample.labels for sample in samples if sample.name == "tidegate_engine_requests_finished_total"]
    assert len({(labels["isl"], labels["osl"]) for labels in joint}) == 49
    for name, bounds in (("ttft", TTFT_BUCKETS_SECONDS), ("itl", ITL_BUCKETS_SECONDS)):
        edges = [
            float(sample.labels["le"])
            for sample in samples
            if sample.name == f"tidegate_engine_{name}_seconds_bucket" and sample.labels["isl"] == "0"
        ]
        assert edges == [*bounds, float("inf")]


def test_gauges_show_the_snapshot() -> None:
    samples = samples_of()
    assert value(samples, "tidegate_engine_requests_running") == 6
    assert value(samples, "tidegate_engine_requests_over_cap") == 2
    assert value(samples, "tidegate_engine_kv_blocks", state="cached") == 5
    assert value(samples, "tidegate_engine_batching_limit", name="max_num_seqs", kind="capacity") == 256
    limits = [sample for sample in samples if sample.name == "tidegate_engine_batching_limit"]
    assert len(limits) == 3 * len(SETTING_NAMES)
    assert {sample.labels["term"] for sample in samples if sample.name == "tidegate_engine_step_model"} == set(TERMS)


def test_what_is_unknown_has_no_series() -> None:
    unknown = replace(
        snapshot(),
        step_model=None,
        step_model_residual_ratio=None,
        memory_bytes={},
        start_seconds={},
        kv_waste_ratio=None,
    )
    names = {sample.name for sample in samples_of(now=unknown)}
    for name in ("step_model", "step_model_residual_ratio", "memory_bytes", "start_seconds", "kv_waste_ratio"):
        assert f"tidegate_engine_{name}" not in names


def test_a_finished_request_counts_in_its_joint_cell_and_its_pattern() -> None:
    metrics = EngineMetrics(DEFAULT_PATTERNS)
    metrics.finished(
        FinishedRequest(isl=2000, osl=20, reason=FinishReason.STOP, e2e_seconds=3.0, ttft_seconds=0.5, itl_seconds=0.01)
    )
    samples = samples_of(metrics.counts)
    assert value(samples, "tidegate_engine_requests_finished_total", isl="1024", osl="16", reason="stop") == 1
    assert value(samples, "tidegate_engine_e2e_seconds_sum", pattern="LongInShortOut") == 3.0
    assert value(samples, "tidegate_engine_finished_ttft_seconds_bucket", pattern="LongInShortOut", le="0.5") == 1
    assert value(samples, "tidegate_engine_finished_ttft_seconds_bucket", pattern="LongInShortOut", le="0.4") == 0
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 1


def test_a_request_without_a_token_counts_no_token_times() -> None:
    metrics = EngineMetrics(DEFAULT_PATTERNS)
    metrics.finished(
        FinishedRequest(isl=10, osl=0, reason=FinishReason.ABORT, e2e_seconds=3.0, ttft_seconds=None, itl_seconds=None)
    )
    samples = samples_of(metrics.counts)
    assert value(samples, "tidegate_engine_e2e_seconds_count", pattern="ShortInShortOut") == 1
    assert value(samples, "tidegate_engine_finished_ttft_seconds_count", pattern="ShortInShortOut") == 0


@pytest.mark.parametrize(("tokens", "cell"), [(1, 0), (63, 0), (64, 1), (1023, 2), (1024, 3), (70_000, 6)])
def test_input_lengths_fall_into_the_cell_of_their_lower_edge(tokens: int, cell: int) -> None:
    assert isl_cell(tokens) == cell


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 300), max_size=30), st.lists(st.floats(0, 300), max_size=30))
def test_histograms_are_cumulative_inclusive_and_add_up(left: list[float], right: list[float]) -> None:
    histograms = [Histogram(TTFT_BUCKETS_SECONDS) for _ in range(2)]
    for histogram, values in zip(histograms, (left, right), strict=True):
        for seconds in values:
            histogram.observe(seconds)
    total = add_up(histograms)
    assert total.sum == pytest.approx(sum(left) + sum(right))
    for bound, count in total.cumulative():
        assert count == sum(seconds <= float(bound) for seconds in [*left, *right])


def test_host_memory_for_evicted_blocks_is_shown_where_there_is_some() -> None:
    host = HostUse(slots=10, used=4, stored_blocks=7, loaded_blocks=3, tokens_per_block=16, block_bytes=1000)
    samples = samples_of(now=replace(snapshot(), host=host))
    assert value(samples, "tidegate_engine_host_kv_blocks", state="free") == 6
    assert value(samples, "tidegate_engine_host_kv_bytes_total", direction="stored") == 7000
    assert value(samples, "tidegate_engine_host_kv_bytes_total", direction="loaded") == 3000
    assert value(samples, "tidegate_engine_host_cached_tokens_total") == 48
    assert not [sample for sample in samples_of() if "host_kv" in sample.name]


def test_what_two_processes_counted_is_shown_as_one() -> None:
    both = [EngineMetrics(DEFAULT_PATTERNS) for _ in range(2)]
    for number, metrics in enumerate(both):
        metrics.first_token(1, ttft_seconds=0.5, queue_seconds=None)
        metrics.finished(FinishedRequest(100, 20, FinishReason.STOP, 3.0, 0.5, 0.01))
        metrics.counts.generation_tokens += 10 + number
        metrics.counts.settings_changes["applied"] += number
    total = add_counts(both[0].counts, both[1].counts)
    samples = samples_of(total)
    assert value(samples, "tidegate_engine_generation_tokens_total") == 21
    assert value(samples, "tidegate_engine_config_updates_total", result="applied") == 1
    assert value(samples, "tidegate_engine_ttft_seconds_count", isl="64") == 2
    assert value(samples, "tidegate_engine_e2e_seconds_sum", pattern="ShortInShortOut") == 6.0
    assert value(samples, "tidegate_engine_requests_finished_total", isl="64", osl="16", reason="stop") == 2


async def test_the_counts_of_a_served_load_agree_with_what_was_asked(
    start_engine: StartEngine, fast_profile: Profile
) -> None:
    engine = await start_engine(profile=replace(fast_profile, kv_blocks=513, max_model_len=4096))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=60) as client:
        lengths = [(10, 5), (10, 20), (100, 5), (300, 70), (1500, 3), (1500, 1)]
        bodies = [
            {"model": "fast", "prompt": [index + 1] * isl, "max_tokens": osl}
            for index, (isl, osl) in enumerate(lengths)
        ]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * len(lengths)
        text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    prefix = "tidegate_engine_"
    assert value(samples, f"{prefix}requests_arrived_total", isl="0") == 2
    assert value(samples, f"{prefix}requests_arrived_total", isl="1024") == 2
    assert value(samples, f"{prefix}requests_finished_total", isl="256", osl="64", reason="length") == 1
    assert value(samples, f"{prefix}prompt_tokens_total") == sum(isl for isl, _ in lengths)
    assert value(samples, f"{prefix}generation_tokens_total") == sum(osl for _, osl in lengths)
    ttft = [sample.value for sample in samples if sample.name == f"{prefix}ttft_seconds_count"]
    itl = [sample.value for sample in samples if sample.name == f"{prefix}itl_seconds_count"]
    queue = [sample.value for sample in samples if sample.name == f"{prefix}queue_seconds_count"]
    assert sum(ttft) == sum(queue) == len(lengths)
    assert sum(itl) == sum(osl - 1 for _, osl in lengths)
    assert value(samples, f"{prefix}e2e_seconds_count", pattern="LongInShortOut") == 2
    assert value(samples, f"{prefix}kv_blocks", state="used") == 0
    blocks = [sample.value for sample in samples if sample.name == f"{prefix}kv_blocks"]
    assert sum(blocks) == 512
    assert value(samples, f"{prefix}step_model", term="base_seconds") == fast_profile.step.base_seconds


async def test_what_the_tokenizer_did_is_counted(start_engine: StartEngine) -> None:
    engine = await start_engine()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}") as client:
        await client.post("/tokenize", json={"model": "fast", "prompt": "x" * 1000})
        long = {"model": "fast", "prompt": "y" * 5000}
        assert (await client.post("/tokenize", json=long)).json()["count"] == 1250
        text = (await client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert value(samples, "tidegate_engine_tokenizer_characters_total") == 6000
    assert value(samples, "tidegate_engine_tokenizer_tokens_total") == 1500
    assert value(samples, "tidegate_engine_tokenizer_seconds_total") > 0


async def test_both_ports_expose_the_same_names(start_engine: StartEngine) -> None:
    engine = await start_engine()
    names = []
    for port in (engine.api_port, engine.admin_port):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            answer = await client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        names.append({line.split("{")[0].split()[0] for line in answer.text.splitlines() if line[0] != "#"})
    assert names[0] == names[1]
