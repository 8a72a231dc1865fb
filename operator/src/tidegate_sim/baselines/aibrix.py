"""AIBrix's own autoscalers, APA and KPA, with their defaults.

vllm-project/aibrix `pkg/controller/podautoscaler/{algorithm/apa.go, algorithm/kpa.go, autoscaler.go,
podautoscaler_controller.go, context/context.go}`: a pass every 10 s, at most twice and at least half of the replicas a
pass, tolerance 0.1 both ways (APA), windows of 180 s and 60 s (KPA; panic when the short window's mean is over twice
the long one's, decided anew at each pass, so nothing holds the number afterwards). Going down, the *lowest*
recommendation of the last 300 s is taken, which delays nothing. Starting pods count as 0 going up and as the target
going down, as a newer version does. The metric of its examples is KV use, with a target of 0.5.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.hpa import Bounds
from tidegate_sim.controller import FleetView, Order, PodView

PASS_SECONDS = 10.0
MAX_UP_RATE = MAX_DOWN_RATE = 2.0
TOLERANCE = 0.1
STABLE_SECONDS, PANIC_SECONDS = 180.0, 60.0
PANIC_RATIO = 2.0
DOWN_COOLDOWN_SECONDS = 300.0
KV_TARGET = 0.5


def apa_replicas(use: float, *, current: int, target: float) -> int:
    """By the use of a pod, within tolerance and rates."""
    ratio = use / target
    if ratio > 1 + TOLERANCE:
        return min(_ceil(current * ratio), math.ceil(MAX_UP_RATE * current))
    if ratio < 1 - TOLERANCE:
        return max(_ceil(current * ratio), math.floor(current / MAX_DOWN_RATE))
    return current


def kpa_replicas(stable: float, panicking: float, *, current: int, target: float) -> int:
    """By the totals of the two windows."""
    highest, lowest = max(1, math.ceil(MAX_UP_RATE * current)), math.floor(current / MAX_DOWN_RATE)
    by_stable, by_panic = (min(max(_ceil(value / target), lowest), highest) for value in (stable, panicking))
    in_panic = stable <= 0 or panicking / stable > PANIC_RATIO
    return max(by_stable, by_panic) if in_panic else by_stable


def guarded(proposed: int, *, use: float, ready: int, current: int, target: float) -> int:
    """`applyPendingReplicaGuard`: the same again with the pods that are not ready counted in."""
    pending = current - min(ready, current)
    if pending <= 0 or proposed == current or current <= 0:
        return proposed
    if proposed > current:
        return min(max(_ceil(use * (current - pending) / target), current), proposed)
    return max(min(_ceil((use * (current - pending) + target * pending) / target), current), proposed)


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)


def kv_use(pod: PodView, now: float) -> float | None:
    if not pod.samples or now - pod.samples[-1].at > signals.STALE_SECONDS:
        return None
    return signals.kv_used_ratio(pod.samples[-1])


@dataclass
class Aibrix:
    """One PodAutoscaler. `windows` False is APA, True is KPA."""

    target: float = KV_TARGET
    bounds: Bounds = field(default_factory=Bounds)
    windows: bool = False
    name: str = "aibrix-apa"
    read: Callable[[PodView, float], float | None] = kv_use
    period_seconds: float = PASS_SECONDS
    _totals: list[tuple[float, float]] = field(default_factory=list, init=False)
    _recommendations: list[tuple[float, int]] = field(default_factory=list, init=False)

    def decide(self, view: FleetView) -> Order:
        current, now = view.desired_replicas, view.now
        pods = signals.ready(view)
        values = [value for pod in pods if (value := self.read(pod, now)) is not None]
        if not values or current == 0:
            return Order(current, reason="NoMetrics")
        use = sum(values) / len(values)
        if self.windows:
            self._totals = [item for item in self._totals if item[0] > now - STABLE_SECONDS]
            self._totals.append((now, sum(values)))
            stable, panicking = (_mean_since(self._totals, now - window) for window in (STABLE_SECONDS, PANIC_SECONDS))
            proposed = kpa_replicas(stable, panicking, current=current, target=self.target)
        else:
            proposed = apa_replicas(use, current=current, target=self.target)
        proposed = guarded(proposed, use=use, ready=len(pods), current=current, target=self.target)
        replicas = self._stabilised(proposed, current=current, now=now)
        return Order(min(max(replicas, self.bounds.lowest), self.bounds.highest), reason="Computed")

    def _stabilised(self, proposed: int, *, current: int, now: float) -> int:
        self._recommendations = [item for item in self._recommendations if item[0] > now - DOWN_COOLDOWN_SECONDS]
        self._recommendations.append((now, proposed))
        return min(count for _, count in self._recommendations) if proposed < current else proposed


def _mean_since(items: Sequence[tuple[float, float]], cutoff: float) -> float:
    values = [value for at, value in items if at > cutoff]
    return sum(values) / len(values) if values else 0.0
