"""The engine's operations in plain torch: the CPU path, and the oracle for GPU kernels, which take these signatures.

Shapes: T rows (new tokens of all sequences of a step, one after the other), H query heads, K key-value heads, D head
size. Caches are `[blocks, K, block tokens, D]`. Owns no state and no policy; the engine's `transformer` calls it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_kernels.float8 import FP8, FP8_MAX, from_fp8, scales_of, to_fp8
from tidegate_kernels.quantised import FP8_BLOCK, INT8_MAX, Fp8, Int8
from tidegate_kernels.weight import ExpertMatrices, Weight, linear

View = tuple[int, int]
"""How far a token sees: the newest tokens, itself included, and the first ones, the sinks."""
ALL = (1 << 31) - 1
"""More tokens than any sequence has."""
GREEDY_BELOW = 1e-5
"""Temperatures below count as zero: dividing by them overflows."""
MAX_PADDING = 2
"""Sequences attended in one call differ in length by at most this factor."""


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Divide the last dimension by its root mean square and multiply by `weight`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Add `x` to `residual` in place; returns the norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps=eps)


def rope_tables(positions: Tensor, frequencies: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """The `cos` and `sin` that `rope` takes, fp32 `[positions, 1, 2 * frequencies]`; `sin`'s first half is negated."""
    angles = positions.float()[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1.0:
        cos, sin = cos.mul_(magnitude), sin.mul_(magnitude)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[T, heads, D]`, the first half of what is rotated against the second, by `rope_tables`.

    Tables narrower than D leave the rest of a head as it is.
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((rope(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Bend `x` into (−cap, cap)."""
    return (x / cap).tanh_().mul_(cap)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[T, 2 * inner]`, the gate in the first half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` of `[T, 2 * inner]`, the gate in the first half, by the tanh approximation."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@dataclass(frozen=True, slots=True)
class Code:
    """What activations are brought to: FP8 or INT8, with a scale for each row, or for each `group` columns of it."""

    dtype: torch.dtype
    group: int | None = None


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Activations in FP8 or INT8, as they are multiplied with weights in the same type."""

    codes: Tensor
    """`[T, in]`"""
    scales: Tensor
    """fp32 `[T, 1]`, or `[T, ⌈in / group⌉]` with a scale for each so many columns."""


def quantise_rows(x: Tensor, code: Code) -> QuantisedRows:
    """`[T, in]` as codes."""
    rows, columns = x.shape
    group = code.group or columns
    padded = F.pad(x.float(), (0, -columns % group)).view(rows, -(-columns // group), group)
    scales = scales_of(padded, largest=FP8_MAX if code.dtype == FP8 else INT8_MAX)
    codes = padded / scales
    codes = to_fp8(codes) if code.dtype == FP8 else codes.round_().to(torch.int8)
    return QuantisedRows(codes.flatten(1)[:, :columns].contiguous(), scales[..., 0])


def norm_and_quantise(
    x: Tensor, weight: Tensor, code: Code, *, eps: float, residual: Tensor | None = None
) -> QuantisedRows:
    """`rms_norm` or, with a residual, `add_rms_norm`, in fp32 up to the codes."""
    if residual is not None:
        x = residual.add_(x)
    return quantise_rows(rms_norm(x.float(), weight.float(), eps=eps), code)


def gate_and_quantise(gate_up: Tensor, code: Code, *, activation: str) -> QuantisedRows:
    """`silu_mul` ("silu") or `gelu_mul` ("gelu_tanh"), in fp32 up to the codes."""
    return quantise_rows({"silu": silu_mul, "gelu_tanh": gelu_mul}[activation](gate_up.float()), code)


def scaled_linear(
    x: QuantisedRows, weight: Fp8 | Int8, bias: Tensor | None = None, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`x @ weight.T + bias` of activations and weights in the same codes, `[T, out]` of the type `dtype`.

    Sums of codes are made in double precision: exact where the codes are whole numbers.
    """
    if isinstance(weight, Fp8) and weight.in_blocks:
        product = x.codes.new_zeros((len(x.codes), weight.shape[0]), dtype=torch.float64)
        owner = torch.arange(weight.shape[0]) // FP8_BLOCK
        for index, first in enumerate(range(0, weight.shape[1], FP8_BLOCK)):
            columns = slice(first, first + FP8_BLOCK)
            part = x.codes[:, columns].double() @ weight.codes[:, columns].double().T
            product += part * x.scales[:, index, None] * weight.scales[owner, index]
    else:
        product = (x.codes.double() @ weight.codes.double().T) * x.scales * weight.scales[:, 0]
    return (product if bias is None else product + bias).to(dtype)


def route(scores: Tensor, *, chosen: int, normalised: bool) -> tuple[Tensor, Tensor]:
    """The `chosen` likeliest experts of each row of `scores` `[T, experts]`: their shares and numbers, `[T, chosen]`.

    `normalised`: the shares of the chosen ones sum to one.
    """
    shares, experts = torch.softmax(scores, dim=-1, dtype=torch.float32).topk(chosen, dim=-1)
    if normalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(scores.dtype), experts


def grouped_linear(x: Tensor, weights: Sequence[Weight], counts: Sequence[int]) -> Tensor:
    """Products of neighbouring rows with a weight each: the first `counts[0]` rows with `weights[0]`, and so on."""
    parts = torch.split(x, list(counts))
    return torch.cat([linear(part, weight) for part, weight in zip(parts, weights, strict=True) if part.shape[0]])


@dataclass(frozen=True, slots=True)
class ExpertsApart(ExpertMatrices):
    """A weight for each expert. How many rows each has is asked of the device, which has to be waited for."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.parts), *self.parts[0].shape

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def precision(self) -> str:
        return "+".join(dict.fromkeys(part.precision for part in self.parts))

    def multiply(self, x: Tensor, starts: Tensor) -> Tensor:
        return grouped_linear(x, self.parts, starts.diff().tolist())


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's paged keys and values. With scales (`[blocks, K, block tokens]`, fp32) they are quantised."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    group: int = 0
    """Of the layers that share block tables: see `Ragged.of`."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How a layer attends. `window`: how many tokens a row sees, itself included; None = all before it."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    """Bends the scores before the mask; None = not."""
    sinks: Tensor | None = None
    """`[H]`: the score of one more key for each head, whose value is zero; None = there is none."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing happens between the scores and the softmax over them but the mask."""
        return self.soft_cap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that the CPU path attends in one call: decodes of like length, or one sequence's prefill chunk."""

    first_row: int
    sequences: int
    query_tokens: int
    kv_tokens: int
    """Tokens of the longest sequence, those before its window left out."""
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
    counts: tuple[Sequence[int], Sequence[int]]
    """New tokens and tokens of each sequence, for the CPU path."""
    block_tokens: int
    groups: dict[tuple[int, int | None], tuple[Group, ...]]
    """What the CPU path goes through, by key-value heads and window: filled when a layer first asks for its own."""
    views: Sequence[View | None] | None = None
    """For each sequence how far its tokens see, in layers that see all; None = the layers decide for all of them."""
    view_table: Tensor | None = None
    """The same as int32 `[sequences, 2]`, with ALL for a sequence that sees all."""
    others: "tuple[Ragged, ...]" = ()
    """The same rows in the block tables of the other groups of layers, from group 1 on."""

    def of(self, cache: Cache) -> "Ragged":
        """The rows in the block tables of the cache's group."""
        return self.others[cache.group - 1] if cache.group else self

    def to(self, device: torch.device) -> "Ragged":
        """The same step with its tensors there."""
        table = None if self.view_table is None else self.view_table.to(device)
        return replace(
            self,
            query_starts=self.query_starts.to(device),
            kv_lengths=self.kv_lengths.to(device),
            block_tables=self.block_tables.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            groups={},
            view_table=table,
            others=tuple(other.to(device) for other in self.others),
        )


def ragged_batch(
    query_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    tables: Sequence[Sequence[int]],
    *,
    cache: Cache,
    views: Sequence[View | None] | None = None,
) -> Ragged:
    """Lay out a step: the last `query_lengths[i]` of the `kv_lengths[i]` tokens in the blocks `tables[i]` are new.

    Neighbouring sequences with one new token go in one group while their blocks differ by at most MAX_PADDING: a caller
    that puts these first, in order of length, gets few groups with little padding.
    """
    block_tokens = cache.keys.shape[2]
    blocks = [-(-length // block_tokens) for length in kv_lengths]
    table = _padded(tables, blocks)
    queries, lengths = torch.tensor(query_lengths), torch.tensor(kv_lengths)
    starts = torch.cat((queries.new_zeros(1), queries.cumsum(0)))
    owner = torch.repeat_interleave(queries)
    positions = torch.arange(int(starts[-1])) + (lengths - queries - starts[:-1])[owner]
    return Ragged(
        query_starts=starts.int(),
        kv_lengths=lengths.int(),
        block_tables=table.int(),
        positions=positions,
        slots=_slots(table, owner, positions, block_tokens),
        counts=(query_lengths, kv_lengths),
        block_tokens=block_tokens,
        groups={},
        views=views,
        view_table=view_table_of(views),
    )


def view_table_of(views: Sequence[View | None] | None) -> Tensor | None:
    """`Ragged.view_table` of `Ragged.views`."""
    return None if views is None else torch.tensor([view or (ALL, 0) for view in views], dtype=torch.int32)


def in_other_tables(batch: Ragged, tables: Sequence[Sequence[int]]) -> Ragged:
    """The same step in the blocks of another group of layers."""
    new, lengths = batch.counts
    table = _padded(tables, [-(-length // batch.block_tokens) for length in lengths])
    owner = torch.repeat_interleave(torch.tensor(new))
    slots = _slots(table, owner, batch.positions, batch.block_tokens)
    return replace(batch, block_tables=table.int(), slots=slots, groups={})


def _padded(tables: Sequence[Sequence[int]], blocks: Sequence[int]) -> Tensor:
    """The first `blocks[i]` of `tables[i]`, padded with an own block: what it holds of old, it is this sequence's."""
    widest = max(blocks)
    return torch.tensor([[*row[:used], *[row[0]] * (widest - used)] for row, used in zip(tables, blocks, strict=True)])


def _slots(table: Tensor, owner: Tensor, positions: Tensor, block_tokens: int) -> Tensor:
    return table[owner, positions // block_tokens] * block_tokens + positions % block_tokens


def attention_groups(batch: Ragged, *, kv_heads: int, window: int | None, dtype: torch.dtype) -> tuple[Group, ...]:
    """The calls that cover the batch for layers of so many heads and such a window; masks are of the type `dtype`."""
    found = batch.groups.get((kv_heads, window))
    if found is None:
        if batch.views is not None and window is not None:
            raise ValueError("a sequence has a view of its own only where the layers have no window")
        if window is not None and window >= max(batch.counts[1]):
            found = attention_groups(batch, kv_heads=kv_heads, window=None, dtype=dtype)
        else:
            found = _make_groups(batch, kv_heads=kv_heads, window=window, dtype=dtype)
        batch.groups[kv_heads, window] = found
    return found


def _make_groups(batch: Ragged, *, kv_heads: int, window: int | None, dtype: torch.dtype) -> tuple[Group, ...]:
    new, lengths = batch.counts
    size = batch.block_tokens
    blocks = [-(-length // size) for length in lengths]
    views = batch.views or [None if window is None else (window, 0)] * len(blocks)
    # Blocks of sinks, and the first one behind them that the first new token of a sequence sees.
    spans = [
        _seen_span(length - count, view, block_tokens=size)
        for count, length, view in zip(new, lengths, views, strict=True)
    ]
    visible = [used - start + sinks for used, (sinks, start) in zip(blocks, spans, strict=True)]
    starts = batch.query_starts.tolist()
    heads = torch.arange(kv_heads)[:, None]
    groups = []
    for first, end in _group_bounds(new, visible):
        columns = torch.arange(max(visible[first:end]))
        sinks, start = torch.tensor(spans[first:end]).T[:, :, None]
        index = torch.where(columns < sinks, columns, columns - sinks + start)
        # Padding with the newest block: those before the window may be another sequence's by now.
        last = torch.tensor(blocks[first:end])[:, None] - 1
        seen = batch.block_tables[first:end].gather(1, torch.minimum(index, last))
        positions = (index[:, :, None] * size + torch.arange(size)).flatten(1)
        longest = max(
            length + (sinks - start) * size
            for length, (sinks, start) in zip(lengths[first:end], spans[first:end], strict=True)
        )
        if new[first] == 1:
            mask = _decode_mask(torch.tensor(lengths[first:end]), positions, views[first:end])
            mask = mask.to(dtype).repeat_interleave(kv_heads, dim=0)[:, None]
        elif views[first] is None and new[first] == lengths[first]:
            mask = None
        else:
            own = torch.arange(lengths[first] - new[first], lengths[first])
            mask = _chunk_mask(own, positions[0, :longest], views[first]).to(dtype)
        groups.append(
            Group(
                first_row=starts[first],
                sequences=end - first,
                query_tokens=new[first],
                kv_tokens=longest,
                rows=(seen[:, None] * kv_heads + heads).flatten(),
                mask=mask,
            )
        )
    return tuple(groups)


def _seen_span(before: int, view: View | None, *, block_tokens: int) -> tuple[int, int]:
    """Blocks of sinks, and the first block behind them, that the token at position `before` sees; (0, 0) = all."""
    if view is None:
        return 0, 0
    tokens, sinks = view
    start, sink_blocks = max(0, before + 1 - tokens) // block_tokens, -(-sinks // block_tokens)
    return (sink_blocks, start) if start > sink_blocks else (0, 0)


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


def _decode_mask(lengths: Tensor, positions: Tensor, views: Sequence[View | None]) -> Tensor:
    """Zero where a sequence's new token may look, −inf where not, of keys at `positions` `[sequences, keys]`."""
    own = lengths[:, None] - 1
    hidden = positions > own
    if any(view is not None for view in views):
        all_of_it = (int(lengths.max()) + 1, 0)
        tokens, sinks = torch.tensor([view or all_of_it for view in views]).T[:, :, None]
        hidden |= (positions <= own - tokens) & (positions >= sinks)
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def _chunk_mask(own: Tensor, positions: Tensor, view: View | None) -> Tensor:
    """Zero where rows at positions `own` may look, −inf where not, of keys at `positions`: `[rows, keys]`."""
    own = own[:, None]
    hidden = positions > own
    if view is not None:
        tokens, sinks = view
        hidden |= (positions <= own - tokens) & (positions >= sinks)
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def store_kv(key: Tensor, value: Tensor, cache: Cache, slots: Tensor) -> None:
    """Write keys and values `[T, K, D]` to their slots; slot −1 (padding) is skipped.

    A quantised cache gets one scale for each token and head: its largest magnitude over the type's largest value.
    """
    if len(slots) and int(slots.min()) < 0:
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
        scale = scales_of(new, largest=FP8_MAX if cache.dtype == FP8 else INT8_MAX)
        scales[block, :, offset] = scale[..., 0]
        new = new.float() / scale
        new = to_fp8(new) if cache.dtype == FP8 else new.round_()
    cache[block, :, offset] = new.to(cache.dtype)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of a layer's queries and keys, each head with a weight of its own."""

    weight: Tensor
    """`[H + K, D]`"""
    eps: float


def turn_and_store(
    heads: Tensor, cache: Cache, slots: Tensor, *, tables: tuple[Tensor, Tensor] | None, norm: HeadNorm | None = None
) -> Tensor:
    """Norm and `rope` of the queries and keys of `[T, H + 2K, D]`, keys and values to their slots; returns the queries.

    `tables`: what `rope_tables` gives; None = nothing turns.
    """
    kv_heads = cache.keys.shape[1]
    turned = heads[:, :-kv_heads]
    if norm is not None:
        turned = F.rms_norm(turned, (heads.shape[-1],), eps=norm.eps) * norm.weight
    if tables is not None:
        turned = rope(turned, *tables)
    store_kv(turned[:, -kv_heads:], heads[:, -kv_heads:], cache, slots)
    return turned[:, :-kv_heads]


def paged_attention(query: Tensor, cache: Cache, batch: Ragged, rule: AttentionRule) -> Tensor:
    """Attention of `[T, H, D]` over the paged cache, prefill chunks and decodes in one call; returns `[T, H * D]`.

    Causal: a row sees the tokens before it and itself. H is a multiple of K; neighbouring heads share keys.
    """
    groups = attention_groups(batch, kv_heads=cache.keys.shape[1], window=rule.window, dtype=query.dtype)
    outputs = [
        (_attend_decodes if group.query_tokens == 1 else _attend_chunk)(
            query[group.first_row : group.first_row + group.sequences * group.query_tokens], cache, group, rule
        )
        for group in groups
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_decodes(query: Tensor, cache: Cache, group: Group, rule: AttentionRule) -> Tensor:
    sequences, heads, size = query.shape
    kv_heads = cache.keys.shape[1]
    keys = _gather(cache.keys, cache.key_scales, group.rows, query.dtype).view(sequences * kv_heads, -1, size)
    values = _gather(cache.values, cache.value_scales, group.rows, query.dtype).view(sequences * kv_heads, -1, size)
    assert group.mask is not None
    grouped = query.reshape(sequences * kv_heads, heads // kv_heads, size)
    if rule.soft_cap is None:
        scores = torch.baddbmm(group.mask, grouped, keys.transpose(1, 2), alpha=rule.scale)
    else:
        scores = soft_cap(torch.bmm(grouped, keys.transpose(1, 2)) * rule.scale, rule.soft_cap) + group.mask
    sinks = None if rule.sinks is None else rule.sinks.view(kv_heads, -1, 1).repeat(sequences, 1, 1)
    weights = _shares(scores, sinks).to(query.dtype)
    return torch.bmm(weights, values).view(sequences, heads * size)


def _attend_chunk(query: Tensor, cache: Cache, group: Group, rule: AttentionRule) -> Tensor:
    tokens, heads, size = query.shape
    kv_heads = cache.keys.shape[1]
    share = heads // kv_heads
    keys = _gather(cache.keys, cache.key_scales, group.rows, query.dtype).view(kv_heads, 1, -1, size)
    values = _gather(cache.values, cache.value_scales, group.rows, query.dtype).view(kv_heads, 1, -1, size)
    keys, values = keys[:, :, : group.kv_tokens], values[:, :, : group.kv_tokens]
    shared = query.view(tokens, kv_heads, share, size).permute(1, 2, 0, 3)
    if rule.is_plain:
        output = F.scaled_dot_product_attention(
            shared,
            keys.expand(-1, share, -1, -1),
            values.expand(-1, share, -1, -1),
            attn_mask=group.mask,
            is_causal=group.mask is None,
            scale=rule.scale,
        )
    else:
        mask = group.mask
        if mask is None:
            own = torch.arange(tokens)
            mask = _chunk_mask(own, own, None).to(query.dtype)
        sinks = None if rule.sinks is None else rule.sinks.view(kv_heads, share, 1, 1).expand(-1, -1, tokens, 1)
        parts = []
        # A head at a time: the scores of all would be the largest thing in memory.
        for head, (own, key, value) in enumerate(zip(shared, keys, values, strict=True)):
            scores = torch.matmul(own, key.transpose(1, 2)) * rule.scale
            scores = (scores if rule.soft_cap is None else soft_cap(scores, rule.soft_cap)) + mask
            weights = _shares(scores, None if sinks is None else sinks[head])
            parts.append(torch.matmul(weights.to(query.dtype), value))
        output = torch.stack(parts)
    return output.permute(2, 0, 1, 3).reshape(tokens, heads * size)


def _shares(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax of `scores` in fp32; with `sinks`, of which the last dimension is 1, what these leave to the keys."""
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.softmax(torch.cat((scores.float(), sinks.float()), dim=-1), dim=-1)[..., :-1]


def _gather(cache: Tensor, scales: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The cache's rows in the order asked for, as `[rows, block tokens, D]`."""
    blocks, heads, block_tokens, size = cache.shape
    flat = cache.view(blocks * heads, block_tokens * size)
    if scales is None:
        return flat.index_select(0, rows).view(-1, block_tokens, size).to(dtype)
    codes = flat.view(torch.int8).index_select(0, rows).view(-1, block_tokens, size)
    values = from_fp8(codes.view(FP8)) if cache.dtype == FP8 else codes.float()
    scale = scales.view(blocks * heads, block_tokens).index_select(0, rows)
    return values.mul_(scale[..., None]).to(dtype)


@dataclass(frozen=True, slots=True)
class Choice:
    """How the token of each row of logits is chosen; all tensors are `[rows]`."""

    temperatures: Tensor
    """fp32"""
    top_ks: Tensor
    """int32; 0 = all"""
    top_ps: Tensor
    """fp32; 1 = all"""
    min_ps: Tensor
    """fp32; 0 = all"""
    randoms: Tensor
    """fp32 in [0, 1): the only source of chance."""


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Penalties and biases: row i has the entries `[starts[i], starts[i + 1])`, one a token."""

    starts: Tensor
    """int32 `[rows + 1]`"""
    ids: Tensor
    """int64"""
    counts: Tensor
    """int32: how often the row's request has said the token; 0 = only its prompt has, −1 = neither."""
    biases: Tensor
    """fp32"""
    repetitions: Tensor
    """fp32 `[rows]`, 1 = none; as are presences and frequencies, 0 = none"""
    presences: Tensor
    frequencies: Tensor


def choose_tokens(logits: Tensor, choice: Choice, adjustments: Adjustments | None = None) -> Tensor:
    """The next token of each row of `logits` fp32 `[rows, vocabulary]`, int64; −1 where the largest is not finite.

    Logits are changed in place by the adjustments. A token depends on its own row alone.
    """
    if adjustments is not None:
        for row in range(len(logits)):
            _adjust(logits[row], adjustments, row)
    tokens = [_choose_token(logits[row], choice, row) for row in range(len(logits))]
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _adjust(logits: Tensor, adjustments: Adjustments, row: int) -> None:
    own = slice(int(adjustments.starts[row]), int(adjustments.starts[row + 1]))
    ids, counts = adjustments.ids[own], adjustments.counts[own]
    values, repetition = logits[ids], adjustments.repetitions[row]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(counts >= 0, repeated, values)
    penalties = adjustments.presences[row] + adjustments.frequencies[row] * counts
    logits[ids] = torch.where(counts > 0, values - penalties, values) + adjustments.biases[own]


def _choose_token(logits: Tensor, choice: Choice, row: int) -> int:
    highest = logits.max()
    if not highest.isfinite():
        return -1
    temperature, top_k = choice.temperatures[row], int(choice.top_ks[row])
    order = logits.argsort(descending=True, stable=True)
    if temperature < GREEDY_BELOW or top_k == 1:
        return int(order[0])
    weights = ((logits - highest) / temperature).exp()
    weights = weights.masked_fill(weights < choice.min_ps[row], 0).double()
    if 0 < top_k < len(weights):
        weights[order[top_k:]] = 0
    if choice.top_ps[row] < 1:
        before = weights[order].cumsum(0) - weights[order]
        limit = choice.top_ps[row] * weights.sum()
        weights[order[1:][before[1:] >= limit]] = 0
    ends = weights.cumsum(0)
    hits = (ends > float(choice.randoms[row]) * ends[-1]) & (weights > 0)
    return int(hits.nonzero()[0]) if hits.any() else int(weights.nonzero()[-1])
