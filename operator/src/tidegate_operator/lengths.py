"""The lengths of requests over some minutes: a window's few requests are weighed against those of the windows before.

Pure. A minute holds too few long prompts and answers to tell their share; minutes hold enough. As soon as a window
differs by more than its sample explains, the past is dropped. Kept in `memory`, used by `policy`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

HALF_LIFE_SECONDS = 400.0
"""In which the past loses half of its weight."""
MOST_REQUESTS = 4000.0
FULL_WINDOW_SECONDS = 55.0
"""A shorter window is the first one: most of its answers have not ended, and those that have are the short ones."""
COUNTING_NOISE = 2.0
MOST_CELLS = 24
"""Cells that are kept, the largest first."""
DEVIATIONS = 6.0
"""A window differs when it lies so many standard deviations outside: it is looked at every few seconds."""
WRITTEN_CHANGE = 0.01
"""Share of the requests that must lie elsewhere than was noted before it is noted anew: at rest nothing is written."""
PLACE_DEVIATION, PLACE_NOISE = 0.5, 0.05
"""Standard deviation of one request's place in its cell, and what is no change anyway."""

Shares = Mapping[tuple[int, int], float]
"""By (lower ISL edge, lower OSL edge); they sum to one."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the lengths of requests lie, and how many of them tell it."""

    shares: Shares
    prompt_place: float = 0.5
    """Where in their cells the prompts lie, from 0 to 1."""
    answer_place: float = 0.5
    requests: float = 0.0


@dataclass(frozen=True, slots=True)
class Remembered:
    """What is kept of earlier windows, as of `at`."""

    at: float
    lengths: Lengths


def follow(
    past: Remembered | None, seen: Lengths, *, now: float, arrived: float, window_seconds: float
) -> tuple[Lengths, Remembered | None]:
    """The lengths by the window and the past together, and what to keep.

    `seen.requests` are those whose answers ended, `arrived` those whose prompts are known.
    """
    noise = COUNTING_NOISE * math.sqrt(arrived)
    if seen.requests > arrived + noise and past is not None:
        # Answers to what came before the load fell, the longest of them last: they do not tell what arrives now.
        seen = replace(seen, requests=0.0)
    full = window_seconds >= FULL_WINDOW_SECONDS and abs(seen.requests - arrived) <= noise
    fresh = _noted(seen, now) if full else None
    if past is None:
        return seen, fresh
    age = max(0.0, now - past.at)
    known = _faded(past.lengths, age)
    if differs(seen, known, arrived=arrived):
        return seen, fresh
    both = _blend(known, seen)
    if not full or age < window_seconds or _distance(both.shares, past.lengths.shares) < WRITTEN_CHANGE:
        return both, past
    return both, _noted(both, now)


def differs(seen: Lengths, known: Lengths, *, arrived: float) -> bool:
    """Whether two samples are hardly of the same traffic: by prompts, by prompts and answers, or inside the cells."""
    by_isl = _is_outside(_prompts(seen.shares), _prompts(known.shares), ours=arrived, theirs=known.requests)
    if by_isl or _is_outside(seen.shares, known.shares, ours=seen.requests, theirs=known.requests):
        return True
    return _is_elsewhere(seen.prompt_place - known.prompt_place, _common(arrived, known.requests)) or _is_elsewhere(
        seen.answer_place - known.answer_place, _common(seen.requests, known.requests)
    )


def _is_elsewhere(way: float, sample: float) -> bool:
    """Whether places differ by more than so many requests explain."""
    return sample > 0 and abs(way) > PLACE_NOISE + DEVIATIONS * PLACE_DEVIATION / math.sqrt(sample)


def _prompts(shares: Shares) -> dict[tuple[int, int], float]:
    sums: dict[tuple[int, int], float] = {}
    for (isl, _), share in shares.items():
        sums[isl, 0] = sums.get((isl, 0), 0.0) + share
    return sums


def _common(ours: float, theirs: float) -> float:
    """Size of the sample that is as uncertain as the difference of two."""
    return ours * theirs / (ours + theirs) if ours > 0 and theirs > 0 else 0.0


def _is_outside(mine: Shares, other: Shares, *, ours: float, theirs: float) -> bool:
    """Chi-squared of two samples, cells of few requests put together."""
    sample = _common(ours, theirs)
    if sample <= 0:
        return False
    square, cells = 0.0, 0
    rest_mine = rest_other = 0.0
    for key in mine.keys() | other.keys():
        a, b = mine.get(key, 0.0), other.get(key, 0.0)
        both = (a * ours + b * theirs) / (ours + theirs)
        if both * sample < 1:
            rest_mine, rest_other = rest_mine + a, rest_other + b
            continue
        square += sample * (a - b) ** 2 / both
        cells += 1
    rest = (rest_mine * ours + rest_other * theirs) / (ours + theirs)
    if rest * sample >= 1:
        square += sample * (rest_mine - rest_other) ** 2 / rest
        cells += 1
    freedom = max(1, cells - 1)
    return square > freedom + DEVIATIONS * math.sqrt(2 * freedom)


def _faded(lengths: Lengths, age_seconds: float) -> Lengths:
    return replace(lengths, requests=lengths.requests * 0.5 ** (age_seconds / HALF_LIFE_SECONDS))


def _blend(known: Lengths, seen: Lengths) -> Lengths:
    total = known.requests + seen.requests
    part = seen.requests / total if total > 0 else 1.0
    keys = known.shares.keys() | seen.shares.keys()
    shares = {key: (1 - part) * known.shares.get(key, 0.0) + part * seen.shares.get(key, 0.0) for key in keys}
    return Lengths(
        shares,
        (1 - part) * known.prompt_place + part * seen.prompt_place,
        (1 - part) * known.answer_place + part * seen.answer_place,
        total,
    )


def _distance(mine: Shares, other: Shares) -> float:
    """Share of the requests that lie elsewhere."""
    return sum(abs(mine.get(key, 0.0) - other.get(key, 0.0)) for key in mine.keys() | other.keys()) / 2


def _noted(lengths: Lengths, now: float) -> Remembered | None:
    """In few figures: what is not told apart after minutes need not be kept."""
    largest = sorted(lengths.shares.items(), key=lambda item: (-item[1], item[0]))[:MOST_CELLS]
    total = sum(share for _, share in largest)
    requests = float(round(min(lengths.requests, MOST_REQUESTS)))
    if total <= 0 or requests < 1:
        return None
    shares = {key: rounded for key, share in largest if (rounded := round(share / total, 3)) > 0}
    return Remembered(now, Lengths(shares, round(lengths.prompt_place, 2), round(lengths.answer_place, 2), requests))


def dump_lengths(kept: Remembered | None) -> dict[str, object] | None:
    if kept is None:
        return None
    lengths = kept.lengths
    cells = [[isl, osl, share] for (isl, osl), share in sorted(lengths.shares.items())]
    places = [lengths.prompt_place, lengths.answer_place]
    return {"at": round(kept.at, 1), "requests": lengths.requests, "places": places, "cells": cells}


def load_lengths(data: object) -> Remembered | None:
    """Raises as `float` does on what is no number; `memory` forgets then."""
    if not isinstance(data, Mapping):
        return None
    shares = {(int(isl), int(osl)): float(share) for isl, osl, share in data["cells"]}
    prompt_place, answer_place = data["places"]
    lengths = Lengths(shares, float(prompt_place), float(answer_place), float(data["requests"]))
    return Remembered(float(data["at"]), lengths)
