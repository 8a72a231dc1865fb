"""The engine's own format: a model's weights as they are multiplied, mapped page by page, each with a checksum.

A folder with PACKED_FILE (magic, length and sha256 of a JSON header, the header, then tensors at page boundaries) and
what the tokenizer is made of. Made by `tidegate-engine pack`, read by `checkpoint`; a damaged file is refused.
"""

import hashlib
import json
import mmap
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope
from tidegate_engine.ggml_types import blocks_of
from tidegate_engine.gguf_file import read_metadata_bytes
from tidegate_engine.pooling import Pooling
from tidegate_engine.precision import Precision
from tidegate_engine.quantize import to_precision
from tidegate_engine.request import PoolingKind
from tidegate_engine.transformer import fused_names
from tidegate_engine.weights import PACKED_FILE, TOKENIZER_GGUF, ModelError
from tidegate_kernels.quantised import Blocks, Fp8, Groups, Int8
from tidegate_kernels.weight import Dense, Stacked, Weight, concat_rows

MAGIC = b"TIDEGATE"
VERSION = 1
PAGE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
_START = struct.Struct("<8sIQ32s")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int16,
        torch.int64,
    )
}  # fmt: skip
_TOKENIZER_FILES = ("*.json", "*.jinja")
_NOT_FOR_TOKENIZERS = (".safetensors.index.json",)


@dataclass(frozen=True, slots=True)
class PackedModel:
    """A packed file whose header was read, and whose weights were not."""

    path: Path
    name: str
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]
    weights: Mapping[str, Mapping[str, Any]]
    pooling: Pooling

    def invalid(self, why: str) -> ModelError:
        return _invalid(self.path, why)

    @property
    def stored_bytes(self) -> dict[str, int]:
        """Bytes of each parameter; those of fused ones under the first's name."""
        sizes: dict[str, int] = {}
        for joined, entry in self.weights.items():
            first, *others = _split(joined)
            sizes[first] = sum(tensor["size"] for tensor in entry["tensors"].values())
            sizes |= dict.fromkeys(others, 0)
        return sizes


def write_packed(
    folder: Path,
    parameters: dict[str, Weight],
    config: DecoderConfig,
    *,
    name: str,
    eos_token_ids: tuple[int, ...],
    pooling: Pooling | None = None,
) -> int:
    """Write PACKED_FILE, matrices of the same rows fused; returns its bytes. The dictionary is emptied on the way."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, dict[str, Any]] = {}
    with (folder / (PACKED_FILE + ".bodies")).open("w+b") as bodies:
        for joined, weight in _fused(parameters, config):
            kind, fields, tensors = _described(weight)
            entries[joined] = {
                "kind": kind,
                "fields": fields,
                "tensors": {part: _append(bodies, tensor) for part, tensor in tensors.items()},
            }
        header = json.dumps(
            {
                "name": name,
                "eos_token_ids": eos_token_ids,
                "pooling": asdict(pooling or Pooling()),
                "config": asdict(config),
                "weights": entries,
            }
        ).encode()
        with (folder / PACKED_FILE).open("wb") as file:
            file.write(_START.pack(MAGIC, VERSION, len(header), hashlib.sha256(header).digest()))
            file.write(header)
            file.write(bytes(-file.tell() % PAGE_BYTES))
            bodies.seek(0)
            shutil.copyfileobj(bodies, file, 1 << 22)
            size = file.tell()
    (folder / (PACKED_FILE + ".bodies")).unlink()
    return size


def copy_tokenizer(source: Path, folder: Path) -> None:
    """What a packed model's tokenizer and chat template are made from: a GGUF file's metadata, or a folder's files."""
    if not source.is_dir():
        (folder / TOKENIZER_GGUF).write_bytes(read_metadata_bytes(source))
        return
    for pattern in _TOKENIZER_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(_NOT_FOR_TOKENIZERS):
                shutil.copyfile(file, folder / file.name)


def read_packed(folder: Path) -> PackedModel:
    """The header, its checksum and the places of all tensors checked; raises ModelError."""
    path = folder / PACKED_FILE
    try:
        with path.open("rb") as file:
            start = file.read(_START.size)
            if len(start) < _START.size or not start.startswith(MAGIC):
                raise _invalid(path, "is no packed model")
            _, version, length, digest = _START.unpack(start)
            if version != VERSION:
                raise _invalid(path, f"has the version {version}; supported is {VERSION}: pack the model again")
            size = path.stat().st_size
            if length > min(size, MAX_HEADER_BYTES):
                raise _invalid(path, f"is truncated: it has {size} bytes, and claims a header of {length}")
            header = file.read(length)
    except OSError as error:
        raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(header).digest() != digest:
        raise _invalid(path, "is damaged: its header does not have the checksum that it should")
    # What has its checksum is as it was written.
    described = json.loads(header)
    base = -(-(_START.size + length) // PAGE_BYTES) * PAGE_BYTES
    for entry in described["weights"].values():
        for tensor in entry["tensors"].values():
            tensor["start"] += base
            if (end := tensor["start"] + tensor["size"]) > size:
                raise _invalid(path, f"is truncated: it has {size} bytes, and a tensor ends at byte {end}")
    pooling = described.get("pooling", {})
    return PackedModel(
        path,
        described["name"],
        _config(described["config"]),
        tuple(described["eos_token_ids"]),
        described["weights"],
        Pooling(**({**pooling, "kind": PoolingKind(pooling["kind"])} if pooling else {})),
    )


def load_packed(
    folder: Path, *, dtype: torch.dtype, precision: Precision | None = None
) -> tuple[DecoderConfig, dict[str, Weight]]:
    """Configuration and parameters, those that were fused under their names with `+` between; raises ModelError.

    What is wanted as it is stored stays in the file's pages. Without a policy everything is in `dtype`.
    """
    model = read_packed(folder)
    with model.path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    pages.madvise(mmap.MADV_WILLNEED)
    precision = precision or Precision(dtype=str(dtype).removeprefix("torch."))
    _check_sums(model, pages)
    parameters: dict[str, Weight] = {}
    for joined, entry in model.weights.items():
        first, *_ = _split(joined)
        weight = _restored(entry, {part: _tensor(place, pages) for part, place in entry["tensors"].items()})
        wanted = precision.of(first, tied_head=model.config.tied_head)
        parameters[joined] = Dense(weight.dequantised(dtype)) if wanted is None else to_precision(first, weight, wanted)
    return model.config, parameters


def _fused(parameters: dict[str, Weight], config: DecoderConfig) -> Iterator[tuple[str, Weight]]:
    for names in fused_names(config):
        together = concat_rows([parameters[name] for name in names])
        if not isinstance(together, Stacked):
            for name in names:
                del parameters[name]
            prefix = names[0].rpartition(".")[0]
            yield f"{prefix}.{'+'.join(name.rpartition('.')[2] for name in names)}", together
    for name in list(parameters):
        yield name, parameters.pop(name)


def _split(joined: str) -> list[str]:
    """The parameters that were fused under a name: `layers.0.q+k+v`."""
    prefix, dot, last = joined.rpartition(".")
    return [prefix + dot + name for name in last.split("+")]


def _described(weight: Weight) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    match weight:
        case Dense():
            return "dense", {}, {"values": weight.values}
        case Fp8():
            return (
                "fp8",
                {"in_blocks": weight.in_blocks, "quantised_activations": weight.quantised_activations},
                {"codes": weight.codes, "scales": weight.scales},
            )
        case Int8():
            return "int8", {}, {"codes": weight.codes, "scales": weight.scales}
        case Groups():
            tensors = {f"plane{number}": plane for number, plane in enumerate(weight.planes)}
            optional = {"zeros": weight.zeros, "minima": weight.minima, "order": weight.order}
            tensors |= {name: each for name, each in optional.items() if isinstance(each, Tensor)}
            fields = {"bits": weight.bits, "zeros": weight.zeros if isinstance(weight.zeros, int) else None}
            return "groups", fields, tensors | {"scales": weight.scales}
        case Blocks():
            return "blocks", {"name": weight.name, "columns": weight.columns}, {"stored": weight.stored}
    raise TypeError(f"a weight in {weight.precision} cannot be packed")


def _restored(entry: Mapping[str, Any], tensors: dict[str, Tensor]) -> Weight:
    fields: Mapping[str, Any] = entry["fields"]
    restore: Mapping[str, Callable[[], Weight]] = {
        "dense": lambda: Dense(tensors["values"]),
        "fp8": lambda: Fp8(tensors["codes"], tensors["scales"], **fields),
        "int8": lambda: Int8(tensors["codes"], tensors["scales"]),
        "groups": lambda: Groups(
            bits=fields["bits"],
            planes=tuple(tensors[name] for name in sorted(tensors) if name.startswith("plane")),
            scales=tensors["scales"],
            zeros=tensors["zeros"] if fields["zeros"] is None else fields["zeros"],
            minima=tensors.get("minima"),
            order=tensors.get("order"),
        ),
        "blocks": lambda: blocks_of(
            GGMLQuantizationType[fields["name"].upper()], tensors["stored"], columns=fields["columns"]
        ),
    }
    return restore[entry["kind"]]()


def _append(file: BinaryIO, tensor: Tensor) -> dict[str, Any]:
    file.write(bytes(-file.tell() % PAGE_BYTES))
    start = file.tell()
    data = tensor.contiguous().view(torch.uint8).view(-1).numpy().data
    file.write(data)
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "start": start,
        "size": len(data),
        "crc32": zlib.crc32(data),
    }


def _tensor(place: Mapping[str, Any], pages: mmap.mmap) -> Tensor:
    dtype = _DTYPES[place["dtype"]]
    return torch.frombuffer(pages, dtype=dtype, count=prod(place["shape"]), offset=place["start"]).view(place["shape"])


def _check_sums(model: PackedModel, pages: mmap.mmap) -> None:
    places = [
        (f"{name}.{part}", place) for name, entry in model.weights.items() for part, place in entry["tensors"].items()
    ]
    view = memoryview(pages)

    def is_sound(named: tuple[str, Mapping[str, Any]]) -> bool:
        _, place = named
        return zlib.crc32(view[place["start"] : place["start"] + place["size"]]) == int(place["crc32"])

    # zlib lets other threads run meanwhile.
    with ThreadPoolExecutor(max_workers=4) as threads:
        for (name, _), sound in zip(places, threads.map(is_sound, places), strict=True):
            if not sound:
                raise model.invalid(f"is damaged: {name} does not have the checksum that it should")


def _config(described: Mapping[str, Any]) -> DecoderConfig:
    layers = tuple(
        LayerConfig(**{**layer, "experts": None if layer["experts"] is None else Experts(**layer["experts"])})
        for layer in described["layers"]
    )
    ropes = tuple(_rope(rope) for rope in described["ropes"])
    return DecoderConfig(**{**described, "layers": layers, "ropes": ropes})


def _rope(described: Mapping[str, Any]) -> Rope:
    lists = {name: tuple(described[name]) for name in ("divisors", "long_divisors")}
    return Rope(**{**described, **lists})


def _invalid(path: Path, why: str) -> ModelError:
    return ModelError("ModelInvalid", f"{path} {why}")
