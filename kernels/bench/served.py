"""The 8B-shaped model with random weights behind our HTTP server, with many streams at once, and vLLM beside it.

The server is `tidegate-engine serve` but for the model, which is made and not read; the client is `tidegate-engine
bench`, a process of its own. vLLM, where it is installed, decodes the same shape without a server. Called by `h200`;
as a program it is the server.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from measuring import Place, Report, place_of
from tidegate_engine import cli
from tidegate_engine.architecture import DecoderConfig
from tidegate_engine.byte_tokenizer import ByteTokenizer
from tidegate_engine.checkpoint import Checkpoint
from tidegate_engine.pooling import Pooling
from tidegate_engine.precision import Precision
from tidegate_engine.serve import Model
from tidegate_engine.torch_runner import TorchRunner
from tidegate_kernels.weight import Weight
from whole_model import REAL as REAL_MODEL
from whole_model import TINY as TINY_MODEL
from whole_model import random_parameters

PORT = 18_000
START_SHARE = 0.6
"""Of the section's time that the server may take to be ready."""


@dataclass(frozen=True, slots=True)
class Load:
    streams: int
    prompt_tokens: int
    answer_tokens: int
    requests: int
    warming: int
    """Requests before those that count, with short answers: what is compiled at first use is compiled by them."""
    context: int


REAL = Load(streams=500, prompt_tokens=256, answer_tokens=128, requests=1500, warming=500, context=1024)
TINY = Load(streams=2, prompt_tokens=4, answer_tokens=3, requests=3, warming=1, context=512)
VLLM_TOKENS = 64


def _config(place: Place) -> DecoderConfig:
    return (TINY_MODEL if place.rehearsed else REAL_MODEL).config


class Tokenizer(ByteTokenizer):
    """Every id that the model can say is a word; no text ends by itself."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._size = vocab_size

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [each % self._size for each in super().encode(text, add_special=add_special)]

    def token_bytes(self, token_id: int) -> bytes:
        return b"word"


def checkpoint_of(place: Place) -> Checkpoint:
    """What would have been read from a file."""

    def load(_path: Path, *, dtype: torch.dtype, precision: Precision) -> tuple[DecoderConfig, dict[str, Weight]]:
        return _config(place), random_parameters(place, _config(place), is_fp8=False)

    return Checkpoint(Path("random"), "random-8b", _config(place), (0,), {}, None, frozenset(), False, Pooling(), load)


def serve(flags: Sequence[str], *, rehearse: bool) -> int:
    """Be the server."""
    place = place_of(rehearse=rehearse)
    load = TINY if rehearse else REAL
    dtype = str(place.dtype).removeprefix("torch.")

    def computed(args: Any, _precision: Precision) -> Model:
        options = cli._torch_options(args, Precision(dtype=dtype, kinds={}), None)
        # A rehearsal pads its decodes as a GPU's recorded ones are.
        options = replace(options, max_model_len=load.context, graph_sizes=options.graph_sizes or (1, 2))
        return Model(
            lambda: (TorchRunner(checkpoint_of(place), options=options), None),
            lambda: Tokenizer(_config(place).vocab_size),
        )

    with mock.patch.object(cli, "_computed", computed):
        return cli.main(["serve", "--model", "random-8b", *flags])


def server_flags(place: Place, load: Load) -> list[str]:
    flags = ["--host", "127.0.0.1", "--port", str(PORT), "--admin-port", str(PORT + 1)]
    flags += ["--endpoint-removal-seconds", "0", "--shutdown-timeout", "2"]
    flags += ["--served-model-name", "random-8b", "--max-num-seqs", str(max(4, load.streams))]
    if place.rehearsed:
        return [*flags, "--device", "cpu", "--kernels", "triton", "--num-gpu-blocks-override", "80"]
    return [*flags, "--device", "cuda", "--max-num-batched-tokens", "4096"]


def served(place: Place, report: Report) -> None:
    load = TINY if place.rehearsed else REAL
    command = [sys.executable, __file__, *["--rehearse"] * place.rehearsed, *server_flags(place, load)]
    began = time.monotonic()
    server = subprocess.Popen(command, cwd=Path(__file__).parent)
    try:
        _wait_until_ready(server, until=began + START_SHARE * (report.deadline - began))
        report.add(server="ready", seconds=time.monotonic() - began)
        with report.guarded("warming"):
            _run_client(load, report, requests=load.warming, answer_tokens=min(8, load.answer_tokens))
        with report.guarded("load"):
            found = _run_client(load, report, requests=load.requests, answer_tokens=load.answer_tokens)
            report.add(
                streams=load.streams,
                prompt_tokens=load.prompt_tokens,
                answer_tokens=load.answer_tokens,
                completed=found["completed"],
                failed=found["failed"],
                output_tokens_per_second=found["output_throughput"],
                ttft_p95_ms=found["p95_ttft_ms"],
                itl_p95_ms=found["p95_itl_ms"],
            )
            if found["failed"] or not found["completed"]:
                raise RuntimeError(f"{found['failed']} requests failed: {found['errors']}")
    finally:
        server.terminate()
        try:
            server.wait(timeout=10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]", *, until: float) -> None:
    while True:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        if time.monotonic() > until:
            raise TimeoutError("the server was not ready in time")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)


def _run_client(load: Load, report: Report, *, requests: int, answer_tokens: int) -> dict[str, Any]:
    left = max(1.0, report.deadline - time.monotonic())
    with tempfile.NamedTemporaryFile(suffix=".json") as figures:
        command = [sys.executable, "-m", "tidegate_engine.cli", "bench", "--url", f"http://127.0.0.1:{PORT}"]
        command += ["--concurrency", str(load.streams), "--isl", str(load.prompt_tokens), "--osl", str(answer_tokens)]
        command += ["--num-prompts", str(requests), "--num-warmups", "0", "--json", figures.name]
        # No request begins in the last third: those that run shall end.
        command += ["--duration", str(left * 2 / 3)]
        subprocess.run(command, check=False, timeout=left + 5, stdout=subprocess.DEVNULL)
        written = Path(figures.name).read_text(encoding="utf-8")
        if not written:
            raise RuntimeError("the client measured nothing")
        found: dict[str, Any] = json.loads(written)
        return found


def beside(place: Place, report: Report) -> None:
    """vLLM's decodes: the time of VLLM_TOKENS more tokens of so many sequences."""
    if importlib.util.find_spec("vllm") is None:
        report.add(vllm="is not installed here")
        return
    if place.rehearsed:
        report.add(vllm="is not rehearsed")
        return
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(_llama_config(_config(place))), encoding="utf-8")
        engine = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
            gpu_memory_utilization=0.85, enable_prefix_caching=False,
        )  # fmt: skip
    report.add(vllm="is loaded")
    for batch in REAL_MODEL.batches:
        if not report.has_time():
            continue
        with report.guarded(f"{batch} sequences"):
            seconds = []
            for tokens in (1, 1, 1 + VLLM_TOKENS):
                wish = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
                prompts = [{"prompt_token_ids": [1 + index, *range(2, REAL_MODEL.context)]} for index in range(batch)]
                began = time.perf_counter()
                engine.generate(prompts, wish, use_tqdm=False)
                seconds.append(time.perf_counter() - began)
            decoding = seconds[2] - seconds[1]
            report.add(
                weights="bfloat16",
                batch=batch,
                context=REAL_MODEL.context,
                step_ms=decoding / VLLM_TOKENS * 1e3,
                tokens_per_second=batch * VLLM_TOKENS / decoding,
            )


def _llama_config(config: DecoderConfig) -> dict[str, object]:
    layer = config.layers[0]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden,
        "intermediate_size": layer.inner,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": config.head_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].base,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    rehearsed = sys.argv[1:2] == ["--rehearse"]
    sys.exit(serve(sys.argv[1 + rehearsed :], rehearse=rehearsed))
