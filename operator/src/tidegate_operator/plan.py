"""Which GPUs, how many, in which precision and with which batch settings: the answer before anything runs.

Pure. Memory is arithmetic, step times are the roofline's (`prior`), rates and latencies `capacity`'s, the same maths by
which the operator scales. Called by `plan_command`; whatever fits nowhere is told with its reason, never left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_engine.settings import DEFAULT_SETTINGS, BatchSettings, Envelope, find_violation
from tidegate_engine.steptime import Profile, StepModel
from tidegate_operator.capacity import (
    KV_RESERVE,
    Capacity,
    Prediction,
    Scenario,
    Targets,
    best_settings,
    capacity_of,
    predict,
    scenario,
)
from tidegate_operator.goals import in_short
from tidegate_operator.gpus import Gpu, Prices
from tidegate_operator.mix import Mix
from tidegate_operator.model_shapes import KV_VALUE_BYTES, ModelShape
from tidegate_operator.observation import Bottleneck, EngineInfo
from tidegate_operator.prior import step_prior, work_of

USABLE_MEMORY = 0.9
"""Of a GPU's memory; the rest is the driver's, fragmentation and what other processes take."""
RUNTIME_BYTES = 512 << 20
"""Kernels, their handles and recorded graphs."""
REDUCE_BYTES = 400 << 20
"""Buffers of all-reduces in each GPU of a group (aiconfigurator's systems: 342 to 392 MiB)."""
BLOCK_TOKENS = 16
HOURS = 3600.0
COARSE_SETTINGS = tuple(
    BatchSettings(sequences, tokens, chunk)
    for sequences, tokens, chunk in (
        (256, 8192, 2048), (256, 2048, 1024), (128, 1024, 512), (64, 4096, 1024), (64, 512, 512), (16, 512, 256),
    )
)  # fmt: skip
"""Tried for every GPU; the whole envelope is searched for the one that is chosen."""


@dataclass(frozen=True, slots=True)
class Held:
    """What weights and KV cache are held in: keys of `model_shapes.PRECISIONS` and `KV_VALUE_BYTES`."""

    weights: str
    kv: str


def held(weights: str, *, kv: str = "auto") -> Held:
    """`auto` KV is in fp32 beside fp32 weights and in 16 bits else."""
    if kv == "auto":
        kv = weights if weights in ("fp32", "fp16") else "bf16"
    return Held(weights, kv)


# --- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How each GPU of a replica is filled, and the tokens that the replica's KV cache holds."""

    tensor_parallel: int
    usable_bytes: float
    weight_bytes: float
    workspace_bytes: float
    kv_token_bytes: float
    """In each GPU: key-value heads that are fewer than GPUs are held more than once."""

    @property
    def kv_bytes(self) -> float:
        """What is left for the cache; below zero when the weights alone do not fit."""
        return self.usable_bytes - self.weight_bytes - self.workspace_bytes

    @property
    def kv_tokens(self) -> float:
        return max(0.0, self.kv_bytes / self.kv_token_bytes)


def memory_of(
    shape: ModelShape, gpu: Gpu, *, kinds: Held, tensor_parallel: int = 1, envelope: Envelope | None = None
) -> MemoryPlan:
    """The memory of one GPU among `tensor_parallel`."""
    envelope = envelope or Envelope()
    return MemoryPlan(
        tensor_parallel=tensor_parallel,
        usable_bytes=USABLE_MEMORY * gpu.memory_bytes,
        weight_bytes=shape.weight_bytes(kinds.weights) / tensor_parallel,
        workspace_bytes=workspace_bytes(shape, envelope, tensor_parallel=tensor_parallel),
        kv_token_bytes=shape.kv_bytes_per_token(kinds.kv) * max(1 / tensor_parallel, 1 / shape.kv_heads),
    )


def workspace_bytes(shape: ModelShape, envelope: Envelope, *, tensor_parallel: int) -> float:
    """Beside weights and KV: the largest step's activations in 16 bits, its logits thrice in 32, and what is fixed.

    Buffers are sized by the envelope's upper ends, as the engine's are.
    """
    config = shape.config
    tokens, sequences = envelope.max_num_batched_tokens[1], envelope.max_num_seqs[1]
    inner = max(layer.inner * (layer.experts.chosen if layer.experts else 1) for layer in config.layers)
    activations = 2 * tokens * (4 * config.hidden + 3 * inner / tensor_parallel)
    logits = 4 * sequences * config.vocab_size * 3
    return activations + logits + RUNTIME_BYTES + (REDUCE_BYTES if tensor_parallel > 1 else 0)


def group_sizes(shape: ModelShape, gpu: Gpu) -> list[int]:
    """Tensor-parallel sizes: powers of two within a node that divide the query heads of every layer."""
    heads = [layer.heads for layer in shape.config.layers]
    sizes = [1 << power for power in range(gpu.gpus_per_node.bit_length())]
    return [size for size in sizes if size <= gpu.gpus_per_node and all(count % size == 0 for count in heads)]


# --- the question --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load:
    """What must be carried; None = not asked for. Without any figure, one replica at its largest rate is planned."""

    requests_per_second: float | None = None
    concurrency: float | None = None
    """Requests in progress at once."""
    tokens_per_second: float | None = None
    """Output tokens of all requests together."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a user asks."""

    shape: ModelShape
    mix: Mix
    targets: Targets
    load: Load
    gpus: tuple[Gpu, ...]
    precisions: tuple[str, ...]
    kv: str = "auto"
    prices: Prices = field(default_factory=Prices)
    headroom_percent: float = 15.0
    envelope: Envelope = field(default_factory=Envelope)

    @property
    def longest_tokens(self) -> float:
        return max(cell.isl + cell.osl for cell in self.mix.cells)

    @property
    def mean_osl(self) -> float:
        return sum(cell.share * cell.osl for cell in self.mix.cells)

    @property
    def keep(self) -> float:
        return 1 - self.headroom_percent / 100


def with_implied_itl(question: Question) -> Question:
    """So many answers at once at so many tokens a second are a time between two tokens: a goal, if none is set."""
    load = question.load
    if question.targets.itl_seconds is not None or not load.concurrency or not load.tokens_per_second:
        return question
    itl_seconds = load.concurrency / load.tokens_per_second
    return replace(question, targets=replace(question.targets, itl_seconds=itl_seconds))


# --- the answer ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """A GPU and precision that cannot be used, and why."""

    gpu: Gpu
    precision: str
    reason: str


@dataclass(frozen=True, slots=True)
class Option:
    """A way to serve the load."""

    gpu: Gpu
    kinds: Held
    memory: MemoryPlan
    step: StepModel
    settings: BatchSettings
    capacity: Capacity
    """Of one replica."""
    requests_per_second: float
    """What all replicas carry together."""
    replicas: int
    prediction: Prediction
    """Of a replica at its share of that rate."""
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    """Output tokens; None = the GPU has no price."""

    @property
    def gpu_count(self) -> int:
        return self.replicas * self.memory.tensor_parallel

    @property
    def misses(self) -> tuple[str, ...]:
        """Goals out of reach on this GPU: `ttft`, `itl`, `queue`."""
        return self.capacity.unreachable


@dataclass(frozen=True, slots=True)
class Answer:
    """Every option, the best of each GPU and precision; the chosen one first, None when none reaches the goals."""

    options: tuple[Option, ...]
    refusals: tuple[Refusal, ...]
    choice: Option | None
    why: str


def plan(question: Question) -> Answer:
    """The options, cheapest first, and the choice among them."""
    question = with_implied_itl(question)
    options: list[Option] = []
    refusals: list[Refusal] = []
    for gpu in question.gpus:
        for precision in _tried_precisions(question, gpu):
            found = _best_option(question, gpu, held(precision, kv=question.kv))
            if isinstance(found, Option):
                options.append(found)
            else:
                refusals.append(found)
    options.sort(key=lambda option: _rank(question, option))
    reaching = [option for option in options if not option.misses and option.capacity.requests_per_second > 0]
    if not reaching:
        return Answer(tuple(options), tuple(refusals), None, _why_none(options))
    choice = _refined(question, reaching[0])
    others = [option for option in options if option is not reaching[0]]
    return Answer((choice, *others), tuple(refusals), choice, _why(question, choice, reaching[1:]))


def _tried_precisions(question: Question, gpu: Gpu) -> tuple[str, ...]:
    """What was asked for, and fp16 where bf16 was and the GPU has none."""
    asked = question.precisions
    stands_in = "bf16" in asked and not gpu.has("bf16") and "fp16" not in asked
    return (*asked, "fp16") if stands_in else asked


def missing_precision(gpu: Gpu, kinds: Held) -> str | None:
    """Why the GPU cannot compute in the weights' precision; None when it can. int4 is multiplied in 16 bits."""
    if kinds.weights == "int4" or gpu.has(kinds.weights):
        return None
    return f"{gpu.name} ({gpu.architecture}) has no {kinds.weights} in its tensor cores; it has {', '.join(gpu.flops)}"


def _best_option(question: Question, gpu: Gpu, kinds: Held) -> Option | Refusal:
    reason = missing_precision(gpu, kinds)
    if reason is not None:
        return Refusal(gpu, kinds.weights, reason)
    best: Option | None = None
    memory = None
    for size in group_sizes(question.shape, gpu):
        memory = memory_of(question.shape, gpu, kinds=kinds, tensor_parallel=size, envelope=question.envelope)
        if memory.kv_tokens < KV_RESERVE * question.longest_tokens:
            continue
        option = _option(question, gpu, kinds=kinds, memory=memory)
        if best is None or _rank(question, option) < _rank(question, best):
            best = option
        elif not best.misses:
            break  # larger groups reach no more and cost more for it
    if best is None:
        assert memory is not None
        return Refusal(gpu, kinds.weights, _does_not_fit(question, memory))
    return best


def _does_not_fit(question: Question, memory: MemoryPlan) -> str:
    parts = (
        f"{_gb(memory.weight_bytes)} of weights and {_gb(memory.workspace_bytes)} of workspace in each of "
        f"{memory.tensor_parallel} GPUs, of which {_gb(memory.usable_bytes)} can be used"
    )
    if memory.kv_bytes <= 0:
        return f"does not fit: {parts}"
    needed = f"one request needs {question.longest_tokens:,.0f}"
    return f"the KV cache would hold {memory.kv_tokens:,.0f} tokens, and {needed}: {parts}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _option(question: Question, gpu: Gpu, *, kinds: Held, memory: MemoryPlan) -> Option:
    work = work_of(question.shape, precision=kinds.weights, kv_precision=kinds.kv)
    step = step_prior(work, gpu, tensor_parallel=memory.tensor_parallel)
    scene = _scene(question, step, memory)
    tried = [(settings, capacity_of(scene, settings)) for settings in COARSE_SETTINGS if _allowed(question, settings)]
    if not tried:
        tried = [(DEFAULT_SETTINGS, capacity_of(scene, DEFAULT_SETTINGS))]
    settings, capacity = max(tried, key=lambda item: (-len(item[1].unreachable), item[1].requests_per_second))
    bare = Option(
        gpu=gpu,
        kinds=kinds,
        memory=memory,
        step=step,
        settings=settings,
        capacity=capacity,
        requests_per_second=0.0,
        replicas=0,
        prediction=Prediction(None, None, None, None, None),
        cost_per_hour=None,
        cost_per_million_tokens=None,
    )
    return _sized(question, bare, scene)


def _allowed(question: Question, settings: BatchSettings) -> bool:
    return find_violation(settings, question.envelope) is None


def _scene(question: Question, step: StepModel, memory: MemoryPlan) -> Scenario:
    engine = EngineInfo(
        kv_blocks=int(memory.kv_tokens // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_model_len=question.shape.config.context_tokens,
        kv_token_bytes=round(memory.kv_token_bytes),
        weight_bytes=round(memory.weight_bytes),
        gpu_product=None,
        gpu_count=memory.tensor_parallel,
        version="",
        step_model=step,
        step_model_residual_ratio=None,
        step_model_samples=None,
    )
    scene = scenario(step, engine, mix=question.mix, targets=question.targets)
    assert scene is not None  # a question has a mix
    return scene


def _refined(question: Question, option: Option) -> Option:
    """The same option with the best settings of the whole envelope."""
    scene = _scene(question, option.step, option.memory)
    best = best_settings(scene, question.envelope, present=option.settings)
    if best.capacity.unreachable or best.capacity.requests_per_second < option.capacity.requests_per_second:
        return option
    return _sized(question, replace(option, settings=best.settings, capacity=best.capacity), scene)


def _sized(question: Question, option: Option, scene: Scenario) -> Option:
    """Replicas for the load, what they will see, and what they cost."""
    usable = option.capacity.requests_per_second * question.keep
    rate, replicas = _replicas(question, option, scene=scene, usable=usable)
    each = rate / replicas if replicas else 0.0
    price = question.prices.of(option.gpu)
    hourly = None if price is None else price * replicas * option.memory.tensor_parallel
    tokens = rate * question.mean_osl * HOURS / 1e6
    return replace(
        option,
        requests_per_second=rate,
        replicas=replicas,
        prediction=predict(scene, option.settings, each) if each > 0 else option.prediction,
        cost_per_hour=hourly,
        cost_per_million_tokens=hourly / tokens if hourly is not None and tokens > 0 else None,
    )


def _replicas(question: Question, option: Option, *, scene: Scenario, usable: float) -> tuple[float, int]:
    """The whole rate, and the replicas that carry it."""
    if usable <= 0:
        return 0.0, 0
    load = question.load
    rates = [load.requests_per_second or 0.0, (load.tokens_per_second or 0.0) / question.mean_osl]
    rate = max(rates)
    running = predict(scene, option.settings, usable).running
    replicas = max(1, math.ceil(rate / usable - 1e-9))
    if load.concurrency is not None and running:
        if rate <= 0:
            # As many as are asked for at once, each as long as it takes under the goals.
            replicas = max(1, math.ceil(load.concurrency / running - 1e-9))
            return load.concurrency / running * usable, replicas
        replicas = max(replicas, math.ceil(load.concurrency / _slots(option, scene) - 1e-9))
    return (rate, replicas) if rate > 0 else (usable, 1)


def _slots(option: Option, scene: Scenario) -> float:
    """Requests that one replica can have in progress: by its settings and by its KV cache."""
    by_kv = scene.kv_tokens / (KV_RESERVE * (scene.context + scene.kv_slack_tokens))
    return max(1.0, min(float(option.settings.max_num_seqs), by_kv))


# --- the choice ----------------------------------------------------------------------------------------------------


def _rank(question: Question, option: Option) -> tuple[float, ...]:
    """Goals first, then money, then GPUs. Without a load options carry different rates: a token's price compares."""
    missing = len(option.misses) or (0 if option.capacity.requests_per_second > 0 else 3)
    money = option.cost_per_million_tokens if question.load == Load() else option.cost_per_hour
    return (missing, math.inf if money is None else money, option.gpu_count)


def _why(question: Question, choice: Option, others: Sequence[Option]) -> str:
    """In words, without the choice itself: why it, what comes next, and what bounds it."""
    if choice.cost_per_hour is None:
        return f"{_achieves(question)}, and no price is known; a replica is {_bound(choice)}"
    parts = [f"{_achieves(question)} for the least money"]
    rival = next((option for option in others if option.gpu is not choice.gpu), None)
    if rival is not None and rival.cost_per_million_tokens and choice.cost_per_million_tokens:
        more = rival.cost_per_million_tokens / choice.cost_per_million_tokens - 1
        parts.append(f"the next GPU, {describe(rival)}, costs {100 * more:.0f} % more a token")
    parts.append(f"a replica is {_bound(choice)}")
    return "; ".join(parts)


BOUND_BY: Mapping[Bottleneck, str] = {
    Bottleneck.PREFILL: "the reading of prompts",
    Bottleneck.DECODE: "decoding",
    Bottleneck.KV: "the KV cache's room",
    Bottleneck.QUEUE: "the wait for one of its batch's places",
    Bottleneck.NONE: "nothing that is known",
}


def _achieves(question: Question) -> str:
    return "it carries the load" if question.targets == Targets() else "it reaches the goals"


def _bound(option: Option) -> str:
    """Where a replica's time or room goes, and the goal that a higher rate would miss."""
    capacity = option.capacity
    goal = f" and by the goal for {in_short(capacity.binding)}" if capacity.binding else ""
    return f"bound by {BOUND_BY[capacity.bottleneck]}{goal}"


def _why_none(options: Sequence[Option]) -> str:
    if not options:
        return "the model fits on none of these GPUs in these precisions"
    closest = options[0]
    missed = ", ".join(in_short(goal) for goal in closest.misses) or "any rate at all"
    return (
        f"no option reaches the goals: the cheapest of those that miss the fewest, {describe(closest)}, misses the "
        f"goal for {missed}; idle, it would take "
        f"{closest.capacity.idle_ttft_seconds * 1000:.0f} ms to the first token and "
        f"{closest.capacity.idle_itl_seconds * 1000:.0f} ms between two"
    )


def describe(option: Option) -> str:
    """`3 replicas of 2 x L40S in fp8`."""
    count, size = option.replicas, option.memory.tensor_parallel
    gpus = option.gpu.name if size == 1 else f"{size} x {option.gpu.name}"
    return f"{count} replica{'' if count == 1 else 's'} of {gpus} in {option.kinds.weights}"


KV_PRECISIONS = ("auto", *KV_VALUE_BYTES)


# --- the choice as a modelled engine ---------------------------------------------------------------------------------

LOAD_BYTES_PER_SECOND = 1.5e9
"""A local disk; the profiles that come with the engine are made with it too."""
WARMUP_SECONDS = 2.0
_ENGINE_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


def profile_of(question: Question, option: Option) -> Profile:
    """One replica as `tidegate-engine serve --runner modelled` and `tidegate simulate` take it."""
    shape, memory, config = question.shape, option.memory, question.shape.config
    guess = f"the roofline of {option.gpu.name} x {memory.tensor_parallel} (tidegate plan); nothing was measured"
    return Profile(
        name=f"{option.gpu.name}-{shape.name}-{option.kinds.weights}".lower().replace(" ", "-"),
        gpu=option.gpu.name,
        gpus=memory.tensor_parallel,
        model=shape.name,
        layers=len(config.layers),
        kv_heads=shape.kv_heads,
        head_size=config.head_size,
        vocab_size=config.vocab_size,
        weight_dtype=_ENGINE_TYPES.get(option.kinds.weights, option.kinds.weights),
        kv_dtype=_ENGINE_TYPES.get(option.kinds.kv, option.kinds.kv),
        weight_bytes=shape.weight_bytes(option.kinds.weights),
        kv_token_bytes=shape.kv_bytes_per_token(option.kinds.kv),
        kv_blocks=int(memory.kv_tokens // BLOCK_TOKENS),
        block_tokens=BLOCK_TOKENS,
        max_model_len=config.context_tokens,
        start_seconds={
            "weights": round(memory.weight_bytes / LOAD_BYTES_PER_SECOND, 1),
            "warmup": WARMUP_SECONDS,
        },
        step=option.step,
        source=dict.fromkeys((*option.step.as_dict(), "kv_blocks", "start_seconds"), guess),
    )
