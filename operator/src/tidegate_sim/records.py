"""What became of each request, in arrays (a million of them take some 50 MB), and what the pods took.

Written by the fleet, read by the results.
"""

import math
from array import array
from dataclasses import dataclass
from enum import IntEnum

from tidegate_engine.request import FinishReason, Request
from tidegate_sim.arrivals import Arrival

UNKNOWN = math.nan


class Outcome(IntEnum):
    """How a request ended. Only `FINISHED` can have met its goals."""

    IN_FLIGHT = 0
    """Not ended when the simulation did."""
    FINISHED = 1
    REFUSED = 2
    """It can never fit into the engine."""
    TIMED_OUT = 3
    """Its client waited no longer."""
    FAILED = 4
    """Its pod died, or drained for too long."""


@dataclass(frozen=True, slots=True)
class Use:
    """What pods of a kind took."""

    gpu_seconds: float
    pods_created: int
    gpu_price_per_hour: float | None

    @property
    def cost(self) -> float | None:
        return None if self.gpu_price_per_hour is None else self.gpu_seconds / 3600 * self.gpu_price_per_hour


class Records:
    """Columns by number of arrival; times in seconds, NaN where a request never got so far."""

    def __init__(self) -> None:
        self.at = array("d")
        self.isl = array("l")
        self.osl = array("l")
        """As the workload wants it; the engine may have had no room for all of it."""
        self.ttft = array("d")
        """From arrival at the gateway to the first token, retries included."""
        self.itl = array("d")
        """Mean time between tokens; NaN for fewer than two."""
        self.queue = array("d")
        """From arrival at the gateway to the first step."""
        self.ended = array("d")
        """When."""
        self.outcome = array("b")
        self.recent_ttft: list[float] = []
        """Of first tokens since whoever reads the timeline emptied it."""

    def __len__(self) -> int:
        return len(self.at)

    def arrived(self, arrival: Arrival) -> int:
        """The new request's number."""
        self.at.append(arrival.at_seconds)
        self.isl.append(arrival.isl)
        self.osl.append(arrival.osl)
        for column in (self.ttft, self.itl, self.queue, self.ended):
            column.append(UNKNOWN)
        self.outcome.append(Outcome.IN_FLIGHT)
        return len(self.at) - 1

    def first_token(self, index: int, now: float, *, scheduled_at: float | None) -> None:
        ttft = now - self.at[index]
        self.ttft[index] = ttft
        self.recent_ttft.append(ttft)
        if scheduled_at is not None:
            self.queue[index] = scheduled_at - self.at[index]

    def finished(self, index: int, request: Request) -> None:
        first, last, tokens = request.first_token_at, request.last_token_at, request.output_tokens
        if first is not None and last is not None and tokens > 1:
            self.itl[index] = (last - first) / (tokens - 1)
        self.ended[index] = UNKNOWN if request.finished_at is None else request.finished_at
        did_finish = request.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        self.outcome[index] = Outcome.FINISHED if did_finish else Outcome.FAILED

    def lost(self, index: int, outcome: Outcome, now: float) -> None:
        self.ended[index] = now
        self.outcome[index] = outcome

    def is_settled(self, index: int) -> bool:
        return self.outcome[index] != Outcome.IN_FLIGHT

    def has_begun(self, index: int) -> bool:
        return not math.isnan(self.ttft[index])
