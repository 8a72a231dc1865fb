"""Products of FP8 with FP8 and of INT8 with INT8: a scale for each row of either, and a bias, in the epilogue.

    y[t, n] = (Σ_k x[t, k] · w[n, k]) · s_x[t] · s_w[n] + b[n]

Shapes: codes x `[T, in]` and w `[out, in]`, scales fp32 `[T, 1]` and `[out, 1]`, bias `[out]`, y `[T, out]` of any
floating-point type. INT8 sums up in int32, exactly; FP8 in fp32. Hopper's matrix units keep only some 14 bits of a sum
of FP8 products: there partial sums go over to fp32 registers every DEPTH columns, as with blocks of scales.

Memory: weights are read as one byte a value, half of bf16's. The sums are scaled in registers: a second kernel would
write and read `[T, out]` in fp32, eight bytes a value. Source: W8A8 with per-token and per-channel scales, Xiao et al.,
SmoothQuant 2022. Oracle: `reference.scaled_linear`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from tidegate_kernels.float8 import FP8
from tidegate_kernels.launches import Tiles, tiles_of
from tidegate_kernels.quantised import Fp8, Int8
from tidegate_kernels.reference import QuantisedRows

NEIGHBOURS = tl.constexpr(8)
"""Tiles of rows whose programs run one after the other with the same columns: their weights stay in the L2 cache."""
LIBRARY_FROM_ROWS = {FP8: 128, torch.int8: None}
"""Rows from which cuBLASLt (`torch._scaled_mm`) is used instead of our kernel; None = never. A heuristic, not measured.

Torch's product of INT8 leaves the scales to a second kernel; it is never used.
"""
LIBRARY_MULTIPLE = 16
"""What its columns must be a multiple of."""


def tiles_for(rows: int, architecture: int) -> Tiles:
    """Few rows wait for the weights' memory, many for the matrix units."""
    return tiles_of("scaled", rows=rows, architecture=architecture)


@triton.jit
def tile_of(program: tl.tensor, row_tiles: tl.tensor, column_tiles: tl.tensor) -> tl.tensor:
    """Which tile of rows and which of columns a program has: NEIGHBOURS tiles of rows go through the columns."""
    band = NEIGHBOURS * column_tiles
    first = program // band * NEIGHBOURS
    height = tl.minimum(row_tiles - first, NEIGHBOURS)
    return first + program % band % height, program % band // height


@triton.jit
def sum_of_products(
    x: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    is_row: tl.tensor,
    is_column: tl.tensor,
    IN: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """`total` and the products of the rows that `x` `[ROWS]` points to with those that `weight` `[COLUMNS]` does."""
    depths = tl.arange(0, DEPTH)
    for first in range(0, IN, DEPTH):
        if IN % DEPTH == 0:
            row_mask, column_mask = is_row[:, None], is_column[None, :]
        else:
            inside = first + depths < IN
            row_mask, column_mask = is_row[:, None] & inside[None, :], is_column[None, :] & inside[:, None]
        a = tl.load(x[:, None] + (first + depths)[None, :], mask=row_mask, other=0.0)
        b = tl.load(weight[None, :] + (first + depths)[:, None], mask=column_mask, other=0.0)
        if total.dtype == tl.int32:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        else:
            # Further than this FP8's sums are not kept in the matrix units.
            total = tl.dot(a, b, total, max_num_imprecise_acc=DEPTH)
    return total


@triton.jit
def store_sums(
    sums: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    is_row: tl.tensor,
    is_column: tl.tensor,
    OUT: tl.constexpr,
) -> None:
    """Write `sums` `[ROWS, COLUMNS]` in fp32, and the bias if there is one, to their places in `output`."""
    if bias is not None:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    places = output + rows[:, None] * OUT + columns[None, :]
    tl.store(places, sums.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def scaled_kernel(
    codes: tl.tensor,
    scales: tl.tensor,
    weight: tl.tensor,
    weight_scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    count: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOTAL: tl.constexpr,
) -> None:
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(count, ROWS), tl.cdiv(OUT, COLUMNS))
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < count, columns < OUT
    total = tl.zeros((ROWS, COLUMNS), TOTAL)
    weights = weight + columns.to(tl.int64) * IN
    total = sum_of_products(codes + rows * IN, weights, total, is_row, is_column, IN, DEPTH)
    row_scales = tl.load(scales + rows, mask=is_row, other=0.0)
    column_scales = tl.load(weight_scales + columns, mask=is_column, other=0.0)
    found = total.to(tl.float32) * row_scales[:, None] * column_scales[None, :]
    store_sums(found, bias, output, rows, columns, is_row, is_column, OUT)


def scaled_linear(
    x: QuantisedRows,
    weight: Fp8 | Int8,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    library: bool | None = None,
) -> Tensor:
    """`x @ weight.T + bias` with a scale for each row of both, `[T, out]`, as `reference.scaled_linear` does.

    `library`: whether by `torch._scaled_mm`; None = as LIBRARY_FROM_ROWS says. Raises ValueError where codes are not of
    one type, or scales not of rows.
    """
    if x.codes.dtype != weight.codes.dtype:
        raise ValueError(f"activations in {x.codes.dtype} with weights in {weight.codes.dtype}: both must be in one")
    count, (out, depth) = len(x.codes), weight.shape
    if x.scales.shape != (count, 1) or weight.scales.shape != (out, 1):
        raise ValueError("a scale for each row is needed; scales of blocks are block_scaled_gemm's")
    if uses_library(count, weight, dtype) if library is None else library:
        return torch._scaled_mm(
            x.codes,
            weight.codes.T,
            scale_a=x.scales,
            scale_b=weight.scales.T,
            bias=None if bias is None else bias.to(dtype),
            out_dtype=dtype,
        )
    output = torch.empty((count, out), dtype=dtype, device=x.codes.device)
    if count == 0:
        return output
    tiles = tiles_for(count, architecture_now())
    scaled_kernel[(triton.cdiv(count, tiles.rows) * triton.cdiv(out, tiles.columns),)](
        x.codes,
        x.scales,
        weight.codes,
        weight.scales,
        bias,
        output,
        count,
        OUT=out,
        IN=depth,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        TOTAL=tl.int32 if weight.codes.dtype == torch.int8 else tl.float32,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output


def uses_library(rows: int, weight: Fp8 | Int8, dtype: torch.dtype) -> bool:
    """Whether the table says so, and the library takes these shapes and this result; never under the interpreter."""
    least = LIBRARY_FROM_ROWS[weight.codes.dtype]
    divides = all(size % LIBRARY_MULTIPLE == 0 for size in weight.shape)
    return least is not None and rows >= least and divides and dtype == torch.bfloat16 and architecture_now() >= 89


def architecture_now() -> int:
    """That of the current GPU, 90 for sm_90; 0 under the interpreter."""
    return 0 if triton.knobs.runtime.interpret else int(driver.active.get_current_target().arch)
