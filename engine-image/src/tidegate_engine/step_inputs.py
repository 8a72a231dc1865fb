"""A step as forward pass and sampler take it: ids, positions, block tables and slots of its rows, and who gets a token.

Owns the batch's buffers and keeps them from step to step: a decode differs from the step before by a position, and now
and then by a block. What it lays out is what `ragged_batch` makes of the same step from nothing. Called by
`torch_runner`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidegate_engine.request import Request, Step, StepItem, Window
from tidegate_kernels.reference import Ragged, view_table_of

Integers = NDArray[np.int64]
START_PLACES, START_COLUMNS = 64, 64


@dataclass(frozen=True, slots=True)
class Inputs:
    """Rows: decodes first and by length, since neighbours of like length are attended in one call; then the chunks."""

    token_ids: Tensor
    """int64 `[T]`"""
    batch: Ragged
    first_rows: Integers
    """Of each of `step.items`."""
    logits_rows: Tensor
    """int64: the rows whose logits are wanted, the last known token of each of `sampled` and each of its drafts."""
    sampled: Sequence[Request]
    """Those that get a token, in the order of `step.items`."""
    drafts: Mapping[int, Sequence[int]]
    """By the place in `sampled`."""
    begun_blocks: Sequence[int]
    """Blocks that get their first token and are not filled in this step."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The arrays behind the tensors of a step of decodes alone, in the order of its rows but for `starts`."""

    starts: Integers
    order: Integers
    """Which of the known tables each row has."""
    positions: Integers
    lengths: NDArray[np.int32]
    tables: NDArray[np.int32]
    """`[groups, rows, most blocks]`"""
    slots: Integers
    """`[groups, rows]`"""
    token_ids: Integers
    inputs: Inputs
    """Without its requests, which are not kept alive."""


class StepInputs:
    """Lays out the steps of one KV cache. `windows` has an entry for each group of layers, None = they see all."""

    def __init__(self, block_tokens: int, windows: Sequence[int | None]) -> None:
        self._block_tokens = block_tokens
        self._groups = len(windows)
        self._has_windows = any(window is not None for window in windows)
        self._tables = np.zeros((START_PLACES, START_COLUMNS), np.int32)
        """A row for each table, padded with its first blocks; the groups side by side, as in the tables."""
        self._blocks = np.zeros(START_PLACES, np.int64)
        """How many of a row's blocks, of one group, are the table's."""
        self._published = np.zeros(START_PLACES, np.int64)
        """The request's `num_published`, without which no block is taken out of its table."""
        self._is_replaced = np.zeros(START_PLACES, bool)
        """Whether blocks of the table may be taken out again, and not only added to its end."""
        self._place_of: dict[int, int] = {}
        """By the identity of the table, which a request has for as long as it runs."""
        self._known: Sequence[Sequence[int]] = ()
        """The tables of the step before; being kept, none of them lends its identity to another one."""
        self._places: Integers = np.zeros(0, np.int64)
        self._views: Sequence[Window | None] | None = None
        self._decoding: _Decoding | None = None
        """The step before, where it was one of decodes alone, none of whose tables loses blocks."""

    def lay_out(self, step: Step) -> Inputs:
        """The inputs of `step`, valid until the next call. Its requests have a block table each."""
        decodes, chunks = step.decodes, step.chunks
        starts, tables = np.array(decodes.starts, np.int64), decodes.tables
        if chunks:
            starts = np.concatenate((starts, np.array([item.start for item in chunks], np.int64)))
            tables = [*tables, *(item.blocks for item in chunks)]
        if len(tables) != len(self._known) or not all(map(is_, tables, self._known)):
            self._find_places(tables, [*decodes.requests, *(item.request for item in chunks)])
            self._decoding = None
        before = self._decoding
        if before is not None and not chunks and bool((starts - before.starts == 1).all()):
            after = self._advance(before, decodes.requests)
            if after is not None:
                return after
        return self._lay_out(step, starts)

    def _advance(self, before: _Decoding, requests: Sequence[Request]) -> Inputs | None:
        """The step behind `before`, of the same decodes; None where the tables have to be wider."""
        size, positions, tables, slots = self._block_tokens, before.positions, before.tables, before.slots
        rows = ((positions + 1) % size == 0).nonzero()[0]
        if len(rows) and int(positions[rows].max()) + 1 >= tables.shape[2] * size:
            return None
        for array in (before.starts, positions, before.lengths, slots):
            array += 1
        begun: Sequence[int] = ()
        if len(rows):
            groups, blocks = self._groups, positions[rows] // size
            owners = [self._known[index] for index in before.order[rows].tolist()]
            # The tables by place stay behind: they are caught up when a step is laid out from them.
            new = np.array(
                [
                    table[block * groups : (block + 1) * groups]
                    for table, block in zip(owners, blocks.tolist(), strict=True)
                ],
                np.int32,
            ).T
            tables[:, rows, blocks] = new
            slots[:, rows] = new * np.int64(size)
            begun = new.ravel().tolist() if size > 1 else ()
        before.token_ids[before.inputs.first_rows] = _newest_ids(requests)
        batch = before.inputs.batch
        batch = replace(batch, counts=(batch.counts[0], before.lengths.tolist()), groups={})
        if batch.others:
            batch = replace(
                batch, others=tuple(replace(other, counts=batch.counts, groups={}) for other in batch.others)
            )
        return replace(before.inputs, batch=batch, sampled=requests, begun_blocks=begun)

    def _lay_out(self, step: Step, starts: Integers) -> Inputs:
        """A step of which only the tables are known from the one before."""
        size, groups, decodes, chunks = self._block_tokens, self._groups, len(step.decodes), step.chunks
        counts = np.ones(len(starts), np.int64)
        counts[decodes:] = [item.count for item in chunks]
        requests = [*step.decodes.requests, *(item.request for item in chunks)]
        are_replaced = bool(self._is_replaced[self._places].any())
        published = [request.num_published for request in requests] if are_replaced else 0
        self._write(np.arange(len(starts)), -(-(starts + counts) // size), published=np.array(published))

        order = np.arange(len(starts))
        order[:decodes] = starts[:decodes].argsort(kind="stable")
        counts = counts[order]
        ends = starts[order] + counts
        bounds = np.concatenate(([0], counts.cumsum()))
        owners = np.arange(len(order)).repeat(counts)
        positions = np.arange(bounds[-1]) + (ends - bounds[1:])[owners]
        first_rows = np.empty_like(order)
        first_rows[order] = bounds[:-1]

        width = -(-int(ends.max()) // size)
        found = self._tables[self._places[order], : width * groups].reshape(len(order), width, groups)
        tables = np.ascontiguousarray(found.transpose(2, 0, 1))
        slots = np.ascontiguousarray(tables[:, owners, positions // size] * np.int64(size) + positions % size)
        lengths = ends.astype(np.int32)
        ids = np.empty(bounds[-1], np.int64)
        ids[first_rows[:decodes]] = _newest_ids(step.decodes.requests)
        for item, row in zip(chunks, first_rows[decodes:].tolist(), strict=True):
            ids[row : row + item.count] = _token_ids(item)
        inputs = Inputs(
            token_ids=torch.from_numpy(ids),
            batch=self._batch(order, bounds=bounds, positions=positions, lengths=lengths, tables=tables, slots=slots),
            first_rows=first_rows,
            logits_rows=torch.from_numpy(_logits_rows(first_rows, chunks)),
            sampled=[*step.decodes.requests, *(item.request for item in chunks if _is_sampled(item))],
            drafts=_drafts(chunks, first=decodes),
            begun_blocks=_begun(tables, ends=ends, counts=counts, block_tokens=size),
        )
        self._decoding = (
            None
            if chunks or are_replaced
            else _Decoding(starts, order, positions, lengths, tables, slots, ids, replace(inputs, sampled=()))
        )
        return inputs

    def _batch(
        self,
        order: Integers,
        *,
        bounds: Integers,
        positions: Integers,
        lengths: NDArray[np.int32],
        tables: NDArray[np.int32],
        slots: Integers,
    ) -> Ragged:
        views = None if self._views is None else [self._views[index] for index in order.tolist()]
        group_tables, group_slots = torch.from_numpy(tables), torch.from_numpy(slots)
        batch = Ragged(
            query_starts=torch.from_numpy(bounds.astype(np.int32)),
            kv_lengths=torch.from_numpy(lengths),
            block_tables=group_tables[0],
            positions=torch.from_numpy(positions),
            slots=group_slots[0],
            counts=(np.diff(bounds).tolist(), lengths.tolist()),
            block_tokens=self._block_tokens,
            groups={},
            views=views,
            view_table=view_table_of(views),
        )
        if self._groups == 1:
            return batch
        others = zip(group_tables[1:], group_slots[1:], strict=True)
        return replace(
            batch, others=tuple(replace(batch, block_tables=own, slots=slots, groups={}) for own, slots in others)
        )

    def _find_places(self, tables: Sequence[Sequence[int]], requests: Sequence[Request]) -> None:
        """Have a row for each of `tables`, and none for others."""
        identities = list(map(id, tables))
        for gone in self._place_of.keys() - set(identities):
            del self._place_of[gone]
        if len(tables) > len(self._blocks):
            self._widen(places=len(tables))
        free = set(range(len(self._blocks))).difference(self._place_of.values())
        for identity, request in zip(identities, requests, strict=True):
            if identity not in self._place_of:
                place = self._place_of[identity] = free.pop()
                self._blocks[place] = 0
                self._is_replaced[place] = self._has_windows or request.window is not None
        self._known = list(tables)
        self._places = np.array([self._place_of[identity] for identity in identities], np.int64)
        views = [request.window for request in requests]
        self._views = views if any(views) else None

    def _write(self, known: Integers, blocks: Integers, *, published: Integers) -> None:
        """Write what changed in some of the known tables, of which `blocks` are used, of each group."""
        groups = self._groups
        self._widen(columns=int(blocks.max()) * groups)
        places = self._places[known]
        stale = self._blocks[places] != blocks
        stale |= self._is_replaced[places] & (self._published[places] != published)
        for index in stale.nonzero()[0].tolist():
            place, used = places[index], int(blocks[index])
            row, table = self._tables[place], self._known[known[index]]
            filled = 0 if self._is_replaced[place] else int(self._blocks[place])
            if used < filled or filled == 0:
                filled = 0
                row[:] = np.resize(np.array(table[:groups], np.int32), len(row))
            row[filled * groups : used * groups] = table[filled * groups : used * groups]
        self._blocks[places], self._published[places] = blocks, published

    def _widen(self, *, places: int = 0, columns: int = 0) -> None:
        """Have room for so many rows of so many columns. Wider rows are to be written again."""
        old_places, old_columns = self._tables.shape
        if places > old_places:
            more = max(places, 2 * old_places) - old_places
            self._tables = np.pad(self._tables, ((0, more), (0, 0)))
            self._blocks, self._published = np.pad(self._blocks, (0, more)), np.pad(self._published, (0, more))
            self._is_replaced = np.pad(self._is_replaced, (0, more))
        if columns > old_columns:
            self._tables = np.zeros((len(self._tables), max(columns, 2 * old_columns)), np.int32)
            self._blocks[:] = 0


def _newest_ids(requests: Sequence[Request]) -> list[int]:
    """The last known token of each: the prompt's last, where none was chosen yet."""
    return [(request.output_ids or request.prompt_ids)[-1] for request in requests]


def _token_ids(item: StepItem) -> list[int]:
    return [*item.request.token_ids(item.start, item.count - len(item.drafts)), *item.drafts]


def _is_sampled(item: StepItem) -> bool:
    return item.samples and item.request.pooling is None


def _logits_rows(first_rows: Integers, chunks: Sequence[StepItem]) -> Integers:
    decodes = len(first_rows) - len(chunks)
    if not chunks:
        return first_rows
    wanted = [
        row + offset
        for item, row in zip(chunks, first_rows[decodes:].tolist(), strict=True)
        if _is_sampled(item)
        for offset in range(item.count - 1 - len(item.drafts), item.count)
    ]
    return np.concatenate((first_rows[:decodes], np.array(wanted, np.int64)))


def _drafts(chunks: Sequence[StepItem], *, first: int) -> dict[int, Sequence[int]]:
    sampled = [item for item in chunks if _is_sampled(item)]
    return {place: item.drafts for place, item in enumerate(sampled, first) if item.drafts}


def _begun(tables: NDArray[np.int32], *, ends: Integers, counts: Integers, block_tokens: int) -> list[int]:
    rest = ends % block_tokens
    rows = ((rest > 0) & (rest <= counts)).nonzero()[0]
    begun: list[int] = tables[:, rows, ends[rows] // block_tokens].ravel().tolist()
    return begun
