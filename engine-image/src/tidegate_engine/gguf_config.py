"""What a GGUF file's metadata say of a model: the decoder that it describes.

Owns the families of files and what they leave unsaid. Reads no weights and no torch: those are `weights_gguf`'s.
"""

import math
import struct
from dataclasses import dataclass

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, rope_fault
from tidegate_engine.gguf_file import GgufFile, map_file
from tidegate_engine.weights import MAX_EXPERTS

MAX_CONTEXT_TOKENS = 1 << 20
"""A damaged file may claim any."""
LOCAL_ROPE_BASE = 10_000.0
"""By which Gemma 3's layers with a window turn, where the file does not say."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a family's files differ from each other."""

    permuted_qk: bool = False
    """Rows of q and k were reordered for rotation of neighbouring pairs when the file was made."""
    qk_norm: bool = False
    fused: bool = False
    """Whether q, k, v are one tensor, and gate and up another."""
    unturned_every: int | None = None
    """Of every so many layers the last one's heads do not turn; no metadata say so."""
    gemma: bool = False
    """Norms of results, soft caps, a scaled embedding; norms' weights are stored with the one added."""
    window_every: int | None = None
    """Of every so many layers the last one sees all; None = where there is a window, all layers have it."""
    wide_layers: int | None = None
    """A model with so many layers scales its scores by hidden over heads instead of the head size."""


ARCHITECTURES = {
    "llama": Architecture(permuted_qk=True),
    "qwen2": Architecture(),
    "qwen3": Architecture(qk_norm=True),
    "qwen3moe": Architecture(qk_norm=True),
    "smollm3": Architecture(permuted_qk=True, unturned_every=4),
    "phi3": Architecture(fused=True),
    "gemma2": Architecture(gemma=True, window_every=2, wide_layers=46),
    "gemma3": Architecture(gemma=True, qk_norm=True, window_every=6, wide_layers=62),
}
NAMES = {"embedding": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
ROPE_DIVISORS = "rope_freqs.weight"
SHORT_DIVISORS, LONG_DIVISORS = "rope_factors_short.weight", "rope_factors_long.weight"


def read_config(file: GgufFile) -> DecoderConfig:
    """The decoder that the file's metadata describe; raises ModelError."""
    name = architecture_of(file)
    if name not in ARCHITECTURES:
        raise file.invalid(f"has the architecture {name}; supported are {', '.join(ARCHITECTURES)}")
    architecture, metadata = ARCHITECTURES[name], _Metadata(file, name)
    embedding = file.tensors.get(NAMES["embedding"])
    if embedding is None:
        raise file.invalid(f"lacks the tensor {NAMES['embedding']}")
    if len(embedding.shape) != 2 or 0 in embedding.shape:
        raise file.invalid(f"has {embedding.name} in the shape {embedding.shape}; a row for each token is needed")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise file.invalid(f"has {len(tokens)} tokens, and {embedding.name} has {embedding.shape[0]} rows")
    count = metadata.whole("block_count")
    if count > len(file.tensors):
        raise file.invalid(f"is damaged: it claims {count} layers and has {len(file.tensors)} tensors")
    hidden, heads = metadata.whole("embedding_length"), metadata.per_layer("attention.head_count", count)
    kv_heads = metadata.per_layer("attention.head_count_kv", count, default=heads)
    for own, shared in zip(heads, kv_heads, strict=True):
        if own % shared:
            raise file.invalid(f"has {own} heads, which {shared} key-value heads do not divide")
    head_size = metadata.whole("attention.key_length", default=max(1, hidden // heads[0]))
    rotated = metadata.whole("rope.dimension_count", default=head_size)
    if rotated > head_size or rotated % 2:
        raise file.invalid(f"rotates {rotated} of {head_size} dimensions of a head; an even number of them is needed")
    experts = _experts(metadata, layers=count)
    has_own_width = experts is not None and metadata.has("expert_feed_forward_length")
    inner = metadata.per_layer("expert_feed_forward_length" if has_own_width else "feed_forward_length", count)
    windows = _windows(metadata, architecture, count)
    ropes = _ropes(metadata, architecture, rotated=rotated)
    for rope in ropes:
        if fault := rope_fault(rope, size=rotated):
            raise file.invalid(fault)
    scale = metadata.optional_real("attention.scale")
    if scale is None and architecture.wide_layers == count:
        scale = (hidden // heads[0]) ** -0.5
    caps = (50.0, 30.0) if name == "gemma2" else (None, None)
    return DecoderConfig(
        layers=tuple(
            LayerConfig(
                heads=heads[index],
                kv_heads=kv_heads[index],
                inner=inner[index],
                window=windows[index],
                rope=_rope_of_layer(index, architecture, windows[index], ropes=len(ropes)),
                experts=experts,
            )
            for index in range(count)
        ),
        hidden=hidden,
        head_size=head_size,
        vocab_size=embedding.shape[0],
        context_tokens=min(metadata.whole("context_length"), MAX_CONTEXT_TOKENS),
        norm_eps=metadata.real("attention.layer_norm_rms_epsilon"),
        ropes=ropes,
        tied_head=NAMES["head"] not in file.tensors,
        rotated=None if rotated == head_size else rotated,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        post_norms=architecture.gemma,
        activation="gelu_tanh" if architecture.gemma else "silu",
        attention_scale=scale,
        attention_soft_cap=metadata.optional_real("attn_logit_softcapping", default=caps[0]),
        logit_soft_cap=metadata.optional_real("final_logit_softcapping", default=caps[1]),
        embedding_scale=hidden**0.5 if architecture.gemma else None,
    )


def _experts(metadata: "_Metadata", *, layers: int) -> Experts | None:
    if not metadata.has("expert_count"):
        return None
    file = metadata.file
    experts = Experts(
        count=metadata.whole("expert_count"),
        chosen=metadata.whole("expert_used_count"),
        normalised=bool(metadata.get("expert_weights_norm", True)),
    )
    if experts.count * layers > MAX_EXPERTS:
        raise file.invalid(f"has {experts.count} experts in {layers} layers; supported are {MAX_EXPERTS} together")
    gates = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if not has_single_experts(file) and (gates is None or len(gates.shape) != 3 or gates.shape[0] != experts.count):
        raise file.invalid(f"has no tensor blk.0.ffn_gate_exps.weight of {experts.count} experts")
    if experts.chosen > experts.count:
        raise file.invalid(f"chooses {experts.chosen} of {experts.count} experts")
    return experts


def has_single_experts(file: GgufFile) -> bool:
    return "blk.0.ffn_gate.0.weight" in file.tensors


def _windows(metadata: "_Metadata", architecture: Architecture, layers: int) -> list[int | None]:
    """Each layer's window."""
    default = 4096 if metadata.architecture == "gemma2" else 0
    # Zero stands for none, in the files of Phi 4.
    if not metadata.get("attention.sliding_window", default):
        return [None] * layers
    window = metadata.whole("attention.sliding_window", default=default)
    if architecture.window_every is None:
        return [window] * layers
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise metadata.file.invalid(f"has a sliding_window_pattern of {len(pattern)} layers, and {layers} layers")
        return [window if each else None for each in pattern[:layers]]
    every = metadata.whole("attention.sliding_window_pattern", default=architecture.window_every)
    return [window if (index + 1) % every else None for index in range(layers)]


def _rope_of_layer(index: int, architecture: Architecture, window: int | None, *, ropes: int) -> int | None:
    if architecture.unturned_every and (index + 1) % architecture.unturned_every == 0:
        return None
    return 1 if ropes > 1 and window is not None else 0


def _ropes(metadata: "_Metadata", architecture: Architecture, *, rotated: int) -> tuple[Rope, ...]:
    """The model's ropes: that of all layers, or of those without a window and of those with one."""
    file = metadata.file
    base = metadata.real("rope.freq_base", default=10_000.0)
    method = str(metadata.get("rope.scaling.type", "none"))
    factor = metadata.real("rope.scaling.factor", default=metadata.real("rope.scale_linear", default=1.0))
    trained = metadata.whole("rope.scaling.original_context_length", default=metadata.whole("context_length"))
    magnitude = metadata.real("rope.scaling.attn_factor", default=1.0)
    if LONG_DIVISORS in file.tensors:
        short, long = (_read_divisors(file, name, rotated // 2) for name in (SHORT_DIVISORS, LONG_DIVISORS))
        rope = Rope(base, "longrope", trained_tokens=trained, magnitude=magnitude, divisors=short, long_divisors=long)
    elif method == "yarn":
        rope = Rope(
            base,
            method,
            factor=factor,
            trained_tokens=trained,
            fast_turns=metadata.real("rope.scaling.yarn_beta_fast", default=32.0),
            slow_turns=metadata.real("rope.scaling.yarn_beta_slow", default=1.0),
            magnitude=magnitude * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        )
    elif method in ("none", "linear") and factor != 1.0:
        rope = Rope(base, "linear", factor=factor)
    elif method in ("none", "linear"):
        divisors = _read_divisors(file, ROPE_DIVISORS, rotated // 2) if ROPE_DIVISORS in file.tensors else ()
        rope = Rope(base, divisors=divisors)
    else:
        raise file.invalid(
            f"scales its rotary positions by the method {method}; supported are none, linear, yarn, and longrope with "
            f"its factors as tensors"
        )
    if not (architecture.gemma and architecture.qk_norm):
        return (rope,)
    return rope, Rope(metadata.real("rope.freq_base_swa", default=LOCAL_ROPE_BASE))


def _read_divisors(file: GgufFile, name: str, count: int) -> tuple[float, ...]:
    entry = file.tensors.get(name)
    if entry is None:
        raise file.invalid(f"lacks the tensor {name}")
    if entry.type.name != "F32" or entry.shape != (count,):
        raise file.invalid(f"has {name} as {entry.type.name} {entry.shape}; expected is F32 ({count},)")
    with map_file(file.path) as data:
        values = struct.unpack(f"<{count}f", data[entry.start : entry.start + entry.size_bytes])
    if not all(0 < value < math.inf for value in values):
        raise file.invalid(f"is damaged: {name} holds values that are no divisors")
    return values


@dataclass(frozen=True, slots=True)
class _Metadata:
    file: GgufFile
    architecture: str

    def get(self, name: str, default: object = None) -> object:
        return self.file.metadata.get(f"{self.architecture}.{name}", default)

    def has(self, name: str) -> bool:
        return bool(self.get(name))

    def whole(self, name: str, *, default: int | None = None) -> int:
        value = self.file.metadata.get(f"{self.architecture}.{name}", default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise self.file.invalid(f"has {value!r} as {self.architecture}.{name}; a positive integer is needed")
        return value

    def per_layer(self, name: str, layers: int, *, default: list[int] | None = None) -> list[int]:
        """A positive integer for each layer: the same for all, or from a list."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, list):
            return [self.whole(name)] * layers
        if len(value) < layers or not all(isinstance(item, int) and 0 < item < 1 << 31 for item in value):
            raise self.file.invalid(f"has no positive integer for each layer as {self.architecture}.{name}")
        return value[:layers]

    def real(self, name: str, *, default: float | None = None) -> float:
        value = self.optional_real(name, default=default)
        if value is None:
            raise self.file.invalid(f"has None as {self.architecture}.{name}; a positive number is needed")
        return value

    def optional_real(self, name: str, *, default: float | None = None) -> float | None:
        value = self.get(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.file.invalid(f"has {value!r} as {self.architecture}.{name}; a positive number is needed")
        return float(value)


def architecture_of(file: GgufFile) -> str:
    return str(file.metadata.get("general.architecture", "(none)"))
