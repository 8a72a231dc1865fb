"""Several kinds of accelerator: the cheapest that carry the load, changed only for a clear gain and never in haste."""

import itertools
import math
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.variants import CLEAR_GAIN, Variant, cheapest, choose

EXAMPLES = 1500 if os.environ.get("TIDEGATE_PROVE") else 120
BIG = Variant("big", capacity=10.0, price=8.0)
SMALL = Variant("small", capacity=2.0, price=2.0)


def price_of(variants: list[Variant], replicas: dict[str, int]) -> float:
    return sum(item.price * replicas[item.name] for item in variants)


def by_trying_all(variants: list[Variant], load: float) -> float | None:
    """The lowest price of any combination that carries the load."""
    prices = [
        sum(item.price * count for item, count in zip(variants, counts, strict=True))
        for counts in itertools.product(*(range(item.low, item.high + 1) for item in variants))
        if sum(item.capacity * count for item, count in zip(variants, counts, strict=True)) >= load - 1e-9
    ]
    return min(prices, default=None)


def test_kinds_are_mixed_where_that_is_cheapest() -> None:
    assert cheapest([BIG, SMALL], 9.5) == {"big": 1, "small": 0}
    assert cheapest([BIG, SMALL], 12.0) == {"big": 1, "small": 1}
    assert cheapest([BIG, SMALL], 3.0) == {"big": 0, "small": 2}


def test_bounds_of_each_kind_hold() -> None:
    kinds = [Variant("big", 10, 8, low=0, high=1), Variant("small", 2, 2, low=2, high=3)]
    assert cheapest(kinds, 1.0) == {"big": 0, "small": 2}
    assert cheapest(kinds, 15.0) == {"big": 1, "small": 3}
    assert cheapest(kinds, 17.0) is None
    choice = choose(kinds, 17.0, present={})
    assert (choice.replicas, choice.carries, choice.reason) == ({"big": 1, "small": 3}, False, "AllInUse")


def test_a_kind_without_capacity_for_the_mix_is_not_used() -> None:
    assert cheapest([Variant("none", 0.0, 0.1), SMALL], 3.0) == {"none": 0, "small": 2}


def test_a_load_of_a_thousand_replicas_is_found_at_once() -> None:
    kinds = [Variant(f"k{index}", 3.0 + index, 2.9 + 0.97 * index) for index in range(4)]
    found = cheapest(kinds, 5000.0)
    assert found is not None
    bound = min(item.price / item.capacity for item in kinds) * 5000
    assert bound <= price_of(kinds, found) <= bound * 1.01


@st.composite
def few_kinds(draw: st.DrawFn) -> list[Variant]:
    kinds = []
    for index in range(draw(st.integers(1, 3))):
        low = draw(st.integers(0, 2))
        capacity = draw(st.sampled_from([0.0, 0.7, 1.0, 1.5, 2.0, 3.3, 10.0]))
        price = draw(st.sampled_from([0.5, 1.0, 1.1, 2.0, 3.0, 7.0]))
        kinds.append(Variant(f"k{index}", capacity, price, low, low + draw(st.integers(0, 5))))
    return kinds


loads = st.floats(0, 60)


@settings(max_examples=EXAMPLES, deadline=None)
@given(few_kinds(), loads)
def test_no_combination_is_cheaper(kinds: list[Variant], load: float) -> None:
    found, best = cheapest(kinds, load), by_trying_all(kinds, load)
    if best is None:
        assert found is None
        return
    assert found is not None
    assert price_of(kinds, found) == pytest.approx(best)
    assert sum(item.capacity * found[item.name] for item in kinds) >= load - 1e-6
    assert all(item.low <= found[item.name] <= item.high for item in kinds)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Variant], dict[str, int]]:
    kinds = draw(few_kinds())
    return kinds, {item.name: draw(st.integers(0, 8)) for item in kinds}


@settings(max_examples=EXAMPLES, deadline=None)
@given(situations(), loads, st.booleans())
def test_a_choice_carries_the_load_within_its_bounds_and_is_never_much_dearer_once_it_rests(
    situation: tuple[list[Variant], dict[str, int]], load: float, hold: bool
) -> None:
    kinds, present = situation
    best = by_trying_all(kinds, load)
    choice = choose(kinds, load, present=present, hold_down=hold)
    assert all(item.low <= choice.replicas[item.name] <= item.high for item in kinds)
    assert choice.carries == (best is not None)
    if hold and best is not None:
        assert all(choice.replicas[item.name] >= min(present[item.name], item.high) for item in kinds)
    rests = [dict(choice.replicas)]
    for _ in range(4):
        rests.append(dict(choose(kinds, load, present=rests[-1]).replicas))
    assert rests[-1] == rests[-2], "it comes to rest"
    if best is not None:
        assert price_of(kinds, rests[-1]) <= best / (1 - CLEAR_GAIN) + 1e-9


@settings(max_examples=EXAMPLES, deadline=None)
@given(situations(), loads)
def test_the_order_of_the_kinds_does_not_matter(situation: tuple[list[Variant], dict[str, int]], load: float) -> None:
    kinds, present = situation
    assert choose(kinds, load, present=present) == choose(kinds[::-1], load, present=present)


@settings(max_examples=EXAMPLES, deadline=None)
@given(few_kinds(), loads, loads)
def test_more_load_is_never_cheaper(kinds: list[Variant], one: float, other: float) -> None:
    low, high = cheapest(kinds, min(one, other)), cheapest(kinds, max(one, other))
    if high is not None:
        assert low is not None and price_of(kinds, low) <= price_of(kinds, high) + 1e-9


def test_a_cheaper_kind_comes_before_the_dearer_one_goes() -> None:
    dear = Variant("dear", 2.0, 4.0)
    kinds = [dear, SMALL]
    first = choose(kinds, 5.0, present={"dear": 3, "small": 0})
    assert (first.replicas, first.reason) == ({"dear": 3, "small": 3}, "CheaperKind")
    waiting = choose(kinds, 5.0, present=first.replicas, hold_down=True)
    assert waiting.replicas == first.replicas, "while the new ones start nothing goes"
    assert choose(kinds, 5.0, present=first.replicas).replicas == {"dear": 0, "small": 3}


def test_a_small_gain_changes_no_kind() -> None:
    dear = Variant("dear", 2.0, 2.15)
    assert choose([dear, SMALL], 5.9, present={"dear": 3, "small": 0}).replicas == {"dear": 3, "small": 0}


def test_the_kind_follows_the_mix_over_the_day_without_going_to_and_fro() -> None:
    """By day long prompts suit the big kind, by night long answers the small one; capacities waver by a few percent."""
    dice = random.Random(3)
    present: dict[str, int] = {"big": 3, "small": 0}
    kinds_seen = []
    for step in range(4 * 24 * 12):
        by_day = 0.5 - 0.5 * math.cos(2 * math.pi * step / (24 * 12))
        waver = dice.uniform(0.98, 1.02)
        kinds = [
            Variant("big", (6 + 10 * by_day) * waver, 8.0),
            Variant("small", (4 - 2.5 * by_day) * waver, 2.0),
        ]
        choice = choose(kinds, 24.0 * dice.uniform(0.98, 1.02), present=present)
        assert choice.carries
        present = dict(choice.replicas)
        kinds_seen.append(max(present, key=lambda name: present[name] * (4 if name == "big" else 1)))
    changes = sum(before != after for before, after in itertools.pairwise(kinds_seen))
    assert 4 <= changes <= 20
