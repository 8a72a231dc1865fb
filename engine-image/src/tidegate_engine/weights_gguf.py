"""The parameters of a decoder from a GGUF file, under the decoder's own names, in the precisions asked for.

Knows the architectures' tensor names and oddities; the file's layout is `gguf_file`'s, the maths `transformer`'s.
Every parameter is loaded exactly once and every tensor of the file is used, or a ModelError says which one was not.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate_engine.ggml_types import TensorBytes, is_finite, keeps_file_bytes, stored_weight
from tidegate_engine.gguf_file import GgufFile, TensorEntry, read_header
from tidegate_engine.precision import Precision
from tidegate_engine.quantize import to_precision
from tidegate_engine.rope import Rope
from tidegate_engine.transformer import DecoderConfig, LayerConfig, parameter_shapes
from tidegate_kernels.weight import Dense, Weight

MAX_CONTEXT_TOKENS = 1 << 20
"""Tables are made for the whole context; a damaged file may claim any."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family's files differ from each other."""

    permuted_qk: bool
    """Rows of q and k were reordered for rotation of neighbouring pairs when the file was made."""
    qkv_bias: bool


ARCHITECTURES = {
    "llama": Architecture(permuted_qk=True, qkv_bias=False),
    "qwen2": Architecture(permuted_qk=False, qkv_bias=True),
}
_NAMES = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER_NAMES = {
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "attention_output": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


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
    names = {_file_name(name): name for name in shapes}
    if missing := sorted(names.keys() - file.tensors.keys()):
        raise file.invalid(f"lacks the tensor {missing[0]}{_and_others(missing)}")
    if foreign := sorted(file.tensors.keys() - names.keys()):
        raise file.invalid(f"has the tensor {foreign[0]}{_and_others(foreign)}, which this engine has no use for")
    for file_name, name in names.items():
        if (found := file.tensors[file_name].shape) != shapes[name]:
            raise file.invalid(f"has {file_name} in the shape {found}; expected is {shapes[name]}")
    permuted_qk = ARCHITECTURES[_architecture(file)].permuted_qk
    precision = precision or Precision(dtype=str(dtype).removeprefix("torch."))
    parameters: dict[str, Weight] = {}
    with TensorBytes(path) as tensor_bytes:
        for file_name, name in names.items():
            weight = _read_tensor(file, file.tensors[file_name], tensor_bytes)
            wanted = precision.of(name, tied_head=config.tied_head)
            if permuted_qk and name.endswith((".q", ".k")):
                heads = config.layers[0].heads if name.endswith(".q") else config.layers[0].kv_heads
                weight = unpermute(weight, heads=heads)
            if wanted is None:
                parameters[name] = Dense(weight.dequantised(dtype).view(shapes[name]))
            else:
                parameters[name] = to_precision(name, weight, wanted)
    return config, parameters


def stored_bytes(file: GgufFile) -> dict[str, int]:
    """Bytes in the file of each parameter, by our names; of those that the file has."""
    names = {_file_name(name): name for name in parameter_shapes(read_config(file))}
    return {names[entry.name]: entry.size_bytes for entry in file.tensors.values() if entry.name in names}


def read_config(file: GgufFile) -> DecoderConfig:
    """The decoder that the file's metadata describe; raises ModelError."""
    architecture = _architecture(file)
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise file.invalid(f"has the architecture {architecture}; supported are {known}")
    metadata = _Metadata(file, architecture)
    heads, hidden = metadata.whole("attention.head_count"), metadata.whole("embedding_length")
    head_size = metadata.whole("attention.key_length", default=hidden // heads)
    scaling = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise file.invalid(f"scales its rotary positions by the method {scaling}, which this engine does not know")
    rotated = metadata.whole("rope.dimension_count", default=head_size)
    if rotated != head_size or head_size % 2:
        raise file.invalid(f"rotates {rotated} of {head_size} dimensions of a head; supported are all, an even number")
    kv_heads = metadata.whole("attention.head_count_kv", default=heads)
    if heads % kv_heads:
        raise file.invalid(f"has {heads} heads, which {kv_heads} key-value heads do not divide")
    embedding = file.tensors.get(_NAMES["embedding"])
    if embedding is None:
        raise file.invalid(f"lacks the tensor {_NAMES['embedding']}")
    layers = metadata.whole("block_count")
    if layers > len(file.tensors):
        raise file.invalid(f"is damaged: it claims {layers} layers and has {len(file.tensors)} tensors")
    return DecoderConfig(
        layers=(LayerConfig(heads=heads, kv_heads=kv_heads, inner=metadata.whole("feed_forward_length")),) * layers,
        hidden=hidden,
        head_size=head_size,
        vocab_size=embedding.shape[0],
        context_tokens=min(metadata.whole("context_length"), MAX_CONTEXT_TOKENS),
        norm_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        ropes=(Rope(metadata.real("rope.freq_base", default=10_000.0)),),
        tied_head=_NAMES["head"] not in file.tensors,
        qkv_bias=ARCHITECTURES[architecture].qkv_bias,
    )


def unpermute(weight: Weight, *, heads: int) -> Weight:
    """Undo the converter's row order (pairs side by side) for rotation of a head's halves."""
    rows = torch.arange(weight.shape[0])
    return weight.select(rows.view(heads, -1, 2).transpose(1, 2).reshape(-1))


@dataclass(frozen=True, slots=True)
class _Metadata:
    file: GgufFile
    architecture: str

    def whole(self, name: str, *, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int) or value < 1:
            raise self.file.invalid(f"has {value!r} as {self.architecture}.{name}; a positive integer is needed")
        return value

    def real(self, name: str, *, default: float | None = None) -> float:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if not isinstance(value, int | float) or not value > 0:
            raise self.file.invalid(f"has {value!r} as {self.architecture}.{name}; a positive number is needed")
        return float(value)


def _architecture(file: GgufFile) -> str:
    return str(file.metadata.get("general.architecture", "(none)"))


def _file_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, index, part = name.split(".")
    return f"blk.{index}.{_LAYER_NAMES[part]}"


def _read_tensor(file: GgufFile, entry: TensorEntry, tensor_bytes: TensorBytes) -> Weight:
    stored = tensor_bytes.of(entry, mapped=keeps_file_bytes(entry.type))
    try:
        weight = stored_weight(entry.type, entry.shape, stored)
    except NotImplementedError:
        raise file.invalid(f"has {entry.name} in the type {entry.type.name}, which cannot be read") from None
    if not is_finite(entry.type, weight, stored):
        raise file.invalid(f"is damaged: {entry.name} holds values that are not finite")
    return weight


def _and_others(names: list[str]) -> str:
    return f" and {len(names) - 1} others" if len(names) > 1 else ""
