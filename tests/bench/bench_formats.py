"""What each format of files and each precision of weights and KV cache costs in quality and memory, on SmolLM2-135M.

Each in a process of its own: bytes by kind, peak resident memory over that with a tiny model, and over a page
of English the KL divergence from fp32 and how often the most likely token is the same. Prints JSON lines and tables.
Files of each format are made here by rounding to nearest, without calibration.
"""

import argparse
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType, GGUFReader, quants
from safetensors.torch import save_file
from torch import Tensor

from tidegate_engine.allocator import freed_at_once
from tidegate_engine.architecture import DecoderConfig, LayerConfig, Rope, parameter_shapes
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.gguf_file import read_metadata_bytes
from tidegate_engine.precision import Precision, as_stored, parse_precision
from tidegate_engine.quantize import to_precision
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import DTYPES
from tidegate_engine.transformer import Decoder, build_decoder, forward, kv_token_bytes, layer_caches, new_kv_pool
from tidegate_engine.weights_safetensors import NAMES
from tidegate_kernels.reference import ragged_batch
from tidegate_kernels.weight import Dense, Weight
from tidegate_local import model

KV_TOKENS = 4096
"""Tokens that the cache whose memory is measured has room for."""
BLOCK = 16
ALL = "{{attn: {0}, mlp: {0}, lm_head: {0}}}"
WEIGHTS = {
    "fp32": "float32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": ALL.format("fp8"),
    "fp8-block128": ALL.format("fp8-block128"),
    "int8": ALL.format("int8"),
    "int8-g64": ALL.format("int8-g64"),
    "int4-g64": ALL.format("int4-g64"),
    "int4-g32": ALL.format("int4-g32"),
    "int4-g64, head int8": "{attn: int4, mlp: int4, lm_head: int8}",
    "as stored (Q4_1, Q8_0)": "stored",
}
BYTES_A_WEIGHT = {
    "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp8-block128": 1, "int8": 1, "int8-g64": 1 + 4 / 64,
    "int4-g64": 0.5 + 4 / 64, "int4-g32": 0.5 + 4 / 32,
}  # fmt: skip
"""By arithmetic, scales of groups among them; those of rows and blocks are less than a hundredth."""
KV = ("float32", "bfloat16", "float16", "fp8", "int8")
TEXT = """The tide rises and falls twice a day because the moon pulls at the oceans. On the side of the Earth that faces
the moon the water is drawn towards it, and on the far side it is left behind, so that two bulges travel around the
planet as it turns. Harbours used to be built with gates that opened with the rising water and closed before it fell
again, so that ships could float at any hour. The keeper of such a gate had to know the hour of high water, the depth
of the channel and the draught of every ship that waited. If he opened too early, the basin would lose more water than
it gained; if he opened too late, the ships would queue outside in the wind. Good keepers wrote down what they saw,
compared it with the almanac, and learned how far a storm could move the hour. In time their notes became tables, and
the tables became machines of brass wheels that drew the curve of the tide for a whole year in an afternoon."""


@dataclass(frozen=True, slots=True)
class Case:
    """What one process measures: a precision, or a file kept as it is stored."""

    weights: str
    kv: str
    path: Path

    @property
    def policy(self) -> str:
        return WEIGHTS.get(self.weights, "stored")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or folder; default: SmolLM2-135M")
    parser.add_argument("--only", nargs="*", help="names of precisions")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.model or model.path()
    if arguments.case:
        weights, kv, file, exact = arguments.case
        print(json.dumps(measure(path, Case(weights, kv, Path(file)), Path(exact))))
        return
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.pt"
        cases = [Case(name, "float32", path) for name in WEIGHTS] + [Case("fp32", name, path) for name in KV[1:]]
        wanted = [case for case in cases if not arguments.only or {case.weights, case.kv} & set(arguments.only)]
        results = [run_apart(path, case, exact) for case in dict.fromkeys((cases[0], *wanted))]
        formats = []
        for name in FORMATS:
            if not arguments.only or name in arguments.only:
                file = write_format(name, path, Path(folder) / "model")
                formats.append(run_apart(path, Case(name, "float32", file), exact) | {"file_bytes": bytes_of(file)})
                shutil.rmtree(Path(folder) / "model")
    print_tables(results)
    print_formats(formats)


def run_apart(path: Path, case: Case, exact: Path) -> dict[str, float | str]:
    names = [case.weights, case.kv, str(case.path), str(exact)]
    command = [sys.executable, __file__, "--model", str(path), "--case", *names]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(output.strip(), flush=True)
    found: dict[str, float | str] = json.loads(output.splitlines()[-1])
    return found


def measure(path: Path, case: Case, exact: Path) -> dict[str, float | str]:
    """Memory first, while nothing but the model has been in it."""
    precision = as_stored(parse_precision(case.policy, kv=case.kv))
    checkpoint = open_checkpoint(case.path)
    warm_up(precision)
    before = peak_bytes()
    with freed_at_once():
        decoder = build_decoder(checkpoint.config, checkpoint.load(torch.float32, precision))
    loaded = peak_bytes()
    logits(decoder, [1, 2, 3], kv=case.kv)
    served = peak_bytes()
    pool = new_kv_pool(checkpoint.config, blocks=KV_TOKENS // BLOCK, block_tokens=BLOCK, dtype=DTYPES[case.kv])
    resident = resident_bytes()
    for part in pool:
        part.view(torch.uint8).fill_(0)
    cache = resident_bytes() - resident
    del pool
    found = torch.log_softmax(logits(decoder, load_tokenizer(path).encode(TEXT), kv=case.kv), dim=-1)
    if not exact.exists():
        torch.save(found, exact)
    reference = torch.load(exact)
    divergence = (reference.exp() * (reference - found)).sum(-1).mean()
    agreement = (reference.argmax(-1) == found.argmax(-1)).float().mean()
    return {
        "weights": case.weights,
        "kv": case.kv,
        "weight_bytes": decoder.weight_bytes,
        "weight_precision": decoder.weight_precision,
        "matrix_values": sum(prod(weight.shape) for weight in decoder.weights),
        "peak_after_load_bytes": loaded - before,
        "peak_after_step_bytes": served - before,
        "kv_token_bytes": kv_token_bytes(checkpoint.config, DTYPES[case.kv]),
        "kv_resident_bytes": cache,
        "kl": float(divergence),
        "top1_agreement": float(agreement),
    }


# --- files of each format


def write_format(name: str, source: Path, folder: Path) -> Path:
    """The model of `source`, a GGUF file, in another format; returns what to open."""
    folder.mkdir()
    if name in GGUF_FORMATS:
        return write_gguf(folder / "model.gguf", source, GGMLQuantizationType[name])
    store, described = FOLDER_FORMATS[name]
    checkpoint = open_checkpoint(source)
    config = checkpoint.config
    parameters = checkpoint.load(torch.float32, parse_precision("float32"))
    tensors: dict[str, Tensor] = {}
    for ours, weight in parameters.items():
        *layer, part = ours.split(".")
        module = f"model.layers.{layer[1]}.{NAMES['llama'][part]}" if layer else TOP_NAMES[part]
        values = weight.dequantised()
        if layer and values.dim() == 2:
            tensors |= {f"{module}.{each}": tensor.contiguous() for each, tensor in store(values).items()}
        else:
            tensors[f"{module}.weight"] = values.half() if values.dim() == 2 else values
    save_file(tensors, folder / "model.safetensors")
    key = "quantization" if name.startswith("mlx") else "quantization_config"
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": config.hidden, "vocab_size": config.vocab_size,
                "num_hidden_layers": len(config.layers), "intermediate_size": config.layers[0].inner,
                "num_attention_heads": config.layers[0].heads, "num_key_value_heads": config.layers[0].kv_heads,
                "max_position_embeddings": config.context_tokens, "rms_norm_eps": config.norm_eps,
                "rope_theta": config.ropes[0].base, "tie_word_embeddings": True, key: described,
            }
        )
    )  # fmt: skip
    return folder


def write_gguf(path: Path, source: Path, kind: GGMLQuantizationType) -> Path:
    """The file's metadata and tensors, its matrices in another type but the embedding."""
    entries, bodies, start = b"", [], 0
    tensors = GGUFReader(source).tensors
    for tensor in tensors:
        data, number = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            data, number = quants.quantize(quants.dequantize(data, number), kind), kind
        name, shape = tensor.name.encode(), tensor.shape.tolist()
        entries += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        entries += struct.pack("<IQ", number, start)
        bodies.append(data.tobytes() + bytes(-data.nbytes % 32))
        start += len(bodies[-1])
    metadata = read_metadata_bytes(source)
    header = metadata[:8] + struct.pack("<Q", len(tensors)) + metadata[16:] + entries
    path.write_bytes(header + bytes(-len(header) % 32) + b"".join(bodies))
    return path


def round_groups(values: Tensor, *, bits: int, group: int, symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[rows, columns]`, scales in fp16 and zero points `[rows, groups]` of each group's columns."""
    tiles = values.unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
    most = (1 << bits) - 1
    low, high = tiles.amin(-1).clamp(max=0), tiles.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / most).clamp(min=1e-6).half()
    zeros = torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scales).round().clamp(0, most)
    codes = ((tiles / scales[..., None]).round() + zeros[..., None]).clamp(0, most)
    return codes.flatten(-2).long(), scales, zeros.long()


def words_of(codes: Tensor, bits: int) -> Tensor:
    """`[rows, n]` codes as int32 words, low ones first."""
    runs = codes.unflatten(-1, (-1, 32 // bits))  # type: ignore[no-untyped-call]
    words = sum((runs[..., place] << (bits * place) for place in range(32 // bits)), torch.zeros_like(runs[..., 0]))
    return words.to(torch.uint32).view(torch.int32)


def store_mlx(values: Tensor, *, bits: int, group: int) -> dict[str, Tensor]:
    tiles = values.unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
    low, most = tiles.amin(-1).half(), (1 << bits) - 1
    scales = ((tiles.amax(-1) - low) / most).clamp(min=1e-6).half()
    codes = ((tiles - low[..., None]) / scales[..., None]).round().clamp(0, most).flatten(-2).long()
    return {"weight": words_of(codes, bits).view(torch.uint32), "scales": scales, "biases": low}


def store_awq(values: Tensor, *, group: int) -> dict[str, Tensor]:
    codes, scales, zeros = round_groups(values, bits=4, group=group)

    def packed(columns: Tensor) -> Tensor:
        return words_of(columns.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(-2), 4)  # type: ignore[no-untyped-call]

    return {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T}


def store_gptq(values: Tensor, *, bits: int, group: int) -> dict[str, Tensor]:
    codes, scales, zeros = round_groups(values, bits=bits, group=group)
    index = torch.arange(values.shape[1], dtype=torch.int32) // group
    zeros = (zeros - 1) & ((1 << bits) - 1)
    return {"qweight": words_of(codes, bits).T, "qzeros": words_of(zeros.T, bits), "scales": scales.T, "g_idx": index}


def store_packed(values: Tensor, *, group: int) -> dict[str, Tensor]:
    codes, scales, _ = round_groups(values, bits=4, group=group, symmetric=True)
    shape = torch.tensor(values.shape)
    return {"weight_packed": words_of(codes, 4), "weight_scale": scales, "weight_shape": shape}


def store_int8(values: Tensor) -> dict[str, Tensor]:
    scales = values.abs().amax(1, keepdim=True) / 127
    return {"weight": (values / scales).round().to(torch.int8), "weight_scale": scales}


def store_fp8(values: Tensor) -> dict[str, Tensor]:
    scales = values.abs().amax(1, keepdim=True) / 448
    return {"weight": (values / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def store_fp8_blocks(values: Tensor) -> dict[str, Tensor]:
    rows, columns = values.shape
    tiles = F.pad(values, (0, -columns % 128, 0, -rows % 128)).unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))  # type: ignore[no-untyped-call]
    scales = tiles.abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
    return {"weight": (values / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def compressed(form: str, **weights: object) -> dict[str, object]:
    activations = None if form == "pack-quantized" else {"num_bits": 8, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GGUF_FORMATS = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
FOLDER_FORMATS: dict[str, tuple[Callable[[Tensor], dict[str, Tensor]], dict[str, object]]] = {
    **{
        f"mlx {bits} bits, groups of {group}": (
            partial(store_mlx, bits=bits, group=group), {"bits": bits, "group_size": group}
        )
        for bits, group in ((8, 64), (4, 64), (4, 32))
    },
    "awq 4 bits, groups of 64": (partial(store_awq, group=64), {"quant_method": "awq", "bits": 4}),
    **{
        f"gptq {bits} bits, groups of 64": (
            partial(store_gptq, bits=bits, group=64), {"quant_method": "gptq", "bits": bits}
        )
        for bits in (8, 4)
    },
    "compressed-tensors int8": (
        store_int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    ),
    "compressed-tensors int4, groups of 64": (
        partial(store_packed, group=64), compressed("pack-quantized", num_bits=4, type="int", strategy="group")
    ),
    "compressed-tensors fp8": (
        store_fp8, compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "fp8, blocks of 128": (store_fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
}  # fmt: skip
FORMATS = (*GGUF_FORMATS, *FOLDER_FORMATS)
TOP_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm"}


def bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))


# --- what a process measures


def warm_up(precision: Precision) -> None:
    """Bring in the pages of the libraries, with a decoder of one small layer."""
    layer = LayerConfig(heads=2, kv_heads=1, inner=128)
    config = DecoderConfig((layer,), 128, 64, 256, 64, 1e-5, (Rope(10_000.0),), tied_head=True)
    parameters: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        weight, wanted = Dense(torch.randn(shape)), precision.of(name, tied_head=True)
        parameters[name] = weight if wanted is None else to_precision(name, weight, wanted)
    logits(build_decoder(config, parameters), [1, 2, 3], kv="float32")


def logits(decoder: Decoder, ids: Sequence[int], *, kv: str) -> torch.Tensor:
    """After each of `ids`."""
    blocks = -(-len(ids) // BLOCK)
    config = decoder.config
    caches = layer_caches(config, new_kv_pool(config, blocks=blocks + 1, block_tokens=BLOCK, dtype=DTYPES[kv]))
    batch = ragged_batch([len(ids)], [len(ids)], [range(1, blocks + 1)], cache=caches[0])
    with torch.inference_mode():
        return forward(decoder, torch.tensor(ids), batch, caches=caches, logits_rows=torch.arange(len(ids)))


def peak_bytes() -> int:
    return status_bytes("VmHWM")


def resident_bytes() -> int:
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def print_formats(results: Sequence[dict[str, float | str]]) -> None:
    mib = float(1 << 20)
    print("\n| format | MiB in the file | MiB held | peak after load, MiB | KL from fp32 | top-1 the same |")
    print("|---|---|---|---|---|---|")
    for found in results:
        sizes = [float(found[name]) / mib for name in ("file_bytes", "weight_bytes", "peak_after_load_bytes")]
        print(
            f"| {found['weights']} | {sizes[0]:.1f} | {sizes[1]:.1f} | {sizes[2]:.0f} | {float(found['kl']):.5f} | "
            f"{float(found['top1_agreement']):.3f} |"
        )


def print_tables(results: Sequence[dict[str, float | str]]) -> None:
    mib = float(1 << 20)
    exact = results[0]
    print("\n| weights | MiB held | of fp32 | by arithmetic | peak after load, MiB | KL from fp32 | top-1 the same |")
    print("|---|---|---|---|---|---|---|")
    for found in results:
        if found["kv"] != "float32":
            continue
        held, share = float(found["weight_bytes"]), float(found["weight_bytes"]) / float(exact["weight_bytes"])
        value_bytes = BYTES_A_WEIGHT.get(str(found["weights"]))
        # In fp32 the tied head is laid out beside the embedding.
        values = float(found["matrix_values"]) / float(exact["matrix_values"])
        arithmetic = "" if value_bytes is None else f"{value_bytes / 4 * values:.3f}"
        print(
            f"| {found['weights']} | {held / mib:.1f} | {share:.3f} | {arithmetic} | "
            f"{float(found['peak_after_load_bytes']) / mib:.0f} | {float(found['kl']):.5f} | "
            f"{float(found['top1_agreement']):.3f} |"
        )
    print(f"\n| KV cache | bytes a token | of fp32 | resident for {KV_TOKENS} tokens, MiB | KL | top-1 the same |")
    print("|---|---|---|---|---|---|")
    for found in results:
        if found["weights"] != "fp32":
            continue
        share = float(found["kv_token_bytes"]) / float(exact["kv_token_bytes"])
        print(
            f"| {found['kv']} | {found['kv_token_bytes']} | {share:.3f} | "
            f"{float(found['kv_resident_bytes']) / mib:.1f} | {float(found['kl']):.5f} | "
            f"{float(found['top1_agreement']):.3f} |"
        )


if __name__ == "__main__":
    main()
