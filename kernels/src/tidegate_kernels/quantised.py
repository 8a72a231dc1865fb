"""Weights in fewer bits than sixteen: FP8 and INT8 with quantised activations, groups of integers, GGUF's blocks.

A product never holds more than a block of rows in fp32: a weight stays in memory as small as it was loaded. On the CPU
the arithmetic is fp32's; activations are rounded to the same FP8 or INT8 numbers that a GPU multiplies.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_kernels.float8 import FP8, FP8_MAX, from_fp8, scales_of, to_fp8
from tidegate_kernels.weight import Dense, Weight, cat_rows, check_cut, finish, multiply_by_rows

INT8_MAX = 127
FP8_BLOCK = 128
UNPACKED_VALUES = 1 << 24
"""Codes that are unpacked at once when columns are cut."""
PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Bits of the planes that codes of so many bits are stored in, lowest first: each divides a byte."""


class Quantised(Weight):
    """What is multiplied by dequantising a block of rows after the other."""

    __slots__ = ()

    @abstractmethod
    def rows(self, first: int, end: int) -> Tensor:
        """The values of rows `[first, end)` in fp32."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return finish(multiply_by_rows(x.float(), self.rows, self.shape), bias, x.dtype)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.rows(0, self.shape[0]).to(dtype)


@dataclass(frozen=True, slots=True)
class Scaled(Quantised):
    """One code a value, and scales for rows or for blocks of them."""

    codes: Tensor
    """`[out, in]`"""
    scales: Tensor
    """fp32, `[out, 1]` or, in blocks, `[⌈out / 128⌉, ⌈in / 128⌉]`"""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def size_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Fp8(Scaled):
    """e4m3 codes with a scale for each row, or for each block of 128 × 128; activations are rounded to FP8 too.

    Activations get a scale for each token, or for each 128 columns of a token.
    """

    in_blocks: bool
    quantised_activations: bool = True

    @property
    def precision(self) -> str:
        return "fp8-block128" if self.in_blocks else "fp8"

    def rows(self, first: int, end: int) -> Tensor:
        values = from_fp8(self.codes[first:end])
        if not self.in_blocks:
            return values.mul_(self.scales[first:end])
        return values.mul_(self._block_scales(torch.arange(first, end, device=values.device)))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values = x.float()
        if self.in_blocks:
            values = _rounded_to_fp8(values, FP8_BLOCK) if self.quantised_activations else values
            return finish(multiply_by_rows(values, self.rows, self.shape), bias, x.dtype)
        values = _rounded_to_fp8(values, values.shape[-1]) if self.quantised_activations else values
        product = multiply_by_rows(values, lambda first, end: from_fp8(self.codes[first:end]), self.shape)
        return finish(product.mul_(self.scales[:, 0]), bias, x.dtype)

    def select(self, rows: Tensor) -> Weight:
        # index_select of e4m3 is not there on every device; its bytes can be selected anywhere.
        codes = self.codes.view(torch.uint8).index_select(0, rows).view(FP8)
        if self.in_blocks:
            return Dense(from_fp8(codes).mul_(self._block_scales(rows)))
        return replace(self, codes=codes, scales=self.scales.index_select(0, rows))

    def join(self, below: "Sequence[Fp8]") -> Weight | None:
        parts = [self, *below]
        if any((p.in_blocks, p.quantised_activations) != (self.in_blocks, self.quantised_activations) for p in parts):
            return None
        if self.in_blocks and any(part.shape[0] % FP8_BLOCK for part in parts[:-1]):
            return None  # a block must not lie across two parts
        codes = cat_rows([part.codes for part in parts])
        return replace(self, codes=codes, scales=cat_rows([part.scales for part in parts]))

    def narrow(self, first: int, count: int) -> Weight:
        if not self.in_blocks:
            return replace(self, codes=self.codes[first : first + count], scales=self.scales[first : first + count])
        if first % FP8_BLOCK:
            return super(Fp8, self).narrow(first, count)
        blocks = slice(first // FP8_BLOCK, -(-(first + count) // FP8_BLOCK))
        return replace(self, codes=self.codes[first : first + count], scales=self.scales[blocks])

    def narrow_columns(self, first: int, count: int) -> "Fp8":
        codes = _columns(self.codes.view(torch.uint8), first, count).view(FP8)
        if not self.in_blocks:
            return replace(self, codes=codes)
        check_cut(first, count, columns=self.shape[1], step=FP8_BLOCK, what="blocks")
        blocks = -(-(first + count) // FP8_BLOCK) - first // FP8_BLOCK
        return replace(self, codes=codes, scales=_columns(self.scales, first // FP8_BLOCK, blocks))

    def _block_scales(self, rows: Tensor) -> Tensor:
        """`[len(rows), in]`"""
        scales = self.scales.index_select(0, rows.div(FP8_BLOCK, rounding_mode="floor"))
        return scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : self.codes.shape[1]]


def _columns(values: Tensor, first: int, count: int) -> Tensor:
    """A copy, in one piece."""
    return values[:, first : first + count].contiguous()


def _rounded_to_fp8(x: Tensor, group: int) -> Tensor:
    """The FP8 numbers nearest to `x` under a scale for each `group` columns of a row, times these scales."""
    columns = x.shape[-1]
    padded = F.pad(x, (0, -columns % group)).view(*x.shape[:-1], -1, group)
    scales = scales_of(padded, largest=FP8_MAX)
    return from_fp8(to_fp8(padded / scales)).mul_(scales).flatten(-2)[..., :columns]


@dataclass(frozen=True, slots=True)
class Int8(Scaled):
    """int8 codes with a scale for each row; activations are rounded to int8 with a scale for each token."""

    @property
    def precision(self) -> str:
        return "int8"

    def rows(self, first: int, end: int) -> Tensor:
        return self.codes[first:end].float().mul_(self.scales[first:end])

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values = x.float()
        scales = scales_of(values, largest=INT8_MAX)
        # Whole numbers in fp32: their sums are exact up to 2^24, as many as 1,040 of the largest products.
        codes = (values / scales).round_()
        product = multiply_by_rows(codes, lambda first, end: self.codes[first:end].float(), self.shape)
        return finish(product.mul_(scales).mul_(self.scales[:, 0]), bias, x.dtype)

    def select(self, rows: Tensor) -> "Int8":
        return Int8(self.codes.index_select(0, rows), self.scales.index_select(0, rows))

    def join(self, below: "Sequence[Int8]") -> Weight | None:
        parts = [self, *below]
        return Int8(cat_rows([part.codes for part in parts]), cat_rows([part.scales for part in parts]))

    def narrow(self, first: int, count: int) -> "Int8":
        return Int8(self.codes[first : first + count], self.scales[first : first + count])

    def narrow_columns(self, first: int, count: int) -> "Int8":
        return Int8(_columns(self.codes, first, count), self.scales)


@dataclass(frozen=True, slots=True)
class Groups(Quantised):
    """Weights alone in integers of `bits` bits: `scale * (code - zero) + minimum` for each group of a row's columns.

    One layout for GGUF's Q4_0 to Q8_0, AWQ, GPTQ, MLX, and compressed-tensors' packed integers.
    """

    bits: int
    planes: tuple[Tensor, ...]
    """uint8 `[out, in * plane's bits / 8]`, one for each of PLANES[bits]. The lowest bits of a plane's bytes hold the
    first columns, the next bits the next: no interleaving, so that whole runs are unpacked at once."""
    scales: Tensor
    """`[out, groups]`, in the type that the checkpoint has them in."""
    zeros: Tensor | int
    """Codes of the value zero, `[out, groups]`, or one for all."""
    minima: Tensor | None = None
    """`[out, groups]`"""
    order: Tensor | None = None
    """int64 `[in]`: which column of the matrix each stored one is, where columns were grouped by importance."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, stored = self.planes[0].shape
        return rows, stored * 8 // PLANES[self.bits][0]

    @property
    def size_bytes(self) -> int:
        others = [tensor for tensor in (self.zeros, self.minima, self.order) if isinstance(tensor, Tensor)]
        return sum(tensor.nbytes for tensor in (*self.planes, self.scales, *others))

    @property
    def precision(self) -> str:
        return f"int{self.bits}-g{self.group}"

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.scales.shape[1]

    def codes(self, first: int, end: int) -> Tensor:
        """Rows `[first, end)` of the codes, in fp32."""
        widths = PLANES[self.bits]
        values = _unpack(self.planes[0][first:end], widths[0])
        shift = widths[0]
        for plane, width in zip(self.planes[1:], widths[1:], strict=True):
            values.add_(_unpack(plane[first:end], width), alpha=1 << shift)
            shift += width
        return values

    def rows(self, first: int, end: int) -> Tensor:
        values = self._stored_rows(first, end)
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        values = x.float() if self.order is None else x.float().index_select(-1, self.order)
        return finish(multiply_by_rows(values, self._stored_rows, self.shape), bias, x.dtype)

    def _stored_rows(self, first: int, end: int) -> Tensor:
        values = self.codes(first, end)
        groups = values.view(end - first, self.scales.shape[1], -1)
        if isinstance(self.zeros, Tensor):
            groups.sub_(self.zeros[first:end, :, None])
        elif self.zeros:
            groups.sub_(self.zeros)
        groups.mul_(self.scales[first:end, :, None])
        if self.minima is not None:
            groups.add_(self.minima[first:end, :, None])
        return values

    def select(self, rows: Tensor) -> "Groups":
        return replace(
            self,
            planes=tuple(plane.index_select(0, rows) for plane in self.planes),
            scales=self.scales.index_select(0, rows),
            zeros=self.zeros.index_select(0, rows) if isinstance(self.zeros, Tensor) else self.zeros,
            minima=None if self.minima is None else self.minima.index_select(0, rows),
        )

    def narrow_columns(self, first: int, count: int) -> "Groups":
        if self.order is not None:
            raise ValueError(
                f"a weight in {self.precision} whose columns were grouped by importance has parts of every group in "
                "every part of its columns"
            )
        check_cut(first, count, columns=self.shape[1], step=self.group, what="groups")
        if count % 8:
            raise ValueError(f"{count} columns; codes of {self.bits} bits are packed 8 at a time")
        start, groups = first // self.group, count // self.group
        rows = max(1, UNPACKED_VALUES // self.shape[1])
        parts = [
            pack_codes(_columns(self.codes(row, min(row + rows, self.shape[0])), first, count), bits=self.bits)
            for row in range(0, self.shape[0], rows)
        ]
        return replace(
            self,
            planes=tuple(torch.cat(planes) for planes in zip(*parts, strict=True)),
            scales=_columns(self.scales, start, groups),
            zeros=_columns(self.zeros, start, groups) if isinstance(self.zeros, Tensor) else self.zeros,
            minima=None if self.minima is None else _columns(self.minima, start, groups),
        )

    def join(self, below: "Sequence[Groups]") -> Weight | None:
        parts = [self, *below]
        if any(part._layout != self._layout for part in parts):
            return None
        if self.order is not None and not all(
            part.order is not None and torch.equal(part.order, self.order) for part in below
        ):
            return None
        return replace(
            self,
            planes=tuple(torch.cat(planes) for planes in zip(*(part.planes for part in parts), strict=True)),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat([part.zeros for part in parts if isinstance(part.zeros, Tensor)])
            if isinstance(self.zeros, Tensor)
            else self.zeros,
            minima=None
            if self.minima is None
            else torch.cat([part.minima for part in parts if part.minima is not None]),
        )

    @property
    def _layout(self) -> tuple[object, ...]:
        """What parts must have in common to become one."""
        zeros = self.zeros.dtype if isinstance(self.zeros, Tensor) else self.zeros
        minima = None if self.minima is None else self.minima.dtype
        return self.bits, self.group, self.scales.dtype, zeros, minima, self.order is None


def pack_codes(codes: Tensor, *, bits: int) -> tuple[Tensor, ...]:
    """Codes `[out, in]` of 0 to 2^bits − 1 as the planes of `Groups`; `in` must be a multiple of 8."""
    planes = []
    left = codes.to(torch.uint8)
    for width in PLANES[bits]:
        part = left.bitwise_and((1 << width) - 1)
        runs = part.view(codes.shape[0], 8 // width, -1)
        plane = runs[:, 0].clone()
        for index in range(1, 8 // width):
            plane.bitwise_or_(runs[:, index] << (width * index))
        planes.append(plane)
        left = left >> width if width < 8 else left
    return tuple(planes)


def _unpack(plane: Tensor, width: int) -> Tensor:
    """A plane's codes in fp32, `[rows, columns]`."""
    if width == 8:
        return plane.float()
    rows, run = plane.shape
    values = torch.empty(rows, run * 8 // width, dtype=torch.float32, device=plane.device)
    for index in range(8 // width):
        part = plane >> (width * index) if index else plane
        # Nothing lies above the last run's bits.
        values[:, index * run : (index + 1) * run] = part & ((1 << width) - 1) if index < 8 // width - 1 else part
    return values


@dataclass(frozen=True, slots=True)
class Blocks(Quantised):
    """Rows of a file's own blocks, as they are in the file; `decode` makes fp32 values of some rows' bytes."""

    name: str
    stored: Tensor
    """uint8 `[out, bytes of a row]`"""
    columns: int
    block_columns: int
    decode: Callable[[Tensor], Tensor]

    @property
    def shape(self) -> tuple[int, int]:
        return self.stored.shape[0], self.columns

    @property
    def size_bytes(self) -> int:
        return self.stored.nbytes

    @property
    def precision(self) -> str:
        return self.name

    def rows(self, first: int, end: int) -> Tensor:
        return self.decode(self.stored[first:end])

    def select(self, rows: Tensor) -> "Blocks":
        return replace(self, stored=self.stored.index_select(0, rows))

    def narrow(self, first: int, count: int) -> "Blocks":
        return replace(self, stored=self.stored[first : first + count])

    def narrow_columns(self, first: int, count: int) -> "Blocks":
        check_cut(first, count, columns=self.columns, step=self.block_columns, what="blocks")
        block_bytes = self.stored.shape[1] * self.block_columns // self.columns
        blocks = count // self.block_columns
        stored = _columns(self.stored, first // self.block_columns * block_bytes, blocks * block_bytes)
        return replace(self, stored=stored, columns=count)


def quantise_fp8(values: Tensor) -> Fp8:
    """FP8 with a scale for each row."""
    scales = scales_of(values, largest=FP8_MAX)
    return Fp8(to_fp8(values.float() / scales), scales, in_blocks=False)


def quantise_fp8_blocks(values: Tensor) -> Fp8:
    """FP8 with a scale for each block of 128 × 128."""
    rows, columns = values.shape
    padded = F.pad(values.float(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    tiles = padded.view(padded.shape[0] // FP8_BLOCK, FP8_BLOCK, -1, FP8_BLOCK)
    scales = tiles.abs().amax(dim=(1, 3)).clamp_(min=1e-12).div_(FP8_MAX)
    codes = to_fp8(tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return Fp8(codes.contiguous(), scales, in_blocks=True)


def quantise_int8(values: Tensor) -> Int8:
    """INT8 with a scale for each row."""
    scales = scales_of(values, largest=INT8_MAX)
    return Int8((values.float() / scales).round_().to(torch.int8), scales)


def quantise_groups(values: Tensor, *, bits: int, group: int) -> Groups:
    """Integers between the least and the largest value of each `group` columns, with fp16 scales and minima."""
    rows, columns = values.shape
    tiles = values.float().view(rows, columns // group, group)
    # Rounded before codes are chosen: these make up for the rounding.
    minima = tiles.amin(dim=-1).half()
    scales = ((tiles.amax(dim=-1) - minima) / ((1 << bits) - 1)).clamp_(min=1e-7).half()
    codes = ((tiles - minima[..., None]) / scales[..., None]).round_().clamp_(0, (1 << bits) - 1)
    return Groups(
        bits=bits,
        planes=pack_codes(codes.view(rows, columns), bits=bits),
        scales=scales,
        zeros=0,
        minima=minima,
    )
