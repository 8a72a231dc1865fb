"""Pieces of kernels that bring values to FP8 and INT8 codes, for all kernels that quantise on the way.

Owns the rounding, and what is done where Triton's interpreter rounds otherwise. Source: `reference.quantise_rows`.
"""

import torch
import triton
import triton.language as tl

from tidegate_kernels.float8 import FP8, FP8_MAX
from tidegate_kernels.quantised import INT8_MAX

LARGEST = {FP8: FP8_MAX, torch.int8: float(INT8_MAX)}
"""Of the types that can be quantised to."""


@triton.jit
def nearest_e4m3(x: tl.tensor) -> tl.tensor:
    """`x` within ±448 rounded to a number that e4m3 has, ties to even; the interpreter's own cast does not round so."""
    bits = x.to(tl.int32, bitcast=True)
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2⁻⁶ numbers are 2⁻⁹ apart: so are fp32's around 1.5 · 2¹⁴.
    small = ((tl.abs(x) + 24576.0) - 24576.0).to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float32, bitcast=True)


@triton.jit
def quantise(x: tl.tensor, scale: tl.tensor, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """`x / scale` as fp32 within ±LARGEST, rounded to integers where LARGEST is int8's."""
    codes = tl.div_rn(x, scale)
    codes = tl.minimum(tl.maximum(codes, -LARGEST), LARGEST)
    if LARGEST == 127.0:
        # fp32's numbers around 1.5 · 2²³ are the integers; ties go to even ones.
        codes = (codes + 12582912.0) - 12582912.0
    elif INTERPRETED:
        codes = nearest_e4m3(codes)
    return codes


@triton.jit
def quantise_runs(x: tl.tensor, LARGEST: tl.constexpr, INTERPRETED: tl.constexpr) -> tl.tensor:
    """Codes of fp32 `[runs, values]`, still in fp32, and the scale of each run, for which its largest is LARGEST."""
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.div_rn(tl.maximum(largest, 1e-12), tl.full(largest.shape, LARGEST, tl.float32))
    return quantise(x, tl.broadcast_to(scale[:, None], x.shape), LARGEST, INTERPRETED), scale
