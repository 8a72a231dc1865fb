"""Which precision each kind of parameter and the KV cache is held in: what users write, parsed.

No torch: the command line checks its flags with this. `quantize` makes weights what is said here.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

STORED = "stored"
"""As the checkpoint has it."""
DTYPES = {
    "auto": "float32",
    "float32": "float32", "fp32": "float32", "float": "float32",
    "float16": "float16", "fp16": "float16", "half": "float16",
    "bfloat16": "bfloat16", "bf16": "bfloat16",
}  # fmt: skip
"""What activations may be computed in, by the names that users know; `auto` is what this CPU is fastest with."""
KV_DTYPES = ("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "int8")
KV_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8"}
GROUPED = re.compile(r"int([2-8])-g(\d+)")
DEFAULT_GROUPS = (128, 64, 32)
"""Columns that share a scale in `int4`: the most of these that a row's length is a multiple of."""
LAYER_KINDS: Mapping[str, tuple[str, ...]] = {
    "attn": ("attn_qkv", "attn_o"),
    "attn_qkv": ("attn_qkv",),
    "attn_o": ("attn_o",),
    "mlp": ("mlp",),
    "lm_head": ("lm_head",),
    "embed": ("embed",),
}
"""What may be named in a policy, and the kinds of parameters that it means."""
_PARAMETER_KINDS = {
    "embedding": "embed", "head": "lm_head",
    "q": "attn_qkv", "k": "attn_qkv", "v": "attn_qkv", "attention_output": "attn_o",
    "gate": "mlp", "up": "mlp", "down": "mlp",
}  # fmt: skip
ONLINE_METHODS = {"fp8": "fp8", "int8": "int8"}
"""vLLM's `--quantization` values that mean quantising a checkpoint while it is loaded."""
CHECKPOINT_METHODS = {
    "awq": "awq", "awq_marlin": "awq", "gptq": "gptq", "gptq_marlin": "gptq", "gguf": "gguf", "mlx": "mlx",
    "compressed-tensors": "compressed-tensors",
}  # fmt: skip
"""vLLM's `--quantization` values that say how a checkpoint was quantised, and our name for it."""


DEQUANTISED_FRACTION = 0.25
"""Share of the available memory up to which a quantised checkpoint is dequantised, unless told otherwise: where torch
multiplies, products with whole numbers in memory are several times as fast as with packed ones."""
_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class PrecisionError(ValueError):
    """A policy that cannot be followed: one sentence."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision for each kind of matrix; what is not named is in `dtype`, as norms, biases and routers always are."""

    dtype: str = "float32"
    kinds: Mapping[str, str] | None = None
    """None = left to `settled`."""
    layers: Mapping[int, str] = field(default_factory=dict)
    kv: str = "auto"

    def of(self, parameter: str, *, tied_head: bool = False) -> str | None:
        """The precision of a decoder's parameter (`layers.3.q`), or None for one that is a vector or a router.

        An embedding that is the head too is held as the head is.
        """
        *path, name = parameter.split(".")
        kind = _PARAMETER_KINDS.get(name)
        if kind is None:
            return None
        if kind == "embed" and tied_head:
            kind = "lm_head"
        if path and path[0] == "layers" and (own := self.layers.get(int(path[1]))):
            return own
        return (self.kinds or {}).get(kind, self.dtype)

    @property
    def kv_dtype(self) -> str:
        """`float32`, `bfloat16`, `float16`, `fp8` or `int8`."""
        return self.dtype if self.kv == "auto" else KV_NAMES.get(self.kv, self.kv)


def settled(
    precision: Precision,
    shapes: Mapping[str, tuple[int, ...]],
    stored_bytes: Mapping[str, int],
    *,
    tied_head: bool,
    available_bytes: int,
    stored_is_fast: bool = False,
) -> Precision:
    """The policy with nothing left open: matrices as they are stored where all in `dtype` would take much memory.

    `stored_is_fast`: products with them are at least as fast, so that memory does not matter.
    """
    if precision.kinds is not None:
        return precision
    if stored_is_fast:
        return as_stored(precision)
    dense, stored = replace(precision, kinds={}), as_stored(precision)
    needed = weight_bytes(dense, shapes, stored_bytes, tied_head=tied_head)
    if needed <= DEQUANTISED_FRACTION * available_bytes:
        return dense
    return stored if weight_bytes(stored, shapes, stored_bytes, tied_head=tied_head) < needed else dense


def as_stored(precision: Precision) -> Precision:
    """The policy with matrices as they are stored where it leaves them open."""
    kinds = dict.fromkeys(_PARAMETER_KINDS.values(), STORED)
    return replace(precision, kinds=kinds) if precision.kinds is None else precision


def weight_bytes(
    precision: Precision,
    shapes: Mapping[str, tuple[int, ...]],
    stored_bytes: Mapping[str, int],
    *,
    tied_head: bool,
    head_apart: bool = True,
) -> int:
    """Bytes of all parameters (names and shapes as the decoder has them) under a settled policy.

    `head_apart`: in fp32 a tied head is laid out for the product beside the embedding.
    """
    total = 0
    for name, shape in shapes.items():
        wanted = precision.of(name, tied_head=tied_head) or precision.dtype
        size = stored_bytes[name] if wanted == STORED else matrix_bytes(wanted, shape)
        in_fp32 = wanted == "float32" or (wanted == STORED and size == matrix_bytes("float32", shape))
        total += 2 * size if name == "embedding" and tied_head and head_apart and in_fp32 else size
    return total


def matrix_bytes(precision: str, shape: tuple[int, ...]) -> int:
    """Bytes of a matrix in a precision other than `stored`, scales among them; of a vector in one of floating point."""
    values = prod(shape)
    if size := _VALUE_BYTES.get(precision):
        return values * size
    rows, columns = values // shape[-1], shape[-1]
    if precision in ("fp8", "int8"):
        return values + 4 * rows
    if precision == "fp8-block128":
        return values + 4 * -(-rows // 128) * -(-columns // 128)
    bits, group = grouping(precision, columns) or (4, DEFAULT_GROUPS[-1])
    return values * bits // 8 + values // group * 4


def grouping(precision: str, columns: int) -> tuple[int, int] | None:
    """Bits and columns of a group for rows of so many columns; None where no group divides them."""
    match = GROUPED.fullmatch(precision)
    bits, groups = (int(match[1]), [int(match[2])]) if match else (4, list(DEFAULT_GROUPS))
    fitting = [group for group in groups if columns % group == 0]
    return (bits, fitting[0]) if fitting else None


def parse_precision(text: str, *, dtype: str = "auto", kv: str = "auto") -> Precision:
    """A policy such as `{attn: bf16, mlp: int8, lm_head: bf16, kv: fp8, layers: {0: bf16}}`, or one name for all.

    A quantised one alone is that of attention's and the MLPs' matrices: embedding and head, which suffer most, stay in
    `dtype`. Raises PrecisionError.
    """
    known_dtype = DTYPES.get(dtype)
    if known_dtype is None:
        raise PrecisionError(f"the type {dtype!r} is unknown; known are {', '.join(DTYPES)}")
    text = text.strip()
    if not text or text == "auto":
        return Precision(dtype=known_dtype, kv=_checked_kv(kv))
    if not any(mark in text for mark in ":={"):
        name = _checked(text)
        whole = name == STORED or name in _VALUE_BYTES
        kinds = dict.fromkeys(("attn", "mlp", "lm_head", "embed") if whole else ("attn", "mlp"), name)
        return Precision(dtype=known_dtype, kinds=_spread(kinds), kv=_checked_kv(kv))
    parsed = _parse_mapping(text)
    layers = parsed.pop("layers", {})
    named_kv = parsed.pop("kv", None)
    if not isinstance(layers, dict):
        raise PrecisionError("layers is a mapping of numbers to precisions, such as {0: bf16}")
    kinds = {}
    for name, value in parsed.items():
        if name not in LAYER_KINDS:
            known = ", ".join((*LAYER_KINDS, "kv", "layers"))
            raise PrecisionError(f"the kind of layer {name!r} is unknown; known are {known}")
        if not isinstance(value, str):
            raise PrecisionError(f"{name} is a mapping; a precision is needed")
        kinds[name] = _checked(value)
    if named_kv is not None and (not isinstance(named_kv, str) or kv not in ("auto", named_kv)):
        raise PrecisionError(f"the precision of the KV cache is given twice: {named_kv} and {kv}")
    return Precision(
        dtype=known_dtype,
        kinds=_spread(kinds),
        layers={_layer_number(number): _checked(str(value)) for number, value in layers.items()},
        kv=_checked_kv(kv if named_kv is None else named_kv),
    )


def _spread(kinds: Mapping[str, str]) -> dict[str, str]:
    """By the kinds of parameters; what is named more exactly wins."""
    spread: dict[str, str] = {}
    for name in sorted(kinds, key=lambda name: -len(LAYER_KINDS[name])):
        spread |= dict.fromkeys(LAYER_KINDS[name], kinds[name])
    return spread


def _checked(name: str) -> str:
    if name in ("auto", *DTYPES):
        return DTYPES[name]
    if name in (STORED, "fp8", "fp8-block128", "int8", "int4"):
        return name
    if (match := GROUPED.fullmatch(name)) and int(match[2]) % 8 == 0 and int(match[2]) > 0:
        return name
    raise PrecisionError(
        f"the precision {name!r} is unknown; known are float32, bfloat16, float16, fp8, fp8-block128, int8, int4, "
        f"int4-g64 (2 to 8 bits, groups of a multiple of 8) and {STORED}"
    )


def _checked_kv(name: str) -> str:
    if name not in KV_DTYPES and name not in KV_NAMES:
        raise PrecisionError(f"the KV cache cannot be held in {name!r}; known are {', '.join(KV_DTYPES)}")
    return name


def _layer_number(text: str) -> int:
    if not text.isdecimal():
        raise PrecisionError(f"{text!r} is not a layer's number")
    return int(text)


_TOKEN = re.compile(r"\s*([{}:=,]|\"[^\"]*\"|'[^']*'|[^\s{}:=,\"']+)\s*")
Mapped = dict[str, "str | Mapped"]


def _parse_mapping(text: str) -> Mapped:
    """`{a: b, c: {d: e}}`, quotes and the outer braces left out at will, `=` as good as `:`."""
    tokens, position = [], 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise PrecisionError(f"{text!r} has a quotation mark without its pair")
        tokens.append(match[1])
        position = match.end()
    if tokens[0] != "{":
        tokens = ["{", *tokens, "}"]
    found, rest = _mapping(tokens[1:])
    if rest:
        raise PrecisionError(f"{text!r} goes on after its mapping ends")
    return found


def _mapping(tokens: list[str]) -> tuple[Mapped, list[str]]:
    found: Mapped = {}
    while tokens and tokens[0] != "}":
        if len(tokens) < 3 or tokens[1] not in ":=" or tokens[0] in "{:=,":
            raise PrecisionError(f"a mapping is written {{name: precision}}; {' '.join(tokens[:3])!r} is none")
        name = tokens[0].strip("\"'")
        if name in found:
            raise PrecisionError(f"{name} is given twice")
        if tokens[2] == "{":
            found[name], tokens = _mapping(tokens[3:])
        else:
            found[name], tokens = tokens[2].strip("\"'"), tokens[3:]
        if tokens and tokens[0] == ",":
            tokens = tokens[1:]
    if not tokens:
        raise PrecisionError("a mapping's closing brace is missing")
    return found, tokens[1:]
