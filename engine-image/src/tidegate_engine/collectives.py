"""What ranks that hold a part of a decoder each do together: add up their products, and put their logits side by side.

Owns the process group, NCCL's between GPUs and gloo's between CPUs. What a rank holds is `tensor_split`'s to say;
`transformer` calls these where a product's columns, or the head's rows, are shared.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from tidegate_engine.tensor_split import Share, largest_part

HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Collectives:
    """All ranks call the same ones in the same order. `add` and `join` may be captured in a CUDA graph under NCCL."""

    add: Callable[[Tensor], Tensor]
    """The sum of all ranks' tensors of one shape; may be made in place."""
    join: Callable[[Tensor, int], Tensor]
    """All ranks' columns one after the other, `[rows, columns]`, of parts that `tensor_split` made of these columns."""
    least: Callable[[int], int]
    """The smallest of all ranks' numbers."""


ALONE = Collectives(add=lambda part: part, join=lambda part, _columns: part, least=lambda number: number)
"""Of a rank that holds everything."""


def meeting_place(ranks: int) -> tuple[Store, int]:
    """Where the ranks of this machine meet, made by the first one, and its port, at which the others find it."""
    store = TCPStore(HERE, 0, ranks, is_master=True, wait_for_workers=False)
    return store, store.port


def meeting_place_at(port: int, ranks: int) -> Store:
    """The same for a rank beside the first."""
    return TCPStore(HERE, port, ranks, is_master=False)


def join(share: Share, *, store: Store, device: torch.device) -> Collectives:
    """Meet the other ranks, each a process of its own, until the process ends; returns when all of them have come."""
    is_gpu = device.type == "cuda"
    if not is_gpu:
        # Otherwise gloo takes the address that the machine's name has, if it has one.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if is_gpu else "gloo", store=store, rank=share.rank, world_size=share.ranks)

    def least(number: int) -> int:
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    return Collectives(_add, _join, least)


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
