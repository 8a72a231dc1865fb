"""What `aot` compiles: calls of every launcher, with the shapes and types that change what is compiled.

Tensors are empty memory of the CPU, since nothing is launched. A new launcher, or a new constant of an old one, gets a
case here; how it is compiled and what is kept of it is `aot`'s.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidegate_kernels import block_scaled_gemm, gate, grouped_gemm, int4_gemm, norm, quantise, rope_store, scaled_gemm
from tidegate_kernels.float8 import FP8
from tidegate_kernels.kv_store import store_kv
from tidegate_kernels.paged_attention import paged_attention
from tidegate_kernels.quantised import FP8_BLOCK, Fp8, Int8
from tidegate_kernels.reference import (
    Adjustments,
    AttentionRule,
    Cache,
    Choice,
    Code,
    HeadNorm,
    QuantisedRows,
    ragged_batch,
)
from tidegate_kernels.sampling import choose_tokens

KV_TYPES = {"bf16": torch.bfloat16, "fp8": FP8, "int8": torch.int8}
EPS = 1e-5
WIDE_ROWS = 64
"""Rows of a tile from which Hopper and Blackwell multiply by the instructions that they alone have."""


@dataclass(frozen=True, slots=True)
class Case:
    call: Callable[[], object]
    """Of a launcher."""
    needs_fp8: bool = False
    products: torch.dtype | None = None
    """What goes into the matrix units; None = they are not used."""
    is_wide: bool = False
    """Whether a tile has WIDE_ROWS rows."""


def cases() -> dict[str, Case]:
    """All of them, by name."""
    return _attention() | _products() | _fusions()


def _attention() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, dtype in KV_TYPES.items():
        found[f"store {name} 128"] = Case(_store(8, 128, dtype), dtype == FP8)
        found[f"decode {name} 128"] = _attend(1, 128, dtype)
        found[f"prefill {name} 128"] = _attend(512, 128, dtype)
    found["store bf16 256"] = Case(_store(16, 256, torch.bfloat16))
    found["decode fp8 256"] = _attend(1, 256, FP8)
    found["prefill bf16 256"] = _attend(512, 256, torch.bfloat16)
    bent = AttentionRule(0.1, window=4096, soft_cap=50.0, sinks=torch.zeros(32))
    found["decode int8 96 window cap sinks"] = _attend(1, 96, torch.int8, rule=bent)
    found["prefill bf16 96 window cap sinks"] = _attend(512, 96, torch.bfloat16, rule=bent)
    found["decode fp8 128 views"] = _attend(1, 128, FP8, has_views=True)
    found["prefill fp8 128 views"] = _attend(512, 128, FP8, has_views=True)
    found["decode fp8 64 block 32"] = _attend(1, 64, FP8, block_tokens=32)
    found["prefill fp8 64 block 32"] = _attend(512, 64, FP8, block_tokens=32)
    found["decode bf16 80 block 32"] = _attend(1, 80, torch.bfloat16, block_tokens=32)
    found["prefill bf16 80"] = _attend(512, 80, torch.bfloat16)
    return found


def _products() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for rows in (16, 64, 512):
        found[f"scaled fp8 {rows}"] = _scaled(rows, FP8)
        found[f"scaled int8 {rows}"] = _scaled(rows, torch.int8)
        found[f"blocks fp8 {rows}"] = _in_blocks(rows)
        found[f"int4 zeros 128 {rows}"] = _int4(rows, 128, has_minima=False)
    found["int4 minima 32 16"] = _int4(16, 32, has_minima=True)
    for rows in (1, 256):
        found[f"grouped bf16 {rows}"] = _grouped(rows, torch.bfloat16)
        found[f"grouped fp8 {rows}"] = _grouped(rows, FP8)
        found[f"grouped int8 {rows}"] = _grouped(rows, torch.int8)
    return found


def _fusions() -> dict[str, Case]:
    def half(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    fp8, int8, grouped = Code(FP8), Code(torch.int8), Code(FP8, FP8_BLOCK)

    def norm_of(columns: int, code: Code) -> Callable[[], object]:
        def call() -> object:
            return norm.norm_and_quantise(half(4, columns), half(columns), code, eps=EPS, residual=half(4, columns))

        return call

    def gate_of(inner: int, code: Code, activation: str) -> Callable[[], object]:
        return lambda: gate.gate_and_quantise(half(4, 2 * inner), code, activation=activation)

    return {
        "quantise fp8 4096": Case(lambda: quantise.quantise_rows(half(4, 4096), fp8), needs_fp8=True),
        "quantise int8 28672": Case(lambda: quantise.quantise_rows(half(4, 28672), int8)),
        "norm bf16 4096": Case(lambda: norm.rms_norm(half(4, 4096), half(4096), eps=EPS)),
        "norm int8 4096": Case(norm_of(4096, int8)),
        "norm fp8 blocks 8192": Case(norm_of(8192, grouped), needs_fp8=True),
        "gate silu fp8 14336": Case(gate_of(14336, fp8, "silu"), needs_fp8=True),
        "gate gelu int8 28672": Case(gate_of(28672, int8, "gelu_tanh")),
        "turn fp8 128 norm": Case(_turn(128, FP8, has_norm=True), needs_fp8=True),
        "turn bf16 80 quarter": Case(_turn(80, torch.bfloat16, rotated=20)),
        "turn int8 256": Case(_turn(256, torch.int8)),
        "choose 152064 adjusted": Case(_choose(152_064, is_adjusted=True)),
        "choose 32000": Case(_choose(32_000, is_adjusted=False)),
    }


def _cache(heads: int, size: int, dtype: torch.dtype, *, block_tokens: int = 16) -> Cache:
    keys = torch.empty(4, heads, block_tokens, size, dtype=dtype)
    scales = torch.empty(4, heads, block_tokens) if dtype.itemsize == 1 else None
    return Cache(keys, keys.clone(), scales, None if scales is None else scales.clone())


def _store(heads: int, size: int, dtype: torch.dtype) -> Callable[[], None]:
    def call() -> None:
        new = torch.empty(4, heads, size, dtype=torch.bfloat16)
        store_kv(new, new, _cache(heads, size, dtype), torch.zeros(4, dtype=torch.int64))

    return call


def _attend(
    new: int,
    size: int,
    dtype: torch.dtype,
    *,
    rule: AttentionRule | None = None,
    block_tokens: int = 16,
    has_views: bool = False,
) -> Case:
    """32 heads over 8; decodes with their keys split, prefills without."""

    def call() -> Tensor:
        cache = _cache(8, size, dtype, block_tokens=block_tokens)
        views = [(64, 4)] if has_views else None
        batch = ragged_batch([new], [new], [[0] * -(-new // block_tokens)], cache=cache, views=views)
        query = torch.empty(new, 32, size, dtype=torch.bfloat16)
        return paged_attention(query, cache, batch, rule or AttentionRule(0.1), splits=8 if new == 1 else 1)

    return Case(call, dtype == FP8, products=torch.bfloat16, is_wide=new > 1)


def _codes(rows: int, dtype: torch.dtype, *, columns: int, groups: int = 1) -> QuantisedRows:
    return QuantisedRows(torch.empty(rows, columns, dtype=dtype), torch.empty(rows, groups))


def _scaled(rows: int, dtype: torch.dtype) -> Case:
    def call() -> Tensor:
        codes, scales = torch.empty(4096, 4096, dtype=dtype), torch.empty(4096, 1)
        weight = Fp8(codes, scales, in_blocks=False) if dtype == FP8 else Int8(codes, scales)
        bias = torch.empty(4096, dtype=torch.bfloat16)
        x = _codes(rows, dtype, columns=4096)
        return scaled_gemm.scaled_linear(x, weight, bias, dtype=torch.bfloat16, library=False)

    return Case(call, dtype == FP8, products=dtype, is_wide=rows >= WIDE_ROWS)


def _in_blocks(rows: int) -> Case:
    def call() -> Tensor:
        weight = Fp8(torch.empty(4096, 4096, dtype=FP8), torch.empty(32, 32), in_blocks=True)
        return block_scaled_gemm.scaled_linear(_codes(rows, FP8, columns=4096, groups=32), weight, dtype=torch.bfloat16)

    return Case(call, needs_fp8=True, products=FP8, is_wide=rows >= WIDE_ROWS)


def _int4(rows: int, group: int, *, has_minima: bool) -> Case:
    def call() -> Tensor:
        shape = (4096 // group, 4096)
        weight = int4_gemm.Int4(
            codes=torch.empty(4096 // int4_gemm.RUN, 4096, int4_gemm.RUN // 2, dtype=torch.uint8),
            scales=torch.empty(shape, dtype=torch.float16),
            zeros=0 if has_minima else torch.empty(shape, dtype=torch.uint8),
            minima=torch.empty(shape, dtype=torch.float16) if has_minima else None,
            order=None,
            columns=4096,
        )
        return int4_gemm.int4_linear(torch.empty(rows, 4096, dtype=torch.bfloat16), weight)

    return Case(call, products=torch.bfloat16, is_wide=rows >= WIDE_ROWS)


def _grouped(share: int, dtype: torch.dtype) -> Case:
    """64 experts with `share` rows each."""

    def call() -> Tensor:
        x = torch.empty(64 * share, 2048, dtype=dtype)
        values, starts = torch.empty(64, 1536, 2048, dtype=dtype), torch.empty(65, dtype=torch.int32)
        if dtype == torch.bfloat16:
            return grouped_gemm.grouped_linear(x, grouped_gemm.ExpertWeights(values), starts)
        weights = grouped_gemm.ExpertWeights(values, torch.empty(64, 1536))
        rows = QuantisedRows(x, torch.empty(len(x), 1))
        return grouped_gemm.grouped_linear(rows, weights, starts, dtype=torch.bfloat16)

    return Case(call, dtype == FP8, products=dtype, is_wide=share >= WIDE_ROWS)


def _turn(size: int, dtype: torch.dtype, *, rotated: int | None = None, has_norm: bool = False) -> Callable[[], object]:
    def call() -> Tensor:
        table = torch.empty(4, 1, rotated or size, dtype=torch.bfloat16)
        return rope_store.turn_and_store(
            torch.empty(4, 48, size, dtype=torch.bfloat16),
            _cache(8, size, dtype),
            torch.zeros(4, dtype=torch.int64),
            tables=(table, table),
            norm=HeadNorm(torch.empty(40, size, dtype=torch.bfloat16), EPS) if has_norm else None,
        )

    return call


def _choose(size: int, *, is_adjusted: bool) -> Callable[[], object]:
    def call() -> Tensor:
        values, whole, wide = torch.empty(4), torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.int64)
        choice = Choice(values, whole, values, values, values)
        starts = torch.empty(5, dtype=torch.int32)
        adjustments = Adjustments(starts, wide, whole, values, values, values, values)
        return choose_tokens(torch.empty(4, size), choice, adjustments if is_adjusted else None)

    return call
