"""Weight matrices in the precisions that the engine multiplies with, and the few operations that it needs of them.

Owns each precision's layout and its product on the CPU. Which precision a parameter gets is the engine's to say, and so
is what a checkpoint's tensors mean; `transformer` calls `linear` and `gather_rows`, the readers `slice_rows` and
`concat_rows`, the split over GPUs `slice_columns` too.
"""

import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK_VALUES = 1 << 18
"""Values brought to fp32 at once for a product: 1 MiB, which stays in a core's cache."""
PACK_ROWS = 64
"""Rows that packed weights are laid out for: 1.4 times as fast as unpacked at 8 rows, equal at 1 and at 128."""


class Weight(ABC):
    """A matrix `[out, in]`, of which `x` takes the product `x @ weight.T`."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes held, scales and zero points among them."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """What it is stored in: `bfloat16`, `fp8`, `int4`; a mixture joins its names with `+`."""

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias` for `[T, in]`, in the type of `x`."""

    @abstractmethod
    def select(self, rows: Tensor) -> "Weight":
        """The rows of these numbers (int64), in this order."""

    @abstractmethod
    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the format defines, `[out, in]`."""

    def rows(self, first: int, end: int) -> Tensor:
        """The values of rows `[first, end)` in fp32."""
        return self.dequantised()[first:end]

    def laid_out(self) -> "Weight":
        """In the layout that `multiply` is fastest with, whose rows may not be selectable any more."""
        return self

    @property
    def held(self) -> "Weight":
        """What lies in memory: another weight, where this one only multiplies with its values."""
        return self

    def narrow(self, first: int, count: int) -> "Weight":
        """So many rows one after the other, without a copy where the layout allows it."""
        return self if (first, count) == (0, self.shape[0]) else self.select(torch.arange(first, first + count))

    def narrow_columns(self, first: int, count: int) -> "Weight":
        """So many columns one after the other, copied. Raises ValueError where the layout cannot be cut there."""
        raise ValueError(f"columns of a weight in {self.precision} cannot be cut; cut it before laying it out")

    def join(self, below: "Sequence[Self]") -> "Weight | None":
        """One weight of the same kind with the rows of `below` after its own, or None where the parts do not agree."""
        return None


@dataclass(frozen=True, slots=True)
class Wrapped(Weight):
    """A weight that is multiplied in another way than its own; everything else is asked of itself."""

    source: Weight

    @property
    def shape(self) -> tuple[int, int]:
        return self.source.shape

    @property
    def size_bytes(self) -> int:
        return self.source.size_bytes

    @property
    def precision(self) -> str:
        return self.source.precision

    @property
    def held(self) -> Weight:
        return self.source

    def select(self, rows: Tensor) -> Weight:
        return self.source.select(rows)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.source.dequantised(dtype)


class ExpertMatrices(ABC):
    """One matrix `[out, in]` of every expert of a mixture."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """`[experts, out, in]`"""

    @property
    @abstractmethod
    def size_bytes(self) -> int: ...

    @property
    @abstractmethod
    def precision(self) -> str:
        """As that of a `Weight`."""

    @abstractmethod
    def multiply(self, x: Tensor, starts: Tensor) -> Tensor:
        """The products of rows `[starts[e], starts[e + 1])` of `x` with the matrix of expert e; int32, all rows."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in the type of `x`."""
    return weight.multiply(x, bias)


def gather_rows(weight: Weight, rows: Tensor, *, dtype: torch.dtype) -> Tensor:
    """The values of some rows (an embedding's), `[len(rows), in]`."""
    return weight.select(rows).dequantised(dtype)


def slice_rows(weight: Weight, first: int, count: int) -> Weight:
    """Rows one after the other (one parameter's of a stored tensor) as a weight of the same kind: see `narrow`."""
    return weight.narrow(first, count)


def slice_columns(weight: Weight, first: int, count: int) -> Weight:
    """Columns one after the other as a weight of the same kind: see `narrow_columns`."""
    return weight if (first, count) == (0, weight.shape[1]) else weight.narrow_columns(first, count)


def check_cut(first: int, count: int, *, columns: int, step: int, what: str) -> None:
    """Raises ValueError where columns `[first, first + count)` begin or end inside one of `what`, `step` wide."""
    end = first + count
    if first % step or (end % step and end != columns):
        raise ValueError(f"columns {first} to {end} of {columns} cut through {what} of {step} columns")


def concat_rows(parts: Sequence[Weight]) -> Weight:
    """The parts' rows in one weight (a fused projection), copied together where they are of one kind."""
    first, *below = parts
    if not below:
        return first
    alike = all(type(part) is type(first) for part in below)
    return (first.join(below) if alike else None) or Stacked(tuple(parts))


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """The parts' rows in one tensor, which is no copy where they lie one after the other in one memory already."""
    first = parts[0]
    place = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.data_ptr() != place or not part.is_contiguous():
            # Not every type of a byte can be joined on every device, and bytes can.
            narrow = first.dtype.itemsize == 1
            joined = torch.cat([part.view(torch.uint8) for part in parts] if narrow else list(parts))
            return joined.view(first.dtype) if narrow else joined
        place += part.nbytes
    row = first[0].numel() if len(first) else 1
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), (row, *first.stride()[1:]))


def multiply_by_rows(x: Tensor, rows: Callable[[int, int], Tensor], shape: tuple[int, int]) -> Tensor:
    """`x @ values.T` in fp32, where `rows(first, end)` makes values of the `[out, in]` only as they are needed."""
    out, columns = shape
    step = max(1, BLOCK_VALUES // columns)
    if step >= out:
        return F.linear(x, rows(0, out))
    product = x.new_empty(*x.shape[:-1], out)
    for first in range(0, out, step):
        end = min(first + step, out)
        product[..., first:end] = F.linear(x, rows(first, end))
    return product


def finish(product: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add the bias to an fp32 product, in place, and round."""
    return (product if bias is None else product.add_(bias)).to(dtype)


def multiplies_halves() -> bool:
    """Whether this CPU multiplies bf16 matrices faster than it does fp32 ones brought from them: five times slower
    where instructions for it are missing."""
    if platform.machine() in ("arm64", "aarch64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@dataclass(frozen=True, slots=True)
class Unscaled(Weight):
    """One tensor of values, and nothing beside it."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def size_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()


@dataclass(frozen=True, slots=True)
class Dense(Unscaled):
    """Floating-point values as they are."""

    @property
    def precision(self) -> str:
        return str(self.values.dtype).removeprefix("torch.")

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype == self.values.dtype and (x.dtype == torch.float32 or x.shape[0] == 1 or not self._in_fp32):
            return F.linear(x, self.values, bias)
        product = multiply_by_rows(x.float(), self.rows, self.shape)
        return finish(product, bias, x.dtype)

    def rows(self, first: int, end: int) -> Tensor:
        return self.values[first:end].float()

    @property
    def _in_fp32(self) -> bool:
        return self.values.device.type == "cpu" and not multiplies_halves()

    def select(self, rows: Tensor) -> "Dense":
        return Dense(self.values.index_select(0, rows))

    def narrow(self, first: int, count: int) -> "Dense":
        """Values may have one dimension or, as rows below each other, three."""
        values = self.values.flatten(0, -2) if self.values.dim() == 3 else self.values
        return Dense(values[first : first + count])

    def narrow_columns(self, first: int, count: int) -> "Dense":
        return Dense(self.values[:, first : first + count].contiguous())

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values.to(dtype)

    def laid_out(self) -> Weight:
        if self.values.device.type == "cpu" and self.values.dtype == torch.float32 and torch._C._has_mkldnn:
            return Packed(torch.ops.mkldnn._reorder_linear_weight(self.values.contiguous(), PACK_ROWS))
        return self

    def join(self, below: "Sequence[Dense]") -> Weight | None:
        parts = [self.values, *(part.values for part in below)]
        if any(part.dtype != self.values.dtype for part in parts):
            return None
        return Dense(cat_rows(parts))


@dataclass(frozen=True, slots=True)
class Packed(Unscaled):
    """fp32 values in oneDNN's own order, for the product alone."""

    @property
    def precision(self) -> str:
        return "float32"

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.values, bias, "none", [], "")
        return product

    def select(self, rows: Tensor) -> "Packed":
        raise TypeError("rows of a weight in oneDNN's order cannot be selected; select before laying it out")

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.values.to_dense(dtype)


@dataclass(frozen=True, slots=True)
class Stacked(Weight):
    """Parts of different kinds, one's rows after the other's."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def precision(self) -> str:
        return "+".join(dict.fromkeys(part.precision for part in self.parts))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = torch.cat([part.multiply(x, None) for part in self.parts], dim=-1)
        return product if bias is None else product.add_(bias)

    def select(self, rows: Tensor) -> "Stacked":
        raise TypeError("rows of stacked weights cannot be selected; select before stacking")

    def narrow(self, first: int, count: int) -> Weight:
        """Of each part the rows that lie inside."""
        start, found = 0, []
        for part in self.parts:
            low, high = max(first, start), min(first + count, start + part.shape[0])
            if low < high:
                found.append(part.narrow(low - start, high - low))
            start += part.shape[0]
        return found[0] if len(found) == 1 else Stacked(tuple(found))

    def narrow_columns(self, first: int, count: int) -> Weight:
        return Stacked(tuple(part.narrow_columns(first, count) for part in self.parts))

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.cat([part.dequantised(dtype) for part in self.parts])

    def laid_out(self) -> Weight:
        return Stacked(tuple(part.laid_out() for part in self.parts))
