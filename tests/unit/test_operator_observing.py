"""What a pass makes of an engine's word: the fitted step model, weighed against the roofline's."""

from dataclasses import replace

import pytest

from tidegate_engine.steptime import TERMS, load_profile
from tidegate_operator.api import parse_spec
from tidegate_operator.demand import Measured, PodWindow
from tidegate_operator.observation import EngineInfo
from tidegate_operator.observing import Facts, Workload, observe
from tidegate_operator.prior import believe, prior_of_engine

NOW = 1_700_000_000.0
H100 = load_profile("h100-llama-3.1-8b")
SPEC = parse_spec({"model": {"uri": "file:///models/m.gguf"}})
ENGINE = EngineInfo(
    kv_blocks=H100.kv_blocks,
    block_tokens=16,
    max_model_len=8192,
    kv_token_bytes=H100.kv_token_bytes,
    weight_bytes=H100.weight_bytes,
    gpu_product=H100.gpu,
    gpu_count=1,
    version="",
    step_model=None,
    step_model_residual_ratio=None,
    step_model_samples=None,
    layers=H100.layers,
    weight_dtype=H100.weight_dtype,
)


def fitted(samples: float, residual: float) -> Measured:
    """A pod whose metrics carry a fit: the H100's own."""
    values: dict[tuple[str, ...], float] = {("step_model", term): getattr(H100.step, term) for term in TERMS}
    values |= {("step_model_samples", ""): samples, ("step_model_residual_ratio", ""): residual}
    return Measured((PodWindow("pod-0", NOW, 60.0, 5, values),))


def engine_of(info: EngineInfo | None, measured: Measured) -> EngineInfo | None:
    return observe(SPEC, Facts(now=NOW, replicas=(), measured=measured, info=info, workload=Workload(1))).engine


def test_before_a_fit_the_step_model_is_unknown_and_the_prior_is_beside_it() -> None:
    engine = engine_of(ENGINE, Measured())
    assert engine is not None
    assert engine.step_model is None and engine.step_model_confidence is None
    assert engine.prior == prior_of_engine(ENGINE) is not None


def test_a_fit_with_few_samples_is_weighed_and_one_with_many_is_nearly_alone() -> None:
    few, many = (engine_of(ENGINE, fitted(samples, 0.02)) for samples in (64.0, 50_000.0))
    assert few is not None and many is not None
    expected = believe(few.prior, H100.step, samples=64, residual_ratio=0.02)
    assert expected is not None and few.step_model == expected.model
    assert few.step_model_confidence == expected.confidence < 0.5
    assert many.step_model_confidence is not None and many.step_model_confidence > 0.98
    assert many.step_model is not None
    assert many.step_model.base_seconds == pytest.approx(H100.step.base_seconds, rel=0.01)


def test_without_a_known_gpu_the_fit_is_taken_as_it_is() -> None:
    engine = engine_of(replace(ENGINE, gpu_product=None), fitted(64, 0.3))
    assert engine is not None
    assert (engine.step_model, engine.step_model_confidence, engine.prior) == (H100.step, 1.0, None)


def test_no_pod_that_answers_is_no_engine() -> None:
    assert engine_of(None, fitted(1000, 0.01)) is None
