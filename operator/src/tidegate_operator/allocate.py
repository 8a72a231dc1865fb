"""Who gets GPUs that several objects want: minima first, then each GPU where it restores most.

Pure. The worth of a replica is the relative gain of what its object serves, weighted by its importance: the third
replica of one that has two counts for more than the ninth of one that has eight, so nobody starves and twice the
importance is about twice the share. What an object holds counts for a little more than what it does not, so that GPUs
do not move to and fro. Called by `reconcile` where an installation has a budget.
"""

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

KEEPING = 1.25
"""Weight of a replica that exists against one that would take its place: a move costs a start and a drain."""


@dataclass(frozen=True, slots=True)
class Want:
    """What one object asks for. `name` is unique, and the last word between equals."""

    name: str
    replicas: int
    minimum: int
    held: int
    """Replicas that it has now."""
    gpus_per_replica: int = 1
    importance: int = 50
    """1 to 100."""
    needed: float | None = None
    """Replicas for the load before rounding; None: as many as are wanted."""

    @property
    def most(self) -> int:
        return max(self.replicas, self.minimum)


def allocate(wants: Iterable[Want], gpus: int) -> dict[str, int]:
    """Replicas for each name, never more than wanted, together never more than `gpus`.

    Minima that do not all fit go to the most important first. A replica that does not fit into what is left is passed
    over for a smaller one.
    """
    asked = {want.name: want for want in sorted(wants, key=lambda want: (-want.importance, want.name))}
    grants, left = dict.fromkeys(asked, 0), gpus
    for want in asked.values():
        if want.gpus_per_replica == 0:
            grants[want.name] = want.most
            continue
        grants[want.name] = min(want.minimum, max(0, left) // want.gpus_per_replica)
        left -= grants[want.name] * want.gpus_per_replica
    queue = [_bid(want, grants[want.name]) for want in asked.values() if grants[want.name] < want.most]
    heapq.heapify(queue)
    while queue:
        want = asked[heapq.heappop(queue)[-1]]
        if want.gpus_per_replica > left:
            continue
        grants[want.name] += 1
        left -= want.gpus_per_replica
        if grants[want.name] < want.most:
            heapq.heappush(queue, _bid(want, grants[want.name]))
    return grants


def spare_gpus(wants: Iterable[Want], grants: Mapping[str, int], gpus: int) -> int:
    """What is left once every grant is taken."""
    return max(0, gpus - sum(grants[want.name] * want.gpus_per_replica for want in wants))


def _bid(want: Want, granted: int) -> tuple[float, int, str]:
    """Sorts first what is worth most for a GPU."""
    return -worth(want, granted) / want.gpus_per_replica, -want.importance, want.name


def worth(want: Want, granted: int) -> float:
    """Of one more replica than `granted`: the gain in the logarithm of what is served, times the importance."""
    if granted == 0:
        return math.inf
    needed = float(want.most) if want.needed is None else want.needed
    gain = math.log(min(granted + 1.0, max(needed, granted)) / granted)
    return want.importance * gain * (KEEPING if granted < want.held else 1.0)
