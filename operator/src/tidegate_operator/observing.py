"""Puts together what one pass saw: pods as listed and asked, and what was measured of them, become an `Observation`.

Pure: no I/O, no clock. Called by `reconcile`, and by the simulator, so that both decide on the same facts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tidegate_operator import demand
from tidegate_operator.api import Spec
from tidegate_operator.demand import Measured, PodWindow
from tidegate_operator.observation import EngineInfo, GpuPrice, Observation, Replica, ReplicaPhase
from tidegate_operator.pods import start_seconds
from tidegate_operator.prior import believe, prior_of_engine

SCHEDULING_SECONDS = 600.0
"""Beyond the start-up probe's patience: the longest that a node and an image may be waited for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What the API server says of the child Deployment."""

    current_replicas: int
    rollout_in_progress: bool = False
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What one pass found, before anything is worked out of it."""

    now: float
    replicas: tuple[Replica, ...]
    """With the settings that they acknowledged, but not yet with their load."""
    measured: Measured
    info: EngineInfo | None
    workload: Workload
    held_requests: float | None = None
    granted_gpus: int | None = None
    price: GpuPrice | None = None


def can_be_asked(replica: Replica) -> bool:
    return replica.phase is ReplicaPhase.READY and replica.ip is not None


def observe(spec: Spec, facts: Facts) -> Observation:
    """The observation of one pass."""
    replicas, measured, workload = facts.replicas, facts.measured, facts.workload
    found, metrics_state, metrics_message = demand.combine(
        measured,
        ready={replica.name: replica.ready_at for replica in replicas if can_be_asked(replica)},
        now=facts.now,
        stale_after_seconds=spec.metrics.stale_after_seconds,
    )
    windows = {window.pod: window for window in measured.windows}
    return Observation(
        now=facts.now,
        current_replicas=workload.current_replicas,
        replicas=tuple(_with_load(replica, windows.get(replica.name)) for replica in replicas),
        demand=found,
        metrics_state=metrics_state,
        metrics_message=metrics_message,
        engine=_with_step_model(facts.info, measured.windows),
        held_requests=facts.held_requests,
        granted_gpus=facts.granted_gpus,
        start_seconds=start_seconds(replicas, longest_seconds=spec.probes.startup_timeout_seconds + SCHEDULING_SECONDS),
        rollout_in_progress=workload.rollout_in_progress,
        spec_replicas=spec.replicas,
        workload_reason=workload.reason,
        workload_message=workload.message,
        price=facts.price,
    )


def _with_load(replica: Replica, window: PodWindow | None) -> Replica:
    return replace(
        replica,
        running=demand.level(window, "running"),
        waiting=demand.level(window, "waiting"),
        running_context_tokens=demand.level(window, "running_context_tokens"),
    )


def _with_step_model(info: EngineInfo | None, windows: Iterable[PodWindow]) -> EngineInfo | None:
    """The info with what the metrics say of the step model; the pod with the most samples speaks."""
    if info is None:
        return None
    fits = [demand.step_model_of(window) for window in windows]
    known = [fit for fit in fits if fit[0] is not None]
    model, residual, samples = max(known, key=lambda fit: fit[2] or 0.0) if known else (None, None, None)
    fit, prior = info.step_model or model, prior_of_engine(info)
    belief = believe(prior, fit, samples=samples, residual_ratio=residual)
    return replace(
        info,
        step_model=None if fit is None or belief is None else belief.model,
        step_model_residual_ratio=residual,
        step_model_samples=samples,
        step_model_confidence=None if fit is None or belief is None else belief.confidence,
        prior=prior,
    )
