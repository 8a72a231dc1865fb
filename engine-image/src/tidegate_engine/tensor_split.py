"""Which rows and columns of a decoder's parameters one of several ranks holds.

Pure functions of configuration, rank and ranks: what they return is a configuration and parameters as `build_decoder`
takes them. Heads and the MLPs' inner dimension are shared: q, k, v, gate and up by rows, attention's output and down by
columns, whose products the ranks add up (Shoeybi et al., Megatron-LM, 2019). A rank that gets less than a KV head holds
a whole one, as its neighbours do. The head is shared by rows of the vocabulary, since all of it is read in every step;
the embedding is held whole by each rank, since a step reads a row a token, and a part would cost one more sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tidegate_engine.architecture import DecoderConfig, LayerConfig, parameter_shapes
from tidegate_engine.weights import ModelError
from tidegate_kernels.weight import Dense, Weight, concat_rows, slice_columns, slice_rows

_BY_ROWS = frozenset({"q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up", "gate_bias", "up_bias"})
_BY_COLUMNS = frozenset({"attention_output", "down"})
_ADDED_ONCE = frozenset({"attention_output_bias", "down_bias"})


@dataclass(frozen=True, slots=True)
class Share:
    """One of several ranks, the first of which is 0."""

    rank: int
    ranks: int


def split_config(config: DecoderConfig, ranks: int) -> DecoderConfig:
    """What each of the ranks computes. Raises ModelError where heads or the inner dimension cannot be shared evenly."""
    if ranks == 1:
        return config
    for index, layer in enumerate(config.layers):
        if fault := _fault(layer, ranks):
            raise ModelError(
                "TensorParallelUneven",
                f"layer {index} {fault}, which {ranks} GPUs cannot share; choose another number of GPUs",
            )
    if ranks > config.vocab_size:
        raise ModelError("TensorParallelUneven", f"{ranks} GPUs cannot share {config.vocab_size} rows of the head")
    layers = tuple(
        replace(
            layer,
            heads=layer.heads // ranks,
            kv_heads=max(1, layer.kv_heads // ranks),
            inner=layer.inner // ranks,
        )
        for layer in config.layers
    )
    # A tied head is a part of the embedding, and the embedding is whole.
    return replace(config, layers=layers, tied_head=False)


def _fault(layer: LayerConfig, ranks: int) -> str | None:
    if layer.heads % ranks:
        return f"has {layer.heads} heads"
    if layer.kv_heads % ranks and ranks % layer.kv_heads:
        return f"has {layer.kv_heads} key-value heads, neither a multiple nor a divisor of {ranks}"
    if layer.inner % ranks:
        return f"has an inner dimension of {layer.inner}"
    return None


def split_parameters(config: DecoderConfig, parameters: dict[str, Weight], share: Share) -> dict[str, Weight]:
    """The share of `parameters`, which are those of the whole `config`; the dictionary is emptied on the way.

    Rows stay views of what they are rows of where the format allows it: memory goes when they are moved or fused.
    Raises ModelError where a format has groups or blocks that a rank would get a part of.
    """
    if share.ranks == 1:
        return parameters
    split_config(config, share.ranks)
    shapes = parameter_shapes(config)
    found: dict[str, Weight] = {}
    if config.tied_head:
        found["head"] = _split("head", parameters["embedding"], _vocabulary(config, share), is_rows=True)
    for name in list(parameters):
        found[name] = _share_of(config, name, parameters.pop(name), shapes=shapes, share=share)
    return found


def largest_part(count: int, ranks: int) -> int:
    """How many of `count` each rank has, but for the last ones, which may have fewer."""
    return -(-count // ranks)


def _share_of(
    config: DecoderConfig, name: str, weight: Weight, *, shapes: Mapping[str, tuple[int, ...]], share: Share
) -> Weight:
    path, _, last = name.rpartition(".")
    if name == "head":
        return _split(name, weight, _vocabulary(config, share), is_rows=True)
    if not path:
        return weight
    layer = config.layers[int(path.split(".")[1])]
    if last in _ADDED_ONCE:
        return weight if share.rank == 0 or not isinstance(weight, Dense) else Dense(torch.zeros_like(weight.values))
    if last in _BY_COLUMNS:
        return _split(name, weight, _kept(config, layer, last, share), is_rows=False)
    fused = last.split("+")
    if not _BY_ROWS.issuperset(fused):
        return weight
    start, parts = 0, []
    for each in fused:
        first, count = _kept(config, layer, each, share)
        parts.append(_split(name, weight, (start + first, count), is_rows=True))
        start += shapes[f"{path}.{each}"][0]
    return concat_rows(parts)


def _kept(config: DecoderConfig, layer: LayerConfig, name: str, share: Share) -> tuple[int, int]:
    """The first of the shared rows or columns, and how many."""
    match name.removesuffix("_bias"):
        case "q" | "attention_output":
            count = layer.heads // share.ranks * config.head_size
        case "k" | "v":
            count = max(1, layer.kv_heads // share.ranks) * config.head_size
            return share.rank * layer.kv_heads // share.ranks * config.head_size, count
        case _:
            count = layer.inner // share.ranks
    return share.rank * count, count


def _vocabulary(config: DecoderConfig, share: Share) -> tuple[int, int]:
    width = largest_part(config.vocab_size, share.ranks)
    first = min(share.rank * width, config.vocab_size)
    return first, min(width, config.vocab_size - first)


def _split(name: str, weight: Weight, kept: tuple[int, int], *, is_rows: bool) -> Weight:
    try:
        part = slice_rows(weight, *kept) if is_rows else slice_columns(weight, *kept)
    except ValueError as error:
        raise _uncuttable(name, str(error)) from error
    # Rows out of the middle of a block can be had, but only as values.
    if not isinstance(weight, Dense) and not set(part.precision.split("+")) <= set(weight.precision.split("+")):
        first, count = kept
        raise _uncuttable(name, f"rows {first} to {first + count} cut through blocks of {weight.precision}")
    return part


def _uncuttable(name: str, why: str) -> ModelError:
    return ModelError(
        "TensorParallelUneven",
        f"{name} cannot be shared: {why}; choose fewer GPUs, or another precision for it with --precision",
    )
