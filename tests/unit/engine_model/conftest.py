"""Models for the tests of the engine's model: tiny random ones of every family, and the small real one.

A tiny file is written from weights with Hugging Face's names (kept beside it as `.pt`), by code that the
engine's reader does not share.
"""

import os

# As `torch_runner` does it, before torch is loaded: two threads that spin for each other make busy machines slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tidegate_kernels import native
from tidegate_local import model

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INNER, LAYERS, CONTEXT = 72, 9, 3, 8, 96, 2, 256
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "i n", "Ġ the"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """Three special tokens, the 256 bytes in GPT-2's alphabet, the merges."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]


def random_weights(seed: int, *, tied: bool, bias: bool) -> dict[str, torch.Tensor]:
    """By Hugging Face's names; large enough for logits that differ."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    vocab = len(vocabulary())
    weights = {"model.embed_tokens.weight": draw(vocab, HIDDEN) * 2, "model.norm.weight": 1 + draw(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = draw(vocab, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{prefix}self_attn.{part}_proj.weight"] = draw(rows * HEAD_SIZE, HIDDEN)
            if bias:
                weights[f"{prefix}self_attn.{part}_proj.bias"] = draw(rows * HEAD_SIZE)
        weights[f"{prefix}self_attn.o_proj.weight"] = draw(HIDDEN, HEADS * HEAD_SIZE)
        weights[f"{prefix}mlp.gate_proj.weight"] = draw(INNER, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = draw(INNER, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = draw(HIDDEN, INNER)
        weights[f"{prefix}input_layernorm.weight"] = 1 + draw(HIDDEN)
        weights[f"{prefix}post_attention_layernorm.weight"] = 1 + draw(HIDDEN)
    return weights


FILE_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_model(
    path: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    metadata: dict[str, Any] | None = None,
    edit: Callable[[dict[str, np.ndarray]], None] | None = None,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """Write a tiny model. `metadata` replaces entries (None leaves one out), `edit` changes the file's tensors, `types`
    quantises some."""
    weights = random_weights(7, tied=tied, bias=architecture == "qwen2")
    torch.save(weights, path.with_suffix(".pt"))
    entries: dict[str, Any] = {
        "general.name": "tiny",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": CONTEXT,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(vocabulary()) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    entries |= metadata or {}
    tensors: dict[str, np.ndarray] = {}
    for name, weight in weights.items():
        values = weight.numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):  # as llama.cpp's converter does
            heads = HEADS if "q_proj" in name else KV_HEADS
            halves = values.reshape(heads, 2, HEAD_SIZE // 2, HIDDEN)
            values = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
        stem, kind = name.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            tensors[f"blk.{layer}.{FILE_NAMES[part]}.{kind}"] = values
        else:
            tensors[f"{FILE_NAMES[stem]}.{kind}"] = values
    if edit:
        edit(tensors)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in entries.items():
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, array in tensors.items():
        if stored := (types or {}).get(name):
            writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def write_tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model with changes: see `write_model`."""

    def write(**changes: Any) -> Path:
        return write_model(tmp_path / "tiny.gguf", **changes)

    return write


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where no C compiler was: torch computes everything."""
    monkeypatch.setattr(native, "_path", lambda _: Path("/nonexistent/native.so"))
    native.library.cache_clear()
    yield
    monkeypatch.undo()
    native.library.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct."""
    return model.path()


# --- the families of models

FAMILY_VOCAB = 160
SMALL: dict[str, Any] = {
    "vocab_size": FAMILY_VOCAB,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 8,
}
GEMMA = {"query_pre_attn_scalar": 12, "sliding_window": 16, "num_hidden_layers": 3}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.25}, "max_position_embeddings": 20},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 11}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "smollm3-window": ("SmolLM3", {"use_sliding_window": True, "sliding_window": 7, "no_rope_layers": [1, 0]}),
    "phi3": ("Phi3", {"sliding_window": 30}),
    "phi4-mini": (
        "Phi3",
        {"rope_parameters": LONGROPE, "tie_word_embeddings": True, "original_max_position_embeddings": 32},
    ),
    "phi4-mini-short": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 300}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe-all": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}


def family_model(case: str) -> Any:
    """transformers' model of a case, with weights large enough for logits that differ."""
    import transformers

    name, changes = FAMILIES[case]
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    # transformers writes into what it is given.
    settings = deepcopy(SMALL | changes)
    if name in ("SmolLM3", "Phi3", "Qwen2"):
        settings = {key: value for key, value in settings.items() if key != "head_dim"}
    config = getattr(transformers, kind)(**settings, attn_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in dict(model.named_parameters()).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") and "gemma" not in case:
                parameter.add_(1.0)
    return model.eval()


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """A case of FAMILIES, one after the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def save_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Saves a case's model once; returns its folder and the model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    saved: dict[str, tuple[Path, Any]] = {}

    def of(case: str) -> tuple[Path, Any]:
        if case not in saved:
            folder, model = tmp_path_factory.mktemp(case), family_model(case)
            model.save_pretrained(folder)
            saved[case] = folder, model
        return saved[case]

    return of
