"""One decoder for the Llama-like families; a family is a row of switches, not a copied file.

Owns the parameters' names and shapes and the forward pass over a ragged batch. Knows no file format (`weights_gguf`),
no scheduling and no sampling (`torch_runner`).
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tidegate_kernels.reference import (
    Cache,
    Ragged,
    add_rms_norm,
    paged_attention,
    rms_norm,
    rope,
    rope_tables,
    silu_mul,
    store_kv,
)
from tidegate_kernels.weight import Dense, Weight, concat_rows, gather_rows, linear


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
    qkv: Weight
    qkv_bias: Tensor | None
    attention_output: Weight
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, slots=True)
class Decoder:
    """Parameters ready for `forward`."""

    config: DecoderConfig
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight
    cos: Tensor
    sin: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in; weights may be held in another precision."""
        return self.norm.dtype

    @property
    def weights(self) -> tuple[Weight, ...]:
        """All matrices that are held, each once: a tied head is among them where it has a layout of its own."""
        matrices = [self.embedding] if self.head is self.embedding else [self.embedding, self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
        return tuple(matrices)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory, scales of quantised ones among them."""
        vectors = [self.norm]
        for layer in self.layers:
            vectors += [layer.attention_norm, layer.mlp_norm]
            vectors += [] if layer.qkv_bias is None else [layer.qkv_bias]
        return sum(weight.size_bytes for weight in self.weights) + sum(vector.nbytes for vector in vectors)


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


def build_decoder(config: DecoderConfig, parameters: dict[str, Weight]) -> Decoder:
    """Fuse and pack `parameters`, which are those of `parameter_shapes`; the dictionary is emptied on the way.

    Emptied, so that no second copy of the weights is held. Each parameter is used exactly once: a KeyError means that
    one is missing, a ValueError that one is left over. Norms and biases are `Dense`, all of one type, in which
    activations are computed; the matrices may be of any kind.
    """
    take = parameters.pop
    layers = []
    for index in range(config.layers):
        prefix = f"layers.{index}."
        layers.append(
            Layer(
                attention_norm=_vector(take(prefix + "attention_norm")),
                qkv=concat_rows([take(prefix + name) for name in ("q", "k", "v")]).laid_out(),
                qkv_bias=torch.cat([_vector(take(prefix + name)) for name in ("q_bias", "k_bias", "v_bias")])
                if config.qkv_bias
                else None,
                attention_output=take(prefix + "attention_output").laid_out(),
                mlp_norm=_vector(take(prefix + "mlp_norm")),
                gate_up=concat_rows([take(prefix + name) for name in ("gate", "up")]).laid_out(),
                down=take(prefix + "down").laid_out(),
            )
        )
    embedding = take("embedding")
    norm = _vector(take("norm"))
    head = (embedding if config.tied_head else take("head")).laid_out()
    if parameters:
        raise ValueError(f"parameters that the decoder has no use for: {', '.join(sorted(parameters))}")
    cos, sin = rope_tables(torch.arange(config.context_tokens), size=config.head_size, base=config.rope_base)
    return Decoder(
        config=config,
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=head,
        cos=cos.to(norm.dtype),
        sin=sin.to(norm.dtype),
    )


def _vector(parameter: Weight) -> Tensor:
    if not isinstance(parameter, Dense):
        raise TypeError(f"a norm or a bias is in {parameter.precision}; it is used as it is, and must not be quantised")
    return parameter.values


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
    residual = gather_rows(decoder.embedding, token_ids, dtype=decoder.dtype)
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
