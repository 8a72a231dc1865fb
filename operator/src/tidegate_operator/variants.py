"""Which kinds of accelerator serve one model: the cheapest replicas of each that carry the load together.

Pure. A variant's capacity is a replica's under the targets for the present mix, so which kind is cheapest may change
over the day. Kinds change only for a clear gain, new ones come before old ones go, and nothing goes while replicas
start or changed settings are watched. Called by `kinds`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CLEAR_GAIN = 0.1
"""Another combination must be cheaper by this share, since a change costs starts, drains and cold caches."""
ALMOST = 1e-9


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of accelerator, and what a replica on it is worth now."""

    name: str
    capacity: float
    """Requests per second of a replica, as far as they may be planned with."""
    price: float
    """Of a replica for an hour; positive."""
    low: int = 0
    high: int = 1000


@dataclass(frozen=True, slots=True)
class Choice:
    """Replicas by variant, their price for an hour, and why."""

    replicas: Mapping[str, int]
    price: float
    carries: bool
    """Whether they carry the load; if not, these are all that are allowed."""
    reason: str


def choose(variants: Sequence[Variant], load: float, *, present: Mapping[str, int], hold_down: bool = False) -> Choice:
    """The combination for `load` requests per second, from the replicas that are there.

    `hold_down`: replicas start, or changed settings are watched; then none is taken away and no kind is changed.
    """
    kinds = sorted(variants, key=lambda item: item.name)
    here = {item.name: min(max(present.get(item.name, 0), item.low), item.high) for item in kinds}
    grown = cheapest(kinds, load, floor=here)
    if hold_down:
        return _choice(kinds, load, grown or _all(kinds), reason="Held" if grown == here else "Added")
    # Never a mixed move: what is there is added to, or taken from, but for a clear gain.
    shrunk = cheapest(kinds, load, ceiling=here)
    stays = [found for found in (shrunk, grown) if found is not None]
    best = cheapest(kinds, load)
    if best is None:
        return _choice(kinds, load, _all(kinds), reason="AllInUse")
    stay = min(stays, key=lambda found: _price(kinds, found), default=best)
    if _price(kinds, best) >= (1 - CLEAR_GAIN) * _price(kinds, stay) or best == stay:
        return _choice(kinds, load, stay, reason=_direction(here, stay))
    # First what is new: only once it serves does the next choice take away what it replaces.
    both = {name: max(here[name], best[name]) for name in here}
    if both != here:
        return _choice(kinds, load, both, reason="CheaperKind")
    return _choice(kinds, load, best, reason="CheaperKind")


def cheapest(
    variants: Sequence[Variant],
    load: float,
    *,
    floor: Mapping[str, int] | None = None,
    ceiling: Mapping[str, int] | None = None,
) -> dict[str, int] | None:
    """The cheapest replicas that carry `load`, between the bounds; fewer replicas at the same price. None: none do.

    Branch and bound over the kinds, the cheapest per request first: what is left to carry costs at least as much as on
    the next kind in fractions of a replica.
    """
    low = {item.name: max(item.low, (floor or {}).get(item.name, 0)) for item in variants}
    high = {item.name: min(item.high, (ceiling or {}).get(item.name, item.high)) for item in variants}
    if any(low[item.name] > high[item.name] for item in variants):
        return None
    order = sorted(
        (item for item in variants if item.capacity > 0), key=lambda item: (item.price / item.capacity, item.name)
    )
    fixed = {item.name: low[item.name] for item in variants}
    left = load - sum(item.capacity * fixed[item.name] for item in variants)
    found = _search(order, left, room={name: high[name] - low[name] for name in fixed})
    return None if found is None else {name: fixed[name] + found.get(name, 0) for name in fixed}


def _search(order: Sequence[Variant], load: float, *, room: Mapping[str, int]) -> dict[str, int] | None:
    """How many of each kind to add for `load`; None when there is no room for enough."""
    slack = ALMOST * max(1.0, load)
    best_rank, best = (math.inf, 0), None
    unit_prices = [*(item.price / item.capacity for item in order), math.inf]

    def descend(index: int, left: float, rank: tuple[float, int], added: dict[str, int]) -> None:
        nonlocal best_rank, best
        if left <= slack:
            if rank < best_rank:
                best_rank, best = rank, added
            return
        if index == len(order):
            return
        item = order[index]
        most = min(room[item.name], math.ceil(left / item.capacity - ALMOST))
        for count in range(most, -1, -1):
            price, rest = rank[0] + count * item.price, left - count * item.capacity
            dearer = rest * unit_prices[index + 1] if rest > slack else 0.0
            if price + dearer > best_rank[0] * (1 + ALMOST):
                return  # the fewer there are of this kind, the more the dearer ones have to carry
            descend(index + 1, rest, (price, rank[1] + count), {**added, item.name: count})

    descend(0, load, (0.0, 0), {})
    return best


def _all(variants: Sequence[Variant]) -> dict[str, int]:
    return {item.name: item.high for item in variants}


def _price(variants: Sequence[Variant], replicas: Mapping[str, int]) -> float:
    return sum(item.price * replicas[item.name] for item in variants)


def _direction(here: Mapping[str, int], there: Mapping[str, int]) -> str:
    before, after = sum(here.values()), sum(there.values())
    return "Added" if after > before else "Removed" if after < before else "Held"


def _choice(variants: Sequence[Variant], load: float, replicas: Mapping[str, int], *, reason: str) -> Choice:
    carried = sum(item.capacity * replicas[item.name] for item in variants)
    return Choice(dict(replicas), _price(variants, replicas), carried >= load - ALMOST * max(1.0, load), reason)
