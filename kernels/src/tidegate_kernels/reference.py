"""The engine's operations in plain torch: the CPU path, and the oracle for GPU kernels, which take these signatures.

Shapes: T rows (new tokens of all sequences of a step, one after the other), H query heads, K key-value heads, D head
size. Caches are `[blocks, K, block tokens, D]`. Owns no state and no policy; the engine's `transformer` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_MAX = 448.0
MAX_PADDING = 2
"""Sequences attended in one call differ in length by at most this factor."""


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Divide the last dimension by its root mean square and multiply by `weight`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add `x` to `residual` in place; returns the norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps=eps)


def rope_tables(positions: Tensor, *, size: int, base: float) -> tuple[Tensor, Tensor]:
    """The `cos` and `sin` that `rope` takes, fp32 `[positions, 1, size]`; `sin` has its first half negated."""
    frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[T, heads, D]`, each one's first half against its second, by rows of `rope_tables`."""
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * inner]`, the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's paged keys and values. With scales (`[blocks, K, block tokens]`, fp32) they are quantised."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that the CPU path attends in one call: decodes of like length, or one sequence's prefill chunk."""

    first_row: int
    sequences: int
    query_tokens: int
    kv_tokens: int
    rows: Tensor
    """Which of a cache's `[blocks * K]` rows hold the keys, in order of sequence, head, block."""
    mask: Tensor | None
    """Added to the scores; None = a prefill from the first token, which needs none beyond causality."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """The sequences of one step: sequence i has rows `[query_starts[i], query_starts[i + 1])`, its newest tokens."""

    query_starts: Tensor
    """int32 `[sequences + 1]`"""
    kv_lengths: Tensor
    """int32 `[sequences]`: tokens attended to, the new ones included."""
    block_tables: Tensor
    """int32 `[sequences, most blocks]`, padded with the sequence's first block."""
    positions: Tensor
    """int64 `[T]`"""
    slots: Tensor
    """int64 `[T]`: block * block tokens + offset of every new token."""
    groups: tuple[Group, ...]
    """What the CPU path goes through; kernels do without."""


def ragged_batch(
    query_lengths: Sequence[int], kv_lengths: Sequence[int], tables: Sequence[Sequence[int]], *, cache: Cache
) -> Ragged:
    """Lay out a step: the last `query_lengths[i]` of the `kv_lengths[i]` tokens in the blocks `tables[i]` are new.

    Neighbouring sequences with one new token go in one group while their blocks differ by at most MAX_PADDING: a caller
    that puts these first, in order of length, gets few groups with little padding.
    """
    _, heads, block_tokens, _ = cache.keys.shape
    blocks = [-(-length // block_tokens) for length in kv_lengths]
    widest = max(blocks)
    # Padding with an own block: whatever stale values it holds, they are this sequence's.
    table = torch.tensor([[*row[:used], *[row[0]] * (widest - used)] for row, used in zip(tables, blocks, strict=True)])
    queries, lengths = torch.tensor(query_lengths), torch.tensor(kv_lengths)
    starts = torch.cat((queries.new_zeros(1), queries.cumsum(0)))
    owner = torch.repeat_interleave(queries)
    positions = torch.arange(int(starts[-1])) + (lengths - queries - starts[:-1])[owner]
    return Ragged(
        query_starts=starts.int(),
        kv_lengths=lengths.int(),
        block_tables=table.int(),
        positions=positions,
        slots=table[owner, positions // block_tokens] * block_tokens + positions % block_tokens,
        groups=tuple(
            Group(
                first_row=int(starts[first]),
                sequences=end - first,
                query_tokens=query_lengths[first],
                kv_tokens=max(kv_lengths[first:end]),
                rows=(
                    table[first:end, None, : max(blocks[first:end])] * heads + torch.arange(heads)[:, None]
                ).flatten(),
                mask=_mask(query_lengths[first], lengths[first:end], cache=cache),
            )
            for first, end in _group_bounds(query_lengths, blocks)
        ),
    )


def _group_bounds(query_lengths: Sequence[int], blocks: Sequence[int]) -> list[tuple[int, int]]:
    bounds: list[tuple[int, int]] = []
    first = 0
    while first < len(blocks):
        end = first + 1
        if query_lengths[first] == 1:
            least = most = blocks[first]
            while end < len(blocks) and query_lengths[end] == 1:
                least, most = min(least, blocks[end]), max(most, blocks[end])
                if most > MAX_PADDING * least:
                    break
                end += 1
        bounds.append((first, end))
        first = end
    return bounds


def _mask(query_tokens: int, lengths: Tensor, *, cache: Cache) -> Tensor | None:
    """Zero where a row may look, −inf where not: `[sequences * K, 1, padded keys]` for decodes, `[rows, keys]` else."""
    _, heads, block_tokens, _ = cache.keys.shape
    dtype = torch.float32 if cache.key_scales is not None else cache.keys.dtype
    longest = int(lengths.max())
    if query_tokens == 1:
        padded = -(-longest // block_tokens) * block_tokens
        hidden = torch.arange(padded) >= lengths[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        return mask.repeat_interleave(heads, dim=0)[:, None]
    if query_tokens == longest:
        return None
    seen = torch.arange(longest - query_tokens, longest)
    hidden = torch.arange(longest) > seen[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def store_kv(key: Tensor, value: Tensor, cache: Cache, slots: Tensor) -> None:
    """Write keys and values `[T, K, D]` to their slots; slot −1 (padding) is skipped.

    A quantised cache gets one scale for each token and head: its largest magnitude over the type's largest value.
    """
    if int(slots.min()) < 0:
        kept = slots >= 0
        key, value, slots = key[kept], value[kept], slots[kept]
    block_tokens = cache.keys.shape[2]
    block = slots.div(block_tokens, rounding_mode="floor")
    offset = slots.remainder(block_tokens)
    _store(key, cache.keys, cache.key_scales, (block, offset))
    _store(value, cache.values, cache.value_scales, (block, offset))


def _store(new: Tensor, cache: Tensor, scales: Tensor | None, place: tuple[Tensor, Tensor]) -> None:
    block, offset = place
    if scales is not None:
        scale = new.float().abs().amax(dim=-1).clamp(min=1e-12) / FP8_MAX
        scales[block, :, offset] = scale
        new = (new.float() / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).to(cache.dtype)
    cache[block, :, offset] = new


def paged_attention(query: Tensor, cache: Cache, batch: Ragged, *, scale: float) -> Tensor:
    """Attention of `[T, H, D]` over the paged cache, prefill chunks and decodes in one call; returns `[T, H * D]`.

    Causal: a row sees the tokens before it and itself. H is a multiple of K; neighbouring heads share keys.
    """
    outputs = [
        (_attend_decodes if group.query_tokens == 1 else _attend_chunk)(
            query[group.first_row : group.first_row + group.sequences * group.query_tokens], cache, group, scale=scale
        )
        for group in batch.groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_decodes(query: Tensor, cache: Cache, group: Group, *, scale: float) -> Tensor:
    sequences, heads, size = query.shape
    kv_heads = cache.keys.shape[1]
    keys = _gather(cache.keys, cache.key_scales, group.rows, query.dtype).view(sequences * kv_heads, -1, size)
    values = _gather(cache.values, cache.value_scales, group.rows, query.dtype).view(sequences * kv_heads, -1, size)
    assert group.mask is not None
    grouped = query.reshape(sequences * kv_heads, heads // kv_heads, size)
    scores = torch.baddbmm(group.mask.to(query.dtype), grouped, keys.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, values).view(sequences, heads * size)


def _attend_chunk(query: Tensor, cache: Cache, group: Group, *, scale: float) -> Tensor:
    tokens, heads, size = query.shape
    kv_heads = cache.keys.shape[1]
    share = heads // kv_heads
    keys = _gather(cache.keys, cache.key_scales, group.rows, query.dtype).view(kv_heads, 1, -1, size)
    values = _gather(cache.values, cache.value_scales, group.rows, query.dtype).view(kv_heads, 1, -1, size)
    output = F.scaled_dot_product_attention(
        query.view(tokens, kv_heads, share, size).permute(1, 2, 0, 3),
        keys[:, :, : group.kv_tokens].expand(-1, share, -1, -1),
        values[:, :, : group.kv_tokens].expand(-1, share, -1, -1),
        attn_mask=None if group.mask is None else group.mask.to(query.dtype),
        is_causal=group.mask is None,
        scale=scale,
    )
    return output.permute(2, 0, 1, 3).reshape(tokens, heads * size)


def _gather(cache: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The cache's rows in the order asked for, as `[rows, block tokens, D]`."""
    blocks, heads, block_tokens, size = cache.shape
    found = cache.view(blocks * heads, block_tokens * size).index_select(0, rows).view(-1, block_tokens, size)
    if scales is None:
        return found
    scale = scales.view(blocks * heads, block_tokens).index_select(0, rows)
    return (found.float() * scale[..., None]).to(dtype)
