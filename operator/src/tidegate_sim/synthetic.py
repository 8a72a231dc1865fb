"""Made-up workloads: how many requests when (rates), of which lengths (patterns), both the same for the same seed.

Pure. A rate is a function of time, thinned from a faster process, so that ramps and days are exact in the mean; lengths
come from named patterns whose shares may change with time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tidegate_sim.arrivals import Arrival

DAY_SECONDS = 86_400.0
LONGEST_TOKENS = 1 << 20

Rate = Callable[[float], float]
"""Requests per second at a time."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Lengths in tokens: lognormal by median and sigma, cut at `most`; sigma 0 = always the median."""

    median: float
    sigma: float = 0.0
    most: int = LONGEST_TOKENS

    def draw(self, random: Random) -> int:
        length = self.median * math.exp(random.gauss(0.0, self.sigma)) if self.sigma else self.median
        return max(1, min(self.most, round(length)))


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one kind."""

    name: str
    isl: Tail
    osl: Tail


CHAT = Kind("chat", Tail(1000), Tail(250))
CODE = Kind("code", Tail(2500), Tail(25))
RAG = Kind("rag", Tail(8000), Tail(200))
LONG_ANSWERS = Kind("long-answers", Tail(300), Tail(800))
SHORT = Kind("short", Tail(300), Tail(100))
TAILED_CHAT = Kind("tailed-chat", Tail(600, 1.1, 32_000), Tail(180, 0.9, 4096))

Shares = Callable[[float], Mapping[Kind, float]]
"""Weights of kinds at a time."""


def only(kind: Kind) -> Shares:
    return lambda _: {kind: 1.0}


def alternating(kinds: Sequence[Kind], *, period_seconds: float) -> Shares:
    """One kind after the other, each for a period."""
    return lambda at: {kinds[int(at // period_seconds) % len(kinds)]: 1.0}


def shifting(before: Kind, after: Kind, *, at_seconds: float, over_seconds: float = 0.0) -> Shares:
    """From one kind to another, at once or over a while."""

    def shares(at: float) -> dict[Kind, float]:
        done = float(at >= at_seconds) if not over_seconds else min(1.0, max(0.0, (at - at_seconds) / over_seconds))
        return {before: 1.0 - done, after: done}

    return shares


def steady(rate: float) -> Rate:
    return lambda _: rate


def steps(rates: Sequence[tuple[float, float]]) -> Rate:
    """(from when, rate) in order of time; the first also holds before."""

    def rate(at: float) -> float:
        return next((value for start, value in reversed(rates) if at >= start), rates[0][1])

    return rate


def ramp(start: float, end: float, *, begin_seconds: float = 0.0, over_seconds: float) -> Rate:
    def rate(at: float) -> float:
        return start + (end - start) * min(1.0, max(0.0, (at - begin_seconds) / over_seconds))

    return rate


def daily(mean: float, *, swing: float = 0.6, peak_hour: float = 14.0) -> Rate:
    """A day's wave around `mean`: from (1 − swing) to (1 + swing) of it."""

    def rate(at: float) -> float:
        return mean * (1 + swing * math.cos(2 * math.pi * (at / DAY_SECONDS - peak_hour / 24)))

    return rate


def made_up(
    rate: Rate,
    shares: Shares,
    *,
    duration_seconds: float,
    seed: int,
    variation: float = 1.0,
) -> Iterator[Arrival]:
    """Arrivals over `duration_seconds`; `variation` is the coefficient of variation of the gaps (1 = Poisson).

    Gaps are gamma distributed on a clock that runs at the rate, so that bursts follow the load.
    """
    gaps, lengths = Random(f"{seed} gaps"), Random(f"{seed} lengths")
    shape = 1 / (variation * variation)
    at = 0.0
    while True:
        at = _after(at, gaps.gammavariate(shape, 1 / shape), rate, duration_seconds)
        if at >= duration_seconds:
            return
        kinds = shares(at)
        kind = lengths.choices(list(kinds), list(kinds.values()))[0] if len(kinds) > 1 else next(iter(kinds))
        yield Arrival(at, kind.isl.draw(lengths), kind.osl.draw(lengths), kind.name)


CLOCK_SECONDS = 1.0
"""Longest time for which a rate is taken as constant."""


def _after(at: float, work: float, rate: Rate, end: float) -> float:
    """When the integral of the rate from `at` on reaches `work`; `end` when it does not."""
    while at < end:
        now = rate(at)
        if now > 0 and work <= now * CLOCK_SECONDS:
            return at + work / now
        work -= now * CLOCK_SECONDS
        at += CLOCK_SECONDS
    return end
