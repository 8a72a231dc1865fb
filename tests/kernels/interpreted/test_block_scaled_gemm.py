"""Products of FP8 in blocks of 128, against the reference's in double precision."""

import os
from random import Random

import pytest
import torch

from tidegate_kernels import reference
from tidegate_kernels.block_scaled_gemm import scaled_linear
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantised import FP8_BLOCK, quantise_fp8, quantise_fp8_blocks
from tidegate_kernels.reference import Code, quantise_rows

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
Shape = tuple[int, int, int]
"""Rows of activations, outputs, inputs."""
SHAPES: tuple[Shape, ...] = ((0, 8, 128), (1, 1, 1), (3, 129, 128), (17, 64, 129), (65, 130, 257), (130, 257, 127))


def drawn(seed: int) -> Shape:
    random = Random(seed)
    return random.randint(1, 140), random.randint(1, 300), random.randint(1, 400)


@pytest.mark.parametrize("shape", [*SHAPES, *map(drawn, range(60 if PROVE else 2))])
def test_products_of_any_shape_are_the_references(shape: Shape) -> None:
    rows, out, depth = shape
    generator = torch.Generator().manual_seed(out)
    # Blocks of very different size: a scale taken from the wrong one is far off.
    sizes = torch.arange(depth) // FP8_BLOCK * 4.0 + 1
    x = quantise_rows(torch.randn(rows, depth, generator=generator) / sizes, Code(FP8, FP8_BLOCK))
    values = torch.randn(out, depth, generator=generator) * sizes
    weight = quantise_fp8_blocks(values * (torch.arange(out)[:, None] // FP8_BLOCK + 1))
    bias = torch.randn(out, generator=generator) if rows % 2 else None
    expected = reference.scaled_linear(x, weight, bias)
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    torch.testing.assert_close(scaled_linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5 * largest)


def test_the_reference_is_the_product_of_what_the_codes_stand_for() -> None:
    generator = torch.Generator().manual_seed(1)
    x, values = torch.randn(3, 200, generator=generator), torch.randn(150, 200, generator=generator)
    weight = quantise_fp8_blocks(values)
    found = reference.scaled_linear(quantise_rows(x, Code(FP8, FP8_BLOCK)), weight)
    torch.testing.assert_close(found, weight.multiply(x, None), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, x @ values.T, rtol=0.2, atol=2.0)


def test_scales_of_rows_are_refused() -> None:
    x = quantise_rows(torch.ones(2, 256), Code(FP8))
    with pytest.raises(ValueError, match="scaled_gemm"):
        scaled_linear(x, quantise_fp8_blocks(torch.ones(8, 256)))
    with pytest.raises(ValueError, match="scaled_gemm"):
        scaled_linear(quantise_rows(torch.ones(2, 256), Code(FP8, FP8_BLOCK)), quantise_fp8(torch.ones(8, 256)))
