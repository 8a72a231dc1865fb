"""Attention of a step's new tokens over the paged cache: decodes and prefill chunks of any lengths in one launch.

For row t at position p of its sequence, query head h and its key-value head g = h // (H / K), over the positions
j ≤ p with j > p − window, and those of a sequence's first tokens that its own view keeps, where k and v are the cache's
codes and κ and ν their scales (1 without):

    s_j = scale · κ_j · (q_th · k_j)            s_j = cap · tanh(s_j / cap)  with a soft cap
    o   = Σ_j exp(s_j) · ν_j · v_j  /  (Σ_j exp(s_j) + exp(sink_h))          no sink: no such term

Scales are folded in after the first product and before the second, so that codes go into the matrix units as they are;
both products take bf16 (fp16 where query and cache are) and add up in fp32, as does the softmax, which runs online.

Shapes: query `[T, H, D]`, its heads side by side; caches `[blocks, K, block tokens, D]`, scales without D; output
`[T, H * D]` of the query's type. A program has the queries of TOKENS tokens of one sequence and all H / K heads that
share its keys, as ROWS rows, and one of SPLITS shares of their keys, TILE at a time. With SPLITS = 1 it writes its
output; else it writes an unnormalised sum, a maximum and a divisor in fp32, which `combine_kernel` adds up.

Memory: keys and values are read once for all heads that share them, and never written out dequantised, which would be
four bytes more (a write and a read of bf16) for each byte of FP8 or INT8. Splits cost 8 · D + 16 bytes for each row,
head and split. Source: online softmax, Milakov and Gimelshein 2018; split keys, Dao et al., Flash-Decoding 2023; the
search for a program's sequence is that of vLLM's unified attention. Oracle: `reference.paged_attention`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver

from tidegate_kernels.reference import AttentionRule, Cache, Ragged

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_SPLITS = 32
MIN_SPLIT_TOKENS = 512
"""Keys below which another split costs more than it brings: a guess, to be measured."""
MAX_SPLIT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Launch:
    """How programs are cut."""

    rows: int
    tile: int
    warps: int
    stages: int


def launch_for(head_size: int, *, rows: int, architecture: int) -> Launch:
    """A heuristic, not measured: what fits an architecture's shared memory (80 for sm_80) and spills no registers.

    `rows`: the longest sequence's new tokens times the heads that share keys.
    """
    rows = min(max(16, triton.next_power_of_2(rows)), 64)
    if rows == 16:
        return Launch(rows=rows, tile=32, warps=4, stages=3)
    # wgmma and tcgen05 take an operand from shared memory; mma.sync wants both in registers.
    in_registers = architecture // 10 not in (9, 10)
    wide = head_size > 128
    return Launch(rows=rows, tile=32 if wide or in_registers else 64, warps=8 if wide else 4, stages=2)


@triton.jit
def _first_program(query_starts: tl.tensor, sequence: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Each sequence begins a program of its own, so there are at most T // TOKENS + sequences."""
    start = tl.load(query_starts + sequence)
    if TOKENS == 1:
        return start
    return start // TOKENS + sequence


@triton.jit
def _sequence_of(query_starts: tl.tensor, program: tl.tensor, sequences: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    low = program * 0
    high = low + sequences
    while high - low > 1:
        middle = (low + high) // 2
        begun = _first_program(query_starts, middle, TOKENS) <= program
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle)
    return low


@triton.jit
def attend_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    block_tables: tl.tensor,
    query_starts: tl.tensor,
    kv_lengths: tl.tensor,
    views: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    divisors: tl.tensor,
    sequences: tl.tensor,
    query_row: tl.tensor,
    table_row: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    program, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    sequence = _sequence_of(query_starts, program, sequences, TOKENS)
    start = tl.load(query_starts + sequence)
    new = tl.load(query_starts + sequence + 1) - start
    first = (program - _first_program(query_starts, sequence, TOKENS)) * TOKENS
    if first < new:
        length = tl.load(kv_lengths + sequence)
        rows = tl.arange(0, ROWS)
        tokens = first + rows // SHARE
        heads = kv_head * SHARE + rows % SHARE
        positions = length - new + tokens
        dims = tl.arange(0, PADDED_SIZE)
        is_row = (rows < TOKENS * SHARE) & (tokens < new)
        held = is_row[:, None] & (dims < SIZE)[None, :]
        q = tl.load(
            query + (start + tokens).to(tl.int64)[:, None] * query_row + heads[:, None] * SIZE + dims[None, :],
            mask=held,
            other=0.0,
        ).to(DTYPE)

        end = tl.minimum(length - new + first + TOKENS, length)
        first_tile = 0
        if WINDOW is not None:
            first_tile = tl.maximum(length - new + first - WINDOW + 1, 0) // TILE
        # Tiles of the first tokens that stay seen, and those hidden between them and the newest.
        staying, hidden = 0, first_tile
        if views is not None:
            view, stay = tl.load(views + 2 * sequence), tl.load(views + 2 * sequence + 1)
            hidden = tl.maximum(length - new + first - view + 1, 0) // TILE
            staying = tl.minimum(tl.cdiv(stay, TILE), hidden)
            hidden -= staying
        share = tl.cdiv(tl.cdiv(end, TILE) - hidden, SPLITS)
        if views is None:
            begin = hidden + split * share
            stop = tl.minimum(begin + share, tl.cdiv(end, TILE))
        else:
            begin = split * share
            stop = tl.minimum(begin + share, tl.cdiv(end, TILE) - hidden)

        total = tl.zeros((ROWS, PADDED_SIZE), tl.float32)
        maximum = tl.full((ROWS,), float("-inf"), tl.float32)
        divisor = tl.zeros((ROWS,), tl.float32)
        table = block_tables + sequence.to(tl.int64) * table_row
        for index in range(begin, stop):
            tile = index
            if views is not None:
                tile = tl.where(index < staying, index, index + hidden)
            columns = tile * TILE + tl.arange(0, TILE)
            seen = columns < end
            blocks = tl.load(table + columns // BLOCK_TOKENS, mask=seen, other=0).to(tl.int64)
            places = (blocks * KV_HEADS + kv_head) * BLOCK_TOKENS + columns % BLOCK_TOKENS
            k = tl.load(
                key_cache + places[None, :] * SIZE + dims[:, None],
                mask=seen[None, :] & (dims < SIZE)[:, None],
                other=0.0,
            )
            scores = tl.dot(q, k.to(DTYPE))
            if key_scales is not None:
                scores *= tl.load(key_scales + places, mask=seen, other=0.0)[None, :]
            if SOFT_CAP:
                # tanh x = 1 − 2 / (exp 2x + 1)
                scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * LOG2_E / soft_cap)) + 1.0)
                scores *= soft_cap * LOG2_E
            else:
                scores *= scale * LOG2_E
            visible = seen[None, :] & (columns[None, :] <= positions[:, None])
            if WINDOW is not None:
                visible = visible & (columns[None, :] > positions[:, None] - WINDOW)
            if views is not None:
                visible = visible & ((columns[None, :] > positions[:, None] - view) | (columns < stay)[None, :])
            scores = tl.where(visible, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
            # A row that has seen nothing yet: −inf − 0, and not −inf − −inf.
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(maximum - base)
            maximum = new_maximum
            divisor = divisor * shrink + tl.sum(weights, axis=1)
            if value_scales is not None:
                weights *= tl.load(value_scales + places, mask=seen, other=0.0)[None, :]
            v = tl.load(
                value_cache + places[:, None] * SIZE + dims[None, :],
                mask=seen[:, None] & (dims < SIZE)[None, :],
                other=0.0,
            )
            total = tl.dot(weights.to(DTYPE), v.to(DTYPE), total * shrink[:, None])

        places = (start + tokens).to(tl.int64) * HEADS + heads
        if SPLITS == 1:
            if sinks is not None:
                total, divisor = _with_sink(total, maximum, divisor, tl.load(sinks + heads, mask=is_row, other=0.0))
            found = total / tl.where(divisor == 0.0, 1.0, divisor)[:, None]
            tl.store(output + places[:, None] * SIZE + dims[None, :], found.to(output.dtype.element_ty), mask=held)
        else:
            places = places * SPLITS + split
            tl.store(maxima + places, maximum, mask=is_row)
            tl.store(divisors + places, divisor, mask=is_row)
            if begin < stop:
                tl.store(sums + places[:, None] * SIZE + dims[None, :], total, mask=held)


@triton.jit
def _with_sink(total: tl.tensor, maximum: tl.tensor, divisor: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """Sum and divisor with one more key of score `sink`, whose value is zero."""
    sink = sink.to(tl.float32) * LOG2_E
    top = tl.maximum(maximum, sink)
    shrink = tl.exp2(maximum - top)
    return total * shrink[:, None], divisor * shrink + tl.exp2(sink - top)


@triton.jit
def combine_kernel(
    sums: tl.tensor,
    maxima: tl.tensor,
    divisors: tl.tensor,
    query_starts: tl.tensor,
    sinks: tl.tensor,
    output: tl.tensor,
    sequences: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """One program for each row and head: the shares' sums, brought to their common maximum, over their divisors."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row < tl.load(query_starts + sequences):
        place = row.to(tl.int64) * HEADS + head
        splits = place * SPLITS + tl.arange(0, SPLITS)
        dims = tl.arange(0, PADDED_SIZE)
        maximum = tl.load(maxima + splits)
        divisor = tl.load(divisors + splits)
        top = tl.max(maximum, axis=0)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            top = tl.maximum(top, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp2(maximum - top)
        whole = tl.sum(divisor * shrink, axis=0)
        if sinks is not None:
            whole += tl.exp2(sink - top)
        held = (divisor > 0.0)[:, None] & (dims < SIZE)[None, :]
        total = tl.load(sums + splits[:, None] * SIZE + dims[None, :], mask=held, other=0.0)
        found = tl.sum(total * shrink[:, None], axis=0) / tl.where(whole == 0.0, 1.0, whole)
        tl.store(output + place * SIZE + dims, found.to(output.dtype.element_ty), mask=dims < SIZE)


def splits_for(programs: int, kv_tokens: int, *, processors: int, split_bytes: int) -> int:
    """Into how many shares the longest sequence's keys are cut: enough for two programs a multiprocessor.

    `split_bytes`: what one more split of all rows takes. A heuristic, not measured.
    """
    wanted = min(2 * processors // programs, kv_tokens // MIN_SPLIT_TOKENS, MAX_SPLIT_BYTES // split_bytes, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


def paged_attention(
    query: Tensor, cache: Cache, batch: Ragged, rule: AttentionRule, *, splits: int | None = None
) -> Tensor:
    """Attention of `[T, H, D]` over the paged cache; returns `[T, H * D]`, as `reference.paged_attention` does.

    Rows behind the last sequence's are left unwritten; a sequence without tokens in the cache gets zeros. `splits`, a
    power of two: None = as many as fill the GPU. Raises ValueError where query and cache are not of types that are
    multiplied: bf16 or fp16 ones, the cache of the same type or quantised; and where both sequences and layers say how
    far they see.
    """
    if batch.view_table is not None and rule.window is not None:
        raise ValueError("a sequence has a view of its own only where the layers have no window")
    interpreted = triton.knobs.runtime.interpret
    dtype = _product_dtype(query, cache, interpreted=interpreted)
    count, heads, size = query.shape
    if query.stride(1) != size or query.stride(2) != 1:
        raise ValueError("a row's heads must lie side by side")
    output = query.new_empty(count, heads * size)
    if count == 0:
        return output
    kv_heads, block_tokens = cache.keys.shape[1:3]
    share, sequences = heads // kv_heads, len(batch.kv_lengths)
    longest = max(batch.counts[0])
    architecture = 0 if interpreted else driver.active.get_current_target().arch
    launch = launch_for(size, rows=max(longest, 1) * share, architecture=architecture)
    # Decodes alone: exactly one program a token.
    tokens = 1 if longest <= 1 else max(1, launch.rows // share)
    rows = max(launch.rows, triton.next_power_of_2(share))
    programs = count if tokens == 1 else count // tokens + sequences
    split_bytes = count * heads * (size + 2) * 4
    if splits is None:
        processors = 1 if interpreted else torch.cuda.get_device_properties(query.device).multi_processor_count
        splits = splits_for(programs * kv_heads, max(batch.counts[1]), processors=processors, split_bytes=split_bytes)
    sums = maxima = divisors = None
    if splits > 1:
        sums = query.new_empty((count, heads, splits, size), dtype=torch.float32)
        maxima, divisors = (query.new_empty((count, heads, splits), dtype=torch.float32) for _ in range(2))
    padded = max(16, triton.next_power_of_2(size))
    attend_kernel[(programs, kv_heads, splits)](
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        batch.block_tables,
        batch.query_starts,
        batch.kv_lengths,
        batch.view_table,
        rule.sinks,
        output,
        sums,
        maxima,
        divisors,
        sequences,
        query.stride(0),
        batch.block_tables.stride(0),
        rule.scale,
        rule.soft_cap or 1.0,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        PADDED_SIZE=padded,
        BLOCK_TOKENS=block_tokens,
        WINDOW=rule.window,
        SOFT_CAP=rule.soft_cap is not None,
        TOKENS=tokens,
        ROWS=rows,
        TILE=launch.tile,
        SPLITS=splits,
        DTYPE=dtype,
        num_warps=launch.warps,
        num_stages=launch.stages,
    )
    if splits > 1:
        combine_kernel[(count, heads)](
            sums,
            maxima,
            divisors,
            batch.query_starts,
            rule.sinks,
            output,
            sequences,
            HEADS=heads,
            SIZE=size,
            PADDED_SIZE=padded,
            SPLITS=splits,
        )
    return output


def _product_dtype(query: Tensor, cache: Cache, *, interpreted: bool) -> tl.dtype:
    """What matrices are multiplied in."""
    if interpreted:
        # The interpreter's products of bf16 are wrong.
        return tl.float32
    if query.dtype not in (torch.bfloat16, torch.float16) or (
        cache.key_scales is None and cache.keys.dtype != query.dtype
    ):
        raise ValueError(
            f"queries of {query.dtype} over a cache of {cache.keys.dtype}: on a GPU both are bf16 or both fp16, "
            "or the cache is quantised; load the model with --dtype bfloat16"
        )
    return tl.float16 if cache.keys.dtype == torch.float16 else tl.bfloat16
