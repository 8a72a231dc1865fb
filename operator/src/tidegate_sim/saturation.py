"""What one replica really carries: the engine's own scheduler and block pool in virtual time, under Poisson arrivals.

Pure; the randomness is the seed's. It is what `tidegate_operator.capacity` is held against: a latency at a rate, and
the largest rate at which the targets are met. Knows nothing of fleets, routers and controllers. Called by tests and
benches.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import StepModel, StepShape, shape_of_step
from tidegate_operator.capacity import STALL_FACTOR, STALL_SHARE, Targets

Lengths = tuple[tuple[float, int, int], ...]
"""Kinds of requests as (share, prompt tokens, output tokens)."""
GAPS_PER_DOUBLING = 24
WARM_UP_SHARE = 0.25
"""Of the requests, those that only fill the replica and are not counted."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: its speed, its KV pool, its settings."""

    step: StepModel
    kv_blocks: int
    block_tokens: int
    max_model_len: int
    settings: BatchSettings


@dataclass(frozen=True, slots=True)
class Seen:
    """What requests saw at a rate. `carried`: whether the queue came to rest."""

    ttft_p95_seconds: float
    itl_p95_seconds: float
    stall_seconds: float
    """The gap between two tokens that all but `STALL_SHARE` of them keep under."""
    queue_p95_seconds: float
    end_to_end_p95_seconds: float
    preemptions: int
    carried: bool

    def meets(self, targets: Targets) -> bool:
        pairs = (
            (self.ttft_p95_seconds, targets.ttft_seconds),
            (self.itl_p95_seconds, targets.itl_seconds),
            (self.stall_seconds / STALL_FACTOR, targets.itl_seconds),
            (self.queue_p95_seconds, targets.queue_seconds),
            (self.end_to_end_p95_seconds, targets.end_to_end_seconds),
        )
        return self.carried and all(goal is None or seen <= goal for seen, goal in pairs)


class _Gaps:
    """A histogram of inter-token gaps, fine enough for a percentile."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, seconds: float, count: int) -> None:
        cell = round(math.log2(seconds) * GAPS_PER_DOUBLING)
        self._counts[cell] = self._counts.get(cell, 0) + count

    def quantile(self, share: float) -> float:
        rank, seen = share * sum(self._counts.values()), 0
        for cell in sorted(self._counts):
            seen += self._counts[cell]
            if seen >= rank:
                return float(2 ** (cell / GAPS_PER_DOUBLING))
        return 0.0


def requests_of(lengths: Lengths, *, count: int, seed: int) -> tuple[tuple[float, int, int], ...]:
    """(gap to the one before at a rate of 1/s, prompt tokens, output tokens); the same for every rate."""
    dice = random.Random(seed)
    ends, total = [], 0.0
    for share, _, _ in lengths:
        total += share
        ends.append(total)
    rows = []
    for _ in range(count):
        _, isl, osl = lengths[min(len(lengths) - 1, bisect_right(ends, dice.random() * total))]
        rows.append((dice.expovariate(1.0), isl, osl))
    return tuple(rows)


def measure(
    replica: Replica, requests: Sequence[tuple[float, int, int]], *, rate: float, shared_tokens: int = 0
) -> Seen:
    """Serve `requests` (of `requests_of`) at `rate` requests/s until all are done.

    `shared_tokens`: so many at the beginning of the prompts are the same for all, and come from the prefix cache.
    """
    pool = BlockPool(replica.kv_blocks, replica.block_tokens, prefix_caching=shared_tokens > 0)
    scheduler = Scheduler(replica.settings, pool, max_model_len=replica.max_model_len)
    arrivals, at = [], 0.0
    for index, (gap, isl, osl) in enumerate(requests):
        at += gap / rate
        shared = min(shared_tokens, isl) // replica.block_tokens
        hashes = [f"shared {block}".encode() for block in range(shared)]
        arrivals.append(Request(str(index), isl, osl, at, block_hashes=hashes))
    first = arrivals[int(len(arrivals) * WARM_UP_SHARE)].arrival
    last = arrivals[-1].arrival
    counted = [request for request in arrivals if request.arrival >= first]
    gaps = _Gaps()
    now, upcoming, half_waiting, end_waiting = 0.0, 0, 0, 0
    while upcoming < len(arrivals) or scheduler.has_work:
        while upcoming < len(arrivals) and arrivals[upcoming].arrival <= now:
            scheduler.add(arrivals[upcoming])
            upcoming += 1
            if upcoming == len(arrivals) // 2:
                half_waiting = scheduler.waiting
            end_waiting = scheduler.waiting
        if upcoming == len(arrivals) and all(request.finished_at is not None for request in counted):
            break
        if not scheduler.has_work:
            now = arrivals[upcoming].arrival
            continue
        leap = scheduler.steps_until_event()
        if leap > 1:
            until = arrivals[upcoming].arrival if upcoming < len(arrivals) else math.inf
            now = _leap(replica.step, scheduler, gaps=gaps if first <= now <= last else None, times=(now, until))
            continue
        step = scheduler.plan(now)
        now += replica.step.seconds(shape_of_step(step))
        for event in scheduler.commit(step, None, now):
            if event[3] is not None and first <= now <= last:
                gaps.add(event[3], 1)
    ttfts = sorted((r.first_token_at or now) - r.arrival for r in counted)
    queued = sorted((r.scheduled_at or now) - r.arrival for r in counted)
    whole = sorted((r.finished_at or now) - r.arrival for r in counted)
    # A queue that holds more than the slots would take and still grows will never be served in time.
    grows = end_waiting > 2 * half_waiting + replica.settings.max_num_seqs / 2 + 20
    rank = int(0.95 * (len(counted) - 1))
    return Seen(
        ttft_p95_seconds=ttfts[rank],
        itl_p95_seconds=gaps.quantile(0.95),
        stall_seconds=gaps.quantile(1 - STALL_SHARE),
        queue_p95_seconds=queued[rank],
        end_to_end_p95_seconds=whole[rank],
        preemptions=scheduler.preemptions["kv"],
        carried=not grows,
    )


def _leap(step: StepModel, scheduler: Scheduler, *, gaps: _Gaps | None, times: tuple[float, float]) -> float:
    """Decode on unchanged up to the next event or arrival; returns the time then. The steps grow with the contexts."""
    now, until = times
    running = scheduler.running
    context = scheduler.running_context_tokens
    done, most = 0, scheduler.steps_until_event()
    while done < most and now < until:
        seconds = step.seconds(StepShape(running, context + running * (done + 1), running, 0.0, False))
        steps = min(most - done, max(1, math.ceil(min(16.0, (until - now) / seconds))))
        middle = step.seconds(StepShape(running, context + running * (done + (steps + 1) / 2), running, 0.0, False))
        now += steps * middle
        if gaps is not None:
            gaps.add(middle, steps * running)
        done += steps
    scheduler.leap(done, now)
    return now


def largest_rate(
    replica: Replica, requests: Sequence[tuple[float, int, int]], *, targets: Targets, between: tuple[float, float]
) -> float:
    """The largest rate that meets the targets, to two percent; `between`: one that surely does, one that does not."""
    low, high = between
    while high > 1.02 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if measure(replica, requests, rate=middle).meets(targets) else (low, middle)
    return math.sqrt(low * high)
