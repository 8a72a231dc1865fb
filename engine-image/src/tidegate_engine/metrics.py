"""Every number the engine exposes: the names are the contract with the operator, the vLLM names are aliases.

The engine loop counts into plain integer arrays (one writer, no label look-ups a token); a collector turns them, and a
snapshot of the scheduler, into samples when they are scraped.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tidegate_engine.drain import PAUSE_MODES
from tidegate_engine.request import FinishReason
from tidegate_engine.settings import (
    ISL_EDGES,
    ITL_BUCKETS_SECONDS,
    OSL_EDGES,
    OTHER_PATTERN,
    TTFT_BUCKETS_SECONDS,
    BatchSettings,
    Pattern,
    pattern_of,
)
from tidegate_engine.steptime import StepModel

PREFIX = "tidegate_engine_"
REJECTION_REASONS = (
    "queue_full",
    "context_length",
    "invalid",
    "unsupported",
    "unknown_model",
    "unauthorized",
    "body_too_large",
    "paused",
    "shutting_down",
)
"""Why a request was turned away before it was served."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def isl_cell(tokens: int) -> int:
    """Index of the input-length cell."""
    return bisect_right(ISL_EDGES, tokens) - 1


@dataclass(slots=True)
class Histogram:
    """Counts by upper bound (inclusive), the last cell is +Inf."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[tuple[str, float]]:
        total = 0
        rows = []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


def add_up(histograms: Sequence[Histogram]) -> Histogram:
    """The sum of histograms with the same bounds."""
    total = Histogram(histograms[0].bounds)
    total.counts = [sum(counts) for counts in zip(*(histogram.counts for histogram in histograms), strict=True)]
    total.sum = sum(histogram.sum for histogram in histograms)
    return total


@dataclass(frozen=True, slots=True)
class HostUse:
    """What the host pool holds and has moved so far."""

    slots: int
    used: int
    stored_blocks: int
    loaded_blocks: int
    tokens_per_block: float
    """Fewer than a block has where layers form groups, and each has a block of its own for them."""
    block_bytes: int


@dataclass(frozen=True, slots=True)
class LoraUse:
    """Which adapters are loaded, and how many requests of each are running and waiting."""

    max_loras: int
    requests: Mapping[str, Mapping[str, int]]
    """By adapter, by state."""
    at_seconds: float
    """When, in seconds of the epoch."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Gauges of one moment. None = unknown, and then the series is absent.

    The engine knows the settings that act; who asked for which, and their bounds, the HTTP side fills in.
    """

    running: int
    waiting: int
    waiting_prompt_tokens: int
    running_context_tokens: int
    running_output_past_edges: Mapping[int, int]
    """Running requests with at least so many output tokens, by lower edge."""
    kv_used: int
    kv_cached: int
    kv_free: int
    preemptions: Mapping[str, int]
    """By cause: kv, policy."""
    spec: BatchSettings
    effective: BatchSettings
    capacity: BatchSettings
    settings_generation: int
    step_model: StepModel | None
    step_model_residual_ratio: float | None
    step_model_samples: int
    memory_bytes: Mapping[str, int]
    """By kind: weights, kv, workspace, host; only what is known."""
    start_seconds: Mapping[str, float]
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones."""
    host: HostUse | None = None
    """None = evicted blocks are not kept."""
    lora: LoraUse | None = None
    """None = adapters are off."""
    pause_mode: str | None = None
    """None = not paused."""
    policy_version: int = 0
    policy_limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The live policy's numbers, by kind: capacity, spec, effective."""
    kv_waste_ratio: float | None = None
    """Share of the token slots in used blocks that hold none; None while no block is used."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is counted once, at the end of a request; times in seconds, None when it never got so far."""

    isl: int
    osl: int
    reason: FinishReason
    e2e_seconds: float
    ttft_seconds: float | None
    itl_seconds: float | None


@dataclass(slots=True)
class Counts:
    """Everything that only grows. The engine loop has one, the HTTP side another; they are added up to be shown."""

    pattern_names: tuple[str, ...]
    arrived: list[int] = field(default_factory=lambda: [0] * len(ISL_EDGES))
    finished: dict[FinishReason, list[list[int]]] = field(
        default_factory=lambda: {reason: [[0] * len(OSL_EDGES) for _ in ISL_EDGES] for reason in FinishReason}
    )
    ttft: list[Histogram] = field(default_factory=lambda: [Histogram(TTFT_BUCKETS_SECONDS) for _ in ISL_EDGES])
    itl: list[Histogram] = field(default_factory=lambda: [Histogram(ITL_BUCKETS_SECONDS) for _ in ISL_EDGES])
    queue: list[Histogram] = field(default_factory=lambda: [Histogram(TTFT_BUCKETS_SECONDS) for _ in ISL_EDGES])
    finished_ttft: dict[str, Histogram] = field(default_factory=dict)
    finished_itl: dict[str, Histogram] = field(default_factory=dict)
    e2e: dict[str, Histogram] = field(default_factory=dict)
    encoded_characters: int = 0
    encoded_tokens: int = 0
    encoding_seconds: float = 0.0
    """Of text to tokens: counted by the tokenizer, on the HTTP side."""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    pooled_requests: int = 0
    steps: int = 0
    failed_steps: int = 0
    rejections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTION_REASONS, 0))
    """Counted on the HTTP side."""
    corrupted_requests: int = 0
    settings_changes: dict[str, int] = field(default_factory=lambda: {"applied": 0, "rejected": 0, "reverted": 0})

    def __post_init__(self) -> None:
        for name in self.pattern_names:
            self.finished_ttft.setdefault(name, Histogram(TTFT_BUCKETS_SECONDS))
            self.finished_itl.setdefault(name, Histogram(ITL_BUCKETS_SECONDS))
            self.e2e.setdefault(name, Histogram(TTFT_BUCKETS_SECONDS))


def new_counts(patterns: Sequence[Pattern]) -> Counts:
    return Counts(tuple(dict.fromkeys([*(pattern.name for pattern in patterns), OTHER_PATTERN])))


def add_counts(one: Counts, other: Counts) -> Counts:
    """What both have counted together; they have the same patterns."""
    return Counts(**{each.name: _add(getattr(one, each.name), getattr(other, each.name)) for each in fields(Counts)})


def _add(one: Any, other: Any) -> Any:
    match one:
        case Histogram():
            return Histogram(one.bounds, _add(one.counts, other.counts), one.sum + other.sum)
        case dict():
            return {key: _add(value, other[key]) for key, value in one.items()}
        case list():
            return [_add(*pair) for pair in zip(one, other, strict=True)]
        case tuple():
            return one
        case _:
            return one + other


def render(counts: Counts, snapshot: Snapshot, *, model_name: str, block_tokens: int) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Exposition(counts, snapshot, model_name=model_name, block_tokens=block_tokens))
    return generate_latest(registry)


class EngineMetrics:
    """What one side counts: the engine loop by its thread alone, the HTTP side by its event loop alone."""

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self._patterns = patterns
        self.counts = new_counts(patterns)

    def first_token(self, cell: int, *, ttft_seconds: float, queue_seconds: float | None) -> None:
        self.counts.ttft[cell].observe(ttft_seconds)
        if queue_seconds is not None:
            self.counts.queue[cell].observe(queue_seconds)

    def rejected(self, reason: str | None) -> None:
        """Count a request that was turned away; None = it was not, so nothing is counted."""
        if reason is not None:
            self.counts.rejections[reason] += 1

    def finished(self, request: FinishedRequest) -> None:
        counts = self.counts
        counts.finished[request.reason][isl_cell(request.isl)][bisect_right(OSL_EDGES, request.osl) - 1] += 1
        pattern = pattern_of(request.isl, request.osl, self._patterns)
        counts.e2e[pattern].observe(request.e2e_seconds)
        if request.ttft_seconds is not None:
            counts.finished_ttft[pattern].observe(request.ttft_seconds)
        if request.itl_seconds is not None:
            counts.finished_itl[pattern].observe(request.itl_seconds)


Rows = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _histogram(
    name: str, text: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], Histogram]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in rows:
        family.add_metric(values, histogram.cumulative(), histogram.sum)
    return family


class _Exposition(Collector):
    """Turns counts and a snapshot into metric families."""

    def __init__(self, counts: Counts, snapshot: Snapshot, *, model_name: str, block_tokens: int) -> None:
        self._counts = counts
        self._snapshot = snapshot
        self._model_name = model_name
        self._block_tokens = block_tokens

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield from _requests(self._counts, snapshot)
        yield from _times(self._counts)
        yield from _resources(self._counts, snapshot)
        yield from _settings(self._counts, snapshot)
        alias = _Aliases(self._counts, snapshot, labels=(self._model_name, "0"))
        yield from alias.load(self._block_tokens)
        yield from alias.totals()
        yield from alias.times()


def _requests(counts: Counts, now: Snapshot) -> Iterator[Metric]:
    isl = [str(edge) for edge in ISL_EDGES]
    osl = [str(edge) for edge in OSL_EDGES]
    yield _counter(
        f"{PREFIX}requests_arrived",
        "Requests accepted, by lower edge of the input length in tokens.",
        ("isl",),
        (((edge,), count) for edge, count in zip(isl, counts.arrived, strict=True)),
    )
    yield _counter(
        f"{PREFIX}requests_finished",
        "Requests ended, by lower edges of input and output length in tokens, and by reason.",
        ("isl", "osl", "reason"),
        (
            ((isl[row], osl[column], reason.value), cells[row][column])
            for reason, cells in counts.finished.items()
            for row in range(len(isl))
            for column in range(len(osl))
        ),
    )
    yield _counter(
        f"{PREFIX}request_rejections",
        "Requests turned away before they were served, by reason.",
        ("reason",),
        (((reason,), count) for reason, count in counts.rejections.items()),
    )
    yield _gauge(f"{PREFIX}requests_running", "Requests in the batch.", (), [((), now.running)])
    yield _gauge(f"{PREFIX}requests_waiting", "Requests in the queue.", (), [((), now.waiting)])
    yield _gauge(
        f"{PREFIX}requests_over_cap",
        "Running requests above max_num_seqs: they drain after it was lowered.",
        (),
        [((), max(0, now.running - now.effective.max_num_seqs))],
    )
    yield _gauge(
        f"{PREFIX}waiting_prompt_tokens",
        "Prompt tokens of the waiting requests.",
        (),
        [((), now.waiting_prompt_tokens)],
    )
    yield _gauge(
        f"{PREFIX}running_context_tokens",
        "Tokens in the context of the running requests.",
        (),
        [((), now.running_context_tokens)],
    )
    yield _gauge(
        f"{PREFIX}running_output_tokens",
        "Running requests whose output has reached the edge, in tokens.",
        ("osl",),
        (((str(edge),), count) for edge, count in now.running_output_past_edges.items()),
    )


def _lora(lora: LoraUse) -> Iterator[Metric]:
    yield _gauge(
        f"{PREFIX}lora_requests",
        "Requests of each loaded LoRA adapter, by state.",
        ("adapter", "state"),
        (((name, state), count) for name, states in lora.requests.items() for state, count in states.items()),
    )
    yield _gauge(f"{PREFIX}max_loras", "LoRA adapters that may be loaded at once.", (), [((), lora.max_loras)])


def _times(counts: Counts) -> Iterator[Metric]:
    by_isl = (
        ("ttft_seconds", "Arrival to first token.", counts.ttft),
        ("itl_seconds", "Between two tokens of a request.", counts.itl),
        ("queue_seconds", "Arrival to the first step of a request.", counts.queue),
    )
    for name, text, cells in by_isl:
        rows = (((str(edge),), cell) for edge, cell in zip(ISL_EDGES, cells, strict=True))
        yield _histogram(f"{PREFIX}{name}", f"{text} Seconds, by lower edge of the input length.", ("isl",), rows)
    by_pattern = (
        ("finished_ttft_seconds", "Arrival to first token, counted at the end of the request.", counts.finished_ttft),
        ("finished_itl_seconds", "Mean time between tokens, counted at the end of the request.", counts.finished_itl),
        ("e2e_seconds", "Arrival to end.", counts.e2e),
    )
    for name, text, patterns in by_pattern:
        named = (((pattern,), cell) for pattern, cell in patterns.items())
        yield _histogram(f"{PREFIX}{name}", f"{text} Seconds, by query pattern.", ("pattern",), named)


def _resources(counts: Counts, now: Snapshot) -> Iterator[Metric]:
    totals = (
        ("prompt_tokens", "Prompt tokens of the requests that got their first token.", counts.prompt_tokens),
        ("cached_prompt_tokens", "Prompt tokens taken from the prefix cache.", counts.cached_prompt_tokens),
        ("generation_tokens", "Tokens generated.", counts.generation_tokens),
        ("pooled_requests", "Inputs embedded.", counts.pooled_requests),
        ("tokenizer_characters", "Characters of text that became tokens.", counts.encoded_characters),
        ("tokenizer_tokens", "Tokens that text became.", counts.encoded_tokens),
        ("tokenizer_seconds", "Time that making tokens of text took.", counts.encoding_seconds),
        ("steps", "Steps computed.", counts.steps),
        ("failed_steps", "Steps that failed with all their requests.", counts.failed_steps),
        (
            "corrupted_requests",
            "Requests that failed since the model's output was not finite.",
            counts.corrupted_requests,
        ),
        ("draft_tokens", "Tokens guessed ahead by speculative decoding.", now.drafted_tokens),
        ("accepted_draft_tokens", "Guessed tokens that were right.", now.accepted_tokens),
    )
    for name, text, value in totals:
        yield _counter(f"{PREFIX}{name}", text, (), [((), value)])
    blocks = (("used", now.kv_used), ("cached", now.kv_cached), ("free", now.kv_free))
    yield _gauge(
        f"{PREFIX}kv_blocks",
        "KV-cache blocks: used by requests, kept for their prefix, free.",
        ("state",),
        (((state,), value) for state, value in blocks),
    )
    if now.kv_waste_ratio is not None:
        yield _gauge(
            f"{PREFIX}kv_waste_ratio",
            "Share of the token slots in used KV-cache blocks that hold no token.",
            (),
            [((), now.kv_waste_ratio)],
        )
    yield _counter(
        f"{PREFIX}preemptions",
        "Running requests sent back to the queue, by cause.",
        ("cause",),
        (((cause,), value) for cause, value in now.preemptions.items()),
    )
    if now.host is not None:
        yield from _host(now.host)
    if now.lora is not None:
        yield from _lora(now.lora)
    yield _gauge(
        f"{PREFIX}memory_bytes",
        "Memory by kind; a kind that is unknown is absent.",
        ("kind",),
        (((kind,), value) for kind, value in now.memory_bytes.items()),
    )
    yield _gauge(
        f"{PREFIX}start_seconds",
        "Time that the start of this process took, by phase.",
        ("phase",),
        (((phase,), value) for phase, value in now.start_seconds.items()),
    )


def _host(host: HostUse) -> Iterator[Metric]:
    yield _gauge(
        f"{PREFIX}host_kv_blocks",
        "Places for evicted KV blocks in host memory.",
        ("state",),
        [(("used",), host.used), (("free",), host.slots - host.used)],
    )
    yield _counter(
        f"{PREFIX}host_kv_bytes",
        "KV blocks copied to host memory and back, in bytes.",
        ("direction",),
        [(("stored",), host.stored_blocks * host.block_bytes), (("loaded",), host.loaded_blocks * host.block_bytes)],
    )
    yield _counter(
        f"{PREFIX}host_cached_tokens",
        "Tokens whose KV came back from host memory instead of being computed again.",
        (),
        [((), host.loaded_blocks * host.tokens_per_block)],
    )


def _settings(counts: Counts, now: Snapshot) -> Iterator[Metric]:
    kinds = (("capacity", now.capacity), ("spec", now.spec), ("effective", now.effective))
    yield _gauge(
        f"{PREFIX}batching_limit",
        "Live batch settings and policy: the envelope's upper bound, what is asked, what acts; no limit, no series.",
        ("name", "kind"),
        (
            ((name, kind), value)
            for kind, settings in kinds
            for name, value in {**settings.as_dict(), **now.policy_limits.get(kind, {})}.items()
        ),
    )
    yield _gauge(
        f"{PREFIX}settings_generation",
        "Generation of the batch settings that act.",
        (),
        [((), now.settings_generation)],
    )
    yield _gauge(
        f"{PREFIX}policy_version",
        "Version of the live policy that acts; it begins with 1.",
        (),
        [((), now.policy_version)],
    )
    yield _gauge(
        f"{PREFIX}paused",
        "1 while an administrator has paused this replica in that mode: new requests are refused.",
        ("mode",),
        (((mode,), int(mode == now.pause_mode)) for mode in PAUSE_MODES),
    )
    yield _counter(
        f"{PREFIX}config_updates",
        "Changes of batch settings, policy and KV cache size, by result.",
        ("result",),
        (((result,), value) for result, value in counts.settings_changes.items()),
    )
    if now.step_model is not None:
        yield _gauge(
            f"{PREFIX}step_model",
            "Coefficients of the step-time formula.",
            ("term",),
            (((term.name,), getattr(now.step_model, term.name)) for term in fields(now.step_model)),
        )
    if now.step_model_residual_ratio is not None:
        yield _gauge(
            f"{PREFIX}step_model_residual_ratio",
            "Mean relative error of the formula against the measured steps.",
            (),
            [((), now.step_model_residual_ratio)],
        )
    yield _gauge(f"{PREFIX}step_model_samples", "Steps behind the residual ratio.", (), [((), now.step_model_samples)])


class _Aliases:
    """The same facts under vLLM's names, so that existing gateways, boards and scalers work unchanged."""

    def __init__(self, counts: Counts, now: Snapshot, *, labels: tuple[str, str]) -> None:
        self._counts = counts
        self._now = now
        self._labels = labels

    def _one(self, make: Callable[..., Metric], name: str, value: float) -> Metric:
        return make(f"vllm:{name}", f"Alias for vLLM's {name}.", ("model_name", "engine"), [(self._labels, value)])

    def load(self, block_tokens: int) -> Iterator[Metric]:
        now = self._now
        blocks = now.kv_used + now.kv_cached + now.kv_free
        yield self._one(_gauge, "num_requests_running", now.running)
        yield self._one(_gauge, "num_requests_waiting", now.waiting)
        yield self._one(_gauge, "kv_cache_usage_perc", now.kv_used / blocks if blocks else 0.0)
        yield _gauge(
            "vllm:cache_config_info",
            "Alias for vLLM's cache_config_info.",
            ("model_name", "engine", "block_size", "num_gpu_blocks"),
            [((*self._labels, str(block_tokens), str(blocks)), 1)],
        )

        if now.lora is not None:
            states = now.lora.requests
            names = [",".join(name for name in states if states[name][state]) for state in ("running", "waiting")]
            yield _gauge(
                "vllm:lora_requests_info",
                "Alias for vLLM's lora_requests_info: adapters with requests; the value is the time of the epoch.",
                ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
                [((str(now.lora.max_loras), *names), now.lora.at_seconds)],
            )

    def totals(self) -> Iterator[Metric]:
        counts = self._counts
        yield self._one(_counter, "prompt_tokens", counts.prompt_tokens)
        yield self._one(_counter, "generation_tokens", counts.generation_tokens)
        yield self._one(_counter, "prefix_cache_queries", counts.prompt_tokens)
        yield self._one(_counter, "prefix_cache_hits", counts.cached_prompt_tokens)
        yield self._one(_counter, "corrupted_requests", counts.corrupted_requests)
        yield self._one(_counter, "spec_decode_num_draft_tokens", self._now.drafted_tokens)
        yield self._one(_counter, "spec_decode_num_accepted_tokens", self._now.accepted_tokens)
        yield self._one(_counter, "num_preemptions", sum(self._now.preemptions.values()))
        yield _counter(
            "vllm:admission_rejections",
            "Alias for vLLM's admission_rejections.",
            ("model_name", "engine", "reason"),
            [((*self._labels, "queue_full"), counts.rejections["queue_full"])],
        )
        yield _counter(
            "vllm:request_success",
            "Alias for vLLM's request_success.",
            ("model_name", "engine", "finished_reason"),
            (
                ((*self._labels, reason.value), sum(map(sum, cells)))
                for reason, cells in counts.finished.items()
                if reason is not FinishReason.ERROR
            ),
        )

    def times(self) -> Iterator[Metric]:
        counts = self._counts
        histograms = (
            ("time_to_first_token_seconds", counts.ttft),
            ("inter_token_latency_seconds", counts.itl),
            ("request_queue_time_seconds", counts.queue),
            ("e2e_request_latency_seconds", list(counts.e2e.values())),
        )
        for name, cells in histograms:
            yield _histogram(
                f"vllm:{name}",
                f"Alias for vLLM's {name}.",
                ("model_name", "engine"),
                [(self._labels, add_up(cells))],
            )
