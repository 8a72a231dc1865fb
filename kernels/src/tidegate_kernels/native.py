"""Products with packed weights by compiled code, on x86-64 CPUs that have AVX2 or AVX-512.

Owns the binding to `native.c` and what it takes; the layouts are `weight`'s and `quantised`'s, and so is the meaning of
their values, which torch gives where no library was compiled. Called by `transformer` when it lays out weights, and by
`native_decoder`.
"""

import ctypes
import hashlib
import platform
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_kernels.quantised import Blocks, Groups
from tidegate_kernels.weight import Dense, Stacked, Weight, Wrapped, finish, multiplies_halves

SOURCE = Path(__file__).with_name("native.c")
KINDS = {
    torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3, torch.int8: 4, torch.uint8: 5
}  # fmt: skip
"""native.c's `kind` of values and of scales."""
UNSIGNED4 = 6
BLOCKS = {"q4_k": 7, "q6_k": 8}
GGUF_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"})
"""Types of a file's tensors that are multiplied here as they are stored."""
INSTRUCTIONS = {"AVX2": "avx2", "AVX512": "avx512"}
"""What is compiled, by torch's name for what the CPU has."""
TILE_ROWS = 4
"""Rows whose values a thread has at once."""
MAX_PARTS = 3
STEP = 16
"""Columns that share a scale are a multiple of it."""
FEW_VALUES = 1 << 18
"""Values of `x` up to which products are computed here. More do not stay in a core's cache; torch is faster with them,
and with the weights' values that are made here."""
FEW_COLUMNS = 1024
"""Up to so many, bands of rows stay in the cache however many rows there are."""
BLOCK_VALUES = 1 << 20
"""Values made at once for torch."""


class Matrix(Structure):
    """What native.c needs to know of a weight."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("zeros", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("groups", c_int64),
        ("kind", c_int32),
        ("scale_kind", c_int32),
        ("zero", c_float),
    )


class Projection(Structure):
    """Matrices below each other, and a bias."""

    _fields_ = (("parts", Matrix * MAX_PARTS), ("count", c_int64), ("bias", c_void_p))


class Threads(Structure):
    """How many threads work, how they are started, and room for each."""

    _fields_ = (
        ("parallel", c_void_p),
        ("team_size", c_void_p),
        ("count", c_int64),
        ("scratch", c_void_p),
        ("scratch_floats", c_int64),
    )


@dataclass(frozen=True, slots=True)
class Library:
    """The compiled code for this CPU."""

    name: str
    code: ctypes.CDLL
    parallel: int | None
    """OpenMP's entry points in the library that torch uses: the threads are the same, and no more of them."""
    team_size: int | None

    def threads(self, floats: int) -> tuple[Threads, Tensor]:
        """As many as torch may use in the calling thread, with so many floats of scratch each; and what holds these."""
        count = 1 if self.parallel is None else torch.get_num_threads()
        room = torch.empty(count * floats)
        return Threads(self.parallel, self.team_size, count, room.data_ptr(), floats), room


def file_name(instructions: str, source: bytes) -> str:
    """Of the library for these instructions, made from this source: one made from another is not taken for it."""
    return f"native-{instructions}-{hashlib.sha256(source).hexdigest()[:12]}.so"


@cache
def library() -> Library | None:
    """None where there is none for this CPU: torch computes everything then."""
    instructions = _instructions()
    path = None if instructions is None else _path(instructions)
    if instructions is None or path is None or not path.exists():
        return None
    code = ctypes.CDLL(str(path))
    code.tidegate_multiply.argtypes = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p)
    code.tidegate_rows.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_void_p)
    code.tidegate_decode.argtypes = (c_void_p, c_void_p, c_void_p)
    for function in (code.tidegate_multiply, code.tidegate_rows, code.tidegate_decode):
        function.restype = None
    return Library(instructions, code, *_openmp())


def why_not() -> str:
    """Why there is no library, and what to do."""
    instructions = _instructions()
    if instructions is None:
        return "this CPU has no AVX2 instructions"
    return f"{_path(instructions)} is missing: install the package again where there is a C compiler (gcc, libc6-dev)"


def _instructions() -> str | None:
    if platform.machine() != "x86_64":
        return None
    return INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability())


def _path(instructions: str) -> Path:
    return SOURCE.with_name(file_name(instructions, SOURCE.read_bytes()))


def _openmp() -> tuple[int | None, int | None]:
    try:
        # Looked up in what torch's library depends on.
        torch_library: Any = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = (torch_library.GOMP_parallel, torch_library.omp_get_num_threads)
    except (OSError, AttributeError):
        return None, None
    return tuple(ctypes.cast(function, c_void_p).value for function in found)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Native(Wrapped):
    """A weight that native.c multiplies where it lies."""

    projection: Projection
    kept: tuple[Tensor, ...] = field(repr=False)
    """What the projection points to: the source's own tensors as far as native.c takes them as they are."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.source, Dense) and self.source.values.dtype == x.dtype and _is_torchs(x):
            return F.linear(x, self.source.values, bias)
        if x.numel() > FEW_VALUES and x.shape[1] > FEW_COLUMNS:
            return self._multiply_many(x, bias)
        values = x.float().contiguous()
        product = torch.empty(len(values), self.shape[0])
        _call("multiply", self.projection, values.data_ptr(), len(values), product, columns=self.shape[1])
        return finish(product, bias, x.dtype)

    def _multiply_many(self, x: Tensor, bias: Tensor | None) -> Tensor:
        (rows, columns), values = self.shape, x.float()
        step = max(1, BLOCK_VALUES // columns)
        product = torch.empty(len(x), rows)
        for first in range(0, rows, step):
            end = min(rows, first + step)
            torch.mm(values, self.rows(first, end).T, out=product[:, first:end])
        return finish(product, bias, x.dtype)

    def rows(self, first: int, end: int) -> Tensor:
        values = torch.empty(end - first, self.shape[1])
        _call("rows", self.projection, first, end - first, values, columns=self.shape[1])
        return values


def _is_torchs(x: Tensor) -> bool:
    """Whether torch is faster with weights of the type of `x`."""
    return x.numel() > FEW_VALUES if x.dtype == torch.float32 else multiplies_halves()


def laid_out(weight: Weight) -> Weight:
    """In the layout that products are fastest with: native.c's where there is a library for it, torch's otherwise."""
    found = projection_of(weight)
    return weight.laid_out() if found is None else Native(weight, *found)


def projection_of(weight: Weight, bias: Tensor | None = None) -> tuple[Projection, tuple[Tensor, ...]] | None:
    """What native.c multiplies with, and the tensors to be kept while it does; None where it cannot."""
    if library() is None:
        return None
    if bias is not None and bias.dtype != torch.float32:
        return None
    if isinstance(weight, Native):
        matrices, count, kept = weight.projection.parts, weight.projection.count, weight.kept
    else:
        parts = weight.parts if isinstance(weight, Stacked) else (weight,)
        found = [_matrix(part) for part in parts]
        if len(parts) > MAX_PARTS or None in found:
            return None
        described = [each for each in found if each is not None]
        matrices, count = (Matrix * MAX_PARTS)(*(matrix for matrix, _ in described)), len(parts)
        kept = tuple(tensor for _, tensors in described for tensor in tensors)
    if bias is None:
        return Projection(matrices, count, None), kept
    return Projection(matrices, count, bias.data_ptr()), (*kept, bias)


def _call(name: str, projection: Projection, first: int, second: int, to: Tensor, *, columns: int) -> None:
    found = library()
    assert found is not None
    threads, _room = found.threads(scratch_floats(columns))
    getattr(found.code, f"tidegate_{name}")(byref(projection), first, second, to.data_ptr(), byref(threads))


def scratch_floats(columns: int) -> int:
    """Room for one thread: values of rows of so many columns, a scale and a minimum for each group of theirs."""
    return TILE_ROWS * (columns + 2 * max(1, columns // STEP))


def _matrix(weight: Weight) -> tuple[Matrix, tuple[Tensor, ...]] | None:
    rows, columns = weight.shape
    match weight:
        case Dense() if weight.values.dtype in KINDS and weight.values.is_contiguous() and _is_here(weight.values):
            return _described(weight.values, rows, columns, KINDS[weight.values.dtype])
        case Blocks() if weight.name in BLOCKS and weight.stored.is_contiguous() and _is_here(weight.stored):
            return _described(weight.stored, rows, columns, BLOCKS[weight.name])
        case Groups() if weight.bits in (4, 8) and weight.order is None and _is_here(weight.planes[0]):
            return _groups(weight)
    return None


def _groups(weight: Groups) -> tuple[Matrix, tuple[Tensor, ...]] | None:
    (rows, columns), group, (codes,) = weight.shape, weight.group, weight.planes
    # Four bits: both halves of the columns go on in steps that share a scale.
    unit = group // 2 if weight.bits == 4 and columns // 2 % group else group
    scales, minima, zeros = weight.scales, weight.minima, weight.zeros
    if unit % STEP or scales.dtype not in KINDS or not codes.is_contiguous():
        return None
    if isinstance(zeros, Tensor) and minima is None and zeros.dtype == torch.uint8:
        kind = UNSIGNED4 if weight.bits == 4 else KINDS[torch.uint8]
        return _described(codes, rows, columns, kind, scales.contiguous(), zeros=zeros.contiguous())
    if isinstance(zeros, Tensor):
        scales = scales.float()
        minima = -scales * zeros if minima is None else minima.float() - scales * zeros
    elif minima is not None and (zeros or minima.dtype != scales.dtype):
        scales = scales.float()
        minima = minima.float() - scales * zeros
    zero = zeros if minima is None and not isinstance(zeros, Tensor) else 0
    scales, minima = scales.contiguous(), None if minima is None else minima.contiguous()
    kind = UNSIGNED4 if weight.bits == 4 else KINDS[torch.uint8]
    return _described(codes, rows, columns, kind, scales, minima, zero=float(zero))


def _described(
    codes: Tensor,
    rows: int,
    columns: int,
    kind: int,
    scales: Tensor | None = None,
    minima: Tensor | None = None,
    *,
    zeros: Tensor | None = None,
    zero: float = 0.0,
) -> tuple[Matrix, tuple[Tensor, ...]]:
    tensors = tuple(tensor for tensor in (codes, scales, minima, zeros) if tensor is not None)
    matrix = Matrix(
        codes.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if minima is None else minima.data_ptr(),
        None if zeros is None else zeros.data_ptr(),
        rows,
        columns,
        1 if scales is None else scales.shape[1],
        kind,
        0 if scales is None else KINDS[scales.dtype],
        zero,
    )
    return matrix, tensors


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
