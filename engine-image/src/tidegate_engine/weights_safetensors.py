"""The parameters of a decoder from a folder of safetensors files, under the decoder's own names.

Knows the families' tensor names; the files' layout is `safetensors_file`'s, the configuration `model_config`'s. Every
parameter is loaded exactly once and every tensor is used, or a ModelError says which one was not.
"""

import mmap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, parameter_shapes
from tidegate_engine.model_config import Family, decoder_config, family_of, read_settings
from tidegate_engine.precision import Precision
from tidegate_engine.quantize import CHUNK_VALUES, to_precision
from tidegate_engine.safetensors_file import (
    SafetensorsCheckpoint,
    StoredTensor,
    map_files,
    read_checkpoint,
)
from tidegate_engine.transformer import fused_names
from tidegate_engine.weights import Source, and_others
from tidegate_engine.weights_quantised import QuantisationError, Scheme, parts_of, read_scheme
from tidegate_kernels.quantised import Scaled
from tidegate_kernels.weight import Dense, Stacked, Weight, concat_rows, slice_rows

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED_DTYPES = DTYPES | {
    "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
MAX_INDEX_DIGITS = 4
"""Of a layer's number; Python refuses to read one of thousands of digits."""
_TOP = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LLAMA = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "attention_output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "phi3": _LLAMA
    | dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj")
    | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    "gemma": _LLAMA
    | {
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
    "mixtral": _LLAMA
    | {
        "router": "block_sparse_moe.gate",
        "experts.gate": "block_sparse_moe.experts.{}.w1",
        "experts.up": "block_sparse_moe.experts.{}.w3",
        "experts.down": "block_sparse_moe.experts.{}.w2",
    },
    "qwen3_moe": _LLAMA
    | {"router": "mlp.gate"}
    | {f"experts.{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down")},
}
"""A layer's parts, for each way of naming them."""
_ROOTS = ("model.", "language_model.model.", "model.language_model.", "")
"""Where the decoder lies: as usual, in two ways in a model that also sees, and in a file of the decoder alone."""
_STACKED_EXPERTS = {"mixtral": "block_sparse_moe.switch_mlp", "qwen3_moe": "mlp.switch_mlp"}
"""Where MLX has a layer's experts, one below the other in three tensors."""
_UNUSED_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_UNUSED_ENDS = (".rotary_emb.inv_freq", ".q_scale", ".k_scale", ".v_scale")
"""Tables that old checkpoints hold beside their parameters, and scales for a quantised cache; they are computed."""


def load_safetensors(
    folder: Path, *, dtype: torch.dtype, precision: Precision | None = None
) -> tuple[DecoderConfig, dict[str, Weight]]:
    """Configuration and parameters (as `parameter_shapes` names them) of a folder; raises ModelError.

    Matrices are in the precision that the policy gives their kind, without one in `dtype`; all else is in `dtype`. What
    is kept as it is stored stays in the files, mapped.
    """
    model = _open_folder(folder)
    checkpoint, config = model.checkpoint, model.config
    _check_tensors(model)
    maps = map_files(checkpoint)
    _check_tied_head(checkpoint, config, maps=maps)
    _check_padding_biases(model, maps)
    precision = precision or Precision(dtype=str(dtype).removeprefix("torch."))
    parameters: dict[str, Weight] = {}
    fused = {name: names for names in fused_names(config) for name in names}
    for tensor, sharing in groupby(model.sources, key=lambda name: model.sources[name].tensor):
        names = list(sharing)
        stored = _read_weight(model, tensor, maps)
        for name in names:
            source = model.sources[name]
            weight = slice_rows(stored, source.first_row, source.rows)
            wanted = precision.of(name, tied_head=config.tied_head)
            if wanted is not None:
                parameters[name] = to_precision(name, weight, wanted)
                continue
            values = weight.dequantised(dtype)
            if model.norm_offset and name.endswith("norm"):
                values = (weight.dequantised() + model.norm_offset).to(dtype)
            parameters[name] = Dense(values)
        _release_pages(_entries(model, [tensor]), maps)
        for together in dict.fromkeys(fused[name] for name in names if name in fused):
            if parameters.keys() >= set(together) and _fuse(parameters, together):
                _release_pages(_entries(model, {model.sources[each].tensor for each in together}), maps)
    return config, parameters


def _fuse(parameters: dict[str, Weight], names: Sequence[str]) -> bool:
    """Copy weights that may lie in a file's pages one after the other, as the decoder joins them: once they are used
    from a copy, the pages can go. False where that is not to be done."""
    parts = [parameters[name] for name in names]
    if not all(isinstance(part, Dense | Scaled) for part in parts):
        return False
    together, first = concat_rows(parts), 0
    if isinstance(together, Stacked):
        return False
    for name, part in zip(names, parts, strict=True):
        parameters[name] = slice_rows(together, first, part.shape[0])
        first += part.shape[0]
    return True


def _entries(model: "_Folder", tensors: Iterable[str]) -> list[StoredTensor]:
    return [model.checkpoint.tensors[name] for tensor in tensors for name in _stored_names(model, tensor)]


def _release_pages(entries: Sequence[StoredTensor], maps: Mapping[Path, mmap.mmap]) -> None:
    """Let go of what was read from a file: what was copied is not needed any more, and what was not is mapped again
    where it is used. Nothing has been written there."""
    page = mmap.PAGESIZE
    for entry in entries:
        first, end = -(-entry.start // page) * page, (entry.start + entry.size_bytes) // page * page
        if end > first:
            maps[entry.path].madvise(mmap.MADV_DONTNEED, first, end - first)


def _read_weight(model: "_Folder", tensor: str, maps: Mapping[Path, mmap.mmap]) -> Weight:
    checkpoint = model.checkpoint
    module = tensor.removesuffix(".weight")
    parts = parts_of(module, checkpoint.tensors)
    if model.scheme is None or not parts:
        return Dense(read_tensor(checkpoint, checkpoint.tensors[tensor], maps))
    shape = model.tensor_shapes[tensor]
    try:
        tensors = {part: _map_tensor(checkpoint.tensors[name], maps) for part, name in parts.items()}
        weight = model.scheme.weight(module, tensors)
    except QuantisationError as error:
        raise checkpoint.invalid(str(error)) from None
    if weight.shape != (_row_count(shape), shape[-1]):
        raise checkpoint.invalid(f"has {module} in the shape {weight.shape}; expected is {shape}")
    return weight


def quantisation_of(folder: Path) -> str | None:
    """The method by which a folder's matrices were quantised; raises ModelError."""
    settings = read_settings(folder)
    try:
        scheme = read_scheme(settings.values)
    except QuantisationError as error:
        raise settings.invalid(str(error)) from None
    return None if scheme is None else scheme.method


def describe_folder(folder: Path) -> tuple[DecoderConfig, dict[str, int]]:
    """The decoder that a folder holds, and the bytes that each parameter takes there; raises ModelError."""
    model = _open_folder(folder)
    _check_tensors(model)
    shapes = model.tensor_shapes
    return model.config, {
        name: _stored_bytes(model, source.tensor) * source.rows // _row_count(shapes[source.tensor])
        for name, source in model.sources.items()
    }


def _stored_bytes(model: "_Folder", tensor: str) -> int:
    return sum(model.checkpoint.tensors[name].size_bytes for name in _stored_names(model, tensor))


def _stored_names(model: "_Folder", tensor: str) -> list[str]:
    """The tensor's own name, or those of its parts where it is quantised."""
    parts = parts_of(tensor.removesuffix(".weight"), model.checkpoint.tensors) if model.scheme is not None else {}
    return list(parts.values()) or [tensor]


def _row_count(shape: tuple[int, ...]) -> int:
    """Rows of a tensor whose experts, if it has several, are one below the other."""
    return prod(shape[:-1]) if len(shape) > 1 else shape[0]


@dataclass(frozen=True, slots=True)
class _Naming:
    """A checkpoint's names for a layer's parts, and where its decoder lies: one of `_ROOTS`."""

    parts: Mapping[str, str]
    root: str

    @property
    def stacks_experts(self) -> bool:
        return "{}" not in self.parts.get("experts.gate", "{}")

    def rooted(self, stem: str) -> str:
        """`model.norm` or `lm_head` as the checkpoint has it."""
        if stem.startswith("model."):
            return self.root + stem.removeprefix("model.")
        return _head_root(self.root) + stem


@dataclass(frozen=True, slots=True)
class _Folder:
    checkpoint: SafetensorsCheckpoint
    config: DecoderConfig
    naming: _Naming
    sources: Mapping[str, Source]
    norm_offset: float
    scheme: Scheme | None

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """What each tensor's shape must be, were it not quantised, by its name."""
        shapes = parameter_shapes(self.config)
        found: dict[str, tuple[int, ...]] = {}
        for name, source in self.sources.items():
            rows = source.first_row + source.rows
            stacked = self.naming.stacks_experts and ".experts." in name
            found[source.tensor] = (
                *((rows // source.rows, source.rows) if stacked else (rows,)),
                *shapes[name][1:],
            )
        return found


def _open_folder(folder: Path) -> _Folder:
    settings = read_settings(folder)
    checkpoint = _without_unused(read_checkpoint(folder))
    family = family_of(settings)
    naming = _naming(checkpoint, family)
    try:
        scheme = read_scheme(settings.values)
        config = decoder_config(settings, _stored_shapes(checkpoint, naming, scheme))
    except QuantisationError as error:
        raise settings.invalid(str(error)) from None
    matrices = sum(
        1 if layer.experts is None or naming.stacks_experts else layer.experts.count for layer in config.layers
    )
    if matrices > len(checkpoint.tensors):
        raise checkpoint.invalid(
            f"has {len(checkpoint.tensors)} tensors, fewer than its configuration's layers and experts, {matrices}"
        )
    return _Folder(checkpoint, config, naming, _sources(config, naming), family.norm_offset, scheme)


def _sources(config: DecoderConfig, naming: _Naming) -> dict[str, Source]:
    """Where each of `parameter_shapes` is stored; those in one tensor follow each other."""
    shapes = parameter_shapes(config)
    sources: dict[str, Source] = {}
    used: dict[str, int] = {}
    for name, shape in shapes.items():
        tensor = _tensor_name(name, naming)
        sources[name] = Source(tensor, used.get(tensor, 0), shape[0])
        used[tensor] = used.get(tensor, 0) + shape[0]
    return dict(sorted(sources.items(), key=lambda item: (item[1].tensor, item[1].first_row)))


def read_tensor(checkpoint: SafetensorsCheckpoint, entry: StoredTensor, maps: Mapping[Path, mmap.mmap]) -> Tensor:
    """A floating-point tensor's values, in the file's pages where they lie well; raises ModelError."""
    values = _map_tensor(entry, maps)
    # A sum in fp32 makes fp32 values of all of them first.
    for chunk in values.view(-1).split(CHUNK_VALUES):  # type: ignore[no-untyped-call]
        if not bool(torch.isfinite(chunk.sum(dtype=torch.float32))):
            raise checkpoint.invalid(f"is damaged: {entry.name} holds values that are not finite")
    return values


def _map_tensor(entry: StoredTensor, maps: Mapping[Path, mmap.mmap]) -> Tensor:
    dtype = QUANTISED_DTYPES[entry.dtype]
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    values = torch.frombuffer(maps[entry.path], dtype=torch.uint8, offset=entry.start, count=entry.size_bytes)
    if entry.start % dtype.itemsize:
        values = values.clone()
    return values.view(dtype).view(entry.shape)


def _tensor_name(name: str, naming: _Naming) -> str:
    part, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
    if part in _TOP:
        stem = _TOP[part]
    else:
        _, index, rest = part.split(".", 2)
        if rest.startswith("experts."):
            _, number, rest = rest.split(".")
            stored = naming.parts["experts." + rest].format(number)
        else:
            stored = naming.parts[rest]
        stem = f"model.layers.{index}.{stored}"
    return f"{naming.rooted(stem)}.{kind}"


def _naming(checkpoint: SafetensorsCheckpoint, family: Family) -> _Naming:
    parts, stack = NAMES[family.names], _STACKED_EXPERTS.get(family.names)
    if stack is not None and any(f".{stack}." in name for name in checkpoint.tensors):
        parts = {**parts, **{f"experts.{name}": f"{stack}.{name}_proj" for name in ("gate", "up", "down")}}
    return _Naming(parts, _root(checkpoint))


def _root(checkpoint: SafetensorsCheckpoint) -> str:
    return next((root for root in _ROOTS if f"{root}embed_tokens.weight" in checkpoint.tensors), _ROOTS[0])


def _head_root(root: str) -> str:
    """What stands before the name of the head."""
    return root.removesuffix("model.") if root == "language_model.model." else ""


def _without_unused(checkpoint: SafetensorsCheckpoint) -> SafetensorsCheckpoint:
    used = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if not name.startswith(_UNUSED_PARTS) and not name.endswith(_UNUSED_ENDS)
    }
    return SafetensorsCheckpoint(checkpoint.folder, used)


def _stored_shapes(
    checkpoint: SafetensorsCheckpoint, naming: _Naming, scheme: Scheme | None
) -> dict[str, tuple[int, ...]]:
    """The shapes of the layers' matrices that are stored by themselves or as experts, by the decoder's names."""
    stem = naming.rooted("model.layers.")
    shared = [stored for stored, count in Counter(naming.parts.values()).items() if count > 1]
    parts = {
        stored.format(0): name.replace("experts.", "experts.0.")
        for name, stored in naming.parts.items()
        if stored not in shared
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in checkpoint.tensors):
        index, _, rest = module.removeprefix(stem).partition(".")
        if module.startswith(stem) and index.isdecimal() and len(index) <= MAX_INDEX_DIGITS and rest in parts:
            shape = _module_shape(checkpoint, module, scheme)
            if shape is not None:
                shapes[f"layers.{int(index)}.{parts[rest]}"] = shape
    return shapes


def _module_shape(checkpoint: SafetensorsCheckpoint, module: str, scheme: Scheme | None) -> tuple[int, ...] | None:
    """Of one expert, where they are stacked."""
    quantised = parts_of(module, checkpoint.tensors) if scheme is not None else {}
    if scheme is not None and quantised:
        return scheme.shape(module, {part: checkpoint.tensors[name].shape[-2:] for part, name in quantised.items()})
    tensor = checkpoint.tensors.get(f"{module}.weight")
    return tensor.shape[-2:] if tensor is not None and len(tensor.shape) > 1 else None


def _check_tensors(model: _Folder) -> None:
    """Each source is there, as large as what is stored in it, of a type that can be read; nothing else is."""
    checkpoint, expected = model.checkpoint, model.tensor_shapes
    quantised: dict[str, dict[str, str]] = {}
    if model.scheme is not None:
        modules = {tensor: parts_of(tensor.removesuffix(".weight"), checkpoint.tensors) for tensor in expected}
        quantised = {tensor: parts for tensor, parts in modules.items() if parts}
    if missing := sorted(expected.keys() - checkpoint.tensors.keys() - quantised.keys()):
        raise checkpoint.invalid(f"lacks the tensor {missing[0]}{and_others(missing)}")
    known = expected.keys() | {name for parts in quantised.values() for name in parts.values()}
    known |= _padding_biases(model)
    if model.config.tied_head:
        known |= {_head_name(checkpoint)}
    if foreign := sorted(checkpoint.tensors.keys() - known):
        raise checkpoint.invalid(f"has the tensor {foreign[0]}{and_others(foreign)}, which this engine has no use for")
    for tensor in quantised:
        for name in quantised[tensor].values():
            if checkpoint.tensors[name].dtype not in QUANTISED_DTYPES:
                raise checkpoint.invalid(f"has {name} in the type {checkpoint.tensors[name].dtype}, which is not known")
    for tensor, shape in expected.items():
        if tensor in quantised:
            continue
        entry = checkpoint.tensors[tensor]
        if entry.shape != shape:
            raise checkpoint.invalid(f"has {tensor} in the shape {entry.shape}; expected is {shape}")
        if entry.dtype not in DTYPES:
            raise checkpoint.invalid(f"has {tensor} in the type {entry.dtype}; supported are {', '.join(DTYPES)}")


def _padding_biases(model: _Folder) -> set[str]:
    """Biases that the configuration does not have: some programs write one, of zeros, for each matrix they quantise."""
    if model.scheme is None:
        return set()
    modules = [tensor.removesuffix(".weight") for tensor in model.tensor_shapes]
    quantised = [module for module in modules if parts_of(module, model.checkpoint.tensors)]
    found = {f"{module}.bias" for module in quantised} & model.checkpoint.tensors.keys()
    return found - model.tensor_shapes.keys()


def _check_padding_biases(model: _Folder, maps: Mapping[Path, mmap.mmap]) -> None:
    for name in sorted(_padding_biases(model)):
        entry = model.checkpoint.tensors[name]
        if entry.dtype not in DTYPES or bool(_map_tensor(entry, maps).any()):
            raise model.checkpoint.invalid(f"has the tensor {name}, and its configuration has no such bias")


def _check_tied_head(
    checkpoint: SafetensorsCheckpoint, config: DecoderConfig, *, maps: Mapping[Path, mmap.mmap]
) -> None:
    """A head that is stored although it is the embedding must be the embedding."""
    head = checkpoint.tensors.get(_head_name(checkpoint))
    if not config.tied_head or head is None:
        return
    embedding = next(tensor for name, tensor in checkpoint.tensors.items() if name.endswith("embed_tokens.weight"))
    stored = [
        memoryview(maps[tensor.path])[tensor.start : tensor.start + tensor.size_bytes] for tensor in (head, embedding)
    ]
    if head.dtype != embedding.dtype or stored[0] != stored[1]:
        raise checkpoint.invalid("ties its head to its embedding, and holds a head that differs from it")


def _head_name(checkpoint: SafetensorsCheckpoint) -> str:
    return f"{_head_root(_root(checkpoint))}lm_head.weight"
