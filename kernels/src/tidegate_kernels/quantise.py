"""Bring activations to FP8 or INT8 codes, with a scale for each row or for each group of its columns.

    scale[t, g] = max(amax |x[t, g]|, 1e-12) / L        L = 448 for e4m3, 127 for int8
    codes[t, g] = nearest(clamp(x[t, g] / scale[t, g], −L, L))

Shapes: x `[T, in]` of any floating-point type, its last stride 1; codes `[T, in]`, scales fp32 `[T, ⌈in / group⌉]`. One
program a row, which it holds in registers: up to MAX_COLUMNS columns.

Memory: a row is read once (amax and division in two kernels read it twice). Where a norm or an activation stands before
a product, their own kernels quantise on the way and this one is not needed. Source: `reference.quantise_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.reference import Code, QuantisedRows
from tidegate_kernels.rounding import LARGEST, quantise_runs

MAX_COLUMNS = 1 << 15


@triton.jit
def store_codes(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Quantise one row, fp32 `[groups, GROUP]` with zeros for padding, to where `codes` and `scales` point."""
    GROUPS: tl.constexpr = x.shape[0]
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x, scale = quantise_runs(x, LARGEST, INTERPRETED)
    tl.store(codes + columns, x.to(codes.dtype.element_ty), mask=columns < COLUMNS)
    tl.store(scales + groups, scale, mask=groups * GROUP < COLUMNS)


@triton.jit
def quantise_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * row_stride + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    held: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
    store_codes(values, codes + row * COLUMNS, scales + row * held, COLUMNS, GROUP, LARGEST, INTERPRETED)


def quantise_rows(x: Tensor, code: Code) -> QuantisedRows:
    """`[T, in]` as codes, as `reference.quantise_rows` makes them; their groups: a power of two.

    Raises ValueError where a row does not lie in one piece or is longer than MAX_COLUMNS.
    """
    rows, columns = x.shape
    check_rows(x)
    found = new_rows(rows, columns, code, device=x.device)
    if rows:
        quantise_kernel[(rows,)](
            x,
            found.codes,
            found.scales,
            x.stride(0),
            COLUMNS=columns,
            **tiling(columns, code.group),
            LARGEST=LARGEST[code.dtype],
            INTERPRETED=triton.knobs.runtime.interpret,
        )
    return found


def check_rows(x: Tensor) -> None:
    """Raises ValueError where a row does not lie in one piece."""
    if x.stride(1) != 1:
        raise ValueError("a row's values must lie side by side; their stride is not 1")


def new_rows(rows: int, columns: int, code: Code, *, device: torch.device) -> QuantisedRows:
    """Memory for a result, which nothing was written to."""
    groups = 1 if code.group is None else -(-columns // code.group)
    return QuantisedRows(
        torch.empty((rows, columns), dtype=code.dtype, device=device),
        torch.empty((rows, groups), dtype=torch.float32, device=device),
    )


def tiling(columns: int, group: int | None) -> dict[str, int]:
    """How a program holds a row: its GROUP and GROUPS, and warps for about 32 values a thread. Raises ValueError."""
    padded = triton.next_power_of_2(columns)
    if padded > MAX_COLUMNS:
        raise ValueError(f"rows of {columns} columns; one program holds at most {MAX_COLUMNS}")
    if group is not None and group & (group - 1):
        raise ValueError(f"groups of {group} columns; a power of two is needed")
    groups = 1 if group is None else triton.next_power_of_2(-(-columns // group))
    return {"GROUP": group or padded, "GROUPS": groups, "num_warps": min(max(padded // 1024, 1), 32)}
