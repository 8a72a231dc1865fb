"""What a model is made of, as far as memory and speed depend on it, and the shapes of well-known models.

Pure. Parameter counts are of whole decoders, so that they can be compared with the makers' figures. Called by `plan`,
`prior` and `plan_command`, which also reads shapes from files.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, parameter_shapes
from tidegate_engine.precision import Precision, parse_precision, weight_bytes

PRECISIONS: Mapping[str, str] = {
    "fp32": "{attn: fp32, mlp: fp32, lm_head: fp32, embed: fp32}",
    "bf16": "{attn: bf16, mlp: bf16, lm_head: bf16, embed: bf16}",
    "fp16": "{attn: fp16, mlp: fp16, lm_head: fp16, embed: fp16}",
    "fp8": "{attn: fp8, mlp: fp8}",
    "int8": "{attn: int8, mlp: int8}",
    "int4": "{attn: int4, mlp: int4}",
}
"""What can be planned for, as the engine writes it. Embedding and head, which suffer most, stay in 16 bits."""
KV_VALUE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1}
_KINDS = {
    "embedding": "embedding", "head": "head", "q": "attention", "k": "attention", "v": "attention",
    "attention_output": "attention", "gate": "mlp", "up": "mlp", "down": "mlp",
}  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """A model's name and decoder."""

    name: str
    config: DecoderConfig

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return parameter_shapes(self.config)

    @cached_property
    def parameters_by_kind(self) -> Mapping[str, int]:
        """Parameters of the embedding, the attention, the MLPs (all experts), the head, and the rest.

        A head that is tied to the embedding has none of its own.
        """
        counts: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            counts[_KINDS.get(name.rpartition(".")[2], "rest")] += prod(shape)
        return counts

    @cached_property
    def parameters(self) -> int:
        return sum(self.parameters_by_kind.values())

    @cached_property
    def active_mlp_share(self) -> float:
        """Share of the MLPs' parameters that a token is multiplied with: below one in a mixture of experts."""
        total = active = 0
        for layer in self.config.layers:
            size = layer.inner * (layer.experts.count if layer.experts else 1)
            total += size
            active += layer.inner * layer.experts.chosen if layer.experts else size
        return active / total

    def weight_bytes(self, precision: str) -> int:
        """Bytes of all weights in a precision of `PRECISIONS`, scales among them."""
        return weight_bytes(
            _policy(precision), self.shapes, {}, tied_head=self.config.tied_head, head_apart=precision != "fp32"
        )

    def kv_bytes_per_token(self, kv_precision: str) -> int:
        """Bytes of a token in all layers' caches; one byte a value needs a scale of four for each head."""
        values, size = self.config.kv_token_values, KV_VALUE_BYTES[kv_precision]
        return values * size + (values // self.config.head_size * 4 if size == 1 else 0)

    @property
    def kv_heads(self) -> int:
        return max(layer.kv_heads for layer in self.config.layers)


def _policy(precision: str) -> Precision:
    return parse_precision(PRECISIONS[precision], dtype=precision if precision in ("fp32", "fp16") else "bf16")


def _dense(
    *,
    layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    inner: int,
    vocab: int,
    context: int,
    tied: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: tuple[int, int] | None = None,
) -> DecoderConfig:
    """`heads`: of queries, of keys and values, and values of each. `experts`: how many, and how many of them a token
    chooses."""
    mixture = None if experts is None else Experts(*experts, normalised=True)
    return DecoderConfig(
        layers=(LayerConfig(heads[0], heads[1], inner, experts=mixture),) * layers,
        hidden=hidden,
        head_size=heads[2],
        vocab_size=vocab,
        context_tokens=context,
        norm_eps=1e-5,
        ropes=(Rope(10_000.0),),
        tied_head=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


WELL_KNOWN: Mapping[str, DecoderConfig] = {
    "SmolLM2-135M": _dense(layers=30, hidden=576, heads=(9, 3, 64), inner=1536, vocab=49_152, context=8192, tied=True),
    "Qwen2.5-0.5B": _dense(
        layers=24, hidden=896, heads=(14, 2, 64), inner=4864, vocab=151_936, context=32_768, tied=True, qkv_bias=True
    ),
    "Llama-3.2-1B": _dense(
        layers=16, hidden=2048, heads=(32, 8, 64), inner=8192, vocab=128_256, context=131_072, tied=True
    ),
    "Llama-3.2-3B": _dense(
        layers=28, hidden=3072, heads=(24, 8, 128), inner=8192, vocab=128_256, context=131_072, tied=True
    ),
    "Llama-2-7B": _dense(layers=32, hidden=4096, heads=(32, 32, 128), inner=11_008, vocab=32_000, context=4096),
    "Mistral-7B": _dense(layers=32, hidden=4096, heads=(32, 8, 128), inner=14_336, vocab=32_768, context=32_768),
    "Qwen2.5-7B": _dense(
        layers=28, hidden=3584, heads=(28, 4, 128), inner=18_944, vocab=152_064, context=32_768, qkv_bias=True
    ),
    "Llama-3.1-8B": _dense(layers=32, hidden=4096, heads=(32, 8, 128), inner=14_336, vocab=128_256, context=131_072),
    "Qwen3-8B": _dense(
        layers=36, hidden=4096, heads=(32, 8, 128), inner=12_288, vocab=151_936, context=40_960, qk_norm=True
    ),
    "Qwen2.5-14B": _dense(
        layers=48, hidden=5120, heads=(40, 8, 128), inner=13_824, vocab=152_064, context=32_768, qkv_bias=True
    ),
    "Qwen2.5-32B": _dense(
        layers=64, hidden=5120, heads=(40, 8, 128), inner=27_648, vocab=152_064, context=32_768, qkv_bias=True
    ),
    "Qwen3-32B": _dense(
        layers=64, hidden=5120, heads=(64, 8, 128), inner=25_600, vocab=151_936, context=40_960, qk_norm=True
    ),
    "Mixtral-8x7B": _dense(
        layers=32, hidden=4096, heads=(32, 8, 128), inner=14_336, vocab=32_000, context=32_768, experts=(8, 2)
    ),
    "Qwen3-30B-A3B": _dense(
        layers=48,
        hidden=2048,
        heads=(32, 4, 128),
        inner=768,
        vocab=151_936,
        context=40_960,
        qk_norm=True,
        experts=(128, 8),
    ),
    "Llama-2-70B": _dense(layers=80, hidden=8192, heads=(64, 8, 128), inner=28_672, vocab=32_000, context=4096),
    "Llama-3.1-70B": _dense(layers=80, hidden=8192, heads=(64, 8, 128), inner=28_672, vocab=128_256, context=131_072),
    "Qwen2.5-72B": _dense(
        layers=80, hidden=8192, heads=(64, 8, 128), inner=29_568, vocab=152_064, context=32_768, qkv_bias=True
    ),
}
"""From the models' own `config.json` files. Releases of one shape (3.1 and 3.3, base and chat) share a row."""
SAME_SHAPE = {"Llama-3-8B": "Llama-3.1-8B", "Llama-3.3-70B": "Llama-3.1-70B", "Llama-3-70B": "Llama-3.1-70B"}
_ENDINGS = ("-hf", "-instruct", "-chat", "-it", "-base", "-v0.1", "-v0.2", "-v0.3", "-fp8", "-awq", "-gptq", "-2507")


def known_shape(name: str) -> ModelShape | None:
    """A row of the table, by its name with or without a maker before and `-Instruct` and the like behind."""
    wanted = name.rpartition("/")[2].lower().replace("meta-llama-", "llama-")
    while ending := next((each for each in _ENDINGS if wanted.endswith(each)), None):
        wanted = wanted.removesuffix(ending)
    rows = {key.lower(): key for key in (*WELL_KNOWN, *SAME_SHAPE)}
    key = rows.get(wanted)
    return None if key is None else ModelShape(SAME_SHAPE.get(key, key), WELL_KNOWN[SAME_SHAPE.get(key, key)])
