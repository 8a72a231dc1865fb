"""How long a step takes before anything was measured: a roofline of GPU × model × precision × tensor-parallel size.

Pure. The result is a `StepModel` like those that engines fit; `believe` weighs the two against each other. A prior is a
belief and is labelled as one wherever it is used: `plan` prints it, `policy` may add a replica for it and takes none
away. Nothing here was fitted to whole engines, so that measured ones are a test of it (tests/bench/bench_plan.py).
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from tidegate_engine.steptime import MIN_SAMPLES, StepModel
from tidegate_operator.gpus import Gpu, find_gpu
from tidegate_operator.model_shapes import KV_VALUE_BYTES, ModelShape
from tidegate_operator.observation import EngineInfo

WEIGHT_BANDWIDTH = 0.80
"""Of the peak, when a matrix is read for few rows. Fitted to aiconfigurator's GEMM tables (m <= 64) as launch + bytes:
H100 0.86 in bf16 and 0.76 in fp8, H200 0.84 and 0.69, A100 0.72, L40S 0.81 and 0.83."""
ARITHMETIC = {2: 0.82, 1: 0.58}
POWER_LIMITED_ARITHMETIC = {2: 0.63, 1: 0.46}
"""Of the peak, by bytes a value, when a matrix is multiplied with many rows. The same tables at m >= 1024: H100 0.82 in
bf16 and 0.56 in fp8, H200 0.81 and 0.63, A100 0.84; L40S, which its power holds back, 0.63 and 0.46. An RTX PRO 6000,
which has power enough, reaches 0.84 (LLMServingSim's tables)."""
OVERLAP = 0.5
"""Of the rows whose products take as long as reading the weights, those that ride along for nothing: near that point
kernels take longer than either bound. Fits to the same tables: 160 of 325 rows on an H100, 128 of 227 on an H200, 96 of
169 on an A100, 128 of 355 on an L40S."""
KV_BANDWIDTH = 0.82
"""Of the peak, when decodes read their KV. aiconfigurator's attention tables, head size 128: H100 0.89, H200 0.82,
A100 0.66 to 0.77, L40S 0.82."""
ATTENTION_ARITHMETIC = 0.5
"""Of the 16-bit peak, in prefill: 0.39 at 2,048 tokens and 0.61 at 8,192 on an H100, 0.40 and 0.56 on an A100."""
LAYER_SECONDS = 30e-6
"""A layer's launches and small kernels: four products of 4 µs before their first byte, and decode attention's 13 µs
however little it reads (same tables)."""
HOST_SECONDS = 2e-3
"""What the host does between two steps: 1.9 ms for eight requests in vidur's CPU overheads (schedule, prepare, sample,
process)."""
SAMPLING_SECONDS, SAMPLING_BANDWIDTH, SAMPLING_VOCABULARY = 11.4e-6, 1.79e12, 128_256
"""A sequence's sampling, as fitted to a real vLLM on an RTX PRO 6000 (LLMServingSim's bench); it reads logits."""
MIXED_KV_SLOWDOWN = 0.8
"""Decode attention reads its KV 1.8 times slower in a step that also prefills (same bench: 1.6 to 2)."""
REDUCE_SECONDS, PCIE_REDUCE_SECONDS = 10e-6, 30e-6
"""An all-reduce's latency within a node, of which each layer has two: over NVLink with kernels of the engines' own
(aiconfigurator's systems), and as NCCL takes at least (vidur's tables)."""
NVLINK_BYTES_PER_SECOND = 200e9
"""Links from here on are NVLink."""
REDUCE_BANDWIDTH = 0.65
"""Of a link: 340 to 380 of 450 GB/s on a DGX H100, 152 of 300 on a DGX A100 (vidur's all-reduce tables)."""

PRIOR_ERROR = 0.25
"""Mean relative error that a prior is taken to have; tests/bench/bench_plan.py measures it."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """Weights of one precision that a step multiplies with."""

    precision: str
    bytes: float
    """Read in every step. A mixture's experts all are: at eight requests or more nearly each is chosen by one."""
    token_parameters: float
    """What a token is multiplied with: of a mixture the chosen experts alone."""
    sequence_parameters: float = 0.0
    """What only sampled rows are multiplied with: the head."""


@dataclass(frozen=True, slots=True)
class Work:
    """A model, as far as a step's time depends on it; of the whole model, however many GPUs share it."""

    matrices: tuple[Matrices, ...]
    kv_bytes_per_token: float
    attention_width: float
    """Σ over the layers of query heads × head size."""
    layers: int
    hidden: float
    vocab_size: int
    kv_heads: int


def work_of(shape: ModelShape, *, precision: str, kv_precision: str) -> Work:
    """The work of a model in a precision of `model_shapes.PRECISIONS`."""
    config = shape.config
    kinds = shape.parameters_by_kind
    head = config.vocab_size * config.hidden
    half = precision if precision in ("fp32", "fp16") else "bf16"
    token_parameters = kinds["attention"] + kinds["mlp"] * shape.active_mlp_share
    embedding_bytes = 0 if config.tied_head else _dense_bytes(head, half)
    head_bytes = _dense_bytes(head, half)
    layers = Matrices(precision, shape.weight_bytes(precision) - embedding_bytes - head_bytes, token_parameters)
    return Work(
        matrices=(layers, Matrices(half, head_bytes, 0.0, head)),
        kv_bytes_per_token=shape.kv_bytes_per_token(kv_precision),
        attention_width=sum(layer.heads for layer in config.layers) * config.head_size,
        layers=len(config.layers),
        hidden=config.hidden,
        vocab_size=config.vocab_size,
        kv_heads=shape.kv_heads,
    )


def _dense_bytes(parameters: int, precision: str) -> int:
    return parameters * KV_VALUE_BYTES[precision]


def arithmetic_of(gpu: Gpu, precision: str) -> float:
    """Operations a second that are reached in a precision. Raises KeyError when the GPU lacks it.

    int4 weights are multiplied in 16 bits, which are fp16 where there is no bf16; fp32 takes the tensor cores' TF32 at
    half their 16-bit rate.
    """
    shares = POWER_LIMITED_ARITHMETIC if gpu.power_limited else ARITHMETIC
    if precision in ("fp8", "int8"):
        return gpu.flops[precision] * shares[1]
    half = gpu.flops.get("bf16", gpu.flops["fp16"]) * shares[2]
    if precision == "fp32":
        return half / (2 if "bf16" in gpu.flops else 8)
    return half


def step_prior(work: Work, gpu: Gpu, *, tensor_parallel: int = 1) -> StepModel:
    """The roofline's step. Raises KeyError when the GPU lacks a precision of the work."""
    share = 1 / tensor_parallel
    bandwidth = gpu.bandwidth_bytes_per_second
    read = sum(part.bytes for part in work.matrices) * share / (bandwidth * WEIGHT_BANDWIDTH)
    arithmetic = sum(_seconds(gpu, part.precision, part.token_parameters * share) for part in work.matrices)
    heads = sum(_seconds(gpu, part.precision, part.sequence_parameters * share) for part in work.matrices)
    reduces = 2 * work.layers if tensor_parallel > 1 else 0
    reduce_seconds = REDUCE_SECONDS if gpu.link_bytes_per_second >= NVLINK_BYTES_PER_SECOND else PCIE_REDUCE_SECONDS
    # Each GPU sends and receives about twice its share of every row.
    reduce_row = 2 * (1 - share) * work.hidden * 2 / (gpu.link_bytes_per_second * REDUCE_BANDWIDTH) * reduces
    kv_share = max(share, 1 / work.kv_heads)
    kv = work.kv_bytes_per_token * kv_share / (bandwidth * KV_BANDWIDTH)
    sampling = SAMPLING_SECONDS * SAMPLING_BANDWIDTH / bandwidth * work.vocab_size / SAMPLING_VOCABULARY
    return StepModel(
        base_seconds=HOST_SECONDS + work.layers * LAYER_SECONDS + read + reduces * reduce_seconds,
        threshold_tokens=float(round(OVERLAP * read / arithmetic)),
        token_seconds=arithmetic + reduce_row,
        kv_token_seconds=kv,
        sequence_seconds=sampling + heads,
        attention_seconds=4 * work.attention_width * share / (gpu.flops["fp16"] * ATTENTION_ARITHMETIC),
        mixed_kv_token_seconds=MIXED_KV_SLOWDOWN * kv,
    )


def _seconds(gpu: Gpu, precision: str, parameters: float) -> float:
    """A row's products with so many parameters."""
    return 2 * parameters / arithmetic_of(gpu, precision) if parameters else 0.0


# --- what a running engine tells -----------------------------------------------------------------------------------

_WEIGHT_TYPES = (
    ("float8|fp8", "fp8", 1.0),
    ("int8", "int8", 1.0),
    ("int4|q4", "int4", 0.55),
    ("bfloat16|bf16", "bf16", 2.0),
    ("float16|fp16", "fp16", 2.0),
    ("float32|fp32", "fp32", 4.0),
)
"""What an engine calls its weights, the precision, and bytes a parameter with its scales."""


def prior_of_engine(engine: EngineInfo) -> StepModel | None:
    """The prior for an engine that has not fitted its own yet, from the sizes that it tells; None without a known GPU.

    Rougher than `step_prior` of a shape: parameters come from bytes, the width from parameters and layers.
    """
    gpu = find_gpu(engine.gpu_product) if engine.gpu_product else None
    kind = next((row for row in _WEIGHT_TYPES if re.match(row[0], engine.weight_dtype or "")), None)
    if gpu is None or kind is None or not engine.layers or engine.gpu_count < 1 or engine.weight_bytes <= 0:
        return None
    _, precision, bytes_each = kind
    if not gpu.has(precision) and precision != "int4":
        return None
    parameters = engine.weight_bytes / bytes_each
    width = math.sqrt(parameters / (12 * engine.layers))  # a layer of h has about 12 h² parameters
    work = Work(
        matrices=(Matrices(precision, engine.weight_bytes, parameters),),
        kv_bytes_per_token=engine.kv_token_bytes,
        attention_width=width * engine.layers,
        layers=engine.layers,
        hidden=width,
        vocab_size=SAMPLING_VOCABULARY,
        kv_heads=max(1, engine.gpu_count),
    )
    return step_prior(work, gpu, tensor_parallel=engine.gpu_count)


class Source(StrEnum):
    """Where a step model comes from."""

    PRIOR = "Prior"
    BLEND = "Blend"
    FIT = "Fit"


@dataclass(frozen=True, slots=True)
class Belief:
    """A step model, and how much of it was measured."""

    model: StepModel
    source: Source
    confidence: float
    """Weight of the measured part: 0 = the roofline alone, 1 = the fit alone."""


def believe(
    prior: StepModel | None, fit: StepModel | None, *, samples: float | None = None, residual_ratio: float | None = None
) -> Belief | None:
    """The fit and the prior, each weighed by its error; None when there is neither.

    A fit's error is its residual, and the prior's own share of doubt while there are few samples. A fit that does not
    say how many it has (a profile that was given to it) counts in full.
    """
    if fit is None:
        return None if prior is None else Belief(prior, Source.PRIOR, 0.0)
    if prior is None or samples is None:
        return Belief(fit, Source.FIT, 1.0)
    few = PRIOR_ERROR * math.sqrt(MIN_SAMPLES / max(1.0, samples))
    error = math.hypot(residual_ratio or 0.0, few)
    weight = PRIOR_ERROR**2 / (PRIOR_ERROR**2 + error**2)
    return Belief(blend((prior, 1 - weight), (fit, weight)), Source.BLEND, weight)


def blend(*parts: tuple[StepModel, float]) -> StepModel:
    """The weighted mean of models. The threshold keeps what long steps take: Σ w·c·(T - T0) for each."""

    def mean(name: str) -> float:
        return sum(weight * float(getattr(model, name)) for model, weight in parts)

    token = mean("token_seconds")
    thresholds = sum(weight * model.token_seconds * model.threshold_tokens for model, weight in parts)
    return StepModel(
        base_seconds=mean("base_seconds"),
        threshold_tokens=thresholds / token if token > 0 else 0.0,
        token_seconds=token,
        kv_token_seconds=mean("kv_token_seconds"),
        sequence_seconds=mean("sequence_seconds"),
        attention_seconds=mean("attention_seconds"),
        mixed_kv_token_seconds=mean("mixed_kv_token_seconds"),
    )
