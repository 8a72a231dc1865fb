"""Models for the tests of the engine's model: tiny random ones as GGUF files, and the small real one.

A tiny file is written from weights with Hugging Face's names (kept beside it as `.pt`), by code that the
engine's reader does not share.
"""

import os

# As `torch_runner` does it, before torch is loaded: two threads that spin for each other make busy machines slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

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


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """SmolLM2-135M-Instruct."""
    return model.path()
