"""The guess of what a request will still need, never more than it may have."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.output_lengths import WINDOW_REQUESTS, OutputLengths


def learnt(*lengths: int) -> OutputLengths:
    known = OutputLengths()
    for tokens in lengths:
        known.learn(tokens)
    return known


def test_without_experience_a_request_is_taken_at_its_word() -> None:
    assert OutputLengths().remaining(3, limit=500) == 500


def test_many_short_answers_make_the_guess_short_and_long_ones_long() -> None:
    assert learnt(*[20] * 200).remaining(0, limit=1000) == pytest.approx(20, abs=40)
    assert learnt(*[900] * 200).remaining(0, limit=1000) == pytest.approx(900, abs=10)


def test_who_has_come_far_is_compared_with_those_who_came_as_far() -> None:
    known = learnt(*[10] * 200, *[1000] * 100)
    assert known.remaining(0, limit=2000) < 450
    assert known.remaining(200, limit=2000) == pytest.approx(800, abs=100)


def test_old_traffic_is_forgotten() -> None:
    known = learnt(*[1000] * 500, *[10] * (2 * WINDOW_REQUESTS))
    assert known.remaining(0, limit=2000) < 300


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1 << 26), max_size=30), st.integers(0, 1 << 26), st.integers(0, 5000))
def test_the_guess_lies_between_nothing_and_the_limit(lengths: list[int], output: int, limit: int) -> None:
    assert 0 <= learnt(*lengths).remaining(output, limit=limit) <= limit
