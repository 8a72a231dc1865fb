"""Products with weights of four bits in groups, which are dequantised in registers: x in bf16 or fp16, w in `Int4`.

    y[t, n] = Σ_k x[t, k] · (s[n, g] · (c[n, k] − z[n, g]) + m[n, g]) + b[n]        g = k // group

Shapes: x `[T, in]`, its last stride 1, w `[out, in]`, bias `[out]`, y `[T, out]` of the type of x. Codes are brought to
fp32, scaled there as the reference scales them, rounded to the type of x and multiplied in it; sums are fp32's.

Layout: `[⌈in / 64⌉, out, 32]` bytes. A run of 32 bytes is a row's next 64 columns, the first 32 in the low halves and
the other 32 in the high ones, so that a tile of bytes is read in one piece and becomes two operands without any
shuffling. Scales, zero points and minima are `[groups, out]`. `repack` makes it of `Groups`, which is what GGUF's Q4_0
and Q4_1, AWQ, GPTQ and MLX are read as.

Memory: 4 bits a weight and its share of scales, 4.5 for groups of 32 with fp16 scales; dequantising first would write
and read two bytes of bf16 for each. Source: weight-only kernels as in Lin et al., AWQ 2023. Oracle: `Groups.multiply`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.launches import Tiles, tiles_of
from tidegate_kernels.quantised import Groups, pack_codes
from tidegate_kernels.scaled_gemm import architecture_now, store_sums, tile_of

RUN = 64
"""Columns that lie together."""


@dataclass(frozen=True, slots=True)
class Int4:
    """Weights as `int4_linear` reads them; what fields mean is what they mean in `Groups`."""

    codes: Tensor
    """uint8 `[⌈in / RUN⌉, out, RUN / 2]`"""
    scales: Tensor
    """`[groups, out]`"""
    zeros: Tensor | int
    """uint8 `[groups, out]`, or one for all."""
    minima: Tensor | None
    """`[groups, out]`"""
    order: Tensor | None
    """int64 `[in]`: which column each stored one is."""
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.columns

    @property
    def group(self) -> int:
        return self.columns // self.scales.shape[0]


def repack(weight: Groups) -> Int4:
    """The same values in the layout of `int4_linear`.

    Raises ValueError where codes are not of four bits, or groups do not hold whole halves of runs.
    """
    rows, columns = weight.shape
    if weight.bits != 4:
        raise ValueError(f"weights of {weight.bits} bits; the kernel has those of four, others are to be dequantised")
    if weight.group % (RUN // 2):
        raise ValueError(f"groups of {weight.group} columns; a multiple of {RUN // 2} is needed")
    (plane,) = weight.planes
    codes = torch.cat((plane & 15, plane >> 4), dim=1)
    runs = F.pad(codes, (0, -columns % RUN)).view(rows, -1, RUN)
    packed = runs[..., : RUN // 2] | runs[..., RUN // 2 :] << 4
    return Int4(
        codes=packed.transpose(0, 1).contiguous(),
        scales=weight.scales.T.contiguous(),
        zeros=weight.zeros.T.contiguous() if isinstance(weight.zeros, Tensor) else weight.zeros,
        minima=None if weight.minima is None else weight.minima.T.contiguous(),
        order=weight.order,
        columns=columns,
    )


def unpack(weight: Int4) -> Groups:
    """What `repack` was given: for tests, and for what has no kernel."""
    rows, columns = weight.shape
    runs = torch.cat((weight.codes & 15, weight.codes >> 4), dim=2)
    codes = runs.transpose(0, 1).reshape(rows, -1)[:, :columns].contiguous()
    return Groups(
        bits=4,
        planes=pack_codes(codes, bits=4),
        scales=weight.scales.T.contiguous(),
        zeros=weight.zeros.T.contiguous() if isinstance(weight.zeros, Tensor) else weight.zeros,
        minima=None if weight.minima is None else weight.minima.T.contiguous(),
        order=weight.order,
    )


def tiles_for(rows: int, architecture: int) -> Tiles:
    """DEPTH is one run: each half of it has one scale a row."""
    return tiles_of("int4", rows=rows, architecture=architecture)


@triton.jit
def _values(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    minima: tl.tensor,
    places: tl.tensor,
    held: tl.tensor,
    ZERO: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Codes `[values, COLUMNS]` of one group as what they stand for."""
    values = codes.to(tl.float32)
    if zeros is not None:
        values -= tl.load(zeros + places, mask=held, other=0).to(tl.float32)[None, :]
    elif ZERO:
        values -= ZERO
    values *= tl.load(scales + places, mask=held, other=0.0).to(tl.float32)[None, :]
    if minima is not None:
        values += tl.load(minima + places, mask=held, other=0.0).to(tl.float32)[None, :]
    return values.to(DTYPE)


@triton.jit
def int4_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    count: tl.tensor,
    row_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    row_tile, column_tile = tile_of(tl.program_id(0), tl.cdiv(count, ROWS), tl.cdiv(OUT, COLUMNS))
    rows = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = rows < count, columns < OUT
    depths = tl.arange(0, HALF)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    runs = codes + columns.to(tl.int64)[None, :] * HALF + depths[:, None]
    for first in range(0, IN, 2 * HALF):
        packed = tl.load(runs, mask=is_column[None, :], other=0)
        runs += OUT * HALF
        for half in tl.static_range(2):
            place = first + half * HALF + depths
            group = (first + half * HALF) // GROUP
            held = is_row[:, None]
            if IN % (2 * HALF) != 0:
                # The last run's second half is padding: no activation, and no group.
                held = held & (place < IN)[None, :]
                group = tl.minimum(group, IN // GROUP - 1)
            a = tl.load(x + rows[:, None] * row_stride + place[None, :], mask=held, other=0.0)
            half_codes = packed >> 4 if half else packed & 15
            b = _values(half_codes, scales, zeros, minima, group * OUT + columns, is_column, ZERO, DTYPE)
            total = tl.dot(a.to(DTYPE), b, total)
    store_sums(total, bias, output, rows, columns, is_row, is_column, OUT)


def int4_linear(x: Tensor, weight: Int4, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in the type of x, as `Groups.multiply` does.

    Raises ValueError where a row does not lie in one piece, or x is in fp32 on a GPU.
    """
    if x.stride(1) != 1:
        raise ValueError("a row's values must lie side by side; their stride is not 1")
    interpreted = triton.knobs.runtime.interpret
    if not interpreted and x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"activations in {x.dtype}; weights of four bits are multiplied with bf16 or fp16")
    if weight.order is not None:
        # Columns were grouped by importance; the few activations are moved, not the weights.
        x = x.index_select(1, weight.order)
    count, (out, depth) = len(x), weight.shape
    output = x.new_empty(count, out)
    if count == 0:
        return output
    tiles = tiles_for(count, architecture_now())
    int4_kernel[(triton.cdiv(count, tiles.rows) * triton.cdiv(out, tiles.columns),)](
        x,
        weight.codes,
        weight.scales,
        weight.zeros if isinstance(weight.zeros, Tensor) else None,
        weight.minima,
        bias,
        output,
        count,
        x.stride(0),
        OUT=out,
        IN=depth,
        GROUP=weight.group,
        ZERO=weight.zeros if isinstance(weight.zeros, int) else 0,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        HALF=RUN // 2,
        # The interpreter's products of bf16 are wrong.
        DTYPE=tl.float32 if interpreted else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return output
