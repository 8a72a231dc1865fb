"""The Kubernetes HorizontalPodAutoscaler, v2, with the default behavior that its documentation states.

Read at kubernetes/kubernetes `pkg/controller/podautoscaler/{replica_calculator,horizontal}.go` and in the API's
defaults: sync every 15 s; desired = ceil(measured / target x pods) unless within a tolerance of 0.1; pods of phase
Pending are left out going down and count as 0 going up; running pods without the metric count as the target going down
and as 0 going up; where that turns the direction round, nothing changes. Up: the larger of 4 pods and 100 % in 15 s.
Down: 100 % in 15 s, and the highest recommendation of the last 300 s. Several metrics: the highest; if one is unknown,
only upwards.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tidegate_sim.baselines import signals
from tidegate_sim.controller import BUSY_SECONDS, WORK_SECONDS, FleetView, Order, PodView

SYNC_SECONDS = 15.0
TOLERANCE = 0.1
DOWN_WINDOW_SECONDS = 300.0
POLICY_PERIOD_SECONDS = 15.0
UP_PODS = 4
UP_PERCENT = 100.0
DOWN_PERCENT = 100.0
RATE_WINDOW_SECONDS = 60.0
"""A metric that is a rate comes from a query over a minute."""


@dataclass(frozen=True, slots=True)
class PodReadings:
    """A per-pod metric as the controller sorts it: values of pods that have it, and how many have not."""

    values: tuple[float, ...]
    pending: int = 0
    """Of phase Pending: whether they have it or not does not matter."""
    missing: int = 0
    """Running, and without it."""


def replicas_by_pods(readings: PodReadings, *, current: int, target: float, tolerance: float = TOLERANCE) -> int | None:
    """`GetMetricReplicas`: the mean over the pods against `target`. None when no pod has the metric: an error there."""
    values = list(readings.values)
    if not values:
        return None
    ratio = sum(values) / len(values) / target
    going_up = ratio > 1.0
    if readings.missing == 0 and not (going_up and readings.pending > 0):
        return current if _is_within(ratio, tolerance) else _ceil(ratio * len(values))
    if readings.missing:
        values += [target if ratio < 1.0 else 0.0] * readings.missing
    if going_up:
        values += [0.0] * readings.pending
    corrected = sum(values) / len(values) / target
    turned = (ratio < 1.0 < corrected) or (corrected < 1.0 < ratio)
    if _is_within(corrected, tolerance) or turned:
        return current
    proposed = _ceil(corrected * len(values))
    if (corrected < 1.0 and proposed > current) or (corrected > 1.0 and proposed < current):
        return current
    return proposed


def replicas_by_average(total: float, *, existing: int, target: float, tolerance: float = TOLERANCE) -> int:
    """`GetExternalPerPodMetricReplicas` (AverageValue): a total shared by the pods that exist, against `target`."""
    if existing > 0 and _is_within(total / (target * existing), tolerance):
        return existing
    return _ceil(total / target)


def _is_within(ratio: float, tolerance: float) -> bool:
    return 1.0 - tolerance <= ratio <= 1.0 + tolerance


def _ceil(value: float) -> int:
    # The controller counts in thousandths, so that no rounding error of a float makes one pod more.
    return math.ceil(value - 1e-6)


@dataclass(frozen=True, slots=True)
class PodsMetric:
    """A metric that each pod has (type Pods, AverageValue)."""

    name: str
    target: float
    read: Callable[[PodView, float], float | None]
    """Of a pod, at a time in Unix seconds."""


@dataclass(frozen=True, slots=True)
class ExternalMetric:
    """One number for all (type External, AverageValue)."""

    name: str
    target: float
    """A replica's share."""
    read: Callable[[FleetView], float | None]


Metric = PodsMetric | ExternalMetric


@dataclass(frozen=True, slots=True)
class Bounds:
    """`minReplicas` and `maxReplicas`."""

    lowest: int = 1
    highest: int = 100


@dataclass
class Hpa:
    """One HPA object and what its controller remembers of it."""

    metrics: Sequence[Metric]
    bounds: Bounds = field(default_factory=Bounds)
    name: str = "hpa"
    tolerance: float = TOLERANCE
    period_seconds: float = SYNC_SECONDS
    _recommendations: list[tuple[float, int]] = field(default_factory=list, init=False)
    _ups: list[tuple[float, int]] = field(default_factory=list, init=False)
    _downs: list[tuple[float, int]] = field(default_factory=list, init=False)

    def decide(self, view: FleetView) -> Order:
        current, now = view.desired_replicas, view.now
        if not self._recommendations:
            self._recommendations.append((now, current))
        if current > self.bounds.highest:
            return self._rescale(current, self.bounds.highest, now=now, reason="TooManyReplicas")
        if current < self.bounds.lowest:
            return self._rescale(current, self.bounds.lowest, now=now, reason="TooFewReplicas")
        proposals = [propose(metric, view, tolerance=self.tolerance) for metric in self.metrics]
        known = [
            (count, metric.name) for count, metric in zip(proposals, self.metrics, strict=True) if count is not None
        ]
        proposed, metric = max(known, default=(current, ""))
        if len(known) < len(proposals) and (not known or proposed < current):
            return Order(current, reason="FailedGetMetrics", message="a metric is unknown")
        stable = self._stabilised(current, proposed, now=now)
        limited = self._limited(current, stable, now=now)
        return self._rescale(current, limited, now=now, reason=metric)

    def _stabilised(self, current: int, proposed: int, *, now: float) -> int:
        """The highest of the window going down; up there is no window. The newest proposal is remembered as it is."""
        cutoff = now - DOWN_WINDOW_SECONDS
        result = proposed
        if proposed < current:
            result = max([proposed, *(count for at, count in self._recommendations if at > cutoff)])
        self._recommendations = [item for item in self._recommendations if item[0] >= cutoff]
        self._recommendations.append((now, proposed))
        return result

    def _limited(self, current: int, wanted: int, *, now: float) -> int:
        """By the policies of the direction and the bounds."""
        if wanted > current:
            before = current - _changed(self._ups, now=now)
            allowed = max(before + UP_PODS, math.ceil(before * (1 + UP_PERCENT / 100)), current)
            return min(wanted, allowed, self.bounds.highest)
        if wanted < current:
            before = current + _changed(self._downs, now=now)
            allowed = min(int(before * (1 - DOWN_PERCENT / 100)), current)
            return max(wanted, allowed, self.bounds.lowest)
        return current

    def _rescale(self, current: int, wanted: int, *, now: float, reason: str) -> Order:
        if wanted > current:
            self._ups.append((now, wanted - current))
        elif wanted < current:
            self._downs.append((now, current - wanted))
        return Order(wanted, reason=reason)


def _changed(events: Sequence[tuple[float, int]], *, now: float) -> int:
    return sum(change for at, change in events[-8:] if at > now - POLICY_PERIOD_SECONDS)


def propose(metric: Metric, view: FleetView, *, tolerance: float = TOLERANCE) -> int | None:
    """Replicas by one metric; None when it is unknown."""
    if isinstance(metric, ExternalMetric):
        total = metric.read(view)
        if total is None:
            return None
        existing = len(signals.listed(view))
        return replicas_by_average(total, existing=existing, target=metric.target, tolerance=tolerance)
    readings = read_pods(metric, view)
    return replicas_by_pods(readings, current=view.desired_replicas, target=metric.target, tolerance=tolerance)


def read_pods(metric: PodsMetric, view: FleetView) -> PodReadings:
    """`groupPods`: deleted pods are not there, Pending ones are set aside, the rest has the metric or misses it."""
    pods = signals.listed(view)
    running = [pod for pod in pods if pod.replica.phase not in signals.PENDING_PHASES]
    values = [value for pod in running if (value := metric.read(pod, view.now)) is not None]
    return PodReadings(tuple(values), pending=len(pods) - len(running), missing=len(running) - len(values))


# --- what people put under it ----------------------------------------------------------------------------------------


def waiting_per_pod(target: float) -> PodsMetric:
    """Requests in the engine's queue."""
    return PodsMetric("waiting", target, lambda pod, now: signals.newest(pod, "waiting", now=now))


def concurrency_per_pod(target: float) -> PodsMetric:
    """Requests in the engine, queued or running."""

    def read(pod: PodView, now: float) -> float | None:
        running, waiting = (signals.newest(pod, name, now=now) for name in ("running", "waiting"))
        return None if running is None or waiting is None else running + waiting

    return PodsMetric("concurrency", target, read)


def duty_cycle(target: float) -> PodsMetric:
    """What a GPU's own utilisation shows: the share of time in which anything ran, however little of it."""
    return PodsMetric("duty-cycle", target, _rate_of(BUSY_SECONDS[0]))


def work_utilisation(target: float) -> PodsMetric:
    """The share of the work that a replica could do: what no GPU's counter shows, the best case of such a metric."""
    return PodsMetric("work-utilisation", target, _rate_of(WORK_SECONDS[0]))


def _rate_of(counter: str) -> Callable[[PodView, float], float | None]:
    return lambda pod, now: signals.rate(pod, counter, now=now, window_seconds=RATE_WINDOW_SECONDS)


@dataclass
class RequestsPerSecond:
    """Arrivals at the gateway over the last minute, as an external metric."""

    target: float
    _counter: signals.WindowedCounter = field(
        default_factory=lambda: signals.WindowedCounter(RATE_WINDOW_SECONDS), init=False
    )

    def metric(self) -> ExternalMetric:
        return ExternalMetric("requests-per-second", self.target, self._read)

    def _read(self, view: FleetView) -> float | None:
        self._counter.record(view.now, view.gateway.arrivals_total)
        return self._counter.rate(RATE_WINDOW_SECONDS)
