"""What the blocks of GGML's quantised types mean: as groups of integers where they are that, decoded otherwise.

Owns the layouts of the types that torch reads here; the rarer ones, whose tables `gguf` has, are `ggml_types`' to add.
Names are GGML's. Every decoder takes uint8 `[rows, bytes of a row]` and returns fp32 `[rows, columns]`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tidegate_kernels.quantised import Groups, pack_codes

GROUP_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def groups_of(name: str, stored: Tensor) -> Groups:
    """Rows of blocks of one of GROUP_TYPES in the layout that is multiplied, with the same values."""
    rows = stored.shape[0]
    size = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}[name]
    blocks = stored.view(rows, -1, size)
    scales = _halves(blocks[..., :2])
    if name == "Q8_0":
        # int8 to codes from 0: the sign bit turned.
        codes = (blocks[..., 2:] ^ 0x80).view(rows, -1)
        return Groups(bits=8, planes=(codes,), scales=scales, zeros=128)
    has_minima = name.endswith("1")
    start = 4 if has_minima else 2
    nibbles = blocks[..., -16:]
    codes = torch.cat((nibbles & 15, nibbles >> 4), dim=-1)
    bits = 4
    if name.startswith("Q5"):
        bits = 5
        codes |= _bits(blocks[..., start : start + 4]) << 4
    return Groups(
        bits=bits,
        planes=pack_codes(codes.view(rows, -1), bits=bits),
        scales=scales,
        zeros=0 if has_minima else 1 << (bits - 1),
        minima=_halves(blocks[..., 2:4]) if has_minima else None,
    )


def decoder_of(name: str) -> Callable[[Tensor], Tensor] | None:
    """What turns rows of blocks of a `K` type into values; None for a type that is not one of them."""
    return {"Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}.get(name)


def _q2_k(stored: Tensor) -> Tensor:
    blocks = stored.view(stored.shape[0], -1, 84)
    packed, codes = blocks[..., :16], _crumbs(blocks[..., 16:80])
    d, least = _halves(blocks[..., 80:82]).float(), _halves(blocks[..., 82:84]).float()
    scales, minima = d[..., None] * (packed & 15), least[..., None] * (packed >> 4)
    return _scaled(codes.float(), scales, minima)


def _q3_k(stored: Tensor) -> Tensor:
    blocks = stored.view(stored.shape[0], -1, 110)
    high, low, packed = blocks[..., :32], blocks[..., 32:96], blocks[..., 96:108]
    fours = torch.cat((packed[..., :8] & 15, packed[..., :8] >> 4), dim=-1)
    twos = torch.cat([packed[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1)
    scales = _halves(blocks[..., 108:])[..., None].float() * (fours | twos << 4).to(torch.int8).sub_(32)
    bits = torch.cat([high >> shift & 1 for shift in range(8)], dim=-1)
    codes = (_crumbs(low) | bits << 2).to(torch.int8).sub_(4)
    return _scaled(codes.float(), scales, None)


def _q4_k(stored: Tensor) -> Tensor:
    blocks = stored.view(stored.shape[0], -1, 144)
    return _scaled(_nibbles(blocks[..., 16:]).float(), *_scales_and_minima(blocks))


def _q5_k(stored: Tensor) -> Tensor:
    blocks = stored.view(stored.shape[0], -1, 176)
    high = blocks[..., 16:48]
    codes = _nibbles(blocks[..., 48:]) | torch.cat([(high >> shift & 1) << 4 for shift in range(8)], dim=-1)
    return _scaled(codes.float(), *_scales_and_minima(blocks))


def _q6_k(stored: Tensor) -> Tensor:
    blocks = stored.view(stored.shape[0], -1, 210)
    # Halves of 128 values: 64 bytes of low nibbles and 32 of two high bits each.
    low = blocks[..., :128].view(*blocks.shape[:2], 2, 64)
    low = torch.cat((low & 15, low >> 4), dim=-1)
    codes = (low | _crumbs(blocks[..., 128:192]).view(low.shape) << 4).flatten(-2)
    scales = _halves(blocks[..., 208:])[..., None].float() * blocks[..., 192:208].view(torch.int8)
    return _scaled(codes.float().sub_(32), scales, None)


def _scaled(codes: Tensor, scales: Tensor, minima: Tensor | None) -> Tensor:
    """`codes * scales − minima`, where `[rows, blocks, n]` scales belong to as many runs of a block's codes."""
    runs = codes.view(*scales.shape, -1).mul_(scales[..., None])
    if minima is not None:
        runs.sub_(minima[..., None])
    return codes.view(codes.shape[0], -1)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the eight runs of a Q4_K or Q5_K block: six bits each, the upper four's spread over two bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | (first >> 6) << 4), dim=-1)
    minima = torch.cat((second & 63, third >> 4 | (second >> 6) << 4), dim=-1)
    d, least = _halves(blocks[..., :2]).float(), _halves(blocks[..., 2:4]).float()
    return d[..., None] * scales, least[..., None] * minima


def _nibbles(packed: Tensor) -> Tensor:
    """Runs of 32 bytes: their low halves, then their high ones."""
    runs = packed.view(*packed.shape[:-1], -1, 32)
    return torch.cat((runs & 15, runs >> 4), dim=-1).flatten(-2)


def _crumbs(packed: Tensor) -> Tensor:
    """Runs of 32 bytes: their lowest two bits, then the next two, and so on."""
    runs = packed.view(*packed.shape[:-1], -1, 32)
    return torch.cat([runs >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1).flatten(-2)


def _bits(packed: Tensor) -> Tensor:
    """32 values of one bit from four bytes, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(-2)


def _halves(two_bytes: Tensor) -> Tensor:
    """fp16 numbers from pairs of bytes, without the last dimension."""
    return two_bytes.contiguous().view(torch.float16).squeeze(-1)
