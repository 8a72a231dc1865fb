"""Token velocity: tokens arriving a second over the tokens a second that a replica is calibrated for, by stage.

After TokenScale (Lai et al., 2025, arXiv 2512.03416), which scales prefillers and decoders each by the rate of tokens
that comes to them over their velocity. One pool serves both stages here, so the two shares add up; its convertible
decoders have no counterpart. Velocities come from the plant at the mean lengths that were seen.
"""

import math
from dataclasses import dataclass, field

from tidegate_sim.baselines import signals
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.controller import FleetView, Order

TICK_SECONDS = 5.0
WINDOW_SECONDS = 30.0
DOWN_SECONDS = 60.0


def replicas_by_velocity(
    plant: Plant, *, prompt_rate: float, output_rate: float, isl: float, osl: float, use: float
) -> int:
    """Rates in tokens/s, `use` the share of its velocity that a replica is filled to."""
    share = prompt_rate / plant.prefill_tokens_per_second(max(isl, 1.0))
    share += output_rate / plant.decode_tokens_per_second(context=isl + osl / 2, itl_seconds=plant.itl_seconds)
    return max(1, math.ceil(share / use - 1e-9))


@dataclass
class TokenVelocity:
    """Both stages in one pool."""

    plant: Plant
    use: float = 0.8
    name: str = "token-velocity"
    period_seconds: float = TICK_SECONDS
    _recent: list[tuple[float, int]] = field(default_factory=list, init=False)
    _arrivals: signals.WindowedCounter = field(
        default_factory=lambda: signals.WindowedCounter(WINDOW_SECONDS), init=False
    )

    def decide(self, view: FleetView) -> Order:
        now, pods = view.now, signals.ready(view)
        self._arrivals.record(now, view.gateway.arrivals_total)
        requests = self._arrivals.rate(WINDOW_SECONDS)
        seen = signals.total_rate(pods, "arrivals", now=now, window_seconds=WINDOW_SECONDS)
        prompts = signals.total_rate(pods, "prompt_tokens", now=now, window_seconds=WINDOW_SECONDS)
        osl = signals.mean_output_tokens(pods, now=now, window_seconds=2 * WINDOW_SECONDS)
        if requests is None or not seen or prompts is None or osl is None:
            return Order(view.desired_replicas, reason="NoMetrics")
        isl = prompts / seen
        # What comes in counts, not what is served: a fleet that cannot keep up would look small otherwise.
        wanted = replicas_by_velocity(
            self.plant, prompt_rate=requests * isl, output_rate=requests * osl, isl=isl, osl=osl, use=self.use
        )
        self._recent = [item for item in self._recent if item[0] > now - DOWN_SECONDS]
        self._recent.append((now, wanted))
        held = max(count for _, count in self._recent)
        replicas = min(max(held, self.plant.lowest_replicas), self.plant.highest_replicas)
        return Order(replicas, reason="Velocity")
