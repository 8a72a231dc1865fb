"""The next token of each row of logits: penalties, temperature, min-p, top-k, top-p and the draw, in one launch.

    l'[i] = l[i] / r if l[i] > 0 else l[i] · r      i said before or in the prompt, r the repetition penalty
    l'[i] = l'[i] − presence − frequency · n_i      i said n_i > 0 times
    l'[i] = l'[i] + bias_i
    w[i]  = exp((l'[i] − max l') / temperature)
    kept: w[i] ≥ min_p; of these the top_k largest; of these the largest whose sum first reaches top_p of all of them
    token: the first one, in order of its number, where the kept ones' running sum exceeds u · their sum

Of equal logits the lower number counts as larger. A temperature below GREEDY_BELOW or top_k = 1 takes the largest. A
row whose largest l' is not finite, or that has NaN, gets −1.

u in [0, 1) is the caller's: a number that follows from the request's seed and the token's position alone makes the
token independent of who else is in the batch, of preemption and of drafts. A row is one program, which goes through its
logits in tiles of fixed size and order, so sums do not depend on the batch either.

Shapes: logits fp32 `[rows, vocabulary]`, changed in place by penalties and biases; a `Choice`'s tensors `[rows]`;
tokens int64 `[rows]`.

The k largest, or the largest of a share of the sum, are found without sorting: logits' bits are in the order of their
values, and four of them are fixed by each pass over the row, 16 thresholds at once. Memory: a row is read at most 23
times, from the L2 cache after the first (0.6 MB for 152k tokens); nothing is written but what penalties change. By
kernels of their own a sort writes and reads values and numbers, softmax and running sum the values: at least 40 bytes a
token. Source: radix selection. Oracle: `reference.choose_tokens`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tidegate_kernels.reference import GREEDY_BELOW, Adjustments, Choice

TILE = 1024
ENTRIES = 256
"""Penalties and biases that a program applies at once."""
WARPS = 8


@triton.jit
def _order(x: tl.tensor) -> tl.tensor:
    """An int64 above zero from fp32's bits that is larger for a larger number; −0 and 0 have the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648


@triton.jit
def _value(order: tl.tensor) -> tl.tensor:
    """What has this order."""
    bits = (order - 2147483648).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x: tl.tensor, highest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    return tl.exp(tl.div_rn(x - highest, tl.zeros_like(x) + temperature))


@triton.jit
def _measures(
    logits: tl.tensor,
    columns: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    floor_end: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """A tile's orders (−1 where left out) and weights (0 there): what is of order `floor` counts before `floor_end`."""
    x = tl.load(logits + columns, mask=columns < SIZE, other=float("-inf"))
    weights = _weight(x, highest, temperature)
    orders = _order(x)
    kept = (x > float("-inf")) & (weights >= least)
    kept = kept & ((orders > floor) | ((orders == floor) & (columns < floor_end)))
    return tl.where(kept, orders, -1), tl.where(kept, weights, 0.0)


@triton.jit
def _threshold(
    logits: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    floor_end: tl.tensor,
    limit: tl.tensor,
    COUNTS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The least order above which there is less than `limit`, which is above zero, and how much that is.

    A token measures one (COUNTS) or its weight.
    """
    low = floor * 0
    found = limit * 0.0
    width = low + 268435456
    for _ in range(8):
        tops = low + (tl.arange(0, 16).to(tl.int64) + 1) * width - 1
        parts = tl.zeros((16, TILE), tl.float32)
        for first in range(0, SIZE, TILE):
            columns = first + tl.arange(0, TILE)
            orders, weights = _measures(logits, columns, highest, temperature, least, floor, floor_end, SIZE)
            measure = tl.full(weights.shape, 1.0, tl.float32) if COUNTS else weights
            parts += tl.where(orders[None, :] > tops[:, None], measure[None, :], 0.0)
        above = tl.sum(parts, axis=1)
        # The threshold lies in the first part behind whose top there is less than the limit.
        part = tl.sum((above >= limit).to(tl.int32), 0)
        low += part.to(tl.int64) * width
        found = tl.sum(tl.where(tl.arange(0, 16) == part, above, 0.0), 0)
        width = width // 16
    return low, found


@triton.jit
def _end_of_ties(
    logits: tl.tensor, order: tl.tensor, wanted: tl.tensor, SIZE: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """The number behind the token that is the `wanted`th of this order; SIZE where there are not so many."""
    end = wanted * 0 + SIZE
    before = wanted * 0
    for first in range(0, SIZE, TILE):
        columns = first + tl.arange(0, TILE)
        x = tl.load(logits + columns, mask=columns < SIZE, other=float("-inf"))
        ties = ((_order(x) == order) & (columns < SIZE)).to(tl.int32)
        here = tl.sum(ties, 0)
        if (before < wanted) & (before + here >= wanted):
            ranks = before + tl.cumsum(ties, 0)
            end = tl.min(tl.where((ranks == wanted) & (ties != 0), columns, SIZE), 0) + 1
        before += here
    return end


@triton.jit
def _total(
    logits: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    floor_end: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    total = highest * 0.0
    for first in range(0, SIZE, TILE):
        columns = first + tl.arange(0, TILE)
        _, weights = _measures(logits, columns, highest, temperature, least, floor, floor_end, SIZE)
        total += tl.sum(weights, 0)
    return total


@triton.jit
def _draw(
    logits: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    least: tl.tensor,
    floor: tl.tensor,
    floor_end: tl.tensor,
    random: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    target = random * _total(logits, highest, temperature, least, floor, floor_end, SIZE, TILE)
    token = floor_end * 0 - 1
    before = highest * 0.0
    for first in range(0, SIZE, TILE):
        columns = first + tl.arange(0, TILE)
        _, weights = _measures(logits, columns, highest, temperature, least, floor, floor_end, SIZE)
        here = tl.sum(weights, 0)
        # Rounding may leave the target at the far end: then the last one that weighs anything is taken.
        if (before <= target) & (here > 0.0):
            ends = before + tl.cumsum(weights, 0)
            hit = tl.min(tl.where((ends > target) & (weights > 0.0), columns, SIZE), 0)
            last = tl.max(tl.where(weights > 0.0, columns, -1), 0)
            token = tl.where(hit < SIZE, hit, last)
        before += here
    return token


@triton.jit
def _adjust(
    logits: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    repetition: tl.tensor,
    presence: tl.tensor,
    frequency: tl.tensor,
    ENTRIES: tl.constexpr,
) -> None:
    for first in range(start, end, ENTRIES):
        places = first + tl.arange(0, ENTRIES)
        held = places < end
        token = tl.load(ids + places, mask=held, other=0)
        count = tl.load(counts + places, mask=held, other=-1)
        x = tl.load(logits + token, mask=held, other=0.0)
        repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(count >= 0, repeated, x)
        x = tl.where(count > 0, x - (presence + frequency * count.to(tl.float32)), x)
        x += tl.load(biases + places, mask=held, other=0.0)
        tl.store(logits + token, x, mask=held)


@triton.jit
def choose_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    randoms: tl.tensor,
    starts: tl.tensor,
    ids: tl.tensor,
    counts: tl.tensor,
    biases: tl.tensor,
    repetitions: tl.tensor,
    presences: tl.tensor,
    frequencies: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ENTRIES: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    if starts is not None:
        start, end = tl.load(starts + row), tl.load(starts + row + 1)
        repetition = tl.load(repetitions + row)
        presence, frequency = tl.load(presences + row), tl.load(frequencies + row)
        _adjust(logits, ids, counts, biases, start, end, repetition, presence, frequency, ENTRIES)
        # What some threads wrote all of them read.
        tl.debug_barrier()

    tops = tl.full((TILE,), float("-inf"), tl.float32)
    places = tl.zeros((TILE,), tl.int32)
    nans = tl.zeros((TILE,), tl.int32)
    for first in range(0, SIZE, TILE):
        columns = first + tl.arange(0, TILE)
        x = tl.load(logits + columns, mask=columns < SIZE, other=float("-inf"))
        nans += (x != x).to(tl.int32)
        places = tl.where(x > tops, columns, places)
        tops = tl.where(x > tops, x, tops)
    highest = tl.max(tops, 0)
    token = tl.min(tl.where(tops == highest, places, SIZE), 0)
    is_sound = (tl.sum(nans, 0) == 0) & (highest < float("inf")) & (highest > float("-inf"))
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    if is_sound == 0:
        token = token * 0 - 1
    elif (temperature >= GREEDY_BELOW) & (top_k != 1):
        least, top_p = tl.load(min_ps + row), tl.load(top_ps + row)
        floor = row * 0
        floor_end = token * 0 + SIZE
        if (top_k > 0) & (top_k < SIZE):
            limit = top_k.to(tl.float32)
            order, above = _threshold(logits, highest, temperature, least, floor, floor_end, limit, True, SIZE, TILE)
            floor_end = _end_of_ties(logits, order, top_k - above.to(tl.int32), SIZE, TILE)
            floor = order
        if top_p < 1.0:
            total = _total(logits, highest, temperature, least, floor, floor_end, SIZE, TILE)
            # The largest is kept, however small the share.
            limit = tl.maximum(top_p * total, 1e-30)
            order, above = _threshold(logits, highest, temperature, least, floor, floor_end, limit, False, SIZE, TILE)
            # Equal ones weigh the same: of them, too, as many as it takes.
            wanted = tl.ceil((limit - above) / _weight(_value(order), highest, temperature))
            wanted = tl.minimum(tl.maximum(wanted, 1.0), SIZE).to(tl.int32)
            end = _end_of_ties(logits, order, wanted, SIZE, TILE)
            floor_end = tl.where(order == floor, tl.minimum(end, floor_end), end)
            floor = order
        random = tl.load(randoms + row)
        token = _draw(logits, highest, temperature, least, floor, floor_end, random, SIZE, TILE)
    tl.store(tokens + row, token.to(tl.int64))


def choose_tokens(logits: Tensor, choice: Choice, adjustments: Adjustments | None = None) -> Tensor:
    """The next token of each row, int64, as `reference.choose_tokens` chooses it; `adjustments` None = there are none.

    Raises ValueError where logits are not fp32 or a row's lie in pieces.
    """
    rows, size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("logits must be fp32, those of a row side by side")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    parts: tuple[Tensor | None, ...] = (None,) * 7
    if adjustments is not None:
        parts = (
            adjustments.starts,
            adjustments.ids,
            adjustments.counts,
            adjustments.biases,
            adjustments.repetitions,
            adjustments.presences,
            adjustments.frequencies,
        )
    choose_kernel[(rows,)](
        logits,
        choice.temperatures,
        choice.top_ks,
        choice.top_ps,
        choice.min_ps,
        choice.randoms,
        *parts,
        tokens,
        logits.stride(0),
        SIZE=size,
        TILE=TILE,
        ENTRIES=ENTRIES,
        GREEDY_BELOW=GREEDY_BELOW,
        num_warps=WARPS,
    )
    return tokens
