"""A loaded decoder with its paged cache, or one rank's part of both: what computes a step that was laid out.

Owns the KV pool, the recorded decode steps and the order of work that ranks share. Which tokens a step has, and which
token follows, is decided elsewhere. Called by `torch_runner`; on ranks beside the first by `follow`, with the first
one's orders.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tidegate_engine.decode_graphs import DecodeGraphs, can_be_recorded
from tidegate_engine.native_decoder import native_decoder
from tidegate_engine.ranks import Array, RankEnd, Team
from tidegate_engine.request import Window
from tidegate_engine.transformer import (
    Decoder,
    KvGroup,
    RowDeltas,
    head_logits,
    hidden_states,
    layer_caches,
    new_kv_pool,
)
from tidegate_kernels.operations import TORCH
from tidegate_kernels.reference import Ragged, view_table_of


@dataclass(frozen=True, slots=True)
class Work:
    """A step's rows, on the CPU."""

    token_ids: Tensor
    """int64 `[T]`"""
    batch: Ragged
    logits_rows: Tensor
    """int64: the rows whose logits are wanted."""
    begun_blocks: Sequence[int]
    """Blocks that get their first token and are not filled."""
    wants_states: bool = False
    """Whether the hidden states of all rows are wanted as well."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How a part's cache is laid out, but for its number of blocks."""

    dtype: torch.dtype
    groups: Sequence[KvGroup]
    block_tokens: int
    graph_sizes: Sequence[int] = ()
    """Sequences of the decode steps that are recorded; none = all are computed as they come."""


class ModelPart:
    """Used by one thread. With a `team`, the others are told of everything that is done, before it is done."""

    def __init__(self, decoder: Decoder, shape: CacheShape, *, team: Team | None) -> None:
        self.decoder = decoder
        self.pool: tuple[Tensor, ...] = ()
        self._shape = shape
        self._device = decoder.norm.device
        self._team = team

    def make_cache(self, kv_blocks: int) -> None:
        """An empty KV cache of so many blocks, and whatever has its address."""
        if self._team is not None:
            self._team.tell("cache", kv_blocks)
        config, shape = self.decoder.config, self._shape
        blocks = kv_blocks * len(shape.groups)
        self.pool = new_kv_pool(
            config,
            blocks=blocks,
            block_tokens=shape.block_tokens,
            dtype=shape.dtype,
            groups=shape.groups,
            device=self._device,
        )
        self._caches = layer_caches(config, self.pool, shape.groups)
        is_torch = self.decoder.operations is TORCH
        self._native = native_decoder(self.decoder, self._caches) if is_torch else None
        self._graphs: DecodeGraphs | None = None
        if shape.graph_sizes and len(shape.groups) == 1 and can_be_recorded(self.decoder):
            context = min(config.context_tokens, (blocks - 1) * shape.block_tokens)
            with torch.inference_mode():
                self._graphs = DecodeGraphs(self.decoder, self._caches, sizes=shape.graph_sizes, context_tokens=context)

    def drop_cache(self) -> None:
        """Give the KV cache's memory back: nobody may have its address."""
        if self._team is not None:
            self._team.tell("drop")
        self.pool, self._caches, self._native, self._graphs = (), (), None, None

    def clear(self, blocks: int) -> None:
        """Zero the first blocks."""
        if self._team is not None:
            self._team.tell("clear", blocks)
        for part in self.pool:
            part[:, :, :blocks] = 0

    def compute(self, work: Work, *, adapters: Sequence[RowDeltas] = ()) -> tuple[Tensor | None, Tensor]:
        """Writes keys and values; returns the hidden states, where they are wanted, and the logits that are."""
        if self._team is None:
            return self._compute(work, adapters)
        self._team.tell("step", *packed(work))
        try:
            return self._compute(work, adapters)
        except Exception as error:
            self._team.give_up(f"rank 0 of {self._team.ranks} failed: {type(error).__name__}: {error}")
            raise

    def _compute(self, work: Work, adapters: Sequence[RowDeltas]) -> tuple[Tensor | None, Tensor]:
        if work.begun_blocks:
            # What an earlier request left behind the last token gets the weight zero, and zero times its NaN is NaN.
            for part in self.pool:
                part[:, :, work.begun_blocks] = 0
        is_plain = not adapters and not work.wants_states
        if is_plain and self._native is not None and self._native.takes(work.batch):
            return None, self._native.forward(work.token_ids, work.batch, logits_rows=work.logits_rows)
        if is_plain and self._graphs is not None and self._graphs.takes(work.batch):
            logits = self._graphs.run(work.token_ids, work.batch)
            return None, logits[work.logits_rows.to(self._device)]
        ids, batch, rows = work.token_ids, work.batch, work.logits_rows
        if self._device.type != "cpu":
            ids, batch, rows = ids.to(self._device), batch.to(self._device), rows.to(self._device)
        states = hidden_states(self.decoder, ids, batch, caches=self._caches, adapters=adapters)
        return states if work.wants_states else None, head_logits(self.decoder, states[rows])


@torch.inference_mode()
def follow(part: ModelPart, end: RankEnd) -> None:
    """Do what the first rank tells, until it ends."""
    while (order := end.receive()) is not None:
        match order:
            case "step", facts, arrays:
                part.compute(unpacked(facts, arrays))
            case "cache", int(kv_blocks), _:
                part.make_cache(kv_blocks)
            case "drop", _, _:
                part.drop_cache()
            case "clear", int(blocks), _:
                part.clear(blocks)
            case kind, _, _:
                raise ValueError(f"an order that nobody knows: {kind!r}")


def packed(work: Work) -> tuple[object, list[Array]]:
    """Facts and arrays of `Team.tell`."""
    batch = work.batch
    views = None if batch.views is None else [None if view is None else [*view] for view in batch.views]
    facts = [batch.block_tokens, views, work.begun_blocks, work.wants_states]
    tensors = [work.token_ids, work.logits_rows, batch.query_starts, batch.kv_lengths, batch.positions]
    for each in (batch, *batch.others):
        tensors += [each.block_tables, each.slots]
    found = [tensor.numpy() for tensor in tensors]
    return facts, [(array.dtype.str, array.shape, array.tobytes()) for array in found]


def unpacked(facts: object, arrays: Sequence[Array]) -> Work:
    """The other way round."""
    assert isinstance(facts, list)
    block_tokens, views, begun_blocks, wants_states = facts
    found = [torch.from_numpy(np.frombuffer(body, dtype).reshape(shape).copy()) for dtype, shape, body in arrays]
    ids, rows, starts, lengths, positions, *tables = found
    views = None if views is None else [None if view is None else Window(*view) for view in views]
    batch = Ragged(
        query_starts=starts,
        kv_lengths=lengths,
        block_tables=tables[0],
        positions=positions,
        slots=tables[1],
        counts=(starts.diff().tolist(), lengths.tolist()),
        block_tokens=block_tokens,
        groups={},
        views=views,
        view_table=view_table_of(views),
    )
    others = [
        replace(batch, block_tables=own, slots=slots, groups={})
        for own, slots in zip(tables[2::2], tables[3::2], strict=True)
    ]
    return Work(ids, replace(batch, others=tuple(others)), rows, begun_blocks, wants_states)
