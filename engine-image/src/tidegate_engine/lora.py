"""LoRA adapters in PEFT's format: read from a folder with care, checked against the decoder, held within a bound.

`adapter_config.json` and `adapter_model.safetensors`, nothing else of the folder. What the tensors adapt is read from
their names, in the names of Hugging Face's models, whatever file the model came from. What the engine cannot do is
refused by its name. Called by `torch_runner`, and for new adapters by the engine from a thread beside its loop.
"""

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, LayerConfig
from tidegate_engine.runner import ADAPTER_FILES, AdapterInfo
from tidegate_engine.safetensors_file import StoredTensor, read_file_header
from tidegate_engine.transformer import LayerDeltas, RowDeltas
from tidegate_engine.weights import ModelError, and_others, parse_json_object
from tidegate_kernels.lora import LowRank, OutputPart

CONFIG, TENSORS = ADAPTER_FILES
MAX_CONFIG_BYTES = 1 << 20
MAX_HEADER_BYTES = 4 << 20
"""Of the file of tensors: some hundred bytes for each; read, it takes a multiple of that."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Ways to begin a training that leave the model's own weights as they are."""
READ_FIELDS = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
    | {"init_lora_weights"}
)
IDLE_FIELDS = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout"}
    | {"peft_version", "exclude_modules", "layers_to_transform", "layers_pattern", "eva_config", "corda_config"}
    | {"lora_ga_config", "loftq_config", "runtime_config", "megatron_core", "qalora_group_size", "ensure_weight_tying"}
)
"""They say how an adapter was trained, or which tensors it has, which their names say too."""
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>(?:model\.|language_model\.model\.|model\.language_model\.)layers\."
    r"(?P<layer>\d{1,4})\.(?P<part>(?:self_attn|mlp)\.[a-z_]{1,16}_proj))\.lora_(?P<side>[AB])\.weight"
)


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """How many adapters are held at once, and of what rank."""

    max_loras: int
    max_rank: int


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter in memory, and what is known of it."""

    info: AdapterInfo
    layers: tuple[LayerDeltas, ...]


@dataclass(frozen=True, slots=True)
class _Target:
    """A module that may be adapted: where its columns lie in the decoder's product, and its shape."""

    product: str
    """A key of `LayerDeltas`."""
    first_column: int
    columns: int
    inputs: int


def _targets(config: DecoderConfig, layer: LayerConfig) -> dict[str, _Target]:
    """By the names of Hugging Face's modules; of fused ones both the parts and the whole."""
    hidden, inner = config.hidden, layer.inner
    query, kv = layer.heads * config.head_size, layer.kv_heads * config.head_size
    targets = {
        "self_attn.q_proj": _Target("qkv", 0, query, hidden),
        "self_attn.k_proj": _Target("qkv", query, kv, hidden),
        "self_attn.v_proj": _Target("qkv", query + kv, kv, hidden),
        "self_attn.qkv_proj": _Target("qkv", 0, query + 2 * kv, hidden),
        "self_attn.o_proj": _Target("attention_output", 0, hidden, query),
    }
    if layer.experts is None:
        targets |= {
            "mlp.gate_proj": _Target("gate_up", 0, inner, hidden),
            "mlp.up_proj": _Target("gate_up", inner, inner, hidden),
            "mlp.gate_up_proj": _Target("gate_up", 0, 2 * inner, hidden),
            "mlp.down_proj": _Target("down", 0, hidden, inner),
        }
    return targets


def adapter_bytes(config: DecoderConfig, *, rank: int, dtype: torch.dtype) -> int:
    """Bytes of an adapter of this rank for every module that can be adapted, the parts of fused ones by themselves."""
    values = sum(
        target.columns + target.inputs
        for layer in config.layers
        for name, target in _targets(config, layer).items()
        if name not in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    )
    return values * rank * dtype.itemsize


class LoraStore:
    """The adapters that a decoder has. `read` may be called from any thread, all else between two steps."""

    def __init__(self, config: DecoderConfig, limits: LoraLimits, *, dtype: torch.dtype) -> None:
        self.reserved_bytes = limits.max_loras * adapter_bytes(config, rank=limits.max_rank, dtype=dtype)
        """What the adapters can take together."""
        self._limits = limits
        self._config = config
        self._dtype = dtype
        self._adapters: Mapping[str, LoraAdapter] = {}
        """Replaced, never changed: other threads look at it."""
        self.most_bytes = 0
        """What they ever took together at most."""

    @property
    def max_loras(self) -> int:
        return self._limits.max_loras

    @property
    def size_bytes(self) -> int:
        return sum(adapter.info.size_bytes for adapter in self._adapters.values())

    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(adapter.info for adapter in self._adapters.values())

    def read(self, name: str, folder: Path) -> Callable[[], AdapterInfo]:
        """Read the adapter in `folder`; returns what adds it. Both raise ModelError, also when there is no place."""
        self._check_room(name)
        adapter = read_adapter(name, folder, self._config, max_rank=self._limits.max_rank, dtype=self._dtype)
        return partial(self.add, adapter)

    def add(self, adapter: LoraAdapter) -> AdapterInfo:
        self._check_room(adapter.info.name)
        self._adapters = {**self._adapters, adapter.info.name: adapter}
        self.most_bytes = max(self.most_bytes, self.size_bytes)
        return adapter.info

    def remove(self, name: str) -> None:
        self._adapters = {held: adapter for held, adapter in self._adapters.items() if held != name}

    def deltas(self, rows: Mapping[str, Tensor]) -> tuple[RowDeltas, ...]:
        """What `forward` adds for the rows (int64) of each adapter, by its name."""
        return tuple(RowDeltas(self._adapters[name].layers, own) for name, own in rows.items())

    def _check_room(self, name: str) -> None:
        held = sorted(self._adapters)
        if name in self._adapters:
            raise ModelError("AdapterExists", f"an adapter {name!r} is loaded already; unload it first")
        if len(held) >= self.max_loras:
            raise ModelError(
                "AdapterLimit",
                f"{len(held)} adapters are loaded ({', '.join(held)}) and --max-loras is {self.max_loras}; "
                "unload one first",
            )


def read_adapter(name: str, folder: Path, config: DecoderConfig, *, max_rank: int, dtype: torch.dtype) -> LoraAdapter:
    """The adapter in `folder` for a decoder, its numbers in `dtype`; raises ModelError.

    Its digest is that of both files' bytes, so that equal digests mean equal results.
    """
    largest = adapter_bytes(config, rank=max_rank, dtype=torch.float32) + MAX_HEADER_BYTES
    settings_bytes = _read_file(folder / CONFIG, most_bytes=MAX_CONFIG_BYTES)
    settings = read_lora_settings(settings_bytes, path=folder / CONFIG)
    if settings.r > max_rank:
        raise settings.invalid(f"has the rank {settings.r}, and --max-lora-rank is {max_rank}")
    path = folder / TENSORS
    content = _read_file(path, most_bytes=largest)
    if int.from_bytes(content[:8], "little") > MAX_HEADER_BYTES:
        raise _invalid(path, f"is no adapter, or damaged: its header is larger than {MAX_HEADER_BYTES} bytes")
    pairs = _pairs(read_file_header(path), path=path)
    layers: list[dict[str, list[tuple[_Target, Tensor, Tensor]]]] = [{} for _ in config.layers]
    ranks: list[int] = []
    taken: set[tuple[int, str]] = set()
    for module, (index, part, a, b) in pairs.items():
        target = _targets(config, config.layers[index]).get(part) if index < len(layers) else None
        if target is None:
            raise _unusable(path, f"adapts {module}", config)
        if (index, part) in taken:
            raise _invalid(path, f"adapts {part} of layer {index} twice, once as {module}")
        taken.add((index, part))
        _check_named(settings, module)
        rank, scale = settings.rank_of(module), settings.scale_of(module)
        if rank > max_rank:
            raise settings.invalid(f"gives {module} the rank {rank}, and --max-lora-rank is {max_rank}")
        for entry, shape in ((a, (rank, target.inputs)), (b, (target.columns, rank))):
            if entry.shape != shape:
                raise _invalid(path, f"has {entry.name} in the shape {entry.shape}; expected is {shape}")
        ranks.append(rank)
        own_a = _tensor(a, content, path=path, dtype=dtype, scale=1.0)
        own_b = _tensor(b, content, path=path, dtype=dtype, scale=scale)
        layers[index].setdefault(target.product, []).append((target, own_a, own_b))
    deltas = tuple({product: _fuse(parts) for product, parts in products.items()} for products in layers)
    digest = hashlib.sha256(hashlib.sha256(settings_bytes).digest() + hashlib.sha256(content).digest()).hexdigest()
    size = sum(delta.size_bytes for layer in deltas for delta in layer.values())
    most = adapter_bytes(config, rank=max_rank, dtype=dtype)
    if size > most:  # a fused module and its parts
        raise _invalid(path, f"takes {size} bytes, and an adapter of rank {max_rank} takes {most}")
    return LoraAdapter(AdapterInfo(name, digest, rank=max(ranks), size_bytes=size), deltas)


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """An `adapter_config.json` whose every field that changes results is known."""

    path: Path
    r: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    """By patterns of modules' names, of which the first that fits counts."""
    root_scaled: bool
    """Scaled by the root of the rank (rsLoRA)."""
    target_modules: tuple[str, ...] | None
    """None = a pattern, or all that are linear."""

    def invalid(self, why: str) -> ModelError:
        return _invalid(self.path, why)

    def rank_of(self, module: str) -> int:
        return next((rank for pattern, rank in self.ranks.items() if _fits(pattern, module)), self.r)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = next((alpha for pattern, alpha in self.alphas.items() if _fits(pattern, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.root_scaled else rank)


def read_lora_settings(content: bytes, *, path: Path) -> LoraSettings:
    """What a configuration says; raises ModelError where it says what the engine does not do."""
    values = parse_json_object(content, path=path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _invalid(path, f"has the peft_type {kind!r:.80}; supported is LORA")
    if values.get("bias") not in (None, "none"):
        raise _invalid(path, f"has {values['bias']!r:.80} as bias; supported is none")
    init = values.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise _invalid(
            path,
            f"has {init!r:.80} as init_lora_weights, which changes the model's own weights; convert it to a plain LoRA "
            "adapter (PEFT's path_initial_model_for_weight_conversion)",
        )
    if unknown := sorted(name for name, value in values.items() if value and name not in READ_FIELDS | IDLE_FIELDS):
        raise _invalid(
            path,
            f"uses {unknown[0]!r:.80}{and_others(unknown)}, which is not supported; plain LoRA of linear layers is",
        )
    targets = values.get("target_modules")
    if not isinstance(targets, str) and not (
        isinstance(targets, list) and targets and all(isinstance(each, str) for each in targets)
    ):
        raise _invalid(path, f"has {targets!r:.80} as target_modules; names of modules, or all-linear, are needed")
    ranks = _pattern(values.get("rank_pattern"), "rank_pattern", path=path)
    return LoraSettings(
        path=path,
        r=_rank(values.get("r"), "r", path=path),
        alpha=_alpha(values.get("lora_alpha"), "lora_alpha", path=path),
        ranks={key: _rank(value, f"rank_pattern of {key}", path=path) for key, value in ranks.items()},
        alphas={
            key: _alpha(value, f"alpha_pattern of {key}", path=path)
            for key, value in _pattern(values.get("alpha_pattern"), "alpha_pattern", path=path).items()
        },
        root_scaled=_switch(values.get("use_rslora"), "use_rslora", path=path),
        target_modules=None if isinstance(targets, str) else tuple(targets),
    )


def _rank(value: object, name: str, *, path: Path) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise _invalid(path, f"has {value!r:.80} as {name:.200}; a positive integer is needed")
    return value


def _alpha(value: object, name: str, *, path: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise _invalid(path, f"has {value!r:.80} as {name:.200}; a number is needed")
    return float(value)


def _switch(value: object, name: str, *, path: Path) -> bool:
    if value not in (None, True, False):
        raise _invalid(path, f"has {value!r:.80} as {name}; true or false is needed")
    return bool(value)


def _pattern(value: object, name: str, *, path: Path) -> dict[str, object]:
    """PEFT takes any regular expression; these are the ones that stand for a name or its end."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(path, f"has {value!r:.80} as {name}; an object is needed")
    for key in value:
        if not re.fullmatch(r"\^?(?:\\?\.|\w)+\$?", key):
            raise _invalid(path, f"has {key!r:.80} in {name}; names of modules, or the ends of names, are supported")
    return value


def _fits(pattern: str, module: str) -> bool:
    name = pattern.removesuffix("$").replace("\\.", ".")
    if name.startswith("^"):
        return module == name[1:]
    return module == name or module.endswith("." + name)


def _check_named(settings: LoraSettings, module: str) -> None:
    named = settings.target_modules
    if named is not None and not any(_fits(each, module) for each in named):
        raise settings.invalid(f"does not name {module} in its target_modules, and {TENSORS} adapts it")


def _pairs(header: Mapping[str, StoredTensor], *, path: Path) -> dict[str, tuple[int, str, StoredTensor, StoredTensor]]:
    """By module: its layer, its part of the layer, and both of its tensors."""
    found: dict[str, dict[str, StoredTensor]] = {}
    places: dict[str, tuple[int, str]] = {}
    for name, tensor in header.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise _invalid(
                path, f"holds {name!r:.200}; supported are lora_A and lora_B of linear layers of attention and MLP"
            )
        if tensor.dtype not in DTYPES:
            raise _invalid(path, f"has {name} in the type {tensor.dtype}; supported are {', '.join(DTYPES)}")
        places[match["module"]] = int(match["layer"]), match["part"]
        found.setdefault(match["module"], {})[match["side"]] = tensor
    if not found:
        raise _invalid(path, "adapts nothing: it holds no tensor")
    for module, sides in found.items():
        if len(sides) < 2:
            have = "".join(sides)
            raise _invalid(path, f"holds lora_{have} of {module} and not the other one")
    return {module: (*places[module], sides["A"], sides["B"]) for module, sides in found.items()}


def _tensor(entry: StoredTensor, content: bytes, *, path: Path, dtype: torch.dtype, scale: float) -> Tensor:
    if entry.start + entry.size_bytes > len(content):
        raise _invalid(path, "changed while it was read")
    stored = DTYPES[entry.dtype]
    part = bytearray(memoryview(content)[entry.start : entry.start + entry.size_bytes])
    values = torch.frombuffer(part, dtype=stored).view(entry.shape).float().mul_(scale).to(dtype)
    if not bool(torch.isfinite(values).all()):
        raise _invalid(path, f"is damaged: {entry.name} holds values that are not finite")
    return values


def _fuse(parts: Sequence[tuple[_Target, Tensor, Tensor]]) -> LowRank:
    outputs, first = [], 0
    for target, _, b in parts:
        outputs.append(OutputPart(b, target.first_column, first))
        first += b.shape[1]
    return LowRank(torch.cat([a for _, a, _ in parts]), tuple(outputs))


def _read_file(path: Path, *, most_bytes: int) -> bytes:
    """A regular file's content, if it is not larger than what is expected of it."""
    try:
        if not path.is_file():
            raise ModelError("ModelNotFound", f"{path} does not exist, or is no file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size + 1) if size <= most_bytes else b""
    except OSError as error:
        raise ModelError("ModelNotFound", f"{path} cannot be read: {error.strerror}") from error
    if max(size, len(content)) > most_bytes:
        raise _invalid(path, f"has {size} bytes; at most {most_bytes} are read")
    return content


def _unusable(path: Path, what: str, config: DecoderConfig) -> ModelError:
    names = ", ".join(dict.fromkeys(name for layer in config.layers for name in _targets(config, layer)))
    experts = any(layer.experts is not None for layer in config.layers)
    return _invalid(
        path,
        f"{what}; supported are {names} of {len(config.layers)} layers" + (", not those of experts" if experts else ""),
    )


def _invalid(path: Path, why: str) -> ModelError:
    return ModelError("ModelInvalid", f"{path} {why}")
