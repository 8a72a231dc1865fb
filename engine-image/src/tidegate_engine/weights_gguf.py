"""The parameters of a decoder from a GGUF file, under the decoder's own names, in the precisions asked for.

Knows the architectures' tensor names and oddities; the file's layout is `gguf_file`'s, the maths `transformer`'s.
Every parameter is loaded exactly once and every tensor of the file is used, or a ModelError says which one was not.
"""

from collections.abc import Mapping
from itertools import groupby
from math import prod
from pathlib import Path

import torch

from tidegate_engine.architecture import DecoderConfig, parameter_shapes
from tidegate_engine.ggml_types import TensorBytes, is_finite, keeps_file_bytes, stored_weight
from tidegate_engine.gguf_config import (
    ARCHITECTURES,
    LONG_DIVISORS,
    NAMES,
    ROPE_DIVISORS,
    SHORT_DIVISORS,
    architecture_of,
    has_single_experts,
    read_config,
)
from tidegate_engine.gguf_file import GgufFile, TensorEntry, read_header
from tidegate_engine.precision import Precision
from tidegate_engine.quantize import to_precision
from tidegate_engine.weights import Source, and_others
from tidegate_kernels.weight import Dense, Weight, slice_rows

_LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attention_output": "attn_output",
    "post_attention_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "post_mlp_norm": "post_ffw_norm",
    "router": "ffn_gate_inp",
    "experts.gate": "ffn_gate_exps",
    "experts.up": "ffn_up_exps",
    "experts.down": "ffn_down_exps",
}
_SINGLE_EXPERT_NAMES = _LAYER_NAMES | {f"experts.{part}": f"ffn_{part}.{{}}" for part in ("gate", "up", "down")}
"""Files of before April 2024 have a tensor for each expert."""
_FUSED_NAMES = _LAYER_NAMES | {"q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv", "gate": "ffn_up"}


def load_gguf(
    path: Path, *, dtype: torch.dtype, precision: Precision | None = None
) -> tuple[DecoderConfig, dict[str, Weight]]:
    """Configuration and parameters (as `parameter_shapes` names them) of a file; raises ModelError.

    Matrices are in the precision that the policy gives their kind, without one in `dtype`; all else is in `dtype`. One
    tensor is read after the other; what is kept in the file's own blocks stays in the file, mapped.
    """
    file = read_header(path)
    config = read_config(file)
    shapes = parameter_shapes(config)
    sources = _sources(file, config)
    _check_tensors(file, config, sources)
    permuted_qk = ARCHITECTURES[architecture_of(file)].permuted_qk
    precision = precision or Precision(dtype=str(dtype).removeprefix("torch."))
    parameters: dict[str, Weight] = {}
    with TensorBytes(path) as tensor_bytes:
        for tensor, names in groupby(sources, key=lambda name: sources[name].tensor):
            entry = file.tensors[tensor]
            stored = _read_tensor(file, entry, tensor_bytes)
            for name in names:
                source = sources[name]
                weight = slice_rows(stored, source.first_row, source.rows)
                if permuted_qk and (part := name.rpartition(".")[2]) in ("q", "k", "q_bias", "k_bias"):
                    layer = config.layers[int(name.split(".")[1])]
                    heads = layer.heads if part.startswith("q") else layer.kv_heads
                    weight = unpermute(weight, rows=source.rows, heads=heads)
                wanted = precision.of(name, tied_head=config.tied_head)
                if wanted is None:
                    parameters[name] = Dense(weight.dequantised(dtype).view(shapes[name]))
                else:
                    parameters[name] = to_precision(name, weight, wanted)
    return config, parameters


def stored_bytes(file: GgufFile) -> dict[str, int]:
    """Bytes in the file of each parameter, by our names; raises ModelError where the file does not have it."""
    config = read_config(file)
    sources = _sources(file, config)
    _check_tensors(file, config, sources)
    sizes = {}
    for name, shape in parameter_shapes(config).items():
        entry = file.tensors[sources[name].tensor]
        sizes[name] = entry.size_bytes * prod(shape) // max(1, prod(entry.shape))
    return sizes


def _sources(file: GgufFile, config: DecoderConfig) -> dict[str, Source]:
    """Where each of `parameter_shapes` is stored; those in one tensor follow each other."""
    layer_names = _FUSED_NAMES if ARCHITECTURES[architecture_of(file)].fused else _LAYER_NAMES
    layer_names = _SINGLE_EXPERT_NAMES if has_single_experts(file) else layer_names
    sources: dict[str, Source] = {}
    used: dict[str, int] = {}
    for name, shape in parameter_shapes(config).items():
        tensor = _file_name(name, layer_names)
        sources[name] = Source(tensor, used.get(tensor, 0), shape[0])
        used[tensor] = used.get(tensor, 0) + shape[0]
    return dict(sorted(sources.items(), key=lambda item: (item[1].tensor, item[1].first_row)))


def _check_tensors(file: GgufFile, config: DecoderConfig, sources: Mapping[str, Source]) -> None:
    """Each source is there, as large as what is stored in it; nothing else is but what the configuration was told."""
    expected: dict[str, tuple[int, ...]] = {}
    shapes = parameter_shapes(config)
    for name, source in sources.items():
        rows = source.first_row + source.rows
        stacked = (rows // source.rows, source.rows) if "_exps." in source.tensor else (rows,)
        expected[source.tensor] = (*stacked, *shapes[name][1:])
    if missing := sorted(expected.keys() - file.tensors.keys()):
        raise file.invalid(f"lacks the tensor {missing[0]}{and_others(missing)}")
    of_config = {SHORT_DIVISORS, LONG_DIVISORS} if LONG_DIVISORS in file.tensors else {ROPE_DIVISORS}
    if foreign := sorted(file.tensors.keys() - expected.keys() - of_config):
        raise file.invalid(f"has the tensor {foreign[0]}{and_others(foreign)}, which this engine has no use for")
    for tensor, shape in expected.items():
        if (found := file.tensors[tensor].shape) != shape:
            raise file.invalid(f"has {tensor} in the shape {found}; expected is {shape}")


def unpermute(weight: Weight, *, rows: int, heads: int) -> Weight:
    """Undo the converter's row order (pairs side by side) for rotation of a head's halves."""
    return weight.select(torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1))


def _file_name(name: str, layer_names: Mapping[str, str]) -> str:
    if name in NAMES:
        return NAMES[name]
    _, index, rest = name.split(".", 2)
    expert, part = "", rest
    if rest.startswith("experts."):
        _, expert, part = rest.split(".")
        part = f"experts.{part}"
    stem, kind = (part.removesuffix("_bias"), "bias") if part.endswith("_bias") else (part, "weight")
    return f"blk.{index}.{layer_names[stem].format(expert)}.{kind}"


def _read_tensor(file: GgufFile, entry: TensorEntry, tensor_bytes: TensorBytes) -> Weight:
    stored = tensor_bytes.of(entry, mapped=keeps_file_bytes(entry.type))
    try:
        weight = stored_weight(entry.type, entry.shape, stored)
    except NotImplementedError:
        raise file.invalid(f"has {entry.name} in the type {entry.type.name}, which cannot be read") from None
    if not is_finite(entry.type, weight, stored):
        raise file.invalid(f"is damaged: {entry.name} holds values that are not finite")
    return weight
