"""Everybody's share of the GPUs that an installation may use: what each object claims, put to `allocate`.

Pure. Only an object that the operator scales and measures gives way; what others decide, or what is paused, is as it
is. Called by `reconcile`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate_operator.allocate import Want, allocate, spare_gpus
from tidegate_operator.api import ScalingMode, Spec
from tidegate_operator.limits import limits_at
from tidegate_operator.memory import load_memory, wants_within


@dataclass(frozen=True, slots=True)
class Claim:
    """An object that takes GPUs of the kind in question."""

    name: str
    spec: Spec
    held: int
    """Replicas that it was told to have."""
    wanted: int | None
    """What its load asks for (`asked`); None when unknown."""


def asked(spec: Spec, wanted: int | None, memory: Mapping[str, object], *, now: float) -> int | None:
    """What an object's load asked for when it was looked at last, or since then within its own window on the way down.

    Else a GPU would go to and fro with every want that wavers: the object would lose at once what it holds for then.
    """
    if wanted is None:
        return None
    seconds = spec.autoscaling.behavior.scale_down.stabilization_window_seconds
    recent = wants_within(load_memory(memory), now=now, seconds=seconds) if seconds else ()
    return max([wanted, *(want.most for want in recent)])


def granted_gpus(claims: Iterable[Claim], *, gpus: int, now: float) -> dict[str, int]:
    """GPUs of `gpus` that each object may take, by name: its share, and what nobody wants.

    The spare ones are open to all, since a load that rises now has not been claimed yet.
    """
    wants = [_want(claim, now) for claim in claims]
    grants = allocate(wants, gpus)
    spare = spare_gpus(wants, grants, gpus)
    return {want.name: grants[want.name] * want.gpus_per_replica + spare for want in wants}


def _want(claim: Claim, now: float) -> Want:
    scaling, size = claim.spec.autoscaling, claim.spec.resources.gpu.count
    if scaling.mode is not ScalingMode.AUTO or (scaling.paused and claim.held):
        return Want(claim.name, claim.held, claim.held, claim.held, size, scaling.importance)
    limits = limits_at(claim.spec, now)
    if claim.wanted is None:
        # Unknown is not zero: an object that is not measured does not give way either.
        held = min(max(claim.held, limits.low), limits.high)
        return Want(claim.name, held, held, claim.held, size, scaling.importance)
    replicas = min(max(claim.wanted, limits.low), limits.high)
    return Want(claim.name, replicas, limits.low, claim.held, size, scaling.importance)
