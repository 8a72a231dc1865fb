"""How long a model of 7 billion weights takes until it is ready, and what memory, kept as it is stored.

Makes a GGUF file of random weights in the shape of Mistral 7B (about 4 GB) in a scratch folder, or a folder of
safetensors files, as they are (bf16, 14 GB) or as MLX quantises them (4 bits, 4 GB). Serves it cold and warm, packs it,
serves that, and deletes everything. Prints a table. Not part of `make bench`: it needs 2.5 times as much disk.
"""

import argparse
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tidegate_engine.gguf_file import read_header, read_metadata_bytes
from tidegate_local import model

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 4096, 14_336, 32, 8, 128
SCALES = {"Q4_0": (0,), "Q4_K": (0, 2)}
"""Where a block has its fp16 numbers."""
BITS = {"safetensors": 16.0, "mlx": 4.5}
"""Of a weight in a folder of that format."""
MLX_GROUP = 64
GIB = float(1 << 30)
READY_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Start:
    """A server from its start to its readiness. Bytes are the engine process's."""

    what: str
    file_bytes: int
    ready_seconds: float
    weights_seconds: float
    peak_bytes: int
    anonymous_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("gguf", *BITS), default="gguf")
    parser.add_argument("--type", choices=SCALES, default="Q4_0", help="of all matrices of a GGUF file")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where there is room; default: the system's temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        scratch = Path(place)
        bits = BITS.get(arguments.format, 5)
        needed = 2.5 * arguments.layers * (HIDDEN * INNER * 3) * bits / 8
        if shutil.disk_usage(scratch).free < needed:
            sys.exit(f"{needed / GIB:.0f} GiB of disk are needed in {scratch}; name another folder with --folder")
        source = scratch / ("model.gguf" if arguments.format == "gguf" else "model")
        if arguments.format == "gguf":
            write(source, GGMLQuantizationType[arguments.type], layers=arguments.layers)
        else:
            write_folder(source, arguments.format, layers=arguments.layers)
        name = f"GGUF {arguments.type}" if arguments.format == "gguf" else arguments.format
        files = list(source.iterdir()) if source.is_dir() else [source]
        starts = [serve(f"{name}, {what}", source, files, cold=what == "cold") for what in ("cold", "warm")]
        packed = scratch / "packed"
        began = time.monotonic()
        run_engine("pack", "--model", str(source), "--output", str(packed), "--precision", "stored").wait()
        print(f"packed in {time.monotonic() - began:.0f} s", flush=True)
        for file in files:
            file.unlink()
        for what in ("cold", "warm"):
            starts.append(serve(f"packed, {what}", packed, list(packed.iterdir()), cold=what == "cold"))
    print_table(starts)


def write(path: Path, kind: GGMLQuantizationType, *, layers: int) -> None:
    """A file with the tokenizer of SmolLM2 and random codes; all scales are one number."""
    source = model.path()
    vocabulary = read_header(source).tensors["token_embd.weight"].shape[0]
    shapes = {"token_embd": (vocabulary, HIDDEN), "output": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes().items()}
    infos, start = b"", 0
    for stem, shape in shapes.items():
        name, number = f"{stem}.weight".encode(), kind if len(shape) == 2 else GGMLQuantizationType.F32
        infos += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos += struct.pack("<IQ", number, start)
        start += size_of(shape, number)
    entries = {
        "block_count": layers, "embedding_length": HIDDEN, "feed_forward_length": INNER, "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_SIZE,
    }  # fmt: skip
    metadata = read_metadata_bytes(source)
    count = struct.unpack_from("<Q", metadata, 16)[0] + len(entries)
    header = metadata[:8] + struct.pack("<QQ", len(shapes), count) + metadata[24:]
    for key, value in entries.items():
        name = f"llama.{key}".encode()
        header += struct.pack("<Q", len(name)) + name + struct.pack("<II", 4, value)
    header += infos
    with path.open("wb") as file:
        file.write(header + bytes(-len(header) % 32))
        for shape in shapes.values():
            for block in random_tensor(shape, kind):
                file.write(block)
        file.flush()
        os.fsync(file.fileno())


def write_folder(folder: Path, form: str, *, layers: int) -> None:
    """A file for each layer and one for the rest, with random codes, and a tokenizer of single bytes."""
    folder.mkdir()
    vocabulary = 32_768
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }  # fmt: skip
    matrices: dict[str, dict[str, tuple[int, ...]]] = {
        "top": {"model.embed_tokens": (vocabulary, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (vocabulary, HIDDEN)}
    }
    for layer in range(layers):
        shapes = {f"model.layers.{layer}.{names[name]}": shape for name, shape in layer_shapes().items()}
        matrices[f"layer-{layer}"] = shapes
    places: dict[str, str] = {}
    for file, modules in matrices.items():
        tensors = {
            f"{module}.{part}": tensor
            for module, shape in modules.items()
            for part, tensor in stored_parts(shape, form).items()
        }
        write_safetensors(folder / f"{file}.safetensors", tensors)
        places |= dict.fromkeys(tensors, f"{file}.safetensors")
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "eos_token_id": 0,
    }  # fmt: skip
    if form == "mlx":
        config["quantization"] = {"bits": 4, "group_size": MLX_GROUP}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, described in (("config.json", config), ("model.safetensors.index.json", {"weight_map": places})):
        (folder / name).write_text(json.dumps(described))


Stored = tuple[str, tuple[int, ...]]
"""Type and shape of a tensor."""


def stored_parts(shape: tuple[int, ...], form: str) -> dict[str, Stored]:
    if form == "safetensors" or len(shape) == 1:
        return {"weight": ("BF16", shape)}
    rows, columns = shape
    groups = (rows, columns // MLX_GROUP)
    return {"weight": ("U32", (rows, columns // 8)), "scales": ("F16", groups), "biases": ("F16", groups)}


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> None:
    """Codes of any bits, and numbers that are small."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * (4 if dtype == "U32" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    chance = np.random.default_rng(end)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for dtype, shape in tensors.values():
            left = prod(shape) * (2 if dtype == "U32" else 1)
            while left:
                halves = np.frombuffer(chance.bytes(2 * min(left, 1 << 22)), dtype=np.uint16)
                # Of BF16 sign and mantissa are random, and of F16 nothing is.
                file.write(
                    {"U32": halves, "BF16": halves & 0x807F | 0x3A80, "F16": halves & 0 | 0x1800}[dtype].tobytes()
                )
                left -= len(halves)
        file.flush()
        os.fsync(file.fileno())


def layer_shapes() -> dict[str, tuple[int, ...]]:
    query, kv = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    return {
        "attn_norm": (HIDDEN,), "attn_q": (query, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, query), "ffn_norm": (HIDDEN,), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }  # fmt: skip


def size_of(shape: Sequence[int], kind: GGMLQuantizationType) -> int:
    values, size = GGML_QUANT_SIZES[kind]
    return prod(shape) // int(values) * int(size)


def random_tensor(shape: Sequence[int], kind: GGMLQuantizationType) -> Iterator[bytes]:
    if len(shape) == 1:
        yield np.ones(shape, dtype=np.float32).tobytes()
        return
    chance = np.random.default_rng(shape[0])
    _, size = GGML_QUANT_SIZES[kind]
    left = size_of(shape, kind) // size
    while left:
        count = min(left, 1 << 20)
        blocks = np.frombuffer(chance.bytes(count * size), dtype=np.uint8).reshape(count, size).copy()
        for place in SCALES[kind.name]:
            blocks[:, place : place + 2] = np.frombuffer(np.float16(2e-3).tobytes(), dtype=np.uint8)
        yield blocks.tobytes()
        left -= count


def serve(what: str, path: Path, files: Sequence[Path], *, cold: bool) -> Start:
    """Start a server, wait until it is ready, and end it."""
    for file in files if cold else ():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    api, admin = free_port(), free_port()
    began = time.monotonic()
    command = ["serve", "--model", str(path), "--precision", "stored", "--max-model-len", "256"]
    command += ["--num-gpu-blocks-override", "33", "--port", str(api), "--admin-port", str(admin)]
    process = run_engine(*command)
    try:
        while answer(f"http://127.0.0.1:{admin}/readyz") is None:
            if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                sys.exit(f"{what}: the server has not become ready")
            time.sleep(0.05)
        ready = time.monotonic() - began
        metrics = answer(f"http://127.0.0.1:{admin}/metrics") or ""
        line = next(line for line in metrics.splitlines() if 'start_seconds{phase="weights"' in line)
        engine = max(children(process.pid), key=lambda pid: memory_bytes(pid, "VmHWM"))
        found = Start(
            what=what,
            file_bytes=sum(file.stat().st_size for file in files),
            ready_seconds=ready,
            weights_seconds=float(line.split()[-1]),
            peak_bytes=memory_bytes(engine, "VmHWM"),
            anonymous_bytes=memory_bytes(engine, "RssAnon"),
        )
        print(found, flush=True)
        return found
    finally:
        process.terminate()
        process.wait()


def run_engine(*arguments: str) -> subprocess.Popen[bytes]:
    code = "import sys; from tidegate_engine.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


def children(pid: int) -> list[int]:
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(each for child in found for each in children(child))]


def memory_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answer(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return str(response.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def print_table(starts: Sequence[Start]) -> None:
    names = ("what", "file, GiB", "ready, s", "of it weights, s", "peak resident, GiB", "of the file", "own pages, GiB")
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for start in starts:
        sizes = (start.file_bytes / GIB, start.peak_bytes / GIB, start.anonymous_bytes / GIB)
        print(
            f"| {start.what} | {sizes[0]:.2f} | {start.ready_seconds:.1f} | {start.weights_seconds:.1f} | "
            f"{sizes[1]:.2f} | {sizes[1] / sizes[0]:.2f} | {sizes[2]:.2f} |"
        )


if __name__ == "__main__":
    main()
