"""Matrices of quantised safetensors checkpoints: MLX, AWQ, GPTQ, FP8 and compressed-tensors, as weights to multiply.

Takes a model's configuration and a module's tensors; which modules there are, and where tensors lie, is the reader's.
Everything is kept in as many bits as it is stored in. What is unknown is refused by name.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantised import FP8_BLOCK, PLANES, Fp8, Groups, Int8, pack_codes
from tidegate_kernels.weight import Weight

METHODS = ("mlx", "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors")
CHUNK_CODES = 1 << 20
"""Codes unpacked to a byte each at once."""
MARKERS = ("scales", "qweight", "weight_packed", "weight_scale", "weight_scale_inv")
"""A module is quantised that has one of these tensors."""
PARTS = (
    *MARKERS, "weight", "biases", "qzeros", "g_idx", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale",
    "input_zero_point", "input_scale_ub", "output_scale",
)  # fmt: skip
"""What a quantised module's tensors may be called; those of activations are accepted, and not needed: activations get
a scale for each token, which is at least as exact."""
_FACTORS = ("scales", "biases", "weight_scale", "weight_scale_inv")
_FACTOR_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""In which nibble of a word each of eight neighbouring columns is."""


Shapes = Mapping[str, tuple[int, ...]]


class QuantisationError(ValueError):
    """A way of quantising that is not known, or tensors that do not fit it: the end of a sentence about the model."""


class Scheme(Protocol):
    """How a checkpoint was quantised."""

    @property
    def method(self) -> str: ...

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        """The matrix of `module` (`model.layers.0.mlp.up_proj`), of its tensors by the last part of their names.

        Raises QuantisationError.
        """
        ...

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        """Rows and columns of that matrix by its tensors' shapes; None where these do not tell."""
        ...


def parts_of(module: str, names: Collection[str]) -> dict[str, str]:
    """Of the tensors `names`, those that make up the quantised `module`, by the last part; none of a plain one."""
    found = {part: f"{module}.{part}" for part in PARTS if f"{module}.{part}" in names}
    return found if any(marker in found for marker in MARKERS) else {}


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """What a model's `config.json` says; None where nothing is quantised. Raises QuantisationError."""
    described = config.get("quantization_config")
    if described is None:
        described = config.get("quantization")
        if described is None:
            return None
        method: object = "mlx"
    elif isinstance(described, dict):
        method = described.get("quant_method", "mlx" if "bits" in described and "group_size" in described else None)
    if not isinstance(described, dict):
        raise QuantisationError(f"is described as quantised by {described!r:.80}, which is no object")
    settings = _Settings(described)
    if method == "mlx":
        mode = settings.values.get("mode", "affine")
        if mode != "affine":
            raise QuantisationError(f"is quantised by MLX in the mode {mode!r:.40}; supported is affine")
        return Mlx(settings)
    if method == "awq":
        if (version := settings.values.get("version", "gemm")) not in ("gemm", "GEMM"):
            raise QuantisationError(f"is quantised by AWQ in the version {version!r:.40}; supported is gemm")
        settings.whole("bits", least=4, most=4, default=4)
        return Awq()
    if method == "gptq":
        form = settings.values.get("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise QuantisationError(f"is quantised by GPTQ in the format {form!r:.40}; supported are gptq and gptq_v2")
        return Gptq(bits=settings.whole("bits", least=2, most=8), zeros_less_one=form == "gptq")
    if method in ("fp8", "fbgemm_fp8"):
        block = settings.values.get("weight_block_size")
        if block not in (None, [FP8_BLOCK, FP8_BLOCK]):
            raise QuantisationError(f"has FP8 weights in blocks of {block!r:.40}; supported are 128 by 128")
        return Fp8Scheme(str(method))
    if method == "compressed-tensors":
        return _compressed_tensors(settings)
    raise QuantisationError(f"is quantised by {method!r:.40}; supported are {', '.join(METHODS)}")


@dataclass(frozen=True, slots=True)
class _Settings:
    values: Mapping[str, object]

    def whole(self, name: str, *, least: int, most: int, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise QuantisationError(f"is quantised with {value!r:.40} as {name}; {least} to {most} are supported")
        return value


@dataclass(frozen=True, slots=True)
class Mlx:
    """Codes of 2 to 8 bits in a row of bits, low ones first; `scale * code + bias` for each group of a row.

    A mixture's experts may be one tensor, `[experts, rows, ...]`; they come as rows one below the other.
    """

    settings: _Settings
    method: str = "mlx"

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        bits, _ = self._grouping(module)
        return (parts["weight"][0], parts["weight"][1] * 32 // bits) if len(parts.get("weight", ())) == 2 else None

    def _grouping(self, module: str) -> tuple[int, int]:
        """Bits and columns of a group."""
        own = self.settings.values.get(module, self.settings.values.get(module.removeprefix("language_model."), {}))
        if not isinstance(own, dict):
            raise QuantisationError(f"has scales for {module}, which it says is not quantised")
        if (mode := own.get("mode", "affine")) != "affine":
            raise QuantisationError(f"has {module} quantised by MLX in the mode {mode!r:.40}; supported is affine")
        settings = _Settings({**self.settings.values, **own})
        bits = settings.whole("bits", least=2, most=8, default=4)
        return bits, settings.whole("group_size", least=8, most=1 << 16, default=64)

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        bits, group = self._grouping(module)
        parts = {name: part.flatten(0, 1) if part.dim() == 3 else part for name, part in parts.items()}
        words, scales, biases = _take(module, parts, "weight", "scales", "biases")
        rows, columns = words.shape[0], words.shape[1] * 32 // bits
        _check(module, "scales", scales, (rows, columns // group))
        _check(module, "biases", biases, (rows, columns // group))
        if columns % group:
            raise QuantisationError(f"has {columns} columns in {module}, which groups of {group} do not divide")
        planes = _planes(module, words, bits=bits, columns=columns)
        # As the codes, no longer the file's: parts that are joined would be held twice.
        scales, biases = scales.clone(), biases.clone()
        return _finite(module, Groups(bits=bits, planes=planes, scales=scales, zeros=0, minima=biases))


@dataclass(frozen=True, slots=True)
class Awq:
    """Codes of 4 bits, eight columns of the output in a word; `(code - zero) * scale`."""

    method: str = "awq"

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        return (parts["qweight"][1] * 8, parts["qweight"][0]) if len(parts.get("qweight", ())) == 2 else None

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        words, zeros, scales = _take(module, parts, "qweight", "qzeros", "scales")
        inputs, outputs, groups = words.shape[0], words.shape[1] * 8, scales.shape[0]
        _check(module, "scales", scales, (groups, outputs))
        _check(module, "qzeros", zeros, (groups, outputs // 8))
        if not groups or inputs % groups or inputs % 8:
            raise QuantisationError(f"has {inputs} columns in {module}, which {groups} groups do not divide")
        return _finite(
            module,
            Groups(
                bits=4,
                planes=_packed_by_rows(
                    lambda first, end: _awq_codes(words[:, first // 8 : end // 8]).t().contiguous(),
                    outputs,
                    inputs,
                    bits=4,
                    unit=8,
                ),
                scales=scales.t().contiguous(),
                zeros=_awq_codes(zeros).t().contiguous(),
            ),
        )


def _awq_codes(words: Tensor) -> Tensor:
    packed = words.contiguous().view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).view(words.shape[0], -1, 8)
    return nibbles[:, :, list(_AWQ_NIBBLES)].flatten(1)


@dataclass(frozen=True, slots=True)
class Gptq:
    """Codes of 2, 3, 4 or 8 bits, packed down the columns of the input, which `g_idx` gives their groups."""

    bits: int
    zeros_less_one: bool
    """The first version of the format stores zero points less one."""
    method: str = "gptq"

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        stored = parts.get("qweight", ())
        return (stored[1], stored[0] * 32 // self.bits) if len(stored) == 2 else None

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        words, zeros, scales = _take(module, parts, "qweight", "qzeros", "scales")
        if self.bits not in (2, 3, 4, 8):
            raise QuantisationError(f"is quantised by GPTQ to {self.bits} bits; supported are 2, 3, 4 and 8")
        inputs, outputs, groups = words.shape[0] * 32 // self.bits, words.shape[1], scales.shape[0]
        _check(module, "scales", scales, (groups, outputs))
        _check(module, "qzeros", zeros, (groups, outputs * self.bits // 32))
        if not groups or inputs % groups:
            raise QuantisationError(f"has {inputs} columns in {module}, which {groups} groups do not divide")
        order = _order(module, parts.get("g_idx"), inputs, inputs // groups)
        found = _unpacked(zeros, bits=self.bits)[:, :outputs]
        if self.zeros_less_one:
            found = found.to(torch.int16) + 1 if self.bits == 8 else found + 1
        planes = _planes(module, words.t(), bits=self.bits, columns=inputs, order=order)
        return _finite(
            module,
            Groups(
                bits=self.bits,
                planes=planes,
                scales=scales.t().contiguous(),
                zeros=found.t().contiguous(),
                order=order,
            ),
        )


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """FP8 numbers with a multiplier for the matrix, each row, or each block of 128 by 128, under either name."""

    method: str = "fp8"
    quantised_activations: bool = True

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        return _own_shape(parts)

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        codes, scales = _take(module, parts, "weight", name)
        return _fp8(module, codes, scales, quantised_activations=self.quantised_activations)


@dataclass(frozen=True, slots=True)
class CompressedGroup:
    """How compressed-tensors quantised the modules that one of `targets` names."""

    targets: tuple[str, ...]
    kind: str
    bits: int
    symmetric: bool
    quantised_activations: bool

    def matches(self, module: str) -> bool:
        return any(
            re.match(target[3:], module) is not None
            if target.startswith("re:")
            else target in ("Linear", module) or module.endswith("." + target)
            for target in self.targets
        )


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """FP8, INT8, and packed integers of 2 to 8 bits, by groups of modules."""

    groups: tuple[CompressedGroup, ...]
    method: str = "compressed-tensors"

    def shape(self, module: str, parts: Shapes) -> tuple[int, int] | None:
        stored, bits = parts.get("weight_packed", ()), self._group(module).bits
        if len(stored) == 2 and 32 % bits == 0:
            return stored[0], stored[1] * 32 // bits
        return _own_shape(parts)

    def _group(self, module: str) -> CompressedGroup:
        # What names a module more exactly than "all that are linear" comes first.
        matching = sorted(
            (group for group in self.groups if group.matches(module)), key=lambda group: "Linear" in group.targets
        )
        if not matching:
            raise QuantisationError(f"has scales for {module}, and no group of its configuration names it")
        return matching[0]

    def weight(self, module: str, parts: Mapping[str, Tensor]) -> Weight:
        group = self._group(module)
        if "weight_packed" in parts or "weight_shape" in parts:
            return _packed_integers(module, parts, group)
        codes, scales = _take(module, parts, "weight", "weight_scale")
        if group.kind == "float":
            return _fp8(module, codes, scales, quantised_activations=group.quantised_activations)
        if codes.dtype != torch.int8 or not group.symmetric:
            raise QuantisationError(f"has {module} in {codes.dtype}, not symmetric; supported is int8, symmetric")
        rows, columns = codes.shape
        if group.quantised_activations and scales.numel() in (1, rows):
            scales = scales.float().reshape(-1, 1).expand(rows, 1).contiguous()
            return _finite(module, Int8(codes.contiguous(), scales))
        scales = _row_scales(module, scales, rows, columns)
        # The sign bit turned: codes from 0.
        return _finite(
            module, Groups(bits=8, planes=(codes.contiguous().view(torch.uint8) ^ 0x80,), scales=scales, zeros=128)
        )


def _own_shape(parts: Shapes) -> tuple[int, int] | None:
    stored = parts.get("weight", ())
    return (stored[0], stored[1]) if len(stored) == 2 else None


def _compressed_tensors(settings: _Settings) -> CompressedTensors:
    form = settings.values.get("format")
    known = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense", "mixed-precision")
    if form not in known:
        raise QuantisationError(f"is compressed in the format {form!r:.40}; supported are {', '.join(known)}")
    sparsity = settings.values.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
        raise QuantisationError(f"is compressed as sparse ({sparsity.get('format')!r:.40}), which is not supported")
    described = settings.values.get("config_groups")
    if not isinstance(described, dict) or not described:
        raise QuantisationError("is compressed, and its configuration has no config_groups")
    return CompressedTensors(tuple(_compressed_group(name, group) for name, group in described.items()))


def _compressed_group(name: str, described: object) -> CompressedGroup:
    if not isinstance(described, dict) or not isinstance(described.get("weights"), dict):
        raise QuantisationError(f"is compressed, and the group {name!r:.40} says nothing of weights")
    targets = described.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise QuantisationError(f"is compressed, and the group {name!r:.40} has no list of targets")
    for target in targets:
        _check_pattern(target)
    weights = _Settings(described["weights"])
    kind, strategy = weights.values.get("type", "int"), weights.values.get("strategy")
    bits = weights.whole("num_bits", least=2, most=8, default=8)
    if kind not in ("int", "float") or (kind == "float" and bits != 8):
        raise QuantisationError(
            f"is compressed to {kind!r:.20} of {bits} bits; supported are float of 8, int of 2 to 8"
        )
    if strategy not in ("tensor", "channel", "group", "block", None):
        raise QuantisationError(
            f"is compressed by the strategy {strategy!r:.40}; tensor, channel, group, block are known"
        )
    if strategy == "block" and weights.values.get("block_structure") not in ([FP8_BLOCK, FP8_BLOCK], "128x128"):
        raise QuantisationError("is compressed in blocks; supported are FP8 blocks of 128 by 128")
    return CompressedGroup(
        targets=tuple(targets),
        kind=kind,
        bits=bits,
        symmetric=weights.values.get("symmetric", True) is not False,
        quantised_activations=described.get("input_activations") is not None,
    )


def _check_pattern(target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error:
            raise QuantisationError(f"is compressed with the target {target!r:.80}, which is no pattern") from None


def _packed_integers(module: str, parts: Mapping[str, Tensor], group: CompressedGroup) -> Weight:
    words, scales, shape = _take(module, parts, "weight_packed", "weight_scale", "weight_shape")
    if shape.numel() != 2:
        raise QuantisationError(f"has {module}.weight_shape of {shape.numel()} numbers; 2 are needed")
    rows, columns = (int(number) for number in shape.flatten())
    bits, per_word = group.bits, 32 // group.bits
    _check(module, "weight_packed", words, (rows, -(-columns // per_word)))
    scales = _row_scales(module, scales, rows, columns)
    zeros: Tensor | int = 1 << (bits - 1)
    if not group.symmetric:
        (stored,) = _take(module, parts, "weight_zero_point")
        _check(module, "weight_zero_point", stored, (-(-rows // per_word), scales.shape[1]))
        zeros = _unpacked_words(stored.t(), bits=bits)[:, :rows].t().contiguous()
    order = _order(module, parts.get("weight_g_idx"), columns, columns // scales.shape[1])
    planes = _planes(module, words, bits=bits, columns=columns, order=order, whole_words=True)
    return _finite(module, Groups(bits=bits, planes=planes, scales=scales, zeros=zeros, order=order))


def _row_scales(module: str, scales: Tensor, rows: int, columns: int) -> Tensor:
    """`[rows, groups]` of scales for groups, rows, or the whole matrix."""
    if scales.numel() in (1, rows):
        return scales.reshape(-1, 1).expand(rows, 1).contiguous()
    if scales.dim() != 2 or scales.shape[0] != rows or not scales.shape[1] or columns % scales.shape[1]:
        raise QuantisationError(f"has scales of the shape {tuple(scales.shape)} for {module}, {rows} by {columns}")
    return scales.contiguous().clone()  # no longer the file's, as with MLX


def _fp8(module: str, codes: Tensor, scales: Tensor, *, quantised_activations: bool) -> Weight:
    if codes.dtype != FP8:
        raise QuantisationError(f"has {module} in {codes.dtype} with a scale; supported is float8_e4m3fn")
    chunks = codes.contiguous().view(torch.uint8).view(-1).split(CHUNK_CODES)  # type: ignore[no-untyped-call]
    if any(bool((chunk & 0x7F == 0x7F).any()) for chunk in chunks):
        raise QuantisationError(f"is damaged: {module} holds values that are not numbers")
    rows, columns = codes.shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    # A scale for the whole matrix becomes one for each row, so that parts with different ones can be fused exactly.
    by_rows = scales.numel() == 1 or (scales.numel() == rows and tuple(scales.shape) != blocks)
    if by_rows:
        scales = scales.reshape(-1, 1).expand(rows, 1)
    elif tuple(scales.shape) != blocks:
        raise QuantisationError(f"has scales of the shape {tuple(scales.shape)} for {module}, {rows} by {columns}")
    found = Fp8(codes.contiguous(), scales.float().contiguous(), in_blocks=not by_rows)
    return _finite(module, replace(found, quantised_activations=quantised_activations))


def _take(module: str, parts: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    for name in names:
        if name not in parts:
            raise QuantisationError(f"lacks the tensor {module}.{name}")
        if not parts[name].numel():
            raise QuantisationError(f"has {module}.{name} in the shape {tuple(parts[name].shape)}, without a value")
        if name != "weight_shape" and parts[name].dim() != 2 and not name.startswith("weight_scale"):
            raise QuantisationError(f"has {module}.{name} in the shape {tuple(parts[name].shape)}; a matrix is needed")
        if name in _FACTORS and parts[name].dtype not in _FACTOR_DTYPES:
            raise QuantisationError(f"has {module}.{name} in {parts[name].dtype}; floating-point numbers are needed")
    words = [name for name in names if name in ("qweight", "qzeros", "weight_packed", "weight_zero_point")]
    if words and any(parts[name].dtype.itemsize != 4 or parts[name].is_floating_point() for name in words):
        raise QuantisationError(f"has {module}.{words[0]} in {parts[words[0]].dtype}; words of 32 bits are needed")
    return [parts[name] for name in names]


def _check(module: str, name: str, tensor: Tensor, shape: tuple[int, int]) -> None:
    if tuple(tensor.shape) != shape:
        raise QuantisationError(f"has {module}.{name} in the shape {tuple(tensor.shape)}; expected is {shape}")


def _finite(module: str, weight: Groups | Fp8 | Int8) -> Weight:
    minima = weight.minima if isinstance(weight, Groups) else None
    for scales in (weight.scales, minima):
        if scales is not None and not bool(torch.isfinite(scales.float()).all()):
            raise QuantisationError(f"is damaged: {module} has scales that are not finite")
    return weight


def _order(module: str, groups: Tensor | None, columns: int, group: int) -> Tensor | None:
    """The stored columns' order in which groups lie side by side; None where they do already."""
    if groups is None:
        return None
    if groups.dim() != 1 or groups.shape[0] != columns:
        raise QuantisationError(f"has groups for {groups.numel()} of the {columns} columns of {module}")
    if groups.is_floating_point():
        raise QuantisationError(f"has the groups of the columns of {module} as {groups.dtype}, not as whole numbers")
    expected = torch.arange(columns) // group
    if torch.equal(groups.to(torch.int64), expected) or bool((groups == -1).all()):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].to(torch.int64), expected):
        raise QuantisationError(f"has groups in {module} that are not all of {group} columns")
    return order


def _planes(
    module: str, words: Tensor, *, bits: int, columns: int, order: Tensor | None = None, whole_words: bool = False
) -> tuple[Tensor, ...]:
    """Rows of packed words in the layout of `Groups`, a block of rows at a time."""
    if columns % 8:
        raise QuantisationError(f"has {columns} columns in {module}; a multiple of 8 is needed")
    if not whole_words and words.shape[1] * 4 % bits and bits not in (2, 4, 8):
        raise QuantisationError(f"has {module} in {words.shape[1]} words, which codes of {bits} bits do not fill")

    def codes_of(first: int, end: int) -> Tensor:
        rows = words[first:end]
        unpacked = _unpacked_words(rows, bits=bits) if whole_words else _unpacked(rows, bits=bits)
        return unpacked[:, :columns] if order is None else unpacked[:, order]

    return _packed_by_rows(codes_of, words.shape[0], columns, bits=bits)


def _packed_by_rows(
    codes_of: Callable[[int, int], Tensor], rows: int, columns: int, *, bits: int, unit: int = 1
) -> tuple[Tensor, ...]:
    """The planes of codes `[rows, columns]`, of which `codes_of(first, end)` gives some rows, a multiple of `unit`."""
    planes = tuple(torch.empty(rows, columns * width // 8, dtype=torch.uint8) for width in PLANES[bits])
    step = max(1, CHUNK_CODES // columns // unit) * unit
    for first in range(0, rows, step):
        end = min(first + step, rows)
        for plane, part in zip(planes, pack_codes(codes_of(first, end), bits=bits), strict=True):
            plane[first:end] = part
    return planes


def _unpacked(words: Tensor, *, bits: int) -> Tensor:
    """Codes from a row of bits, low ones first, that runs over its words: uint8."""
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    if bits in (2, 4):
        parts = [packed >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(parts, dim=-1).flatten(1)
    # Eight codes in as many bytes as a code has bits.
    runs = packed.view(words.shape[0], -1, bits).to(torch.int64)
    joined = sum((runs[..., index] << (8 * index) for index in range(1, bits)), runs[..., 0])
    return torch.stack([(joined >> (bits * index)) & ((1 << bits) - 1) for index in range(8)], dim=-1).byte().flatten(1)


def _unpacked_words(words: Tensor, *, bits: int) -> Tensor:
    """Codes of which each word holds as many as fit, low ones first: uint8."""
    if 32 % bits == 0:
        return _unpacked(words, bits=bits)
    mask, words = (1 << bits) - 1, words.contiguous().view(torch.int32)
    return torch.stack([((words >> (bits * index)) & mask).byte() for index in range(32 // bits)], dim=-1).flatten(1)
