"""Norm and gate, plain and quantised on the way, against the reference."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidegate_kernels import gate, norm, reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantise import MAX_COLUMNS
from tidegate_kernels.reference import Code, QuantisedRows

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
WIDTHS = [1, 2, 63, 64, 129, 300, 576, 1024]
CODES = [Code(FP8), Code(FP8, 128), Code(torch.int8), Code(torch.int8, 32)]
EXAMPLES = settings(max_examples=150 if PROVE else 12, deadline=None, derandomize=not PROVE)
EPS = 1e-5


def drawn(rows: int, columns: int, *, seed: int, magnitude: float = 1.0) -> Tensor:
    """Rows that lie apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns + 3, generator=generator).mul_(magnitude)[:, :columns]


def assert_close(found: QuantisedRows, expected: QuantisedRows) -> None:
    """The same scales up to rounding, and codes that are at most neighbours, few of them.

    A value that lies in the middle between two codes goes to either, as the last bit of a norm wills.
    """
    torch.testing.assert_close(found.scales, expected.scales, rtol=1e-5, atol=0)
    # As integers, e4m3 codes of one sign are in the order of their values.
    steps = found.codes.view(torch.int8).int() - expected.codes.view(torch.int8).int()
    nonzero = expected.codes.float() != 0
    assert steps[nonzero].abs().max().item() <= 1 if nonzero.any() else True
    assert (steps[nonzero] != 0).sum().item() <= max(1, nonzero.sum().item() // 50)
    assert found.codes.float()[~nonzero].abs().le(1).all()


@EXAMPLES
@given(
    rows=st.integers(0, 3),
    columns=st.sampled_from(WIDTHS),
    magnitude=st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
    has_residual=st.booleans(),
    code=st.sampled_from([None, *CODES]),
    seed=st.integers(0, 1000),
)
def test_norms_of_any_rows_are_the_references(
    rows: int, columns: int, magnitude: float, has_residual: bool, code: Code | None, seed: int
) -> None:
    x = drawn(rows, columns, seed=seed, magnitude=magnitude)
    weight = drawn(1, columns, seed=seed + 1)[0]
    mine, theirs = (drawn(rows, columns, seed=seed + 2) if has_residual else None for _ in range(2))
    if code is not None:
        found = norm.norm_and_quantise(x, weight, code, eps=EPS, residual=mine)
        expected = reference.norm_and_quantise(x, weight, code, eps=EPS, residual=theirs)
        assert_close(found, expected)
    elif mine is not None and theirs is not None:
        expected_norm = reference.add_rms_norm(x, theirs, weight, eps=EPS)
        torch.testing.assert_close(norm.add_rms_norm(x, mine, weight, eps=EPS), expected_norm)
    else:
        torch.testing.assert_close(norm.rms_norm(x, weight, eps=EPS), reference.rms_norm(x, weight, eps=EPS))
    if mine is not None and theirs is not None:
        assert torch.equal(mine, theirs)


@EXAMPLES
@given(
    rows=st.integers(0, 3),
    columns=st.sampled_from(WIDTHS),
    magnitude=st.sampled_from([0.0, 1.0, 30.0]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    code=st.sampled_from([None, *CODES]),
    seed=st.integers(0, 1000),
)
def test_gates_of_any_rows_are_the_references(
    rows: int, columns: int, magnitude: float, activation: str, code: Code | None, seed: int
) -> None:
    gate_up = drawn(rows, 2 * columns, seed=seed, magnitude=magnitude)
    if code is not None:
        found = gate.gate_and_quantise(gate_up, code, activation=activation)
        assert_close(found, reference.gate_and_quantise(gate_up, code, activation=activation))
    else:
        name = {"silu": "silu_mul", "gelu_tanh": "gelu_mul"}[activation]
        found_values, expected = getattr(gate, name)(gate_up), getattr(reference, name)(gate_up)
        torch.testing.assert_close(found_values, expected, rtol=1e-5, atol=1e-5)


def test_a_gate_far_below_zero_is_closed_and_one_far_above_is_open() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 3.0, 2.0]])
    for act in (gate.silu_mul, gate.gelu_mul):
        assert act(gate_up).tolist() == [[0.0, 2e4]]


def test_a_half_precision_residual_keeps_its_own_rounding() -> None:
    x, weight = drawn(2, 64, seed=1).half(), torch.ones(64).half()
    mine, theirs = (drawn(2, 64, seed=2).half() for _ in range(2))
    found = norm.add_rms_norm(x, mine, weight, eps=EPS)
    torch.testing.assert_close(found, reference.add_rms_norm(x, theirs, weight, eps=EPS), rtol=2e-3, atol=2e-3)
    assert torch.equal(mine, theirs)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        norm.rms_norm(torch.ones(1, MAX_COLUMNS + 1), torch.ones(MAX_COLUMNS + 1), eps=EPS)
    with pytest.raises(ValueError, match="side by side"):
        gate.silu_mul(torch.ones(8, 2).T)
    with pytest.raises(ValueError, match="relu"):
        gate.gate_and_quantise(torch.ones(1, 2), Code(FP8), activation="relu")
