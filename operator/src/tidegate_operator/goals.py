"""What was asked of latencies and throughput, and what was seen of it: one reading of `spec.objectives` for all.

Pure. A traffic class with objectives of its own is judged by itself, and the rest without it. Called by `policy`,
`tuning` and `status`; `capacity` knows the same goals by the same names (`Goal.key`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate_operator.api import LatencyObjectives, Objective, Priority, Spec
from tidegate_operator.capacity import PatternTargets, Targets
from tidegate_operator.demand import quantile, share_within
from tidegate_operator.observation import Demand

P95 = 0.95
WORDS = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "queue": "queue time",
    "endToEnd": "end-to-end time",
}


@dataclass(frozen=True, slots=True)
class Judged:
    """One goal and what was observed; `seen_seconds` None = not measured."""

    key: str
    goal_seconds: float
    seen_seconds: float | None = None

    @property
    def words(self) -> str:
        return words_of(self.key)


def words_of(key: str) -> str:
    """`ttft:Chat` as people say it."""
    name, _, pattern = key.partition(":")
    return f"{WORDS.get(name, name)} of {pattern}" if pattern else WORDS.get(name, name)


def in_short(key: str) -> str:
    """`ttft:Chat` as `ttft of Chat`."""
    return key.replace(":", " of ")


def targets_of(spec: Spec) -> Targets:
    """The goals of all requests whose class has none of its own."""
    return _targets(spec.objectives, spec.objectives.long_prompt_factor, spec.objectives.queue_time)


def pattern_targets_of(spec: Spec) -> PatternTargets:
    """The goals of the classes that have their own; what a class does not give is the object's."""
    own = tuple(
        (item.name, _targets(_inherited(item.objectives, spec.objectives), spec.objectives.long_prompt_factor))
        for item in spec.traffic_classes
        if item.objectives is not None
    )
    return PatternTargets(spec.patterns(), own)


def prefers_safety(spec: Spec) -> bool:
    """Whether batch settings may cost some of the rate to bear an overload better."""
    return spec.objectives.priority == Priority.LATENCY


def headroom_percent(spec: Spec) -> float:
    """Share of a replica's capacity that is kept free; with priority Cost no replica is added for it."""
    return 0.0 if spec.objectives.priority == Priority.COST else float(spec.autoscaling.headroom_percent)


def _inherited(own: LatencyObjectives, common: LatencyObjectives) -> LatencyObjectives:
    names = LatencyObjectives.model_fields
    given = {name: value for name in names if (value := getattr(own, name) or getattr(common, name)) is not None}
    return LatencyObjectives(**given)


def _targets(goals: LatencyObjectives, idle_factor: int, queue: Objective | None = None) -> Targets:
    return Targets(
        ttft_seconds=goals.ttft.seconds if goals.ttft else None,
        itl_seconds=goals.inter_token_latency.seconds if goals.inter_token_latency else None,
        queue_seconds=queue.seconds if queue else None,
        end_to_end_seconds=goals.end_to_end.seconds if goals.end_to_end else None,
        idle_factor=float(idle_factor),
    )


def goals_of(spec: Spec) -> tuple[Judged, ...]:
    """Every goal of the object and of its classes."""
    found = []
    for name, targets in (("", targets_of(spec)), *pattern_targets_of(spec).own):
        of = f":{name}" if name else ""
        found += [
            (f"ttft{of}", targets.ttft_seconds),
            (f"itl{of}", targets.itl_seconds),
            (f"queue{of}", targets.queue_seconds),
            (f"endToEnd{of}", targets.end_to_end_seconds),
        ]
    return tuple(Judged(key, goal) for key, goal in found if goal is not None)


def share_of(spec: Spec) -> float:
    """The share of the requests that must keep to each goal: the percentile that is held against it."""
    return spec.objectives.attainment_percent / 100


def judge(spec: Spec, demand: Demand) -> tuple[Judged, ...]:
    """Every goal beside what was observed. The figures of classes are of requests that ended, so they come later."""
    share = share_of(spec)
    p95 = {"ttft": demand.ttft_p95_seconds, "itl": demand.itl_p95_seconds, "queue": demand.queue_p95_seconds}

    def seen(key: str) -> float | None:
        if share == P95 and _is_at_once(spec, key):
            return p95[key]
        return quantile(_buckets(spec, demand, key), share)

    return tuple(replace(item, seen_seconds=seen(item.key)) for item in goals_of(spec))


def attained(spec: Spec, demand: Demand, allowed: Mapping[str, float]) -> float | None:
    """The share within the goal, eased by what is `allowed`, that was kept to least; None where none was measured."""
    goals = eased(goals_of(spec), allowed)
    shares = [share_within(_buckets(spec, demand, item.key), item.goal_seconds) for item in goals]
    return min((share for share in shares if share is not None), default=None)


def _is_at_once(spec: Spec, key: str) -> bool:
    """Whether a goal is judged by what happens to all requests, and not by those of some patterns that ended."""
    return key == "queue" or (key in ("ttft", "itl") and not pattern_targets_of(spec).own)


def _buckets(spec: Spec, demand: Demand, key: str) -> Mapping[float, float]:
    """The histogram that a goal is judged by."""
    if _is_at_once(spec, key):
        return demand.buckets.get(key, {})
    name, _, pattern = key.partition(":")
    apart = {own for own, _ in pattern_targets_of(spec).own}
    rest = [each.name for each in spec.patterns() if each.name not in apart]
    return _ended(demand, name, [pattern] if pattern else rest)


def eased(judged: Sequence[Judged], allowed: Mapping[str, float]) -> tuple[Judged, ...]:
    """The goals with what `Capacity.allowed` adds for long prompts."""
    return tuple(replace(item, goal_seconds=max(item.goal_seconds, allowed.get(item.key, 0.0))) for item in judged)


def allowed_in(inputs: Mapping[str, float]) -> dict[str, float]:
    """`Capacity.allowed` out of the figures of a decision (`allowed_KEY_seconds`)."""
    names = {name: name.removeprefix("allowed_").removesuffix("_seconds") for name in inputs}
    return {key: inputs[name] for name, key in names.items() if name == f"allowed_{key}_seconds"}


def seen_of(demand: Demand, figure: str, patterns: Sequence[str]) -> float | None:
    """The 95th percentile of `ttft`, `itl` or `endToEnd` over the requests of these patterns that ended."""
    return quantile(_ended(demand, figure, patterns), P95)


def _ended(demand: Demand, figure: str, patterns: Sequence[str]) -> dict[float, float]:
    total: dict[float, float] = {}
    for name in patterns:
        for bound, rate in demand.finished_buckets.get((figure, name), {}).items():
            total[bound] = total.get(bound, 0.0) + rate
    return total


def worst_ratio(judged: Sequence[Judged], *, without: Sequence[str] = ()) -> float:
    """The worst observed percentile over its goal; 0 when there is none or nothing was observed."""
    ratios = [item.seen_seconds / item.goal_seconds for item in judged if item.seen_seconds and item.key not in without]
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=0.0)


def miss_of(figures: Mapping[str, float], judged: Sequence[Judged]) -> float:
    """As `worst_ratio`, of noted figures (`KEY_seconds`)."""
    return max((figures.get(f"{item.key}_seconds", 0.0) / item.goal_seconds for item in judged), default=0.0)
