"""Knative's Pod Autoscaler (KPA): a stable and a panic window over concurrency or requests a second.

knative/serving `pkg/autoscaler/scaling/autoscaler.go` and `config/core/configmaps/autoscaler.yaml`: a tick every 2 s,
windows of 60 s and 6 s, panic when the panic window asks for twice the ready pods, no decrease while it lasts, and its
end 60 s after the last cause; a tick may multiply the ready pods by 1000 at most and halve them. 70 % of the target is
aimed at. A fleet that begins with more than one pod begins in panic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.hpa import Bounds
from tidegate_sim.controller import FleetView, Order

TICK_SECONDS = 2.0
STABLE_SECONDS = 60.0
PANIC_SECONDS = 6.0
PANIC_THRESHOLD = 2.0
MAX_UP_RATE = 1000.0
MAX_DOWN_RATE = 2.0
UTILISATION = 0.7
CONCURRENCY_TARGET = 100.0


@dataclass(frozen=True, slots=True)
class Panic:
    """Since when it lasts (None: not at all), and the largest number asked for in it."""

    since: float | None = None
    pods: int = 0


def decide_pods(
    panic: Panic, *, stable: float, panicking: float, ready: int, target: float, now: float
) -> tuple[int, Panic]:
    """The number of pods and the panic after one tick. `stable` and `panicking` are the means of the two windows."""
    pods = max(1.0, float(ready))
    highest, lowest = math.ceil(MAX_UP_RATE * pods), math.floor(pods / MAX_DOWN_RATE)
    by_stable, by_panic = math.ceil(stable / target - 1e-9), math.ceil(panicking / target - 1e-9)
    over = by_panic / pods >= PANIC_THRESHOLD
    if over:
        panic = replace(panic, since=now)
    elif panic.since is not None and panic.since + STABLE_SECONDS < now:
        panic = Panic()
    wanted = min(max(by_stable, lowest), highest)
    if panic.since is None:
        return wanted, panic
    panic = replace(panic, pods=max(panic.pods, wanted, min(max(by_panic, lowest), highest)))
    return panic.pods, panic


def in_flight_seconds(view: FleetView) -> float:
    return view.gateway.in_flight_seconds_total


def arrivals(view: FleetView) -> float:
    return view.gateway.arrivals_total


@dataclass
class Knative:
    """One revision's decider. `target` is what a pod may have; `UTILISATION` of it is aimed at."""

    target: float = CONCURRENCY_TARGET
    bounds: Bounds = field(default_factory=Bounds)
    name: str = "knative"
    counter: Callable[[FleetView], float] = in_flight_seconds
    """Whose rate is the metric: concurrency is the rate of the seconds in flight."""
    period_seconds: float = TICK_SECONDS
    _seen: signals.WindowedCounter = field(default_factory=lambda: signals.WindowedCounter(STABLE_SECONDS), init=False)
    _panic: Panic | None = field(default=None, init=False)

    def decide(self, view: FleetView) -> Order:
        ready = len(signals.ready(view))
        if self._panic is None:
            self._panic = Panic(view.now, ready) if ready > 1 else Panic()
        self._seen.record(view.now, self.counter(view))
        stable, panicking = self._seen.rate(STABLE_SECONDS), self._seen.rate(PANIC_SECONDS)
        if stable is None or panicking is None:
            return Order(view.desired_replicas, reason="NoData")
        wanted, self._panic = decide_pods(
            self._panic,
            stable=stable,
            panicking=panicking,
            ready=ready,
            target=self.target * UTILISATION,
            now=view.now,
        )
        replicas = min(max(wanted, self.bounds.lowest), self.bounds.highest)
        return Order(replicas, reason="Stable" if self._panic.since is None else "Panic")
