"""CPU time of the scheduler: plan + commit with 256 running sequences, beside the goal of 1.5 ms.

Run as a script: one line to read, one JSON line. Nothing is computed between plan and commit.
"""

import json
import statistics
from collections.abc import Callable
from time import thread_time

from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request, SampledToken
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings

GOAL_MS = 1.5
RUNNING = 256
STEPS = 400
PROMPT_TOKENS = 1024


def fill(scheduler: Scheduler, *, first: int, count: int, max_tokens: int = 4096) -> None:
    """Queue `count` requests that share the first half of their prompts."""
    head = list(range(PROMPT_TOKENS // 2))
    for number in range(first, first + count):
        ids = head + [number] * (PROMPT_TOKENS - len(head))
        scheduler.add(Request(f"r{number}", len(ids), max_tokens, arrival=float(number), prompt_ids=ids))


def measure(scheduler: Scheduler, steps: int, *, before: Callable[[int], None] = lambda _: None) -> list[float]:
    """CPU milliseconds of plan + commit, for each step; `before` runs outside the clock."""
    token = SampledToken(7)
    times = []
    for number in range(steps):
        before(number)
        start = thread_time()
        step = scheduler.plan(float(number))
        planned = thread_time()
        tokens = {item.request.id: token for item in step.items if item.samples}
        committing = thread_time()
        scheduler.commit(step, tokens, float(number))
        times.append(1000 * (planned - start + thread_time() - committing))
    return times


def start(kv_blocks: int) -> Scheduler:
    """A scheduler whose 256 sequences all decode."""
    settings = BatchSettings(max_num_seqs=RUNNING, max_num_batched_tokens=8192, long_prefill_token_threshold=2048)
    scheduler = Scheduler(settings, BlockPool(kv_blocks, 16), max_model_len=8192)
    fill(scheduler, first=0, count=RUNNING)
    while scheduler.running < RUNNING or scheduler.running_context_tokens < RUNNING * PROMPT_TOKENS:
        measure(scheduler, 1)
    return scheduler


def main() -> None:
    steady = measure(start(kv_blocks=60_000), STEPS)

    queued = start(kv_blocks=60_000)
    fill(queued, first=1000, count=2000)
    with_queue = measure(queued, STEPS)

    churn = start(kv_blocks=60_000)

    def replace_two(number: int) -> None:
        for request in churn.live_requests()[:2]:
            churn.abort(request.id)
        fill(churn, first=10_000 + 2 * number, count=2)

    with_churn = measure(churn, STEPS, before=replace_two)

    result = {
        "benchmark": "scheduler",
        "running": RUNNING,
        "goal_ms": GOAL_MS,
        "plan_commit_ms": {
            name: {"p50": round(statistics.median(times), 3), "p99": round(sorted(times)[int(0.99 * len(times))], 3)}
            for name, times in [
                ("decode", steady),
                ("2000 waiting", with_queue),
                ("two end and start each step", with_churn),
            ]
        },
    }
    medians = {name: times["p50"] for name, times in result["plan_commit_ms"].items()}  # type: ignore[attr-defined]
    result["ratio_to_goal"] = {name: round(median / GOAL_MS, 3) for name, median in medians.items()}
    for name, median in medians.items():
        print(f"scheduler plan+commit, {RUNNING} running, {name}: {median:.2f} ms = {median / GOAL_MS:.2f} of the goal")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
