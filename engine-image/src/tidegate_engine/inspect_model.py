"""What a checkpoint holds and what memory it needs in each precision, without reading its weights.

`tidegate-engine inspect` prints it; arithmetic is `precision`'s, so that it is what the engine itself goes by.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from tidegate_engine.architecture import parameter_shapes
from tidegate_engine.checkpoint import Checkpoint, open_checkpoint
from tidegate_engine.gguf_file import read_header
from tidegate_engine.packed import read_packed
from tidegate_engine.precision import STORED, parse_precision, weight_bytes
from tidegate_engine.safetensors_file import read_checkpoint
from tidegate_engine.transformer import kv_token_bytes
from tidegate_engine.weights import PACKED_FILE
from tidegate_kernels import native

PRECISIONS = (STORED, "float32", "bfloat16", "fp8", "int8", "int4")
KV_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """Facts about a checkpoint, for people and for programs."""

    name: str
    parameters: int
    layers: int
    hidden: int
    kv_heads: int
    head_size: int
    vocab_size: int
    context_tokens: int
    tied_head: bool
    stored_bytes_by_type: Mapping[str, int]
    weight_bytes_by_precision: Mapping[str, int]
    """Everything in this precision, embedding and head too."""
    kv_bytes_per_token: Mapping[str, int]


def inspect_model(path: Path | str) -> Inspection:
    """Raises ModelError."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    shapes = parameter_shapes(config)
    return Inspection(
        name=checkpoint.name,
        parameters=sum(prod(shape) for shape in shapes.values()),
        layers=len(config.layers),
        hidden=config.hidden,
        kv_heads=max(layer.kv_heads for layer in config.layers),
        head_size=config.head_size,
        vocab_size=config.vocab_size,
        context_tokens=config.context_tokens,
        tied_head=config.tied_head,
        stored_bytes_by_type=_stored_by_type(checkpoint),
        weight_bytes_by_precision={name: _needed(checkpoint, name, shapes) for name in PRECISIONS},
        kv_bytes_per_token={name: kv_token_bytes(config, dtype) for name, dtype in KV_TYPES.items()},
    )


def describe(found: Inspection) -> str:
    """Lines for people."""
    lines = [
        f"{found.name}: {found.parameters / 1e6:,.0f} million parameters, {found.layers} layers of {found.hidden}, "
        f"{found.kv_heads} key-value heads of {found.head_size}, {found.vocab_size:,} tokens"
        f"{', head tied to the embedding' if found.tied_head else ''}, context {found.context_tokens:,}",
        "",
        "stored as          MiB",
        *(f"  {name:12} {size / 2**20:9,.1f}" for name, size in found.stored_bytes_by_type.items()),
        "",
        "weights held in    MiB",
        *(f"  {name:12} {size / 2**20:9,.1f}" for name, size in found.weight_bytes_by_precision.items()),
        "",
        "KV cache in       bytes a token   MiB of a whole context",
        *(
            f"  {name:12} {size:12,} {size * found.context_tokens / 2**20:15,.1f}"
            for name, size in found.kv_bytes_per_token.items()
        ),
    ]
    return "\n".join(lines)


def _needed(checkpoint: Checkpoint, name: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    text = name if name == STORED else f"{{attn: {name}, mlp: {name}, lm_head: {name}, embed: {name}}}"
    tied_head = checkpoint.config.tied_head
    return weight_bytes(
        parse_precision(text), shapes, checkpoint.stored_bytes, tied_head=tied_head, head_apart=native.library() is None
    )


def _stored_by_type(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    if not checkpoint.path.is_dir():
        for entry in read_header(checkpoint.path).tensors.values():
            sizes[entry.type.name] += entry.size_bytes
    elif (checkpoint.path / PACKED_FILE).exists():
        for packed in read_packed(checkpoint.path).weights.values():
            for tensor in packed["tensors"].values():
                sizes[tensor["dtype"]] += tensor["size"]
    else:
        for stored in read_checkpoint(checkpoint.path).tensors.values():
            sizes[stored.dtype] += stored.size_bytes
    return dict(sizes.most_common())
