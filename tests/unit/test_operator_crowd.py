"""The distribution of the prompts that are read at the same time."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.crowd import Pace, crowd_at

PACE = Pace(
    rate=2.0,
    chunks=8.0,
    lanes=4.0,
    bare_seconds=0.01,
    first_seconds=0.03,
    slope_seconds=0.02,
    full_seconds=0.09,
    variation=0.0,
)
MEAN_SECONDS = 0.03

paces = st.builds(
    Pace,
    rate=st.floats(0.01, 20),
    chunks=st.floats(1, 40),
    lanes=st.floats(1, 60),
    bare_seconds=st.floats(0.005, 0.05),
    first_seconds=st.just(0.0),
    slope_seconds=st.floats(0.0005, 0.05),
    full_seconds=st.just(0.0),
    variation=st.floats(0, 4),
).map(
    lambda pace: replace(
        pace,
        first_seconds=pace.bare_seconds + pace.slope_seconds,
        full_seconds=pace.bare_seconds + pace.lanes * pace.slope_seconds,
    )
)


@settings(deadline=None)
@given(paces)
def test_the_shares_are_a_distribution_of_steps_and_of_time(pace: Pace) -> None:
    crowd = crowd_at(pace, mean_seconds=pace.first_seconds)
    if crowd is None:
        return
    assert sum(crowd.by_step) == pytest.approx(1)
    assert sum(crowd.by_time) == pytest.approx(1)
    assert len(crowd.by_step) == len(crowd.by_time) == len(crowd.step_seconds) == len(crowd.tails)
    assert list(crowd.step_seconds) == sorted(crowd.step_seconds)
    assert crowd.by_time[0] <= crowd.by_step[0] + 1e-9, "steps with prompts are longer, so they take more of the time"


@settings(deadline=None)
@given(paces, st.floats(0, 30), st.floats(0, 30))
def test_a_larger_crowd_is_never_more_likely_than_a_smaller_one(pace: Pace, first: float, second: float) -> None:
    crowd = crowd_at(pace, mean_seconds=pace.first_seconds)
    if crowd is None:
        return
    low, high = sorted((first, second))
    assert crowd.share_above(high) <= crowd.share_above(low) + 1e-9
    assert crowd.share_above(-0.1) == 1


@settings(deadline=None)
@given(paces, st.floats(1.01, 2))
def test_more_arrivals_make_larger_crowds(pace: Pace, factor: float) -> None:
    few, many = (
        crowd_at(item, mean_seconds=pace.first_seconds) for item in (pace, replace(pace, rate=pace.rate * factor))
    )
    if few is not None and many is not None:
        assert many.mean >= few.mean - 1e-6


def test_prompts_that_come_faster_than_they_are_read_have_no_crowd() -> None:
    full = PACE.lanes / PACE.chunks / PACE.full_seconds
    assert crowd_at(replace(PACE, rate=0.99 * full), mean_seconds=MEAN_SECONDS) is not None
    assert crowd_at(replace(PACE, rate=1.01 * full), mean_seconds=MEAN_SECONDS) is None


def test_one_lane_is_the_queue_with_one_server() -> None:
    """Read one after the other, prompts of any length keep the engine busy for rate × time of one."""
    alone = replace(PACE, lanes=1.0, full_seconds=PACE.first_seconds, rate=2.0)
    crowd = crowd_at(alone, mean_seconds=1 / (0.52 / 0.01 + 0.48 / 0.03))
    assert crowd is not None and crowd.has_queue
    assert crowd.by_time[1] == pytest.approx(2.0 * 8.0 * 0.03, rel=0.05)


def test_prompts_of_different_lengths_wait_longer_for_a_lane() -> None:
    same = crowd_at(PACE, mean_seconds=MEAN_SECONDS)
    mixed = crowd_at(replace(PACE, variation=3.0), mean_seconds=MEAN_SECONDS)
    assert same is not None and mixed is not None
    assert mixed.wait_seconds == pytest.approx(4 * same.wait_seconds)


def test_nothing_arrives_and_nothing_is_read() -> None:
    crowd = crowd_at(replace(PACE, rate=1e-9), mean_seconds=PACE.bare_seconds)
    assert crowd is not None
    assert crowd.by_step[0] == pytest.approx(1) and crowd.mean == pytest.approx(0, abs=1e-6)
