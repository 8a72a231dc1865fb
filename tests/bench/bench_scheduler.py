"""CPU time that a step takes beside its computation, with 256 running sequences, and the goals of it.

Run as a script: a line to read for each case, one JSON line. The engine's own parts are called as the torch runner
does, and nothing is computed between them: plan, preparation (what the forward pass reads: ids, tables, rotations),
sampling from ready logits, commit. The vocabulary is small, so that sampling, too, is the host's share of it.
"""

import gc
import json
import statistics
from collections.abc import Callable, Iterable
from time import thread_time

import torch

from tidegate_engine.architecture import Rope
from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request, SampledToken, SamplingParams
from tidegate_engine.rope import Turns, rope_frequencies
from tidegate_engine.sampling import Sampler
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.step_inputs import StepInputs

GOALS_MS = {"plan and commit": 1.5, "without sampling": 0.5}
RUNNING = 256
STEPS = 400
PROMPT_TOKENS = 1024
BLOCK_TOKENS = 16
HEAD_SIZE = 128
VOCAB = 64
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(top_p=0.9)
PARTS = ("plan", "preparation", "sampling", "commit")
Costs = dict[str, float]


class Host:
    """All that a step takes of the host."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._inputs = StepInputs(BLOCK_TOKENS, (None,))
        frequencies = rope_frequencies(Rope(10_000.0), size=HEAD_SIZE, context_tokens=8192)
        self._turns = Turns(frequencies, magnitude=1.0, dtype=torch.float32)
        self._sampler = Sampler(eos_ids=(VOCAB,), entropy=b"0" * 16)
        self._logits = torch.randn(RUNNING, VOCAB, generator=torch.Generator().manual_seed(1))

    def step(self, now: float) -> Costs:
        """Milliseconds of each part."""
        times = [thread_time()]
        step = self.scheduler.plan(now)
        times.append(thread_time())
        inputs = self._inputs.lay_out(step)
        self._turns.at(inputs.batch.positions, end=max(inputs.batch.counts[1]))
        times.append(thread_time())
        found = self._sampler.sample(self._logits[: len(inputs.sampled)], inputs.sampled, inputs.drafts)
        tokens = dict(zip([request.id for request in inputs.sampled], found, strict=True))
        times.append(thread_time())
        self.scheduler.commit(step, tokens, now)
        times.append(thread_time())
        return {part: 1000 * (end - start) for part, start, end in zip(PARTS, times, times[1:], strict=False)}


def fill(scheduler: Scheduler, params: SamplingParams, *, first: int, count: int) -> None:
    """Queue `count` requests that share the first half of their prompts."""
    head = list(range(PROMPT_TOKENS // 2))
    for number in range(first, first + count):
        ids = head + [number] * (PROMPT_TOKENS - len(head))
        request = Request(f"r{number}", len(ids), 4096, arrival=float(number), prompt_ids=ids, params=params)
        scheduler.add(request)


def start(params: SamplingParams = GREEDY) -> Host:
    """A scheduler whose 256 sequences all decode, at different lengths."""
    settings = BatchSettings(max_num_seqs=RUNNING, max_num_batched_tokens=8192, long_prefill_token_threshold=2048)
    scheduler = Scheduler(settings, BlockPool(60_000, BLOCK_TOKENS), max_model_len=8192)
    fill(scheduler, params, first=0, count=RUNNING)
    while scheduler.running < RUNNING or scheduler.running_context_tokens < RUNNING * PROMPT_TOKENS:
        step = scheduler.plan(0.0)
        scheduler.commit(step, {item.request.id: SampledToken(7) for item in step.items}, 0.0)
    return Host(scheduler)


def measure(host: Host, *, before: Callable[[int], None] = lambda _: None) -> list[Costs]:
    """The costs of each step; `before` runs outside the clock."""
    found = []
    for number in range(STEPS):
        before(number)
        found.append(host.step(float(number)))
    return found


def at_quantile(costs: Iterable[float], quantile: float) -> float:
    found = sorted(costs)
    return round(found[int(quantile * (len(found) - 1))], 3)


def summary(costs: list[Costs]) -> dict[str, Costs]:
    """By part and by goal: the quietest tenth of the steps, the median, and the slowest hundredth."""
    columns = {part: [cost[part] for cost in costs] for part in PARTS}
    columns["plan and commit"] = [cost["plan"] + cost["commit"] for cost in costs]
    columns["without sampling"] = [sum(cost.values()) - cost["sampling"] for cost in costs]
    return {
        name: {"p10": at_quantile(each, 0.1), "p50": round(statistics.median(each), 3), "p99": at_quantile(each, 0.99)}
        for name, each in columns.items()
    }


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)  # the clock is this thread's
    queued, churn = start(), start()
    gc.freeze()  # as the engine's process does
    fill(queued.scheduler, GREEDY, first=1000, count=2000)

    def replace_two(number: int) -> None:
        for request in churn.scheduler.live_requests()[:2]:
            churn.scheduler.abort(request.id)
        fill(churn.scheduler, GREEDY, first=10_000 + 2 * number, count=2)

    cases = {
        "decode": summary(measure(start())),
        "decode, drawn by top-p": summary(measure(start(DRAWN))),
        "2000 waiting": summary(measure(queued)),
        "two end and start each step": summary(measure(churn, before=replace_two)),
    }
    for name, case in cases.items():
        parts = ", ".join(f"{part} {case[part]['p50']:.2f}" for part in PARTS)
        whole = case["without sampling"]
        print(
            f"host's share of a step, {RUNNING} running, {name}: {parts}; without sampling {whole['p50']:.2f} ms "
            f"({whole['p10']:.2f} in quiet steps) = {whole['p50'] / GOALS_MS['without sampling']:.2f} of the goal"
        )
    ratios = {
        goal: {name: round(case[goal]["p50"] / most, 3) for name, case in cases.items()}
        for goal, most in GOALS_MS.items()
    }
    result = {"benchmark": "scheduler", "running": RUNNING, "goals_ms": GOALS_MS, "ms": cases, "ratio_to_goal": ratios}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
