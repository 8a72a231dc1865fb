"""One decoder for all families; a family is a row of switches, not a copied file.

Owns the parameters in memory and the forward pass over a ragged batch. Knows no file format (`weights_gguf`,
`weights_safetensors`), no scheduling and no sampling (`torch_runner`).
"""

import mmap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig
from tidegate_engine.collectives import ALONE, Collectives
from tidegate_engine.rope import Turns, rope_frequencies, rope_magnitude
from tidegate_kernels.lora import LowRank, add_low_rank
from tidegate_kernels.operations import TORCH, Operations
from tidegate_kernels.reference import (
    AttentionRule,
    Cache,
    HeadNorm,
    Ragged,
    route,
    soft_cap,
)
from tidegate_kernels.weight import Dense, ExpertMatrices, Weight, concat_rows, gather_rows, linear

CPU = torch.device("cpu")
MAX_KV_PADDING = 1.1
"""How much larger the cache may be for groups of equal size."""
MAX_KV_GROUPS = 16
"""Each has tables of its own to be laid out in every step."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """A layer's own MLP."""

    gate_up: Weight
    gate_up_bias: Tensor | None
    down: Weight
    down_bias: Tensor | None

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A layer's experts and what chooses among them."""

    experts: Experts
    router: Weight
    gate_up: ExpertMatrices
    down: ExpertMatrices

    @property
    def weights(self) -> tuple[Weight | ExpertMatrices, ...]:
        return self.router, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's parameters, those that are multiplied with the same rows fused."""

    config: LayerConfig
    rule: AttentionRule
    attention_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """`[heads + kv heads, head size]`"""
    attention_output: Weight
    attention_output_bias: Tensor | None
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    mlp: Mlp | ExpertMlp
    post_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """Parameters ready for `forward`."""

    config: DecoderConfig
    embedding: Weight
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight
    turns: tuple[Turns, ...]
    """Of each of the config's ropes."""
    embedding_scale: float | None
    operations: Operations
    collectives: Collectives
    """ALONE, or with the ranks that hold the other parts: `config` and parameters are this rank's then."""

    @property
    def dtype(self) -> torch.dtype:
        """What activations are computed in; weights may be held in another precision."""
        return self.norm.dtype

    @property
    def weights(self) -> tuple[Weight | ExpertMatrices, ...]:
        """All matrices that are held, each once: a tied head is among them where it has a layout of its own."""
        is_tied = self.head.held is self.embedding
        matrices: list[Weight | ExpertMatrices] = [self.embedding] if is_tied else [self.embedding, self.head]
        for layer in self.layers:
            matrices += [layer.qkv, layer.attention_output, *layer.mlp.weights]
        return tuple(matrices)

    @property
    def weight_precision(self) -> str:
        """What the matrices are held in, that of the most bytes first: `int4-g64+float32`."""
        sizes: Counter[str] = Counter()
        for weight in self.weights:
            sizes[weight.precision] += weight.size_bytes
        return "+".join(dict.fromkeys(part for name, _ in sizes.most_common() for part in name.split("+")))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters in memory, scales of quantised ones among them."""
        vectors = [self.norm]
        for layer in self.layers:
            owners = (layer, layer.mlp)
            fields = [getattr(owner, name) for owner in owners for name in owner.__dataclass_fields__]
            vectors += [field for field in fields if isinstance(field, Tensor)]
        return sum(weight.size_bytes for weight in self.weights) + sum(vector.nbytes for vector in vectors)


def fused_names(config: DecoderConfig) -> list[tuple[str, ...]]:
    """The matrices that `build_decoder` fuses; it takes them fused already under names such as `layers.0.q+k+v`."""
    found: list[tuple[str, ...]] = []
    for index, layer in enumerate(config.layers):
        prefix = f"layers.{index}."
        mlps = [""] if layer.experts is None else [f"experts.{number}." for number in range(layer.experts.count)]
        found.append(tuple(prefix + name for name in ("q", "k", "v")))
        found += [(f"{prefix}{mlp}gate", f"{prefix}{mlp}up") for mlp in mlps]
    return found


def build_decoder(
    config: DecoderConfig,
    parameters: dict[str, Weight],
    operations: Operations = TORCH,
    *,
    collectives: Collectives = ALONE,
) -> Decoder:
    """Fuse and pack `parameters`, which are those of `parameter_shapes`; the dictionary is emptied on the way.

    Emptied, so that no second copy of the weights is held. Each parameter is used exactly once: a KeyError means that
    one is missing, a ValueError that one is left over. Norms and biases are `Dense`, all of one type, in which
    activations are computed; the matrices may be of any kind.
    """
    layers = tuple(_build_layer(config, index, parameters, operations) for index in range(len(config.layers)))
    embedding = parameters.pop("embedding")
    norm = _vector(parameters.pop("norm"))
    head = operations.laid_out(embedding if config.tied_head else parameters.pop("head"))
    if parameters:
        raise ValueError(f"parameters that the decoder has no use for: {', '.join(sorted(parameters))}")
    size = config.rotated or config.head_size
    scale = config.embedding_scale
    return Decoder(
        config=config,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        turns=tuple(
            Turns(
                rope_frequencies(each, size=size, context_tokens=config.context_tokens).to(norm.device),
                magnitude=rope_magnitude(each),
                dtype=norm.dtype,
            )
            for each in config.ropes
        ),
        # Rounded as the models were trained with it.
        embedding_scale=None if scale is None else float(torch.tensor(scale, dtype=norm.dtype)),
        operations=operations,
        collectives=collectives,
    )


def _build_layer(config: DecoderConfig, index: int, parameters: dict[str, Weight], operations: Operations) -> Layer:
    layer = config.layers[index]
    prefix = f"layers.{index}."

    def take(*names: str) -> Weight:
        return operations.laid_out(take_whole(*names))

    def take_whole(*names: str) -> Weight:
        start, _, _ = names[0].rpartition(".")
        joined = prefix + (start + "." if start else "") + "+".join(name.rpartition(".")[2] for name in names)
        if joined in parameters:
            return parameters.pop(joined)
        return concat_rows([parameters.pop(prefix + name) for name in names])

    def take_vector(*names: str) -> Tensor:
        parts = [_vector(parameters.pop(prefix + name)) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    qk_norm = None
    if config.qk_norm:
        weights = take_vector("q_norm").expand(layer.heads, -1), take_vector("k_norm").expand(layer.kv_heads, -1)
        qk_norm = torch.cat(weights).contiguous()
    mlp: Mlp | ExpertMlp
    if layer.experts is None:
        mlp = Mlp(
            gate_up=take("gate", "up"),
            gate_up_bias=take_vector("gate_bias", "up_bias") if config.mlp_bias else None,
            down=take("down"),
            down_bias=take_vector("down_bias") if config.mlp_bias else None,
        )
    else:
        names = [f"experts.{number}." for number in range(layer.experts.count)]
        mlp = ExpertMlp(
            experts=layer.experts,
            router=take("router"),
            gate_up=operations.experts_laid_out([take_whole(name + "gate", name + "up") for name in names]),
            down=operations.experts_laid_out([take_whole(name + "down") for name in names]),
        )
    return Layer(
        config=layer,
        rule=AttentionRule(
            scale=config.attention_scale or config.head_size**-0.5,
            window=layer.window,
            soft_cap=config.attention_soft_cap,
        ),
        attention_norm=take_vector("attention_norm"),
        qkv=take("q", "k", "v"),
        qkv_bias=take_vector("q_bias", "k_bias", "v_bias") if config.qkv_bias else None,
        qk_norm=qk_norm,
        attention_output=take("attention_output"),
        attention_output_bias=take_vector("attention_output_bias") if config.output_bias else None,
        post_attention_norm=take_vector("post_attention_norm") if config.post_norms else None,
        mlp_norm=take_vector("mlp_norm"),
        mlp=mlp,
        post_mlp_norm=take_vector("post_mlp_norm") if config.post_norms else None,
    )


def _vector(parameter: Weight) -> Tensor:
    if not isinstance(parameter, Dense):
        raise TypeError(f"a norm or a bias is in {parameter.precision}; it is used as it is, and must not be quantised")
    return parameter.values


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV blocks come and go together, since they see equally far."""

    window: int | None
    layers: tuple[int, ...]


def all_in_one_group(config: DecoderConfig) -> tuple[KvGroup, ...]:
    """The layers as one group, which sees as far as the one that sees the farthest."""
    windows = [layer.window for layer in config.layers]
    window = max((each for each in windows if each is not None), default=None) if None not in windows else None
    return (KvGroup(window, tuple(range(len(windows)))),)


def kv_groups(config: DecoderConfig) -> tuple[KvGroup, ...]:
    """Groups of the same number of layers, so that a block of any of them takes the same memory.

    As large as possible with little padding: where the layers of one window do not divide evenly, the last group has
    places for layers that do not exist. A window that holds the whole context is none.
    """
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(config.layers):
        window = None if layer.window is None or layer.window >= config.context_tokens else layer.window
        by_window.setdefault(window, []).append(index)
    for size in range(min(map(len, by_window.values())), 0, -1):
        groups = tuple(
            KvGroup(window, tuple(layers[first : first + size]))
            for window, layers in by_window.items()
            for first in range(0, len(layers), size)
        )
        if len(groups) > MAX_KV_GROUPS:
            break
        if _group_values(config, groups) * len(groups) <= config.kv_token_values * MAX_KV_PADDING:
            return groups
    return all_in_one_group(config)


def new_kv_pool(
    config: DecoderConfig,
    *,
    blocks: int,
    block_tokens: int,
    dtype: torch.dtype,
    groups: Sequence[KvGroup] | None = None,
    device: torch.device = CPU,
) -> tuple[Tensor, ...]:
    """The paged cache: `[layers, 2, blocks, kv heads, block tokens, head size]` for each number of kv heads there is.

    `blocks` is that of all groups together, `layers` that of one. Of a quantised cache (FP8, INT8) the scales follow,
    one tensor for each of these without the head size. Zeros, since memory that was never written may hold NaN, and
    zero times NaN is NaN; but in host memory pages that the kernel zeroes on first use, so that memory is taken only by
    blocks that were used.
    """
    shapes = [
        (layers, 2, blocks, kv_heads, block_tokens, config.head_size)
        for kv_heads, layers in _places(config, groups or all_in_one_group(config)).items()
    ]
    scales = [(shape[:-1], torch.float32) for shape in shapes] if dtype.itemsize == 1 else []
    parts = [*((shape, dtype) for shape in shapes), *scales]
    if device.type == "cpu":
        return tuple(_zero_pages(shape, own) for shape, own in parts)
    return tuple(torch.zeros(shape, dtype=own, device=device) for shape, own in parts)


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def kv_token_bytes(config: DecoderConfig, dtype: torch.dtype, groups: Sequence[KvGroup] | None = None) -> int:
    """Bytes of one token in all layers, scales and the groups' padding among them."""
    groups = groups or all_in_one_group(config)
    values = _group_values(config, groups) * len(groups)
    return values * dtype.itemsize + (values // config.head_size * 4 if dtype.itemsize == 1 else 0)


def layer_caches(
    config: DecoderConfig, pool: Sequence[Tensor], groups: Sequence[KvGroup] | None = None
) -> tuple[Cache, ...]:
    """The layers' views of `new_kv_pool`; layers of different groups share memory, and never a block."""
    groups = groups or all_in_one_group(config)
    sizes = list(_places(config, groups))
    scaled: Sequence[Tensor | None] = pool[len(sizes) :] or (None,) * len(sizes)
    caches: dict[int, Cache] = {}
    for number, group in enumerate(groups):
        taken: Counter[int] = Counter()
        for index in group.layers:
            kv_heads = config.layers[index].kv_heads
            part, scales = pool[sizes.index(kv_heads)], scaled[sizes.index(kv_heads)]
            place = taken[kv_heads]
            taken[kv_heads] += 1
            own, own_scales = part[place], (None, None) if scales is None else scales[place]
            caches[index] = Cache(own[0], own[1], own_scales[0], own_scales[1], number)
    return tuple(caches[index] for index in range(len(config.layers)))


def _places(config: DecoderConfig, groups: Sequence[KvGroup]) -> dict[int, int]:
    """For each number of kv heads, how many layers of it a block has room for."""
    places: Counter[int] = Counter()
    for group in groups:
        places |= Counter(config.layers[index].kv_heads for index in group.layers)
    return dict(places)


def _group_values(config: DecoderConfig, groups: Sequence[KvGroup]) -> int:
    """Keys and values that a block has room for, for each of its tokens."""
    return 2 * config.head_size * sum(kv_heads * layers for kv_heads, layers in _places(config, groups).items())


LayerDeltas = Mapping[str, LowRank]
"""What an adapter adds to a layer's products, by the names of their weights: qkv, attention_output, gate_up, down."""


@dataclass(frozen=True, slots=True)
class RowDeltas:
    """An adapter's layers, and the rows of a batch (int64) that it is for."""

    layers: Sequence[LayerDeltas]
    rows: Tensor


def forward(
    decoder: Decoder,
    token_ids: Tensor,
    batch: Ragged,
    *,
    caches: Sequence[Cache],
    logits_rows: Tensor,
    adapters: Sequence[RowDeltas] = (),
) -> Tensor:
    """Write the keys and values of `token_ids` (int64 `[T]`) to `caches`; returns logits `[len(logits_rows), vocab]`.

    Only the rows `logits_rows` go through the head. Rows without an adapter get what they get without `adapters`, bit
    for bit.
    """
    states = hidden_states(decoder, token_ids, batch, caches=caches, adapters=adapters)
    return head_logits(decoder, states[logits_rows])


def head_logits(decoder: Decoder, states: Tensor) -> Tensor:
    """Logits `[rows, vocab]` of hidden states `[rows, hidden]`."""
    logits = linear(states, decoder.head)
    logits = decoder.collectives.join(logits, decoder.config.vocab_size)
    return logits if decoder.config.logit_soft_cap is None else soft_cap(logits, decoder.config.logit_soft_cap)


def hidden_states(
    decoder: Decoder,
    token_ids: Tensor,
    batch: Ragged,
    *,
    caches: Sequence[Cache],
    adapters: Sequence[RowDeltas] = (),
) -> Tensor:
    """Write the keys and values of `token_ids` (int64 `[T]`) to `caches`; returns the last norm's `[T, hidden]`."""
    config = decoder.config
    operations, add, eps = decoder.operations, decoder.collectives.add, config.norm_eps
    if adapters and decoder.collectives is not ALONE:
        raise ValueError("adapters are held whole, and the layers here are a part of the model's; serve it on one GPU")
    activate, end = operations.activations[config.activation], max(batch.counts[1])
    tables = [turns.at(batch.positions, end=end) for turns in decoder.turns]
    residual = gather_rows(decoder.embedding, token_ids, dtype=decoder.dtype)
    if decoder.embedding_scale is not None:
        residual.mul_(decoder.embedding_scale)
    x = operations.rms_norm(residual, decoder.layers[0].attention_norm, eps=eps)
    next_norms = [*(layer.attention_norm for layer in decoder.layers[1:]), decoder.norm]
    for index, (layer, cache, next_norm) in enumerate(zip(decoder.layers, caches, next_norms, strict=True)):
        deltas = [(adapter.layers[index], adapter.rows) for adapter in adapters]
        qkv = _adapted(linear(x, layer.qkv, layer.qkv_bias), x, deltas, "qkv")
        heads = qkv.view(len(x), -1, config.head_size)
        own, turns = batch.of(cache), layer.config.rope
        head_norm = None if layer.qk_norm is None else HeadNorm(layer.qk_norm, eps)
        queries = operations.turn_and_store(
            heads, cache, own.slots, tables=None if turns is None else tables[turns], norm=head_norm
        )
        attention = operations.paged_attention(queries, cache, own, layer.rule)
        attended = linear(attention, layer.attention_output, layer.attention_output_bias)
        attended = add(_adapted(attended, attention, deltas, "attention_output"))
        if layer.post_attention_norm is not None:
            attended = operations.rms_norm(attended, layer.post_attention_norm, eps=eps)
        x = operations.add_rms_norm(attended, residual, layer.mlp_norm, eps=eps)
        if isinstance(layer.mlp, Mlp):
            inner = activate(_adapted(linear(x, layer.mlp.gate_up, layer.mlp.gate_up_bias), x, deltas, "gate_up"))
            mixed = _adapted(linear(inner, layer.mlp.down, layer.mlp.down_bias), inner, deltas, "down")
        else:
            mixed = _mix_experts(x, layer.mlp, activate)
        mixed = add(mixed)
        if layer.post_mlp_norm is not None:
            mixed = operations.rms_norm(mixed, layer.post_mlp_norm, eps=eps)
        x = operations.add_rms_norm(mixed, residual, next_norm, eps=eps)
    return x


def _adapted(product: Tensor, x: Tensor, deltas: Sequence[tuple[LayerDeltas, Tensor]], name: str) -> Tensor:
    """The product of `x` with the weight `name` of a layer, and what the rows' adapters add to it, in place."""
    if deltas:
        add_low_rank(product, x, [(layer[name], rows) for layer, rows in deltas if name in layer])
    return product


def _mix_experts(x: Tensor, mlp: ExpertMlp, activate: Callable[[Tensor], Tensor]) -> Tensor:
    """Each row through its experts, all rows of an expert side by side, and the results weighed.

    Nothing here waits for the device, and a row's sum has one order, whoever else is in the batch.
    """
    chosen, count = mlp.experts.chosen, mlp.experts.count
    shares, experts = route(linear(x, mlp.router), chosen=chosen, normalised=mlp.experts.normalised)
    owners, order = experts.flatten().sort(stable=True)
    starts = torch.searchsorted(owners, torch.arange(count + 1, device=x.device), out_int32=True)
    inner = activate(mlp.gate_up.multiply(x[order.div(chosen, rounding_mode="floor")], starts))
    product = mlp.down.multiply(inner, starts)
    results = torch.empty_like(product).index_copy_(0, order, product).view(len(x), chosen, -1)
    return results.mul_(shares[..., None]).sum(1)
