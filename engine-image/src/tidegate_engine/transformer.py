"""One decoder for the Llama-like families; a family is a row of switches, not a copied file.

Owns the parameters' names and shapes and the forward pass over a ragged batch. Knows no file format (`weights_gguf`),
no scheduling and no sampling (`torch_runner`).
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from tidegate_kernels.reference import (
    Cache,
    Ragged,
    add_rms_norm,
    linear,
    pack_weight,
    paged_attention,
    rms_norm,
    rope,
    rope_tables,
    silu_mul,
    store_kv,
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder's dimensions and switches."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    rope_base: float
    tied_head: bool
    qkv_bias: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's parameters, those that are multiplied with the same rows fused."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Decoder:
    """Parameters ready for `forward`."""

    config: DecoderConfig
    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, counted once; a packed copy of a tied embedding is not among them."""
        shapes = parameter_shapes(self.config)
        return sum(prod(shape) for shape in shapes.values()) * self.embedding.element_size()


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that a checkpoint of this configuration has, by name."""
    query, kv = config.heads * config.head_size, config.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.hidden),
        "norm": (config.hidden,),
    }
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, config.hidden)
    for index in range(config.layers):
        layer: dict[str, tuple[int, ...]] = {
            "attention_norm": (config.hidden,),
            "q": (query, config.hidden),
            "k": (kv, config.hidden),
            "v": (kv, config.hidden),
            "attention_output": (config.hidden, query),
            "mlp_norm": (config.hidden,),
            "gate": (config.inner, config.hidden),
            "up": (config.inner, config.hidden),
            "down": (config.hidden, config.inner),
        }
        if config.qkv_bias:
            layer |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def build_decoder(config: DecoderConfig, parameters: dict[str, Tensor]) -> Decoder:
    """Fuse and pack `parameters`, which are those of `parameter_shapes`; the dictionary is emptied on the way.

    Emptied, so that no second copy of the weights is held. Each parameter is used exactly once: a KeyError means that
    one is missing, a ValueError that one is left over.
    """
    take = parameters.pop
    layers = []
    for index in range(config.layers):
        prefix = f"layers.{index}."
        layers.append(
            Layer(
                attention_norm=take(prefix + "attention_norm"),
                qkv=pack_weight(torch.cat([take(prefix + name) for name in ("q", "k", "v")])),
                qkv_bias=torch.cat([take(prefix + name) for name in ("q_bias", "k_bias", "v_bias")])
                if config.qkv_bias
                else None,
                attention_output=pack_weight(take(prefix + "attention_output")),
                mlp_norm=take(prefix + "mlp_norm"),
                gate_up=pack_weight(torch.cat([take(prefix + name) for name in ("gate", "up")])),
                down=pack_weight(take(prefix + "down")),
            )
        )
    embedding = take("embedding")
    norm = take("norm")
    head = pack_weight(embedding if config.tied_head else take("head"))
    if parameters:
        raise ValueError(f"parameters that the decoder has no use for: {', '.join(sorted(parameters))}")
    cos, sin = rope_tables(torch.arange(config.context_tokens), size=config.head_size, base=config.rope_base)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=head,
        cos=cos.to(embedding.dtype),
        sin=sin.to(embedding.dtype),
    )


def new_kv_pool(config: DecoderConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype) -> Tensor:
    """The paged cache of all layers, `[layers, 2, blocks, kv heads, block tokens, head size]`.

    Zeros, since memory that was never written may hold NaN, and zero times NaN is NaN; but pages that the kernel zeroes
    on first use, so that memory is taken only by blocks that were used.
    """
    shape = (config.layers, 2, blocks, config.kv_heads, block_tokens, config.head_size)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def layer_caches(pool: Tensor) -> tuple[Cache, ...]:
    """The layers' views of `new_kv_pool`."""
    return tuple(Cache(layer[0], layer[1]) for layer in pool)


def forward(
    decoder: Decoder, token_ids: Tensor, batch: Ragged, *, caches: Sequence[Cache], logits_rows: Tensor
) -> Tensor:
    """Write the keys and values of `token_ids` (int64 `[T]`) to `caches`; returns logits `[len(logits_rows), vocab]`.

    Only the rows `logits_rows` go through the head.
    """
    config = decoder.config
    rotated_heads = config.heads + config.kv_heads
    rotated_width = rotated_heads * config.head_size
    scale = config.head_size**-0.5
    tokens = token_ids.shape[0]
    cos, sin = decoder.cos[batch.positions], decoder.sin[batch.positions]
    residual = F.embedding(token_ids, decoder.embedding)
    x = rms_norm(residual, decoder.layers[0].attention_norm, eps=config.norm_eps)
    next_norms = [*(layer.attention_norm for layer in decoder.layers[1:]), decoder.norm]
    for layer, cache, next_norm in zip(decoder.layers, caches, next_norms, strict=True):
        qkv = linear(x, layer.qkv, layer.qkv_bias)
        rotated = rope(qkv[:, :rotated_width].view(tokens, rotated_heads, config.head_size), cos, sin)
        value = qkv[:, rotated_width:].view(tokens, config.kv_heads, config.head_size)
        store_kv(rotated[:, config.heads :], value, cache, batch.slots)
        attended = paged_attention(rotated[:, : config.heads], cache, batch, scale=scale)
        x = add_rms_norm(linear(attended, layer.attention_output), residual, layer.mlp_norm, eps=config.norm_eps)
        down = linear(silu_mul(linear(x, layer.gate_up)), layer.down)
        x = add_rms_norm(down, residual, next_norm, eps=config.norm_eps)
    return linear(x[logits_rows], decoder.head)
