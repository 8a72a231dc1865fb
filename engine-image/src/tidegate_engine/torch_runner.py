"""Computes steps with torch: loads the model, owns the paged cache and the threads, samples.

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
from tidegate_engine.host_blocks import HostBlocks
from tidegate_engine.lora import LoraLimits, LoraStore
from tidegate_engine.native_decoder import native_decoder
from tidegate_engine.pooler import Pooler
from tidegate_engine.pooling import Pooling
from tidegate_engine.precision import Precision, as_stored, parse_precision, settled, weight_bytes
from tidegate_engine.process_memory import forget_peak, peak_bytes, resident_bytes
from tidegate_engine.request import BlockCopy, Request, SampledToken, Step, StepItem
from tidegate_engine.runner import ModelInfo
from tidegate_engine.sampling import Masks, Sampler
from tidegate_engine.step_inputs import Inputs, StepInputs
from tidegate_engine.steptime import StepModel
from tidegate_engine.transformer import (
    build_decoder,
    head_logits,
    hidden_states,
    kv_groups,
    kv_token_bytes,
    layer_caches,
    new_kv_pool,
)
from tidegate_engine.weights import ModelError
from tidegate_kernels import native
from tidegate_kernels.operations import TORCH, Operations

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Of activations and of the KV cache, as `precision` names them."""
KV_MEMORY_FRACTION = 0.5
"""Share of the memory left beside the weights that the cache may take; activations and the server need the rest."""
RESIZED_KV_MEMORY_FRACTION = 0.8
"""The same for a size that somebody asks for by name, when the model has been at work."""
MAX_KV_BYTES = 4 << 30
"""Unless told otherwise: prefix caching fills whatever there is, and a machine without limits has other tenants."""
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
    kernels: str = "torch"
    """Or "triton": layers are computed by GPU kernels, of which the interpreter is all that reads host memory yet."""


class TorchRunner:
    """A loaded model; with `masks`, answers can be held to grammars. Raises ModelError when it cannot be served."""

    def __init__(
        self, model_path: Path | str, *, options: TorchOptions | None = None, masks: Masks | None = None
    ) -> None:
        options = options or TorchOptions()
        started = time.monotonic()
        operations = _operations(options.kernels)
        if native.library() is None:
            logger.warning("weights are multiplied by torch alone, slower: %s", native.why_not())
        checkpoint = open_checkpoint(model_path)
        if options.quantisation not in (None, checkpoint.quantisation):
            found = f"quantised by {checkpoint.quantisation}" if checkpoint.quantisation else "not quantised"
            raise ModelError(
                "QuantizationMismatch",
                f"{checkpoint.path} is {found}, and {options.quantisation} was asked for; leave --quantization out",
            )
        self._threads = options.threads or Machine().cpus()
        self._threads_set_in: int | None = None
        context = _context_tokens(checkpoint.config, options.max_model_len)
        # Some models turn by frequencies that follow from the context that is served.
        config = replace(checkpoint.config, context_tokens=context)
        precision = as_stored(options.precision) if checkpoint.packed else options.precision
        precision = _settle(precision, config, checkpoint)
        with freed_at_once():
            parameters = checkpoint.load(DTYPES[precision.dtype], precision)
            self._decoder = build_decoder(config, parameters, operations)
        self._kv_dtype = DTYPES[precision.kv_dtype]
        self._lora = None if options.lora is None else LoraStore(config, options.lora, dtype=self._decoder.dtype)
        self._groups = kv_groups(config)
        token_bytes = kv_token_bytes(config, self._kv_dtype, self._groups)
        blocks = options.kv_blocks or _affordable_blocks(
            token_bytes * options.block_tokens, options.block_tokens, reserved=_reserved_bytes(self._lora)
        )
        if blocks < 2:
            raise ModelError("KvCacheTooSmall", f"a KV cache needs 2 blocks, one of them for padding, and has {blocks}")
        self._host: HostBlocks | None = None
        pooling = checkpoint.pooling_or(options.pooling)
        self._pooler = Pooler(is_normalised=pooling.is_normalised)
        self._sampler = Sampler(
            eos_ids=checkpoint.eos_token_ids,
            entropy=secrets.token_bytes(16),
            masks=masks,
            kernel=operations.choose_tokens,
        )
        weights_done = time.monotonic()
        self._info = ModelInfo(
            name=options.name or checkpoint.name,
            layers=len(config.layers),
            kv_heads=max(layer.kv_heads for layer in config.layers),
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            max_model_len=context,
            weight_dtype=self._decoder.weight_precision,
            kv_dtype=precision.kv_dtype,
            weight_bytes=self._decoder.weight_bytes,
            kv_token_bytes=token_bytes,
            kv_blocks=blocks,
            block_tokens=options.block_tokens,
            gpu_product=None,
            gpu_count=0,
            eos_token_ids=checkpoint.eos_token_ids,
            structured_outputs=masks is not None,
            embedding_size=config.hidden,
            pooling=pooling.kind,
            embedding_normalised=pooling.is_normalised,
            kv_windows=tuple(group.window for group in self._groups),
        )
        self._make_cache(blocks)
        self._warm_up()
        self._host = self._make_host(options.host_bytes)
        self._start_seconds = {"weights": weights_done - started, "warmup": time.monotonic() - weights_done}
        self._loaded_bytes = resident_bytes() if forget_peak() else None

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
        room = Machine().available_bytes() + written * info.group_block_bytes - self._reserved_bytes
        return max(info.kv_blocks, int(room * RESIZED_KV_MEMORY_FRACTION) // (info.kv_token_bytes * info.block_tokens))

    def resize(self, kv_blocks: int) -> None:
        before = self._info.kv_blocks
        self._drop_cache()
        try:
            wanted, room = self._kv_bytes(kv_blocks), Machine().available_bytes() - self._reserved_bytes
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
        if inputs.begun_blocks:
            # What an earlier request left behind the last token gets the weight zero, and zero times its NaN is NaN.
            for part in self._pool:
                part[:, :, inputs.begun_blocks] = 0
        adapted = {} if self._lora is None else _adapted_rows(step, inputs)
        pooled: Mapping[str, SampledToken] = {}
        pools = any(map(_is_pooled, chunks))
        if self._native is not None and self._native.takes(inputs.batch) and not adapted and not pools:
            logits = self._native.forward(inputs.token_ids, inputs.batch, logits_rows=inputs.logits_rows)
        else:
            adapters = () if self._lora is None else self._lora.deltas(adapted)
            states = hidden_states(
                self._decoder, inputs.token_ids, inputs.batch, caches=self._caches, adapters=adapters
            )
            if pools:
                pooled = self._pooler.pool(states, chunks, inputs.first_rows[len(decodes) :].tolist())
            logits = head_logits(self._decoder, states[inputs.logits_rows])
        if not inputs.sampled:
            return pooled
        tokens = self._sampler.sample(logits, inputs.sampled, inputs.drafts)
        found = dict(zip([request.id for request in inputs.sampled], tokens, strict=True))
        return {**pooled, **found} if pooled else found

    def _make_cache(self, kv_blocks: int) -> None:
        """An empty KV cache, and whatever has its address."""
        config, groups = self._decoder.config, self._groups
        self._pool = new_kv_pool(
            config,
            blocks=kv_blocks * len(groups),
            block_tokens=self._info.block_tokens,
            dtype=self._kv_dtype,
            groups=groups,
        )
        self._caches = layer_caches(config, self._pool, groups)
        is_torch = self._decoder.operations is TORCH
        self._native = native_decoder(self._decoder, self._caches) if is_torch else None
        self._inputs = StepInputs(self._info.block_tokens, [group.window for group in groups])
        if self._host is not None:
            self._host.bind(self._pool)
        self._info = replace(self._info, kv_blocks=kv_blocks)

    def _drop_cache(self) -> None:
        """Give the KV cache's memory back: nobody may have its address."""
        self._pool, self._caches, self._native = (), (), None
        if self._host is not None:
            self._host.bind(())

    def _kv_bytes(self, kv_blocks: int) -> int:
        return kv_blocks * self._info.kv_token_bytes * self._info.block_tokens

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
        host = HostBlocks(self._pool, slots)
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
        for part in self._pool:
            part[:, :, : max(blocks) + 1] = 0


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


def _operations(kernels: str) -> Operations:
    """What layers are computed with. Raises ModelError for a choice that there is not, or that cannot run here."""
    if kernels == "torch":
        return TORCH
    if kernels != "triton":
        raise ModelError("KernelsUnknown", f"there are no kernels called {kernels!r}; choose torch or triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelError(
            "KernelsNeedGpu",
            "the runner holds weights and cache in host memory, which compiled kernels cannot read; choose torch, or "
            "set TRITON_INTERPRET=1 to have them interpreted",
        )
    # Triton takes a second to import, and is not there in images without a GPU.
    from tidegate_kernels.compiled import TRITON

    return TRITON


def _settle(precision: Precision, config: DecoderConfig, checkpoint: Checkpoint) -> Precision:
    """The policy with nothing left open; raises ModelError where the weights would not fit under it."""
    shapes, available, stored = parameter_shapes(config), Machine().available_bytes(), checkpoint.stored_bytes
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


def _affordable_blocks(block_bytes: int, block_tokens: int, *, reserved: int) -> int:
    available = Machine().available_bytes() - reserved
    blocks = min(int(available * KV_MEMORY_FRACTION), MAX_KV_BYTES) // block_bytes
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
