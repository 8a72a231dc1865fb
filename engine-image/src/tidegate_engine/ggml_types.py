"""A GGUF tensor's bytes as a weight, in the type that the file has it in; nothing is inflated.

Owns which types are multiplied as what, and the check for values that are not finite. The layouts that torch reads are
`tidegate_kernels.ggml`'s; of the rarer types `gguf` decodes a block of rows at a time.
"""

import mmap
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from torch import Tensor

from tidegate_engine.gguf_file import TensorEntry
from tidegate_kernels.ggml import GROUP_TYPES, decoder_of, groups_of
from tidegate_kernels.quantised import Blocks
from tidegate_kernels.weight import Dense, Weight, concat_rows

CHUNK_VALUES = 1 << 20
"""Values rearranged at once: meanwhile each takes several bytes."""
_FLOATS = {
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F64: torch.float64,
}
_SCALE_BYTES = {
    **dict.fromkeys(
        ("Q4_0", "Q5_0", "Q8_0", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ4_NL", "IQ4_XS"), (0,)
    ),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
"""Where a block has its fp16 numbers. Integers times these are finite where these are."""


class TensorBytes:
    """The bytes of a file's tensors, each by itself: read, or mapped where they stay what is multiplied.

    A map is private and writable for torch's sake, and lives as long as a tensor made from it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._file = self._path.open("rb")
        self._map: mmap.mmap | None = None
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def of(self, entry: TensorEntry, *, mapped: bool) -> Tensor:
        """uint8, one dimension."""
        if mapped:
            self._map = self._map or mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)
            return torch.frombuffer(self._map, dtype=torch.uint8, count=entry.size_bytes, offset=entry.start)
        stored = torch.empty(entry.size_bytes, dtype=torch.uint8)
        self._file.seek(entry.start)
        self._file.readinto(stored.numpy().data)
        return stored


def keeps_file_bytes(kind: GGMLQuantizationType) -> bool:
    """Whether `stored_weight` keeps the bytes given, so that a mapped file can serve as memory."""
    return kind not in _FLOATS and kind.name not in GROUP_TYPES


def stored_weight(kind: GGMLQuantizationType, shape: tuple[int, ...], stored: Tensor) -> Weight:
    """The tensor of `shape` in these bytes (uint8, one dimension), more than two dimensions as rows below each other.

    Raises NotImplementedError for an unknown type.
    """
    if kind in _FLOATS:
        values = stored.view(_FLOATS[kind]).view(shape)
        return Dense(values if kind != GGMLQuantizationType.F64 else values.float())
    rows = stored.view(prod(shape[:-1]), -1)
    if kind.name in GROUP_TYPES:
        step = max(1, CHUNK_VALUES // shape[-1])
        return concat_rows([groups_of(kind.name, part) for part in rows.split(step)])  # type: ignore[no-untyped-call]
    return blocks_of(kind, rows, columns=shape[-1])


def blocks_of(kind: GGMLQuantizationType, stored: Tensor, *, columns: int) -> Blocks:
    """Rows of the type's blocks (uint8 `[rows, bytes of a row]`). Raises NotImplementedError for an unknown type."""
    return Blocks(kind.name.lower(), stored, columns, GGML_QUANT_SIZES[kind][0], decoder_of_type(kind))


def is_finite(kind: GGMLQuantizationType, weight: Weight, stored: Tensor) -> bool:
    """Whether all of `weight`'s values are numbers. Takes the scales alone where these decide."""
    if kind.name not in _SCALE_BYTES:
        return bool(torch.isfinite(weight.dequantised().sum()))
    blocks = stored.view(-1, GGML_QUANT_SIZES[kind][1])
    return all(
        bool(torch.isfinite(blocks[:, place : place + 2].contiguous().view(torch.float16)).all())
        for place in _SCALE_BYTES[kind.name]
    )


def decoder_of_type(kind: GGMLQuantizationType) -> Callable[[Tensor], Tensor]:
    """What turns rows of the type's blocks into values. Raises NotImplementedError for an unknown type."""
    if own := decoder_of(kind.name):
        return own
    decode = partial(_decode, kind)
    decode(torch.zeros(1, GGML_QUANT_SIZES[kind][1], dtype=torch.uint8))
    return decode


def _decode(kind: GGMLQuantizationType, stored: Tensor) -> Tensor:
    return torch.from_numpy(np.require(quants.dequantize(stored.numpy(), kind), np.float32, ["C", "W"]))
