"""`simulate`: a workload, a fleet and a controller in virtual time, and what came of it.

The same seed gives the same result. Owns the order of arrivals, ticks and points; pods and engines are the fleet's.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tidegate_engine.settings import pattern_of
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import Controller
from tidegate_sim.fleet import Fleet
from tidegate_sim.records import Records
from tidegate_sim.replica import NEVER
from tidegate_sim.results import Change, Point, Result, quantile, services
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
    run = _Run(fleet, controller, seed=seed, goals=goals, leaps=leaps)
    run.schedule(point_seconds, watch)
    return run.result(run.serve(workload, duration_seconds or 0.0))


class _Run:
    """One simulation under way."""

    def __init__(self, spec: FleetSpec, controller: Controller, *, seed: int, goals: Goals, leaps: bool) -> None:
        self._spec, self._controller, self._goals, self._seed = spec, controller, goals, seed
        self._records = Records()
        self._fleet = Fleet(spec, self._records, seed=seed, leaps=leaps)
        self._timeline: list[Point] = []
        self._changes: list[Change] = []
        self._reasons: Counter[str] = Counter()
        self._mix: Counter[str] = Counter()
        self._seen = 0
        self._pointed_at = 0.0
        self._watch: Callable[[Progress], None] | None = None
        self._point_seconds = POINT_SECONDS
        self._end = NEVER
        """Of the workload, once it is known."""
        self._ended_at = 0.0

    def schedule(self, point_seconds: float, watch: Callable[[Progress], None] | None) -> None:
        self._point_seconds, self._watch = point_seconds, watch
        self._fleet.agenda.put(0.0, self._tick)
        self._fleet.agenda.put(point_seconds, self._point)

    def serve(self, workload: Iterable[Arrival], duration_seconds: float) -> float:
        """Let all of it arrive and end; returns the workload's duration."""
        fleet, agenda = self._fleet, self._fleet.agenda
        run_next = agenda.run_next
        now = 0.0
        for arrival in workload:
            at = arrival.at_seconds
            if at < now:
                raise WorkloadOutOfOrder(f"a request at {at} s comes after one at {now} s: sort the workload by time")
            while agenda.next_at < at:
                run_next()
            now = at
            fleet.arrive(arrival)
        self._end = end = max(duration_seconds, now)
        while agenda.next_at <= end or (fleet.in_flight and agenda.next_at <= end + SETTLE_SECONDS):
            now = run_next()
        self._ended_at = max(now, end)
        return end

    def result(self, duration_seconds: float) -> Result:
        fleet, records = self._fleet, self._records
        overall, patterns = services(records, self._goals, self._spec)
        return Result(
            controller=self._controller.name,
            seed=self._seed,
            duration_seconds=duration_seconds,
            ended_at_seconds=self._ended_at,
            fleet=self._spec,
            goals=self._goals,
            records=records,
            timeline=self._timeline,
            changes=self._changes,
            orders=self._reasons.total(),
            reasons=dict(self._reasons),
            gpu_seconds=fleet.gpu_seconds(until=duration_seconds),
            pods_created=len(fleet.pods) + len(fleet.gone),
            preemptions=fleet.preemptions + sum(replica.preemptions for replica in fleet.replicas()),
            overall=overall,
            patterns=patterns,
        )

    def _tick(self, now: float, _: object) -> None:
        fleet = self._fleet
        before, settings = fleet.desired, fleet.settings
        order = self._controller.decide(fleet.view(now))
        self._fleet.agenda.put(now + self._controller.period_seconds, self._tick)
        fleet.order(order.replicas, now)
        if order.settings is not None:
            fleet.apply(order.settings, order.settings_generation, now)
        if now > self._end:
            return
        self._reasons[order.reason] += 1
        if fleet.desired != before or fleet.settings != settings:
            self._changes.append(
                Change(now, before, fleet.desired, settings, fleet.settings, order.reason, order.message)
            )

    def _point(self, now: float, _: object) -> None:
        self._fleet.agenda.put(now + self._point_seconds, self._point)
        fleet, records = self._fleet, self._records
        if now <= self._end:
            self._timeline.append(self._point_at(now))
        if self._watch is not None:
            self._watch(Progress(now, len(records), fleet.in_flight, fleet.desired))

    def _point_at(self, now: float) -> Point:
        fleet, records = self._fleet, self._records
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
            settings=fleet.settings,
            running=sum(replica.scheduler.running for replica in replicas),
            waiting=sum(replica.scheduler.waiting for replica in replicas),
            held=len(fleet.held),
            kv_used_ratio=max((pool.used / pool.usable for pool in pools), default=None),
            ttft_p95_seconds=quantile(recent, 0.95) if recent else None,
        )
