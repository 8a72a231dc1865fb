"""The roofline prior, and how much a fit counts against it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.steptime import StepModel, StepShape, load_profile
from tidegate_operator.gpus import Gpu, find_gpu
from tidegate_operator.model_shapes import ModelShape, known_shape
from tidegate_operator.observation import EngineInfo
from tidegate_operator.prior import Source, believe, blend, prior_of_engine, step_prior, work_of


def gpu_of(name: str) -> Gpu:
    gpu = find_gpu(name)
    assert gpu is not None
    return gpu


def shape_of(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


def step_of(model: str, gpu: str, *, precision: str = "bf16", kv: str = "bf16", gpus: int = 1) -> StepModel:
    work = work_of(shape_of(model), precision=precision, kv_precision=kv)
    return step_prior(work, gpu_of(gpu), tensor_parallel=gpus)


def test_a_step_of_llama_2_7b_on_an_h100_worked_out_by_hand() -> None:
    # Read: all but the embedding, 13,476,831,232 - 2 x 32,000 x 4,096 = 13,214,687,232 bytes at 0.80 of 3.35 TB/s:
    # 4.931 ms. Host 2 ms, 32 layers x 30 µs = 0.96 ms: 7.891 ms.
    step = step_of("Llama-2-7B", "H100 SXM")
    assert step.base_seconds == pytest.approx(0.007891, rel=1e-3)
    # A token: 2 x (2,147,483,648 + 4,328,521,728) operations at 0.82 of 989 TFLOP/s: 15.97 µs.
    assert step.token_seconds == pytest.approx(15.97e-6, rel=1e-3)
    # Half of the tokens whose products take as long as the reading: 0.5 x 4.931 ms / 15.97 µs = 154.
    assert step.threshold_tokens == 154
    # KV of a token: 524,288 bytes at 0.82 of 3.35 TB/s: 190.9 ns; 0.8 of that more beside prefill.
    assert step.kv_token_seconds == pytest.approx(190.9e-9, rel=1e-3)
    assert step.mixed_kv_token_seconds == pytest.approx(0.8 * 190.9e-9, rel=1e-3)
    # A pair of tokens: 4 x 32 layers x 4,096 at half of 989 TFLOP/s: 1.060 ns.
    assert step.attention_seconds == pytest.approx(1.060e-9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "model", "gpu", "precision"),
    [
        ("h100-llama-3.1-8b", "Llama-3.1-8B", "H100 SXM", "bf16"),
        ("l4-llama-3.1-8b", "Llama-3.1-8B", "L4", "fp8"),
        ("l4-qwen2.5-14b", "Qwen2.5-14B", "L4", "fp8"),
    ],
)
def test_the_prior_is_near_the_engines_own_profiles(name: str, model: str, gpu: str, precision: str) -> None:
    profile, step = load_profile(name).step, step_of(model, gpu, precision=precision)
    decode = StepShape(tokens=32, decode_kv_tokens=32_000, sequences=32, prefill_attention=0, has_prefill=False)
    prefill = StepShape(tokens=2048, decode_kv_tokens=0, sequences=1, prefill_attention=2048**2 / 2, has_prefill=True)
    for shape in (decode, prefill):
        assert step.seconds(shape) == pytest.approx(profile.seconds(shape), rel=0.25)


def test_more_gpus_read_less_each_and_pay_for_adding_up() -> None:
    alone, pair, eight = (step_of("Llama-3.1-70B", "H200", precision="fp8", gpus=gpus) for gpus in (1, 2, 8))
    assert alone.base_seconds > pair.base_seconds > eight.base_seconds > alone.base_seconds / 8
    assert pair.kv_token_seconds == pytest.approx(alone.kv_token_seconds / 2)
    # Over PCIe the sums of a small model cost more than the reading that is saved.
    assert step_of("SmolLM2-135M", "L4", gpus=1).base_seconds < step_of("SmolLM2-135M", "L4", gpus=8).base_seconds


def test_key_value_heads_that_are_fewer_than_gpus_are_read_by_several() -> None:
    four, eight = (step_of("Qwen2.5-7B", "H100 SXM", gpus=gpus).kv_token_seconds for gpus in (4, 8))
    assert four == eight


def test_a_mixture_reads_all_experts_and_multiplies_with_the_chosen() -> None:
    mixture, dense = step_of("Mixtral-8x7B", "H200"), step_of("Mistral-7B", "H200")
    assert mixture.base_seconds > 4 * dense.base_seconds
    assert mixture.token_seconds < 2 * dense.token_seconds


def test_fewer_bits_read_faster_and_a_missing_precision_has_no_prior() -> None:
    assert step_of("Llama-3.1-8B", "L4", precision="int8").base_seconds < step_of("Llama-3.1-8B", "L4").base_seconds
    assert step_of("Llama-3.1-8B", "L4").base_seconds < step_of("Llama-3.1-8B", "L4", precision="fp32").base_seconds
    with pytest.raises(KeyError):
        step_of("Llama-3.1-8B", "A100 80GB", precision="fp8")


# --- from an engine's word -------------------------------------------------------------------------------------------


def engine_of(**changes: object) -> EngineInfo:
    profile = load_profile("h100-llama-3.1-8b")
    known: dict[str, object] = {
        "kv_blocks": profile.kv_blocks, "block_tokens": 16, "max_model_len": 8192,
        "kv_token_bytes": profile.kv_token_bytes, "weight_bytes": profile.weight_bytes, "gpu_product": profile.gpu,
        "gpu_count": 1, "version": "", "step_model": None, "step_model_residual_ratio": None,
        "step_model_samples": None, "layers": profile.layers, "weight_dtype": profile.weight_dtype,
    }  # fmt: skip
    return EngineInfo(**{**known, **changes})  # type: ignore[arg-type]


def test_an_engine_that_tells_its_sizes_has_a_prior_near_that_of_its_shape() -> None:
    rough, exact = prior_of_engine(engine_of()), step_of("Llama-3.1-8B", "H100 SXM")
    assert rough is not None
    for name in ("base_seconds", "token_seconds", "kv_token_seconds", "attention_seconds"):
        assert getattr(rough, name) == pytest.approx(getattr(exact, name), rel=0.25), name


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_product": None},
        {"gpu_product": "AMD-Instinct-MI300X"},
        {"gpu_count": 0},
        {"layers": None},
        {"weight_dtype": "nf4"},
        {"gpu_product": "NVIDIA-A100-SXM4-80GB", "weight_dtype": "float8_e4m3fn"},
    ],
)
def test_what_is_not_told_is_not_guessed(changes: dict[str, object]) -> None:
    assert prior_of_engine(engine_of(**changes)) is None


# --- prior against fit -----------------------------------------------------------------------------------------------

PRIOR, FIT = step_of("Llama-3.1-8B", "H100 SXM"), load_profile("h100-llama-3.1-8b").step


def test_nothing_known_is_no_belief_and_a_prior_alone_is_labelled() -> None:
    assert believe(None, None) is None
    belief = believe(PRIOR, None)
    assert belief is not None and (belief.source, belief.confidence, belief.model) == (Source.PRIOR, 0.0, PRIOR)


def test_a_fit_alone_counts_in_full() -> None:
    for belief in (believe(None, FIT, samples=64, residual_ratio=0.5), believe(PRIOR, FIT)):
        assert belief is not None and (belief.source, belief.confidence, belief.model) == (Source.FIT, 1.0, FIT)


def test_confidence_grows_with_samples_and_falls_with_the_residual() -> None:
    def confidence(samples: float, residual: float) -> float:
        belief = believe(PRIOR, FIT, samples=samples, residual_ratio=residual)
        assert belief is not None and belief.source is Source.BLEND
        return belief.confidence

    assert confidence(64, 0.02) <= 0.5
    assert confidence(64, 0.02) < confidence(640, 0.02) < confidence(6400, 0.02)
    assert confidence(100_000, 0.02) > 0.98
    assert confidence(100_000, 0.5) < 0.25


models = st.builds(
    StepModel,
    base_seconds=st.floats(1e-3, 0.1),
    threshold_tokens=st.floats(0, 512),
    token_seconds=st.floats(1e-6, 1e-3),
    kv_token_seconds=st.floats(0, 1e-6),
    sequence_seconds=st.floats(0, 1e-4),
    attention_seconds=st.floats(0, 1e-8),
    mixed_kv_token_seconds=st.floats(0, 1e-6),
)


@given(models, models, st.floats(0.01, 0.99))
def test_a_blend_predicts_the_weighted_mean_of_long_steps(left: StepModel, right: StepModel, weight: float) -> None:
    both = blend((left, weight), (right, 1 - weight))
    shape = StepShape(
        tokens=4096, decode_kv_tokens=20_000, sequences=20, prefill_attention=4096**2 / 2, has_prefill=True
    )
    expected = weight * left.seconds(shape) + (1 - weight) * right.seconds(shape)
    assert both.seconds(shape) == pytest.approx(expected, rel=1e-6)
