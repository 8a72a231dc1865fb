"""Write new keys and values into the paged cache, quantised on the way.

For each token t and key-value head h, with the type's largest value L (448 for e4m3, 127 for int8):

    scale[t, h]    = max(amax |x[t, h, :]|, 1e-12) / L
    codes[t, h, :] = nearest(clamp(x[t, h, :] / scale[t, h], −L, L))

and, without scales, `x` in the cache's type. What slot s holds lies at `[s // block tokens, h, s % block tokens]`; a
slot below zero (padding) is skipped.

Shapes: keys and values `[T, K, D]` of any floating-point type, with any strides but the last one's, which is 1; caches
`[blocks, K, block tokens, D]`; scales `[blocks, K, block tokens]` in fp32; slots int64 `[T]`. One program a token.

Memory: each value is read once and written once; a quantised cache needs no second pass, which would read and write all
new keys and values again. Source: `reference.store_kv`, whose scales are those of the engine's quantised caches.
"""

import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.reference import Cache
from tidegate_kernels.rounding import LARGEST, quantise_runs


@triton.jit
def _store(
    new: tl.tensor,
    cache: tl.tensor,
    scales: tl.tensor,
    places: tl.tensor,
    heads: tl.tensor,
    dims: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    held = (heads < HEADS)[:, None] & (dims < SIZE)[None, :]
    x = tl.load(new + heads[:, None] * head_stride + dims[None, :], mask=held, other=0.0)
    if LARGEST is not None:
        x, scale = quantise_runs(x.to(tl.float32), LARGEST, INTERPRETED)
        tl.store(scales + places, scale, mask=heads < HEADS)
    tl.store(cache + places[:, None] * SIZE + dims[None, :], x.to(cache.dtype.element_ty), mask=held)


@triton.jit
def store_kv_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot >= 0:
        heads = tl.arange(0, PADDED_HEADS)
        dims = tl.arange(0, PADDED_SIZE)
        block = slot // BLOCK_TOKENS
        places = (block * HEADS + heads) * BLOCK_TOKENS + slot % BLOCK_TOKENS
        key, value = keys + row * key_row, values + row * value_row
        _store(key, key_cache, key_scales, places, heads, dims, key_head, HEADS, SIZE, LARGEST, INTERPRETED)
        _store(value, value_cache, value_scales, places, heads, dims, value_head, HEADS, SIZE, LARGEST, INTERPRETED)


def store_kv(key: Tensor, value: Tensor, cache: Cache, slots: Tensor) -> None:
    """Write keys and values `[T, K, D]` to their slots, as `reference.store_kv` does.

    Raises ValueError where a head's values do not lie side by side, or a cache of one byte a value has no scales.
    """
    rows, heads, size = key.shape
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("a head's keys and values must lie side by side; their last stride is not 1")
    largest = LARGEST.get(cache.keys.dtype)
    if (largest is None) != (cache.key_scales is None):
        raise ValueError(
            f"a cache of {cache.keys.dtype} has {'no ' if largest else ''}scales; FP8 and INT8 ones need them"
        )
    if rows == 0:
        return
    store_kv_kernel[(rows,)](
        key,
        value,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        HEADS=heads,
        SIZE=size,
        BLOCK_TOKENS=cache.keys.shape[2],
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_SIZE=triton.next_power_of_2(size),
        LARGEST=largest,
        INTERPRETED=triton.knobs.runtime.interpret,
    )
