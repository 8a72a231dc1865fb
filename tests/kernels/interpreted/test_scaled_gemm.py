"""Products of codes with a scale for each row, against the reference's in double precision."""

import os
from random import Random

import pytest
import torch
from torch import Tensor

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantised import Fp8, Int8, quantise_fp8, quantise_fp8_blocks, quantise_int8
from tidegate_kernels.reference import Code, QuantisedRows, quantise_rows
from tidegate_kernels.scaled_gemm import scaled_linear, tiles_for, uses_library

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
Shape = tuple[int, int, int]
"""Rows of activations, outputs, inputs."""
SHAPES: tuple[Shape, ...] = (
    (0, 32, 64),
    (1, 64, 128),
    (2, 1, 16),
    (16, 65, 127),
    (17, 63, 129),
    (33, 130, 256),
    (65, 129, 96),
    (129, 127, 80),
)


def drawn(seed: int) -> Shape:
    random = Random(seed)
    return random.randint(1, 140), random.randint(1, 150), random.randint(1, 300)


def operands(shape: Shape, dtype: torch.dtype) -> tuple[QuantisedRows, Fp8 | Int8, Tensor]:
    rows, out, depth = shape
    generator = torch.Generator().manual_seed(rows + out)
    x = torch.randn(rows, depth, generator=generator) * torch.rand(rows, 1, generator=generator).mul_(10).exp_()
    values = torch.randn(out, depth, generator=generator)
    weight = quantise_fp8(values) if dtype == FP8 else quantise_int8(values)
    return quantise_rows(x, Code(dtype)), weight, torch.randn(out, generator=generator)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("shape", [*SHAPES, *map(drawn, range(60 if PROVE else 2))])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_of_any_shape_are_the_references(shape: Shape, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight, bias = operands(shape, dtype)
    found = scaled_linear(x, weight, bias if has_bias else None)
    expected = reference.scaled_linear(x, weight, bias if has_bias else None)
    # Sums of int8 are exact: only the epilogue rounds.
    tolerance = 1e-6 if dtype == torch.int8 else 2e-5
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * largest)


def test_the_largest_codes_in_a_sum_beyond_what_fp32_counts_are_exact() -> None:
    depth = 4096
    codes = torch.full((1, depth), -127, dtype=torch.int8)
    x = QuantisedRows(codes, torch.ones(1, 1))
    found = scaled_linear(x, Int8(codes, torch.ones(1, 1)))
    assert float(found) == float(torch.tensor(127 * 127 * depth, dtype=torch.float32))


def test_every_element_is_written_and_nothing_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands((17, 65, 64), FP8)
    guarded = torch.full((19 * 65,), torch.nan)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: guarded[65:-65].view(17, 65))
    scaled_linear(x, weight)
    assert guarded[65:-65].isfinite().all()
    assert guarded[:65].isnan().all()
    assert guarded[-65:].isnan().all()


def test_the_same_row_gives_the_same_bits_wherever_in_a_batch_of_like_size_it_stands() -> None:
    x, weight, _ = operands((70, 40, 200), FP8)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    moved = QuantisedRows(x.codes.view(torch.int8)[order].view(FP8), x.scales[order])
    assert torch.equal(scaled_linear(moved, weight), scaled_linear(x, weight)[order])


def test_torchs_own_product_computes_the_same() -> None:
    x, weight, _ = operands((32, 48, 64), FP8)
    expected = reference.scaled_linear(x, weight, dtype=torch.bfloat16)
    found = scaled_linear(x, weight, dtype=torch.bfloat16, library=True)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_operands_that_do_not_belong_together_are_refused() -> None:
    x, weight, _ = operands((2, 32, 128), FP8)
    _, other, _ = operands((2, 32, 128), torch.int8)
    with pytest.raises(ValueError, match="both must be in one"):
        scaled_linear(x, other)
    with pytest.raises(ValueError, match="block_scaled_gemm"):
        scaled_linear(x, quantise_fp8_blocks(torch.ones(32, 128)))
    assert not uses_library(4096, weight, torch.bfloat16)


def test_tiles_fit_the_rows_and_what_the_matrix_units_take() -> None:
    assert [tiles_for(rows, 0).rows for rows in (1, 16, 17, 64, 65, 4096)] == [16, 16, 32, 64, 128, 128]
