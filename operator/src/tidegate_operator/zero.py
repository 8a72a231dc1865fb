"""Scale to and from zero, a regime of its own: at zero there are no pods, so only the gateway knows of demand.

Pure. Idle means that nothing runs, waits, arrives or is held, all of it known: what is unknown is not idle. `policy`
asks it before every other rule. The object has no field for it before there is a gateway; the simulator passes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate_operator.observation import MetricsState, Observation, ReplicaPhase


@dataclass(frozen=True, slots=True)
class ScaleToZero:
    """What the user asked for."""

    idle_seconds: float = 900.0


@dataclass(frozen=True, slots=True)
class ZeroState:
    """What is remembered."""

    proven: bool = False
    """Whether a pod of the object was ever ready: before that, nothing says that the model can be loaded at all."""
    idle_since: float | None = None


def watch(state: ZeroState, observation: Observation) -> ZeroState:
    """Take in what is seen now."""
    proven = state.proven or observation.count(ReplicaPhase.READY) > 0
    if not is_idle(observation):
        return ZeroState(proven)
    return ZeroState(proven, observation.now if state.idle_since is None else state.idle_since)


def is_idle(observation: Observation) -> bool:
    """Whether it is known that no request is anywhere."""
    if observation.held_requests != 0:
        return False
    ready, demand = observation.count(ReplicaPhase.READY), observation.demand
    if ready == 0:
        return observation.count(ReplicaPhase.DRAINING) == 0
    if demand is None or observation.metrics_state != MetricsState.FRESH or demand.pods_covered < ready:
        return False
    return demand.running == demand.waiting == 0 and not any(demand.arrivals_per_second.values())


def may_sleep(state: ZeroState, observation: Observation, asked: ScaleToZero) -> bool:
    """Whether the last replica may go, or none need come."""
    since = state.idle_since
    return state.proven and since is not None and observation.now - since >= asked.idle_seconds


def must_wake(state: ZeroState, observation: Observation) -> bool:
    """At zero: whether requests are held, or the model has yet to be loaded for the first time."""
    return not state.proven or (observation.held_requests or 0) > 0


def dump_zero(state: ZeroState) -> list[float | None] | None:
    """JSON; None for what is remembered of an object that never scales to zero."""
    return None if state == ZeroState() else [float(state.proven), state.idle_since]


def load_zero(data: object) -> ZeroState:
    """Read what `dump_zero` wrote. Raises TypeError or ValueError for anything else."""
    if data is None:
        return ZeroState()
    if isinstance(data, Mapping | str) or not isinstance(data, list | tuple):
        raise TypeError("a list is expected")
    proven, idle_since = data
    return ZeroState(bool(proven), None if idle_since is None else float(idle_since))
