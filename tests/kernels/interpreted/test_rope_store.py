"""Norm, rotation and store in one kernel, against the reference's three."""

import os
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.reference import Cache, HeadNorm, rope_tables
from tidegate_kernels.rope_store import turn_and_store

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
NewCache = Callable[..., Cache]


def assert_caches_alike(found: Cache, expected: Cache) -> None:
    """Codes are neighbours at most: what lies in the middle between two goes as the last bit of a product wills."""
    if expected.key_scales is None:
        torch.testing.assert_close(found.keys, expected.keys, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert torch.equal(found.values.nan_to_num(7.0), expected.values.nan_to_num(7.0))
        return
    steps = found.keys.view(torch.int8).int() - expected.keys.view(torch.int8).int()
    steps = steps[expected.keys.float() != 0]
    assert steps.abs().le(1).all()
    assert (steps != 0).sum().item() <= max(1, steps.numel() // 100)
    torch.testing.assert_close(found.key_scales, expected.key_scales, rtol=1e-5, atol=0, equal_nan=True)
    assert torch.equal(found.values.view(torch.int8), expected.values.view(torch.int8))
    assert found.value_scales is not None
    assert expected.value_scales is not None
    assert torch.equal(found.value_scales.nan_to_num(7.0), expected.value_scales.nan_to_num(7.0))


@settings(max_examples=200 if PROVE else 16, deadline=None, derandomize=not PROVE)
@given(
    dtype=st.sampled_from([torch.float32, FP8, torch.int8]),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (10, 2)]),
    size=st.sampled_from([64, 80, 96, 128, 256]),
    block_tokens=st.sampled_from([16, 32]),
    turned=st.sampled_from([None, 1.0, 0.5, 0.25]),
    has_norm=st.booleans(),
    padding=st.lists(st.booleans(), min_size=0, max_size=5),
    seed=st.integers(0, 1000),
)
def test_tokens_of_any_step_are_turned_and_stored_as_by_the_reference(
    new_cache: NewCache,
    dtype: torch.dtype,
    heads: tuple[int, int],
    size: int,
    block_tokens: int,
    turned: float | None,
    has_norm: bool,
    padding: list[bool],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    count, kv_heads = heads
    free = torch.randperm(3 * block_tokens, generator=generator).tolist()
    slots = torch.tensor([-1 if skipped else free.pop() for skipped in padding], dtype=torch.int64)
    # As the engine passes it: a view of one projection, whose rows may lie apart.
    total = count + 2 * kv_heads
    projected = torch.randn(len(slots), total + 1, size, generator=generator)[:, :total]
    tables = None
    if turned is not None:
        frequencies = torch.logspace(0, -4, int(size * turned) // 2)
        tables = rope_tables(torch.randint(0, 5000, (len(slots),), generator=generator), frequencies)
    norm = None
    if has_norm:
        norm = HeadNorm(torch.randn(count + kv_heads, size, generator=generator), eps=1e-6)
    shape = (3, kv_heads, block_tokens, size)
    mine, theirs = (new_cache(shape, dtype, fill=7.0) for _ in range(2))
    found = turn_and_store(projected, mine, slots, tables=tables, norm=norm)
    expected = reference.turn_and_store(projected, theirs, slots, tables=tables, norm=norm)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.is_contiguous()
    assert_caches_alike(mine, theirs)


def test_padding_leaves_the_cache_alone_and_its_query_is_turned_all_the_same(new_cache: NewCache) -> None:
    cache = new_cache((2, 1, 16, 64), FP8, fill=7.0)
    queries = turn_and_store(torch.ones(2, 3, 64), cache, torch.tensor([-1, -1]), tables=None)
    assert queries.eq(1).all()
    assert cache.keys.float().eq(7).all()
    assert cache.value_scales is not None
    assert cache.value_scales.eq(7).all()


def test_what_lies_in_pieces_and_a_cache_without_scales_are_refused(new_cache: NewCache) -> None:
    slots = torch.zeros(2, dtype=torch.int64)
    cache = new_cache((2, 1, 16, 64), torch.int8)
    with pytest.raises(ValueError, match="side by side"):
        turn_and_store(torch.ones(2, 64, 3).transpose(1, 2), cache, slots, tables=None)
    table = torch.ones(32, 1, 2).permute(2, 1, 0)
    with pytest.raises(ValueError, match="in one piece"):
        turn_and_store(torch.ones(2, 3, 64), cache, slots, tables=(table, table))
    with pytest.raises(ValueError, match="has no scales"):
        turn_and_store(torch.ones(2, 3, 64), Cache(cache.keys, cache.values), slots, tables=None)
