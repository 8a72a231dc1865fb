"""Host memory for evicted KV blocks, and the copies to and from it, with torch.

Works on any layout of the caches whose first dimension is the block, quantised ones and their scales included. Which
block goes where is `host_pool`'s. Called by the torch runner.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tidegate_engine.request import BlockCopy, Step
from tidegate_kernels.reference import Cache


class HostBlocks:
    """`slots` blocks of every cache. The memory is touched only by blocks that were stored; pinned beside a GPU."""

    def __init__(self, caches: Sequence[Cache], slots: int) -> None:
        self._pairs = [
            (part, torch.empty((slots, *part.shape[1:]), dtype=torch.uint8, pin_memory=part.is_cuda))
            for cache in caches
            for part in _parts(cache)
        ]

    def copy(self, step: Step) -> None:
        """Make the step's copies: all stores, then all loads."""
        if step.stores:
            blocks, slots = _indices(step.stores)
            for device, host in self._pairs:
                host[slots] = device[blocks.to(device.device)].to(host.device)
        if step.loads:
            blocks, slots = _indices(step.loads)
            for device, host in self._pairs:
                device[blocks.to(device.device)] = host[slots].to(device.device)


def _indices(copies: Sequence[BlockCopy]) -> tuple[Tensor, Tensor]:
    blocks, slots = zip(*copies, strict=True)
    return torch.tensor(blocks), torch.tensor(slots)


def _parts(cache: Cache) -> list[Tensor]:
    """The cache's tensors as bytes: not every type can be indexed on every device."""
    parts = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    return [part.view(torch.uint8) for part in parts if part is not None]
