"""What ranks that hold a part of a decoder each do together: add up their products, and put their logits side by side.

Owns the process group, NCCL's between GPUs and gloo's between CPUs. What a rank holds is `tensor_split`'s to say;
`transformer` calls these where a product's columns, or the head's rows, are shared.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tidegate_engine.tensor_split import Share, largest_part


@dataclass(frozen=True, slots=True)
class Collectives:
    """All ranks call the same ones in the same order. Both may be captured in a CUDA graph under NCCL."""

    add: Callable[[Tensor], Tensor]
    """The sum of all ranks' tensors of one shape; may be made in place."""
    join: Callable[[Tensor, int], Tensor]
    """All ranks' columns one after the other, `[rows, columns]`, of parts that `tensor_split` made of these columns."""


ALONE = Collectives(add=lambda part: part, join=lambda part, _columns: part)
"""Of a rank that holds everything."""


@contextmanager
def joined(share: Share, *, address: str, device: torch.device) -> Iterator[Collectives]:
    """Meet the other ranks, each a process of its own, and part at the end; returns when all of them have come.

    `address`: the same for all, `tcp://host:port` or `file:///path` of a file that is not there yet.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=share.rank, world_size=share.ranks)
    try:
        yield Collectives(_add, _join)
    finally:
        dist.destroy_process_group()


def _add(part: Tensor) -> Tensor:
    part = part.contiguous()
    dist.all_reduce(part)
    return part


def _join(part: Tensor, columns: int) -> Tensor:
    ranks, rows = dist.get_world_size(), len(part)
    width = largest_part(columns, ranks)
    padded = F.pad(part, (0, width - part.shape[1])).contiguous()
    parts = padded.new_empty(ranks * rows, width)
    dist.all_gather_into_tensor(parts, padded)
    return parts.view(ranks, rows, width).transpose(0, 1).reshape(rows, -1)[:, :columns]
