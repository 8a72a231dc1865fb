"""A decoder's layer by Triton's kernels: weights that are multiplied by them, and the operations between.

Importing it imports Triton. Weights that no kernel has stay as they are and are multiplied by torch; `capability` says
beforehand which ones. The engine's runner chooses; `operations` says what there is to choose.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate_kernels import block_scaled_gemm, gate, int4_gemm, norm, paged_attention, rope_store, scaled_gemm
from tidegate_kernels.capability import INT4_GROUP_MULTIPLE
from tidegate_kernels.float8 import FP8
from tidegate_kernels.int4_gemm import Int4, int4_linear
from tidegate_kernels.operations import Operations
from tidegate_kernels.quantise import quantise_rows
from tidegate_kernels.quantised import FP8_BLOCK, Fp8, Groups, Int8
from tidegate_kernels.reference import Code
from tidegate_kernels.weight import Weight, Wrapped


@dataclass(frozen=True, slots=True)
class ScaledProduct(Wrapped):
    """FP8 or INT8 codes, which lie as the kernels read them; activations are brought to the same."""

    source: Fp8 | Int8

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.source, Fp8) and self.source.in_blocks:
            rows = quantise_rows(x, Code(FP8, FP8_BLOCK))
            return block_scaled_gemm.scaled_linear(rows, self.source, bias, dtype=x.dtype)
        rows = quantise_rows(x, Code(self.source.codes.dtype))
        return scaled_gemm.scaled_linear(rows, self.source, bias, dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class Int4Product(Weight):
    """Codes of four bits in the kernel's own layout."""

    source: Int4

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def size_bytes(self) -> int:
        others = (self.source.zeros, self.source.minima, self.source.order)
        tensors = [self.source.codes, self.source.scales, *(each for each in others if isinstance(each, Tensor))]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def precision(self) -> str:
        return f"int4-g{self.source.group}"

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return int4_linear(x, self.source, bias)

    def select(self, rows: Tensor) -> Weight:
        return int4_gemm.unpack(self.source).select(rows)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return int4_gemm.unpack(self.source).dequantised(dtype)


def laid_out(weight: Weight) -> Weight:
    """The weight as a kernel multiplies it, or as it is where none does."""
    if isinstance(weight, Int8) or (isinstance(weight, Fp8) and weight.quantised_activations):
        return ScaledProduct(weight)
    if isinstance(weight, Groups) and weight.bits == 4 and weight.group % INT4_GROUP_MULTIPLE == 0:
        return Int4Product(int4_gemm.repack(weight))
    return weight


TRITON = Operations(
    laid_out=laid_out,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    turn_and_store=rope_store.turn_and_store,
    paged_attention=paged_attention.paged_attention,
    activations={"silu": gate.silu_mul, "gelu_tanh": gate.gelu_mul},
)
