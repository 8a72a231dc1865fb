"""How fast a model's heads turn with the position: the frequencies of each method that stretches them.

Owns the formulas. The turning itself is `tidegate_kernels`', which method a checkpoint names is its reader's to say.
Frequencies are fixed when a model is loaded, so that a text gives the same however it is cut: the methods that look at
a text's length (dynamic, longrope) look at the context that is served instead.
"""

import math

import torch
from torch import Tensor

from tidegate_engine.architecture import Rope
from tidegate_kernels.reference import rope_tables

START_POSITIONS = 1024


class Turns:
    """The cosines and sines of all positions up to the farthest that was asked for, computed once.

    They take far less memory than the keys and values of as many tokens.
    """

    def __init__(self, frequencies: Tensor, *, magnitude: float, dtype: torch.dtype) -> None:
        self._frequencies = frequencies
        self._magnitude = magnitude
        self._dtype = dtype
        self._cos = self._sin = frequencies.new_empty((0, 1, 2 * len(frequencies)), dtype=dtype)
        self._found = self._cos, self._sin

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What recorded calls of `at` read and write, to be kept for as long as they are replayed."""
        return self._cos, self._sin, *self._found

    def at(self, positions: Tensor, *, end: int) -> tuple[Tensor, Tensor]:
        """What `rope` takes, for int64 `positions` before `end`; valid until the next call."""
        if end > len(self._cos):
            count = max(START_POSITIONS, 1 << (end - 1).bit_length())
            every = torch.arange(count, device=self._frequencies.device)
            tables = rope_tables(every, self._frequencies, magnitude=self._magnitude)
            self._cos, self._sin = (table.to(self._dtype) for table in tables)
        rows = len(positions)
        if rows > len(self._found[0]):
            shape = rows, *self._cos.shape[1:]
            self._found = self._cos.new_empty(shape), self._sin.new_empty(shape)
        cos, sin = (found[:rows] for found in self._found)
        return torch.index_select(self._cos, 0, positions, out=cos), torch.index_select(
            self._sin, 0, positions, out=sin
        )


def rope_frequencies(rope: Rope, *, size: int, context_tokens: int) -> Tensor:
    """Radians a token of each pair, fp32 `[size / 2]`, for a head of which `size` dimensions turn."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    base = rope.base
    if rope.method == "dynamic":
        stretch = rope.factor * max(context_tokens, rope.trained_tokens) / rope.trained_tokens - (rope.factor - 1)
        base *= stretch ** (size / (size - 2))
    frequencies = 1.0 / base**exponents
    if rope.method == "linear":
        return frequencies / rope.factor
    if rope.method == "yarn":
        return _yarn(rope, frequencies, size=size)
    if rope.method == "llama3":
        return _llama3(rope, frequencies)
    divisors = rope.divisors
    if rope.method == "longrope" and context_tokens > rope.trained_tokens:
        divisors = rope.long_divisors
    return frequencies / torch.tensor(divisors) if divisors else frequencies


def rope_magnitude(rope: Rope) -> float:
    """What cosines and sines are multiplied by."""
    if rope.magnitude is not None:
        return rope.magnitude
    if rope.method == "yarn" and rope.factor > 1:
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.method == "longrope" and rope.factor > 1:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.trained_tokens))
    return 1.0


def _yarn(rope: Rope, frequencies: Tensor, *, size: int) -> Tensor:
    """Pairs that turn often within the trained context stay, those that turn seldom are slowed, between them a ramp."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.trained_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.fast_turns), dimension(rope.slow_turns)
    if rope.whole_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    slowed = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


def _llama3(rope: Rope, frequencies: Tensor) -> Tensor:
    """Long waves are slowed, short ones stay, those between are blended by their length."""
    waves = 2 * math.pi / frequencies
    share = (rope.trained_tokens / waves - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    share = share.clamp(0, 1)
    return (1 - share) * frequencies / rope.factor + share * frequencies
