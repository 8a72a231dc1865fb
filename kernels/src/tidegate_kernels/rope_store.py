"""From a step's projected heads to turned queries and a filled cache: norm, rotation and KV store in one kernel.

    u[t, h] = x[t, h] / √(mean x[t, h]² + ε) · w[h]         queries and keys; without a norm, u = x
    y = u₁ · cos − u₂ · sin ,  u₂ · cos + u₁ · sin          the first R / 2 dimensions against the next ones

Dimensions behind R stay as they are. Queries y are returned; keys y and the values as they come go to the cache,
quantised as `kv_store` does. A slot below zero (padding) is skipped.

Shapes: heads `[T, H + 2K, D]` of any floating-point type, queries first, then keys, then values; a token's heads lie
side by side, tokens may lie apart; cos and sin `[T, 1, R]` as `reference.rope_tables` makes them, R ≤ D; norm weights
`[H + K, D]`; queries `[T, H, D]`. All arithmetic is fp32's. One program for a token's queries, one for its keys and
values.

Memory: heads are read once and written once. As kernels of their own, norm and rotation each read and write the queries
and keys again: with bf16, 8 bytes for each of a token's (H + K) · D values. Source: RoPE, Su et al. 2021. Oracle:
`reference.turn_and_store`.
"""

import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.reference import Cache, HeadNorm
from tidegate_kernels.rounding import LARGEST, quantise


@triton.jit
def _turned(
    heads: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    eps: tl.tensor,
    COUNT: tl.constexpr,
    PADDED_COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
) -> tl.tensor:
    """`heads` points to COUNT heads, of which fp32 halves and what is behind them are returned, padded with zeros."""
    numbers = tl.arange(0, PADDED_COUNT)[:, None]
    dims = tl.arange(0, PADDED_HALF)[None, :]
    behind = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    is_half = (numbers < COUNT) & (dims < HALF)
    is_rest = (numbers < COUNT) & (behind < SIZE)
    places = numbers * SIZE
    first = tl.load(heads + places + dims, mask=is_half, other=0.0).to(tl.float32)
    second = tl.load(heads + places + HALF + dims, mask=is_half, other=0.0).to(tl.float32)
    rest = tl.load(heads + places + behind, mask=is_rest, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
        factor = (1.0 / tl.sqrt_rn(squares / SIZE + eps))[:, None]
        first *= factor * tl.load(norm + places + dims, mask=is_half, other=0.0).to(tl.float32)
        second *= factor * tl.load(norm + places + HALF + dims, mask=is_half, other=0.0).to(tl.float32)
        rest *= factor * tl.load(norm + places + behind, mask=is_rest, other=0.0).to(tl.float32)
    if cos is not None:
        c = tl.load(cos + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        # The table's first half is negated.
        s = tl.load(sin + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        first, second = first * c - second * s, second * c + first * s
    return first, second, rest


@triton.jit
def _store(
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    target: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    """Write heads to `places` `[PADDED_COUNT]` of `target` `[..., SIZE]`, as codes where LARGEST is given."""
    held = tl.arange(0, first.shape[0]) < COUNT
    dims = tl.arange(0, first.shape[1])[None, :]
    behind = 2 * HALF + tl.arange(0, rest.shape[1])[None, :]
    if LARGEST is not None:
        largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
        scale = tl.div_rn(tl.maximum(largest, 1e-12), tl.full(largest.shape, LARGEST, tl.float32))
        tl.store(scales + places, scale, mask=held)
        first = quantise(first, tl.broadcast_to(scale[:, None], first.shape), LARGEST, INTERPRETED)
        second = quantise(second, tl.broadcast_to(scale[:, None], second.shape), LARGEST, INTERPRETED)
        rest = quantise(rest, tl.broadcast_to(scale[:, None], rest.shape), LARGEST, INTERPRETED)
    is_half = held[:, None] & (dims < HALF)
    dtype = target.dtype.element_ty
    rows = target + (places * SIZE)[:, None]
    tl.store(rows + dims, first.to(dtype), mask=is_half)
    tl.store(rows + HALF + dims, second.to(dtype), mask=is_half)
    tl.store(rows + behind, rest.to(dtype), mask=held[:, None] & (behind < SIZE))


@triton.jit
def turn_and_store_kernel(
    heads: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    queries: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    own = heads + row * row_stride
    if cos is not None:
        cos += row * 2 * HALF
        sin += row * 2 * HALF
    if tl.program_id(1) == 0:
        first, second, rest = _turned(
            own, norm, cos, sin, eps, HEADS, PADDED_HEADS, SIZE, HALF, PADDED_HALF, PADDED_REST
        )
        places = row * HEADS + tl.arange(0, PADDED_HEADS)
        _store(first, second, rest, queries, None, places, HEADS, SIZE, HALF, None, INTERPRETED)
    else:
        slot = tl.load(slots + row)
        if slot >= 0:
            numbers = tl.arange(0, PADDED_KV_HEADS)
            places = (slot // BLOCK_TOKENS * KV_HEADS + numbers) * BLOCK_TOKENS + slot % BLOCK_TOKENS
            keys, values = own + HEADS * SIZE, own + (HEADS + KV_HEADS) * SIZE
            if norm is not None:
                norm += HEADS * SIZE
            first, second, rest = _turned(
                keys, norm, cos, sin, eps, KV_HEADS, PADDED_KV_HEADS, SIZE, HALF, PADDED_HALF, PADDED_REST
            )
            _store(first, second, rest, key_cache, key_scales, places, KV_HEADS, SIZE, HALF, LARGEST, INTERPRETED)
            first, second, rest = _turned(
                values, None, None, None, eps, KV_HEADS, PADDED_KV_HEADS, SIZE, HALF, PADDED_HALF, PADDED_REST
            )
            _store(first, second, rest, value_cache, value_scales, places, KV_HEADS, SIZE, HALF, LARGEST, INTERPRETED)


def turn_and_store(
    heads: Tensor, cache: Cache, slots: Tensor, *, tables: tuple[Tensor, Tensor] | None, norm: HeadNorm | None = None
) -> Tensor:
    """Store keys and values and return the turned queries `[T, H, D]`, as `reference.turn_and_store` does.

    Raises ValueError where a token's heads or the tables lie in pieces, or a cache of one byte a value has no scales.
    """
    rows, count, size = heads.shape
    kv_heads, block_tokens = cache.keys.shape[1:3]
    if heads.stride(1) != size or heads.stride(2) != 1:
        raise ValueError("a token's heads must lie side by side")
    if tables is not None and not all(table.is_contiguous() for table in tables):
        raise ValueError("the tables must lie in one piece")
    largest = LARGEST.get(cache.keys.dtype)
    if (largest is None) != (cache.key_scales is None):
        raise ValueError(
            f"a cache of {cache.keys.dtype} has {'no ' if largest else ''}scales; FP8 and INT8 ones need them"
        )
    queries = heads.new_empty(rows, count - 2 * kv_heads, size)
    if rows == 0:
        return queries
    cos, sin = tables or (None, None)
    half = (size if cos is None else cos.shape[-1]) // 2
    turn_and_store_kernel[(rows, 2)](
        heads,
        None if norm is None else norm.weight,
        cos,
        sin,
        queries,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        slots,
        heads.stride(0),
        0.0 if norm is None else norm.eps,
        HEADS=queries.shape[1],
        KV_HEADS=kv_heads,
        SIZE=size,
        HALF=half,
        BLOCK_TOKENS=block_tokens,
        PADDED_HEADS=triton.next_power_of_2(queries.shape[1]),
        PADDED_KV_HEADS=triton.next_power_of_2(kv_heads),
        PADDED_HALF=triton.next_power_of_2(half),
        PADDED_REST=triton.next_power_of_2(max(1, size - 2 * half)),
        LARGEST=largest,
        INTERPRETED=triton.knobs.runtime.interpret,
    )
    return queries
