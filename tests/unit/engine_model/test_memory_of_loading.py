"""What a process takes while it loads a quantised model: the bytes of the file, never those of its values."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tidegate_engine import cli
from tidegate_engine.allocator import freed_at_once
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.precision import Precision, as_stored
from tidegate_engine.transformer import Decoder, build_decoder

VOCAB, HEADS = 512, 8
MIB = 1 << 20
SPARE_BYTES = 32 * MIB
"""Of a matrix on its way, and of the libraries; far less than a file, or its values, a second time."""


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


SMALL, LARGE = Size(256, 512, 1), Size(1024, 4096, 6)


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


WRITERS: dict[str, Callable[[Path, Size], Path]] = {
    "Q4_0": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q4_0),
    "Q4_K": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q4_K),
    "Q6_K": lambda path, size: write_gguf(path, size, gguf.GGMLQuantizationType.Q6_K),
    "packed": write_packed,
}


def memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def load(path: Path) -> Decoder:
    checkpoint = open_checkpoint(path)
    with freed_at_once():
        return build_decoder(checkpoint.config, checkpoint.load(torch.float32, as_stored(Precision())))


def load_and_tell(path: Path, small: Path, told: Connection) -> None:
    torch.set_num_threads(1)
    load(small)  # brings in the pages of the libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_bytes("VmRSS")
    decoder = load(path)
    told.send((memory_bytes("VmHWM") - before, decoder.weight_bytes))


@pytest.mark.parametrize("kind", WRITERS)
def test_a_quantised_model_is_loaded_in_the_memory_of_its_file(tmp_path: Path, kind: str) -> None:
    path, small = WRITERS[kind](tmp_path / "model", LARGE), WRITERS[kind](tmp_path / "small", SMALL)
    files = [path] if path.is_file() else list(path.iterdir())
    stored = sum(file.stat().st_size for file in files)
    values = LARGE.layers * sum(rows * columns for rows, columns in LARGE.matrices.values())
    assert stored < values
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=load_and_tell, args=(path, small, sender))
    child.start()
    assert receiver.poll(120)
    peak, held = receiver.recv()
    child.join()
    print(f"{kind}: file {stored / MIB:.1f}, held {held / MIB:.1f}, peak {peak / MIB:.1f} MiB")
    assert held < 1.1 * stored
    assert peak < 1.1 * stored + SPARE_BYTES, f"{peak / MIB:.0f} MiB for a file of {stored / MIB:.0f} MiB"
