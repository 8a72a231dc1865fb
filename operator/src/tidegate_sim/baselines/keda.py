"""KEDA with a Prometheus trigger on the engines' waiting requests: its own loop between 0 and 1, an HPA above.

kedacore/keda-docs (ScaledObject specification, scaling deployments): `pollingInterval` 30 s and `cooldownPeriod` 300 s
rule the way between zero and one only; from one to many the HPA that KEDA makes asks its metrics server at each of its
own syncs, AverageValue, so ceil(total / threshold). llm-d and the vLLM production stack propose a threshold of 5.
"""

from dataclasses import dataclass, field

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.hpa import SYNC_SECONDS, Bounds, ExternalMetric, Hpa
from tidegate_sim.controller import FleetView, Order

POLLING_SECONDS = 30.0
COOLDOWN_SECONDS = 300.0
THRESHOLD = 5.0


def total_waiting(view: FleetView) -> float:
    """`sum(num_requests_waiting)`; an empty result is 0, KEDA's default (`ignoreNullValues`)."""
    return signals.newest_total(view.pods, "waiting", now=view.now) or 0.0


@dataclass
class Keda:
    """One ScaledObject and the HPA behind it."""

    threshold: float = THRESHOLD
    bounds: Bounds = field(default_factory=Bounds)
    name: str = "keda"
    period_seconds: float = SYNC_SECONDS
    _polled_at: float | None = field(default=None, init=False)
    _active_at: float | None = field(default=None, init=False)
    _active: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        metric = ExternalMetric("waiting", self.threshold, total_waiting)
        self._hpa = Hpa([metric], Bounds(max(1, self.bounds.lowest), self.bounds.highest), name=self.name)

    def decide(self, view: FleetView) -> Order:
        self._poll(view)
        current = view.desired_replicas
        if current == 0:
            return Order(1 if self._active else 0, reason="Activated" if self._active else "Idle")
        if self.bounds.lowest == 0 and not self._active and self._cooled_down(view.now):
            return Order(0, reason="CooledDown")
        return self._hpa.decide(view)

    def _poll(self, view: FleetView) -> None:
        if self._polled_at is not None and view.now - self._polled_at < POLLING_SECONDS - 1e-6:
            return
        self._polled_at = view.now
        self._active = total_waiting(view) > 0
        if self._active or self._active_at is None:
            self._active_at = view.now

    def _cooled_down(self, now: float) -> bool:
        return self._active_at is not None and now - self._active_at > COOLDOWN_SECONDS
