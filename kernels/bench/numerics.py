"""Every kernel against its formula in float64: relative error of the whole result, and whether that is little enough.

Expected values are computed on the CPU from the very inputs of the kernel, codes and scales included. Called by `h200`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from measuring import Place, Report
from tidegate_kernels import (
    block_scaled_gemm,
    gate,
    grouped_gemm,
    int4_gemm,
    kv_store,
    norm,
    paged_attention,
    quantise,
    reference,
    rope_store,
    sampling,
    scaled_gemm,
)
from tidegate_kernels.compiled import experts_laid_out
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantised import FP8_BLOCK, quantise_fp8, quantise_fp8_blocks, quantise_groups, quantise_int8
from tidegate_kernels.reference import AttentionRule, Cache, Choice, Code, HeadNorm, QuantisedRows, Ragged, ragged_batch

EPS = 1e-5
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 5e-3}
"""Relative error that results of these types may have."""
CODES = {FP8: 0.05, torch.int8: 0.05}
"""The same of values that were brought to codes, a long row's largest far above the others."""


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    columns: int
    out: int
    head_size: int
    context: int
    vocabulary: int


REAL = Sizes(rows=48, columns=4096, out=1024, head_size=128, context=1500, vocabulary=128_256)
TINY = Sizes(rows=3, columns=256, out=64, head_size=16, context=20, vocabulary=300)
Check = tuple[str, str, Tensor, Tensor, float]
"""The kernel, the case, what it found, what is expected, and the error allowed."""


def run(place: Place, report: Report) -> None:
    for section in (_norms, _quantisers, _stores, _attention, _products, _choices):
        for check in _checks(section, place, report):
            kernel, case, found, expected, allowed = check
            error = relative_error(found, expected)
            report.add(kernel=kernel, case=case, error=error, allowed=allowed, passed=error <= allowed)


def _checks(section: Callable[[Place, Sizes], Iterator[Check]], place: Place, report: Report) -> Iterator[Check]:
    """Those that there is time for; one that raises is reported, and ends its group alone."""
    checks = section(place, TINY if place.rehearsed else REAL)
    while report.has_time():
        try:
            yield next(checks)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001  # the other kernels are to be checked all the same
            report.add(kernel=section.__name__, case=f"{type(error).__name__}: {error}"[:300], passed=False)
            return


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Infinite where anything is not a number, or the shapes differ."""
    found, expected = found.detach().cpu().double(), expected.double()
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


class _Draw:
    """Normal numbers on the place's device, and what they are on the CPU in float64."""

    def __init__(self, place: Place) -> None:
        self._place, self._generator = place, torch.Generator().manual_seed(11)

    def __call__(self, *shape: int, spread: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self._generator) * spread
        return values.to(self._place.device, self._place.dtype)


def exact(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def _norms(place: Place, sizes: Sizes) -> Iterator[Check]:
    draw, allowed = _Draw(place), ROUNDED[place.dtype]
    x, residual, weight = draw(sizes.rows, sizes.columns), draw(sizes.rows, sizes.columns), draw(sizes.columns)
    plain = reference.rms_norm(exact(x), exact(weight), eps=EPS)
    yield "norm_kernel", "rms", norm.rms_norm(x, weight, eps=EPS), plain, allowed
    summed = (x + residual).cpu().double()
    added = reference.rms_norm(summed, exact(weight), eps=EPS)
    kept = residual.clone()
    yield "norm_kernel", "add, rms", norm.add_rms_norm(x, kept, weight, eps=EPS), added, allowed
    yield "norm_kernel", "the residual", kept, summed, allowed
    for dtype in (FP8, torch.int8):
        codes = norm.norm_and_quantise(x, weight, Code(dtype), eps=EPS, residual=residual.clone())
        yield "norm_kernel", f"add, rms, {dtype}", values_of(codes), added, CODES[dtype]


def values_of(rows: QuantisedRows) -> Tensor:
    codes, scales = rows.codes.cpu().float(), rows.scales.cpu()
    group = -(-codes.shape[1] // scales.shape[1])
    return codes * scales.repeat_interleave(group, dim=1)[:, : codes.shape[1]]


def _quantisers(place: Place, sizes: Sizes) -> Iterator[Check]:
    draw, allowed = _Draw(place), ROUNDED[place.dtype]
    x, gate_up = draw(sizes.rows, sizes.columns), draw(sizes.rows, 2 * sizes.columns)
    for code in (Code(FP8), Code(FP8, FP8_BLOCK), Code(torch.int8)):
        found = quantise.quantise_rows(x, code)
        yield "quantise_kernel", f"{code.dtype} {code.group or ''}", values_of(found), exact(x), CODES[code.dtype]
    silu, gelu = reference.silu_mul(exact(gate_up)), reference.gelu_mul(exact(gate_up))
    yield "gate_kernel", "silu", gate.silu_mul(gate_up), silu, allowed
    yield "gate_kernel", "gelu", gate.gelu_mul(gate_up), gelu, allowed
    codes = gate.gate_and_quantise(gate_up, Code(FP8), activation="silu")
    yield "gate_kernel", "silu, fp8", values_of(codes), silu, CODES[FP8]


def new_cache(place: Place, *, blocks: int, kv_heads: int, size: int, dtype: torch.dtype | None = None) -> Cache:
    """Of 16 tokens a block; `dtype` None = that of activations."""
    shape = (blocks, kv_heads, 16, size)
    keys, values = (torch.zeros(shape, dtype=dtype or place.dtype, device=place.device) for _ in range(2))
    if dtype not in (FP8, torch.int8):
        return Cache(keys, values)
    key_scales, value_scales = (torch.zeros(shape[:3], device=place.device) for _ in range(2))
    return Cache(keys, values, key_scales, value_scales)


def cache_values(cache: Cache) -> tuple[Tensor, Tensor]:
    """Keys and values `[blocks * block tokens, K, D]` in float64, in the order of slots."""

    def of(codes: Tensor, scales: Tensor | None) -> Tensor:
        values = codes.cpu().float().double()
        values = values if scales is None else values * scales.cpu().double()[..., None]
        return values.transpose(1, 2).flatten(0, 1)

    return of(cache.keys, cache.key_scales), of(cache.values, cache.value_scales)


def _stores(place: Place, sizes: Sizes) -> Iterator[Check]:
    draw, heads, kv_heads, size = _Draw(place), 8, 2, sizes.head_size
    slots = (torch.arange(sizes.rows, device=place.device) * 5) % 64
    slots[-1] = -1  # padding
    real = slots[:-1].cpu()
    new = draw(sizes.rows, heads + 2 * kv_heads, size)
    weight = draw(heads + kv_heads, size)
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2) / size)
    tables = reference.rope_tables(torch.arange(sizes.rows), frequencies)
    there = tuple(table.to(place.device, place.dtype) for table in tables)
    turned = exact(new)[:, :-kv_heads]
    turned = turned / (turned.square().mean(-1, keepdim=True) + EPS).sqrt() * exact(weight)
    turned = reference.rope(turned, exact(there[0]), exact(there[1]))
    for dtype in (place.dtype, FP8, torch.int8):
        allowed = CODES.get(dtype, ROUNDED[place.dtype])
        cache = new_cache(place, blocks=4, kv_heads=kv_heads, size=size, dtype=dtype)
        kv_store.store_kv(new[:, heads:-kv_heads], new[:, -kv_heads:], cache, slots)
        keys, values = (each[real] for each in cache_values(cache))
        yield "store_kv_kernel", f"keys, {dtype}", keys, exact(new[:-1, heads:-kv_heads]), allowed
        yield "store_kv_kernel", f"values, {dtype}", values, exact(new[:-1, -kv_heads:]), allowed
        cache = new_cache(place, blocks=4, kv_heads=kv_heads, size=size, dtype=dtype)
        queries = rope_store.turn_and_store(new, cache, slots, tables=(there[0], there[1]), norm=HeadNorm(weight, EPS))
        keys = cache_values(cache)[0][real]
        yield "turn_and_store_kernel", f"queries, {dtype}", queries, turned[:, :heads], ROUNDED[place.dtype]
        yield "turn_and_store_kernel", f"keys, {dtype}", keys, turned[:-1, heads:], allowed


def _attention(place: Place, sizes: Sizes) -> Iterator[Check]:
    heads, kv_heads, size = 8, 2, sizes.head_size
    draw, plain = _Draw(place), AttentionRule(size**-0.5)
    bent = AttentionRule(size**-0.5, window=sizes.context // 2, soft_cap=20.0, sinks=draw(heads).float())
    decodes = ([1, 1], [sizes.context, sizes.context // 3])
    mixed = ([sizes.context // 2, 1, sizes.context // 4], [sizes.context, 2, sizes.context // 4])
    for dtype in (place.dtype, FP8, torch.int8):
        for name, (new, total), rule, splits in (
            ("decode", decodes, plain, 1),
            ("decode, keys split", decodes, plain, 4),
            ("decode, window, cap, sinks", decodes, bent, 2),
            ("chunks and a decode", mixed, plain, 1),
            ("chunks, window, cap, sinks", mixed, bent, 1),
        ):
            blocks = [-(-each // 16) for each in total]
            cache = new_cache(place, blocks=1 + sum(blocks), kv_heads=kv_heads, size=size, dtype=dtype)
            tables, first = [], 1
            for count in blocks:
                tables.append(list(range(first, first + count))[::-1])
                first += count
            for each, table in zip(total, tables, strict=True):
                whole = ragged_batch([each], [each], [table], cache=cache).to(place.device)
                kv_store.store_kv(draw(each, kv_heads, size), draw(each, kv_heads, size), cache, whole.slots)
            batch = ragged_batch(new, total, tables, cache=cache).to(place.device)
            query = draw(sum(new), heads, size)
            found = paged_attention.paged_attention(query, cache, batch, rule, splits=splits)
            kernel = "combine_kernel" if splits > 1 else "attend_kernel"
            # Weights of the softmax are rounded to the type of the product.
            expected = attention_in_double(exact(query), cache, batch, rule)
            yield kernel, f"{name}, {dtype}", found, expected, 2 * ROUNDED[place.dtype]


def attention_in_double(query: Tensor, cache: Cache, batch: Ragged, rule: AttentionRule) -> Tensor:
    """By the definition, a sequence and a head at a time."""
    keys, values = cache_values(cache)
    heads, share = query.shape[1], query.shape[1] // keys.shape[1]
    table, size, first, outputs = batch.block_tables.cpu().long(), batch.block_tokens, 0, []
    for index, (new, total) in enumerate(zip(*batch.counts, strict=True)):
        places = torch.arange(total)
        slots = table[index, places // size] * size + places % size
        own = torch.arange(total - new, total)[:, None]
        seen = (places <= own) & (places > own - (rule.window or total))
        parts = []
        for head in range(heads):
            scores = query[first : first + new, head] @ keys[slots, head // share].T * rule.scale
            scores = scores if rule.soft_cap is None else (scores / rule.soft_cap).tanh() * rule.soft_cap
            scores = scores.masked_fill(~seen, -torch.inf)
            if rule.sinks is not None:
                scores = torch.cat((scores, rule.sinks[head].cpu().double().expand(new, 1)), dim=1)
            parts.append(scores.softmax(-1)[:, :total] @ values[slots, head // share])
        outputs.append(torch.stack(parts, dim=1).flatten(1))
        first += new
    return torch.cat(outputs)


def _products(place: Place, sizes: Sizes) -> Iterator[Check]:
    draw, allowed = _Draw(place), ROUNDED[place.dtype]
    weight, bias = draw(sizes.out, sizes.columns, spread=sizes.columns**-0.5).float(), draw(sizes.out)
    for rows in (1, sizes.rows) if place.rehearsed else (1, sizes.rows, 200):
        x = draw(rows, sizes.columns)
        for name, quantised, code in (
            ("fp8", quantise_fp8(weight), Code(FP8)),
            ("int8", quantise_int8(weight), Code(torch.int8)),
        ):
            codes = quantise.quantise_rows(x, code)
            expected = (exact(codes.codes.float()) @ exact(quantised.codes.float()).T) * exact(codes.scales)
            expected = expected * exact(quantised.scales)[:, 0] + exact(bias)
            for library in (False, True) if name == "fp8" and rows > 16 and not place.rehearsed else (False,):
                found = scaled_gemm.scaled_linear(codes, quantised, bias, dtype=place.dtype, library=library)
                kernel = "torch._scaled_mm" if library else "scaled_kernel"
                yield kernel, f"{name}, {rows} rows", found, expected, allowed
        blocks, codes = quantise_fp8_blocks(weight), quantise.quantise_rows(x, Code(FP8, FP8_BLOCK))
        expected = values_of(codes).double() @ exact(blocks.dequantised()).T + exact(bias)
        found = block_scaled_gemm.scaled_linear(codes, blocks, bias, dtype=place.dtype)
        yield "block_scaled_kernel", f"{rows} rows", found, expected, allowed
        groups = quantise_groups(weight, bits=4, group=64)
        expected = exact(x) @ exact(groups.dequantised()).T + exact(bias)
        found = int4_gemm.int4_linear(x, int4_gemm.repack(groups), bias)
        yield "int4_kernel", f"groups of 64, {rows} rows", found, expected, allowed
    experts = draw(4, sizes.out, sizes.columns, spread=sizes.columns**-0.5)
    x = draw(sizes.rows, sizes.columns)
    counts = [sizes.rows - 1, 0, 1, 0]
    starts = torch.tensor([0, sizes.rows - 1, sizes.rows - 1, sizes.rows, sizes.rows], dtype=torch.int32)
    found = grouped_gemm.grouped_linear(x, grouped_gemm.ExpertWeights(experts), starts.to(place.device))
    parts = zip(torch.split(exact(x), counts), exact(experts), strict=True)
    yield "grouped_kernel", "4 experts, 2 without rows", found, torch.cat([a @ b.T for a, b in parts]), allowed
    for name, make, code in (("fp8", quantise_fp8, Code(FP8)), ("int8", quantise_int8, Code(torch.int8))):
        held = experts_laid_out([make(expert.float()) for expert in experts])
        values = [exact(make(expert.float()).dequantised()) for expert in experts]
        parts = zip(torch.split(values_of(quantise.quantise_rows(x, code)).double(), counts), values, strict=True)
        found = held.multiply(x, starts.to(place.device))
        yield "grouped_kernel", f"{name}, 4 experts", found, torch.cat([a @ b.T for a, b in parts]), allowed


def _choices(place: Place, sizes: Sizes) -> Iterator[Check]:
    """Tokens are the same or wrong; sums near a border may fall to either side, so that one of them may differ."""
    rows = 4 if place.rehearsed else 64
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, sizes.vocabulary, generator=generator) * 3
    numbers = torch.arange(rows)
    choice = Choice(
        temperatures=torch.where(numbers % 4 == 0, 0.0, 0.8),
        top_ks=torch.where(numbers % 4 == 1, 20, 0).int(),
        top_ps=torch.where(numbers % 4 == 2, 0.9, 1.0),
        min_ps=torch.where(numbers % 4 == 3, 0.05, 0.0),
        randoms=torch.rand(rows, generator=generator),
    )
    there = Choice(*(getattr(choice, name).to(place.device) for name in Choice.__dataclass_fields__))
    found = sampling.choose_tokens(logits.to(place.device), there).cpu()
    expected = reference.choose_tokens(logits.double().float(), choice)
    differing = (found != expected).double().mean()[None]
    yield "choose_kernel", "share of tokens that differ", 1 + differing, torch.ones(1), 0.02
