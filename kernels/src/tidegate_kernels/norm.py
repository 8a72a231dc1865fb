"""The norm before a product, with the sum that it is of, and quantised for the product, in one kernel.

    r[t] = r[t] + x[t]                                          (with a residual, in its type)
    y[t] = r[t] / √(mean r[t]² + ε) · w                         (x[t] in the place of r[t] without one)
    codes and scales of y[t] as in `quantise`, or y[t] itself in the type of x

Shapes: x and residual `[T, in]` of any floating-point type, their last stride 1; w `[in]`; codes `[T, in]`, scales fp32
`[T, ⌈in / group⌉]`. One program a row, which it holds in registers in fp32: up to MAX_COLUMNS columns.

Memory, for bf16 and one-byte codes: x and the residual are read and the residual and codes written, 7 bytes a value. As
kernels of their own, sum, norm and codes take 6 + 4 + 3, a scale's pass over the row aside: 6 bytes a value more.
Source: RMSNorm, Zhang and Sennrich 2019. Oracle: `reference.norm_and_quantise`, `rms_norm`, `add_rms_norm`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.quantise import check_rows, new_rows, store_codes, tiling
from tidegate_kernels.reference import Code, QuantisedRows
from tidegate_kernels.rounding import LARGEST


@triton.jit
def norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    held = columns < COLUMNS
    values = tl.load(x + row * row_stride + columns, mask=held, other=0.0).to(tl.float32)
    if residual is not None:
        places = residual + row * residual_stride + columns
        values += tl.load(places, mask=held, other=0.0).to(tl.float32)
        # The norm is of the sum as it is kept.
        rounded = values.to(residual.dtype.element_ty)
        tl.store(places, rounded, mask=held)
        values = rounded.to(tl.float32)
    mean = tl.sum(tl.sum(values * values, axis=1), axis=0) / COLUMNS
    values *= 1.0 / tl.sqrt_rn(mean + eps)
    values *= tl.load(weight + columns, mask=held, other=0.0).to(tl.float32)
    if LARGEST is None:
        tl.store(output + row * COLUMNS + columns, values.to(output.dtype.element_ty), mask=held)
    else:
        groups: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
        store_codes(values, output + row * COLUMNS, scales + row * groups, COLUMNS, GROUP, LARGEST, INTERPRETED)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`[T, in]` over its root mean square, times `weight`, as `reference.rms_norm` does."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, QuantisedRows(output, output), eps=eps)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add `x` to `residual` in place and return the norm of the sum, as `reference.add_rms_norm` does."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, QuantisedRows(output, output), eps=eps)
    return output


def norm_and_quantise(
    x: Tensor, weight: Tensor, code: Code, *, eps: float, residual: Tensor | None = None
) -> QuantisedRows:
    """Either of them as codes, as `reference.norm_and_quantise` does; groups: a power of two."""
    found = new_rows(len(x), x.shape[1], code, device=x.device)
    _launch(x, residual, weight, found, eps=eps, group=code.group)
    return found


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, into: QuantisedRows, *, eps: float, group: int | None = None
) -> None:
    rows, columns = x.shape
    for each in (x, residual):
        if each is not None:
            check_rows(each)
    if rows == 0:
        return
    norm_kernel[(rows,)](
        x,
        residual,
        weight,
        into.codes,
        into.scales,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        COLUMNS=columns,
        **tiling(columns, group),
        LARGEST=LARGEST.get(into.codes.dtype),
        INTERPRETED=triton.knobs.runtime.interpret,
    )
