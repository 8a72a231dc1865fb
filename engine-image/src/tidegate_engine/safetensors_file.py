"""Reads the headers of a checkpoint in safetensors files, one or many with an index: where each tensor lies.

No torch, and no meaning: the readers of weights give it one. Whatever is wrong ends as a ModelError. A file must be
covered by its tensors without a hole or an overlap, and an index must name exactly the tensors that its files hold.
"""

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from tidegate_engine.weights import ModelError, parse_json_object, read_json_object

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMENSIONS = 8
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: its bytes are `[start, start + size_bytes)` of the file `path`."""

    name: str
    dtype: str
    """As the format names it: a key of DTYPE_BYTES."""
    shape: tuple[int, ...]
    path: Path
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsCheckpoint:
    """The tensors of all files of a folder, each once."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def invalid(self, why: str) -> ModelError:
        return ModelError("ModelInvalid", f"{self.folder} {why}")


def read_checkpoint(folder: Path) -> SafetensorsCheckpoint:
    """The checkpoint in `folder`: what its index names, or else its only file. Raises ModelError."""
    if (folder / INDEX_FILE).exists():
        return SafetensorsCheckpoint(folder, _read_indexed(folder))
    file = folder / SINGLE_FILE
    if not file.exists():
        found = sorted(folder.glob("*.safetensors"))
        if not found:
            raise ModelError("ModelNotFound", f"the folder {folder} holds no .safetensors file")
        if len(found) > 1:
            names = ", ".join(each.name for each in found[:8])
            raise ModelError(
                "ModelInvalid", f"the folder {folder} holds several .safetensors files ({names}) and no {INDEX_FILE}"
            )
        file = found[0]
    return SafetensorsCheckpoint(folder, read_file_header(file))


def read_file_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, all of them found to lie within it; raises ModelError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _invalid(path, "is empty" if not prefix else f"is truncated: it has {size} bytes")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES:
                raise _invalid(path, f"is no safetensors file, or damaged: it claims a header of {length} bytes")
            if 8 + length > size:
                raise _invalid(path, f"is truncated: it has {size} bytes, and its header ends at byte {8 + length}")
            content = file.read(length)
    except FileNotFoundError:
        raise ModelError("ModelNotFound", f"{path} does not exist") from None
    except OSError as error:
        raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    header = parse_json_object(content, path=path)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict):
        raise _invalid(path, f"is damaged: its {_METADATA} is no object")
    base = 8 + length
    tensors = {name: _entry(name, described, path=path, base=base) for name, described in header.items()}
    _check_cover(path, list(tensors.values()), start=base, end=size)
    return tensors


def map_files(checkpoint: SafetensorsCheckpoint) -> dict[Path, mmap.mmap]:
    """The files' bytes, read when they are used.

    Private copies of pages that are written to, so that torch takes them for its own; what is not written to is shared
    with the page cache. A map lives as long as the tensors made from it.
    """
    maps: dict[Path, mmap.mmap] = {}
    for path in {tensor.path for tensor in checkpoint.tensors.values()}:
        try:
            with path.open("rb") as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    return maps


def _read_indexed(folder: Path) -> dict[str, StoredTensor]:
    path = folder / INDEX_FILE
    places = read_json_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise _invalid(path, "is damaged: it has no weight_map")
    for file in places.values():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise _invalid(path, f"is damaged: it names {file!r:.200}, which is no .safetensors file in its folder")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())):
        for name, tensor in read_file_header(folder / file).items():
            if name not in places:
                raise _invalid(path, f"does not name {name}, which {file} holds")
            if name in tensors:
                raise _invalid(path, f"is ambiguous: both {tensors[name].path.name} and {file} hold {name}")
            if places[name] != file:
                raise _invalid(path, f"says that {places[name]} holds {name}; it is in {file}")
            tensors[name] = tensor
    if missing := sorted(places.keys() - tensors.keys()):
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise _invalid(path, f"names {missing[0]}{others}, which {places[missing[0]]} does not hold")
    return tensors


def _entry(name: str, described: object, *, path: Path, base: int) -> StoredTensor:
    shown = f"{name!r:.200}"
    if not isinstance(described, dict):
        raise _invalid(path, f"is damaged: its entry for {shown} is no object")
    dtype, shape, offsets = described.get("dtype"), described.get("shape"), described.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _invalid(path, f"has {shown} in the type {dtype!r:.40}; supported are {', '.join(DTYPE_BYTES)}")
    if not _is_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise _invalid(path, f"is damaged: {shown} has the shape {shape!r:.80}")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise _invalid(path, f"is damaged: {shown} has the data_offsets {offsets!r:.80}")
    size = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != size:
        raise _invalid(path, f"is damaged: {shown} takes {size} bytes by its shape, and lies at {offsets!r:.80}")
    return StoredTensor(name, dtype, tuple(shape), path, base + offsets[0], size)


def _is_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _check_cover(path: Path, tensors: Sequence[StoredTensor], *, start: int, end: int) -> None:
    """Every byte belongs to one tensor: else something is hidden, missing, or claimed twice."""
    position = start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.size_bytes)):
        if tensor.start + tensor.size_bytes > end:
            last = tensor.start + tensor.size_bytes
            raise _invalid(path, f"is truncated: it has {end} bytes, and {tensor.name!r:.200} ends at byte {last}")
        if tensor.start != position:
            what = "overlaps another tensor" if tensor.start < position else "follows bytes of no tensor"
            raise _invalid(path, f"is damaged: {tensor.name!r:.200} {what}")
        position += tensor.size_bytes
    if position != end:
        raise _invalid(path, f"is damaged: its last {end - position} bytes belong to no tensor")


def _invalid(path: Path, why: str) -> ModelError:
    return ModelError("ModelInvalid", f"{path} {why}")
