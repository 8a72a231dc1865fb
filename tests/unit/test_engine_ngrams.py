"""Prompt lookup: what is guessed, and how far."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.ngrams import NgramIndex, NgramSpeculation, parse_speculative_config


def guess(ids: list[int], *, most: int = 4, smallest: int = 2, largest: int = 3) -> list[int]:
    return NgramIndex(NgramSpeculation(10, smallest, largest), ids).propose(most)


def test_what_followed_the_last_tokens_before_is_guessed() -> None:
    assert guess([1, 2, 3, 4, 5, 9, 1, 2]) == [3, 4, 5, 9]
    assert guess([1, 2, 3, 4], most=4) == []
    assert guess([], most=4) == []
    assert guess([1, 2, 1, 2], most=0) == []


def test_the_longest_match_wins_and_of_equal_ones_the_latest() -> None:
    assert guess([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], most=1) == [3]
    assert guess([1, 2, 3, 1, 2, 4, 6, 1, 2], most=1) == [4]


def test_a_guess_beyond_the_known_end_repeats_itself() -> None:
    assert guess([5, 6, 5, 6], most=5) == [5, 6, 5, 6, 5]
    assert guess([4, 4, 4], most=3) == [4, 4, 4]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(0, 60))
def test_a_guess_is_the_continuation_of_an_earlier_place(ids: list[int], smallest: int, more: int, cut: int) -> None:
    index = NgramIndex(NgramSpeculation(5, smallest, smallest + more), ids[:cut])
    index.extend(ids[cut:])
    found = index.propose(5)
    places = [end for end in range(smallest, len(ids)) if ids[end - smallest : end] == ids[len(ids) - smallest :]]
    assert bool(found) == bool(places)
    if found:
        assert any((ids + found)[end : end + 5] == found for end in places)


def test_wrong_guesses_make_the_next_ones_shorter_and_right_ones_longer() -> None:
    index = NgramIndex(NgramSpeculation(8, 1, 1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1])
    lengths = [len(index.propose(99))]
    for accepted in (2, 2, 0, 1, 2, 4):
        index.learn(proposed=lengths[-1], accepted=accepted)
        lengths.append(len(index.propose(99)))
    assert lengths == [8, 2, 4, 1, 2, 4, 8]


def test_vllms_configuration_is_read_with_its_defaults() -> None:
    read = parse_speculative_config
    assert read({"method": "ngram", "num_speculative_tokens": 3}) == NgramSpeculation(3, 5, 5)
    assert read({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}) == NgramSpeculation(3, 4, 4)
    assert read(
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    ) == NgramSpeculation(3, 2, 4)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ([], "a JSON object was expected"),
        ({"method": "eagle"}, "supported is 'ngram'"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_tokens": "3"}, "must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1"),
        ({"method": "ngram", "num_speculative_tokens": 1, "model": "x"}, "model is not known"),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "at most"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(config: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_speculative_config(config)
