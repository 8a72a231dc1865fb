"""Whole folders of quantised safetensors: every module taken exactly once, kept as it is stored, and computed with.

Codes are of eight bits, so that a format's packing is a row of bytes; other packings are the formats' own tests'.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidegate_engine.precision import Precision, parse_precision
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError
from tidegate_engine.weights_safetensors import describe_folder, load_safetensors, quantisation_of
from tidegate_kernels.reference import ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
HIDDEN, INNER, VOCAB, LAYERS = 64, 96, 80, 2
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
Store = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
"""Tensors of a module from its values, and the values that they stand for."""


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """int64 codes of −127 to 127 and fp16 scales of each row."""
    scales = (values.abs().amax(1, keepdim=True) / 127).half()
    return (values / scales.float()).round().long().clamp(-127, 127), scales


def store_mlx(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = rounded(values)
    biases = (scales.float() * -128).half()
    scales, biases = (each.expand(-1, values.shape[1] // 32).contiguous() for each in (scales, biases))
    words = (codes + 128).byte().view(torch.uint32)
    expected = (codes + 128) * scales[:, :1].float() + biases[:, :1].float()
    return {"weight": words, "scales": scales, "biases": biases}, expected


def store_gptq(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = rounded(values)
    zeros = torch.full((1, values.shape[0]), 127, dtype=torch.uint8).view(torch.int32)
    words = (codes + 128).byte().view(torch.int32).T.contiguous()
    index = torch.zeros(values.shape[1], dtype=torch.int32)
    parts = {"qweight": words, "qzeros": zeros, "scales": scales.T.contiguous(), "g_idx": index}
    return parts, codes * scales.float()


def store_awq(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Four bits, eight columns of the output in a word, in AWQ's order."""
    scales = (values.abs().amax(1, keepdim=True) / 7).half()
    codes = (values / scales.float()).round().long().clamp(-8, 7)
    columns = (codes + 8).T.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]]  # type: ignore[no-untyped-call]
    words = sum((columns[..., place] << (4 * place) for place in range(8)), torch.zeros_like(columns[..., 0]))
    zeros = torch.full((1, values.shape[0] // 8), 0x88888888, dtype=torch.int64)
    parts = {"qweight": to_int32(words).contiguous(), "qzeros": to_int32(zeros), "scales": scales.T.contiguous()}
    return parts, codes * scales.float()


def to_int32(words: Tensor) -> Tensor:
    """Words of 32 bits, from whole numbers without a sign."""
    return words.to(torch.uint32).view(torch.int32)


def store_int8(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = rounded(values)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def store_packed(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales = rounded(values)
    words = (codes + 128).byte().view(torch.int32)
    parts = {"weight_packed": words, "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}
    return parts, codes * scales.float()


def store_fp8(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scale = values.abs().amax() / 448
    codes = (values / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}, codes.float() * scale


def store_fp8_blocks(values: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    parts, expected = store_fp8(values)
    return {"weight": parts["weight"], "weight_scale_inv": parts["weight_scale"].reshape(1, 1)}, expected


def compressed(form: str, kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


METHODS: dict[str, tuple[dict[str, Any], Store, str]] = {
    "mlx": ({"group_size": 32, "bits": 8}, store_mlx, "int8-g32"),
    "gptq": ({"quant_method": "gptq", "bits": 8, "group_size": -1}, store_gptq, "int8-g64"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": HIDDEN, "version": "gemm"}, store_awq, "int4-g64"),
    "int8": (compressed("int-quantized", "int"), store_int8, "int8"),
    "packed": (compressed("pack-quantized", "int"), store_packed, "int8-g64"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, store_fp8, "fp8"),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, store_fp8_blocks, "fp8"),  # of one block
}


def write_folder(folder: Path, method: str, *, tied: bool = False, model_type: str = "llama") -> dict[str, Tensor]:
    """A folder whose layers' matrices are quantised, with MLX the embedding too; returns all values by their names.

    Qwen 2's attention has biases; all other matrices then have one of zeros, as older programs write them.
    """
    described, store, _ = METHODS[method]
    generator = torch.Generator().manual_seed(3)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}

    def plain(name: str, *shape: int, offset: float = 0.0) -> None:
        values[name] = torch.randn(shape, generator=generator).mul(0.25).add(offset).half().float()
        stored[f"{name}.weight"] = values[name].half()

    def quantised(name: str, *shape: int) -> None:
        parts, values[name] = store(torch.randn(shape, generator=generator) * 0.25)
        for part, tensor in parts.items():
            stored[f"{name}.{part}"] = tensor

    (quantised if method == "mlx" else plain)("model.embed_tokens", VOCAB, HIDDEN)
    plain("model.norm", HIDDEN, offset=1)
    if not tied:
        plain("lm_head", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        for name in ("input_layernorm", "post_attention_layernorm"):
            plain(f"model.layers.{layer}.{name}", HIDDEN, offset=1)
        for name, shape in MATRICES.items():
            quantised(f"model.layers.{layer}.{name}", *shape)
            if model_type == "qwen2":
                bias = f"model.layers.{layer}.{name}.bias"
                values[bias] = torch.randn(shape[0], generator=generator).half().float()
                values[bias] *= name[-6] in "qkv"
                stored[bias] = values[bias].half()
    save_file(stored, folder / "model.safetensors")
    key = "quantization" if method == "mlx" else "quantization_config"
    config = CONFIG | {key: described, "tie_word_embeddings": tied, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    return values


OURS = {
    "embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "layers.0.q": "model.layers.0.self_attn.q_proj", "layers.1.v": "model.layers.1.self_attn.v_proj",
    "layers.1.attention_output": "model.layers.1.self_attn.o_proj", "layers.0.up": "model.layers.0.mlp.up_proj",
    "layers.1.down": "model.layers.1.mlp.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("text", ["stored", "float32"])
def test_a_folder_is_loaded_with_the_values_that_its_format_defines(tmp_path: Path, method: str, text: str) -> None:
    values = write_folder(tmp_path, method)
    _, parameters = load_safetensors(tmp_path, dtype=torch.float32, precision=parse_precision(text))
    for ours, theirs in OURS.items():
        torch.testing.assert_close(parameters[ours].dequantised(), values[theirs], atol=0, rtol=0)
    assert parameters["layers.0.q"].precision == (METHODS[method][2] if text == "stored" else "float32")
    assert parameters["norm"].precision == "float32"
    described = METHODS[method][0]
    assert quantisation_of(tmp_path) == described.get("quant_method", "mlx")


def logits(folder: Path, precision: Precision) -> Tensor:
    config, parameters = load_safetensors(folder, dtype=torch.float32, precision=precision)
    decoder = build_decoder(config, parameters)
    caches = layer_caches(config, new_kv_pool(config, blocks=2, block_tokens=16, dtype=torch.float32))
    ids = torch.arange(12)
    batch = ragged_batch([12], [12], [[1]], cache=caches[0])
    with torch.inference_mode():
        return forward(decoder, ids, batch, caches=caches, logits_rows=ids)


@pytest.mark.parametrize("method", METHODS)
def test_logits_of_a_folder_as_stored_are_those_of_its_values_apart_from_rounded_activations(
    tmp_path: Path, method: str
) -> None:
    write_folder(tmp_path, method, tied=method == "mlx")
    exact, stored = (logits(tmp_path, parse_precision(text)) for text in ("float32", "stored"))
    allowed = {"int8": 0.12, "fp8": 0.3, "fp8-blocks": 0.3}.get(method, 1e-4)
    assert exact.std() > 0.1
    assert (stored - exact).norm() / exact.norm() < allowed


@pytest.mark.parametrize("method", METHODS)
def test_the_bytes_told_before_loading_are_those_that_are_held(tmp_path: Path, method: str) -> None:
    write_folder(tmp_path, method)
    _, told = describe_folder(tmp_path)
    _, parameters = load_safetensors(tmp_path, dtype=torch.float32, precision=parse_precision("stored"))
    held = parameters["layers.0.gate"].size_bytes
    assert 0.9 < told["layers.0.gate"] / held < 1.2


@pytest.mark.parametrize("method", ["gptq", "awq", "int8"])
def test_biases_beside_quantised_matrices_are_loaded_and_those_of_zeros_left_out(tmp_path: Path, method: str) -> None:
    values = write_folder(tmp_path, method, model_type="qwen2")
    config, parameters = load_safetensors(tmp_path, dtype=torch.float32, precision=parse_precision("stored"))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)
    for ours in ("q", "k", "v"):
        expected = values[f"model.layers.1.self_attn.{ours}_proj.bias"]
        assert expected.any()
        torch.testing.assert_close(parameters[f"layers.1.{ours}_bias"].dequantised(), expected, atol=0, rtol=0)
    from transformers import Qwen2Config, Qwen2ForCausalLM

    oracle = Qwen2ForCausalLM(Qwen2Config(**{**CONFIG, "tie_word_embeddings": False}))
    state = {name if name.endswith(".bias") else f"{name}.weight": value for name, value in values.items()}
    oracle.load_state_dict({name: value for name, value in state.items() if name in oracle.state_dict()})
    with torch.inference_mode():
        expected = oracle.eval()(torch.arange(12)[None]).logits[0]
    torch.testing.assert_close(logits(tmp_path, parse_precision("float32")), expected, atol=1e-4, rtol=1e-4)


def test_a_bias_that_is_not_zero_and_not_in_the_configuration_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq", model_type="qwen2")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"has the tensor model\.layers\.1\.mlp\.down_proj\.bias, and its configuration"
    ):
        load_safetensors(tmp_path, dtype=torch.float32)


# --- MLX's experts, one tensor for all of a layer

GROUP = 8


def mlx_parts(values: Tensor, bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix, or several below each other, as MLX has them; and the values that they stand for."""
    groups = values.unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    low = groups.amin(-1).half()
    scales = ((groups.amax(-1) - low) / ((1 << bits) - 1)).clamp(min=1e-4).half()
    codes = ((groups - low[..., None]) / scales[..., None]).round().clamp(0, (1 << bits) - 1)
    per_word = 32 // bits
    runs = codes.flatten(-2).long().unflatten(-1, (-1, per_word))
    words = sum((runs[..., place] << (bits * place) for place in range(per_word)), torch.zeros_like(runs[..., 0]))
    parts = {"weight": words.to(torch.uint32), "scales": scales, "biases": low}
    return parts, (codes * scales[..., None].float() + low[..., None].float()).flatten(-2)


EXPERTS = {"mixtral": "block_sparse_moe", "qwen3-moe": "mlp", "qwen3-moe-all": "mlp"}
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def write_mlx_mixture(folder: Path, case: str, source: Path, *, bits: int | None) -> dict[str, Tensor]:
    """A mixture's folder as MLX converts it, routers in eight bits; returns the values that each tensor stands for."""
    tensors = load_file(source / "model.safetensors")
    stacks: dict[str, dict[int, Tensor]] = {}
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        if found:
            number, part, _ = after.split(".")
            stacks.setdefault(f"{before}.switch_mlp.{PROJECTIONS.get(part, part)}", {})[int(number)] = tensor
        elif bits and tensor.dim() == 2:
            module = name.removesuffix(".weight")
            parts, values[name] = mlx_parts(tensor, 8 if module.endswith("gate") else bits)
            stored |= {f"{module}.{part}": each for part, each in parts.items()}
        else:
            stored[name] = values[name] = tensor
    for module, experts in stacks.items():
        stack = torch.stack([experts[number] for number in range(len(experts))])
        parts, rounded_values = mlx_parts(stack, bits) if bits else ({"weight": stack}, stack)
        stored |= {f"{module}.{part}": each for part, each in parts.items()}
        stem, _, projection = module.partition(".switch_mlp.")
        names = {theirs: ours for ours, theirs in PROJECTIONS.items()} if case == "mixtral" else {}
        for index, each in enumerate(rounded_values):
            values[f"{stem}.experts.{index}.{names.get(projection, projection)}.weight"] = each
    save_file(stored, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    if bits:
        routers = {
            f"model.layers.{layer}.{EXPERTS[case]}.gate": {"bits": 8, "group_size": GROUP} for layer in range(LAYERS)
        }
        config["quantization"] = {"bits": bits, "group_size": GROUP, **routers}
    (folder / "config.json").write_text(json.dumps(config))
    return values


@pytest.mark.parametrize("case", EXPERTS)
@pytest.mark.parametrize("bits", [4, 8, None])
def test_mlx_experts_in_one_tensor_have_the_logits_of_transformers_with_the_values_that_they_stand_for(
    save_family: Callable[[str], tuple[Path, Any]], tmp_path: Path, case: str, bits: int | None
) -> None:
    from transformers import AutoModelForCausalLM

    source, _ = save_family(case)
    values = write_mlx_mixture(tmp_path, case, source, bits=bits)
    oracle_folder = tmp_path / "oracle"
    oracle_folder.mkdir()
    (oracle_folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(
        {name: value.contiguous() for name, value in values.items()}, oracle_folder / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    oracle = AutoModelForCausalLM.from_pretrained(oracle_folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = oracle(torch.arange(12)[None]).logits[0]
    found = logits(tmp_path, parse_precision("stored"))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    _, told = describe_folder(tmp_path)
    _, parameters = load_safetensors(tmp_path, dtype=torch.float32, precision=parse_precision("stored"))
    name = "layers.1.experts.2.up"
    assert told[name] == parameters[name].size_bytes
    part = "w3" if case == "mixtral" else "up_proj"
    expected_values = values[f"model.layers.1.{EXPERTS[case]}.experts.2.{part}.weight"]
    torch.testing.assert_close(parameters[name].dequantised(), expected_values, atol=0, rtol=0)


def test_stacked_experts_of_another_number_or_width_are_refused(
    save_family: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    write_mlx_mixture(tmp_path, "mixtral", save_family("mixtral")[0], bits=None)
    config = json.loads((tmp_path / "config.json").read_text())
    for count, sentence in (
        (4, r"block_sparse_moe\.gate\.weight in the shape \(5, 72\); expected is \(4, 72\)"),
        (1 << 20, "has 1048576 experts in 2 layers; supported are 65536 together"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": count}))
        with pytest.raises(ModelError, match=sentence):
            load_safetensors(tmp_path, dtype=torch.float32)


def test_a_missing_part_of_a_module_and_one_too_many_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: each for name, each in tensors.items() if name != "model.layers.1.mlp.up_proj.scales"},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.scales"):
        load_safetensors(tmp_path, dtype=torch.float32)
    save_file({**tensors, "model.layers.1.mlp.up_proj.perm": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"has the tensor model\.layers\.1\.mlp\.up_proj\.perm, which this engine has no"
    ):
        load_safetensors(tmp_path, dtype=torch.float32)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", METHODS)
def test_a_damaged_header_is_loaded_or_refused_in_one_sentence_and_takes_no_memory(
    tmp_path: Path, load_damaged: Callable[[Path, int], dict[str, int]], method: str
) -> None:
    folder = tmp_path / method
    folder.mkdir()
    write_folder(folder, method)
    counts = load_damaged(folder, 100 if PROVE else 10)
    assert counts["refused"] > 0


def test_a_quantised_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "int8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="in the shape"):
        load_safetensors(tmp_path, dtype=torch.float32)
