"""What each precision of weights and of the KV cache costs in quality and takes in memory, on SmolLM2-135M.

Each in a process of its own: bytes by kind, peak resident memory over that with a tiny model, and over a page
of English the KL divergence from fp32 and how often the most likely token is the same. Prints JSON lines and tables.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from tidegate_engine.allocator import freed_at_once
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.precision import Precision, as_stored, parse_precision
from tidegate_engine.quantize import to_precision
from tidegate_engine.rope import Rope
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import DTYPES
from tidegate_engine.transformer import (
    Decoder,
    DecoderConfig,
    LayerConfig,
    build_decoder,
    forward,
    kv_token_bytes,
    layer_caches,
    new_kv_pool,
    parameter_shapes,
)
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
    """What one process measures."""

    weights: str
    kv: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or folder; default: SmolLM2-135M")
    parser.add_argument("--only", nargs="*", help="names of precisions")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    path = arguments.model or model.path()
    if arguments.case:
        weights, kv, exact = arguments.case
        print(json.dumps(measure(path, Case(weights, kv), Path(exact))))
        return
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.pt"
        cases = [Case(name, "float32") for name in WEIGHTS] + [Case("fp32", name) for name in KV[1:]]
        wanted = [case for case in cases if not arguments.only or {case.weights, case.kv} & set(arguments.only)]
        results = [run_apart(path, case, exact) for case in dict.fromkeys((cases[0], *wanted))]
    print_tables(results)


def run_apart(path: Path, case: Case, exact: Path) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--model", str(path), "--case", case.weights, case.kv, str(exact)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    print(output.strip(), flush=True)
    found: dict[str, float | str] = json.loads(output.splitlines()[-1])
    return found


def measure(path: Path, case: Case, exact: Path) -> dict[str, float | str]:
    """Memory first, while nothing but the model has been in it."""
    precision = as_stored(parse_precision(WEIGHTS[case.weights], kv=case.kv))
    checkpoint = open_checkpoint(path)
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
        "matrix_values": sum(weight.shape[0] * weight.shape[1] for weight in decoder.weights),
        "peak_after_load_bytes": loaded - before,
        "peak_after_step_bytes": served - before,
        "kv_token_bytes": kv_token_bytes(checkpoint.config, DTYPES[case.kv]),
        "kv_resident_bytes": cache,
        "kl": float(divergence),
        "top1_agreement": float(agreement),
    }


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
