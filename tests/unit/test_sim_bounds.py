"""The offline bounds: golden cases, and every bound against all fleets there are, on tiny workloads."""

import math
import os
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.steptime import StepModel, StepShape
from tidegate_sim import bounds
from tidegate_sim.arrivals import Arrival
from tidegate_sim.bounds import Achieved, Costs, Task, Work

EXAMPLES = 2000 if os.environ.get("TIDEGATE_PROVE") else 60
STEP = StepModel(
    base_seconds=0.01,
    threshold_tokens=50,
    token_seconds=1e-4,
    kv_token_seconds=1e-7,
    sequence_seconds=1e-5,
    attention_seconds=1e-9,
    mixed_kv_token_seconds=1e-8,
)
needs_lists = st.lists(st.sampled_from([0.0, 0.4, 0.7, 1.0, 1.3, 2.2, 3.0]), min_size=1, max_size=5)
costs_cases = st.builds(
    Costs,
    start_seconds=st.sampled_from([0.0, 1.0, 2.5, 10.0]),
    floor=st.integers(0, 1),
    initial=st.integers(1, 3),
    slot_seconds=st.just(1.0),
)


def cheapest_fleet(needs: Sequence[float], costs: Costs, *, missed_share: float = 0.0) -> float:
    """By trying every fleet."""
    best = math.inf
    top = max(costs.initial, math.ceil(max(needs)))
    owed = (1 - missed_share) * sum(needs) - 1e-9
    for fleet in product(range(costs.floor, top + 1), repeat=len(needs)):
        if sum(map(min, needs, fleet)) >= owed:
            starts = sum(max(0, after - before) for before, after in pairwise((costs.initial, *fleet)))
            best = min(best, sum(fleet) * costs.slot_seconds + starts * costs.start_seconds)
    return best


def test_golden_bounds() -> None:
    needs = [0.5, 2.5, 0.0, 0.0, 2.5, 0.5]
    assert bounds.by_work(needs, slot_seconds=10) == 60
    # One always, and two more in two slots.
    assert bounds.by_whole_replicas(needs, slot_seconds=10) == 100
    # Two starts of 5 s twice are cheaper than to bridge two slots of 10 s.
    assert bounds.with_starts(needs, Costs(5, slot_seconds=10)) == 120
    # At 25 s each, the gap is bridged: 140 s of replicas and two starts.
    assert bounds.with_starts(needs, Costs(25, slot_seconds=10)) == 140 + 50
    # With three there from the beginning, and the first slot bridged too: no start at all.
    assert bounds.with_starts(needs, Costs(25, initial=3, slot_seconds=10)) == 160


def test_a_tenth_missed_leaves_the_peak_undone() -> None:
    needs = [1.0] * 9 + [2.0]
    costs = Costs(3.0, slot_seconds=1.0)
    assert bounds.with_starts(needs, costs) == 14
    assert bounds.with_misses(needs, costs, missed_share=0.0) == pytest.approx(14, rel=1e-3)
    assert bounds.with_misses(needs, costs, missed_share=0.1) == pytest.approx(10)
    # Half of the peak's second replica: half of its slot and its start, as a bound that is not whole.
    assert bounds.with_misses(needs, costs, missed_share=0.5 / 11) == pytest.approx(12, rel=1e-3)


@settings(max_examples=EXAMPLES, deadline=None)
@given(needs_lists, costs_cases)
def test_the_bound_with_starts_is_the_cheapest_of_all_fleets(needs: list[float], costs: Costs) -> None:
    assert bounds.with_starts(needs, costs) == pytest.approx(cheapest_fleet(needs, costs))


@settings(max_examples=EXAMPLES, deadline=None)
@given(needs_lists, costs_cases, st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]))
def test_the_bound_with_misses_is_below_every_fleet_and_near_the_best(
    needs: list[float], costs: Costs, missed_share: float
) -> None:
    bound = bounds.with_misses(needs, costs, missed_share=missed_share)
    best = cheapest_fleet(needs, costs, missed_share=missed_share)
    assert bound <= best + 1e-6
    assert bound >= costs.floor * len(needs) - 1e-9
    if missed_share == 0:
        assert bound == pytest.approx(best, rel=1e-3)


@settings(max_examples=EXAMPLES, deadline=None)
@given(needs_lists, costs_cases)
def test_each_bound_is_above_the_one_before(needs: list[float], costs: Costs) -> None:
    work = bounds.by_work(needs, slot_seconds=1.0)
    whole = bounds.by_whole_replicas(needs, floor=costs.floor, slot_seconds=1.0)
    started = bounds.with_starts(needs, costs)
    assert work <= whole + 1e-6 and whole <= started
    shares = [bounds.with_misses(needs, costs, missed_share=share) for share in (0.5, 0.2, 0.05, 0.0)]
    assert all(less <= more + 1e-3 for less, more in pairwise(shares))
    tasks, slots = bounds.tasks_of(needs, slack_seconds=0.0, slot_seconds=1.0)
    assert bounds.with_slack(tasks, slots=slots, floor=costs.floor, slot_seconds=1.0) == pytest.approx(whole)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([0.3, 0.5, 1.0, 1.6])), min_size=1, max_size=4
    ),
    st.integers(0, 1),
)
def test_waiting_work_takes_the_fewest_replicas_that_meet_all_deadlines(
    drawn: list[tuple[int, int, float]], floor: int
) -> None:
    tasks = [Task(min(first, last), max(first, last), work) for first, last, work in drawn]
    best = math.inf
    for fleet in product(range(floor, 8), repeat=4):
        if sum(fleet) < best and all(
            sum(task.work for task in tasks if task.first >= a and task.last <= b) <= sum(fleet[a : b + 1]) + 1e-9
            for a in range(4)
            for b in range(a, 4)
        ):
            best = sum(fleet)
    assert bounds.with_slack(tasks, slots=4, floor=floor, slot_seconds=1.0) == best


def test_slack_smooths_a_peak() -> None:
    needs = [0.0, 0.0, 3.0, 0.0, 0.0]
    results = []
    for slack in (0, 15, 30):
        tasks, slots = bounds.tasks_of(needs, slack_seconds=slack)
        results.append(bounds.with_slack(tasks, slots=slots) - 15 * slots)
    assert results == [30, 15, 0]


def test_a_request_is_the_work_of_its_tokens() -> None:
    work = Work(1.0, 0.001, 0.01, 0.0002, 0.5)
    # 0.5 + 10 x 0.01 + 0.0002 x 50, and three decodes over contexts of 11, 12 and 13.
    assert work.seconds(10, 4) == pytest.approx(0.61 + 3 + 0.036)
    assert work.seconds(10, 1) == work.prompt_seconds(10)


def test_work_is_spread_over_the_time_that_it_may_take() -> None:
    work = Work(0.1, 0.0, 0.01, 0.0, 0.0)
    needs = bounds.demand([Arrival(12.0, 100, 11)], work, itl_seconds=0.8, slot_seconds=15)
    # The prompt at 12 s; ten decodes of 0.1 s from 12 s to 20 s.
    assert needs == pytest.approx([(1.0 + 3 / 8) / 15, 5 / 8 / 15])
    arrivals = [Arrival(float(n), 50 + n, 1 + n) for n in range(40)]
    total = sum(work.seconds(arrival.isl, arrival.osl) for arrival in arrivals)
    assert bounds.by_work(bounds.demand(arrivals, work, itl_seconds=0.05)) == pytest.approx(total)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 20)), min_size=1, max_size=6),
    st.integers(1, 6),
    st.sampled_from([0, 20, 50, 200]),
)
def test_no_batches_do_the_work_in_less_time_than_the_bound(
    lengths: list[tuple[int, int]], batch: int, threshold: int
) -> None:
    """Prompts first, each in one step; then decodes of the most that are left, `batch` at a time."""
    step = StepModel(**{**STEP.as_dict(), "threshold_tokens": threshold})
    work = bounds.work_of(step, largest_batch=batch)
    seconds = sum(step.seconds(StepShape(isl, 0, 1, isl * isl / 2, True)) for isl, _ in lengths)
    left = [[isl + 1, osl - 1] for isl, osl in lengths]
    while running := [item for item in left if item[1] > 0][:batch]:
        seconds += step.seconds(StepShape(len(running), sum(item[0] for item in running), len(running), 0.0, False))
        for item in running:
            item[0] += 1
            item[1] -= 1
    assert sum(work.seconds(isl, osl) for isl, osl in lengths) <= seconds * (1 + 1e-9)


def test_the_oracle_finds_the_smallest_margin_that_attains() -> None:
    def run(margin: float) -> Achieved:
        return Achieved(margin, attainment=min(1.0, 0.9 + margin / 4), gpu_seconds=100 * (1 + margin))

    found = bounds.smallest(run, attainment=0.99, tries=12)
    assert found is not None and found.margin == pytest.approx(0.36, abs=1e-3)
    assert bounds.smallest(run, attainment=0.99, high=0.1) is None


def test_a_share_beyond_all_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        bounds.with_misses([1.0], Costs(1.0), missed_share=1.5)
