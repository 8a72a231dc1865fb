"""How far the step model and its roofline prior are from measured TPOT and TTFT of H100s and H200s.

Reads aiconfigurator's `silicon_sample_dense_h100_h200.csv` (a path argument: the project carries no data). Scores:

1. fitted: the step model's steady state `TPOT = a + b·B + c·B·ISL/OSL + d·B·(ISL + OSL/2)`, for each model, GPU, engine
   and tensor-parallel size; coefficients from all input lengths but one, scored on that one, each in turn.
2. prior: `prior.step_prior` alone, which has seen none of these points, through the operator's own capacity maths.
3. corrected: that prior, its parts scaled to the points of all input lengths but one, as far as these tell; scored on
   that one.

Splitwise's `perf_model.csv` (Llama-2-70B in 16 bits on DGX A100 and H100), where it lies in the same folder, gives the
time of one batch's prompts and of a decode step: the prior is scored on both.

A row is KV-starved where the requests' KV does not fit beside the weights, by `plan`'s own arithmetic: they queue, and
only as many run as fit, which the model is told.
"""

import argparse
import csv
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import StepModel, StepShape
from tidegate_operator.capacity import Kind, Scenario, Targets, load_at
from tidegate_operator.gpus import find_gpu
from tidegate_operator.model_shapes import ModelShape, known_shape
from tidegate_operator.plan import Held, memory_of
from tidegate_operator.prior import PRIOR_ERROR, step_prior, work_of

SETTINGS = BatchSettings(1024, 8192, 8192)
"""As those engines have them by default."""
AICONFIGURATOR, SPLITWISE = "silicon_sample_dense_h100_h200.csv", "perf_model.csv"
MIN_POINTS = 8
LARGEST_STEP_TOKENS = 16_384
POINT_ERROR, PART_ERROR = 0.05, PRIOR_ERROR
"""What a measured point is taken to be off by, and a part of the prior: how far points may move a part."""
Key = tuple[str, str, str, str, int]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured row: latencies in seconds at a concurrency."""

    concurrency: float
    isl: float
    osl: float
    ttft_seconds: float
    tpot_seconds: float
    running: float
    """Requests whose KV fits at once."""

    @property
    def is_starved(self) -> bool:
        return self.running < self.concurrency

    @property
    def context(self) -> float:
        return self.isl + self.osl / 2

    @property
    def terms(self) -> tuple[float, ...]:
        """What a, b, c and d multiply."""
        return 1.0, self.running, self.running * self.isl / self.osl, self.running * self.context


def read_points(path: Path) -> dict[Key, list[Point]]:
    """Rows of dense models that have one batch size and a known shape, by (model, GPU, engine, precision, GPUs)."""
    found: dict[Key, list[Point]] = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            shape = known_shape(row["model_path"])
            if row["mode"] != "agg" or shape is None:
                continue
            gpu_name = {"h100_sxm": "H100 SXM", "h200_sxm": "H200"}[row["system"]]
            precision = "fp8" if row["precision"] == "fp8" else "bf16"
            key = (shape.name, gpu_name, row["backend"], precision, int(float(row["tp_size"])))
            found[key].append(_point(row, shape, key))
    return found


def _point(row: dict[str, str], shape: ModelShape, key: Key) -> Point:
    _, gpu_name, _, precision, gpus = key
    gpu = find_gpu(gpu_name)
    assert gpu is not None
    memory = memory_of(shape, gpu, kinds=Held(precision, "bf16"), tensor_parallel=gpus)
    concurrency, isl, osl = (float(row[name]) for name in ("batch_size", "isl", "osl"))
    fits = max(1.0, memory.kv_tokens / (isl + osl / 2))
    return Point(
        concurrency=concurrency,
        isl=isl,
        osl=osl,
        ttft_seconds=float(row["silicon_ttft_ms"]) / 1000,
        tpot_seconds=float(row["silicon_tpot_ms"]) / 1000,
        running=min(concurrency, fits),
    )


# --- predictions ---------------------------------------------------------------------------------------------------


def fit(
    points: Sequence[Point], columns: Callable[[Point], Sequence[float]], *, towards_one: float = 0.0
) -> list[float]:
    """Non-negative coefficients with the least squares of the relative errors, drawn towards one by that weight."""
    rows = np.array([[value / point.tpot_seconds for value in columns(point)] for point in points])
    left = list(range(rows.shape[1]))
    result = [0.0] * len(left)
    while left:
        gram = rows[:, left].T @ rows[:, left] + towards_one * np.eye(len(left))
        scale = np.sqrt(gram.diagonal())
        scale[scale == 0] = 1.0
        even = gram / np.outer(scale, scale) + 1e-9 * np.eye(len(left))
        solution = np.linalg.solve(even, (rows[:, left].sum(axis=0) + towards_one) / scale) / scale
        lowest = int(solution.argmin())
        if solution[lowest] >= 0:
            for index, value in zip(left, solution, strict=True):
                result[index] = float(value)
            return result
        del left[lowest]
    return result


def scene_of(point: Point, step: StepModel) -> Scenario:
    kind = Kind(
        share=1.0,
        prefill_tokens=point.isl,
        isl=point.isl,
        decode_steps=point.osl - 1,
        attention=point.isl**2 / 2,
        mean_context=point.context,
    )
    return Scenario(step, float("inf"), (kind,), Targets())


def tpot_of(point: Point, step: StepModel) -> float | None:
    """Mean step time at the rate at which as many requests are in progress as run; None beyond what can be carried."""
    scene = scene_of(point, step)
    low, high = 0.0, point.running / (step.base_seconds * point.osl)
    best = None
    for _ in range(40):
        rate = (low + high) / 2
        load = load_at(scene, SETTINGS, rate) if rate > 0 else None
        if load is None or load.decoding + load.prefilling > point.running:
            high = rate
        else:
            low, best = rate, load
    if best is None or best.decoding + best.prefilling < 0.97 * point.running:
        return None
    return best.step_seconds


def split_terms(point: Point, *, step: StepModel) -> tuple[float, ...]:
    """The prior's steady state by its parts: fixed, decodes' arithmetic, prefill, KV."""
    running, prefill = point.running, point.running * point.isl / point.osl
    return (
        step.base_seconds,
        running * (step.sequence_seconds + step.token_seconds),
        prefill * (step.token_seconds + step.attention_seconds * point.isl / 2),
        running * point.context * (step.kv_token_seconds + step.mixed_kv_token_seconds * min(1.0, running / point.osl)),
    )


def scored_by_isl(
    points: Sequence[Point], columns: Callable[[Point], Sequence[float]], *, towards_one: float = 0.0
) -> list[tuple[Point, float | None]]:
    """Each point with the prediction of coefficients that have not seen its input length."""
    scored: list[tuple[Point, float | None]] = []
    for isl in sorted({point.isl for point in points}):
        seen = [point for point in points if point.isl != isl]
        if len(seen) < MIN_POINTS // 2:
            continue
        coefficients = fit(seen, columns, towards_one=towards_one)
        for point in points:
            if point.isl == isl:
                scored.append((point, sum(c * v for c, v in zip(coefficients, columns(point), strict=True))))
    return scored


# --- the table -----------------------------------------------------------------------------------------------------


def cell(errors: Sequence[float]) -> str:
    if not errors:
        return "     -      -"
    p95 = sorted(errors)[min(len(errors) - 1, int(0.95 * len(errors)))]
    return f"{100 * statistics.mean(errors):6.1f} {100 * p95:6.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", help="the folder that holds the measured points, at any depth")
    options = parser.parse_args()
    files = {
        name: next(iter(sorted(Path(options.data).rglob(name))), None) if options.data else None
        for name in (AICONFIGURATOR, SPLITWISE)
    }
    points_path, splitwise_path = files[AICONFIGURATOR], files[SPLITWISE]
    if points_path is None:
        print(f"bench_plan: no measured points; give the folder of {AICONFIGURATOR}", file=sys.stderr)
        return 0
    print("Errors in % (MAPE, p95). `all` has the KV-starved rows in it, the others have not.")
    heads = "  ".join(f"{name:>13}" for name in SCORES)
    print(f"{'model, GPU, engine, precision':48} {'n':>4} {'starved':>7}  {heads}")
    rows: dict[str, list[dict[str, list[float]]]] = defaultdict(list)
    for key, points in sorted(read_points(points_path).items()):
        if len(points) < MIN_POINTS or len({point.isl for point in points}) < 2:
            continue
        errors = errors_of(key, points)
        label = f"{key[0]} {key[4]}x{key[1]} {key[2]} {key[3]}"
        starved = sum(point.is_starved for point in points)
        print(f"{label:48} {len(points):4} {starved:7}  " + "  ".join(cell(part) for part in errors.values()))
        rows["all"].append(errors)
        rows["three input lengths or more" if len({p.isl for p in points}) > 2 else "two input lengths"].append(errors)
    for label, group in sorted(rows.items()):
        sums = (list(chain.from_iterable(errors[name] for errors in group)) for name in SCORES)
        print(f"{label:48} {'':4} {'':7}  " + "  ".join(cell(part) for part in sums))
    if splitwise_path is not None:
        score_splitwise(splitwise_path)
    return 0


def score_splitwise(path: Path) -> None:
    """Prompts of a whole batch in one step, and one decode step of it, beside the prior's.

    An engine of 2023: what a step takes beside its kernels grows with the group, to some 25 ms.
    """
    shape = known_shape("Llama-2-70B")
    assert shape is not None
    work = work_of(shape, precision="bf16", kv_precision="bf16")
    errors: dict[tuple[str, int], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpu = find_gpu({"a100-80gb": "A100 80GB", "h100-80gb": "H100 SXM"}.get(row["hardware"], ""))
            if row["model"] != "llama2-70b" or gpu is None:
                continue
            gpus = int(row["tensor_parallel"])
            step = step_prior(work, gpu, tensor_parallel=gpus)
            batch, prompt, output = (int(row[name]) for name in ("batch_size", "prompt_size", "token_size"))
            if batch * prompt > LARGEST_STEP_TOKENS:
                continue  # no engine reads so much in one step
            reading = StepShape(batch * prompt, 0, batch, batch * prompt**2 / 2, has_prefill=True)
            context = batch * (prompt + output / 2)
            decoding = StepShape(batch, context, batch, 0, has_prefill=False)
            for found, shape_of_step, measured in zip(
                errors[gpu.name, gpus], (reading, decoding), ("prompt_time", "token_time"), strict=True
            ):
                found.append(step.seconds(shape_of_step) * 1000 / float(row[measured]) - 1)
    print("\nSplitwise, Llama-2-70B in 16 bits: the prior's errors in % (mean of the absolute, p95, and signed)")
    for (name, gpus), parts in sorted(errors.items()):
        scores = "  ".join(
            f"{what} {cell([abs(error) for error in part])} {100 * statistics.mean(part):+6.1f}"
            for what, part in zip(("prompts", "decode step"), parts, strict=True)
        )
        print(f"{gpus} x {name:12} n {len(parts[0]):4}  {scores}")


SCORES = ("fitted all", "fitted fits", "corrected", "prior fits", "TTFT prior")


def errors_of(key: Key, points: Sequence[Point]) -> dict[str, list[float]]:
    """Relative errors by score."""
    shape, gpu = known_shape(key[0]), find_gpu(key[1])
    assert shape is not None and gpu is not None
    step = step_prior(work_of(shape, precision=key[3], kv_precision="bf16"), gpu, tensor_parallel=key[4])
    roomy = [point for point in points if not point.is_starved]
    drawn = (POINT_ERROR / PART_ERROR) ** 2
    scored = (
        scored_by_isl(points, lambda point: point.terms),
        scored_by_isl(roomy, lambda point: point.terms),
        scored_by_isl(roomy, partial(split_terms, step=step), towards_one=drawn),
        [(point, tpot_of(point, step)) for point in roomy],
    )
    tpot = [[abs(found / point.tpot_seconds - 1) for point, found in part if found is not None] for part in scored]
    return dict(zip(SCORES, [*tpot, ttft_errors(roomy, step)], strict=True))


def ttft_errors(points: Sequence[Point], step: StepModel) -> list[float]:
    """At the fewest requests only: more of them start at once in these runs, and wait for each other."""
    errors = []
    fewest = min((point.concurrency for point in points), default=0.0)
    for point in points:
        if point.concurrency > fewest:
            continue
        kv = (point.running - 1) * point.context
        chunks = max(1.0, point.isl / SETTINGS.long_prefill_token_threshold)
        seconds = (
            chunks * (step.base_seconds + (step.kv_token_seconds + step.mixed_kv_token_seconds) * kv)
            + step.token_seconds * max(0.0, point.isl - chunks * step.threshold_tokens)
            + step.attention_seconds * point.isl**2 / 2
        )
        errors.append(abs(seconds / point.ttft_seconds - 1))
    return errors


if __name__ == "__main__":
    sys.exit(main())
