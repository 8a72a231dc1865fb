"""Positions that are looked up turn as those that are computed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.architecture import Rope
from tidegate_engine.rope import START_POSITIONS, Turns, rope_frequencies
from tidegate_kernels.reference import rope_tables

POSITIONS = st.lists(st.integers(0, 3 * START_POSITIONS), min_size=1, max_size=40)


@settings(max_examples=30, deadline=None)
@given(asked=st.lists(POSITIONS, min_size=1, max_size=4), magnitude=st.sampled_from([1.0, 1.3]))
def test_what_is_looked_up_is_what_is_computed_whatever_was_asked_before(
    asked: list[list[int]], magnitude: float
) -> None:
    frequencies = rope_frequencies(Rope(10_000.0), size=16, context_tokens=4 * START_POSITIONS)
    for dtype in (torch.float32, torch.bfloat16):
        turns = Turns(frequencies, magnitude=magnitude, dtype=dtype)
        for positions in map(torch.tensor, asked):
            found = turns.at(positions, end=int(positions.max()) + 1)
            expected = rope_tables(positions, frequencies, magnitude=magnitude)
            for mine, other in zip(found, expected, strict=True):
                assert mine.is_contiguous() and torch.equal(mine, other.to(dtype))
