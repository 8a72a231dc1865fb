"""The KV store against the reference, bit by bit."""

import os
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.kv_store import store_kv
from tidegate_kernels.reference import Cache

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
NewCache = Callable[..., Cache]
DTYPES = (FP8, torch.int8, torch.bfloat16, torch.float16, torch.float32)


def assert_stores_as_the_reference(
    key: torch.Tensor, value: torch.Tensor, slots: Sequence[int], caches: tuple[Cache, Cache]
) -> None:
    """`caches`: two alike, whose every bit is compared afterwards."""
    found, expected = caches
    store_kv(key, value, found, torch.tensor(slots, dtype=torch.int64))
    if any(slot >= 0 for slot in slots):
        reference.store_kv(key, value, expected, torch.tensor(slots))
    for name in ("keys", "values", "key_scales", "value_scales"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        if theirs is not None:
            assert torch.equal(as_bits(mine), as_bits(theirs)), name


def as_bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@settings(max_examples=200 if PROVE else 10, deadline=None, derandomize=not PROVE)
@given(
    dtype=st.sampled_from(DTYPES),
    heads=st.sampled_from([1, 2, 3, 8]),
    size=st.sampled_from([64, 80, 96, 128, 256]),
    block_tokens=st.sampled_from([16, 32]),
    padding=st.lists(st.booleans(), min_size=0, max_size=6),
    magnitude=st.sampled_from([1e-5, 1.0, 3e3]),
    seed=st.integers(0, 1000),
)
def test_tokens_of_any_step_are_stored_as_by_the_reference(
    new_cache: NewCache,
    dtype: torch.dtype,
    heads: int,
    size: int,
    block_tokens: int,
    padding: list[bool],
    magnitude: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = 3
    free = torch.randperm(blocks * block_tokens, generator=generator).tolist()
    slots = [-1 if skipped else free.pop() for skipped in padding]
    # As the engine passes them: slices of one projection, with the queries before them.
    stored = dtype if dtype.is_floating_point and dtype != FP8 else torch.float32
    fused = torch.randn(len(slots), 3 * heads, size, generator=generator).mul_(magnitude).to(stored)
    shape = (blocks, heads, block_tokens, size)
    caches = new_cache(shape, dtype, fill=7.0), new_cache(shape, dtype, fill=7.0)
    assert_stores_as_the_reference(fused[:, heads : 2 * heads], fused[:, 2 * heads :], slots, caches)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_keys_are_quantised_from_their_own_values(new_cache: NewCache, dtype: torch.dtype) -> None:
    key = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    for cache in (FP8, torch.int8):
        assert_stores_as_the_reference(
            key, key * 3, [17, 2], (new_cache((2, 2, 16, 64), cache), new_cache((2, 2, 16, 64), cache))
        )


def test_every_number_of_e4m3_and_the_middle_between_two_are_rounded_as_by_torch(new_cache: NewCache) -> None:
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = torch.cat((middles.nextafter(numbers[1:]), middles.nextafter(numbers[:-1])))
    row = torch.cat((numbers, middles, near, torch.full((1,), 448.0)))
    row = torch.nn.functional.pad(row, (0, 512 - len(row)))
    # The largest is 448, so the scale is 1 and codes are the values themselves.
    key = torch.stack((row, -row)).view(2, 1, 512)
    assert_stores_as_the_reference(key, key, [3, 0], (new_cache((1, 1, 16, 512), FP8), new_cache((1, 1, 16, 512), FP8)))


def test_zeros_get_a_tiny_scale_and_outliers_leave_no_code_beyond_the_largest(new_cache: NewCache) -> None:
    key = torch.zeros(2, 2, 64)
    key[1, :, 5] = 1e30
    for dtype in (FP8, torch.int8):
        assert_stores_as_the_reference(
            key, -key, [0, 1], (new_cache((1, 2, 16, 64), dtype), new_cache((1, 2, 16, 64), dtype))
        )


def test_a_step_of_padding_alone_and_one_without_tokens_change_nothing(new_cache: NewCache) -> None:
    for rows in (0, 2):
        key = torch.ones(rows, 1, 64)
        assert_stores_as_the_reference(
            key, key, [-1] * rows, (new_cache((2, 1, 16, 64), FP8, fill=7.0), new_cache((2, 1, 16, 64), FP8, fill=7.0))
        )


def test_heads_whose_values_do_not_lie_side_by_side_are_refused(new_cache: NewCache) -> None:
    key = torch.ones(64, 2, 3).permute(2, 1, 0)
    with pytest.raises(ValueError, match="side by side"):
        store_kv(key, key, new_cache((2, 2, 16, 64), torch.float32), torch.zeros(3, dtype=torch.int64))


def test_a_quantised_cache_without_scales_is_refused(new_cache: NewCache) -> None:
    cache = new_cache((2, 2, 16, 64), torch.int8)
    key = torch.ones(1, 2, 64)
    with pytest.raises(ValueError, match="has no scales"):
        store_kv(key, key, reference.Cache(cache.keys, cache.values), torch.zeros(1, dtype=torch.int64))
