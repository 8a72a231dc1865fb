"""GGUF files of every architecture against transformers' logits.

The files are written with the names, the keys and the changes of weights that llama.cpp's converter has: names by
`gguf`'s own table from Hugging Face's, which the engine's reader does not use.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tidegate_engine.architecture import Rope
from tidegate_engine.rope import rope_frequencies
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError
from tidegate_engine.weights_gguf import load_gguf
from tidegate_kernels.reference import ragged_batch

LENGTH = 45
ARCHITECTURES = {
    "llama": "llama",
    "llama-biases": "llama",
    "llama-llama3": "llama",
    "llama-linear": "llama",
    "llama-yarn": "llama",
    "mistral-window": "llama",
    "mixtral": "llama",
    "mixtral-old": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3-moe": "qwen3moe",
    "smollm3": "smollm3",
    "phi3": "phi3",
    "phi4-mini": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}


def converted(case: str, model: Any) -> dict[str, np.ndarray]:
    """The file's tensors by its names."""
    config, kind = model.config, ARCHITECTURES[case]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if kind in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        if name.endswith("mlp.experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            half = values.shape[1] // 2
            tensors[names.get_name(stem + "gate_proj") + ".weight"] = np.ascontiguousarray(values[:, :half])
            tensors[names.get_name(stem + "up_proj") + ".weight"] = np.ascontiguousarray(values[:, half:])
            continue
        suffix = ".bias" if name.endswith(".bias") else ".weight"
        found = names.get_name(name.removesuffix(suffix))
        assert found, name
        tensors[found + suffix] = values
    if case == "mixtral-old":
        for name in [name for name in tensors if "_exps." in name]:
            for number, values in enumerate(tensors.pop(name)):
                tensors[name.replace("_exps.", f".{number}.")] = values
    return tensors


def write(path: Path, case: str, model: Any) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[case])
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_size * rope.get("partial_rotary_factor", 1.0)))
    tensors = converted(case, model)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        factor = config.max_position_embeddings / rope["original_max_position_embeddings"]
        trained = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(factor) / np.log(trained))))
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], dtype=np.float32)
    if rope["rope_type"] == "llama3":
        plain = rope_frequencies(Rope(rope["rope_theta"]), size=head_size, context_tokens=0)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    if window := getattr(config, "sliding_window", None):
        writer.add_sliding_window(window)
    if case == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if case.startswith("gemma"):
        writer.add_float32(f"{ARCHITECTURES[case]}.attention.scale", config.query_pre_attn_scalar**-0.5)
    if case == "gemma3":
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, True, False])
    if "moe" in case or case.startswith("mixtral"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if case == "qwen3-moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_tiny_file_of_each_architecture_has_the_logits_of_transformers(
    save_family: Callable[[str], tuple[Path, Any]], tmp_path: Path, case: str
) -> None:
    _, oracle = save_family({"qwen3-moe": "qwen3-moe-all", "mixtral-old": "mixtral"}.get(case, case))
    ids = torch.randint(3, 160, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    config, parameters = load_gguf(write(tmp_path / "tiny.gguf", case, oracle), dtype=torch.float32)
    decoder = build_decoder(config, parameters)
    caches = layer_caches(config, new_kv_pool(config, blocks=4, block_tokens=16, dtype=torch.float32))
    batch = ragged_batch([LENGTH], [LENGTH], [[2, 1, 3]], cache=caches[0])
    with torch.inference_mode():
        found = forward(decoder, torch.tensor(ids), batch, caches=caches, logits_rows=torch.arange(LENGTH))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("mixtral-old", {"expert_count": 6}, "lacks the tensor blk.0.ffn_down.5.weight and 5 others"),
        ("mixtral-old", {"expert_count": 4}, "has the tensor blk.0.ffn_down.4.weight and 5 others"),
        ("mixtral", {"expert_count": 6}, "has no tensor blk.0.ffn_gate_exps.weight of 6 experts"),
        ("mixtral", {"expert_count": 2_000_000_000}, "has 2000000000 experts in 2 layers; supported are 65536"),
        ("mixtral-old", {"expert_used_count": 6}, "chooses 6 of 5 experts"),
    ],
)
def test_experts_that_do_not_fit_their_tensors_are_refused(
    save_family: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    changes: dict[str, int],
    expected: str,
) -> None:
    for name, value in changes.items():
        set_to = getattr(gguf.GGUFWriter, f"add_{name}")
        monkeypatch.setattr(gguf.GGUFWriter, f"add_{name}", lambda self, _, set_to=set_to, to=value: set_to(self, to))
    path = write(tmp_path / "tiny.gguf", case, save_family("mixtral")[1])
    with pytest.raises(ModelError) as caught:
        load_gguf(path, dtype=torch.float32)
    assert expected in str(caught.value)
