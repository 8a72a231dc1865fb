"""Quantised activations against the reference, bit by bit."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantise import MAX_COLUMNS, quantise_rows
from tidegate_kernels.reference import Code, QuantisedRows

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))


def assert_same(found: QuantisedRows, expected: QuantisedRows) -> None:
    assert torch.equal(found.codes.view(torch.int8), expected.codes.view(torch.int8))
    assert torch.equal(found.scales, expected.scales)


@settings(max_examples=200 if PROVE else 15, deadline=None, derandomize=not PROVE)
@given(
    rows=st.integers(0, 4),
    columns=st.sampled_from([1, 2, 63, 64, 127, 128, 129, 300, 576, 1024]),
    group=st.sampled_from([None, 32, 128]),
    dtype=st.sampled_from([FP8, torch.int8]),
    source=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    magnitude=st.sampled_from([0.0, 1e-6, 1.0, 1e4]),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_length_get_the_references_codes_and_scales(
    rows: int,
    columns: int,
    group: int | None,
    dtype: torch.dtype,
    source: torch.dtype,
    magnitude: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Slices of something longer: rows lie apart.
    x = torch.randn(rows, columns + 3, generator=generator).mul_(magnitude).to(source)[:, :columns]
    assert_same(quantise_rows(x, Code(dtype, group)), reference.quantise_rows(x, Code(dtype, group)))


def test_a_group_has_a_scale_of_its_own_whatever_its_neighbours_hold() -> None:
    x = torch.ones(1, 256)
    x[0, :128] = 1e-3
    x[0, 255] = 1e3
    found = quantise_rows(x, Code(torch.int8, 128))
    assert found.scales[0].tolist() == pytest.approx([1e-3 / 127, 1e3 / 127])
    assert found.codes[0, :128].eq(127).all()


def test_what_one_program_cannot_hold_or_does_not_lie_in_one_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        quantise_rows(torch.ones(1, MAX_COLUMNS + 1), Code(FP8))
    with pytest.raises(ValueError, match="power of two"):
        quantise_rows(torch.ones(1, 96), Code(FP8, 96))
    with pytest.raises(ValueError, match="side by side"):
        quantise_rows(torch.ones(8, 2).T, Code(FP8))
