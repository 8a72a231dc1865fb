"""From the engines' samples to `Demand`: names of the series, rates, percentiles, freshness. Pure.

`scrape` brings rings of samples, `prometheus` brings rates that the server computed; both end in one `PodWindow` for
each pod, and `combine` sums those. A missing series is unknown, never zero.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import compress, pairwise
from operator import lt

from tidegate_engine.steptime import StepModel
from tidegate_operator.observation import LATELY_SECONDS, Demand, MetricsState

PREFIX = "tidegate_engine_"
WINDOW_SECONDS = 60.0
MIN_SCRAPES = 4
"""Fewer scrapes than these make no rate: the first steps of a counter are mostly noise."""


class Kind(StrEnum):
    RATE = "rate"
    LEVEL = "level"


@dataclass(frozen=True, slots=True)
class Term:
    """One quantity: the series it comes from and the labels that stay; all others are summed away."""

    name: str
    series: str
    kind: Kind
    labels: tuple[str, ...] = ()

    @property
    def metric(self) -> str:
        return PREFIX + self.series


TERMS = (
    Term("arrivals", "requests_arrived_total", Kind.RATE, ("isl",)),
    Term("finished", "requests_finished_total", Kind.RATE, ("isl", "osl")),
    Term("ttft", "ttft_seconds_bucket", Kind.RATE, ("le",)),
    Term("itl", "itl_seconds_bucket", Kind.RATE, ("le",)),
    Term("queue", "queue_seconds_bucket", Kind.RATE, ("le",)),
    Term("finished_ttft", "finished_ttft_seconds_bucket", Kind.RATE, ("pattern", "le")),
    Term("finished_itl", "finished_itl_seconds_bucket", Kind.RATE, ("pattern", "le")),
    Term("end_to_end", "e2e_seconds_bucket", Kind.RATE, ("pattern", "le")),
    Term("prompt_tokens", "prompt_tokens_total", Kind.RATE),
    Term("cached_prompt_tokens", "cached_prompt_tokens_total", Kind.RATE),
    Term("generation_tokens", "generation_tokens_total", Kind.RATE),
    Term("preemptions", "preemptions_total", Kind.RATE),
    Term("running", "requests_running", Kind.LEVEL),
    Term("waiting", "requests_waiting", Kind.LEVEL),
    Term("waiting_prompt_tokens", "waiting_prompt_tokens", Kind.LEVEL),
    Term("running_context_tokens", "running_context_tokens", Kind.LEVEL),
    Term("running_output", "running_output_tokens", Kind.LEVEL, ("osl",)),
    Term("kv_blocks", "kv_blocks", Kind.LEVEL, ("state",)),
    Term("step_model", "step_model", Kind.LEVEL, ("term",)),
    Term("step_model_residual_ratio", "step_model_residual_ratio", Kind.LEVEL, ("term",)),
    Term("step_model_samples", "step_model_samples", Kind.LEVEL, ("term",)),
)
RATE_TERMS = frozenset(term.name for term in TERMS if term.kind is Kind.RATE)
_TERM_BY_METRIC = {term.metric: term for term in TERMS}

Values = Mapping[tuple[str, ...], float]
"""Numbers by (term, label values in the term's order)."""


@dataclass(frozen=True, slots=True)
class PodSample:
    """One scrape of one pod: counters as they stood, levels as they were. `at` in Unix seconds."""

    at: float
    values: Values
    _fell: "tuple[PodSample, tuple[tuple[str, ...], ...]] | None" = field(
        default=None, init=False, repr=False, compare=False
    )
    """The sample after it, and what is lower there: most of a window's pairs were compared for the window before."""

    def fell_until(self, after: "PodSample") -> tuple[tuple[str, ...], ...]:
        """Keys whose values are lower in `after`; one that is missing stands at 0."""
        if self._fell is None or self._fell[0] is not after:
            object.__setattr__(self, "_fell", (after, _lower(self.values, after.values)))
        assert self._fell is not None
        return self._fell[1]


def _lower(before: Values, after: Values) -> tuple[tuple[str, ...], ...]:
    if list(before) == list(after):
        return tuple(compress(before, map(lt, after.values(), before.values())))
    return tuple(key for key in before.keys() | after.keys() if after.get(key, 0.0) < before.get(key, 0.0))


@dataclass(frozen=True, slots=True)
class PodWindow:
    """One pod over a window: rates per second, and levels at its end."""

    pod: str
    sampled_at: float
    seconds: float
    scrapes: int
    values: Values
    arrived_lately: float | None = None
    """Requests that came within the last `LATELY_SECONDS`; None where the source tells rates alone."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a metrics source saw of one object. `error` is a sentence when it could not look."""

    windows: tuple[PodWindow, ...] = ()
    error: str | None = None
    samples: Mapping[str, Sequence[PodSample]] = field(default_factory=dict)
    """What the windows were made of, by pod, where the source has it."""


def measured_of(samples: Mapping[str, Sequence[PodSample]]) -> Measured:
    """What the samples of each pod, oldest first, tell; a pod without any is left out."""
    known = {pod: ring for pod, ring in samples.items() if ring}
    windows = (window_of(pod, ring) for pod, ring in known.items())
    return Measured(tuple(window for window in windows if window is not None), samples=known)


_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def parse_exposition(text: str, at: float) -> PodSample:
    """Read our series out of a Prometheus text page; NaN and everything else is left out.

    A reader of its own because the client library's takes longer for one page than a whole reconcile pass.
    """
    values: dict[tuple[str, ...], float] = {}
    for line in text.splitlines():
        if not line.startswith(PREFIX):
            continue
        head, _, tail = line.partition("{")
        if tail:
            labels, _, rest = tail.rpartition("}")
            term = _TERM_BY_METRIC.get(head)
        else:
            head, _, rest = line.partition(" ")
            labels, term = "", _TERM_BY_METRIC.get(head)
        if term is None or not rest.split():
            continue
        value = float(rest.split()[0])
        if math.isnan(value):
            continue
        key = canonical_key(term, dict(_LABEL.findall(labels)) if term.labels else {})
        values[key] = values.get(key, 0.0) + value
    return PodSample(at, values)


def canonical_key(term: Term, labels: Mapping[str, str]) -> tuple[str, ...]:
    """The key under which a series of `term` with these labels is summed."""
    return (term.name, *(_canonical(name, labels.get(name, "")) for name in term.labels))


def _canonical(name: str, value: str) -> str:
    """`le` is written by libraries as 1, 1.0 or 1e+00: one spelling, so that pods can be summed."""
    return repr(float(value)) if name == "le" and value else value


def window_of(pod: str, samples: Sequence[PodSample]) -> PodWindow | None:
    """Rates over the last `WINDOW_SECONDS` of `samples` (oldest first), and the newest levels; None without samples.

    A counter that fell was reset: what it shows since is what it gained. Below `MIN_SCRAPES` there are no rates.
    """
    if not samples:
        return None
    newest = samples[-1]
    recent = _last(samples, WINDOW_SECONDS)
    oldest = recent[0]
    seconds = newest.at - oldest.at
    if len(recent) < MIN_SCRAPES or seconds <= 0:
        values = {key: value for key, value in newest.values.items() if key[0] not in RATE_TERMS}
        return PodWindow(pod, newest.at, seconds, len(recent), values)
    before = oldest.values
    values = {
        key: (value - before.get(key, 0.0)) / seconds if key[0] in RATE_TERMS else value
        for key, value in newest.values.items()
    }
    for key in {key for sample, after in pairwise(recent) for key in sample.fell_until(after)}:
        if key[0] in RATE_TERMS and key in values:
            values[key] = _increase([sample.values.get(key, 0.0) for sample in recent]) / seconds
    return PodWindow(pod, newest.at, seconds, len(recent), values, _arrived_lately(recent))


def _arrived_lately(samples: Sequence[PodSample]) -> float:
    lately = [sample.values for sample in _last(samples, LATELY_SECONDS)]
    return sum(_increase([values.get(key, 0.0) for values in lately]) for key in lately[-1] if key[0] == "arrivals")


def _last(samples: Sequence[PodSample], seconds: float) -> list[PodSample]:
    """Those of so many seconds up to the newest; scrapes are a little early or late."""
    begin = samples[-1].at - seconds - 0.5
    return [sample for sample in samples if sample.at >= begin]


def _increase(values: Sequence[float]) -> float:
    return sum(after - before if after >= before else after for before, after in pairwise(values))


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """The q-quantile of cumulative buckets (upper bound → count), linear inside a bucket; None without observations.

    Above the last finite bound the answer is that bound, as in PromQL.
    """
    bounds = sorted(buckets)
    if not bounds or bounds[-1] != math.inf or buckets[math.inf] <= 0:
        return None
    rank = q * buckets[math.inf]
    below_bound, below_count = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank:
            if bound == math.inf:
                return below_bound if below_bound > 0 else None
            if count <= below_count:
                return bound
            return below_bound + (bound - below_bound) * (rank - below_count) / (count - below_count)
        below_bound, below_count = bound, max(count, below_count)
    return below_bound


def share_within(buckets: Mapping[float, float], limit: float) -> float | None:
    """The share of cumulative buckets at or below `limit`: the inverse of `quantile`; None without observations."""
    total = buckets.get(math.inf, 0.0)
    if total <= 0:
        return None
    below_bound, below_count = 0.0, 0.0
    for bound in sorted(buckets):
        count = max(buckets[bound], below_count)
        if limit < bound:
            part = 0.0 if bound == math.inf else (limit - below_bound) / (bound - below_bound)
            return (below_count + part * (count - below_count)) / total
        below_bound, below_count = bound, count
    return 1.0


def combine(
    measured: Measured, *, ready: Mapping[str, float | None], now: float, stale_after_seconds: float
) -> tuple[Demand | None, MetricsState, str]:
    """Sum the windows of pods that live and are fresh; the state and a sentence say what is missing.

    `ready` has the pods that are, and since when as far as that is known.
    """
    if measured.error is not None:
        return None, MetricsState.ABSENT, measured.error
    if not ready:
        return None, MetricsState.ABSENT, "no replica is ready to be measured"
    known = [window for window in measured.windows if window.pod in ready]
    if not known:
        return None, MetricsState.ABSENT, f"none of the {len(ready)} ready replicas has given any metrics"
    fresh = [window for window in known if now - window.sampled_at <= stale_after_seconds]
    if not fresh:
        age = now - max(window.sampled_at for window in known)
        return (
            None,
            MetricsState.STALE,
            f"the newest sample is {age:.0f} s old, above {stale_after_seconds:.0f} s",
        )
    covered = [window for window in fresh if window.scrapes >= MIN_SCRAPES and ("running",) in window.values]
    if not covered:
        scrapes = max(window.scrapes for window in fresh)
        return None, MetricsState.ABSENT, f"{scrapes} of the {MIN_SCRAPES} scrapes that a rate needs are there"
    message = f"{len(covered)} of {len(ready)} ready replicas are measured"
    return _demand(covered, ready), MetricsState.FRESH, message


def _demand(covered: Sequence[PodWindow], ready: Mapping[str, float | None]) -> Demand:
    """Rates are of the longest window: what has come to a young pod would else count on top of what had come to the
    others before it was there."""
    longest = max(window.seconds for window in covered)
    sums: dict[tuple[str, ...], float] = {}
    for window in covered:
        share = _share_lived(window, ready[window.pod], longest)
        for key, value in window.values.items():
            sums[key] = sums.get(key, 0.0) + (value * share if key[0] in RATE_TERMS else value)
    totals: dict[str, dict[tuple[str, ...], float]] = {}
    for key, value in sums.items():
        totals.setdefault(key[0], {})[key[1:]] = value

    def total(name: str) -> float | None:
        return totals[name].get(()) if name in totals else None

    def cells_of(name: str) -> dict[int, float]:
        return {int(label): value for (label,), value in totals.get(name, {}).items()}

    buckets: dict[str, dict[float, float]] = {
        name: {float(label): value for (label,), value in totals[name].items()}
        for name in ("ttft", "itl", "queue")
        if name in totals
    }

    def p95(name: str) -> float | None:
        return quantile(buckets.get(name, {}), 0.95)

    finished: dict[tuple[str, str], dict[float, float]] = {}
    for name, figure in (("finished_ttft", "ttft"), ("finished_itl", "itl"), ("end_to_end", "endToEnd")):
        for (pattern, bound), value in totals.get(name, {}).items():
            finished.setdefault((figure, pattern), {})[float(bound)] = value

    lately = [window.arrived_lately for window in covered if window.arrived_lately is not None]
    kv = totals.get("kv_blocks", {})
    kv_total = sum(kv.values())
    return Demand(
        window_seconds=longest,
        sampled_at=min(window.sampled_at for window in covered),
        arrivals_per_second=cells_of("arrivals"),
        finished_per_second={(int(isl), int(osl)): value for (isl, osl), value in totals.get("finished", {}).items()},
        running=total("running") or 0.0,
        waiting=total("waiting") or 0.0,
        waiting_prompt_tokens=total("waiting_prompt_tokens") or 0.0,
        running_context_tokens=total("running_context_tokens") or 0.0,
        running_past_output_edge=cells_of("running_output"),
        ttft_p95_seconds=p95("ttft"),
        itl_p95_seconds=p95("itl"),
        queue_p95_seconds=p95("queue"),
        prompt_tokens_per_second=total("prompt_tokens"),
        cached_prompt_tokens_per_second=total("cached_prompt_tokens"),
        generation_tokens_per_second=total("generation_tokens"),
        kv_used_ratio=kv.get(("used",), 0.0) / kv_total if kv_total > 0 else None,
        preemptions_per_second=total("preemptions"),
        pods_covered=len(covered),
        arrived_lately=sum(lately) if len(lately) == len(covered) else None,
        finished_buckets=finished,
        buckets=buckets,
    )


def _share_lived(window: PodWindow, ready_at: float | None, seconds: float) -> float:
    """The part of so many seconds, up to the window's end, in which the pod was Ready; 1 where that is unknown."""
    if ready_at is None or window.seconds >= seconds:
        return 1.0
    return min(1.0, max(window.seconds, window.sampled_at - ready_at) / seconds)


def level(window: PodWindow | None, name: str) -> float | None:
    """One unlabelled level of a pod, None when unknown."""
    return None if window is None else window.values.get((name,))


def step_model_of(window: PodWindow | None) -> tuple[StepModel | None, float | None, float | None]:
    """The pod's fitted step model, its worst residual ratio and its fewest samples, as far as they are known."""
    if window is None:
        return None, None, None
    terms = {key[1]: value for key, value in window.values.items() if key[0] == "step_model"}
    try:
        model = StepModel(**terms) if terms else None
    except TypeError:
        model = None
    residuals = [value for key, value in window.values.items() if key[0] == "step_model_residual_ratio"]
    samples = [value for key, value in window.values.items() if key[0] == "step_model_samples"]
    return model, max(residuals, default=None), min(samples, default=None)
