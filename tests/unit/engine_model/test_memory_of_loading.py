"""What a process takes while it loads a quantised model: the bytes of the file, never those of its values."""

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tidegate_engine import cli
from tidegate_engine.allocator import freed_at_once
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.precision import Precision, as_stored
from tidegate_engine.transformer import build_decoder

HIDDEN, INNER, LAYERS, VOCAB, HEADS = 1024, 4096, 6, 512, 8
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, HIDDEN), "attn_v": (HIDDEN, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
}  # fmt: skip
VALUES = LAYERS * sum(rows * columns for rows, columns in MATRICES.values())
MIB = 1 << 20
SPARE_BYTES = 16 * MIB


def random_blocks(rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of any codes, with scales that are small numbers."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    place = 208 if kind.name == "Q6_K" else 0
    blocks[:, place : place + 2] = np.frombuffer(np.float16(1e-3).tobytes(), dtype=np.uint8)
    if kind.name == "Q4_K":
        blocks[:, 2:4] = blocks[:, :2]
    return blocks.reshape(rows, -1)


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, HIDDEN), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
        for name, shape in MATRICES.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random_blocks(*shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FOLDER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write_mlx(folder: Path) -> Path:
    folder.mkdir()
    norm = torch.ones(HIDDEN)
    tensors = {"model.embed_tokens.weight": torch.ones(VOCAB, HIDDEN), "model.norm.weight": norm}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{name}.weight"] = norm
        for name, (rows, columns) in MATRICES.items():
            module = f"{stem}.{FOLDER_NAMES[name]}"
            tensors[f"{module}.weight"] = torch.randint(0, 1 << 31, (rows, columns // 8)).to(torch.uint32)
            for part in ("scales", "biases"):
                tensors[f"{module}.{part}"] = torch.full((rows, columns // 64), 1e-3, dtype=torch.float16)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "quantization": {"bits": 4, "group_size": 64},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_packed(folder: Path) -> Path:
    source = write_gguf(folder.with_suffix(".gguf"), gguf.GGMLQuantizationType.Q4_0)
    assert cli.main(["pack", "--model", str(source), "--output", str(folder), "--precision", "stored"]) == 0
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "Q4_0": lambda path: write_gguf(path, gguf.GGMLQuantizationType.Q4_0),
    "Q4_K": lambda path: write_gguf(path, gguf.GGMLQuantizationType.Q4_K),
    "Q6_K": lambda path: write_gguf(path, gguf.GGMLQuantizationType.Q6_K),
    "mlx": write_mlx,
    "packed": write_packed,
}


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def load_and_tell(path: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    checkpoint = open_checkpoint(path)
    with freed_at_once():
        decoder = build_decoder(checkpoint.config, checkpoint.load(torch.float32, as_stored(Precision())))
    told.send((memory_bytes("VmHWM") - before, decoder.weight_bytes))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_quantised_model_is_loaded_in_the_memory_of_its_file(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path / "model")
    files = [path] if path.is_file() else list(path.iterdir())
    stored = sum(file.stat().st_size for file in files)
    assert stored < VALUES * 4 / 4
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=load_and_tell, args=(path, sender))
    child.start()
    assert receiver.poll(120)
    peak, held = receiver.recv()
    child.join()
    assert held < 1.1 * stored
    assert peak < 1.1 * stored + SPARE_BYTES, f"{peak / MIB:.0f} MiB for a file of {stored / MIB:.0f} MiB"
