"""Computes steps with torch: loads the model, owns the paged cache and the threads, samples.

Implements `runner.Runner`; called from the engine loop's thread only. Which tokens a step has is the scheduler's.
"""

import os

# Read when torch loads its OpenMP. Without it a thread that waits for another one spins; on CPUs shared with others it
# spins in the time that the other one needs: measured ten times as slow on two busy cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from tidegate_engine.cgroup import Machine
from tidegate_engine.gguf_file import read_header
from tidegate_engine.request import Request, SampledToken, Step, StepItem
from tidegate_engine.runner import ModelInfo
from tidegate_engine.sampling import Masks, Sampler
from tidegate_engine.steptime import StepModel
from tidegate_engine.transformer import (
    DecoderConfig,
    build_decoder,
    forward,
    layer_caches,
    new_kv_pool,
    parameter_shapes,
)
from tidegate_engine.weights import ModelError, eos_token_ids, find_model_file
from tidegate_engine.weights_gguf import load_gguf, read_config
from tidegate_kernels.reference import ragged_batch

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
KV_MEMORY_FRACTION = 0.5
"""Share of the memory left beside the weights that the cache may take; activations and the server need the rest."""
MAX_KV_BYTES = 4 << 30
"""Unless told otherwise: prefix caching fills whatever there is, and a machine without limits has other tenants."""
WARM_UP_SHAPES = ((1, 64), (1, 1), (8, 1))
"""Sequences and new tokens of each."""


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How a model is run. None = as much as the model and the memory allow."""

    name: str | None = None
    dtype: str = "auto"
    block_tokens: int = 16
    kv_blocks: int | None = None
    max_model_len: int | None = None
    threads: int | None = None


class TorchRunner:
    """A loaded model; with `masks`, answers can be held to grammars. Raises ModelError when it cannot be served."""

    def __init__(
        self, model_path: Path | str, *, options: TorchOptions | None = None, masks: Masks | None = None
    ) -> None:
        options = options or TorchOptions()
        started = time.monotonic()
        path = find_model_file(model_path)
        header = read_header(path)
        dtype = DTYPES[options.dtype]
        self._threads = options.threads or Machine().cpus()
        self._threads_set_in: int | None = None
        config = read_config(header)
        _check_memory(config, dtype, Machine().available_bytes())
        config, parameters = load_gguf(path, dtype=dtype)
        self._decoder = build_decoder(config, parameters)
        blocks = options.kv_blocks or _affordable_blocks(config, options.block_tokens, dtype)
        if blocks < 2:
            raise ModelError("KvCacheTooSmall", f"a KV cache needs 2 blocks, one of them for padding, and has {blocks}")
        self._pool = new_kv_pool(config, blocks=blocks, block_tokens=options.block_tokens, dtype=dtype)
        self._caches = layer_caches(self._pool)
        eos_ids = eos_token_ids(header.metadata)
        self._sampler = Sampler(eos_ids=eos_ids, entropy=secrets.token_bytes(16), masks=masks)
        weights_done = time.monotonic()
        self._info = ModelInfo(
            name=options.name or str(header.metadata.get("general.name", path.stem)),
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_size=config.head_size,
            vocab_size=config.vocab_size,
            max_model_len=_context_tokens(config, options.max_model_len),
            weight_dtype=str(dtype).removeprefix("torch."),
            kv_dtype=str(dtype).removeprefix("torch."),
            weight_bytes=self._decoder.weight_bytes,
            kv_token_bytes=_kv_token_bytes(config, dtype),
            kv_blocks=blocks,
            block_tokens=options.block_tokens,
            gpu_product=None,
            gpu_count=0,
            eos_token_ids=eos_ids,
            structured_outputs=masks is not None,
        )
        self._warm_up()
        self._start_seconds = {"weights": weights_done - started, "warmup": time.monotonic() - weights_done}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def step_model(self) -> StepModel | None:
        return None

    @property
    def start_seconds(self) -> Mapping[str, float]:
        return self._start_seconds

    @torch.inference_mode()
    def run(self, step: Step) -> Mapping[str, SampledToken]:
        """Compute `step`; returns a token by request id for every item that samples. Blocking."""
        self._set_threads()
        # Decodes first and by length: neighbours of like length are attended in one call.
        items = sorted(step.items, key=lambda item: (item.count > 1, item.start))
        token_ids = [token for item in items for token in _token_ids(item)]
        self._sampler.prepare(items)
        self._clear_unwritten(items)
        batch = ragged_batch(
            [item.count for item in items],
            [item.start + item.count for item in items],
            [item.blocks for item in items],
            cache=self._caches[0],
        )
        logits = forward(
            self._decoder,
            torch.tensor(token_ids),
            batch,
            caches=self._caches,
            logits_rows=_sampled_rows(items, batch.query_starts.tolist()),
        )
        sampled = [item for item in items if item.samples]
        if not sampled:
            return {}
        tokens = self._sampler.sample(logits, sampled)
        return {item.request.id: token for item, token in zip(sampled, tokens, strict=True)}

    def _set_threads(self) -> None:
        """torch keeps the number for each thread that calls it."""
        if self._threads_set_in != threading.get_ident():
            torch.set_num_threads(self._threads)
            self._threads_set_in = threading.get_ident()

    def _clear_unwritten(self, items: Sequence[StepItem]) -> None:
        """Zero the blocks that are begun and not filled in this step.

        What an earlier request left behind the last token gets the weight zero, and zero times its NaN would be NaN.
        """
        size = self._info.block_tokens
        begun = [
            item.blocks[end // size]
            for item in items
            if (end := item.start + item.count) % size > 0 and end % size <= item.count
        ]
        if begun:
            self._pool[:, :, begun] = 0

    def _warm_up(self) -> None:
        """The first calls allocate buffers and choose algorithms; their result is thrown away."""
        size = self._info.block_tokens
        for sequences, tokens in WARM_UP_SHAPES:
            count = min(tokens, self._info.max_model_len, (self._info.kv_blocks - 1) * size)
            blocks = list(range(1, 1 + -(-count // size)))
            items = tuple(
                StepItem(Request(str(index), count, 1, 0.0, prompt_ids=[0] * count), 0, count, True, blocks)
                for index in range(sequences)
            )
            self.run(Step(0, items, 0))
        self._pool[:, :, : max(blocks) + 1] = 0


def _token_ids(item: StepItem) -> list[int]:
    if not item.drafts:
        return item.request.token_ids(item.start, item.count)
    return [*item.request.token_ids(item.start, item.count - len(item.drafts)), *item.drafts]


def _sampled_rows(items: Sequence[StepItem], query_starts: Sequence[int]) -> Tensor:
    """The rows whose logits are wanted: an item's last known token, and each of its drafts."""
    ends = zip(items, query_starts[1:], strict=True)
    return torch.tensor(
        [row for item, end in ends if item.samples for row in range(end - 1 - len(item.drafts), end)], dtype=torch.long
    )


def _check_memory(config: DecoderConfig, dtype: torch.dtype, available_bytes: int) -> None:
    needed = sum(prod(shape) for shape in parameter_shapes(config).values()) * dtype.itemsize
    if needed > available_bytes:
        raise ModelError(
            "ModelTooLarge",
            f"the weights take {needed / 2**20:.0f} MiB as {dtype}; available are {available_bytes / 2**20:.0f} MiB",
        )


def _affordable_blocks(config: DecoderConfig, block_tokens: int, dtype: torch.dtype) -> int:
    block_bytes = _kv_token_bytes(config, dtype) * block_tokens
    available = Machine().available_bytes()
    blocks = min(int(available * KV_MEMORY_FRACTION), MAX_KV_BYTES) // block_bytes
    if blocks < 2:
        raise ModelError(
            "ModelTooLarge",
            f"beside the weights {available / 2**20:.0f} MiB are available, too little for a KV cache: "
            f"a block of {block_tokens} tokens takes {block_bytes / 2**20:.1f} MiB",
        )
    return blocks


def _kv_token_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_heads * config.head_size * dtype.itemsize


def _context_tokens(config: DecoderConfig, wanted: int | None) -> int:
    if wanted is not None and wanted > config.context_tokens:
        raise ModelError(
            "ContextTooLong", f"a context of {wanted} tokens is asked for, and the model has {config.context_tokens}"
        )
    return wanted or config.context_tokens
