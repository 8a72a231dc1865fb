"""What a `config.json` says of a model: the decoder that it describes, and the tokens that end an answer.

Owns the families of models: which of the decoder's switches each one sets, and what its configuration means where it
says nothing. Tensors' names are `weights_safetensors`', the maths `transformer`'s. Whatever cannot be served is refused
by its name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tidegate_engine.architecture import METHODS, DecoderConfig, Experts, LayerConfig, Rope, rope_fault
from tidegate_engine.weights import CONFIG_FILE, MAX_EXPERTS, ModelError, read_json_object

_Item = TypeVar("_Item")
Shapes = Mapping[str, tuple[int, ...]]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
MAX_LAYERS = 1024
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """A family's row: its switches, and what its configuration means where it says nothing."""

    defaults: dict[str, object]
    names: str = "llama"
    """How its tensors are named: a key of `weights_safetensors.NAMES`."""
    qkv_bias: bool = False
    """Always, whatever `attention_bias` says."""
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    """What is added to norms' stored weights."""
    scaled_embedding: bool = False
    windows: str = "none"
    """Which layers have the window: none, all, late (from `max_window_layers` on), unturned, or pattern (all but each
    `sliding_window_pattern`th)."""
    switched_window: bool = False
    """Whether the window counts only with `use_sliding_window`."""
    local_rope: bool = False
    """Whether layers with a window turn by a rope of their own."""
    experts: bool = False


def _defaults(
    *, context: int, norm_eps: float = 1e-6, rope_base: float = 10_000.0, window: int | None = None, **others: object
) -> dict[str, object]:
    return {
        "max_position_embeddings": context,
        "rms_norm_eps": norm_eps,
        "rope_theta": rope_base,
        "sliding_window": window,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **others,
    }


_GEMMA: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_defaults(context=2048)),
    "mistral": Family(_defaults(context=131_072, window=4096), windows="all"),
    "qwen2": Family(_defaults(context=32_768, window=4096), qkv_bias=True, windows="late", switched_window=True),
    "qwen3": Family(
        _defaults(context=32_768, window=4096, head_dim=128), qk_norm=True, windows="late", switched_window=True
    ),
    "smollm3": Family(
        _defaults(context=32_768, rope_base=2_000_000.0, tie_word_embeddings=True),
        windows="unturned",
        switched_window=True,
    ),
    "phi3": Family(_defaults(context=4096, norm_eps=1e-5), names="phi3", windows="all"),
    "gemma2": Family(
        _defaults(context=8192, window=4096, sliding_window_pattern=2, attn_logit_softcapping=50.0)
        | {"vocab_size": 256_000, "final_logit_softcapping": 30.0}
        | _GEMMA,
        names="gemma",
        post_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
        windows="pattern",
    ),
    "gemma3_text": Family(
        _defaults(context=131_072, window=4096, rope_base=1_000_000.0, sliding_window_pattern=6)
        | {"vocab_size": 262_208, "rope_local_base_freq": 10_000.0}
        | _GEMMA,
        names="gemma",
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
        windows="pattern",
        local_rope=True,
    ),
    "mixtral": Family(
        _defaults(context=131_072, norm_eps=1e-5, rope_base=1_000_000.0, norm_topk_prob=True),
        names="mixtral",
        windows="all",
        experts=True,
    ),
    "qwen3_moe": Family(
        _defaults(context=32_768, window=4096, head_dim=128),
        names="qwen3_moe",
        qk_norm=True,
        windows="all",
        switched_window=True,
        experts=True,
    ),
}
"""By `model_type`; the defaults are those of the families' own configuration classes."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A `config.json`, read with care: what is asked for has the type asked for, or it is a ModelError."""

    path: Path
    values: Mapping[str, object]

    def invalid(self, why: str) -> ModelError:
        return ModelError("ModelInvalid", f"{self.path} {why}")

    def whole(self, name: str, *, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.invalid(f"has {value!r:.80} as {name}; a positive integer is needed")
        return value

    def real(self, name: str, *, default: float | None = None) -> float:
        found = self.optional_real(name)
        found = default if found is None else found
        if found is None:
            raise self.invalid(f"has no {name}; a positive number is needed")
        return found

    def optional_real(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-30 < value < 1e30:
            raise self.invalid(f"has {value!r:.80} as {name}; a positive number is needed")
        return float(value)

    def switch(self, name: str, *, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.invalid(f"has {value!r:.80} as {name}; true or false is needed")
        return value

    def text(self, name: str, *, default: str) -> str:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.invalid(f"has {value!r:.80} as {name}; a text is needed")
        return value

    def listed(self, name: str, kind: type[_Item]) -> list[_Item] | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.invalid(f"has {value!r:.80} as {name}; a list of {kind.__name__} is needed")
        return value

    def section(self, name: str) -> "ModelSettings | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.invalid(f"has {value!r:.80} as {name}; an object is needed")
        return ModelSettings(self.path, value)


def read_settings(folder: Path) -> ModelSettings:
    """The folder's `config.json`; of a model that also sees, the part about text. Raises ModelError."""
    path = folder / CONFIG_FILE
    values = read_json_object(path)
    text = values.get("text_config")
    if values.get("model_type") == "gemma3" and isinstance(text, dict):
        outer = {name: values[name] for name in ("quantization_config", "quantization") if name in values}
        values = {"model_type": "gemma3_text"} | outer | text
    return ModelSettings(path, family_of(ModelSettings(path, values)).defaults | values)


def family_of(settings: ModelSettings) -> Family:
    """The family that `model_type` names; raises ModelError."""
    kind = settings.values.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise settings.invalid(f"has the model_type {kind!r:.80}; supported are {', '.join(FAMILIES)}")
    return family


def decoder_config(settings: ModelSettings, shapes: Shapes) -> DecoderConfig:
    """The decoder that a configuration describes; raises ModelError.

    `shapes` are those of the matrices that are there, by `parameter_shapes`' names: layers are as wide as theirs, since
    pruned models' configurations have one width for all.
    """
    family = family_of(settings)
    _refuse_unsupported(settings)
    hidden, heads = settings.whole("hidden_size"), _first_width(settings, "num_attention_heads")
    head_size = settings.whole("head_dim", default=max(1, hidden // heads))
    activation = settings.text("hidden_activation", default=settings.text("hidden_act", default="silu"))
    if activation not in _ACTIVATIONS:
        raise settings.invalid(f"has the activation {activation}; supported are {', '.join(_ACTIVATIONS)}")
    count = settings.whole("num_hidden_layers")
    if count > MAX_LAYERS:
        raise settings.invalid(f"has {count} layers; supported are up to {MAX_LAYERS}")
    context = settings.whole("max_position_embeddings")
    ropes, layer_ropes = _ropes(settings, family=family, layers=count, context=context)
    partial = _partial(settings)
    rotated = int(head_size * partial)
    if rotated < 2 or rotated % 2 or partial > 1:
        raise settings.invalid(f"rotates {rotated} of {head_size} dimensions of a head; an even number is needed")
    for rope in ropes:
        if fault := rope_fault(rope, size=rotated):
            raise settings.invalid(fault)
    windows = _windows(settings, family=family, turned=[rope is not None for rope in layer_ropes])
    widths = [_widths(settings, index, head_size=head_size, shapes=shapes) for index in range(count)]
    mixtures = _mixtures(settings, family=family, layers=count)
    bias = settings.switch("attention_bias")
    gemma = family.names == "gemma"
    query_scalar = settings.optional_real("query_pre_attn_scalar") if gemma else None
    return DecoderConfig(
        layers=tuple(
            LayerConfig(
                heads=heads,
                kv_heads=kv_heads,
                inner=inner,
                window=window,
                rope=rope,
                experts=experts,
            )
            for (heads, kv_heads, inner), window, rope, experts in zip(
                widths, windows, layer_ropes, mixtures, strict=True
            )
        ),
        hidden=hidden,
        head_size=head_size,
        vocab_size=settings.whole("vocab_size"),
        context_tokens=max(context, *(_stretched(rope) for rope in ropes)),
        norm_eps=settings.real("rms_norm_eps"),
        ropes=ropes,
        tied_head=settings.switch("tie_word_embeddings"),
        rotated=None if rotated == head_size else rotated,
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=settings.switch("mlp_bias"),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        activation=_ACTIVATIONS[activation],
        attention_scale=None if query_scalar is None else query_scalar**-0.5,
        attention_soft_cap=settings.optional_real("attn_logit_softcapping") if gemma else None,
        logit_soft_cap=settings.optional_real("final_logit_softcapping") if gemma else None,
        embedding_scale=hidden**0.5 if family.scaled_embedding else None,
    )


def _refuse_unsupported(settings: ModelSettings) -> None:
    if settings.switch("use_bidirectional_attention"):
        raise settings.invalid("attends to later tokens (use_bidirectional_attention); supported are causal models")


def _first_width(settings: ModelSettings, name: str) -> int:
    """A width that is one number, or one for each layer."""
    value = settings.values.get(name)
    if isinstance(value, list) and value:
        return ModelSettings(settings.path, {name: value[0]}).whole(name)
    return settings.whole(name)


def _widths(settings: ModelSettings, index: int, *, head_size: int, shapes: Shapes) -> tuple[int, int, int]:
    """Heads, key-value heads and inner width of a layer: what its matrices have, or else the configuration says."""

    def width(name: str, stored: str, *, unit: int, default: int | None = None) -> int:
        listed = settings.values.get(name)
        if isinstance(listed, list):
            if index >= len(listed):
                raise settings.invalid(f"has {len(listed)} numbers as {name}, fewer than layers")
            return ModelSettings(settings.path, {name: listed[index]}).whole(name)
        shape = shapes.get(f"layers.{index}.{stored}")
        if shape is None:
            return settings.whole(name, default=default)
        if shape[0] % unit or not shape[0]:
            raise settings.invalid(f"says that a head has {head_size} values, and layer {index} has {shape[0]} rows")
        return shape[0] // unit

    heads = width("num_attention_heads", "q", unit=head_size)
    kv_heads = width("num_key_value_heads", "k", unit=head_size, default=heads)
    if heads % kv_heads:
        raise settings.invalid(f"has {heads} heads in layer {index}, which {kv_heads} key-value heads do not divide")
    if f"layers.{index}.experts.0.gate" in shapes:
        return heads, kv_heads, width("moe_intermediate_size", "experts.0.gate", unit=1)
    return heads, kv_heads, width("intermediate_size", "gate", unit=1)


def _mixtures(settings: ModelSettings, *, family: Family, layers: int) -> list[Experts | None]:
    if not family.experts:
        return [None] * layers
    name = "num_experts" if settings.values.get("num_experts") is not None else "num_local_experts"
    experts = Experts(
        count=settings.whole(name),
        chosen=settings.whole("num_experts_per_tok"),
        normalised=settings.switch("norm_topk_prob"),
    )
    if experts.chosen > experts.count:
        raise settings.invalid(f"chooses {experts.chosen} of {experts.count} experts")
    if experts.count * layers > MAX_EXPERTS:
        raise settings.invalid(f"has {experts.count} experts in {layers} layers; supported are {MAX_EXPERTS} together")
    dense = settings.listed("mlp_only_layers", int) or []
    step = settings.whole("decoder_sparse_step", default=1)
    return [experts if index not in dense and (index + 1) % step == 0 else None for index in range(layers)]


def _windows(settings: ModelSettings, *, family: Family, turned: Sequence[bool]) -> list[int | None]:
    """Each layer's window."""
    layers = len(turned)
    if family.windows == "none" or settings.values["sliding_window"] is None:
        return [None] * layers
    if family.switched_window and not settings.switch("use_sliding_window"):
        return [None] * layers
    window = settings.whole("sliding_window")
    if family.windows == "all":
        return [window] * layers
    types = settings.listed("layer_types", str)
    if types is not None:
        if unknown := sorted(set(types) - {_FULL, _SLIDING}):
            raise settings.invalid(f"has layers of the type {unknown[0]!r:.80}; supported are {_FULL}, {_SLIDING}")
        if len(types) < layers:
            raise settings.invalid(f"has {len(types)} layer_types, fewer than layers")
        return [window if each == _SLIDING else None for each in types[:layers]]
    if family.windows == "late":
        first = settings.values.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise settings.invalid(f"has {first!r:.80} as max_window_layers; a number of layers is needed")
        return [window if index >= first else None for index in range(layers)]
    if family.windows == "unturned":
        return [None if each else window for each in turned]
    every = settings.whole("sliding_window_pattern")
    return [window if (index + 1) % every else None for index in range(layers)]


def _partial(settings: ModelSettings) -> float:
    for section in (settings.section("rope_parameters"), settings):
        if section is not None and "partial_rotary_factor" in section.values:
            return section.real("partial_rotary_factor", default=1.0)
    return 1.0


def _ropes(
    settings: ModelSettings, *, family: Family, layers: int, context: int
) -> tuple[tuple[Rope, ...], list[int | None]]:
    """The model's ropes, and which of them each layer turns by."""
    parameters = settings.section("rope_parameters")
    scaling = settings.section("rope_scaling")
    base = settings.real("rope_theta")
    if family.local_rope:
        full = (parameters and parameters.section(_FULL)) or scaling
        sliding = parameters and parameters.section(_SLIDING)
        local = settings.real("rope_local_base_freq")
        ropes = (
            _rope(settings, full, base=base, context=context),
            _rope(settings, sliding, base=local, context=context),
        )
        windows = _windows(settings, family=family, turned=[True] * layers)
        return ropes, [0 if window is None else 1 for window in windows]
    rope = _rope(settings, parameters or scaling, base=base, context=context)
    kinds: list[int | None] = [0] * layers
    if family.windows == "unturned":
        every = settings.whole("no_rope_layer_interval", default=4)
        turned = settings.listed("no_rope_layers", int)
        if turned is None:
            turned = [int((index + 1) % every != 0) for index in range(layers)]
        if len(turned) < layers:
            raise settings.invalid(f"has {len(turned)} no_rope_layers, fewer than layers")
        kinds = [0 if each else None for each in turned[:layers]]
    return (rope,), kinds


def _rope(settings: ModelSettings, section: ModelSettings | None, *, base: float, context: int) -> Rope:
    if section is None:
        return Rope(base)
    base = section.real("rope_theta", default=base)
    method = section.text("rope_type", default=section.text("type", default="default"))
    if method == "su" or (method == "yarn" and "long_factor" in section.values):
        method = "longrope"
    if method not in METHODS:
        raise settings.invalid(f"scales its positions by the method {method}; supported are {', '.join(METHODS)}")
    if method == "default":
        return Rope(base)
    trained = section.whole(
        "original_max_position_embeddings", default=settings.whole("original_max_position_embeddings", default=context)
    )
    if method == "longrope":
        divisors, long_divisors = (_numbers(section, name) for name in ("short_factor", "long_factor"))
        return Rope(
            base,
            method,
            factor=section.real("factor", default=context / trained),
            trained_tokens=trained,
            magnitude=section.optional_real("attention_factor"),
            divisors=divisors,
            long_divisors=long_divisors,
        )
    rope = Rope(
        base,
        method,
        factor=section.real("factor", default=context / trained if method == "yarn" else None),
        trained_tokens=context if method == "dynamic" else trained,
        low_frequency_factor=section.real("low_freq_factor", default=1.0),
        high_frequency_factor=section.real("high_freq_factor", default=4.0),
        fast_turns=section.real("beta_fast", default=32.0),
        slow_turns=section.real("beta_slow", default=1.0),
        whole_bounds=section.switch("truncate", default=True),
        magnitude=_yarn_magnitude(section) if method == "yarn" else None,
    )
    if rope.low_frequency_factor >= rope.high_frequency_factor:
        raise settings.invalid("has a low_freq_factor that is not below its high_freq_factor")
    return rope


def _yarn_magnitude(section: ModelSettings) -> float | None:
    given = section.optional_real("attention_factor")
    mscale, all_dimensions = section.optional_real("mscale"), section.optional_real("mscale_all_dim")
    if given is not None or mscale is None or all_dimensions is None:
        return given
    factor = section.real("factor")
    return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dimensions * math.log(factor) + 1.0)


def _numbers(section: ModelSettings, name: str) -> tuple[float, ...]:
    value = section.values.get(name)
    if not isinstance(value, list) or not all(type(item) in (int, float) and 1e-30 < item < 1e30 for item in value):
        raise section.invalid(f"has {value!r:.80} as {name}; a list of positive numbers is needed")
    return tuple(float(item) for item in value)


def _stretched(rope: Rope) -> int:
    """The context that a rope reaches, where a configuration may still name the one before it was stretched."""
    return round(rope.trained_tokens * rope.factor) if rope.method in ("yarn", "dynamic") else 0
