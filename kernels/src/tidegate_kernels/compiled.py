"""A decoder's steps by Triton's kernels: weights that are multiplied by them, the operations between, and the choice
of tokens.

Importing it imports Triton. Weights that no kernel has stay as they are and are multiplied by torch; `capability` says
beforehand which ones. The engine's runner chooses; `operations` says what there is to choose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate_kernels import (
    block_scaled_gemm,
    gate,
    int4_gemm,
    norm,
    paged_attention,
    rope_store,
    sampling,
    scaled_gemm,
)
from tidegate_kernels.capability import INT4_GROUP_MULTIPLE
from tidegate_kernels.float8 import FP8
from tidegate_kernels.grouped_gemm import ExpertWeights, grouped_linear
from tidegate_kernels.int4_gemm import Int4, int4_linear
from tidegate_kernels.operations import Operations
from tidegate_kernels.quantise import quantise_rows
from tidegate_kernels.quantised import FP8_BLOCK, Fp8, Groups, Int8
from tidegate_kernels.reference import Code, ExpertsApart
from tidegate_kernels.weight import Dense, ExpertMatrices, Stacked, Weight, Wrapped, cat_rows


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


@dataclass(frozen=True, slots=True)
class ExpertsTogether(ExpertMatrices):
    """All experts in one piece, which one launch multiplies with."""

    source: ExpertWeights
    precision: str

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, columns = self.source.values.shape
        return experts, rows, columns

    @property
    def size_bytes(self) -> int:
        scales = self.source.scales
        return self.source.values.nbytes + (0 if scales is None else scales.nbytes)

    def multiply(self, x: Tensor, starts: Tensor) -> Tensor:
        held = self.source.values.dtype
        if self.source.scales is not None:
            return grouped_linear(quantise_rows(x, Code(held)), self.source, starts, dtype=x.dtype)
        return grouped_linear(x.to(held), self.source, starts, dtype=x.dtype)


def experts_laid_out(weights: Sequence[Weight]) -> ExpertMatrices:
    """In one piece where the kernel of mixtures has their kind, which must be one; else each as `laid_out` has it.

    It has none for blocks of scales and for four bits.
    """
    shape = (len(weights), *weights[0].shape)
    if {type(weight) for weight in weights} == {Dense}:
        values = [weight.values for weight in weights if isinstance(weight, Dense)]
        if len({value.dtype for value in values}) == 1:
            return ExpertsTogether(ExpertWeights(cat_rows(values).view(shape)), weights[0].precision)
    scaled = [weight for weight in weights if isinstance(weight, Int8) or _is_by_rows(weight)]
    if len(scaled) == len(weights) and len({type(weight) for weight in weights}) == 1:
        codes, scales = (cat_rows([getattr(weight, name) for weight in scaled]) for name in ("codes", "scales"))
        return ExpertsTogether(ExpertWeights(codes.view(shape), scales.view(shape[:2])), weights[0].precision)
    return ExpertsApart(tuple(map(laid_out, weights)))


def _is_by_rows(weight: Weight) -> bool:
    return isinstance(weight, Fp8) and weight.quantised_activations and not weight.in_blocks


def laid_out(weight: Weight) -> Weight:
    """The weight as a kernel multiplies it, or as it is where none does."""
    if isinstance(weight, Stacked):
        return Stacked(tuple(map(laid_out, weight.parts)))
    if isinstance(weight, Int8) or (isinstance(weight, Fp8) and weight.quantised_activations):
        return ScaledProduct(weight)
    if isinstance(weight, Groups) and weight.bits == 4 and weight.group % INT4_GROUP_MULTIPLE == 0:
        return Int4Product(int4_gemm.repack(weight))
    return weight


TRITON = Operations(
    laid_out=laid_out,
    experts_laid_out=experts_laid_out,
    rms_norm=norm.rms_norm,
    add_rms_norm=norm.add_rms_norm,
    turn_and_store=rope_store.turn_and_store,
    paged_attention=paged_attention.paged_attention,
    activations={"silu": gate.silu_mul, "gelu_tanh": gate.gelu_mul},
    choose_tokens=sampling.choose_tokens,
)
