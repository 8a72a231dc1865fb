"""Policies that look at nothing: a fixed number, and a schedule that was known beforehand (the clairvoyant's)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate_sim.controller import FleetView, Order


@dataclass
class Static:
    """Always the same number: what a team does that provisions for its peak."""

    replicas: int
    period_seconds: float = 60.0
    name: str = "static"

    def decide(self, view: FleetView) -> Order:
        return Order(self.replicas, reason="Static")


@dataclass
class Scheduled:
    """Follows (seconds since the start, replicas), in order of time; the first view is at its start."""

    steps: Sequence[tuple[float, int]]
    period_seconds: float = 5.0
    name: str = "clairvoyant"
    _epoch: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a schedule needs at least one step")
        self._times = [at for at, _ in self.steps]

    def decide(self, view: FleetView) -> Order:
        if self._epoch is None:
            self._epoch = view.now
        index = bisect_right(self._times, view.now - self._epoch + 1e-9) - 1
        return Order(self.steps[max(0, index)][1], reason="Scheduled")


def ahead(wanted: Sequence[int], *, slot_seconds: float, lead_seconds: float) -> list[tuple[float, int]]:
    """A schedule by which `wanted` replicas (one number a slot) are ready in each slot, ordered `lead_seconds` before.

    Between the order and the slot the larger number holds, since a pod that is given back cannot be had again in time.
    """
    lead = max(0, -int(-lead_seconds // slot_seconds))
    steps: list[tuple[float, int]] = []
    for slot in range(len(wanted)):
        replicas = max(wanted[slot : slot + lead + 1])
        if not steps or steps[-1][1] != replicas:
            steps.append((slot * slot_seconds, replicas))
    return steps
