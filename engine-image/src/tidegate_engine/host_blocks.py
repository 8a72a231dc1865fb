"""Host memory for evicted KV blocks, and the copies to and from it, with torch.

Works on any cache whose third dimension is the block, quantised ones and their scales included. Which block goes where
is `host_pool`'s. Called by the torch runner.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate_engine.request import BlockCopy, Step


class HostBlocks:
    """`slots` blocks of every part of `transformer.new_kv_pool`. The memory is touched only by blocks that were stored;
    pinned beside a GPU."""

    def __init__(self, pool: Sequence[Tensor], slots: int) -> None:
        self.bind(pool)
        self._host = [
            torch.empty((len(part), slots, *part.shape[2:]), dtype=torch.uint8, pin_memory=part.is_cuda)
            for part in self._parts
        ]

    def bind(self, pool: Sequence[Tensor]) -> None:
        """Copy from and to this pool from now on: of other blocks than the first one, or of none."""
        # As bytes: not every type can be indexed on every device.
        self._parts = [part.view(torch.uint8).flatten(0, 1) for part in pool]

    def copy(self, step: Step) -> None:
        """Make the step's copies: all stores, then all loads."""
        if step.stores:
            blocks, slots = _indices(step.stores)
            for device, host in zip(self._parts, self._host, strict=True):
                host[:, slots] = device[:, blocks.to(device.device)].to(host.device)
        if step.loads:
            blocks, slots = _indices(step.loads)
            for device, host in zip(self._parts, self._host, strict=True):
                device[:, blocks.to(device.device)] = host[:, slots].to(device.device)


def _indices(copies: Sequence[BlockCopy]) -> tuple[Tensor, Tensor]:
    blocks, slots = zip(*copies, strict=True)
    return torch.tensor(blocks), torch.tensor(slots)
