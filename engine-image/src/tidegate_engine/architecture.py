"""What a decoder is, without its weights: dimensions, switches, how heads turn, and the parameters' names and shapes.

Pure data, no torch: readers of files make a `DecoderConfig`, `transformer` computes by it, and whatever only wants to
know what a model needs (`tidegate plan`) reads it too.
"""

from dataclasses import dataclass

MAX_BASE, MAX_FACTOR = 1e12, 1e4
METHODS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    """A model's rotary positions; what a method does not use is left alone."""

    base: float
    method: str = "default"
    factor: float = 1.0
    """How much the context was stretched."""
    trained_tokens: int = 0
    """The context before that."""
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    whole_bounds: bool = True
    """Whether yarn's bounds are rounded to whole dimensions."""
    magnitude: float | None = None
    """What cosines and sines are multiplied by; None = what the method says."""
    divisors: tuple[float, ...] = ()
    """Of each frequency: longrope's within the trained context, and those of files that hold them ready."""
    long_divisors: tuple[float, ...] = ()
    """longrope's beyond the trained context."""


def rope_fault(rope: Rope, *, size: int) -> str | None:
    """Why the formulas cannot be given `rope` for a head of which `size` dimensions turn; None where they can."""
    if not 1 < rope.base <= MAX_BASE or not 1 / MAX_FACTOR <= rope.factor <= MAX_FACTOR:
        return f"turns its positions by the base {rope.base:g} and the factor {rope.factor:g}"
    if rope.method not in ("default", "linear") and rope.trained_tokens < 2:
        return f"was trained with {rope.trained_tokens} tokens before its positions were stretched"
    if rope.method == "dynamic" and size < 4:
        return f"rotates {size} dimensions of a head; the method dynamic needs 4"
    for divisors in (rope.divisors, rope.long_divisors) if rope.method == "longrope" else ():
        if len(divisors) != size // 2:
            return f"has {len(divisors)} factors for {size // 2} frequencies"
    return None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: each token's MLP is that of `chosen` of `count`."""

    count: int
    chosen: int
    normalised: bool
    """Whether the shares of the chosen ones sum to one."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    heads: int
    kv_heads: int
    inner: int
    """Of the MLP, or of each expert's."""
    window: int | None = None
    """How many tokens a row sees, itself included; None = all before it."""
    rope: int | None = 0
    """Which of the decoder's ropes turns the heads; None = none does."""
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder's dimensions and switches."""

    layers: tuple[LayerConfig, ...]
    hidden: int
    head_size: int
    vocab_size: int
    context_tokens: int
    norm_eps: float
    ropes: tuple[Rope, ...]
    tied_head: bool
    rotated: int | None = None
    """Dimensions of a head that turn, the first ones; None = all."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Whether attention's and the MLP's results are normalised before they are added."""
    activation: str = "silu"
    """A key of `Operations.activations`."""
    attention_scale: float | None = None
    """None = one over the root of the head size."""
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float | None = None

    @property
    def kv_token_values(self) -> int:
        """Keys and values that a token takes in the caches of all layers."""
        return 2 * self.head_size * sum(layer.kv_heads for layer in self.layers)


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter that a checkpoint of this configuration has, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        "embedding": (config.vocab_size, config.hidden),
        "norm": (config.hidden,),
    }
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, config.hidden)
    for index, layer in enumerate(config.layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def _layer_shapes(config: DecoderConfig, layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden, layer.inner
    query, kv = layer.heads * config.head_size, layer.kv_heads * config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (query, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "attention_output": (hidden, query),
        "mlp_norm": (hidden,),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (query,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_size,), "k_norm": (config.head_size,)}
    if config.output_bias:
        shapes["attention_output_bias"] = (hidden,)
    if config.post_norms:
        shapes |= {"post_attention_norm": (hidden,), "post_mlp_norm": (hidden,)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if layer.experts is None:
        if config.mlp_bias:
            return shapes | mlp | {"gate_bias": (inner,), "up_bias": (inner,), "down_bias": (hidden,)}
        return shapes | mlp
    shapes["router"] = (layer.experts.count, hidden)
    for number in range(layer.experts.count):
        shapes |= {f"experts.{number}.{name}": shape for name, shape in mlp.items()}
    return shapes
