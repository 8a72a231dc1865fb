"""What a process takes while it loads a quantised model: the bytes of the file, never those of its values."""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tidegate_engine import cli
from tidegate_engine.allocator import freed_at_once
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.precision import Precision, as_stored
from tidegate_engine.transformer import Decoder, build_decoder

VOCAB, HEADS = 512, 8
MIB = 1 << 20
TRIES = 3
"""A library's page that the system took back comes in again during a load and counts as its; never so each time."""
SPARE_BYTES = 32 * MIB
"""Of a matrix on its way, and of the libraries (6 to 26 MiB were seen, by machine); less than half a file."""


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    inner: int
    layers: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        hidden, inner = self.hidden, self.inner
        attention = dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (hidden, hidden))
        return attention | {"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}


SMALL, LARGE, LARGE_HALVES = Size(256, 512, 1), Size(1024, 4096, 12), Size(1024, 4096, 8)


def random_blocks(rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Blocks of any codes, with scales that are small numbers."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (rows * columns // values, size), dtype=np.uint8)
    place = 208 if kind.name == "Q6_K" else 0
    blocks[:, place : place + 2] = np.frombuffer(np.float16(1e-3).tobytes(), dtype=np.uint8)
    if kind.name == "Q4_K":
        blocks[:, 2:4] = blocks[:, :2]
    return blocks.reshape(rows, -1)


def write_gguf(path: Path, size: Size, kind: gguf.GGMLQuantizationType) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(size.layers)
    writer.add_context_length(256)
    writer.add_embedding_length(size.hidden)
    writer.add_feed_forward_length(size.inner)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.ones((VOCAB, size.hidden), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(size.hidden, dtype=np.float32))
    for layer in range(size.layers):
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size.hidden, dtype=np.float32))
        for name, shape in size.matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random_blocks(*shape, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_packed(folder: Path, size: Size) -> Path:
    source = write_gguf(folder.with_suffix(".gguf"), size, gguf.GGMLQuantizationType.Q4_0)
    assert cli.main(["pack", "--model", str(source), "--output", str(folder), "--precision", "stored"]) == 0
    return folder


Draw = Callable[..., Tensor]
Store = Callable[[Draw, int, int], dict[str, Tensor]]
"""A module's tensors of random codes, by the last part of their names, for so many rows and columns."""
GROUP = 128


def store_plain(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": torch.full((rows, columns), 1e-3, dtype=torch.bfloat16)}


def store_mlx(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    factors = {name: small(rows, columns // GROUP) for name in ("scales", "biases")}
    return {"weight": draw(rows, columns // 8).view(torch.uint32), **factors}


def store_gptq(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "qweight": draw(columns // 8, rows),
        "qzeros": draw(columns // GROUP, rows // 8),
        "scales": small(columns // GROUP, rows),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def store_gptq_by_activation(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    """With columns whose groups do not lie side by side."""
    parts = store_gptq(draw, rows, columns)
    return {**parts, "g_idx": parts["g_idx"].view(GROUP, -1).T.reshape(-1).contiguous()}


def store_awq(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {
        "qweight": draw(columns, rows // 8),
        "qzeros": draw(columns // GROUP, rows // 8),
        "scales": small(columns // GROUP, rows),
    }


def store_packed(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    shape = torch.tensor([rows, columns])
    return {
        "weight_packed": draw(rows, columns // 8),
        "weight_scale": small(rows, columns // GROUP),
        "weight_shape": shape,
    }


def store_int8(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    return {"weight": draw(rows, columns // 4).view(torch.int8), "weight_scale": small(rows, 1)}


def store_fp8(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    codes = (draw(rows, columns // 4).view(torch.uint8) & 0xBF).view(torch.float8_e4m3fn)  # no NaN among them
    return {"weight": codes, "weight_scale": torch.full((rows, 1), 1e-3)}


def store_fp8_blocks(draw: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    blocks = torch.full((-(-rows // GROUP), -(-columns // GROUP)), 1e-3)
    return {"weight": store_fp8(draw, rows, columns)["weight"], "weight_scale_inv": blocks}


def small(*shape: int) -> Tensor:
    return torch.full(shape, 1e-3, dtype=torch.float16)


def compressed(form: str, bits: int, **more: object) -> dict[str, object]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, **more}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": []}


FOLDERS: dict[str, tuple[Store, dict[str, object] | None]] = {
    "bf16": (store_plain, None),
    "mlx": (store_mlx, {"bits": 4, "group_size": GROUP}),
    "gptq": (store_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "gptq by activation": (store_gptq_by_activation, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (store_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP}),
    "packed integers": (store_packed, compressed("pack-quantized", 4)),
    "int8": (store_int8, compressed("int-quantized", 8, input_activations={"num_bits": 8, "dynamic": True})),
    "int8 weights": (store_int8, compressed("int-quantized", 8)),
    "fp8": (store_fp8, {"quant_method": "fp8"}),
    "fp8 in blocks": (store_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
}
"""How a matrix is stored, and what the configuration says of it."""
HF_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def write_folder(folder: Path, size: Size, *, kind: str) -> Path:
    """A file for each layer, as large models have several."""
    folder.mkdir()
    store, quantisation = FOLDERS[kind]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)

    norms = torch.ones(size.hidden, dtype=torch.bfloat16)
    files = {"top": {"model.embed_tokens.weight": norms.repeat(VOCAB, 1), "model.norm.weight": norms}}
    places: dict[str, str] = {}
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        files[f"layer-{layer}"] = {
            prefix + name: norms.clone() for name in ("input_layernorm.weight", "post_attention_layernorm.weight")
        } | {
            f"{prefix}{HF_NAMES[name]}.{part}": tensor
            for name, shape in size.matrices.items()
            for part, tensor in store(draw, *shape).items()
        }
        for name in [f"layer-{layer}", "top"]:
            if name in files:
                save_file(files[name], folder / f"{name}.safetensors")
                places |= dict.fromkeys(files.pop(name), f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {
        "model_type": "llama", "hidden_size": size.hidden, "intermediate_size": size.inner, "vocab_size": VOCAB,
        "num_hidden_layers": size.layers, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
        "max_position_embeddings": 256, "tie_word_embeddings": True, "quantization_config": quantisation,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


WRITERS: dict[str, Callable[[Path, Size], Path]] = {
    "Q4_0": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q4_0),
    "Q4_K": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q4_K),
    "Q6_K": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q6_K),
    "packed": write_packed,
    **{kind: partial(write_folder, kind=kind) for kind in FOLDERS},
}


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def load(path: Path) -> Decoder:
    checkpoint = open_checkpoint(path)
    with freed_at_once():
        return build_decoder(checkpoint.config, checkpoint.load(torch.float32, as_stored(Precision())))


def write_both(kind: str, folder: Path, size: Size) -> None:
    torch.set_num_threads(1)  # a forked process has none of the threads that its parent may have started
    WRITERS[kind](folder / "model", size)
    WRITERS[kind](folder / "small", SMALL)


def load_and_tell(folder: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    load(folder / "small")  # brings in the pages of the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    decoder = load(folder / "model")
    told.send((memory_bytes("VmHWM") - before, memory_bytes("VmRSS") - before, decoder.weight_bytes))


def loaded_apart(folder: Path) -> tuple[int, int, int]:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=load_and_tell, args=(folder, sender))
    child.start()
    assert receiver.poll(300)
    peak, resident, held = receiver.recv()
    child.join()
    return peak, resident, held


def most_bytes(stored: int) -> float:
    """That loading files of so many bytes may take."""
    return 1.1 * stored + SPARE_BYTES


def measure(kind: str, folder: Path, size: Size) -> tuple[int, int, int, int]:
    """Bytes of the files, of memory at most and afterwards, and of the weights by their own account.

    Written by another process, so that what the one that loads has in memory comes from loading.
    """
    fork = multiprocessing.get_context("fork")
    writer = fork.Process(target=write_both, args=(kind, folder, size))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    path = folder / "model"
    stored = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    found = [loaded_apart(folder)]
    while min(found)[0] >= most_bytes(stored) and len(found) < TRIES:
        found.append(loaded_apart(folder))
    peak, resident, held = min(found)
    return stored, peak, resident, held


@pytest.mark.parametrize("kind", WRITERS)
def test_a_quantised_model_is_loaded_in_the_memory_of_its_file(tmp_path: Path, kind: str) -> None:
    size = LARGE_HALVES if kind == "bf16" else LARGE
    stored, peak, resident, held = measure(kind, tmp_path, size)
    sizes = {"files": stored, "held": held, "resident": resident, "peak": peak}
    print(kind, *(f"{name} {size_bytes / MIB:.1f}" for name, size_bytes in sizes.items()), "MiB")
    values = size.layers * sum(rows * columns for rows, columns in size.matrices.values())
    assert stored < (2.1 if kind == "bf16" else 1.1) * values, "far less than in fp32"
    assert held < 1.1 * stored
    assert peak < most_bytes(stored), f"{peak / MIB:.0f} MiB for files of {stored / MIB:.0f} MiB"
