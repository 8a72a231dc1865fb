"""How fast kernels are beside what the GPU does at most: bytes a second beside a copy's, FLOP a second beside a
product's by torch, and fused kernels beside what they replace. Called by `h200`.

The rates that others are fractions of are measured first, in the same run: data sheets' are never reached.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from measuring import Place, Report, Timer, measured, share_of
from numerics import EPS, new_cache
from tidegate_kernels import (
    block_scaled_gemm,
    gate,
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
from tidegate_kernels.float8 import FP8
from tidegate_kernels.quantised import FP8_BLOCK, Fp8, Int8, quantise_groups
from tidegate_kernels.reference import AttentionRule, Choice, Code, HeadNorm, ragged_batch


@dataclass(frozen=True, slots=True)
class Sizes:
    copied: int
    """Values of bf16."""
    square: int
    heads: int
    kv_heads: int
    head_size: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    products: dict[str, tuple[int, int]]
    rows: tuple[int, ...]
    hidden: int
    inner: int
    vocabulary: int


REAL = Sizes(
    copied=1 << 30,
    square=8192,
    heads=32,
    kv_heads=8,
    head_size=128,
    batches=(256, 32, 1, 128, 8),
    contexts=(4096, 16384, 65536, 1024),
    products={"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
    rows=(2048, 1, 64, 256, 16),
    hidden=4096,
    inner=14336,
    vocabulary=128_256,
)
"""Of Llama 3.1 8B. What matters most comes first: time may be short."""
TINY = Sizes(
    copied=1 << 10,
    square=32,
    heads=4,
    kv_heads=2,
    head_size=16,
    batches=(1, 2),
    contexts=(20,),
    products={"qkv": (64, 128)},
    rows=(1, 3),
    hidden=128,
    inner=128,
    vocabulary=300,
)
MAX_KV_BYTES = 40 << 30
"""Of one case of the grid."""


def sizes_at(place: Place) -> Sizes:
    return TINY if place.rehearsed else REAL


def rates(place: Place, report: Report) -> None:
    """What `measured` finds: copy in bytes a second, products in FLOP a second."""
    sizes, timer = sizes_at(place), Timer(place)
    source = torch.zeros(sizes.copied, dtype=torch.bfloat16, device=place.device)
    target = torch.empty_like(source)
    seconds = timer.seconds(partial(target.copy_, source))
    report.add(rate="copy", value=2 * source.nbytes / seconds, unit="B/s")
    del source, target
    size = sizes.square
    a, b = (torch.randn(size, size, device=place.device).to(place.dtype) for _ in range(2))
    seconds = timer.seconds(lambda: a @ b)
    report.add(rate="product", value=2 * size**3 / seconds, unit="FLOP/s")
    one = torch.ones(size, 1, device=place.device)
    codes, others = a.to(FP8), b.to(FP8)
    if not place.rehearsed:
        seconds = timer.seconds(
            lambda: torch._scaled_mm(codes, others.T, scale_a=one, scale_b=one.T, out_dtype=torch.bfloat16)
        )
        report.add(rate="fp8 product", value=2 * size**3 / seconds, unit="FLOP/s")


def attention(place: Place, report: Report) -> None:
    """Decodes: bytes of keys, values and scales over the time."""
    sizes, timer, copy = sizes_at(place), Timer(place), measured(report.folder, "copy")
    rule = AttentionRule(sizes.head_size**-0.5)
    for context, batch, dtype in product(sizes.contexts, sizes.batches, (place.dtype, FP8, torch.int8)):
        row_bytes = sizes.head_size * dtype.itemsize + (4 if dtype.itemsize == 1 else 0)
        size = 2 * batch * context * sizes.kv_heads * row_bytes
        if size > MAX_KV_BYTES or not report.has_time():
            continue
        with report.guarded(f"{dtype}, {batch} x {context}"):
            blocks = -(-context // 16)
            cache = new_cache(
                place, blocks=1 + batch * blocks, kv_heads=sizes.kv_heads, size=sizes.head_size, dtype=dtype
            )
            # Anywhere in memory, as after some time of serving.
            places = (1 + torch.randperm(batch * blocks)).view(batch, blocks).tolist()
            step = ragged_batch([1] * batch, [context] * batch, places, cache=cache).to(place.device)
            query = torch.randn(batch, sizes.heads, sizes.head_size, device=place.device).to(place.dtype)
            seconds = timer.seconds(partial(paged_attention.paged_attention, query, cache, step, rule))
            report.add(
                kv=str(dtype).removeprefix("torch."),
                batch=batch,
                context=context,
                microseconds=seconds * 1e6,
                gb_per_second=size / seconds / 1e9,
                of_copy=share_of(size / seconds, copy),
            )


def products(place: Place, report: Report) -> None:
    sizes, timer = sizes_at(place), Timer(place)
    copy, most = measured(report.folder, "copy"), measured(report.folder, "product")
    most_fp8 = measured(report.folder, "fp8 product")
    for rows, (name, (out, depth)) in product(sizes.rows, sizes.products.items()):
        for kind, (call, weight_bytes) in _product_calls(place, out, depth, rows).items():
            if not report.has_time():
                continue
            with report.guarded(f"{name}, {rows} rows, {kind}"):
                seconds = timer.seconds(call)
                flops = 2 * rows * out * depth
                report.add(
                    product=name,
                    rows=rows,
                    kind=kind,
                    microseconds=seconds * 1e6,
                    tflops=flops / seconds / 1e12,
                    of_product=share_of(flops / seconds, most_fp8 if kind.startswith("fp8") else most),
                    weights_gb_per_second=weight_bytes / seconds / 1e9,
                    of_copy=share_of(weight_bytes / seconds, copy),
                )


def _product_calls(place: Place, out: int, depth: int, rows: int) -> dict[str, tuple[Callable[[], object], int]]:
    """By kind: the product without the quantisation of activations, and the bytes of its weight."""
    device, dtype = place.device, place.dtype
    x = torch.randn(rows, depth, device=device).to(dtype)
    dense = (torch.randn(out, depth, device=device) * depth**-0.5).to(dtype)
    codes8 = torch.randint(-127, 128, (out, depth), device=device, dtype=torch.int8)
    scales = torch.full((out, 1), 1e-3, device=device)
    fp8, int8 = Fp8(dense.to(FP8), scales, in_blocks=False), Int8(codes8, scales)
    tiles = torch.full((-(-out // FP8_BLOCK), -(-depth // FP8_BLOCK)), 1e-3, device=device)
    blocks = Fp8(fp8.codes, tiles, in_blocks=True)
    groups = int4_gemm.repack(quantise_groups(dense, bits=4, group=64))
    of8, of_int8 = quantise.quantise_rows(x, Code(FP8)), quantise.quantise_rows(x, Code(torch.int8))
    in_groups = quantise.quantise_rows(x, Code(FP8, FP8_BLOCK))

    def scaled(library: bool) -> Callable[[], Tensor]:
        return lambda: scaled_gemm.scaled_linear(of8, fp8, dtype=dtype, library=library)

    found: dict[str, tuple[Callable[[], object], int]] = {
        "bf16, torch": (lambda: x @ dense.T, dense.nbytes),
        "fp8": (scaled(False), fp8.size_bytes),
        "fp8 blocks": (lambda: block_scaled_gemm.scaled_linear(in_groups, blocks, dtype=dtype), blocks.size_bytes),
        "int8": (lambda: scaled_gemm.scaled_linear(of_int8, int8, dtype=dtype, library=False), int8.size_bytes),
        "int4": (lambda: int4_gemm.int4_linear(x, groups), groups.codes.nbytes + 2 * groups.scales.nbytes),
    }
    if not place.rehearsed:
        found["fp8, library"] = (scaled(True), fp8.size_bytes)
    return found


def _sampling(place: Place, report: Report, timer: Timer) -> None:
    """Top-k and top-p of a vocabulary: one launch, and a sort with what follows it."""
    for rows in (2,) if place.rehearsed else (1, 256):
        if not report.has_time():
            continue
        with report.guarded(f"sampling, {rows} rows"):
            logits = torch.randn(rows, sizes_at(place).vocabulary, device=place.device)
            whole = torch.ones(rows, device=place.device)
            choice = Choice(0.8 * whole, (50 * whole).int(), 0.9 * whole, 0 * whole, 0.5 * whole)

            def sorted_apart(logits: Tensor = logits) -> Tensor:
                values, ids = (logits / 0.8).sort(descending=True)
                values[:, 50:] = -torch.inf
                shares = values.softmax(-1)
                shares[shares.cumsum(-1) - shares > 0.9] = 0
                return ids.gather(1, torch.multinomial(shares, 1))

            seconds = timer.seconds(partial(sampling.choose_tokens, logits, choice))
            of_torch = timer.seconds(sorted_apart)
            report.add(
                fusion="top-k, top-p",
                rows=rows,
                microseconds=seconds * 1e6,
                torch_microseconds=of_torch * 1e6,
                speed_up=of_torch / seconds,
            )


def fusions(place: Place, report: Report) -> None:
    """One kernel, the kernels that it is made of, and torch's operations."""
    _sampling(place, report, Timer(place))
    sizes, timer, copy = sizes_at(place), Timer(place), measured(report.folder, "copy")
    device, dtype, code = place.device, place.dtype, Code(FP8)
    for rows in sizes.rows:
        x, residual = (torch.randn(rows, sizes.hidden, device=device).to(dtype) for _ in range(2))
        weight = torch.ones(sizes.hidden, dtype=dtype, device=device)
        gate_up = torch.randn(rows, 2 * sizes.inner, device=device).to(dtype)
        heads = torch.randn(rows, sizes.heads + 2 * sizes.kv_heads, sizes.head_size, device=device).to(dtype)
        cache = new_cache(place, blocks=1 + -(-rows // 16), kv_heads=sizes.kv_heads, size=sizes.head_size, dtype=FP8)
        slots = 16 + torch.arange(rows, device=device)
        table = torch.ones(rows, 1, sizes.head_size, dtype=dtype, device=device)
        own = HeadNorm(torch.ones(sizes.heads + sizes.kv_heads, sizes.head_size, dtype=dtype, device=device), EPS)

        def stored_apart(
            heads: Tensor = heads, slots: Tensor = slots, cache: reference.Cache = cache, table: Tensor = table
        ) -> Tensor:
            turned = reference.rope(heads[:, : -sizes.kv_heads], table, table)
            kv_store.store_kv(turned[:, sizes.heads :], heads[:, -sizes.kv_heads :], cache, slots)
            return turned

        cases: dict[str, tuple[Callable[[], object], Callable[[], object], Callable[[], object], int]] = {
            "add, norm, fp8": (
                partial(norm.norm_and_quantise, x, weight, code, eps=EPS, residual=residual),
                lambda x=x, residual=residual, weight=weight: quantise.quantise_rows(  # type: ignore[misc]
                    norm.add_rms_norm(x, residual, weight, eps=EPS), code
                ),
                partial(reference.norm_and_quantise, x, weight, code, eps=EPS, residual=residual),
                7 * x.numel(),
            ),
            "silu, fp8": (
                partial(gate.gate_and_quantise, gate_up, code, activation="silu"),
                lambda gate_up=gate_up: quantise.quantise_rows(gate.silu_mul(gate_up), code),  # type: ignore[misc]
                partial(reference.gate_and_quantise, gate_up, code, activation="silu"),
                5 * gate_up.numel() // 2,
            ),
            "norm, turn, store fp8": (
                partial(rope_store.turn_and_store, heads, cache, slots, tables=(table, table), norm=own),
                stored_apart,
                partial(reference.turn_and_store, heads, cache, slots, tables=(table, table), norm=own),
                heads.nbytes + 2 * rows * sizes.kv_heads * sizes.head_size,
            ),
        }
        for name, (fused, apart, plain, moved) in cases.items():
            if not report.has_time():
                continue
            with report.guarded(f"{name}, {rows} rows"):
                seconds, of_parts, of_torch = (timer.seconds(call) for call in (fused, apart, plain))
                report.add(
                    fusion=name,
                    rows=rows,
                    microseconds=seconds * 1e6,
                    apart_microseconds=of_parts * 1e6,
                    torch_microseconds=of_torch * 1e6,
                    speed_up=of_parts / seconds,
                    of_copy=share_of(moved / seconds, copy),
                )
