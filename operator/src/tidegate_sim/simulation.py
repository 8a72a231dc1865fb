"""`simulate`: a workload, a fleet and a controller in virtual time, and what came of it; `simulate_together`: several.

The same seed gives the same result. Owns the order of arrivals, ticks and points; pods and engines are the fleet's.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidegate_engine.settings import pattern_of
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import Controller
from tidegate_sim.fleet import Agenda, Fleet, GpuPool, Kind
from tidegate_sim.records import Records
from tidegate_sim.replica import NEVER
from tidegate_sim.results import Change, KindPoint, Point, Result, quantile, services
from tidegate_sim.specification import STRICT, FleetSpec, Goals

POINT_SECONDS = 15.0
SETTLE_SECONDS = 3600.0
"""How long after the last arrival requests are followed at most."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a simulation has come."""

    now: float
    arrived: int
    in_flight: int
    replicas: int


class WorkloadOutOfOrder(ValueError):
    """Arrivals must be in order of time."""


def simulate(
    workload: Iterable[Arrival],
    fleet: FleetSpec,
    controller: Controller,
    *,
    seed: int = 0,
    goals: Goals = STRICT,
    duration_seconds: float | None = None,
    point_seconds: float = POINT_SECONDS,
    watch: Callable[[Progress], None] | None = None,
    leaps: bool = True,
) -> Result:
    """Serve `workload` with `fleet` under `controller`, to the end of every request.

    `duration_seconds` None = up to the last arrival: pods are paid for until then. `leaps` off computes every decode
    step by itself, for proofs.
    """
    agenda = Agenda()
    alone = Deployment(workload, fleet, controller, goals)
    run = _Run(alone, agenda, GpuPool(), number=0, seed=seed, leaps=leaps)
    run.schedule(point_seconds, watch)
    end, ended_at = _serve([run], ((arrival, run.fleet) for arrival in workload), agenda, duration_seconds or 0.0)
    return run.result(end, ended_at)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A workload with its own fleet and controller."""

    workload: Iterable[Arrival]
    fleet: FleetSpec
    controller: Controller
    goals: Goals = STRICT


def simulate_together(
    deployments: Sequence[Deployment],
    *,
    gpus: Mapping[str, int],
    seed: int = 0,
    duration_seconds: float | None = None,
    point_seconds: float = POINT_SECONDS,
) -> list[Result]:
    """Serve all of them on one clock and on the same nodes, which have so many GPUs of each product; a result for each.

    A pod that finds no GPU waits until any fleet frees one; of those that wait, the one created first comes first.
    """
    agenda, pool = Agenda(), GpuPool(gpus)
    runs = [_Run(each, agenda, pool, number=number, seed=seed, leaps=True) for number, each in enumerate(deployments)]
    for run in runs:
        run.schedule(point_seconds, None)
    streams = [[(arrival, run.fleet) for arrival in each.workload] for run, each in zip(runs, deployments, strict=True)]
    merged = heapq.merge(*streams, key=lambda item: item[0].at_seconds)
    end, ended_at = _serve(runs, merged, agenda, duration_seconds or 0.0)
    return [run.result(end, ended_at) for run in runs]


def _serve(
    runs: Sequence["_Run"], arrivals: Iterable[tuple[Arrival, Fleet]], agenda: Agenda, duration_seconds: float
) -> tuple[float, float]:
    """Let all of it arrive and end; returns the workload's duration, and when the last request ended."""
    run_next = agenda.run_next
    now = 0.0
    for arrival, fleet in arrivals:
        at = arrival.at_seconds
        if at < now:
            raise WorkloadOutOfOrder(f"a request at {at} s comes after one at {now} s: sort the workload by time")
        while agenda.next_at < at:
            run_next()
        now = at
        fleet.arrive(arrival)
    end = max(duration_seconds, now)
    for run in runs:
        run.end = end
    fleets = [run.fleet for run in runs]
    while agenda.next_at <= end or (
        agenda.next_at <= end + SETTLE_SECONDS and any(fleet.in_flight for fleet in fleets)
    ):
        now = run_next()
    return end, max(now, end)


class _Run:
    """One simulation under way."""

    def __init__(
        self, deployment: Deployment, agenda: Agenda, pool: GpuPool, *, number: int, seed: int, leaps: bool
    ) -> None:
        self._spec, self._controller, self._goals = deployment.fleet, deployment.controller, deployment.goals
        self._seed = seed
        self._records = Records()
        self.fleet = Fleet(self._spec, self._records, seed=seed, leaps=leaps, agenda=agenda, pool=pool, number=number)
        self._timeline: list[Point] = []
        self._changes: list[Change] = []
        self._reasons: Counter[str] = Counter()
        self._mix: Counter[str] = Counter()
        self._seen = 0
        self._pointed_at = 0.0
        self._watch: Callable[[Progress], None] | None = None
        self._point_seconds = POINT_SECONDS
        self.end = NEVER
        """Of the workload, once it is known."""

    def schedule(self, point_seconds: float, watch: Callable[[Progress], None] | None) -> None:
        self._point_seconds, self._watch = point_seconds, watch
        self.fleet.agenda.put(0.0, self._tick)
        self.fleet.agenda.put(point_seconds, self._point)

    def result(self, duration_seconds: float, ended_at: float) -> Result:
        fleet, records = self.fleet, self._records
        overall, patterns = services(records, self._goals, self._spec)
        return Result(
            controller=self._controller.name,
            seed=self._seed,
            duration_seconds=duration_seconds,
            ended_at_seconds=ended_at,
            fleet=self._spec,
            goals=self._goals,
            records=records,
            timeline=self._timeline,
            changes=self._changes,
            orders=self._reasons.total(),
            reasons=dict(self._reasons),
            uses=fleet.uses(until=duration_seconds),
            preemptions=fleet.preemptions + sum(replica.preemptions for replica in fleet.replicas()),
            overall=overall,
            patterns=patterns,
        )

    def _tick(self, now: float, _: object) -> None:
        fleet = self.fleet
        before = [kind.view() for kind in fleet.kinds]
        order = self._controller.decide(fleet.view(now))
        fleet.agenda.put(now + self._controller.period_seconds, self._tick)
        fleet.order(order.by_kind(fleet.kinds[0].name), now)
        if now > self.end:
            return
        self._reasons[order.reason] += 1
        for was, kind in zip(before, fleet.kinds, strict=True):
            if kind.desired != was.desired_replicas or kind.settings != was.settings:
                name = kind.name if len(fleet.kinds) > 1 else ""
                self._changes.append(
                    Change(
                        now,
                        was.desired_replicas,
                        kind.desired,
                        was.settings,
                        kind.settings,
                        order.reason,
                        order.message,
                        name,
                    )
                )

    def _point(self, now: float, _: object) -> None:
        self.fleet.agenda.put(now + self._point_seconds, self._point)
        fleet, records = self.fleet, self._records
        if now <= self.end:
            self._timeline.append(self._point_at(now))
        if self._watch is not None:
            self._watch(Progress(now, len(records), fleet.in_flight, fleet.desired))

    def _point_at(self, now: float) -> Point:
        fleet, records = self.fleet, self._records
        arrived = range(self._seen, len(records))
        mix = Counter(pattern_of(records.isl[n], records.osl[n], self._goals.patterns) for n in arrived)
        seconds = now - self._pointed_at
        self._seen, self._pointed_at = len(records), now
        recent, records.recent_ttft = sorted(records.recent_ttft), []
        replicas = list(fleet.replicas())
        pools = [replica.scheduler.blocks for replica in replicas]
        return Point(
            at=now,
            arrivals_per_second=len(arrived) / seconds if seconds else 0.0,
            mix={name: count / len(arrived) for name, count in sorted(mix.items())},
            desired=fleet.desired,
            phases=Counter(pod.phase for pod in fleet.pods),
            settings=fleet.kinds[0].settings,
            running=sum(replica.scheduler.running for replica in replicas),
            waiting=sum(replica.scheduler.waiting for replica in replicas),
            held=len(fleet.held),
            kv_used_ratio=max((pool.used / pool.usable for pool in pools), default=None),
            ttft_p95_seconds=quantile(recent, 0.95) if recent else None,
            kinds={kind.name: self._kind_at_the_point(kind) for kind in fleet.kinds} if len(fleet.kinds) > 1 else {},
        )

    def _kind_at_the_point(self, kind: Kind) -> KindPoint:
        phases = Counter(pod.phase for pod in self.fleet.pods if pod.kind is kind)
        return KindPoint(kind.desired, phases, kind.settings)
