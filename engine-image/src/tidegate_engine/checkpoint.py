"""A model on disk, whatever its format: its name, its decoder, the tokens that end an answer, and how to load it.

The one place that tells formats apart; `torch_runner` asks it. What is in the files is the formats' own modules'.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate_engine.architecture import DecoderConfig
from tidegate_engine.gguf_config import read_config
from tidegate_engine.gguf_file import read_header
from tidegate_engine.packed import load_packed, read_packed
from tidegate_engine.pooling import Pooling, pooling_of_folder, pooling_of_metadata
from tidegate_engine.precision import Precision
from tidegate_engine.weights import (
    PACKED_FILE,
    ModelError,
    check_eos_token_ids,
    eos_token_ids,
    find_model_file,
    folder_eos_token_ids,
)
from tidegate_engine.weights_gguf import load_gguf, stored_bytes
from tidegate_engine.weights_safetensors import describe_folder, load_safetensors, quantisation_of
from tidegate_kernels import native
from tidegate_kernels.weight import Weight


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model whose description was read, and whose weights were not."""

    path: Path
    name: str
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]
    stored_bytes: Mapping[str, int]
    """Bytes on disk of each parameter."""
    quantisation: str | None
    """The method by which it was quantised: `gguf`, `gptq`; None = not at all."""
    gguf_types: frozenset[str]
    """GGML's types of the tensors, of a GGUF file."""
    packed: bool
    """Made by `tidegate-engine pack`: in the precisions that were asked for then."""
    pooling: Pooling | ModelError
    """How its files say that embeddings are made, or why that is not computed."""
    _load: Callable[..., tuple[DecoderConfig, dict[str, Weight]]]

    @property
    def stored_is_fast(self) -> bool:
        """Whether fp32 activations are multiplied with the stored weights at least as fast as with dequantised ones."""
        return native.library() is not None and (
            self.quantisation is None or native.GGUF_TYPES >= self.gguf_types > set()
        )

    def load(self, dtype: torch.dtype, precision: Precision) -> dict[str, Weight]:
        """The parameters, as `parameter_shapes` names them; raises ModelError."""
        _, parameters = self._load(self.path, dtype=dtype, precision=precision)
        return parameters

    def pooling_or(self, wanted: Pooling | None) -> Pooling:
        """How its embeddings are made, unless `wanted` says it; raises ModelError where that is not computed."""
        pooling = wanted or self.pooling
        if isinstance(pooling, ModelError):
            raise pooling
        return pooling


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The model that `path` names (see `find_model_file`); raises ModelError."""
    path = find_model_file(path)
    load: Callable[..., tuple[DecoderConfig, dict[str, Weight]]]
    types: frozenset[str] = frozenset()
    packed = path.is_dir() and (path / PACKED_FILE).exists()
    if packed:
        model = read_packed(path)
        config, stored = model.config, model.stored_bytes
        name, ends, load = model.name, model.eos_token_ids, load_packed
        quantisation: str | None = "tidegate"
        pooling: Pooling | ModelError = model.pooling
    elif path.is_dir():
        config, stored = describe_folder(path)
        name, ends, load = path.resolve().name, folder_eos_token_ids(path), load_safetensors
        quantisation = quantisation_of(path)
        pooling = pooling_of_folder(path)
    else:
        header = read_header(path)
        config, stored = read_config(header), stored_bytes(header)
        name, ends, load = (
            str(header.metadata.get("general.name", path.stem)),
            eos_token_ids(header.metadata),
            load_gguf,
        )
        quantisation = "gguf"
        pooling = pooling_of_metadata(header.metadata, path=path)
        types = frozenset(entry.type.name for entry in header.tensors.values())
    ends = check_eos_token_ids(ends, vocab_size=config.vocab_size, path=path)
    return Checkpoint(path, name, config, ends, stored, quantisation, types, packed, pooling, load)
