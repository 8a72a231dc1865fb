"""Decode steps at a few fixed batch sizes, each recorded once as a CUDA graph and replayed with new contents.

Owns the buffers that graphs read: a step's rows are copied in, and what is missing to the next size is padding in block
0, which no request has. On a CPU, where there are no graphs, the same padded step is computed each time. Called by
`model_part` and by the GPU measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tidegate_engine.transformer import Decoder, ExpertMlp, forward
from tidegate_kernels.reference import Cache, ExpertsApart, Ragged

MAX_SIZE = 512
"""Beyond it a step takes so long that its launches do not matter."""
WARM_UPS = 2
"""Runs before a recording, in which kernels are compiled and buffers allocated."""


@dataclass(frozen=True, slots=True)
class _Recorded:
    token_ids: Tensor
    batch: Ragged
    """Its tensors are the buffers; its counts are the longest that may come, by which launches are cut."""
    replay: Callable[[], Tensor]
    kept: tuple[Tensor, ...]
    """Memory that is not a graph's own, which a larger step than the recorded one would have replaced."""


class DecodeGraphs:
    """Steps of one token a sequence, of up to the largest of `sizes` sequences of up to `context_tokens` each.

    For decoders whose layers share block tables, of which `can_be_recorded` is true.
    """

    def __init__(self, decoder: Decoder, caches: Sequence[Cache], *, sizes: Sequence[int], context_tokens: int) -> None:
        self._decoder, self._caches, self._context_tokens = decoder, caches, context_tokens
        self._device = decoder.norm.device
        # The largest first: the others' memory comes out of what it has freed.
        self._recorded = {size: self._record(size) for size in sorted(sizes, reverse=True)}

    def takes(self, batch: Ragged) -> bool:
        """Whether `run` computes such a step: one token a sequence, none of which has a view of its own."""
        new, total = batch.counts
        fits = len(new) <= max(self._recorded) and max(total) <= self._context_tokens
        return fits and max(new) == 1 and batch.views is None

    def run(self, token_ids: Tensor, batch: Ragged) -> Tensor:
        """Logits `[sequences, vocab]`, valid until the next call. Raises ValueError for a step that is too large."""
        count, width = batch.block_tables.shape
        size = min((size for size in self._recorded if size >= count), default=None)
        if size is None or max(batch.counts[1]) > self._context_tokens:
            raise ValueError(
                f"{count} sequences of up to {max(batch.counts[1])} tokens; recorded are up to "
                f"{max(self._recorded)} of up to {self._context_tokens}"
            )
        recorded = self._recorded[size]
        own = recorded.batch
        for buffer, new, padding in (
            (recorded.token_ids, token_ids, 0),
            (own.positions, batch.positions, 0),
            (own.slots, batch.slots, 0),
            (own.kv_lengths, batch.kv_lengths, 1),
        ):
            buffer[:count].copy_(new, non_blocking=True)
            buffer[count:] = padding
        own.block_tables[:count, :width].copy_(batch.block_tables, non_blocking=True)
        own.block_tables[count:] = 0
        return recorded.replay()[:count]

    def _record(self, size: int) -> _Recorded:
        block_tokens = self._caches[0].keys.shape[2]
        width = -(-self._context_tokens // block_tokens)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        batch = Ragged(
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            kv_lengths=zeros(size, dtype=torch.int32) + 1,
            block_tables=zeros(size, width, dtype=torch.int32),
            positions=zeros(size),
            slots=zeros(size),
            counts=([1] * size, [self._context_tokens] * size),
            block_tokens=block_tokens,
            groups={},
        )
        token_ids, rows = zeros(size), torch.arange(size, device=self._device)

        def step() -> Tensor:
            if self._device.type == "cpu":
                # The path in torch looks at what lengths there are.
                lengths = batch.kv_lengths.tolist()
                own = replace(batch, counts=([1] * size, lengths), groups={})
                return forward(self._decoder, token_ids, own, caches=self._caches, logits_rows=rows)
            return forward(self._decoder, token_ids, batch, caches=self._caches, logits_rows=rows)

        replay = step if self._device.type == "cpu" else _graph_of(step)
        kept = (rows, *(tensor for turns in self._decoder.turns for tensor in turns.memory))
        return _Recorded(token_ids, batch, replay, kept)


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, 8, and then each at most a half more than the one before."""
    sizes, size = [1, 2, 4, 8], 8
    while size < (most := min(largest, MAX_SIZE)):
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
        sizes.append(min(size, most))
    return tuple(each for each in sizes if each <= max(1, largest))


def can_be_recorded(decoder: Decoder) -> bool:
    """Whether no layer asks the device for anything: experts that are multiplied one by one do, for their counts."""
    mlps = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, ExpertMlp)]
    return not any(isinstance(each, ExpertsApart) for mlp in mlps for each in (mlp.gate_up, mlp.down))


def _graph_of(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """`step` recorded; replaying it writes the same memory, which is returned."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
