"""Products of neighbouring rows with a matrix each, in one launch: a mixture's tokens, sorted by their expert.

    y[t, n] = Σ_k x[t, k] · w[e, n, k] (· s_x[t] · s_w[e, n])        for the expert e with starts[e] ≤ t < starts[e + 1]

Shapes: x `[T, in]` and w `[experts, out, in]`, both bf16 or fp16, or both FP8 or INT8 codes with fp32 scales `[T, 1]`
and `[experts, out]`; starts int32 `[experts + 1]`, on the GPU: nothing waits for the host; y `[T, out]`. Experts may
have no rows. Each begins a tile of rows of its own, so there are at most `T // ROWS + experts` of them; a program finds
its expert by halving. Rows behind the last expert's are left unwritten.

Memory: an expert's weights are read once for each ROWS of its tokens, those of experts without tokens not at all. One
product an expert would be as many launches, and a copy of the counts to the host in every layer. Source: grouped
products as in Gale et al., MegaBlocks 2022. Oracle: `reference.grouped_linear`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.launches import Tiles, tiles_of
from tidegate_kernels.reference import QuantisedRows
from tidegate_kernels.scaled_gemm import architecture_now, store_sums, sum_of_products


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One matrix of every expert."""

    values: Tensor
    """`[experts, out, in]`"""
    scales: Tensor | None = None
    """fp32 `[experts, out]` of codes; None = values as they are."""


def tiles_for(rows: int, experts: int, architecture: int) -> Tiles:
    """`rows`: of all experts, which are taken to have equally many."""
    return tiles_of("grouped", rows=rows // experts, architecture=architecture)


@triton.jit
def grouped_kernel(
    x: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    starts: tl.tensor,
    output: tl.tensor,
    experts: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOTAL: tl.constexpr,
) -> None:
    # Programs of one tile of rows run one after the other, those of an expert too: its rows stay in the cache.
    column_tiles: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    expert = row_tile * 0
    end = expert + experts
    while end - expert > 1:
        middle = (expert + end) // 2
        begun = tl.load(starts + middle) // ROWS + middle <= row_tile
        expert = tl.where(begun, middle, expert)
        end = tl.where(begun, end, middle)
    start = tl.load(starts + expert)
    first = start + (row_tile - start // ROWS - expert) * ROWS
    stop = tl.load(starts + expert + 1)
    if first < stop:
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        is_row, is_column = rows < stop, columns < OUT
        weight_rows = expert.to(tl.int64) * OUT + columns
        total = tl.zeros((ROWS, COLUMNS), TOTAL)
        total = sum_of_products(x + rows * IN, weight + weight_rows * IN, total, is_row, is_column, IN, DEPTH)
        found = total.to(tl.float32)
        if scales is not None:
            row_scales = tl.load(scales + rows, mask=is_row, other=0.0)
            found = (
                found * row_scales[:, None] * tl.load(weight_scales + weight_rows, mask=is_column, other=0.0)[None, :]
            )
        store_sums(found, None, output, rows, columns, is_row, is_column, OUT)


def grouped_linear(
    x: Tensor | QuantisedRows, weights: ExpertWeights, starts: Tensor, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Products of the rows `[starts[e], starts[e + 1])` with the matrix e, as `reference.grouped_linear` makes them.

    `dtype`: of the result; None = that of x. Raises ValueError where operands are not of one type, or lie in pieces.
    """
    values, scales = (x.codes, x.scales) if isinstance(x, QuantisedRows) else (x, None)
    if values.dtype != weights.values.dtype or (scales is None) != (weights.scales is None):
        raise ValueError(f"activations in {values.dtype} with experts in {weights.values.dtype}: both must be in one")
    if values.dtype == torch.float32 and not triton.knobs.runtime.interpret:
        raise ValueError("fp32 activations; experts are multiplied in bf16, fp16, FP8 or INT8")
    if not values.is_contiguous() or not weights.values.is_contiguous():
        raise ValueError("activations and experts must lie in one piece")
    if scales is not None and scales.shape != (len(values), 1):
        raise ValueError("a scale for each row is needed")
    experts, out, depth = weights.values.shape
    output = values.new_empty((len(values), out), dtype=dtype or values.dtype)
    if len(values) == 0:
        return output
    tiles = tiles_for(len(values), experts, architecture_now())
    row_tiles = len(values) // tiles.rows + experts
    grouped_kernel[(row_tiles * triton.cdiv(out, tiles.columns),)](
        values,
        scales,
        weights.values,
        weights.scales,
        starts,
        output,
        experts,
        OUT=out,
        IN=depth,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        TOTAL=tl.int32 if values.dtype == torch.int8 else tl.float32,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output
