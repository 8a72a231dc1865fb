"""llm-d's workload-variant-autoscaler, its default analyzer (V1, saturation), and the HPA that carries its answer out.

llm-d/llm-d-workload-variant-autoscaler `internal/saturation/analyzer.go`: every 60 s, per replica the maxima of KV use
and of the queue over a minute; saturated from KV 0.80 or 5 waiting on; up by one when the spare of the others falls
below 0.10 or 3 on average; down by one when two or more are unsaturated and would keep that spare with their load on
one replica fewer. No change while the wanted number is not there yet or not every replica has metrics. The number is a
gauge that an HPA follows (external, AverageValue 1). Its tolerance is 0 here, which KEDA's or a newer HPA's settings
allow: with 0.1 a step of one is lost above ten replicas, and the analyzer then waits for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.hpa import SYNC_SECONDS, Bounds, ExternalMetric, Hpa
from tidegate_sim.controller import FleetView, Order, PodView

INTERVAL_SECONDS = 60.0
MAX_WINDOW_SECONDS = 60.0
FEWEST_UNSATURATED = 2


@dataclass(frozen=True, slots=True)
class Thresholds:
    """`saturation-scaling-config`, with its defaults."""

    kv_used_ratio: float = 0.80
    queue_length: float = 5.0
    spare_kv: float = 0.10
    spare_queue: float = 3.0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    kv_used_ratio: float
    queue_length: float


def saturation_target(
    loads: Sequence[ReplicaLoad], *, current: int, wanted: int | None, pending: int, thresholds: Thresholds
) -> int:
    """The wanted number after one pass; `wanted` is that of the pass before, `current` what the Deployment has."""
    if not loads:
        return current
    if (wanted is not None and wanted != current) or len(loads) != current:
        return current if wanted is None else wanted
    unsaturated = [
        load
        for load in loads
        if load.kv_used_ratio < thresholds.kv_used_ratio and load.queue_length < thresholds.queue_length
    ]
    count = len(unsaturated)
    kv = sum(thresholds.kv_used_ratio - load.kv_used_ratio for load in unsaturated) / max(1, count)
    queue = sum(thresholds.queue_length - load.queue_length for load in unsaturated) / max(1, count)
    if kv < thresholds.spare_kv or queue < thresholds.spare_queue:
        return current if pending else current + 1
    if count < FEWEST_UNSATURATED:
        return current
    share = count / (count - 1)
    kv_left = thresholds.kv_used_ratio - (thresholds.kv_used_ratio - kv) * share
    queue_left = thresholds.queue_length - (thresholds.queue_length - queue) * share
    return current - 1 if kv_left >= thresholds.spare_kv and queue_left >= thresholds.spare_queue else current


@dataclass
class Wva:
    """The analyzer and its HPA in series."""

    thresholds: Thresholds = field(default_factory=Thresholds)
    bounds: Bounds = field(default_factory=Bounds)
    name: str = "wva"
    period_seconds: float = SYNC_SECONDS
    _analyzed_at: float | None = field(default=None, init=False)
    _wanted: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        metric = ExternalMetric("wva_desired_replicas", 1.0, lambda view: self._wanted)
        self._hpa = Hpa([metric], self.bounds, name=self.name, tolerance=0.0)

    def decide(self, view: FleetView) -> Order:
        if self._analyzed_at is None or view.now - self._analyzed_at >= INTERVAL_SECONDS - 1e-6:
            self._analyzed_at = view.now
            self._wanted = self._analyze(view)
        return self._hpa.decide(view)

    def _analyze(self, view: FleetView) -> int:
        pods = signals.listed(view)
        loads = [load for pod in pods if (load := _load_of(pod, view.now)) is not None]
        wanted = saturation_target(
            loads,
            current=view.desired_replicas,
            wanted=self._wanted,
            pending=len(pods) - len(signals.ready(view)),
            thresholds=self.thresholds,
        )
        return min(max(wanted, self.bounds.lowest), self.bounds.highest)


def _load_of(pod: PodView, now: float) -> ReplicaLoad | None:
    samples = signals.within(pod, now=now, window_seconds=MAX_WINDOW_SECONDS)
    kv = [ratio for sample in samples if (ratio := signals.kv_used_ratio(sample)) is not None]
    queue = signals.max_level(pod, "waiting", now=now, window_seconds=MAX_WINDOW_SECONDS)
    return None if not kv or queue is None else ReplicaLoad(max(kv), queue)
