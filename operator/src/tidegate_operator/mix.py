"""The query-pattern mix: a joint histogram of input × output lengths, estimated from one window of traffic.

Pure. Arrivals are counted by input length when they arrive, output lengths come from requests that finished; the share
that arrived without finishing yet takes its output length from how far the running requests have got, so that long
answers are not invisible until they end. Called by `policy`; `capacity` computes on the result.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidegate_engine.settings import ISL_EDGES, OSL_EDGES, Pattern, pattern_of
from tidegate_operator.lengths import Lengths
from tidegate_operator.observation import Demand, PatternShare

PRIOR_HAZARDS = (0.1, 0.25, 0.5, 0.9, 0.97, 0.99)
"""Chance that an answer ends inside each output cell but the last, before any was seen: chat-like, most between 64 and
1,024 tokens, and a thin tail, so that the first requests of a new object do not count for thousands of tokens each."""
LARGEST_CACHED_RATIO = 0.9
OPEN_CELL_FACTOR = 2
"""The last cell has no upper edge: it is taken to reach to this multiple of its lower one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests of one kind of length: their share of the rate, and representative lengths in tokens."""

    share: float
    isl: float
    osl: float
    isl_edge: int
    osl_edge: int


@dataclass(frozen=True, slots=True)
class Mix:
    """The joint distribution of lengths. Shares sum to one; empty when nothing arrives."""

    requests_per_second: float
    cells: tuple[Cell, ...]
    cached_ratio: float = 0.0
    """Share of the prompt tokens that the prefix cache spares."""


def estimate_mix(demand: Demand, *, max_model_len: int | None = None, lengths: Lengths | None = None) -> Mix:
    """The mix of what arrives. Lengths inside the cells are placed so that the token rates seen come out.

    `lengths` instead of those that the window itself tells, where more than the window is known.
    """
    limit = float(max_model_len) if max_model_len else math.inf
    total = sum(rate for rate in demand.arrivals_per_second.values() if rate > 0)
    prompt, cached = demand.prompt_tokens_per_second, demand.cached_prompt_tokens_per_second
    cached_ratio = min(LARGEST_CACHED_RATIO, max(0.0, cached / prompt)) if prompt and cached else 0.0
    if total <= 0:
        return Mix(0.0, (), cached_ratio)
    lengths = lengths or lengths_seen(demand, max_model_len=max_model_len)
    cells = tuple(
        Cell(
            share=share,
            isl=min(_inside(isl, ISL_EDGES, place=lengths.prompt_place, limit=limit), max(1.0, limit - 1)),
            osl=min(_inside(osl, OSL_EDGES, place=lengths.answer_place), max(1.0, limit - isl)),
            isl_edge=isl,
            osl_edge=osl,
        )
        for (isl, osl), share in sorted(lengths.shares.items())
        if share > 0
    )
    return Mix(total, cells, cached_ratio)


def lengths_seen(demand: Demand, *, max_model_len: int | None = None) -> Lengths:
    """What the window alone tells of the lengths; as sure as many requests ended in it."""
    rates = joint_rates(demand)
    total = sum(rates.values())
    place = _place(
        _marginal(rates, axis=0),
        ISL_EDGES,
        tokens_per_second=demand.prompt_tokens_per_second,
        limit=float(max_model_len) if max_model_len else math.inf,
    )
    ended = sum(rate for rate in demand.finished_per_second.values() if rate > 0) * demand.window_seconds
    shares = {cell: rate / total for cell, rate in rates.items() if rate > 0} if total > 0 else {}
    return Lengths(shares, place, _osl_place(demand), ended)


def joint_rates(demand: Demand) -> dict[tuple[int, int], float]:
    """Arrivals per second by (lower ISL edge, lower OSL edge)."""
    tail = _running_distribution(demand)
    rates: dict[tuple[int, int], float] = {}
    for isl, arrived in demand.arrivals_per_second.items():
        if not arrived > 0:
            continue
        finished = {osl: rate for (row, osl), rate in demand.finished_per_second.items() if row == isl and rate > 0}
        seen = sum(finished.values())
        known = _known_share(arrived, seen, window_seconds=demand.window_seconds)
        for osl, rate in finished.items():
            rates[isl, osl] = rates.get((isl, osl), 0.0) + arrived * known * rate / seen
        if known < 1:
            for osl, share in tail.items():
                rates[isl, osl] = rates.get((isl, osl), 0.0) + arrived * (1 - known) * share
    return rates


def _known_share(arrived: float, finished: float, *, window_seconds: float) -> float:
    """Share of the arrivals whose output length the finished ones tell; counting noise is no shortfall."""
    if finished <= 0:
        return 0.0
    noise = 2 * math.sqrt(arrived * window_seconds) / window_seconds
    return min(1.0, finished / max(arrived - noise, finished))


def _running_distribution(demand: Demand) -> dict[int, float]:
    """Output lengths by survival: who has passed an edge lived through the cell below it, who finished ended in one."""
    ended = _marginal(demand.finished_per_second, axis=1)
    shares: dict[int, float] = {}
    alive = 1.0
    for edge, above, prior in zip(OSL_EDGES[:-1], OSL_EDGES[1:], PRIOR_HAZARDS, strict=True):
        ends = ended.get(edge, 0.0) * demand.window_seconds
        survives = demand.running_past_output_edge.get(above, 0.0) + demand.window_seconds * sum(
            rate for osl, rate in ended.items() if osl >= above
        )
        hazard = (ends + prior) / (ends + survives + 1.0)
        shares[edge] = alive * hazard
        alive *= 1 - hazard
    shares[OSL_EDGES[-1]] = alive
    return shares


def _marginal(rates: Mapping[tuple[int, int], float], *, axis: int) -> dict[int, float]:
    sums: dict[int, float] = {}
    for key, rate in rates.items():
        sums[key[axis]] = sums.get(key[axis], 0.0) + rate
    return sums


def _cell_ends(edge: int, edges: Sequence[int], *, limit: float) -> tuple[float, float]:
    """Smallest and largest length of the cell."""
    index = edges.index(edge) if edge in edges else 0
    top = edges[index + 1] - 1 if index + 1 < len(edges) else edge * OPEN_CELL_FACTOR
    low = float(max(1, edge))
    return low, max(low, min(float(top), limit))


def _inside(edge: int, edges: Sequence[int], *, place: float, limit: float = math.inf) -> float:
    """The length at `place` (0 = lower end, 1 = upper) of the cell on a log scale."""
    low, high = _cell_ends(edge, edges, limit=limit)
    return float(low ** (1 - place) * high**place)


def _place(
    rates: Mapping[int, float], edges: Sequence[int], *, tokens_per_second: float | None, limit: float = math.inf
) -> float:
    """Where in their cells the lengths lie, so that Σ rate × length equals the token rate; the middle when unknown."""
    if tokens_per_second is None or tokens_per_second <= 0:
        return 0.5

    def tokens(place: float) -> float:
        return sum(rate * _inside(edge, edges, place=place, limit=limit) for edge, rate in rates.items())

    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens(middle) < tokens_per_second else (low, middle)
    return (low + high) / 2


def _osl_place(demand: Demand) -> float:
    """As `_place` for outputs, believed only as far as as many requests finish as arrive."""
    arrived = sum(demand.arrivals_per_second.values())
    finished = sum(demand.finished_per_second.values())
    if arrived <= 0 or finished <= 0:
        return 0.5
    steady = max(0.0, 1 - 2 * abs(finished / arrived - 1))
    seen = _marginal(demand.finished_per_second, axis=1)
    place = _place(seen, OSL_EDGES, tokens_per_second=demand.generation_tokens_per_second)
    return 0.5 + steady * (place - 0.5)


def pattern_shares(mix: Mix, patterns: Sequence[Pattern]) -> tuple[PatternShare, ...]:
    """The mix by query pattern, the largest share first."""
    groups: dict[str, list[Cell]] = {}
    for cell in mix.cells:
        groups.setdefault(pattern_of(cell.isl_edge, cell.osl_edge, patterns), []).append(cell)
    shares = [_pattern_share(name, cells, mix.requests_per_second) for name, cells in groups.items()]
    return tuple(sorted(shares, key=lambda item: (-item.share, item.name)))


def _pattern_share(name: str, cells: Sequence[Cell], requests_per_second: float) -> PatternShare:
    share = sum(cell.share for cell in cells)
    return PatternShare(
        name=name,
        share=share,
        requests_per_second=share * requests_per_second,
        isl_mean_tokens=sum(cell.share * cell.isl for cell in cells) / share,
        osl_mean_tokens=sum(cell.share * cell.osl for cell in cells) / share,
    )
