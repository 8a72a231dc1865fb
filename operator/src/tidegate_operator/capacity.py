"""The performance maths of one replica: latency at a load, the largest load under the targets, the best settings.

Pure. Steady state of continuous batching: a step carries every running decode and the prefill chunks of the prompts
being read in (`Load`); how these prompts crowd is `crowd`'s. Everything rises with the load, so the largest one is
found by bisection. Works on the joint mix, cell by cell, never on one mean length. Called by `policy` and `tuning`;
held against the real scheduler by `tidegate_sim.saturation`.

Formulas (rate λ of one replica, step time t, Σ over cells weighted by share, D decode steps, P prompt tokens, C chunks
of a prompt): decodes in a step N = λ·D·t; prompts read in a step n = λ·t·Σ C; share of steps with prefill q = 1 - e^-n;
t = q·step(N, λ·P·t/q) + (1 - q)·step(N, 0). Slots: min(max_num_seqs, KV pool / KV of a sequence). ITL: the steps of the
crowd's distribution. TTFT: the running step, a slot, and a prompt's chunks in steps as long as its crowd makes them.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tidegate_engine.settings import BatchSettings, Envelope, Pattern, pattern_of
from tidegate_engine.steptime import StepModel, StepShape
from tidegate_operator.crowd import NEGLIGIBLE, Crowd, Pace, crowd_at
from tidegate_operator.mix import Cell, Mix
from tidegate_operator.observation import Bottleneck, EngineInfo

MISSED_SHARE = 0.05
"""Targets are for the 95th percentile."""
Z95 = 1.645
MAX_UTILISATION = 0.95
STEP_PARTS = (1 / 6, 1 / 2, 5 / 6)
"""How much of the running step is left when a request comes: any part alike, here by thirds."""
KV_RESERVE = 1.2
"""KV of a sequence counts for this much more: admission keeps blocks back for what running requests still write. Where
requests are spread over very many replicas, that evens out."""
STALL_FACTOR, STALL_SHARE = 2, 0.005
"""No more than this share of the steps may last longer than this multiple of the ITL target: a 95th percentile alone
would allow it."""
IDLE_CHUNK_TOKENS = 2048.0
CHUNK_SLACK = 0.02
"""A last chunk smaller than this share of one is not counted as a step: chunks end at whole blocks anyway."""
SMALLEST_RATE_SHARE = 0.02
IDLE_RATE = 1e-6
UNREACHABLE_SLACK = 1.5
"""A target that even a nearly idle replica misses is replaced by this multiple of what that replica reaches."""
SIZE_BIAS = 0.005
"""A doubling of a setting must buy at least this share of the rate: small batches keep bursts harmless."""
FULL_BATCH_EXPONENT = 0.5
"""Weight of the ITL with every slot taken, against the rate."""
MOST_POINTS = 800
"""A search looks at about so many settings at first."""
BEYOND = 1.01
"""A rate this much above the largest misses the goal that binds."""
FASTER = 1.02
"""Settings must be faster by so much to count as that: it spares most of the bisections."""
RATE_KEPT = 0.95
"""Settings that keep this share of the largest rate may be chosen for being safer in an overload."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Goals for the 95th percentiles, in seconds; None = no goal."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    queue_seconds: float | None = None
    end_to_end_seconds: float | None = None
    idle_factor: float = 0.0
    """A prompt's goal on TTFT is never less than this multiple of what an idle replica takes to read it."""


@dataclass(frozen=True, slots=True)
class PatternTargets:
    """The query patterns, and the goals of those that have their own. Such a pattern is judged by itself."""

    patterns: tuple[Pattern, ...] = ()
    own: tuple[tuple[str, Targets], ...] = ()


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one cell: share, prompt tokens to compute (after the prefix cache), whole prompt, decode steps."""

    share: float
    prefill_tokens: float
    isl: float
    decode_steps: float
    attention: float
    mean_context: float
    pattern: str = ""
    """Set when its pattern has goals of its own."""

    def size(self) -> "Size":
        return Size(self.share, self.prefill_tokens, self.isl, self.attention)


@dataclass(frozen=True, slots=True)
class Size:
    """Prompts of one length: share of the requests, tokens to compute, whole prompt, Σ of the attention."""

    share: float
    prefill_tokens: float
    isl: float
    attention: float

    def chunks(self, chunk_tokens: float) -> float:
        """Steps in which one is read."""
        return max(1.0, math.ceil(self.prefill_tokens / chunk_tokens - CHUNK_SLACK))

    def idle_seconds(self, step: StepModel) -> float:
        """Until its first token on an idle replica, in chunks that no settings change: a goal may hang on it."""
        chunks = self.chunks(IDLE_CHUNK_TOKENS)
        shape = StepShape(self.prefill_tokens / chunks, 0.0, 1.0, self.attention / chunks, True)
        return chunks * step.seconds(shape)


@dataclass(frozen=True, slots=True)
class Group:
    """Requests that are judged together: those of a pattern with its own goals, or all the rest. Shares sum to one."""

    pattern: str
    targets: Targets
    kinds: tuple[Kind, ...]
    sizes: tuple[Size, ...]

    @property
    def decodes(self) -> bool:
        return any(kind.decode_steps > 0 for kind in self.kinds)


TARGET_FIELDS = {
    "itl": "itl_seconds",
    "queue": "queue_seconds",
    "ttft": "ttft_seconds",
    "endToEnd": "end_to_end_seconds",
}
"""By the name of a goal, what is found out fastest first."""


@dataclass(frozen=True, slots=True)
class Goal:
    """One target of one group."""

    name: str
    seconds: float
    group: Group

    @property
    def key(self) -> str:
        """How it is named outside: `ttft`, or `ttft:PATTERN` where a pattern has its own."""
        return f"{self.name}:{self.group.pattern}" if self.group.pattern else self.name


@dataclass(frozen=True)
class Scenario:
    """One replica and what is asked of it."""

    step: StepModel
    kv_tokens: float
    """KV pool; infinite when unknown."""
    kinds: tuple[Kind, ...]
    targets: Targets
    kv_slack_tokens: float = 0.0
    """KV lost by a sequence in its last, half-filled block."""
    own_targets: tuple[tuple[str, Targets], ...] = ()
    """By pattern, of those that have their own."""
    prefers_safety: bool = True
    """Whether settings that bear an overload better are worth some of the rate."""
    is_even: bool = False
    """Whether the replica is one of very many, to whose emptiest each request goes: nobody meets more than a usual
    crowd, and nobody waits while there is room on average."""

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        own = dict(self.own_targets)
        members: dict[str, list[Kind]] = {}
        for kind in self.kinds:
            members.setdefault(kind.pattern, []).append(kind)
        return tuple(_group(name, own.get(name, self.targets), kinds) for name, kinds in members.items())

    @cached_property
    def goals(self) -> tuple[Goal, ...]:
        """All targets, those first that are looked at fastest."""
        return tuple(
            Goal(name, seconds, group)
            for name, field in TARGET_FIELDS.items()
            for group in self.groups
            if (seconds := getattr(group.targets, field)) is not None and (group.decodes or name != "itl")
        )

    @cached_property
    def itl_seconds(self) -> float | None:
        """The strictest goal: all patterns decode in the same steps."""
        goals = [group.targets.itl_seconds for group in self.groups if group.decodes]
        return min((goal for goal in goals if goal is not None), default=None)

    @cached_property
    def prefill_tokens(self) -> float:
        return sum(kind.share * kind.prefill_tokens for kind in self.kinds)

    @cached_property
    def prefill_square_tokens(self) -> float:
        return sum(kind.share * kind.prefill_tokens**2 for kind in self.kinds)

    @cached_property
    def decode_steps(self) -> float:
        return sum(kind.share * kind.decode_steps for kind in self.kinds)

    @cached_property
    def attention(self) -> float:
        return sum(kind.share * kind.attention for kind in self.kinds)

    @cached_property
    def decode_kv(self) -> float:
        """Σ of the contexts over the decode steps of a request, in token-steps."""
        return sum(kind.share * kind.decode_steps * kind.mean_context for kind in self.kinds)

    @cached_property
    def decode_square_steps(self) -> float:
        return sum(kind.share * kind.decode_steps**2 for kind in self.kinds)

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The prompts by length: what they do to each other depends on nothing else."""
        return _sizes(self.kinds)

    @cached_property
    def context_square(self) -> float:
        """Mean of the squared context of a decode step."""
        square = sum(kind.share * kind.decode_steps * kind.mean_context**2 for kind in self.kinds)
        return square / self.decode_steps if self.decode_steps else 0.0

    @cached_property
    def context(self) -> float:
        """Mean context of a decode step."""
        return self.decode_kv / self.decode_steps if self.decode_steps else 0.0

    @cached_property
    def marginal_seconds(self) -> float:
        """What one more request costs when the fixed part of a step is shared by many: 1 / it bounds the rate."""
        step = self.step
        return (
            step.token_seconds * (self.prefill_tokens + self.decode_steps)
            + step.kv_token_seconds * self.decode_kv
            + step.sequence_seconds * (self.decode_steps + 1)
            + step.attention_seconds * self.attention
        )


def _sizes(kinds: Iterable[Kind]) -> tuple[Size, ...]:
    shares: dict[tuple[float, float, float], float] = {}
    for kind in kinds:
        key = kind.prefill_tokens, kind.isl, kind.attention
        shares[key] = shares.get(key, 0.0) + kind.share
    return tuple(Size(share, *key) for key, share in shares.items())


def _group(pattern: str, targets: Targets, kinds: Sequence[Kind]) -> Group:
    total = sum(kind.share for kind in kinds)
    shares = tuple(replace(kind, share=kind.share / total) for kind in kinds)
    return Group(pattern, targets, shares, _sizes(shares))


@dataclass(frozen=True, slots=True)
class Load:
    """The steady state at a rate."""

    rate: float
    step_seconds: float
    decoding: float
    prefilling: float
    mixed_share: float
    crowd: Crowd
    """Prompts that are read at the same time."""
    chunk_tokens: float
    slots: float
    slots_by_kv: bool
    budget_tokens: float
    """Prefill tokens that fit in a step beside the decodes."""
    prefill_utilisation: float
    slot_utilisation: float
    kv_tokens: float
    own_bare_seconds: float
    own_mixed_seconds: float
    """How much longer steps are that a request decodes in than the average one, without prompts and with."""
    decode_spread_seconds: float
    """Standard deviation of a step's time by how many decode, and how long their contexts are."""
    prompt_slope_seconds: float
    """What each further prompt that is read adds to a step."""
    prompt_spread_seconds: float
    """Its standard deviation: chunks differ in length, and those at a prompt's end attend to more."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What requests will see. All None when the load cannot be carried."""

    ttft_p95_seconds: float | None
    itl_p95_seconds: float | None
    queue_p95_seconds: float | None
    running: float | None
    kv_used_ratio: float | None
    end_to_end_p95_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest rate of one replica under the targets, and what limits it."""

    requests_per_second: float
    bottleneck: Bottleneck
    unreachable: tuple[str, ...]
    """Goals that an idle replica misses already, by `Goal.key`; they were relaxed, or `allowed` more."""
    idle_ttft_seconds: float
    idle_itl_seconds: float
    running: float
    """Requests in progress at that rate."""
    binding: str = ""
    """The goal that a larger rate would miss, by `Goal.key`; empty when the replica itself is full."""
    pooled_per_second: float = 0.0
    """The largest rate of each of very many replicas, to whose emptiest each request goes: what one alone keeps free
    for the moments when many come at once, others have room for."""
    allowed: tuple[tuple[str, float], ...] = ()
    """The 95th percentile of TTFT at the largest rate, by `Goal.key`, where long prompts have more time than the goal:
    up to there nothing is missed."""


def scenario(
    model: StepModel,
    engine: EngineInfo,
    *,
    mix: Mix,
    targets: Targets,
    by_pattern: PatternTargets | None = None,
) -> Scenario | None:
    """The maths' input; None when the mix is empty."""
    if not mix.cells:
        return None
    goals = by_pattern or PatternTargets()
    own = {name for name, _ in goals.own}

    def pattern(cell: Cell) -> str:
        name = pattern_of(cell.isl_edge, cell.osl_edge, goals.patterns) if own else ""
        return name if name in own else ""

    kinds = tuple(
        Kind(
            share=cell.share,
            prefill_tokens=max(1.0, cell.isl * (1 - mix.cached_ratio)),
            isl=cell.isl,
            decode_steps=max(0.0, cell.osl - 1),
            attention=cell.isl**2 * (1 - mix.cached_ratio**2) / 2,
            mean_context=cell.isl + cell.osl / 2,
            pattern=pattern(cell),
        )
        for cell in mix.cells
    )
    pool = engine.kv_blocks * engine.block_tokens
    return Scenario(
        step=model,
        kv_tokens=float(pool) if pool > 0 else math.inf,
        kinds=kinds,
        targets=targets,
        kv_slack_tokens=engine.block_tokens / 2,
        own_targets=goals.own,
    )


def _step_seconds(scene: Scenario, *, decoding: float, prefill: float, attention: float, prefills: float) -> float:
    shape = StepShape(
        tokens=decoding + prefill,
        decode_kv_tokens=decoding * scene.context,
        sequences=decoding + prefills,
        prefill_attention=attention,
        has_prefill=prefill > 0,
    )
    return scene.step.seconds(shape)


def _chunks(scene: Scenario, chunk: float) -> float:
    return sum(size.share * size.chunks(chunk) for size in scene.sizes)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps at a rate: how long on average, with prefill and without, and what is in them."""

    seconds: float
    mixed_seconds: float
    bare_seconds: float
    mixed_share: float
    decoding: float
    prefilling: float
    chunk_tokens: float
    budget_tokens: float


def _steps_at(scene: Scenario, settings: BatchSettings, rate: float) -> _Steps | None:
    """The step time at which as much is computed as arrives: what arrives in a step makes the next one longer.

    The fixed point is approached from below by secants, which converge since the step time is convex in itself.
    """
    base = max(1e-6, _step_seconds(scene, decoding=_in_a_step(0.0, scene), prefill=0, attention=0, prefills=0))
    seconds = base
    chunk = chunks = 0.0
    for _ in range(40):
        decoding = rate * scene.decode_steps * seconds
        budget = settings.max_num_batched_tokens - decoding
        if decoding > settings.max_num_seqs or budget < 1:
            return None
        largest = min(float(settings.long_prefill_token_threshold), budget)
        if largest != chunk:
            chunk, chunks = largest, _chunks(scene, largest)
        prefilling = rate * seconds * chunks
        mixed_share = -math.expm1(-prefilling)
        mixed = _step_seconds(
            scene,
            decoding=decoding,
            prefill=rate * scene.prefill_tokens * seconds / mixed_share,
            attention=rate * scene.attention * seconds / mixed_share,
            prefills=prefilling / mixed_share,
        )
        bare = _step_seconds(scene, decoding=_in_a_step(decoding, scene), prefill=0, attention=0, prefills=0)
        slope = (mixed_share * mixed + (1 - mixed_share) * bare - base) / seconds
        if slope >= 1:
            return None
        following = base / (1 - slope)
        if abs(following - seconds) <= 5e-4 * seconds:
            break
        seconds = following
    return _Steps(seconds, mixed, bare, mixed_share, decoding, prefilling, chunk, budget)


def _in_a_step(decoding: float, scene: Scenario) -> float:
    """Decodes in a step of which `decoding` run on average: while none runs, there are no steps without prompts."""
    if scene.decode_steps <= 0:
        return 0.0
    return decoding / -math.expm1(-decoding) if decoding > 1e-6 else 1.0


def load_at(scene: Scenario, settings: BatchSettings, rate: float) -> Load | None:
    """The steady state at `rate` requests/s, or None when the queue would grow without end."""
    steps = _steps_at(scene, settings, rate)
    if steps is None:
        return None
    pace = _pace(scene, steps, rate)
    crowd = crowd_at(pace, mean_seconds=steps.seconds)
    if crowd is None:
        return None
    sequences = steps.decoding + steps.prefilling
    read_kv = sum(size.share * size.chunks(steps.chunk_tokens) * size.isl / 2 for size in scene.sizes)
    kv = rate * steps.seconds * (scene.decode_kv + read_kv) + sequences * scene.kv_slack_tokens
    kv_slots = scene.kv_tokens / (kv / sequences if scene.is_even else KV_RESERVE * kv / sequences)
    slots = min(float(settings.max_num_seqs), kv_slots)
    each = _decode_seconds(scene)
    load = Load(
        rate=rate,
        step_seconds=steps.seconds,
        decoding=steps.decoding,
        prefilling=steps.prefilling,
        mixed_share=steps.mixed_share,
        crowd=crowd,
        chunk_tokens=steps.chunk_tokens,
        slots=max(1.0, slots),
        slots_by_kv=kv_slots < settings.max_num_seqs,
        budget_tokens=steps.budget_tokens,
        prefill_utilisation=rate * pace.chunks * pace.full_seconds / pace.lanes,
        slot_utilisation=sequences / slots,
        kv_tokens=kv,
        own_bare_seconds=each * max(0.0, 1 + steps.decoding - _in_a_step(steps.decoding, scene)),
        own_mixed_seconds=each + scene.step.mixed_kv_token_seconds * scene.context,
        decode_spread_seconds=_decode_spread_seconds(scene, steps, free_slots=slots - sequences),
        prompt_slope_seconds=pace.slope_seconds,
        prompt_spread_seconds=_prompt_spread_seconds(scene, steps),
    )
    return load if max(load.prefill_utilisation, load.slot_utilisation) < MAX_UTILISATION else None


def _pace(scene: Scenario, steps: _Steps, rate: float) -> Pace:
    """What a step takes by how many prompts are read in it."""
    chunks = _chunks(scene, steps.chunk_tokens)
    typical = scene.prefill_tokens / chunks
    attention = scene.attention / chunks
    step = scene.step

    def seconds(prompts: float) -> float:
        return _step_seconds(
            scene,
            decoding=steps.decoding if prompts else _in_a_step(steps.decoding, scene),
            prefill=prompts * typical,
            attention=prompts * attention,
            prefills=prompts,
        )

    lanes = max(1.0, steps.budget_tokens / typical)
    return Pace(
        rate=rate,
        chunks=chunks,
        lanes=lanes,
        bare_seconds=seconds(0),
        first_seconds=seconds(1),
        slope_seconds=step.token_seconds * typical + step.attention_seconds * attention + step.sequence_seconds,
        full_seconds=seconds(lanes),
        variation=scene.prefill_square_tokens / scene.prefill_tokens**2 - 1,
    )


def _decode_seconds(scene: Scenario) -> float:
    """What one more decode adds to a step."""
    step = scene.step
    return step.token_seconds + step.sequence_seconds + step.kv_token_seconds * scene.context


def _decode_spread_seconds(scene: Scenario, steps: _Steps, *, free_slots: float) -> float:
    """Decodes in progress are Poisson, and more where they slow themselves; there are never more than slots."""
    step = scene.step
    each = step.token_seconds + step.sequence_seconds
    mean = _decode_seconds(scene)
    square = each**2 + 2 * each * step.kv_token_seconds * scene.context
    square += step.kv_token_seconds**2 * scene.context_square
    crowding = min(0.9, steps.decoding * mean / steps.seconds)
    poisson = steps.decoding * square / (1 - crowding)
    return math.sqrt(min(poisson, (max(0.0, free_slots) * mean) ** 2))


def _prompt_spread_seconds(scene: Scenario, steps: _Steps) -> float:
    """The attention of a chunk rises evenly over the prompt, from none to twice its mean."""
    step = scene.step
    weights = mean = square = 0.0
    for size in scene.sizes:
        chunks = size.chunks(steps.chunk_tokens)
        attention = step.attention_seconds * size.attention / chunks
        seconds = step.token_seconds * size.prefill_tokens / chunks + attention
        weights += size.share * chunks
        mean += size.share * chunks * seconds
        square += size.share * chunks * (seconds**2 + attention**2 / 3 * (1 - 1 / chunks**2))
    return math.sqrt(max(0.0, square / weights - (mean / weights) ** 2))


def _slot_wait(scene: Scenario, load: Load) -> tuple[float, float]:
    """Chance to wait for a slot, and the mean of the wait when there is one."""
    if scene.is_even:
        return 0.0, 0.0
    chance = load.slot_utilisation ** (math.sqrt(2 * (load.slots + 1)) - 1)
    decode = scene.decode_steps
    spread = scene.decode_square_steps / decode**2 if decode else 1.0
    stay = (load.decoding + load.prefilling) / load.rate
    return chance, stay * spread / 2 / (load.slots * (1 - load.slot_utilisation))


def _late(wait: tuple[float, float], seconds: float) -> float:
    """Chance that a wait of (chance, mean), or none, lasts longer than `seconds`."""
    chance, mean = wait
    if seconds < 0:
        return 1.0
    return min(1.0, chance) * math.exp(-seconds / mean) if mean > 0 else 0.0


def _missed_ttft(scene: Scenario, load: Load, seconds: float) -> float:
    """Share of the requests whose first token takes longer than `seconds`."""
    return sum(size.share * _late_first_token(scene, load, size=size, seconds=seconds) for size in scene.sizes)


def _missed_end_to_end(scene: Scenario, load: Load, seconds: float) -> float:
    """Share of the requests whose last token takes longer than `seconds`."""
    return sum(kind.share * _late_end(scene, load, kind=kind, seconds=seconds) for kind in scene.kinds)


def _late_end(scene: Scenario, load: Load, *, kind: Kind, seconds: float) -> float:
    """Chance that an answer is not complete after `seconds`; over its many steps their lengths even out."""
    crowd = load.crowd
    step = sum(share * length for share, length in zip(crowd.by_step, crowd.step_seconds, strict=True))
    step += load.own_bare_seconds + load.mixed_share * (load.own_mixed_seconds - load.own_bare_seconds)
    return _late_first_token(scene, load, size=kind.size(), seconds=seconds - kind.decode_steps * step)


def _late_first_token(scene: Scenario, load: Load, *, size: Size, seconds: float) -> float:
    """Chance that a prompt's first token takes longer than `seconds`.

    A request first sees the step in progress end, and waits for a slot if need be. Then it is read beside the crowd
    that it found, of which some leave and others come (`weight`: how far the crowd at the start is the crowd all
    along), or, when all lanes are taken, behind it.
    """
    if seconds <= 0:
        return 1.0
    crowd, slot = load.crowd, _slot_wait(scene, load)
    busy = -math.expm1(-(load.decoding + load.prefilling))
    last = len(crowd.by_time) - 1
    mean_chunks = _chunks(scene, load.chunk_tokens)
    slope = load.prompt_slope_seconds
    chunks = size.chunks(load.chunk_tokens)
    own = chunks * (crowd.step_seconds[1] - slope) + _own_seconds(scene, size, chunks=chunks)
    if scene.is_even:
        return float(seconds < busy * load.step_seconds / 2 + own + chunks * slope * crowd.mean)
    weight = min(1.0, (mean_chunks + 1) / (mean_chunks + chunks))
    spread = math.sqrt(weight * (1 - weight))
    most = chunks * slope * max(0, last - 1)
    missed = 0.0
    for found, chance in enumerate(crowd.by_time):
        if chance < NEGLIGIBLE:
            continue
        queued = crowd.has_queue and found == last
        late = 0.0
        for part in STEP_PARTS:
            left = seconds - busy * part * crowd.step_seconds[found] - own
            if queued:
                late += _late((1.0, crowd.wait_seconds), left - most)
                continue
            # Of a prompt that was found, any part may be left.
            met = weight * found * (1 + 2 * spread * (2 * part - 1)) + (1 - weight) * crowd.mean
            usual = chunks * slope * met
            above = _share_above(crowd, others=left / (chunks * slope) - met, spread=spread)
            late += above + (1 - above) * _late(slot, max(0.0, left - min(most, usual)))
        missed += chance * late / len(STEP_PARTS)
    return missed


def _share_above(crowd: Crowd, *, others: float, spread: float) -> float:
    """Chance that the crowd's part that changes while a prompt is read lies more than `others` above its mean."""
    if spread < 1e-3:
        return 1.0 if others < 0 else 0.0
    return crowd.share_above(crowd.mean + others / spread)


def _own_seconds(scene: Scenario, size: Size, *, chunks: float) -> float:
    """What a prompt's own chunks cost, over those of a typical one."""
    step = scene.step
    return (
        step.token_seconds * size.prefill_tokens
        + step.attention_seconds * size.attention
        + step.sequence_seconds * chunks
    )


def _missed_queue(scene: Scenario, load: Load, seconds: float) -> float:
    """Share of the requests whose first step begins later than `seconds` after they came."""
    crowd, slot = load.crowd, _slot_wait(scene, load)
    busy = -math.expm1(-(load.decoding + load.prefilling))
    if scene.is_even:
        return float(seconds < busy * load.step_seconds / 2)
    last = len(crowd.by_time) - 1
    missed = 0.0
    for found, chance in enumerate(crowd.by_time):
        wait = (1.0, crowd.wait_seconds) if crowd.has_queue and found == last else slot
        late = sum(_late(wait, seconds - busy * part * crowd.step_seconds[found]) for part in STEP_PARTS)
        missed += chance * late / len(STEP_PARTS)
    return missed


def _quantile(missed_share: Callable[[Scenario, Load, float], float], *, scene: Scenario, load: Load) -> float:
    low, high = 0.0, 0.05
    while missed_share(scene, load, high) > MISSED_SHARE and high < 1e5:
        low, high = high, high * 2
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (middle, high) if missed_share(scene, load, middle) > MISSED_SHARE else (low, middle)
    return high


def _missed_itl(scene: Scenario, load: Load, seconds: float) -> float:
    """Share of the tokens that come later than `seconds` after the one before: steps by the crowd read in them."""
    crowd = load.crowd
    # An answer begins in the crowd that its prompt was read in, which is that of the time, and goes on by steps.
    first = min(1.0, _chunks(scene, load.chunk_tokens) / 2 / max(1.0, scene.decode_steps))
    missed = 0.0
    for prompts, length in enumerate(crowd.step_seconds):
        share = crowd.by_step[prompts] + first * (crowd.by_time[prompts] - crowd.by_step[prompts])
        spread = math.hypot(load.decode_spread_seconds, math.sqrt(prompts) * load.prompt_spread_seconds)
        own = load.own_mixed_seconds if prompts else load.own_bare_seconds
        missed += share * _normal_above(seconds - length - own, spread)
    return missed


def _normal_above(value: float, deviation: float) -> float:
    if deviation <= 0:
        return 0.0 if value >= 0 else 1.0
    return math.erfc(value / deviation / math.sqrt(2)) / 2


def _itl_p95(scene: Scenario, load: Load) -> float:
    return _quantile(_missed_itl, scene=scene, load=load)


def _itl_held(scene: Scenario, load: Load) -> float:
    """What the ITL target is held against."""
    return max(_itl_p95(scene, load), _stall_seconds(load) / STALL_FACTOR)


def _stall_seconds(load: Load) -> float:
    """The longest step but for very rare ones."""
    crowd = load.crowd
    seen = 0.0
    for share, length in zip(crowd.by_step, crowd.step_seconds, strict=True):
        seen += share
        if seen >= 1 - STALL_SHARE:
            return length
    return crowd.step_seconds[-1]


def _mixed_seconds(scene: Scenario, *, decoding: float, many: float, chunk: float, budget: float) -> float:
    """Duration of a step in which `many` prompts are read."""
    typical = sum(kind.share * kind.prefill_tokens * min(chunk, kind.prefill_tokens) for kind in scene.kinds)
    prefill = min(budget, many * typical / scene.prefill_tokens)
    return _step_seconds(
        scene,
        decoding=decoding,
        prefill=prefill,
        attention=prefill * scene.attention / scene.prefill_tokens,
        prefills=many,
    )


def full_batch_itl_seconds(scene: Scenario, settings: BatchSettings) -> float:
    """ITL with every slot taken, as in an overload: prompts enter as fast as decodes make room for them."""
    sequence_kv = KV_RESERVE * (scene.context + scene.kv_slack_tokens) or 1.0
    decoding = min(float(settings.max_num_seqs), scene.kv_tokens / sequence_kv)
    budget = max(1.0, settings.max_num_batched_tokens - decoding)
    chunk = min(float(settings.long_prefill_token_threshold), budget)
    reading = decoding / max(1.0, scene.decode_steps) * _chunks(scene, chunk)
    many = max(1.0, reading + Z95 * math.sqrt(reading))
    return _mixed_seconds(scene, decoding=decoding, many=many, chunk=chunk, budget=budget)


def predict(scene: Scenario, settings: BatchSettings, rate: float) -> Prediction:
    """Latencies at `rate` requests/s on one replica."""
    load = load_at(scene, settings, max(rate, IDLE_RATE))
    if load is None:
        return Prediction(None, None, None, None, None)
    return Prediction(
        ttft_p95_seconds=_quantile(_missed_ttft, scene=scene, load=load),
        itl_p95_seconds=_itl_p95(scene, load) if scene.decode_steps else None,
        queue_p95_seconds=_quantile(_missed_queue, scene=scene, load=load),
        running=load.decoding + load.prefilling,
        kv_used_ratio=load.kv_tokens / scene.kv_tokens,
        end_to_end_p95_seconds=_quantile(_missed_end_to_end, scene=scene, load=load),
    )


def attainment(scene: Scenario, settings: BatchSettings, rate: float) -> float:
    """Share of the requests that meet the TTFT target at `rate`; 0 when the load cannot be carried."""
    load = load_at(scene, settings, max(rate, IDLE_RATE))
    if load is None:
        return 0.0
    target = scene.targets.ttft_seconds
    return 1.0 if target is None else 1.0 - _missed_ttft(scene, load, target)


def _excess(scene: Scenario, load: Load, goal: Goal) -> float:
    """The missed share over the one that may be."""
    group, seconds = goal.group, goal.seconds
    if goal.name == "ttft":
        missed = sum(
            size.share * _late_first_token(scene, load, size=size, seconds=_allowed_ttft(scene, goal, size))
            for size in group.sizes
        )
    elif goal.name == "endToEnd":
        missed = sum(kind.share * _late_end(scene, load, kind=kind, seconds=seconds) for kind in group.kinds)
    else:
        missed = (_missed_itl if goal.name == "itl" else _missed_queue)(scene, load, seconds)
    stall = _stall_seconds(load) / (STALL_FACTOR * seconds) if goal.name == "itl" else 0.0
    return max(missed / MISSED_SHARE, stall)


def _allowed_ttft(scene: Scenario, goal: Goal, size: Size) -> float:
    """The goal of prompts of one length: no number of replicas reads a long one faster than an idle one does."""
    factor = goal.group.targets.idle_factor
    return max(goal.seconds, factor * size.idle_seconds(scene.step)) if factor else goal.seconds


def _meets(scene: Scenario, settings: BatchSettings, rate: float) -> bool:
    load = load_at(scene, settings, rate)
    return load is not None and all(_excess(scene, load, goal) <= 1 for goal in scene.goals)


def _reached(scene: Scenario, load: Load, goal: Goal) -> float:
    """What the goal's 95th percentile is at a load, in seconds."""
    if goal.name == "itl":
        return _itl_held(scene, load)
    alone = replace(scene, kinds=goal.group.kinds)
    if goal.name == "queue":
        return _quantile(_missed_queue, scene=scene, load=load)

    def missed(_: Scenario, load: Load, seconds: float) -> float:
        return MISSED_SHARE * _excess(scene, load, replace(goal, seconds=seconds))

    return _quantile(missed, scene=alone, load=load)


def _allowances(scene: Scenario, load: Load) -> tuple[tuple[str, float], ...]:
    """`Capacity.allowed` at a load."""
    return tuple(
        (goal.key, _quantile(_missed_ttft, scene=replace(scene, kinds=goal.group.kinds), load=load))
        for goal in scene.goals
        if goal.name == "ttft" and any(_allowed_ttft(scene, goal, size) > goal.seconds for size in goal.group.sizes)
    )


def _eased(scene: Scenario, idle: Load) -> Iterator[str]:
    """Goals that only hold because long prompts have more time."""
    for key, seconds in _allowances(scene, idle):
        if seconds > next(goal.seconds for goal in scene.goals if goal.key == key):
            yield key


def _largest_rate(scene: Scenario, settings: BatchSettings, *, low: float) -> float:
    """Bisection between `low`, which must do, and the bound of the marginal cost."""
    high = _rate_bound(scene)
    while high - low > 0.004 * high:
        middle = math.sqrt(low * high) if low > 0.01 * high else (low + high) / 2
        low, high = (middle, high) if _meets(scene, settings, middle) else (low, middle)
    return low


def _rate_bound(scene: Scenario) -> float:
    return 1 / max(scene.marginal_seconds, 1e-9)


def _relaxed(scene: Scenario, settings: BatchSettings) -> tuple[Scenario, dict[str, float]]:
    """The scenario with the targets that an idle replica misses put within reach, and by how much it misses them."""
    load = load_at(scene, settings, SMALLEST_RATE_SHARE * _rate_bound(scene))
    if load is None:
        return scene, {}
    missed, relaxed, own = {}, scene.targets, dict(scene.own_targets)
    for goal in scene.goals:
        reached = _reached(scene, load, goal)
        if reached <= goal.seconds:
            continue
        pattern = goal.group.pattern
        change = {TARGET_FIELDS[goal.name]: reached * UNREACHABLE_SLACK}
        missed[goal.key] = reached / goal.seconds
        if pattern:
            own[pattern] = replace(own[pattern], **change)
        else:
            relaxed = replace(relaxed, **change)
    return replace(scene, targets=relaxed, own_targets=tuple(own.items())), missed


def _binding(scene: Scenario, settings: BatchSettings, rate: float) -> str:
    """The goal that a little more than `rate` misses most; empty when the replica cannot carry that at all."""
    load = load_at(scene, settings, BEYOND * rate) if rate > 0 else None
    if load is None:
        return ""
    excess = {goal.key: _excess(scene, load, goal) for goal in scene.goals}
    worst = max(excess, key=lambda name: excess[name], default="")
    return worst if worst and excess[worst] > 1 else ""


def capacity_of(scene: Scenario, settings: BatchSettings) -> Capacity:
    """The largest rate under the targets. Targets out of reach are relaxed and named in the result."""
    smallest = SMALLEST_RATE_SHARE * _rate_bound(scene)
    reachable, missed = (scene, {}) if _meets(scene, settings, smallest) else _relaxed(scene, settings)
    rate = _largest_rate(reachable, settings, low=smallest) if _meets(reachable, settings, smallest) else 0.0
    idle = load_at(scene, settings, min(rate, smallest) or IDLE_RATE)
    full = load_at(scene, settings, rate) if rate > 0 else None
    even = replace(reachable, is_even=True)
    pooled = _largest_rate(even, settings, low=rate) if rate > 0 and _meets(even, settings, rate) else rate
    return Capacity(
        requests_per_second=rate,
        bottleneck=_bottleneck(reachable, settings, rate),
        unreachable=(*missed, *_eased(reachable, idle)) if idle else tuple(missed),
        idle_ttft_seconds=_quantile(_missed_ttft, scene=scene, load=idle) if idle else math.inf,
        idle_itl_seconds=_itl_p95(scene, idle) if idle else math.inf,
        running=full.decoding + full.prefilling if full else 0.0,
        binding=_binding(reachable, settings, rate),
        pooled_per_second=pooled,
        allowed=_allowances(reachable, full) if full else (),
    )


def _worth(scene: Scenario, settings: BatchSettings) -> float:
    """What a request/s counts under these settings: less when a full batch breaks the ITL target, or for size."""
    target = scene.itl_seconds
    size = math.log2(settings.max_num_seqs * settings.max_num_batched_tokens)
    # Small chunks smooth the ITL; where that has no goal, prompts are better read in whole, one after the other.
    size += math.log2(settings.long_prefill_token_threshold) * (0.5 if target else -0.5)
    excess = 1.0
    if scene.prefers_safety and target is not None:
        excess = full_batch_itl_seconds(scene, settings) / target
    return (1 - SIZE_BIAS * size) / math.pow(max(1.0, excess), FULL_BATCH_EXPONENT)


def _bottleneck(scene: Scenario, settings: BatchSettings, rate: float) -> Bottleneck:
    """What the time goes into at that rate: waiting for a slot or for KV, reading prompts in, or decoding."""
    load = load_at(scene, settings, rate) if rate > 0 else None
    if load is None:
        return Bottleneck.NONE
    if load.slot_utilisation > 0.7 and load.slot_utilisation > load.prefill_utilisation:
        return Bottleneck.KV if load.slots_by_kv else Bottleneck.QUEUE
    step = scene.step
    prefill = step.token_seconds * scene.prefill_tokens + step.attention_seconds * scene.attention
    decode = (
        step.token_seconds * scene.decode_steps
        + step.kv_token_seconds * scene.decode_kv
        + step.sequence_seconds * scene.decode_steps
    )
    return Bottleneck.PREFILL if prefill > decode else Bottleneck.DECODE


def _ladder(bounds: tuple[int, int], *, multiple: int, steps_per_doubling: int) -> tuple[int, ...]:
    """The ends and geometric steps between them, at round numbers."""
    low, high = bounds
    values = {low, high}
    exponent = 0
    while (value := 2 ** (exponent / steps_per_doubling)) < high:
        rounded = round_to(value, multiple=multiple)
        if low < rounded < high:
            values.add(rounded)
        exponent += 1
    return tuple(sorted(values))


def round_to(value: float, *, multiple: int) -> int:
    """`value` at a round number: a multiple when it is large against it."""
    return max(1, round(value)) if value < 2 * multiple else round(value / multiple) * multiple


SEQUENCE_MULTIPLE = 8
TOKEN_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class Lattice:
    """Settings worth a look: rising values of each."""

    sequences: tuple[int, ...]
    tokens: tuple[int, ...]
    chunks: tuple[int, ...]

    def points(self, stride: int) -> Iterator[BatchSettings]:
        """Every `stride`-th value and the last of each, as far as they make sense together."""
        for tokens in _every(self.tokens, stride):
            for sequences in _every(self.sequences, stride):
                for chunk in _every(self.chunks, stride):
                    if sequences <= tokens and chunk <= max(tokens, self.chunks[0]):
                        yield BatchSettings(sequences, tokens, chunk)

    def around(self, settings: BatchSettings, stride: int) -> Iterator[BatchSettings]:
        """The points next to `settings`, `stride` values away."""
        near = [
            {values[min(max(0, at + step), len(values) - 1)] for step in (-stride, 0, stride)}
            for values, given in zip(
                (self.sequences, self.tokens, self.chunks), settings.as_dict().values(), strict=True
            )
            for at in (bisect_left(values, given),)
        ]
        yield from Lattice(*(tuple(sorted(values)) for values in near)).points(1)

    @property
    def size(self) -> int:
        return len(self.sequences) * len(self.tokens) * len(self.chunks)


def _every(values: tuple[int, ...], stride: int) -> tuple[int, ...]:
    return values if stride == 1 else (*values[:-1:stride], values[-1])


def lattice_of(scene: Scenario, envelope: Envelope) -> Lattice:
    """The envelope in geometric steps. Left out is what changes nothing: chunks longer than every prompt, slots beyond
    the KV pool."""
    longest = max(size.prefill_tokens for size in scene.sizes)
    most = scene.kv_tokens / max(1.0, min(size.isl for size in scene.sizes))
    return Lattice(
        sequences=_up_to(_ladder(envelope.max_num_seqs, multiple=SEQUENCE_MULTIPLE, steps_per_doubling=2), enough=most),
        tokens=_ladder(envelope.max_num_batched_tokens, multiple=TOKEN_MULTIPLE, steps_per_doubling=2),
        chunks=_up_to(
            _ladder(envelope.long_prefill_token_threshold, multiple=TOKEN_MULTIPLE, steps_per_doubling=1),
            enough=longest,
        ),
    )


def _up_to(values: tuple[int, ...], *, enough: float) -> tuple[int, ...]:
    """The values up to the first that is enough."""
    return tuple(value for at, value in enumerate(values) if at == 0 or values[at - 1] < enough)


@dataclass(frozen=True, slots=True)
class Plan:
    """The best settings beside the present ones."""

    settings: BatchSettings
    capacity: Capacity
    present: Capacity
    gain_ratio: float
    """Score of the best over that of the present settings; 1 when the present ones are the best."""


def best_settings(scene: Scenario, envelope: Envelope, *, present: BatchSettings) -> Plan:
    """The settings with the largest rate under the targets; `present` stay unless others score higher."""
    lattice = lattice_of(scene, envelope)
    reachable = _within_reach(scene, lattice, present=present)
    best = _search(reachable, lattice, present=present)
    present_score, score = (_score(scene, reachable, settings) for settings in (present, best))
    return Plan(
        settings=best,
        capacity=capacity_of(scene, best),
        present=capacity_of(scene, present),
        gain_ratio=1.0 if best == present else score / present_score if present_score > 0 else math.inf,
    )


def _stride(lattice: Lattice) -> int:
    """How coarse the first look is: all points of a usual envelope, some of a very wide one."""
    stride = 1
    while lattice.size / stride**3 > MOST_POINTS:
        stride *= 2
    return stride


def _within_reach(scene: Scenario, lattice: Lattice, *, present: BatchSettings) -> Scenario:
    """The scenario as it is, or with targets that no settings reach relaxed to what those that miss least do reach."""
    smallest = SMALLEST_RATE_SHARE * _rate_bound(scene)
    points = [present, *lattice.points(_stride(lattice))]
    if any(_meets(scene, settings, smallest) for settings in points):
        return scene
    corners = {points[-1], present, points[min(1, len(points) - 1)], points[len(points) // 2]}
    ordered = sorted(corners, key=lambda settings: tuple(settings.as_dict().values()))
    relaxed = [_relaxed(scene, settings) for settings in ordered]
    return min(relaxed, key=lambda item: math.prod(item[1].values()) if item[1] else math.inf)[0]


def _search(scene: Scenario, lattice: Lattice, *, present: BatchSettings) -> BatchSettings:
    """From a coarse look at all of the lattice to a fine one around the fastest and the best settings found so far.

    The best are the worthiest of those that keep `RATE_KEPT` of the largest rate.
    """
    stride = _stride(lattice)
    largest, fastest, best = SMALLEST_RATE_SHARE * _rate_bound(scene), present, present
    worth: dict[BatchSettings, float] = {}
    too_slow: set[BatchSettings] = set()
    found = [present, *lattice.points(stride)]
    while True:
        worth |= {settings: _worth(scene, settings) for settings in found}
        for settings in found:
            faster = FASTER * largest
            if faster < _rate_bound(scene) and _meets(scene, settings, faster):
                largest, fastest = _largest_rate(scene, settings, low=faster), settings
        kept = RATE_KEPT if scene.prefers_safety else 1 / FASTER
        enough = max(SMALLEST_RATE_SHARE * _rate_bound(scene), kept * largest)
        for settings in sorted(worth.keys() - too_slow, key=lambda settings: (-worth[settings], str(settings))):
            if _meets(scene, settings, enough):
                best = settings
                break
            too_slow.add(settings)  # for good: what is asked for only rises
        else:
            best = present
        near = {settings for centre in (fastest, best) for settings in lattice.around(centre, stride)}
        found = sorted(near - worth.keys(), key=str)
        if not found and stride == 1:
            return best
        if not found:
            stride //= 2


def score_of(scene: Scenario, settings: BatchSettings) -> float:
    """What `best_settings` compares, with unreachable targets relaxed for these settings."""
    return capacity_of(scene, settings).requests_per_second * _worth(scene, settings)


def _score(scene: Scenario, reachable: Scenario, settings: BatchSettings) -> float:
    smallest = SMALLEST_RATE_SHARE * _rate_bound(scene)
    if not _meets(reachable, settings, smallest):
        return 0.0
    return _largest_rate(reachable, settings, low=smallest) * _worth(scene, settings)
