"""Whole folders of quantised safetensors: every module taken exactly once, kept as it is stored, and computed with.

Codes are of eight bits, so that a format's packing is a row of bytes; other packings are the formats' own tests'.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tidegate_engine.precision import Precision, parse_precision
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError
from tidegate_engine.weights_safetensors import describe_folder, load_safetensors, quantisation_of
from tidegate_kernels.reference import ragged_batch

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
    "int8": (compressed("int-quantized", "int"), store_int8, "int8"),
    "packed": (compressed("pack-quantized", "int"), store_packed, "int8-g64"),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, store_fp8, "fp8"),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, store_fp8_blocks, "fp8"),  # of one block
}


def write_folder(folder: Path, method: str, *, tied: bool = False) -> dict[str, Tensor]:
    """A folder whose layers' matrices are quantised, with MLX the embedding too; returns all values by their names."""
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
    save_file(stored, folder / "model.safetensors")
    key = "quantization" if method == "mlx" else "quantization_config"
    config = CONFIG | {key: described, "tie_word_embeddings": tied}
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


def test_a_missing_part_of_a_module_and_one_too_many_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file

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


def test_a_quantised_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, "int8")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))
    with pytest.raises(ModelError, match="in the shape"):
        load_safetensors(tmp_path, dtype=torch.float32)
