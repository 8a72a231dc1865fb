"""Tiny random models of every family, written by transformers: our logits against its eager attention's, whole and cut.

And what the reader says to checkpoints that are not what they claim to be.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tidegate_engine.architecture import parameter_shapes
from tidegate_engine.transformer import Decoder, build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError, find_model_file
from tidegate_engine.weights_safetensors import load_safetensors
from tidegate_kernels.reference import ragged_batch

PROVE = os.environ.get("TIDEGATE_PROVE") == "1"
SaveFamily = Callable[[str], tuple[Path, Any]]
BLOCK = 4
VOCAB = 160
LENGTH = 45


def token_ids() -> list[int]:
    return torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()


def decode_in_chunks(decoder: Decoder, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Logits after each of `ids`, computed so many at a time."""
    blocks = -(-len(ids) // BLOCK)
    config = decoder.config
    caches = layer_caches(config, new_kv_pool(config, blocks=blocks + 1, block_tokens=BLOCK, dtype=torch.float32))
    table = list(range(blocks, 0, -1))
    done, found = 0, []
    for count in chunks:
        end = done + count
        batch = ragged_batch([count], [end], [table[: -(-end // BLOCK)]], cache=caches[0])
        with torch.inference_mode():
            rows = torch.arange(count)
            found.append(forward(decoder, torch.tensor(ids[done:end]), batch, caches=caches, logits_rows=rows))
        done = end
    return torch.cat(found)


def test_a_tiny_model_of_each_family_has_the_logits_of_transformers_however_it_is_cut(
    save_family: SaveFamily, family: str
) -> None:
    folder, oracle = save_family(family)
    ids = token_ids()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    assert expected.std() > 0.3
    config, parameters = load_safetensors(folder, dtype=torch.float32)
    assert parameters.keys() == parameter_shapes(config).keys()
    decoder = build_decoder(config, parameters)
    whole = decode_in_chunks(decoder, ids, [LENGTH])
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    cut = decode_in_chunks(decoder, ids, [1, 13, 6, 1, 1, 20, 3])
    torch.testing.assert_close(cut, whole, atol=1e-4, rtol=1e-4)


# --- layers of different widths, shards, precisions


def rewrite(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None], **settings: object) -> Path:
    """Change a folder's tensors and configuration (None leaves an entry out)."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    configuration = json.loads((folder / "config.json").read_text()) | settings
    kept = {name: value for name, value in configuration.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


@pytest.fixture
def copy(save_family: SaveFamily, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a case's folder that a test may change."""

    def of(case: str) -> Path:
        folder = tmp_path / case
        folder.mkdir()
        for file in save_family(case)[0].iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    return of


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_safetensors(folder, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pruned_model_whose_layers_differ_in_width_loads_and_computes(copy: Callable[[str], Path]) -> None:
    def prune(tensors: dict[str, torch.Tensor]) -> None:
        layer = "model.layers.1."
        for name in ("gate_proj", "up_proj"):
            tensors[f"{layer}mlp.{name}.weight"] = tensors[f"{layer}mlp.{name}.weight"][:40]
        tensors[f"{layer}mlp.down_proj.weight"] = tensors[f"{layer}mlp.down_proj.weight"][:, :40]
        tensors[f"{layer}self_attn.q_proj.weight"] = tensors[f"{layer}self_attn.q_proj.weight"][: 4 * 8]
        tensors[f"{layer}self_attn.o_proj.weight"] = tensors[f"{layer}self_attn.o_proj.weight"][:, : 4 * 8]
        for name in ("k_proj", "v_proj"):
            tensors[f"{layer}self_attn.{name}.weight"] = tensors[f"{layer}self_attn.{name}.weight"][: 2 * 8]

    def pad(tensors: dict[str, torch.Tensor]) -> None:
        """The same function in a model of equal widths: what was cut is zero."""
        layer = "model.layers.1."
        for name in ("gate_proj", "up_proj"):
            tensors[f"{layer}mlp.{name}.weight"][40:] = 0
        # Heads 0 to 3 of the pruned layer use key-value heads 0, 0, 1, 1; in groups of three they are 0, 1, 3, 4.
        query, output = f"{layer}self_attn.q_proj.weight", f"{layer}self_attn.o_proj.weight"
        rows, columns = tensors[query].view(9, 8, -1), tensors[output].view(-1, 9, 8)
        order = [0, 1, 4, 2, 3, 5, 6, 7, 8]
        tensors[query] = rows[order].reshape(72, -1)
        kept = columns[:, order].clone()
        kept[:, [2, 5, 6, 7, 8]] = 0
        tensors[output] = kept.reshape(-1, 72)

    ids = token_ids()
    folder = rewrite(copy("llama"), prune)
    pruned = build_decoder(*load_safetensors(folder, dtype=torch.float32))
    assert [(layer.heads, layer.kv_heads, layer.inner) for layer in pruned.config.layers] == [(9, 3, 96), (4, 2, 40)]
    (folder / "model.safetensors").unlink()
    folder.joinpath("config.json").unlink()
    folder.rename(folder.with_name("pruned"))
    padded = build_decoder(*load_safetensors(rewrite(copy("llama"), pad), dtype=torch.float32))
    expected = decode_in_chunks(padded, ids, [LENGTH])
    torch.testing.assert_close(decode_in_chunks(pruned, ids, [20, 1, 24]), expected, atol=1e-4, rtol=1e-4)


def test_widths_may_be_listed_for_each_layer(copy: Callable[[str], Path]) -> None:
    folder = rewrite(copy("llama"), lambda tensors: None, intermediate_size=[96, 95])
    assert "has model.layers.1.mlp.down_proj.weight in the shape (72, 96); expected is (72, 95)" in refusal(folder)
    rewrite(folder, lambda tensors: None, intermediate_size=[96, 96], num_key_value_heads=[3, 3])
    config, _ = load_safetensors(folder, dtype=torch.float32)
    assert [layer.inner for layer in config.layers] == [96, 96]


def test_a_sharded_half_precision_checkpoint_gives_the_parameters_of_the_whole(
    save_family: SaveFamily, tmp_path: Path
) -> None:
    _, model = save_family("llama")
    halved = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=dict(halved), max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert find_model_file(tmp_path) == tmp_path
    _, parameters = load_safetensors(tmp_path, dtype=torch.bfloat16)
    found = parameters["layers.1.down"].dequantised(torch.bfloat16)
    assert torch.equal(found, halved["model.layers.1.mlp.down_proj.weight"])


# --- what is refused


@pytest.mark.parametrize(
    ("case", "settings", "expected"),
    [
        ("llama", {"model_type": "mamba"}, "has the model_type 'mamba'; supported are llama, mistral, qwen2"),
        ("llama", {"model_type": None}, "has the model_type None"),
        ("llama", {"hidden_act": "relu"}, "has the activation relu; supported are silu"),
        ("llama", {"rope_parameters": {"rope_type": "mrope"}}, "by the method mrope; supported are default, linear"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "has no factor; a positive number is needed"),
        ("llama", {"num_hidden_layers": 3}, "lacks the tensor model.layers.2.input_layernorm.weight and 8 others"),
        ("llama", {"num_hidden_layers": 1}, "has the tensor model.layers.1.input_layernorm.weight and 8 others"),
        ("llama", {"num_hidden_layers": 900}, "fewer than its configuration's layers and experts, 900"),
        ("llama", {"num_hidden_layers": 10**7}, "supported are up to 1024"),
        ("llama", {"hidden_size": "72"}, "has '72' as hidden_size; a positive integer is needed"),
        ("llama", {"attention_bias": True}, "lacks the tensor model.layers.0.self_attn.k_proj.bias and 7 others"),
        ("llama", {"attention_bias": 1}, "has 1 as attention_bias; true or false is needed"),
        ("llama", {"head_dim": 10}, "says that a head has 10 values, and layer 0 has 72 rows"),
        ("llama", {"vocab_size": 161}, "in the shape (160, 72); expected is (161, 72)"),
        ("llama", {"rms_norm_eps": -1}, "has -1 as rms_norm_eps; a positive number is needed"),
        (
            "llama",
            {"quantization_config": {"quant_method": "aqlm"}},
            "is quantised by 'aqlm'; supported are mlx, awq, gptq",
        ),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layers of the type 'chunked_attention'; supported"),
        ("gemma3", {"use_bidirectional_attention": True}, "attends to later tokens"),
        ("mixtral", {"num_experts_per_tok": 6}, "chooses 6 of 5 experts"),
        ("mixtral", {"num_local_experts": 6}, "lacks the tensor model.layers.0.block_sparse_moe.experts.5.w1.weight"),
    ],
)
def test_what_the_engine_cannot_serve_is_named(
    copy: Callable[[str], Path], case: str, settings: dict[str, object], expected: str
) -> None:
    assert expected in refusal(rewrite(copy(case), lambda tensors: None, **settings))


def test_a_tied_models_stored_head_must_be_its_embedding(copy: Callable[[str], Path]) -> None:
    def store(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][3, 3] += 1

    folder = rewrite(copy("llama-tied"), store)
    assert load_safetensors(folder, dtype=torch.float32)[0].tied_head
    assert "ties its head to its embedding, and holds a head that differs" in refusal(rewrite(folder, spoil))


def test_values_that_are_not_finite_are_refused(copy: Callable[[str], Path]) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][5, 5] = torch.nan

    assert "model.layers.1.mlp.up_proj.weight holds values that are not finite" in refusal(
        rewrite(copy("llama"), spoil)
    )


def test_integers_for_weights_are_refused(copy: Callable[[str], Path]) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)

    assert "has model.norm.weight in the type I8; supported are F32, F16, BF16" in refusal(
        rewrite(copy("llama"), spoil)
    )


def test_a_layer_whose_number_is_too_long_to_be_read_is_one_too_many(copy: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.layers.{'1' * 5000}.mlp.up_proj.weight"] = torch.ones(4, 4)

    assert "which this engine has no use for" in refusal(rewrite(copy("llama"), add))


def test_tables_of_old_checkpoints_and_the_parts_that_see_are_left_alone(copy: Callable[[str], Path]) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    def wrap(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.layer.weight"] = torch.ones(4)

    load_safetensors(rewrite(copy("llama"), add), dtype=torch.float32)
    folder = copy("gemma3")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    config, _ = load_safetensors(rewrite(folder, wrap), dtype=torch.float32)
    assert len(config.layers) == 3


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["llama", "qwen3-moe"])
def test_a_damaged_header_is_loaded_or_refused_in_one_sentence_and_takes_no_memory(
    copy: Callable[[str], Path], load_damaged: Callable[[Path, int], dict[str, int]], case: str
) -> None:
    counts = load_damaged(copy(case), 300 if PROVE else 30)
    assert counts["refused"] > counts["loaded"] > 0


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    10**9,
    10**400,
    0.5,
    1e-300,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "yarn",
    [],
    {},
]
VALUES += [[1], ["full_attention"], [None, 3], {"rope_type": "yarn"}, {"rope_type": "longrope", "long_factor": [1]}]


@pytest.mark.prove
@pytest.mark.timeout(3600)
@settings(
    max_examples=2000 if PROVE else 60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_mutated_configuration_is_served_or_refused_in_one_sentence(
    save_family: SaveFamily, tmp_path: Path, data: st.DataObject
) -> None:
    source, _ = save_family(data.draw(st.sampled_from(["llama", "gemma3", "qwen3-moe", "smollm3", "phi4-mini"])))
    weights = tmp_path / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to(source / "model.safetensors")
    configuration = json.loads((source / "config.json").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        part = configuration
        if isinstance(configuration.get("rope_parameters"), dict) and data.draw(st.booleans()):
            part = configuration["rope_parameters"]
        names = [*part, "head_dim", "rope_scaling", "factor", "quantization_config"]
        part[data.draw(st.sampled_from(names))] = data.draw(st.sampled_from(VALUES))
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    try:
        config, parameters = load_safetensors(tmp_path, dtype=torch.float32)
        build_decoder(config, parameters)
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either is right
