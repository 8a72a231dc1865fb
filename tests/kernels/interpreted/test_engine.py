"""The engine on the kernels: a layer of every kind, and a runner whose tokens are those of the one on torch."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, parameter_shapes
from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import (
    Decoder,
    build_decoder,
    forward,
    layer_caches,
    new_kv_pool,
)
from tidegate_kernels.compiled import TRITON, Int4Product, ScaledProduct, laid_out
from tidegate_kernels.float8 import FP8
from tidegate_kernels.operations import TORCH, Operations
from tidegate_kernels.quantised import (
    quantise_fp8,
    quantise_fp8_blocks,
    quantise_groups,
    quantise_int8,
)
from tidegate_kernels.reference import View, ragged_batch
from tidegate_kernels.weight import Dense, Weight

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
VOCAB, BLOCK = 50, 16
PLAIN = DecoderConfig(
    layers=(LayerConfig(heads=4, kv_heads=2, inner=96),),
    hidden=64,
    head_size=64,
    vocab_size=VOCAB,
    context_tokens=256,
    norm_eps=1e-5,
    ropes=(Rope(10_000.0),),
    tied_head=False,
)
CONFIGS = {
    "plain": PLAIN,
    "norms of heads, biases, a tied head": replace(
        PLAIN, qk_norm=True, qkv_bias=True, output_bias=True, mlp_bias=True, tied_head=True
    ),
    "windows, caps, norms behind": replace(
        PLAIN,
        layers=(replace(PLAIN.layers[0], window=5), PLAIN.layers[0]),
        activation="gelu_tanh",
        post_norms=True,
        attention_soft_cap=20.0,
        logit_soft_cap=10.0,
        embedding_scale=8.0,
    ),
    "half of a head turns, one layer not at all, three heads share": replace(
        PLAIN, layers=(LayerConfig(9, 3, 96), LayerConfig(9, 3, 96, rope=None)), head_size=80, rotated=40
    ),
    "experts": replace(PLAIN, layers=(replace(PLAIN.layers[0], experts=Experts(4, 2, normalised=True)),)),
}
WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "dense": Dense,
    "fp8": quantise_fp8,
    "fp8 in blocks": quantise_fp8_blocks,
    "int8": quantise_int8,
    "int4": lambda values: quantise_groups(values, bits=4, group=32),
    "int5, which has no kernel": lambda values: quantise_groups(values, bits=5, group=32),
}


def decoder_of(config: DecoderConfig, quantise: Callable[[Tensor], Weight], operations: Operations) -> Decoder:
    generator = torch.Generator().manual_seed(7)
    parameters: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        values = torch.randn(shape, generator=generator) * (0.5 if len(shape) == 1 else shape[-1] ** -0.5)
        is_kept = len(shape) == 1 or name == "embedding" or "router" in name
        parameters[name] = Dense(values) if is_kept else quantise(values)
    return build_decoder(config, parameters, operations)


def logits_of(decoder: Decoder, kv_dtype: torch.dtype, views: Sequence[View | None] | None = None) -> Tensor:
    """A chunk of one sequence with the whole of another, then a decode of both."""
    config = decoder.config
    caches = layer_caches(config, new_kv_pool(config, blocks=9, block_tokens=BLOCK, dtype=kv_dtype))
    ids = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    tables, found = [[3, 1, 7], [5, 2]], []
    for new, total in (([7, 2], [7, 2]), ([11, 1], [18, 3]), ([1, 1], [19, 4])):
        batch = ragged_batch(new, total, tables, cache=caches[0], views=views)
        rows = torch.arange(sum(new))
        found.append(forward(decoder, ids[: len(rows)], batch, caches=caches, logits_rows=rows))
    return torch.cat(found)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_of_every_kind_computes_what_it_does_on_torch(name: str) -> None:
    found = logits_of(decoder_of(CONFIGS[name], Dense, TRITON), torch.float32)
    expected = logits_of(decoder_of(CONFIGS[name], Dense, TORCH), torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", WEIGHTS if PROVE else ["fp8 in blocks", "int4"])
def test_weights_of_every_kind_are_multiplied_as_on_torch(name: str) -> None:
    found = logits_of(decoder_of(PLAIN, WEIGHTS[name], TRITON), torch.float32)
    expected = logits_of(decoder_of(PLAIN, WEIGHTS[name], TORCH), torch.float32)
    # An activation in the middle between two codes goes to either, and with it some thousandths of a logit.
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kv_dtype", [FP8, torch.int8] if PROVE else [FP8])
def test_a_quantised_cache_is_read_as_it_was_written(kv_dtype: torch.dtype) -> None:
    found = logits_of(decoder_of(PLAIN, Dense, TRITON), kv_dtype)
    expected = logits_of(decoder_of(PLAIN, Dense, TORCH), kv_dtype)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_sequences_own_view_reaches_the_kernel() -> None:
    views = [(6, 2), None]
    decoder = decoder_of(PLAIN, Dense, TRITON)
    found = logits_of(decoder, torch.float32, views)
    torch.testing.assert_close(
        found, logits_of(decoder_of(PLAIN, Dense, TORCH), torch.float32, views), rtol=1e-3, atol=1e-4
    )
    assert not torch.allclose(found, logits_of(decoder, torch.float32), atol=1e-3)


@pytest.mark.parametrize(
    ("name", "kind"), [("fp8", ScaledProduct), ("int8", ScaledProduct), ("int4", Int4Product), ("dense", Dense)]
)
def test_a_weight_keeps_its_values_its_size_and_its_name_in_the_kernels_layout(name: str, kind: type[Weight]) -> None:
    weight = WEIGHTS[name](torch.randn(24, 64, generator=torch.Generator().manual_seed(2)))
    found = laid_out(weight)
    assert type(found) is kind
    assert (found.shape, found.size_bytes, found.precision) == (weight.shape, weight.size_bytes, weight.precision)
    assert torch.equal(found.dequantised(), weight.dequantised())
    rows = torch.tensor([3, 20, 3])
    assert torch.equal(found.select(rows).dequantised(), weight.select(rows).dequantised())


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"] if PROVE else ["qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with norms of heads, as checkpoints are published: with an MLP, and with four experts."""
    path, family = tmp_path_factory.mktemp("model"), request.param
    experts = [""] if family == "qwen3" else [f"experts.{number}." for number in range(4)]
    sizes: dict[str, object] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    config = sizes | {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCAB, "max_position_embeddings": 256}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": False}
    config |= {
        "model_type": family,
        "architectures": ["Qwen3ForCausalLM" if len(experts) == 1 else "Qwen3MoeForCausalLM"],
    }
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(4)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).div_(columns**0.5)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, 64) * 8, "model.norm.weight": torch.ones(64)}
    tensors["lm_head.weight"] = matrix(VOCAB, 64)
    for index in range(1):
        layer = f"model.layers.{index}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.ones(64)
        for name, rows in (("q", 256), ("k", 128), ("v", 128)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = matrix(rows, 64)
        for name in ("q", "k"):
            tensors[f"{layer}self_attn.{name}_norm.weight"] = torch.rand(64, generator=generator) + 0.5
        tensors[f"{layer}self_attn.o_proj.weight"] = matrix(64, 256)
        for expert in experts:
            for name, rows, columns in (("gate", 96, 64), ("up", 96, 64), ("down", 64, 96)):
                tensors[f"{layer}mlp.{expert}{name}_proj.weight"] = matrix(rows, columns)
        if len(experts) > 1:
            tensors[f"{layer}mlp.gate.weight"] = matrix(4, 64)
    save_file(tensors, path / "model.safetensors")
    return path


WISHES = (
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=7, seed=5, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02, seed=6, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(
        temperature=0, ignore_eos=True, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=((3, 1.5), (7, -100.0))
    ),
    SamplingParams(temperature=1.0, seed=8, min_tokens=3, stop_token_ids=(1, 2, 4)),
)
"""Greedy, with cuts, with penalties, with biases, and with a length to be reached."""


def outputs_of(folder: Path, kernels: str) -> list[list[int]]:
    """What five requests get, their prompts cut in chunks that share steps with decodes."""
    # By the kernels, decodes are padded as a GPU's recorded ones are.
    options = TorchOptions(kv_blocks=40, block_tokens=BLOCK, threads=1, kernels=kernels)
    runner = TorchRunner(folder, options=replace(options, graph_sizes=(2, 4) if kernels == "triton" else ()))
    scheduler = Scheduler(BatchSettings(4, 16, 9), BlockPool(40, BLOCK, prefix_caching=True), max_model_len=128)
    generator = torch.Generator().manual_seed(6)
    requests = []
    for index, (length, params) in enumerate(zip((1, 5, 20, 2, 3), WISHES, strict=True)):
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        requests.append(Request(f"r{index}", length, 4, float(index), prompt_ids=ids, params=params))
        scheduler.add(requests[-1])
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
    return [request.output_ids for request in requests]


def test_a_runner_on_the_kernels_says_what_one_on_torch_says(folder: Path) -> None:
    found = outputs_of(folder, "triton")
    assert found == outputs_of(folder, "torch")
    assert len({tuple(ids) for ids in found}) == len(WISHES)


@pytest.mark.parametrize("operations", [TRITON, TORCH], ids=["triton", "torch"])
def test_a_tied_head_that_lies_where_the_embedding_does_is_counted_once(operations: Operations) -> None:
    config = replace(PLAIN, tied_head=True)
    parameters: dict[str, Weight] = {name: Dense(torch.ones(shape)) for name, shape in parameter_shapes(config).items()}
    parameters["embedding"] = quantise_fp8(torch.randn(VOCAB, 64))
    expected = sum(
        weight.values.nbytes if isinstance(weight, Dense) else weight.size_bytes for weight in parameters.values()
    )
    assert build_decoder(config, parameters, operations).weight_bytes == expected
