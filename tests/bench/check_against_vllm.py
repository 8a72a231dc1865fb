"""The simulator beside real runs of vLLM, with a step model fitted to kernel tables alone.

Takes the folder with LLMServingSim's published tables (`GPU__MODEL__bf16__tpN__{attention,dense,per_sequence}.csv.gz`)
and runs (`bench_vllm/GPU/MODEL/{requests.jsonl,meta.json}`). The requests of a run are served in virtual time by our
own scheduler under vLLM's settings; what differs is ours then, scheduler and step model together. Nothing is fitted to
the runs. The host's time for a step is not in kernel tables: 0 and 1 ms are shown, the difference is the uncertainty.

    python tests/bench/check_against_vllm.py FOLDER
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile, StepModel, StepShape, load_profile
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, Order
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import FleetSpec

GOAL = 0.1
"""Largest error of the mean TTFT and of the mean time per output token."""
HOST_SECONDS = (0.0, 0.001)
LAYER_PARTS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "layernorm", "gate_up_proj", "act_fn", "down_proj")
ONCE_PARTS = ("embedding", "final_layernorm")
SEQUENCE_PARTS = ("lm_head", "sampler")
THRESHOLDS = (0, 32, 64, 96, 128, 160, 192, 256)
MOST_STEP_TOKENS = 2048
MOST_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Case:
    """One published run, and what its machine is, where its own record does not say."""

    run: str
    tables: str
    layers: int
    kv_blocks: int
    """Counts where the run does not tell: so many that they are never short."""


CASES = (
    Case("RTXPRO6000/Llama-3.1-8B", "RTXPRO6000__meta-llama__Llama-3.1-8B__bf16__tp1", 32, 30_000),
    Case("RTX4090/Llama-3.1-8B", "RTX4090__meta-llama__Llama-3.1-8B__bf16__tp1", 32, 2588),
)
"""The run over two GPUs is left out: the tables hold no communication between them."""


class One:
    """One replica, always."""

    name = "one"
    period_seconds = 60.0

    def decide(self, view: FleetView) -> Order:
        return Order(1)


def rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def table(path: Path, size: str) -> dict[str, tuple[list[float], list[float]]]:
    """Sizes and seconds of each part."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows(path):
        sizes, seconds = found.setdefault(row["layer"], ([], []))
        sizes.append(float(row[size]))
        seconds.append(float(row["time_us"]) * 1e-6)
    return found


def at(tables: Mapping[str, tuple[list[float], list[float]]], part: str, size: float) -> float:
    """Between two entries of a table on a straight line; a part that is not in it takes no time."""
    return float(np.interp(size, *tables[part])) if part in tables else 0.0


def measured_steps(folder: Path, case: Case, *, kv_tokens: int) -> list[tuple[StepShape, float]]:
    """Every step of the attention table that fits into the KV cache, with all else that it needs: its kernels' sum."""
    dense = table(folder / f"{case.tables}__dense.csv.gz", "tokens")
    sequence = table(folder / f"{case.tables}__per_sequence.csv.gz", "sequences")
    found = []
    for row in rows(folder / f"{case.tables}__attention.csv.gz"):
        chunk, before, decodes, context, microseconds = (float(row[name]) for name in row)
        tokens, sequences = chunk + decodes, decodes + (chunk > 0)
        total_kv = decodes * context
        held = total_kv + before + tokens
        if not 0 < tokens <= MOST_STEP_TOKENS or max(before, context) > MOST_CONTEXT_TOKENS or held > kv_tokens:
            continue
        seconds = case.layers * (microseconds * 1e-6 + sum(at(dense, part, tokens) for part in LAYER_PARTS))
        seconds += sum(at(dense, part, tokens) for part in ONCE_PARTS)
        seconds += sum(at(sequence, part, sequences) for part in SEQUENCE_PARTS)
        shape = StepShape(tokens, total_kv, sequences, chunk * (before + chunk / 2), chunk > 0)
        found.append((shape, seconds))
    return found


def fitted(steps: Sequence[tuple[StepShape, float]]) -> tuple[StepModel, float]:
    """The step model nearest to the steps in relative error, and that error's mean.

    Decodes tell what a step, a sequence and a token of KV take; mixed steps tell the rest, with that given: one system
    for both would make either wrong, since they read KV at different speeds.
    """
    decodes = [(shape, seconds) for shape, seconds in steps if not shape.has_prefill]
    mixed = [(shape, seconds) for shape, seconds in steps if shape.has_prefill]
    best: tuple[float, StepModel] | None = None
    for threshold in THRESHOLDS:
        base, kv, sequence = solved(
            [(1.0, shape.decode_kv_tokens, shape.sequences) for shape, _ in decodes], [each for _, each in decodes]
        )
        token, attention, slower = solved(
            [
                (max(0.0, shape.tokens - threshold), shape.prefill_attention, shape.decode_kv_tokens)
                for shape, _ in mixed
            ],
            [each for _, each in mixed],
            given=[base + kv * shape.decode_kv_tokens + sequence * shape.sequences for shape, _ in mixed],
        )
        model = StepModel(base, float(threshold), token, kv, sequence, attention, slower)
        error = float(np.mean([abs(model.seconds(shape) / seconds - 1) for shape, seconds in steps]))
        if best is None or error < best[0]:
            best = error, model
    assert best is not None
    return best[1], best[0]


def solved(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], *, given: Sequence[float] | None = None
) -> list[float]:
    """Coefficients of 0 or more with Σ coefficient · column + given ≈ seconds in relative error, outliers damped."""
    times = np.array(seconds)
    matrix = np.array(columns) / times[:, None]
    target = 1.0 - (0.0 if given is None else np.array(given) / times)
    kept = list(range(matrix.shape[1]))
    while True:
        part = matrix[:, kept]
        scale = np.abs(part).max(axis=0)
        weights = np.ones(len(times))
        for _ in range(4):
            solution = np.linalg.lstsq(part / scale * weights[:, None], target * weights, rcond=None)[0] / scale
            residuals = np.abs(part @ solution - target)
            weights = np.sqrt(np.minimum(1.0, 1.5 * np.median(residuals) / np.maximum(residuals, 1e-9)))
        if solution.min() >= 0:
            break
        del kept[int(solution.argmin())]
    values = [0.0] * matrix.shape[1]
    for place, value in zip(kept, solution, strict=True):
        values[place] = float(value)
    return values


def profile_of(case: Case, step: StepModel, kv_blocks: int) -> Profile:
    other = load_profile("h100-llama-3.1-8b")
    return replace(other, name=case.run, step=step, kv_blocks=kv_blocks + 1, block_tokens=16, max_model_len=32_768)


def check(folder: Path, case: Case) -> list[dict[str, object]]:
    run = folder / "bench_vllm" / case.run
    requests = [json.loads(line) for line in (run / "requests.jsonl").read_text().splitlines()]
    meta = json.loads((run / "meta.json").read_text())
    kv_blocks = int(meta.get("kv_cache", {}).get("num_gpu_blocks") or case.kv_blocks)
    engine = meta["engine_kwargs"]
    real_ttft = np.array([each["first_token_ts"] - each["queued_ts"] for each in requests])
    real_tpot = np.array(
        [(each["last_token_ts"] - each["first_token_ts"]) / (each["output_toks"] - 1) for each in requests]
    )
    began = min(each["arrival_time"] for each in requests)
    workload = sorted(
        (Arrival(each["arrival_time"] - began, each["input_toks"], each["output_toks"]) for each in requests),
        key=lambda arrival: arrival.at_seconds,
    )
    step, error = fitted(measured_steps(folder, case, kv_tokens=16 * kv_blocks))
    results: list[dict[str, object]] = []
    budget = int(engine["max_num_batched_tokens"])
    settings = BatchSettings(int(engine["max_num_seqs"]), budget, budget)
    for host in HOST_SECONDS:
        model = replace(step, base_seconds=step.base_seconds + host)
        found = simulate(workload, FleetSpec(profile_of(case, model, kv_blocks), settings=settings), One())
        ttft, tpot = np.array(found.records.ttft), np.array(found.records.itl)
        results.append(
            {
                "run": case.run,
                "host_seconds": host,
                "fit_error": round(error, 4),
                "ttft_mean": [round(float(real_ttft.mean()), 3), round(float(ttft.mean()), 3)],
                "ttft_p99": [round(float(np.quantile(each, 0.99)), 3) for each in (real_ttft, ttft)],
                "tpot_mean": [round(float(real_tpot.mean()), 5), round(float(tpot.mean()), 5)],
                "tpot_p99": [round(float(np.quantile(each, 0.99)), 5) for each in (real_tpot, tpot)],
                "preemptions": found.preemptions,
                "step": {name: float(f"{value:.3g}") for name, value in model.as_dict().items()},
            }
        )
    return results


def main() -> None:
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "bench_vllm").is_dir():
        raise SystemExit(__doc__)
    results = [result for case in CASES for result in check(Path(sys.argv[1]), case)]
    for result in results:
        print(f"{result['run']}, {1000 * float(str(result['host_seconds'])):.0f} ms of host time a step:")
        for name in ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99"):
            pair = result[name]
            assert isinstance(pair, list)
            real, simulated = pair
            print(
                f"  {name:10} real {real:8.4f} s, simulated {simulated:8.4f} s: {100 * (simulated / real - 1):+.1f} %"
            )
    print(json.dumps({"check": "vllm", "goal": GOAL, "results": results}))


if __name__ == "__main__":
    main()
