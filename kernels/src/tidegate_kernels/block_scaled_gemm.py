"""Products of FP8 weights in blocks of 128 × 128 with activations in groups of 128 columns, a scale for each.

    y[t, n] = Σ_j s_x[t, j] · s_w[n // 128, j] · (Σ_{k in block j} x[t, k] · w[n, k]) + b[n]

Shapes: codes x `[T, in]` and w `[out, in]` in e4m3, scales fp32 `[T, ⌈in / 128⌉]` and `[⌈out / 128⌉, ⌈in / 128⌉]`, bias
`[out]`, y `[T, out]` of any floating-point type. The sum has two levels: one block's products add up in the matrix
units, and the blocks' sums, scaled, in fp32 registers. So what Hopper's units lose of a long sum is lost of 128 terms
only; the scales ask for it anyway.

Memory: weights are read as one byte a value and a scale for 16,384 of them; dequantising them first would read one and
write and read two bytes of bf16 for each. Source: DeepSeek-V3's technical report, 2024, 3.3. Oracle:
`reference.scaled_linear`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.launches import Tiles, tiles_of
from tidegate_kernels.quantised import FP8_BLOCK, Fp8
from tidegate_kernels.reference import QuantisedRows
from tidegate_kernels.scaled_gemm import architecture_now, store_sums, tile_of


def tiles_for(rows: int, architecture: int) -> Tiles:
    """What spills no registers, which one block's sums take beside the whole one's; wgmma and tcgen05 need fewer.

    COLUMNS divides FP8_BLOCK: all columns of a program lie in one block of rows of the weight.
    """
    return tiles_of("block_scaled", rows=rows, architecture=architecture)


@triton.jit
def block_scaled_kernel(
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
    BLOCK: tl.constexpr,
) -> None:
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(count, ROWS), tl.cdiv(OUT, COLUMNS))
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < count, columns < OUT
    blocks: tl.constexpr = (IN + BLOCK - 1) // BLOCK
    depths = tl.arange(0, BLOCK)
    x, weights = codes + rows * IN, weight + columns.to(tl.int64) * IN
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(blocks):
        place = block * BLOCK + depths
        if IN % BLOCK == 0:
            row_mask, column_mask = is_row[:, None], is_column[None, :]
        else:
            row_mask, column_mask = (
                is_row[:, None] & (place < IN)[None, :],
                is_column[None, :] & (place < IN)[:, None],
            )
        a = tl.load(x[:, None] + place[None, :], mask=row_mask, other=0.0)
        b = tl.load(weights[None, :] + place[:, None], mask=column_mask, other=0.0)
        row_scales = tl.load(scales + rows * blocks + block, mask=is_row, other=0.0)
        scale = tl.load(weight_scales + column_tile * COLUMNS // BLOCK * blocks + block)
        total += tl.dot(a, b) * (row_scales * scale)[:, None]
    store_sums(total, bias, output, rows, columns, is_row, is_column, OUT)


def scaled_linear(
    x: QuantisedRows, weight: Fp8, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`x @ weight.T + bias` with scales of blocks, `[T, out]`, as `reference.scaled_linear` does.

    Raises ValueError where scales are not of blocks and of as many columns.
    """
    count, (out, depth) = len(x.codes), weight.shape
    blocks = -(-depth // FP8_BLOCK)
    if not weight.in_blocks or x.scales.shape != (count, blocks):
        raise ValueError(
            f"a scale for each {FP8_BLOCK} columns of activations and each block of weights is needed; "
            "scales of rows are scaled_gemm's"
        )
    output = torch.empty((count, out), dtype=dtype, device=x.codes.device)
    if count == 0:
        return output
    tiles = tiles_for(count, architecture_now())
    block_scaled_kernel[(triton.cdiv(count, tiles.rows) * triton.cdiv(out, tiles.columns),)](
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
        BLOCK=FP8_BLOCK,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output
