"""The narrow protocol between the engine loop and what computes a step, and the facts about the model behind it.

No torch here: the torch runner lives in `torch_runner`, the modelled one in `modelled_runner`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tidegate_engine.request import PoolingKind, SampledToken, Step
from tidegate_engine.steptime import StepModel


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What capacity maths needs to know of a loaded model; `/admin/v1/info` serves it."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    weight_dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_token_bytes: int
    kv_blocks: int
    """Each with `block_tokens` tokens of all layers."""
    block_tokens: int
    gpu_product: str | None
    gpu_count: int
    eos_token_ids: tuple[int, ...]
    structured_outputs: bool = False
    """Whether answers can be held to a grammar."""
    embedding_size: int | None = None
    """Numbers of an embedding; None = the runner makes none."""
    pooling: PoolingKind | None = None
    """Which states become an embedding, where there are any."""
    embedding_normalised: bool = True
    """Whether embeddings have the length one."""
    host_blocks: int = 0
    """Evicted KV blocks that host memory holds; 0 also where copying one back would take longer than computing it."""
    kv_windows: tuple[int | None, ...] = (None,)
    """The layers' groups, of equal size, by how many tokens they see; None = all. A KV block is that of one group."""

    @property
    def group_blocks(self) -> int:
        """KV blocks of all groups, the null block among them."""
        return self.kv_blocks * len(self.kv_windows)

    @property
    def group_block_bytes(self) -> int:
        """Of the KV block of one group."""
        return self.kv_token_bytes * self.block_tokens // len(self.kv_windows)


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of a LoRA adapter's folder, in PEFT's format."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of a loaded LoRA adapter."""

    name: str
    digest: str
    """Of its files."""
    rank: int
    """The largest of its modules."""
    size_bytes: int


class Adapters(Protocol):
    """The LoRA adapters that a runner holds, within its bound. All but `read` is called between two steps only."""

    @property
    def max_loras(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def most_bytes(self) -> int:
        """What they ever took together at most."""
        ...

    def infos(self) -> Sequence[AdapterInfo]: ...

    def read(self, name: str, folder: Path) -> Callable[[], AdapterInfo]:
        """Read an adapter's files, in any thread; returns what makes the runner hold it. Both raise ModelError."""
        ...

    def remove(self, name: str) -> None:
        """Let go of it; no request of the steps to come has it."""
        ...


class Runner(Protocol):
    """Computes steps. Called from the engine loop's thread only."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def step_model(self) -> StepModel | None:
        """Known coefficients (a modelled runner), or None: then the loop's online fit speaks."""
        ...

    @property
    def adapters(self) -> Adapters | None:
        """None = it can have none."""
        ...

    @property
    def start_seconds(self) -> Mapping[str, float]:
        """Seconds by phase: weights, warmup."""
        ...

    def grown_bytes(self) -> int | None:
        """How far the process's memory has grown at most since the model was loaded; None where that is not known."""
        ...

    def most_kv_blocks(self, *, written: int) -> int:
        """The largest KV cache that there is memory for, in blocks of all layers. `written` are blocks of one group of
        the present cache that hold something: their memory comes back."""
        ...

    def resize(self, kv_blocks: int) -> None:
        """Have a KV cache of so many blocks instead, an empty one, which `info` tells from then on.

        Raises ModelError, and then the old size is back, empty.
        """
        ...

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        """Compute `step`; returns a token by request id for every item that samples. Blocking."""
        ...
