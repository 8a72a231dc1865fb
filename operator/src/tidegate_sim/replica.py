"""One engine in virtual time: the real scheduler and block pool, steps as long as a profile says, and its counts.

Runs of equal decode steps are leapt over and looked into only when something asks. Owns no pod and no clock: the fleet
calls `wake` at `wake_at`. What is counted, and when, is as in `tidegate_engine.engine`.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Protocol

from tidegate_engine.blocks import BlockPool
from tidegate_engine.request import Request, Step
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import (
    DEFAULT_PATTERNS,
    ISL_EDGES,
    ITL_BUCKETS_SECONDS,
    OSL_EDGES,
    TTFT_BUCKETS_SECONDS,
    BatchSettings,
    Pattern,
    lower_edge,
    pattern_of,
)
from tidegate_engine.steptime import Profile, StepModel, StepShape, shape_of_step
from tidegate_operator.observation import EngineInfo
from tidegate_sim.controller import BUSY_SECONDS, WORK_SECONDS

NEVER = math.inf


class Sink(Protocol):
    """Who hears what becomes of requests; at the step's end, `request.last_token_at`."""

    def first_token(self, request: Request) -> None: ...

    def ended(self, request: Request) -> None: ...


def engine_info(profile: Profile, *, max_model_len: int | None = None) -> EngineInfo:
    """What the modelled engine's `/admin/v1/info` says under this profile."""
    return EngineInfo(
        kv_blocks=profile.kv_blocks,
        block_tokens=profile.block_tokens,
        max_model_len=max_model_len or profile.max_model_len,
        kv_token_bytes=profile.kv_token_bytes,
        weight_bytes=profile.weight_bytes,
        gpu_product=profile.gpu,
        gpu_count=profile.gpus,
        version="simulated",
        step_model=profile.step,
        step_model_residual_ratio=None,
        step_model_samples=None,
    )


class Counters:
    """What an engine has counted since it started; histograms as plain counts by upper bound, the last is +Inf."""

    def __init__(self) -> None:
        self.arrived = dict.fromkeys(ISL_EDGES, 0)
        self.finished: dict[tuple[int, int], int] = {}
        self.ttft = [0] * (len(TTFT_BUCKETS_SECONDS) + 1)
        self.itl = [0] * (len(ITL_BUCKETS_SECONDS) + 1)
        self.queue = [0] * (len(TTFT_BUCKETS_SECONDS) + 1)
        self.at_the_end: dict[tuple[str, str], list[int]] = {}
        """By (term, pattern): what is counted when a request has ended, since its pattern is known only then."""
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.steps = 0
        self.busy_seconds = 0.0
        self.work_seconds = 0.0


class Replica:
    """Invariant: nothing happens to the scheduler between now and `wake_at`, except through the methods here.

    Either a planned step is in flight until `wake_at`, or a run of `_run_steps` equal decode steps is, or nothing is
    and `wake_at` is when to look for work (`NEVER` while there is none).
    """

    def __init__(
        self,
        profile: Profile,
        settings: BatchSettings,
        sink: Sink,
        *,
        max_model_len: int | None = None,
        patterns: Sequence[Pattern] = DEFAULT_PATTERNS,
        leaps: bool = True,
    ) -> None:
        self.wake_at = NEVER
        self._patterns = patterns
        self.counters = Counters()
        self.scheduler = Scheduler(
            settings,
            BlockPool(profile.kv_blocks, profile.block_tokens),
            max_model_len=max_model_len or profile.max_model_len,
        )
        self._model = profile.step
        self._told_model: dict[tuple[str, ...], float] = {
            ("step_model", name): value for name, value in profile.step.as_dict().items()
        }
        self._sink = sink
        self._leaps = leaps
        self._step: Step | None = None
        self._step_began = 0.0
        self._run_began = 0.0
        self._run_steps = 0
        self._first_seconds = 0.0
        """Of the run's next step."""
        self._growth_seconds = 0.0
        """By which each step of a run is longer than the one before."""
        self._settings = settings

    # --- what happens to it

    def add(self, request: Request, now: float) -> None:
        """Queue `request`, which joins the next step; raises RequestRefused."""
        self._cut_run(now)
        self.scheduler.add(request)
        self.counters.arrived[lower_edge(request.prompt_tokens, ISL_EDGES)] += 1
        if self.wake_at == NEVER:
            self.wake_at = now

    def abort(self, request: Request, now: float) -> None:
        """Forget a request, whose client has gone."""
        self._cut_run(now)
        if self.scheduler.abort(request.id, now=now) is not None:
            self._count_end(request, now)

    def apply(self, settings: BatchSettings, now: float) -> None:
        """Use `settings` from the next step on."""
        self._cut_run(now)
        self.scheduler.apply(settings)
        self._settings = settings

    def requests(self) -> list[Request]:
        return self.scheduler.live_requests()

    def wake(self) -> None:
        """It is `wake_at`: end what was in flight and begin what follows."""
        now = self.wake_at
        if self._step is not None:
            self._commit(now)
        elif self._run_steps:
            self._advance_run(self._run_steps, ends_at=now)
        self._begin(now)

    # --- what is the case

    def look(self, now: float) -> dict[tuple[str, ...], float]:
        """What a scrape at `now` reads, by the keys of `demand.TERMS`. Cells that never counted are left out.

        The step model is the profile's, as the modelled engine says of itself; how far its fit is off is not known.
        """
        if self._run_steps:
            self._advance_run(self._steps_done(now))
        scheduler, pool, counters = self.scheduler, self.scheduler.blocks, self.counters
        began = self._step_began if self._step is not None else self._run_began
        under_way = now - began if self._step is not None or self._run_steps else 0.0
        values: dict[tuple[str, ...], float] = dict(zip(_ARRIVALS, counters.arrived.values(), strict=True))
        for cell, count in counters.finished.items():
            values[_FINISHED[cell]] = count
        values.update(zip(_TTFT, accumulate(counters.ttft), strict=True))
        values.update(zip(_ITL, accumulate(counters.itl), strict=True))
        values.update(zip(_QUEUE, accumulate(counters.queue), strict=True))
        for (term, pattern), counts in counters.at_the_end.items():
            values.update(zip(_at_the_end(term, pattern), accumulate(counts), strict=True))
        values.update(zip(_OUTPUT, scheduler.running_output_past_edges.values(), strict=True))
        values[_PROMPT] = counters.prompt_tokens
        values[_CACHED] = counters.cached_prompt_tokens
        values[_GENERATED] = counters.generation_tokens
        values[_PREEMPTIONS] = sum(scheduler.preemptions.values())
        values[_RUNNING] = scheduler.running
        values[_WAITING] = scheduler.waiting
        values[_WAITING_TOKENS] = scheduler.waiting_prompt_tokens
        values[_CONTEXT_TOKENS] = scheduler.running_context_tokens
        values[_KV_USED] = pool.used
        values[_KV_CACHED] = pool.cached
        values[_KV_FREE] = pool.free
        values.update(self._told_model)
        values[_MODEL_SAMPLES] = counters.steps
        values[BUSY_SECONDS] = counters.busy_seconds + under_way
        values[WORK_SECONDS] = counters.work_seconds
        return values

    @property
    def preemptions(self) -> int:
        return sum(self.scheduler.preemptions.values())

    # --- how

    def _begin(self, now: float) -> None:
        scheduler, model = self.scheduler, self._model
        if not scheduler.has_work:
            self.wake_at = NEVER
            return
        steps = scheduler.steps_until_event() if self._leaps else 0
        if steps > 1:
            running = scheduler.running
            context = scheduler.running_context_tokens + running
            first = model.seconds(StepShape(running, context, running, 0.0, False))
            growth = model.seconds(StepShape(running, context + running, running, 0.0, False)) - first
            self._run_began, self._run_steps = now, steps
            self._first_seconds, self._growth_seconds = first, growth
            self.wake_at = now + _sum_of_run(first, growth, steps)
            return
        step = scheduler.plan(now)
        if step.is_empty:
            self.wake_at = NEVER
            return
        self._step, self._step_began = step, now
        self.wake_at = now + model.seconds(shape_of_step(step))

    def _commit(self, now: float) -> None:
        step, self._step = self._step, None
        assert step is not None
        counters = self.counters
        booked = self.scheduler.commit(step, None, now)
        counters.steps += 1
        counters.generation_tokens += len(booked)
        sequences = len(step.decodes) + len(step.chunks)
        self._count_busy(now - self._step_began, steps=1, sequences=sequences, tokens=step.tokens)
        self._count_waits(booked.continued.intervals_seconds)
        for request, _, reason, interval in booked.events:
            if interval is None:
                self._count_first_token(request, now)
                self._sink.first_token(request)
            else:
                self._count_waits([interval])
            if reason is not None:
                self._count_end(request, now)
                self._sink.ended(request)

    def _count_waits(self, seconds: list[float]) -> None:
        """Of requests between two tokens. Most of a step waited alike."""
        itl = self.counters.itl
        while seconds:
            usual = seconds[0]
            times = seconds.count(usual)
            itl[bisect_left(ITL_BUCKETS_SECONDS, usual)] += times
            seconds = [] if times == len(seconds) else [each for each in seconds if each != usual]

    def _count_first_token(self, request: Request, now: float) -> None:
        counters = self.counters
        counters.prompt_tokens += request.prompt_tokens
        counters.cached_prompt_tokens += request.num_cached
        counters.ttft[bisect_left(TTFT_BUCKETS_SECONDS, now - request.arrival)] += 1
        if request.scheduled_at is not None:
            counters.queue[bisect_left(TTFT_BUCKETS_SECONDS, request.scheduled_at - request.arrival)] += 1

    def _count_end(self, request: Request, now: float) -> None:
        isl, osl, counters = request.prompt_tokens, request.output_tokens, self.counters
        cell = lower_edge(isl, ISL_EDGES), lower_edge(osl, OSL_EDGES)
        counters.finished[cell] = counters.finished.get(cell, 0) + 1
        pattern, first, last = pattern_of(isl, osl, self._patterns), request.first_token_at, request.last_token_at
        figures = {"end_to_end": now - request.arrival}
        if first is not None:
            figures["finished_ttft"] = first - request.arrival
            if last is not None and osl > 1:
                figures["finished_itl"] = (last - first) / (osl - 1)
        for term, seconds in figures.items():
            bounds = _BOUNDS_AT_THE_END[term]
            counts = counters.at_the_end.get((term, pattern))
            if counts is None:
                counts = counters.at_the_end[term, pattern] = [0] * (len(bounds) + 1)
            counts[bisect_left(bounds, seconds)] += 1

    def _count_busy(self, seconds: float, *, steps: int, sequences: int, tokens: float) -> None:
        """A step's work is as much of its time as the largest of its shares of seats, tokens and blocks."""
        counters, settings, pool = self.counters, self._settings, self.scheduler.blocks
        counters.busy_seconds += seconds
        share = max(
            sequences / settings.max_num_seqs, tokens / settings.max_num_batched_tokens, pool.used / pool.usable
        )
        counters.work_seconds += seconds * min(1.0, share)

    # --- runs of equal steps

    def _steps_done(self, now: float) -> int:
        """Steps of the run that ended before `now`."""
        first, growth, steps = self._first_seconds, self._growth_seconds, self._run_steps
        elapsed = now - self._run_began
        if growth > 0:
            # first·n + growth·n(n−1)/2 = elapsed
            half = first - growth / 2
            guess = int((math.sqrt(half * half + 2 * growth * max(0.0, elapsed)) - half) / growth)
        else:
            guess = int(elapsed / first)
        done = max(0, min(guess, steps))
        while done < steps and _sum_of_run(first, growth, done + 1) < elapsed:
            done += 1
        while done > 0 and _sum_of_run(first, growth, done) >= elapsed:
            done -= 1
        return done

    def _advance_run(self, steps: int, *, ends_at: float | None = None) -> None:
        """Do the first `steps` steps of the run."""
        if not steps:
            return
        first, growth, running = self._first_seconds, self._growth_seconds, self.scheduler.running
        seconds = _sum_of_run(first, growth, steps)
        ended_at = self._run_began + seconds if ends_at is None else ends_at
        self.scheduler.leap(steps, ended_at)
        self.counters.steps += steps
        self.counters.generation_tokens += steps * running
        self._count_busy(seconds, steps=steps, sequences=running, tokens=running)
        self._count_gaps(steps, running)
        self._run_began = ended_at
        self._run_steps -= steps
        self._first_seconds = first + growth * steps

    def _count_gaps(self, steps: int, running: int) -> None:
        """Each running request waited for each step of the run; steps grow, so a bucket has consecutive ones."""
        first, growth, itl = self._first_seconds, self._growth_seconds, self.counters.itl
        begin = 0
        while begin < steps:
            bucket = bisect_left(ITL_BUCKETS_SECONDS, first + growth * begin)
            end = steps
            if growth > 0 and bucket < len(ITL_BUCKETS_SECONDS):
                end = min(steps, max(begin + 1, int((ITL_BUCKETS_SECONDS[bucket] - first) / growth) + 1))
            itl[bucket] += (end - begin) * running
            begin = end

    def _cut_run(self, now: float) -> None:
        """A run ends with the step that is computed at `now`, since what follows may differ."""
        if not self._run_steps:
            return
        self._advance_run(min(self._run_steps, self._steps_done(now) + 1))
        self._run_steps = 0
        self.wake_at = self._run_began


def _sum_of_run(first: float, growth: float, steps: int) -> float:
    """Seconds of so many steps, each longer than the one before by `growth`."""
    return first * steps + growth * (steps * (steps - 1) // 2)


def unloaded_ttft_seconds(model: StepModel, isl: int, *, chunk_tokens: int) -> float:
    """Time to the first token of a request that is alone, its prompt computed in chunks."""
    seconds, start = 0.0, 0
    while start < isl:
        count = min(chunk_tokens, isl - start)
        # A chunk of one token that ends the prompt is a decode.
        is_prefill = count > 1 or start + count < isl
        attention = count * (start + count / 2) if is_prefill else 0.0
        context = 0 if is_prefill else start + count
        seconds += model.seconds(StepShape(count, context, 1, attention, is_prefill))
        start += count
    return seconds


def _buckets(name: str, bounds: Iterable[float]) -> tuple[tuple[str, str], ...]:
    return tuple((name, repr(float(bound))) for bound in (*bounds, math.inf))


@cache
def _at_the_end(term: str, pattern: str) -> tuple[tuple[str, str, str], ...]:
    return tuple((term, pattern, bound) for _, bound in _buckets(term, _BOUNDS_AT_THE_END[term]))


_BOUNDS_AT_THE_END = {
    "end_to_end": TTFT_BUCKETS_SECONDS,
    "finished_ttft": TTFT_BUCKETS_SECONDS,
    "finished_itl": ITL_BUCKETS_SECONDS,
}
_ARRIVALS = tuple(("arrivals", str(edge)) for edge in ISL_EDGES)
_FINISHED = {(isl, osl): ("finished", str(isl), str(osl)) for isl in ISL_EDGES for osl in OSL_EDGES}
_TTFT = _buckets("ttft", TTFT_BUCKETS_SECONDS)
_ITL = _buckets("itl", ITL_BUCKETS_SECONDS)
_QUEUE = _buckets("queue", TTFT_BUCKETS_SECONDS)
_OUTPUT = tuple(("running_output", str(edge)) for edge in OSL_EDGES)
_PROMPT = ("prompt_tokens",)
_CACHED = ("cached_prompt_tokens",)
_GENERATED = ("generation_tokens",)
_PREEMPTIONS = ("preemptions",)
_RUNNING = ("running",)
_WAITING = ("waiting",)
_WAITING_TOKENS = ("waiting_prompt_tokens",)
_CONTEXT_TOKENS = ("running_context_tokens",)
_MODEL_SAMPLES = ("step_model_samples", "")
_KV_USED = ("kv_blocks", "used")
_KV_CACHED = ("kv_blocks", "cached")
_KV_FREE = ("kv_blocks", "free")
