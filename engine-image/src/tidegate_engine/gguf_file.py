"""Reads the header of a GGUF file: the metadata, and where each tensor lies.

No torch, and no meaning: `weights_gguf` and `tokenizer` give it one. Whatever is wrong ends as a ModelError. The
header is parsed here, not by `gguf.GGUFReader`, which takes seconds for a vocabulary and trips over a cut file.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tidegate_engine.weights import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT_BYTES = 32
MAX_HEADER_BYTES = 256 << 20
"""Ten times that of the largest vocabulary known; in memory a header takes up to sixteen times its bytes."""
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies in the file. `shape` has the outermost dimension first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A header, whose tensors were all found to lie within the file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorEntry]

    def invalid(self, why: str) -> ModelError:
        return ModelError("ModelInvalid", f"{self.path} {why}")


def read_header(path: Path) -> GgufFile:
    """Parse the header of `path`; raises ModelError."""
    with map_file(path) as data:
        reader = _Reader(path, data)
        if data[:4] != MAGIC:
            raise reader.invalid("is not a GGUF file")
        reader.position = 4
        version = reader.number("I")
        if version not in VERSIONS:
            raise reader.invalid(f"has GGUF version {version}; supported are {', '.join(map(str, VERSIONS))}")
        tensor_count, entry_count = reader.number("Q"), reader.number("Q")
        metadata: dict[str, object] = {}
        for _ in range(entry_count):
            name = reader.string()
            metadata[name] = reader.value(reader.number("I"))
        unplaced = [reader.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise reader.invalid(f"is damaged: its alignment is {alignment!r}")
        base = -(-reader.position // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for entry in unplaced:
            placed = TensorEntry(entry.name, entry.shape, entry.type, base + entry.start, entry.size_bytes)
            end = placed.start + placed.size_bytes
            if end > len(data):
                raise reader.invalid(f"is truncated: it has {len(data)} bytes, and {entry.name} ends at byte {end}")
            if entry.name in tensors:
                raise reader.invalid(f"is damaged: it has two tensors named {entry.name}")
            tensors[entry.name] = placed
        return GgufFile(path, metadata, tensors)


def read_metadata_bytes(path: Path) -> bytes:
    """A GGUF file with the metadata of `path` and no tensors; raises ModelError."""
    with map_file(path) as data:
        reader = _Reader(path, data)
        reader.position = 16
        for _ in range(reader.number("Q")):
            reader.string()
            reader.value(reader.number("I"))
        return data[:8] + bytes(8) + data[16 : reader.position]


@contextmanager
def map_file(path: Path) -> Iterator[mmap.mmap]:
    """The file's bytes, not read before they are used; raises ModelError when it cannot be opened."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError("ModelNotFound", f"{path} does not exist") from None
    except ValueError:
        raise ModelError("ModelInvalid", f"{path} is empty") from None
    except OSError as error:
        raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    with data:
        yield data


class _Reader:
    """A position in the header. Counts in a damaged file may be anything: nothing is taken beyond the file's end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.position = 0
        self._path = path
        self._data = data

    def invalid(self, why: str) -> ModelError:
        return ModelError("ModelInvalid", f"{self._path} {why}")

    def number(self, code: str) -> int:
        return int(self._unpack("<" + code)[0])

    def string(self) -> str:
        length = self.number("Q")
        start = self._advance(length)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError:
            raise self.invalid(f"is damaged: the text at byte {start} is not UTF-8") from None

    def value(self, kind: int, depth: int = 0) -> object:
        """A metadata value of the GGUF type `kind`: a number, a text, or a list of these."""
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= MAX_ARRAY_DEPTH:
            raise self.invalid(f"is damaged: a value at byte {self.position} has the unknown type {kind}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            return list(self._unpack(f"<{self._checked(count)}{_SCALARS[item]}"))
        return [self.value(item, depth + 1) for _ in range(self._checked(count))]

    def tensor(self) -> TensorEntry:
        """A tensor's entry, its `start` still counted from the first tensor."""
        name = self.string()
        dimensions = self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise self.invalid(f"is damaged: {name} has {dimensions} dimensions")
        shape = tuple(reversed(self._unpack(f"<{dimensions}Q")))
        number, start = self.number("I"), self.number("Q")
        try:
            kind = GGMLQuantizationType(number)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self.invalid(f"has {name} in the unknown quantisation type {number}") from None
        values = 1
        for extent in shape:
            values *= extent
        if not shape or shape[-1] % block_values:
            raise self.invalid(f"is damaged: {name} has the shape {shape}, which {kind.name} cannot hold")
        return TensorEntry(name, shape, kind, start, values // block_values * block_bytes)

    def _unpack(self, layout: str) -> tuple[int, ...]:
        start = self._advance(struct.calcsize(layout))
        return struct.unpack_from(layout, self._data, start)

    def _advance(self, length: int) -> int:
        start = self.position
        if start + length > len(self._data):
            raise self.invalid(f"is truncated: it ends at byte {len(self._data)}, within its header")
        if start + length > MAX_HEADER_BYTES:
            raise self.invalid(f"has a header of more than {MAX_HEADER_BYTES >> 20} MiB, which no model needs")
        self.position = start + length
        return start

    def _checked(self, count: int) -> int:
        """A count of items, of which each takes a byte or more."""
        if count > len(self._data) - self.position:
            raise self.invalid(f"is truncated: it ends at byte {len(self._data)}, within its header")
        return count
