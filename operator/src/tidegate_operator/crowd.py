"""How many prompts are read at the same time: the queue of prompts inside a continuous batch, as a distribution.

Pure. While prompts are read, steps are longer, so more prompts arrive before they are done: crowds come in heaps, which
is what the 95th percentiles of TTFT and ITL are made of. Called by `capacity` only.

Birth and death by steps: p(k) / p(k-1) = λ·C·t(k-1) / min(k, L), with C steps for a prompt, t(k) the time of a step in
which k are read, and L the prompts whose chunks fit into the budget side by side. Above L they are read in the order of
arrival. Of prompts that take few steps the steps are alike for all: t is drawn towards its mean, by the share 1/C of
what is free.
"""

import math
from dataclasses import dataclass
from itertools import accumulate

NEGLIGIBLE = 1e-5
MOST_STATES = 400


@dataclass(frozen=True, slots=True)
class Pace:
    """What the crowd depends on: all in seconds, steps and prompts."""

    rate: float
    """Arrivals per second."""
    chunks: float
    """Steps in which a prompt is read."""
    lanes: float
    """Prompts read side by side before the budget is full."""
    bare_seconds: float
    """A step without any prompt."""
    first_seconds: float
    """A step with one."""
    slope_seconds: float
    """What each further one adds."""
    full_seconds: float
    """A step whose budget is full."""
    variation: float
    """Squared coefficient of variation of the prompts' lengths."""

    def step_seconds(self, prompts: int) -> float:
        if prompts <= 0:
            return self.bare_seconds
        return min(self.first_seconds + (prompts - 1) * self.slope_seconds, max(self.full_seconds, self.first_seconds))


@dataclass(frozen=True, slots=True)
class Crowd:
    """The distribution, of an average step and of the moment of an arrival. The last state is "all lanes are taken"."""

    by_step: tuple[float, ...]
    by_time: tuple[float, ...]
    step_seconds: tuple[float, ...]
    tails: tuple[float, ...]
    """Chance at an arrival that more than so many are read."""
    mean: float
    """Prompts read at an arrival, those that wait for a lane left out."""
    has_queue: bool
    """Whether the last state holds prompts that wait."""
    wait_seconds: float
    """Mean time that a prompt waits for a lane when all are taken."""

    def share_above(self, prompts: float) -> float:
        """Chance that more than `prompts` are met along the way; each but the first counts by any part of itself."""
        if prompts < 0:
            return 1.0
        low = int(prompts)
        if low >= len(self.tails) - 1:
            return 0.0
        part = prompts - low
        found = self.tails[low] - self.by_time[low + 1] * part / 2
        return found + (self.by_time[low] * (1 - part) / 2 if low else 0.0)


def crowd_at(pace: Pace, *, mean_seconds: float) -> Crowd | None:
    """The crowd when steps take `mean_seconds` on average; None when prompts come faster than they can be read."""
    utilisation = pace.rate * pace.chunks * pace.full_seconds / pace.lanes
    if utilisation >= 1:
        return None
    offered = pace.rate * pace.chunks
    last = max(1, math.ceil(pace.lanes - 1e-9))
    free = max(0.0, 1 - offered * pace.slope_seconds)
    pull = min(1.0, free / pace.chunks)
    shares, seconds = [1.0], [pace.step_seconds(0)]
    total, has_queue = 1.0, False
    for prompts in range(1, min(last, MOST_STATES) + 1):
        length = seconds[-1] + pull * (mean_seconds - seconds[-1])
        share = shares[-1] * offered * length / min(float(prompts), pace.lanes)
        seconds.append(pace.step_seconds(prompts))
        has_queue = prompts == last
        shares.append(share / (1 - utilisation) if has_queue else share)
        total += shares[-1]
        if share < NEGLIGIBLE * total and prompts > offered * mean_seconds:
            break
    by_step = [share / total for share in shares]
    weighted = [share * length for share, length in zip(by_step, seconds, strict=True)]
    average = sum(weighted)
    by_time = tuple(share / average for share in weighted)
    service = pace.chunks * pace.full_seconds / pace.lanes
    return Crowd(
        by_step=tuple(by_step),
        by_time=by_time,
        step_seconds=tuple(seconds),
        tails=tuple(max(0.0, 1 - total) for total in accumulate(by_time)),
        mean=sum(index * share for index, share in enumerate(by_time)),
        has_queue=has_queue,
        wait_seconds=service * (1 + pace.variation) / 2 / (1 - utilisation) if has_queue else 0.0,
    )
