"""Computes steps with torch: loads the model, or a rank's part of it, owns the threads, samples.

Implements `runner.Runner`; called from the engine loop's thread only. Which tokens a step has is the scheduler's.
"""

import logging
import os

# Read when torch loads its OpenMP. Without it a thread that waits for another one spins; on CPUs shared with others it
# spins in the time that the other one needs: measured ten times as slow on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from tidegate_engine.allocator import freed_at_once
from tidegate_engine.architecture import DecoderConfig, parameter_shapes
from tidegate_engine.cgroup import Machine
from tidegate_engine.checkpoint import Checkpoint, open_checkpoint
from tidegate_engine.collectives import ALONE, Collectives, join, meeting_place, meeting_place_at
from tidegate_engine.device import Architecture, Place, place_of
from tidegate_engine.host_blocks import HostBlocks
from tidegate_engine.lora import LoraLimits, LoraStore
from tidegate_engine.model_part import CacheShape, ModelPart, Work, follow
from tidegate_engine.pooler import Pooler
from tidegate_engine.pooling import Pooling
from tidegate_engine.precision import Precision, as_stored, parse_precision, settled, weight_bytes
from tidegate_engine.process_memory import forget_peak, peak_bytes, resident_bytes
from tidegate_engine.ranks import RankEnd, Team
from tidegate_engine.request import BlockCopy, Request, SampledToken, Step, StepItem
from tidegate_engine.runner import ModelInfo
from tidegate_engine.sampling import Masks, Sampler
from tidegate_engine.step_inputs import Inputs, StepInputs
from tidegate_engine.steptime import StepModel
from tidegate_engine.tensor_split import Share, split_config, split_parameters
from tidegate_engine.transformer import build_decoder, kv_groups, kv_token_bytes
from tidegate_engine.weights import ModelError
from tidegate_kernels import native

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Of activations and of the KV cache, as `precision` names them."""
_KV_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KV_MEMORY_FRACTION = 0.5
"""Share of the memory left beside the weights that the cache may take; activations and the server need the rest."""
RESIZED_KV_MEMORY_FRACTION = 0.8
"""The same for a size that somebody asks for by name, when the model has been at work."""
MAX_KV_BYTES = 4 << 30
"""Unless told otherwise: prefix caching fills whatever there is, and a machine without limits has other tenants."""
GPU_KV_MEMORY_FRACTION = 0.85
"""The same of a GPU's memory, which nobody else wants; the rest is for activations and recorded steps."""
WARM_UP_SHAPES = ((1, 64), (1, 1), (8, 1))
"""Sequences and new tokens of each."""
COPY_PROBE_BLOCKS = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How a model is run. None = as much as the model and the memory allow."""

    name: str | None = None
    precision: Precision = field(default_factory=Precision)
    quantisation: str | None = None
    """How the checkpoint is expected to be quantised."""
    block_tokens: int = 16
    kv_blocks: int | None = None
    max_model_len: int | None = None
    threads: int | None = None
    host_bytes: int = 0
    """Memory beside the cache for blocks evicted from it."""
    lora: LoraLimits | None = None
    """None = no adapters."""
    pooling: Pooling | None = None
    """Of embeddings; None = as the checkpoint says."""
    device: str = "cpu"
    """Or "cuda"."""
    kernels: str = "auto"
    """"torch", "triton", or what is made for the device."""
    architecture: Architecture | None = None
    """CUDA's compute capability, whose gates decide on precisions; None = that of the GPU."""
    graph_sizes: tuple[int, ...] = ()
    """Batch sizes of the decode steps that are recorded as CUDA graphs."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A rank's part of a model, without a cache yet."""

    checkpoint: Checkpoint
    config: DecoderConfig
    """Of the whole model."""
    place: Place
    part: ModelPart
    shape: CacheShape
    collectives: Collectives
    ranks: int
    threads: int
    seconds: float

    def affordable_blocks(self, options: TorchOptions, *, reserved: int) -> int:
        """KV blocks that every rank has memory for, or those asked for."""
        own = options.kv_blocks or _affordable_blocks(self, reserved=reserved)
        return self.collectives.least(own)


class TorchRunner:
    """A loaded model; with `masks`, answers can be held to grammars. Raises ModelError when it cannot be served.

    `team`: the other ranks, each of which holds a part and runs `follow_rank`.
    """

    def __init__(
        self,
        model: Path | str | Checkpoint,
        *,
        options: TorchOptions | None = None,
        masks: Masks | None = None,
        team: Team | None = None,
    ) -> None:
        options = options or TorchOptions()
        ranks = 1 if team is None else team.ranks
        _check_alone(options, ranks=ranks)
        collectives = ALONE
        if team is not None:
            store, port = meeting_place(ranks)
            team.tell("meet", port)
            collectives = join(Share(0, ranks), store=store, device=_device_of(options, 0))
        loaded = _load(model, options, Share(0, ranks), collectives=collectives, team=team)
        checkpoint, config, place = loaded.checkpoint, loaded.config, loaded.place
        self._part, self._place, self._threads = loaded.part, place, loaded.threads
        self._threads_set_in: int | None = None
        decoder = self._part.decoder
        self._lora = None if options.lora is None else LoraStore(config, options.lora, dtype=decoder.dtype)
        groups, kv_dtype = loaded.shape.groups, loaded.shape.dtype
        token_bytes = kv_token_bytes(config, kv_dtype, groups)
        self._rank_token_bytes = kv_token_bytes(decoder.config, kv_dtype, groups)
        blocks = loaded.affordable_blocks(options, reserved=_reserved_bytes(self._lora))
        if blocks < 2:
            raise ModelError("KvCacheTooSmall", f"a KV cache needs 2 blocks, one of them for padding, and has {blocks}")
        self._host: HostBlocks | None = None
        pooling = checkpoint.pooling_or(options.pooling)
        self._pooler = Pooler(is_normalised=pooling.is_normalised)
        self._sampler = Sampler(
            eos_ids=checkpoint.eos_token_ids,
            entropy=secrets.token_bytes(16),
            masks=masks,
            kernel=place.operations.choose_tokens,
        )
        warming_up = time.monotonic()
        self._info = ModelInfo(
            name=options.name or checkpoint.name,
            layers=len(config.layers),
            kv_heads=max(layer.kv_heads for layer in config.layers),
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            max_model_len=config.context_tokens,
            weight_dtype=decoder.weight_precision,
            kv_dtype=_KV_NAMES[kv_dtype],
            weight_bytes=ranks * decoder.weight_bytes,
            kv_token_bytes=token_bytes,
            kv_blocks=blocks,
            block_tokens=options.block_tokens,
            gpu_product=place.product,
            gpu_count=ranks if place.is_gpu else 0,
            eos_token_ids=checkpoint.eos_token_ids,
            structured_outputs=masks is not None,
            embedding_size=config.hidden,
            pooling=pooling.kind,
            embedding_normalised=pooling.is_normalised,
            kv_windows=tuple(group.window for group in groups),
        )
        self._make_cache(blocks)
        self._warm_up()
        self._host = self._make_host(options.host_bytes)
        self._start_seconds = {"weights": loaded.seconds, "warmup": time.monotonic() - warming_up}
        # Of a GPU's memory nobody keeps such a peak.
        self._loaded_bytes = resident_bytes() if forget_peak() and not place.is_gpu else None

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def step_model(self) -> StepModel | None:
        return None

    @property
    def adapters(self) -> LoraStore | None:
        return self._lora

    @property
    def start_seconds(self) -> Mapping[str, float]:
        return self._start_seconds

    def grown_bytes(self) -> int | None:
        """How far the process's memory has grown at most since the model was loaded; None where that is not known."""
        peak = peak_bytes()
        return None if peak is None or self._loaded_bytes is None else max(0, peak - self._loaded_bytes)

    def most_kv_blocks(self, *, written: int) -> int:
        info = self._info
        # A GPU's cache is there as a whole; host memory's pages come when they are written.
        written = info.group_blocks if self._place.is_gpu else written
        block_bytes = self._rank_token_bytes * info.block_tokens
        kept = written * block_bytes // len(info.kv_windows)
        room = self._place.available_bytes() + kept - self._reserved_bytes
        return max(info.kv_blocks, int(room * RESIZED_KV_MEMORY_FRACTION) // block_bytes)

    def resize(self, kv_blocks: int) -> None:
        before = self._info.kv_blocks
        self._drop_cache()
        try:
            wanted = kv_blocks * self._rank_token_bytes * self._info.block_tokens
            room = self._place.available_bytes() - self._reserved_bytes
            if kv_blocks > before and wanted > room:
                raise ModelError(
                    "KvCacheTooLarge",
                    f"a KV cache of {kv_blocks} blocks takes {wanted / 2**20:.0f} MiB, and {room / 2**20:.0f} MiB are "
                    f"available; it has {before} blocks again",
                )
            self._make_cache(kv_blocks)
        except ModelError:
            self._make_cache(before)
            raise
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            self._make_cache(before)
            raise ModelError(
                "ResizeFailed", f"a KV cache of {kv_blocks} blocks cannot be had: {error}; it has {before} blocks again"
            ) from error
        finally:
            forget_peak()  # what was written to the old one is no workspace

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[str, SampledToken]:
        """Compute `step`; returns a token by request id for every item that samples. Blocking."""
        self._set_threads()
        if self._host is not None:
            self._host.copy(step)
        decodes, chunks = step.decodes, step.chunks
        self._sampler.prepare([*decodes.requests, *(item.request for item in chunks)])
        inputs = self._inputs.lay_out(step)
        adapted = {} if self._lora is None else _adapted_rows(step, inputs)
        adapters = () if self._lora is None or not adapted else self._lora.deltas(adapted)
        pools = any(map(_is_pooled, chunks))
        work = Work(inputs.token_ids, inputs.batch, inputs.logits_rows, inputs.begun_blocks, wants_states=pools)
        states, logits = self._part.compute(work, adapters=adapters)
        pooled: Mapping[str, SampledToken] = {}
        if states is not None:
            pooled = self._pooler.pool(states.cpu(), chunks, inputs.first_rows[len(decodes) :].tolist())
        if not inputs.sampled:
            return pooled
        tokens = self._sampler.sample(logits, inputs.sampled, inputs.drafts)
        found = dict(zip([request.id for request in inputs.sampled], tokens, strict=True))
        return {**pooled, **found} if pooled else found

    def _make_cache(self, kv_blocks: int) -> None:
        """An empty KV cache, and whatever has its address."""
        self._part.make_cache(kv_blocks)
        self._inputs = StepInputs(self._info.block_tokens, self._info.kv_windows)
        if self._host is not None:
            self._host.bind(self._part.pool)
        self._info = replace(self._info, kv_blocks=kv_blocks)

    def _drop_cache(self) -> None:
        """Give the KV cache's memory back: nobody may have its address."""
        self._part.drop_cache()
        if self._host is not None:
            self._host.bind(())

    @property
    def _reserved_bytes(self) -> int:
        """Memory that adapters to come were promised."""
        return 0 if self._lora is None else max(0, self._lora.reserved_bytes - self._lora.size_bytes)

    def _make_host(self, host_bytes: int) -> HostBlocks | None:
        """Host memory for evicted blocks, where there shall be some and copying one back beats computing it again."""
        info = self._info
        slots = host_bytes // info.group_block_bytes
        if not slots:
            return None
        kv_bytes = info.group_blocks * info.group_block_bytes
        available = Machine().available_bytes() - kv_bytes - _reserved_bytes(self._lora)
        if host_bytes > available:
            raise ModelError(
                "HostPoolTooLarge",
                f"{host_bytes / 2**20:.0f} MiB are asked for evicted KV blocks; beside the KV cache "
                f"{max(0, available) / 2**20:.0f} MiB are available",
            )
        host = HostBlocks(self._part.pool, slots)
        sequences, tokens = WARM_UP_SHAPES[0]
        computing = _seconds(lambda: self._run_dummy(sequences, tokens)) * info.block_tokens / tokens
        copies = [BlockCopy(index, index) for index in range(min(COPY_PROBE_BLOCKS, slots, info.group_blocks))]
        host.copy(Step(0, (), 0, stores=copies))
        copying = _seconds(lambda: host.copy(Step(0, (), 0, loads=copies))) / len(copies) * len(info.kv_windows)
        if copying >= computing:
            logger.warning(
                "evicted KV blocks are not kept: copying one back takes %.2f ms, computing it %.2f ms",
                1000 * copying,
                1000 * computing,
            )
            return None
        self._info = replace(info, host_blocks=slots)
        return host

    def _set_threads(self) -> None:
        """torch keeps the number for each thread that calls it."""
        if self._threads_set_in != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._threads_set_in = threading.get_ident()

    def _warm_up(self) -> None:
        """The first calls allocate buffers and choose algorithms; their result is thrown away."""
        for sequences, tokens in WARM_UP_SHAPES:
            self._run_dummy(sequences, tokens)

    def _run_dummy(self, sequences: int, tokens: int) -> None:
        """A step whose tokens nobody gets, in blocks that are free."""
        size = self._info.block_tokens
        count = min(tokens, self._info.max_model_len, (self._info.kv_blocks - 1) * size)
        blocks = list(range(1, 1 + -(-count // size) * len(self._info.kv_windows)))
        items = tuple(
            StepItem(Request(str(index), count, 1, 0.0, prompt_ids=[0] * count), 0, count, True, list(blocks))
            for index in range(sequences)
        )
        self.run(Step(0, items, 0))
        self._part.clear(max(blocks) + 1)


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _is_pooled(item: StepItem) -> bool:
    return item.request.pooling is not None


def _adapted_rows(step: Step, inputs: Inputs) -> dict[str, Tensor]:
    """The rows of each adapter's requests, by its name."""
    rows: dict[str, list[int]] = {}
    for item, first in zip(step.items, inputs.first_rows.tolist(), strict=True):
        if item.request.adapter is not None:
            rows.setdefault(item.request.adapter.name, []).extend(range(first, first + item.count))
    return {name: torch.tensor(own) for name, own in rows.items()}


def follow_rank(model_path: Path | str, end: RankEnd, *, options: TorchOptions) -> None:
    """Be a rank beside the first: hold its part of the model and do what it is told, until the first one ends."""
    order = end.receive()
    if order is None:
        return
    share, store = Share(end.rank, end.ranks), meeting_place_at(int(order[1]), end.ranks)
    collectives = join(share, store=store, device=_device_of(options, end.rank))
    loaded = _load(model_path, options, share, collectives=collectives)
    torch.set_num_threads(loaded.threads)
    loaded.affordable_blocks(options, reserved=0)
    follow(loaded.part, end)


def _device_of(options: TorchOptions, rank: int) -> torch.device:
    return torch.device("cuda", rank) if options.device == "cuda" else torch.device(options.device)


def _check_alone(options: TorchOptions, *, ranks: int) -> None:
    """Raises ModelError for what one process on a CPU alone can have."""
    if ranks > 1 and options.host_bytes:
        raise ModelError(
            "TensorParallelAlone", "a model that is split over ranks keeps no evicted KV blocks in host memory"
        )
    if options.lora is not None and (ranks > 1 or options.device != "cpu"):
        raise ModelError("AdaptersOnCpuOnly", "adapters are computed on the CPU, by one rank; leave --enable-lora out")


def _load(
    model: Path | str | Checkpoint,
    options: TorchOptions,
    share: Share,
    *,
    collectives: Collectives,
    team: Team | None = None,
) -> _Loaded:
    """A rank's part of the model at its place. Raises ModelError where it cannot be had."""
    started = time.monotonic()
    place = place_of(
        options.device, options.kernels, rank=share.rank, ranks=share.ranks, architecture=options.architecture
    )
    if native.library() is None and not place.is_gpu:
        logger.warning("weights are multiplied by torch alone, slower: %s", native.why_not())
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    if options.quantisation not in (None, checkpoint.quantisation):
        found = f"quantised by {checkpoint.quantisation}" if checkpoint.quantisation else "not quantised"
        raise ModelError(
            "QuantizationMismatch",
            f"{checkpoint.path} is {found}, and {options.quantisation} was asked for; leave --quantization out",
        )
    # Some models turn by frequencies that follow from the context that is served.
    context = _context_tokens(checkpoint.config, options.max_model_len)
    config = replace(checkpoint.config, context_tokens=context)
    own_config = split_config(config, share.ranks)
    precision = as_stored(options.precision) if checkpoint.packed else options.precision
    if place.is_gpu and precision.dtype == "float32":
        # The kernels multiply nothing wider, and float32 is also what nobody asked for.
        precision = replace(precision, dtype="bfloat16")
    precision = _settle(precision, config, checkpoint, available=place.available_bytes() * share.ranks)
    with freed_at_once():
        parameters = checkpoint.load(DTYPES[precision.dtype], precision)
        parameters = split_parameters(config, parameters, share)
        place.fit(parameters)
        decoder = build_decoder(own_config, parameters, place.operations, collectives=collectives)
    shape = CacheShape(
        dtype=place.kv_type(DTYPES[precision.kv_dtype]),
        groups=kv_groups(config),
        block_tokens=options.block_tokens,
        graph_sizes=options.graph_sizes,
    )
    part = ModelPart(decoder, shape, team=team)
    threads = options.threads or max(1, Machine().cpus() // share.ranks)
    return _Loaded(
        checkpoint,
        config,
        place,
        part,
        shape,
        collectives,
        ranks=share.ranks,
        threads=threads,
        seconds=time.monotonic() - started,
    )


def _settle(precision: Precision, config: DecoderConfig, checkpoint: Checkpoint, *, available: int) -> Precision:
    """The policy with nothing left open; raises ModelError where the weights would not fit under it."""
    shapes, stored = parameter_shapes(config), checkpoint.stored_bytes
    precision = settled(
        precision,
        shapes,
        stored,
        tied_head=config.tied_head,
        available_bytes=available,
        stored_is_fast=checkpoint.stored_is_fast and precision.dtype == "float32",
    )
    needed = weight_bytes(precision, shapes, stored, tied_head=config.tied_head, head_apart=native.library() is None)
    if needed > available:
        least = weight_bytes(parse_precision("int4", dtype=precision.dtype), shapes, stored, tied_head=config.tied_head)
        raise ModelError(
            "ModelTooLarge",
            f"the weights take {needed / 2**20:.0f} MiB in the precision asked for; available are "
            f"{available / 2**20:.0f} MiB, and --precision int4 takes {least / 2**20:.0f} MiB",
        )
    return precision


def _reserved_bytes(lora: LoraStore | None) -> int:
    """What must be left for adapters that are loaded later; raises ModelError where it is not there."""
    if lora is None:
        return 0
    available = Machine().available_bytes()
    if lora.reserved_bytes > available:
        raise ModelError(
            "AdaptersTooLarge",
            f"{lora.max_loras} adapters of the largest rank take {lora.reserved_bytes / 2**20:.0f} MiB, and "
            f"{available / 2**20:.0f} MiB are available; lower --max-loras or --max-lora-rank",
        )
    return lora.reserved_bytes


def _affordable_blocks(loaded: _Loaded, *, reserved: int) -> int:
    """KV blocks that this rank has memory for."""
    place, block_tokens = loaded.place, loaded.shape.block_tokens
    block_bytes = kv_token_bytes(loaded.part.decoder.config, loaded.shape.dtype, loaded.shape.groups) * block_tokens
    available = place.available_bytes() - reserved
    if place.is_gpu:
        blocks = int(available * GPU_KV_MEMORY_FRACTION) // block_bytes
    else:
        # All ranks have the same host memory.
        blocks = min(int(available * KV_MEMORY_FRACTION), MAX_KV_BYTES) // loaded.ranks // block_bytes
    if blocks < 2:
        raise ModelError(
            "ModelTooLarge",
            f"beside the weights {available / 2**20:.0f} MiB are available, too little for a KV cache: "
            f"a block of {block_tokens} tokens takes {block_bytes / 2**20:.1f} MiB",
        )
    return blocks


def _context_tokens(config: DecoderConfig, wanted: int | None) -> int:
    if wanted is not None and wanted > config.context_tokens:
        raise ModelError(
            "ContextTooLong", f"a context of {wanted} tokens is asked for, and the model has {config.context_tokens}"
        )
    return wanted or config.context_tokens
