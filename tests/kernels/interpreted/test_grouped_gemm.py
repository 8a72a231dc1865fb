"""Products of rows with their expert's matrix, against the reference."""

import os
from random import Random

import pytest
import torch
from torch import Tensor

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.grouped_gemm import ExpertWeights, grouped_linear, tiles_for
from tidegate_kernels.quantised import quantise_fp8, quantise_int8
from tidegate_kernels.reference import Code, QuantisedRows, quantise_rows
from tidegate_kernels.weight import Dense

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
COUNTS = ((0, 0), (1,), (0, 1, 0), (15, 16, 17, 0), (64, 0, 65, 63), (0, 0, 200))
SHAPES = ((33, 48), (64, 128), (65, 200))
"""Outputs and inputs."""


def starts_of(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def drawn(seed: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.choice([0, 1, 3, 16, 17, 40, 90]) for _ in range(random.randint(1, 6)))


@pytest.mark.parametrize("counts", [*COUNTS, *map(drawn, range(40 if PROVE else 3))])
@pytest.mark.parametrize("shape", SHAPES if PROVE else SHAPES[:1])
def test_each_row_meets_its_experts_matrix(counts: tuple[int, ...], shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(sum(counts))
    x = torch.randn(sum(counts), shape[1], generator=generator)
    values = torch.randn(len(counts), *shape, generator=generator)
    found = grouped_linear(x, ExpertWeights(values), starts_of(counts))
    assert found.shape == (sum(counts), shape[0])
    if len(x):
        expected = reference.grouped_linear(x, [Dense(value) for value in values], counts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_codes_are_scaled_by_their_row_and_by_their_experts(dtype: torch.dtype) -> None:
    counts = (3, 0, 18)
    generator = torch.Generator().manual_seed(2)
    x = quantise_rows(torch.randn(21, 96, generator=generator), Code(dtype))
    values = torch.randn(3, 40, 96, generator=generator) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    experts = [quantise_fp8(value) if dtype == FP8 else quantise_int8(value) for value in values]
    # torch.stack has no FP8.
    codes = torch.stack([expert.codes.view(torch.int8) for expert in experts]).view(dtype)
    weights = ExpertWeights(codes, torch.stack([expert.scales[:, 0] for expert in experts]))
    found = grouped_linear(x, weights, starts_of(counts), dtype=torch.float32)
    start = 0
    for expert, count in zip(experts, counts, strict=True):
        rows = slice(start, start + count)
        own = QuantisedRows(x.codes[rows], x.scales[rows])
        torch.testing.assert_close(found[rows], reference.scaled_linear(own, expert), rtol=1e-4, atol=1e-3)
        start += count


def test_rows_behind_the_last_experts_are_left_alone() -> None:
    found = grouped_linear(torch.ones(20, 32), ExpertWeights(torch.ones(2, 8, 32)), starts_of((5, 12)))
    assert found[:17].eq(32).all()
    assert found[17:].isnan().all()


def test_operands_that_do_not_belong_together_are_refused() -> None:
    x = quantise_rows(torch.ones(2, 32), Code(torch.int8))
    with pytest.raises(ValueError, match="both must be in one"):
        grouped_linear(x, ExpertWeights(torch.ones(1, 8, 32)), starts_of((2,)))
    with pytest.raises(ValueError, match="in one piece"):
        grouped_linear(torch.ones(32, 2).T, ExpertWeights(torch.ones(1, 8, 32)), starts_of((2,)))


def test_tiles_fit_the_rows_that_an_expert_has_on_average() -> None:
    assert [tiles_for(rows, 8, 0).rows for rows in (8, 128, 129, 512, 1024)] == [16, 16, 16, 64, 128]
