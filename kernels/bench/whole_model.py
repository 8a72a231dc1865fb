"""Steps of a whole model with random weights, of the shape of Llama 3.1 8B: eager and as CUDA graphs, and the fit.

Tokens a second are those of decode steps alone: no scheduler, no sampling, no server. Called by `h200`.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from measuring import Place, Report, Timer, measured
from tidegate_engine.architecture import DecoderConfig, LayerConfig, Rope, parameter_shapes
from tidegate_engine.decode_graphs import DecodeGraphs
from tidegate_engine.steptime import FIT_TERMS, OnlineFit, Profile, StepFit, parse_profile, shape_of
from tidegate_engine.transformer import (
    Decoder,
    build_decoder,
    forward,
    kv_token_bytes,
    layer_caches,
    new_kv_pool,
)
from tidegate_kernels.compiled import TRITON
from tidegate_kernels.quantised import quantise_fp8
from tidegate_kernels.reference import Cache, Ragged, ragged_batch
from tidegate_kernels.weight import Dense, Weight

BLOCK_TOKENS = 16
PROFILE = "profile.json"


@dataclass(frozen=True, slots=True)
class Sizes:
    config: DecoderConfig
    batches: tuple[int, ...]
    context: int
    decodes: tuple[tuple[int, int], ...]
    """Of the fit: sequences, and tokens of each."""
    chunks: tuple[tuple[int, int], ...]
    """Of the fit: new tokens of one sequence, and those before them."""
    mixed: tuple[tuple[int, int, int], ...]
    """Of the fit: sequences, tokens of each, and a chunk's new tokens."""


def _config(layers: int, layer: LayerConfig, *, hidden: int, head_size: int, vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        layers=(layer,) * layers,
        hidden=hidden,
        head_size=head_size,
        vocab_size=vocab_size,
        context_tokens=8192,
        norm_eps=1e-5,
        ropes=(Rope(500_000.0),),
        tied_head=False,
    )


REAL = Sizes(
    config=_config(32, LayerConfig(32, 8, 14336), hidden=4096, head_size=128, vocab_size=128_256),
    batches=(1, 32, 256),
    context=1024,
    decodes=((1, 128), (1, 1024), (8, 1024), (32, 256), (32, 1024), (128, 512), (256, 128), (256, 1024)),
    chunks=((64, 0), (256, 0), (512, 0), (1024, 0), (1024, 1024), (2048, 0), (4096, 0)),
    mixed=((32, 512, 512), (128, 512, 512), (128, 1024, 128)),
)
TINY = Sizes(
    config=_config(1, LayerConfig(4, 2, 64), hidden=64, head_size=16, vocab_size=70),
    batches=(1, 2),
    context=20,
    decodes=((1, 4), (2, 4), (2, 20), (4, 9)),
    chunks=((3, 0), (20, 0), (8, 9)),
    mixed=((2, 9, 8),),
)
SAMPLES = 12
"""Of each shape of the fit."""


class Model:
    """A decoder and its cache on the place's device."""

    def __init__(self, place: Place, *, is_fp8: bool) -> None:
        self.place, self.sizes = place, TINY if place.rehearsed else REAL
        parameters = random_parameters(place, self.sizes.config, is_fp8=is_fp8)
        self.decoder = build_decoder(self.sizes.config, parameters, TRITON)
        steps = [(batch, self.sizes.context) for batch in self.sizes.batches]
        steps += [*self.sizes.decodes, *((1, new + before) for new, before in self.sizes.chunks)]
        steps += [(batch + -(-new // tokens), tokens) for batch, tokens, new in self.sizes.mixed]
        blocks = 1 + max(batch * -(-tokens // BLOCK_TOKENS) for batch, tokens in steps)
        pool = new_kv_pool(
            self.sizes.config, blocks=blocks, block_tokens=BLOCK_TOKENS, dtype=place.dtype, device=place.device
        )
        self.caches: tuple[Cache, ...] = layer_caches(self.sizes.config, pool)

    def step(self, new: list[int], total: list[int]) -> tuple[Tensor, Ragged]:
        """Ids and layout of a step over blocks of its own for each sequence."""
        tables, first = [], 1
        for tokens in total:
            blocks = -(-tokens // BLOCK_TOKENS)
            tables.append(range(first, first + blocks))
            first += blocks
        batch = ragged_batch(new, total, tables, cache=self.caches[0]).to(self.place.device)
        return torch.randint(0, self.sizes.config.vocab_size, (sum(new),), device=self.place.device), batch

    def eager(self, new: list[int], total: list[int]) -> Callable[[], Tensor]:
        """With logits of each sequence's last token."""
        ids, batch = self.step(new, total)
        rows = batch.query_starts[1:].long() - 1
        return lambda: forward(self.decoder, ids, batch, caches=self.caches, logits_rows=rows)

    def graphs(self, size: int, context: int) -> DecodeGraphs:
        return DecodeGraphs(self.decoder, self.caches, sizes=(size,), context_tokens=context)


def random_parameters(place: Place, config: DecoderConfig, *, is_fp8: bool) -> dict[str, Weight]:
    """Weights of normal numbers; FP8 ones but for embedding and head."""
    parameters: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        values = torch.randn(shape, device=place.device).mul_(shape[-1] ** -0.5).to(place.dtype)
        if len(shape) == 1:
            parameters[name] = Dense(torch.ones_like(values))
        else:
            is_kept = not is_fp8 or name in ("embedding", "head")
            parameters[name] = Dense(values) if is_kept else quantise_fp8(values)
    return parameters


def steps_bf16(place: Place, report: Report) -> None:
    _steps(place, report, is_fp8=False)


def steps_fp8(place: Place, report: Report) -> None:
    _steps(place, report, is_fp8=True)


@torch.inference_mode()
def _steps(place: Place, report: Report, *, is_fp8: bool) -> None:
    """Decode steps. The floor: weights and KV cache read once at the speed of a copy."""
    model, timer, copy = Model(place, is_fp8=is_fp8), Timer(place), measured(report.folder, "copy")
    context, decoder = model.sizes.context, model.decoder
    embedding = decoder.embedding.size_bytes
    for batch in model.sizes.batches:
        if not report.has_time():
            continue
        with report.guarded(f"{batch} sequences"):
            new, total = [1] * batch, [context] * batch
            eager = timer.seconds(model.eager(new, total), repeats=10, cold=False)
            ids, step = model.step(new, total)
            graphs = model.graphs(batch, context)
            expected = model.eager(new, total)()
            graph = timer.seconds(lambda graphs=graphs, ids=ids, step=step: graphs.run(ids, step), cold=False)  # type: ignore[misc]
            read = decoder.weight_bytes - embedding + sum(total) * kv_token_bytes(decoder.config, place.dtype)
            report.add(
                weights=decoder.weight_precision,
                batch=batch,
                context=context,
                eager_ms=eager * 1e3,
                graph_ms=graph * 1e3,
                tokens_per_second=batch / graph,
                of_floor=None if copy is None else read / copy / graph,
                finite=bool(expected.isfinite().all()),
                max_difference=float((graphs.run(ids, step) - _again(model, ids, step)).abs().max()),
            )


def _again(model: Model, ids: Tensor, step: Ragged) -> Tensor:
    """The logits of a decode step that was not recorded."""
    rows = torch.arange(len(ids), device=ids.device)
    return forward(model.decoder, ids, step, caches=model.caches, logits_rows=rows)


@torch.inference_mode()
def fit(place: Place, report: Report) -> None:
    """Step times of many shapes, and coefficients of them; decodes as graphs, chunks eager. Without the host's work."""
    model, timer, found = Model(place, is_fp8=False), Timer(place), OnlineFit()
    sizes = model.sizes
    shapes = [([1] * batch, [tokens] * batch, False) for batch, tokens in sizes.decodes]
    shapes += [([new], [new + before], True) for new, before in sizes.chunks]
    shapes += [([1] * batch + [new], [tokens] * batch + [new], True) for batch, tokens, new in sizes.mixed]
    for new, total, has_chunk in shapes:
        if not report.has_time():
            continue
        with report.guarded(f"{new} of {total}"):
            if has_chunk:
                call: Callable[[], object] = model.eager(new, total)
            else:
                ids, step = model.step(new, total)
                graphs = model.graphs(len(new), max(total))
                call = lambda graphs=graphs, ids=ids, step=step: graphs.run(ids, step)  # type: ignore[misc]  # noqa: E731
            samples = timer.samples(call, repeats=SAMPLES, cold=False)
            shape = shape_of([(whole - own, own, own > 1) for own, whole in zip(new, total, strict=True)])
            for index in range(SAMPLES):
                found.add(shape, samples[index % len(samples)])
            report.add(**asdict(shape), milliseconds=sorted(samples)[len(samples) // 2] * 1e3)
    if found.fit is None:
        report.add(fit="none: the samples cannot tell what a token costs")
        return
    report.add(fit="of all rows", error=found.fit.residual_ratio, terms=", ".join(found.fit.terms))
    report.add(**found.fit.model.as_dict())
    profile = profile_of(place, model.decoder, found.fit)
    (report.folder / PROFILE).write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")


def profile_of(place: Place, decoder: Decoder, found: StepFit) -> Profile:
    """As `steptime` reads it; what was not measured says so."""
    config = decoder.config
    token_bytes = kv_token_bytes(config, place.dtype)
    memory = 1 << 30 if place.rehearsed else torch.cuda.get_device_properties(place.device).total_memory
    where = place.describe()
    told = f"fitted to {found.samples} steps of random weights on {where}; without scheduler, sampling and server"
    source = {
        name: told if name in (*found.terms, "threshold_tokens") else "0: the measured steps do not tell it"
        for name in (*FIT_TERMS, "threshold_tokens")
    }
    name = "rehearsed" if place.rehearsed else torch.cuda.get_device_name(place.device)
    return parse_profile(
        {
            "name": f"{name.lower().replace(' ', '-')}-8b-random",
            "gpu": name,
            "gpus": 1,
            "model": "random weights of the shape of meta-llama/Llama-3.1-8B",
            "layers": len(config.layers),
            "kv_heads": config.layers[0].kv_heads,
            "head_size": config.head_size,
            "vocab_size": config.vocab_size,
            "weight_dtype": decoder.weight_precision,
            "kv_dtype": str(place.dtype).removeprefix("torch."),
            "weight_bytes": decoder.weight_bytes,
            "kv_token_bytes": token_bytes,
            "kv_blocks": max(2, int(0.85 * memory - decoder.weight_bytes) // (token_bytes * BLOCK_TOKENS)),
            "block_tokens": BLOCK_TOKENS,
            "max_model_len": config.context_tokens,
            "start_seconds": {"weights": 3.0, "warmup": 1.0},
            "step": found.model.as_dict(),
            "source": source
            | {
                "kv_blocks": "estimated: 0.85 of the memory less the weights",
                "start_seconds": "estimated: weights read from the page cache at 5 GB/s, no compilation",
            },
        }
    )
