"""What a simulation showed: attainment of the goals, cost, scaling and latencies, overall and by query pattern.

Pure: columns in, figures out. Requests count by when they arrived, pods by when they stood.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from tidegate_engine.settings import BatchSettings, pattern_of
from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.records import Outcome, Records, Use
from tidegate_sim.replica import unloaded_ttft_seconds
from tidegate_sim.specification import FleetSpec, Goals

REVERSAL_SECONDS = 600.0
QUANTILES = (0.5, 0.95, 0.99)
FIXED_CHUNK_TOKENS = 2048
"""In which an idle replica reads prompts for the goal on TTFT, whatever a policy sets."""


@dataclass(frozen=True, slots=True)
class KindPoint:
    """One kind of pod at one moment."""

    desired: int
    phases: Mapping[ReplicaPhase, int]
    settings: BatchSettings


@dataclass(frozen=True, slots=True)
class Point:
    """The fleet at one moment, and the traffic since the moment before. Times are seconds from the start."""

    at: float
    arrivals_per_second: float
    mix: Mapping[str, float]
    """Arrivals by pattern, as shares."""
    desired: int
    phases: Mapping[ReplicaPhase, int]
    settings: BatchSettings
    """Of the first kind."""
    running: int
    waiting: int
    held: int
    kv_used_ratio: float | None
    """Of the fullest pod."""
    ttft_p95_seconds: float | None
    """Of first tokens since the last point."""
    kinds: Mapping[str, KindPoint] = field(default_factory=dict)
    """Where there are several."""

    def pods(self, *phases: ReplicaPhase) -> int:
        return sum(self.phases.get(phase, 0) for phase in phases)


@dataclass(frozen=True, slots=True)
class Change:
    """An order that changed something of one kind of pod."""

    at: float
    before: int
    after: int
    settings_before: BatchSettings
    settings_after: BatchSettings
    reason: str
    message: str
    kind: str = ""
    """Where there are several."""

    @property
    def scales(self) -> bool:
        return self.before != self.after

    @property
    def retunes(self) -> bool:
        return self.settings_before != self.settings_after


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a latency in seconds; None when nothing got so far."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None


@dataclass(frozen=True, slots=True)
class Service:
    """How a group of requests was served."""

    arrived: int
    finished: int
    met: int
    """Finished within the goals."""
    outcomes: Mapping[str, int]
    ttft: Spread
    itl: Spread
    queue: Spread

    @property
    def attainment(self) -> float | None:
        """Met of all that arrived: refused, failed and timed out ones are missed."""
        return self.met / self.arrived if self.arrived else None


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that came out of one simulation."""

    controller: str
    seed: int
    duration_seconds: float
    """Of the workload; pods are paid for up to then, requests followed to their end."""
    ended_at_seconds: float
    fleet: FleetSpec
    goals: Goals
    records: Records
    timeline: Sequence[Point]
    changes: Sequence[Change]
    orders: int
    reasons: Mapping[str, int]
    """How many orders had each reason."""
    uses: Mapping[str, Use]
    """By kind of pod."""
    preemptions: int
    overall: Service
    patterns: Mapping[str, Service] = field(default_factory=dict)

    @property
    def attainment(self) -> float | None:
        return self.overall.attainment

    @property
    def goodput(self) -> float:
        """Requests served within the goals, a second."""
        return self.overall.met / self.duration_seconds if self.duration_seconds else 0.0

    @property
    def gpu_seconds(self) -> float:
        return sum(use.gpu_seconds for use in self.uses.values())

    @property
    def gpu_hours(self) -> float:
        return self.gpu_seconds / 3600

    @property
    def pods_created(self) -> int:
        return sum(use.pods_created for use in self.uses.values())

    @property
    def cost(self) -> float | None:
        """None where a kind has no price."""
        costs = [use.cost for use in self.uses.values()]
        known = [cost for cost in costs if cost is not None]
        return sum(known) if len(known) == len(costs) else None

    @property
    def scalings(self) -> list[Change]:
        return [change for change in self.changes if change.scales]

    @property
    def retunings(self) -> list[Change]:
        return [change for change in self.changes if change.retunes]

    @property
    def scalings_per_hour(self) -> float:
        return len(self.scalings) / (self.duration_seconds / 3600) if self.duration_seconds else 0.0

    @property
    def reversals(self) -> int:
        """Scalings that took back the direction of the one before, of the same kind, within ten minutes."""
        kinds: dict[str, list[Change]] = {}
        for change in self.scalings:
            kinds.setdefault(change.kind, []).append(change)
        return sum(
            (after.after - after.before) * (before.after - before.before) < 0
            and after.at - before.at <= REVERSAL_SECONDS
            for changes in kinds.values()
            for before, after in pairwise(changes)
        )

    @property
    def largest_step(self) -> int:
        return max((abs(change.after - change.before) for change in self.scalings), default=0)

    def between(self, start_seconds: float, end_seconds: float) -> Service:
        """How those were served that arrived in [start, end), a burst's first minutes for example."""
        chosen = [n for n, at in enumerate(self.records.at) if start_seconds <= at < end_seconds]
        return service_of(self.records, chosen, met=self._met(chosen))

    def recovered_at(self, after_seconds: float, *, target: float = 0.99, for_seconds: float = 120.0) -> float | None:
        """When the first stretch of so long begins whose every minute serves that share in time; None = never."""
        minutes: dict[int, tuple[int, int]] = {}
        for index, at in enumerate(self.records.at):
            if at >= after_seconds:
                minute = int((at - after_seconds) // 60)
                met, all_ = minutes.get(minute, (0, 0))
                minutes[minute] = met + self.has_met(index), all_ + 1
        wanted = max(1, math.ceil(for_seconds / 60))
        run = 0
        for minute in range(max(minutes, default=-1) + 1):
            met, all_ = minutes.get(minute, (0, 0))
            run = run + 1 if met >= target * all_ else 0
            if run == wanted:
                return after_seconds + 60.0 * (minute - wanted + 1)
        return None

    def has_met(self, index: int) -> bool:
        return has_met(self.records, index, self.goals, limit=self._limit(index))

    def _met(self, indices: Iterable[int]) -> int:
        return sum(self.has_met(index) for index in indices)

    def _limit(self, index: int) -> float:
        return ttft_limit(self.records.isl[index], self.goals, self.fleet)

    def summary(self) -> dict[str, object]:
        """Figures as JSON: what tables and files show."""
        return {
            "controller": self.controller,
            "seed": self.seed,
            "duration_seconds": self.duration_seconds,
            "requests": len(self.records),
            "attainment": self.attainment,
            "goodput_per_second": self.goodput,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
            "scalings": len(self.scalings),
            "scalings_per_hour": self.scalings_per_hour,
            "reversals": self.reversals,
            "largest_step": self.largest_step,
            "settings_changes": len(self.retunings),
            "preemptions": self.preemptions,
            "pods_created": self.pods_created,
            "kinds": {name: {**asdict(use), "cost": use.cost} for name, use in self.uses.items()},
            "overall": service_dict(self.overall),
            "patterns": {name: service_dict(service) for name, service in self.patterns.items()},
        }


def service_dict(service: Service) -> dict[str, object]:
    return {**asdict(service), "attainment": service.attainment}


def ttft_limit(isl: int, goals: Goals, fleet: FleetSpec) -> float:
    """Seconds to the first token that are still good for a prompt of this length."""
    if not goals.unloaded_factor:
        return goals.ttft_seconds
    idle = unloaded_ttft_seconds(fleet.profile.step, isl, chunk_tokens=FIXED_CHUNK_TOKENS)
    return max(goals.ttft_seconds, goals.unloaded_factor * idle)


def has_met(records: Records, index: int, goals: Goals, *, limit: float) -> bool:
    if records.outcome[index] != Outcome.FINISHED or not records.ttft[index] <= limit:
        return False
    itl = records.itl[index]
    return math.isnan(itl) or itl <= goals.itl_seconds


def service_of(records: Records, indices: Sequence[int], *, met: int) -> Service:
    outcomes = dict.fromkeys(Outcome, 0)
    for index in indices:
        outcomes[Outcome(records.outcome[index])] += 1
    return Service(
        arrived=len(indices),
        finished=outcomes[Outcome.FINISHED],
        met=met,
        outcomes={outcome.name.lower(): count for outcome, count in outcomes.items() if count},
        ttft=spread(records.ttft[index] for index in indices),
        itl=spread(records.itl[index] for index in indices),
        queue=spread(records.queue[index] for index in indices),
    )


def services(records: Records, goals: Goals, fleet: FleetSpec) -> tuple[Service, dict[str, Service]]:
    """All requests, and those of each pattern that came."""
    limits: dict[int, float] = {}
    groups: dict[str, list[int]] = {}
    met: dict[str, int] = {}
    for index, (isl, osl) in enumerate(zip(records.isl, records.osl, strict=True)):
        limit = limits.get(isl)
        if limit is None:
            limit = limits[isl] = ttft_limit(isl, goals, fleet)
        name = pattern_of(isl, osl, goals.patterns)
        groups.setdefault(name, []).append(index)
        met[name] = met.get(name, 0) + has_met(records, index, goals, limit=limit)
    overall = service_of(records, range(len(records)), met=sum(met.values()))
    return overall, {name: service_of(records, groups[name], met=met[name]) for name in sorted(groups)}


def spread(values: Iterable[float]) -> Spread:
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return Spread(None, None, None, None)
    p50, p95, p99 = (quantile(known, q) for q in QUANTILES)
    return Spread(p50, p95, p99, sum(known) / len(known))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of values in order: the smallest that is not below a share `q` of them."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
