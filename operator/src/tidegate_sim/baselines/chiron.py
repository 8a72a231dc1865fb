"""Like Chiron (Patke et al., 2025): batch size by local back-pressure, replicas by how many of them are busy.

From the paper's account, for interactive requests only: each instance grows its largest batch while its inter-token
latency is below the goal and shrinks it above; the fleet keeps a spare share, so that the busy share of the instances
stays at a threshold. Its instances are filled one after the other, which a least-loaded fleet does not do: here the
busy ones are requests in flight over the batch. Its batch queue, preemption and migration have no counterpart.
"""

import math
from dataclasses import dataclass, field, replace

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.dynamo import bucket_mean
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.controller import FleetView, Order

TICK_SECONDS = 15.0
WINDOW_SECONDS = 60.0
BUSY_SHARE = 0.67
"""Of the instances; the rest is spare."""
SMALLEST_BATCH, LARGEST_BATCH = 8, 256
GROWTH, SHRINK_MOST = 1.25, 0.5
FULL_ENOUGH = 0.8
"""A batch that is not filled so far says nothing of a larger one."""
RELAXED = 0.8
"""Back-pressure below which a batch may grow."""


def next_batch(batch: int, *, pressure: float | None, filled: float) -> int:
    """The largest batch by the back-pressure, ITL over its goal; None is unknown."""
    if pressure is None:
        return batch
    if pressure > 1:
        return max(SMALLEST_BATCH, math.floor(batch * max(SHRINK_MOST, 1 / pressure)))
    if pressure < RELAXED and filled >= FULL_ENOUGH:
        return min(LARGEST_BATCH, math.ceil(batch * GROWTH))
    return batch


@dataclass
class Chiron:
    """Both loops. They tick together."""

    plant: Plant
    busy_share: float = BUSY_SHARE
    name: str = "chiron"
    period_seconds: float = TICK_SECONDS
    _falling_since: float | None = field(default=None, init=False)

    def decide(self, view: FleetView) -> Order:
        pods = signals.ready(view)
        running = signals.newest_total(pods, "running", now=view.now)
        if not pods or running is None:
            return Order(view.desired_replicas, reason="NoMetrics")
        itl = bucket_mean(pods, "itl", now=view.now, window_seconds=WINDOW_SECONDS)
        batch = view.settings.max_num_seqs
        pressure = None if itl is None else itl / self.plant.itl_seconds
        batch = next_batch(batch, pressure=pressure, filled=running / len(pods) / batch)
        waiting = signals.newest_total(pods, "waiting", now=view.now) or 0.0
        busy = (running + waiting + view.gateway.held) / batch
        wanted = max(1, math.ceil(busy / self.busy_share - 1e-9))
        replicas = min(max(wanted, self.plant.lowest_replicas), self.plant.highest_replicas)
        replicas = self._one_start_long(replicas, view)
        if batch == view.settings.max_num_seqs:
            return Order(replicas, reason="BackPressure")
        budget = max(view.settings.max_num_batched_tokens, batch)
        return Order(
            replicas,
            settings=replace(view.settings, max_num_seqs=batch, max_num_batched_tokens=budget),
            settings_generation=view.settings_generation + 1,
            reason="BackPressure",
        )

    def _one_start_long(self, replicas: int, view: FleetView) -> int:
        """What falls for less than a start lasts is kept: it could not be had again in time."""
        if replicas >= view.desired_replicas:
            self._falling_since = None
            return replicas
        if self._falling_since is None:
            self._falling_since = view.now
        if view.now - self._falling_since < self.plant.start_seconds:
            return view.desired_replicas
        return replicas
