"""The gate of an MLP between its two products, quantised for the second one, in one kernel.

    y[t] = act(g[t]) · u[t]        silu(g) = g / (1 + e^−g);   gelu(g) ≈ g / (1 + e^−2v),  v = √(2/π) (g + 0.044715 g³)
    codes and scales of y[t] as in `quantise`, or y[t] itself in the type of g and u

Shapes: gate and up `[T, 2 * inner]` of any floating-point type, the gate in the first half, their last stride 1; codes
`[T, inner]`, scales fp32 `[T, ⌈inner / group⌉]`. One program a row, which it holds in registers in fp32: up to
MAX_COLUMNS columns.

Memory, for bf16 and one-byte codes: 5 bytes for each value of the inner dimension (two read, codes written). As kernels
of their own gate and codes take 6 + 3, a scale's pass over the row aside: 4 bytes a value more, of the widest
activation that a layer has. Source: Shazeer, GLU variants 2020; Hendrycks and Gimpel, GELU 2016. Oracle:
`reference.gate_and_quantise`, `silu_mul`, `gelu_mul`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.quantise import check_rows, new_rows, store_codes, tiling
from tidegate_kernels.reference import Code, QuantisedRows
from tidegate_kernels.rounding import LARGEST


@triton.jit
def gate_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    GELU: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    held = columns < COLUMNS
    gate = tl.load(gate_up + row * row_stride + columns, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + COLUMNS + columns, mask=held, other=0.0).to(tl.float32)
    # 2 √(2/π) = 1.5957691216057308
    bent = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    values = gate / (1.0 + tl.exp(-bent)) * up
    if LARGEST is None:
        tl.store(output + row * COLUMNS + columns, values.to(output.dtype.element_ty), mask=held)
    else:
        groups: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
        store_codes(values, output + row * COLUMNS, scales + row * groups, COLUMNS, GROUP, LARGEST, INTERPRETED)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * inner]`, as `reference.silu_mul` does."""
    return _gated(gate_up, gelu=False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[T, 2 * inner]` by the tanh approximation, as `reference.gelu_mul` does."""
    return _gated(gate_up, gelu=True)


def gate_and_quantise(gate_up: Tensor, code: Code, *, activation: str) -> QuantisedRows:
    """Either of them ("silu", "gelu_tanh") as codes, as `reference.gate_and_quantise` does; groups: a power of two."""
    if activation not in ("silu", "gelu_tanh"):
        raise ValueError(f"the activation {activation!r}; the kernel has silu and gelu_tanh")
    found = new_rows(len(gate_up), gate_up.shape[1] // 2, code, device=gate_up.device)
    _launch(gate_up, found, gelu=activation == "gelu_tanh", group=code.group)
    return found


def _gated(gate_up: Tensor, *, gelu: bool) -> Tensor:
    shape = (len(gate_up), gate_up.shape[1] // 2)
    output = torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)
    _launch(gate_up, QuantisedRows(output, output), gelu=gelu)
    return output


def _launch(gate_up: Tensor, into: QuantisedRows, *, gelu: bool, group: int | None = None) -> None:
    check_rows(gate_up)
    rows, columns = into.codes.shape
    if rows == 0:
        return
    gate_kernel[(rows,)](
        gate_up,
        into.codes,
        into.scales,
        gate_up.stride(0),
        COLUMNS=columns,
        **tiling(columns, group),
        GELU=gelu,
        LARGEST=LARGEST.get(into.codes.dtype),
        INTERPRETED=triton.knobs.runtime.interpret,
    )
