"""The CPU operations against formulas written out one row at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_kernels import reference
from tidegate_kernels.reference import AttentionRule, Cache, Ragged, attention_groups, ragged_batch
from tidegate_kernels.weight import Dense

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 8, 4
BLOCKS = 40


def new_cache(*, fill: float = 0.0, dtype: torch.dtype = torch.float32, scaled: bool = False) -> Cache:
    shape = (BLOCKS, KV_HEADS, BLOCK, SIZE)
    keys, values = (torch.full(shape, fill).to(dtype) for _ in range(2))
    if not scaled:
        return Cache(keys, values)
    return Cache(keys, values, torch.zeros(shape[:3]), torch.zeros(shape[:3]))


def attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, cap: float | None = None
) -> torch.Tensor:
    """One row `[H, D]` over all of `[S, K, D]`, head by head."""
    rows = []
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        scores = keys[:, own] @ query[head] * scale
        weights = torch.softmax(scores if cap is None else cap * torch.tanh(scores / cap), dim=0)
        rows.append(weights @ values[:, own])
    return torch.cat(rows)


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(new tokens, tokens before) of each sequence; decodes and chunks in any order."""
    return draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 15)), min_size=1, max_size=6))


VIEWS = st.none() | st.tuples(st.sampled_from([1, 3, 4, 5, 11, 100]), st.sampled_from([0, 1, 4, 6]))


@settings(max_examples=60, deadline=None)
@given(steps(), VIEWS, st.sampled_from([None, 0.7]), st.none() | st.lists(VIEWS, min_size=6, max_size=6))
def test_paged_attention_equals_attention_over_each_sequence_alone(
    step: list[tuple[int, int]],
    layer: tuple[int, int] | None,
    cap: float | None,
    views: list[tuple[int, int] | None] | None,
) -> None:
    window = None if layer is None or views is not None else layer[0]
    generator = torch.Generator().manual_seed(len(step))
    cache = new_cache()
    blocks = torch.randperm(BLOCKS, generator=generator).tolist()
    histories, tables, queries, new_keys, new_values = [], [], [], [], []
    for new, before in step:
        total = new + before
        table = [blocks.pop() for _ in range(-(-total // BLOCK))]
        keys, values = (torch.randn(total, KV_HEADS, SIZE, generator=generator) for _ in range(2))
        for position in range(before):
            cache.keys[table[position // BLOCK], :, position % BLOCK] = keys[position]
            cache.values[table[position // BLOCK], :, position % BLOCK] = values[position]
        histories.append((keys, values))
        tables.append(table)
        queries.append(torch.randn(new, HEADS, SIZE, generator=generator))
        new_keys.append(keys[before:])
        new_values.append(values[before:])
    hidden_block = blocks.pop()  # where a table has what nobody sees any more
    cache.keys[hidden_block] = cache.values[hidden_block] = torch.nan
    seen_by = views or [None if window is None else (window, 0)] * len(step)
    for table, (_, before), view in zip(tables, step, seen_by, strict=False):
        if view is not None:
            hidden = range(-(-view[1] // BLOCK), max(0, before - view[0] + 1) // BLOCK)
            for index in hidden:
                table[index] = hidden_block
    batch = ragged_batch(
        [new for new, _ in step],
        [new + before for new, before in step],
        tables,
        cache=cache,
        views=None if views is None else views[: len(step)],
    )
    reference.store_kv(torch.cat(new_keys), torch.cat(new_values), cache, batch.slots)
    output = reference.paged_attention(torch.cat(queries), cache, batch, AttentionRule(0.3, window, cap))
    expected = []
    for (new, before), query, (keys, values), view in zip(step, queries, histories, seen_by, strict=False):
        tokens, sinks = view or (10**6, 0)
        for row in range(new):
            own = before + row
            seen = [position for position in range(own + 1) if position > own - tokens or position < sinks]
            expected.append(attend_row(query[row], keys[seen], values[seen], 0.3, cap))
    torch.testing.assert_close(output, torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_a_slot_of_minus_one_is_stored_nowhere() -> None:
    cache = new_cache()
    key = torch.ones(3, KV_HEADS, SIZE)
    reference.store_kv(key, key, cache, torch.tensor([-1, 5, -1]))
    assert cache.keys[1, :, 1].eq(1).all()
    assert cache.keys.sum() == KV_HEADS * SIZE
    assert cache.values.sum() == KV_HEADS * SIZE


def test_sequences_of_like_length_are_attended_in_one_call_and_unlike_ones_apart() -> None:
    def sequences(batch: Ragged) -> list[int]:
        groups = attention_groups(batch, kv_heads=KV_HEADS, window=None, dtype=torch.float32)
        return [group.sequences for group in groups]

    tables = [list(range(first, first + 10)) for first in (0, 10, 20)]
    together = ragged_batch([1, 1, 1], [20, 30, 40], tables, cache=new_cache())
    apart = ragged_batch([1, 1, 1], [4, 30, 40], tables, cache=new_cache())
    assert sequences(together) == [3]
    assert sequences(apart) == [1, 2]


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 3e3])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float8_e4m3fn, 0.06), (torch.int8, 0.012)])
def test_quantised_keys_with_a_scale_for_each_token_and_head_keep_their_direction_at_any_magnitude(
    dtype: torch.dtype, error: float, magnitude: float
) -> None:
    cache = new_cache(dtype=dtype, scaled=True)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(9, KV_HEADS, SIZE, generator=generator) * magnitude for _ in range(2))
    batch = ragged_batch([9], [9], [[3, 1, 2]], cache=cache)
    reference.store_kv(key, value, cache, batch.slots)
    query = torch.randn(9, HEADS, SIZE, generator=generator) / magnitude
    output = reference.paged_attention(query, cache, batch, AttentionRule(0.3))
    exact = torch.stack([attend_row(query[row], key[: row + 1], value[: row + 1], 0.3) for row in range(9)])
    assert (output - exact).norm() / exact.norm() < error


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_cache_holds_the_nearest_numbers_under_the_largest_magnitude_of_each_token_and_head(
    dtype: torch.dtype,
) -> None:
    cache = new_cache(dtype=dtype, scaled=True)
    key = torch.randn(3, KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    key[1, 0] = 0
    reference.store_kv(key, key, cache, torch.tensor([6, -1, 9]))
    assert cache.key_scales is not None
    largest = 448 if dtype == torch.float8_e4m3fn else 127
    for row, (block, offset) in ((0, (1, 2)), (2, (2, 1))):
        for head in range(KV_HEADS):
            scale = key[row, head].abs().max() / largest
            torch.testing.assert_close(cache.key_scales[block, head, offset], scale)
            codes = (key[row, head] / scale).round() if dtype == torch.int8 else (key[row, head] / scale).to(dtype)
            torch.testing.assert_close(cache.keys[block, head, offset].float(), codes.float(), atol=0, rtol=0)
    assert cache.key_scales.count_nonzero() == 2 * KV_HEADS


def test_rms_norm_divides_by_the_root_of_the_mean_square_after_adding_the_residual() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    total = x + residual
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(reference.add_rms_norm(x, residual, weight, eps=1e-5), expected)
    torch.testing.assert_close(residual, total)


def test_rope_turns_each_pair_of_a_head_by_its_position_times_its_frequency() -> None:
    positions = torch.tensor([0, 1, 77])
    x = torch.randn(3, 2, SIZE)
    turned = reference.rope(x, *reference.rope_tables(positions, 10_000.0 ** (-torch.arange(0, SIZE, 2) / SIZE)))
    half = SIZE // 2
    for row, position in enumerate(positions.tolist()):
        for pair in range(half):
            angle = position * 10_000.0 ** (-2 * pair / SIZE)
            a, b = x[row, :, pair], x[row, :, pair + half]
            torch.testing.assert_close(turned[row, :, pair], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(turned[row, :, pair + half], b * math.cos(angle) + a * math.sin(angle))


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    torch.testing.assert_close(reference.silu_mul(torch.cat((gate, up), dim=1)), gate / (1 + (-gate).exp()) * up)


def test_a_windows_decode_reads_the_blocks_within_it_alone() -> None:
    batch = ragged_batch([1, 1], [37, 21], [list(range(10)), list(range(10, 16))], cache=new_cache())
    groups = attention_groups(batch, kv_heads=KV_HEADS, window=5, dtype=torch.float32)
    blocks = [sorted(set((group.rows // KV_HEADS).tolist())) for group in groups]
    assert blocks == [[8, 9, 14, 15]]


def test_rope_leaves_the_dimensions_beyond_its_tables_alone() -> None:
    x = torch.randn(3, 2, SIZE)
    frequencies = torch.tensor([1.0, 0.1])
    turned = reference.rope(x, *reference.rope_tables(torch.tensor([0, 1, 77]), frequencies))
    torch.testing.assert_close(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[1:, :, :4], x[1:, :, :4])


def test_rows_go_to_the_experts_they_are_counted_for() -> None:
    weights = [Dense(torch.randn(5, 4)) for _ in range(3)]
    x = torch.randn(6, 4)
    found = reference.grouped_linear(x, weights, [2, 0, 4])
    expected = torch.cat((x[:2] @ weights[0].values.T, x[2:] @ weights[2].values.T))
    torch.testing.assert_close(found, expected)


def test_shares_of_the_chosen_experts_sum_to_one_where_they_are_to() -> None:
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    shares, experts = reference.route(scores, chosen=2, normalised=False)
    assert experts.tolist() == [[1, 2]]
    torch.testing.assert_close(shares, torch.softmax(scores, -1)[:, [1, 2]])
    shares, _ = reference.route(scores, chosen=2, normalised=True)
    torch.testing.assert_close(shares.sum(), torch.tensor(1.0))
