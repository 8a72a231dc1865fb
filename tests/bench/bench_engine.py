"""Tokens per second of the engine and of transformers' `generate`, interleaved in one process; prints a JSON line.

Both compute the same model in fp32 on the same threads: 8 requests of 128 tokens in and 128 out. transformers gets its
best case, one static batch without padding; the engine goes through its scheduler and paged cache.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from tidegate_engine.torch_runner import TorchOptions, TorchRunner  # before torch: it chooses how threads wait

import torch  # isort: skip
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

from tidegate_engine.blocks import BlockPool
from tidegate_engine.cgroup import Machine
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_local import model

SEQUENCES = 8
PROMPT_TOKENS = 128
OUTPUT_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=Machine().cpus())
    arguments = parser.parse_args()
    path = model.path()
    runner = TorchRunner(path, options=TorchOptions(kv_blocks=512, threads=arguments.threads))
    baseline = load_baseline(path)
    generator = torch.Generator().manual_seed(0)
    engine_rates: list[float] = []
    baseline_rates: list[float] = []
    cpu_ratios: list[float] = []
    agreements: list[float] = []
    for number in range(arguments.rounds + 1):
        prompts = torch.randint(100, runner.info.vocab_size, (SEQUENCES, PROMPT_TOKENS), generator=generator)
        cpu_before = time.process_time()
        engine_seconds, engine_output = run_engine(runner, prompts)
        cpu_between = time.process_time()
        baseline_seconds, baseline_output = run_baseline(baseline, prompts)
        cpu_after = time.process_time()
        if number:  # the first round is warm-up
            engine_rates.append(SEQUENCES * OUTPUT_TOKENS / engine_seconds)
            baseline_rates.append(SEQUENCES * OUTPUT_TOKENS / baseline_seconds)
            cpu_ratios.append((cpu_after - cpu_between) / (cpu_between - cpu_before))
            agreements.append((engine_output == baseline_output).float().mean().item())
    ratios = [ours / theirs for ours, theirs in zip(engine_rates, baseline_rates, strict=True)]
    result = {
        "bench": "engine",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "engine_tokens_per_second": round(statistics.median(engine_rates), 1),
        "transformers_tokens_per_second": round(statistics.median(baseline_rates), 1),
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "cpu_time_ratio": round(statistics.median(cpu_ratios), 2),
        "same_tokens": round(statistics.mean(agreements), 3),
    }
    print(json.dumps(result))
    print(
        f"engine {result['engine_tokens_per_second']} tok/s, transformers {result['transformers_tokens_per_second']} "
        f"tok/s, {SEQUENCES} requests of {PROMPT_TOKENS} in and {OUTPUT_TOKENS} out on {arguments.threads} threads: "
        f"ratio {result['ratio']} ({result['cpu_time_ratio']} by CPU time, which other processes disturb less)"
    )


def load_baseline(path: Path) -> LlamaForCausalLM:
    """transformers' model with the file's weights, dequantised by transformers."""
    logging.disable_progress_bar()
    fields = load_gguf_checkpoint(str(path))["config"]
    del fields["model_type"]
    baseline = LlamaForCausalLM(LlamaConfig(**fields))
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=baseline)["tensors"]
    baseline.load_state_dict(tensors, strict=False)
    baseline.tie_weights()
    return baseline.eval()


def run_engine(runner: TorchRunner, prompts: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Seconds and output ids of all prompts at once."""
    info = runner.info
    scheduler = Scheduler(
        BatchSettings(64, 4096, 1024), BlockPool(info.kv_blocks, info.block_tokens), max_model_len=info.max_model_len
    )
    params = SamplingParams(temperature=0, ignore_eos=True)
    requests = [
        Request(str(index), PROMPT_TOKENS, OUTPUT_TOKENS, 0.0, prompt_ids=prompt, params=params)
        for index, prompt in enumerate(prompts.tolist())
    ]
    started = time.perf_counter()
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(time.monotonic())
        scheduler.commit(step, runner.run(step), time.monotonic())
    return time.perf_counter() - started, torch.tensor([request.output_ids for request in requests])


def run_baseline(baseline: LlamaForCausalLM, prompts: torch.Tensor) -> tuple[float, torch.Tensor]:
    started = time.perf_counter()
    output = baseline.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return time.perf_counter() - started, output[:, PROMPT_TOKENS:]


if __name__ == "__main__":
    main()
