"""One replica in virtual time: it schedules as the modelled engine does, and counts as the engine's metrics do."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidegate_engine.blocks import BlockPool
from tidegate_engine.metrics import EngineMetrics, FinishedRequest, Snapshot, isl_cell, render
from tidegate_engine.modelled_runner import ModelledRunner, model_info
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import DEFAULT_PATTERNS, ITL_BUCKETS_SECONDS, BatchSettings
from tidegate_engine.steptime import Profile, StepModel, load_profile
from tidegate_operator.demand import RATE_TERMS, TERMS, parse_exposition
from tidegate_sim.replica import NEVER, Replica, unloaded_ttft_seconds

H100 = load_profile("h100-llama-3.1-8b")
SMALL = replace(H100, kv_blocks=300, max_model_len=2048)
SETTINGS = BatchSettings(max_num_seqs=12, max_num_batched_tokens=512, long_prefill_token_threshold=256)

Sized = tuple[float, int, int]
"""Arrival, prompt and answer."""


class Told:
    """Remembers when requests began and ended."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.end: dict[str, float] = {}
        self.requests: list[Request] = []

    def first_token(self, request: Request) -> None:
        self.first[request.id] = request.first_token_at or 0.0

    def ended(self, request: Request) -> None:
        self.end[request.id] = request.finished_at or 0.0
        self.requests.append(request)


def served_by_replica(arrivals: Sequence[Sized], *, leaps: bool = True) -> tuple[Told, Replica]:
    told = Told()
    replica = Replica(SMALL, SETTINGS, told, leaps=leaps)
    for number, (at, isl, osl) in enumerate(arrivals):
        while replica.wake_at < at:
            replica.wake()
        # Unique ones: an engine finds what a preempted request had computed before, as long as nobody took it.
        own = [f"{number}.{place}".encode() for place in range((isl + osl) // SMALL.block_tokens)]
        replica.add(Request(f"r{number}", isl, osl, at, block_hashes=own), at)
    while replica.wake_at != NEVER:
        replica.wake()
    return told, replica


def served_by_engine(arrivals: Sequence[Sized]) -> tuple[Told, EngineMetrics, Scheduler]:
    """The engine's loop with the modelled runner on a clock that stands until somebody sleeps; with token ids."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    info = model_info(SMALL, block_tokens=16, kv_blocks=SMALL.kv_blocks, max_model_len=SMALL.max_model_len)
    runner = ModelledRunner(SMALL, info, clock=lambda: now, sleep=sleep)
    scheduler = Scheduler(SETTINGS, BlockPool(info.group_blocks, 16), max_model_len=SMALL.max_model_len)
    metrics, told, ids = EngineMetrics(DEFAULT_PATTERNS), Told(), Random(1)
    waiting = list(enumerate(arrivals))
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            runner.rest()
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now:
            number, (at, isl, osl) = waiting.pop(0)
            prompt = [ids.randrange(1 << 40) for _ in range(isl)]
            scheduler.add(Request(f"r{number}", isl, osl, at, prompt_ids=prompt, params=SamplingParams()))
            metrics.counts.arrived[isl_cell(isl)] += 1
        step = scheduler.plan(now)
        for request, token, reason, interval in scheduler.commit(step, runner.run(step), now):
            metrics.counts.generation_tokens += token is not None
            if interval is None:
                told.first_token(request)
                metrics.counts.prompt_tokens += request.prompt_tokens
                queued, cell = (request.scheduled_at or 0.0) - request.arrival, isl_cell(request.prompt_tokens)
                metrics.first_token(cell, ttft_seconds=now - request.arrival, queue_seconds=queued)
            else:
                metrics.counts.itl[isl_cell(request.prompt_tokens)].observe(interval)
            if reason is not None:
                told.ended(request)
                osl, first = request.output_tokens, request.first_token_at or 0.0
                itl = (now - first) / (osl - 1) if osl > 1 else None
                metrics.finished(
                    FinishedRequest(
                        request.prompt_tokens, osl, reason, now - request.arrival, first - request.arrival, itl
                    )
                )
    return told, metrics, scheduler


def arrivals_of(seed: int, count: int) -> list[Sized]:
    dice, at, found = Random(seed), 0.0, []
    for _ in range(count):
        at += dice.expovariate(25.0) if dice.random() < 0.9 else 2.0
        found.append((at, dice.randint(1, 900), dice.randint(1, 120)))
    return found


@pytest.mark.prove
@hypothesis_settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 40))
def test_it_schedules_as_the_modelled_engine_does(seed: int, count: int) -> None:
    arrivals = arrivals_of(seed, count)
    real, _, scheduler = served_by_engine(arrivals)
    told, replica = served_by_replica(arrivals)
    assert list(told.first) == list(real.first), "requests begin in the same order"
    assert list(told.end) == list(real.end)
    for mine, theirs in ((told.first, real.first), (told.end, real.end)):
        assert mine == pytest.approx(theirs, abs=1e-6)
    assert replica.scheduler.preemptions == scheduler.preemptions
    assert replica.counters.steps == scheduler.step_id == replica.scheduler.step_id


def test_what_is_scraped_is_what_the_engine_shows() -> None:
    arrivals = arrivals_of(3, 60)
    _, metrics, scheduler = served_by_engine(arrivals)
    told, replica = served_by_replica(arrivals)
    pool = scheduler.blocks
    snapshot = Snapshot(
        running=0,
        waiting=0,
        waiting_prompt_tokens=0,
        running_context_tokens=0,
        running_output_past_edges=scheduler.running_output_past_edges,
        kv_used=pool.used,
        kv_cached=pool.cached,
        kv_free=pool.free,
        preemptions=scheduler.preemptions,
        spec=SETTINGS,
        effective=SETTINGS,
        capacity=SETTINGS,
        settings_generation=1,
        step_model=SMALL.step,
        step_model_residual_ratio=None,
        step_model_samples=scheduler.step_id,
        memory_bytes={},
        start_seconds={},
    )
    page = render(metrics.counts, snapshot, model_name="m", block_tokens=16).decode()
    shown = {key: value for key, value in parse_exposition(page, 0.0).values.items() if key[0] in KNOWN}
    mine = {key: value for key, value in replica.look(1e9).items() if key[0] in KNOWN}
    assert len(told.requests) == 60
    assert {key: value for key, value in shown.items() if key not in mine and value} == {}
    assert mine == {key: shown[key] for key in mine}


KNOWN = {term.name for term in TERMS} - {"step_model_residual_ratio"}


def test_every_rate_and_level_that_the_operator_reads_is_there() -> None:
    _, replica = served_by_replica([(0.0, 100, 5)])
    assert {key[0] for key in replica.look(10.0)} >= KNOWN
    assert RATE_TERMS <= KNOWN


@pytest.mark.parametrize("growth", [0.0, 1e-6, 1e-3])
def test_steps_of_a_run_are_looked_into_at_any_moment(growth: float) -> None:
    profile = replace(H100, step=StepModel(0.0100017, 0.0, 0.0, growth, 0.0, 0.0, 0.0))
    told = Told()
    leaping = Replica(profile, SETTINGS, told)
    stepping = Replica(profile, SETTINGS, Told(), leaps=False)
    for replica in (leaping, stepping):
        replica.add(Request("a", 20, 300, 0.0), 0.0)
    at = 0.0
    while leaping.wake_at != NEVER:
        at += 0.0137
        for replica in (leaping, stepping):
            while replica.wake_at < at:
                replica.wake()
        seen, wanted = leaping.look(at), stepping.look(at)
        # A step that is computed counts its token's position, as planned or not: one apart at most.
        assert abs(seen.pop(("running_context_tokens",)) - wanted.pop(("running_context_tokens",))) <= 1
        for name in (("kv_blocks", "used"), ("kv_blocks", "free")):
            assert abs(seen.pop(name) - wanted.pop(name)) <= 1
        assert seen == pytest.approx(wanted)


def test_new_settings_hold_from_the_next_step_on() -> None:
    told = Told()
    replica = Replica(H100, BatchSettings(1, 512, 256), told)
    for number in range(2):
        replica.add(Request(f"r{number}", 50, 200, 0.0), 0.0)
    while replica.wake_at < 0.5:
        replica.wake()
    replica.apply(BatchSettings(2, 512, 256), 0.5)
    while replica.wake_at != NEVER:
        replica.wake()
    assert 0.5 < told.first["r1"] < 0.6


def test_gaps_fall_into_the_buckets_of_their_steps() -> None:
    profile = replace(H100, step=StepModel(0.0075013, 0.0, 0.0, 1e-5, 0.0, 0.0, 0.0))
    _, leaping = _alone(profile, leaps=True)
    _, stepping = _alone(profile, leaps=False)
    assert leaping.counters.itl == stepping.counters.itl
    assert leaping.counters.itl[bisect_left(ITL_BUCKETS_SECONDS, 0.0076)] > 0
    assert sum(leaping.counters.itl) == 399


def _alone(profile: Profile, *, leaps: bool) -> tuple[Told, Replica]:
    told = Told()
    replica = Replica(profile, SETTINGS, told, leaps=leaps)
    replica.add(Request("a", 5, 400, 0.0), 0.0)
    while replica.wake_at != NEVER:
        replica.wake()
    return told, replica


@pytest.mark.parametrize("isl", [1, 16, 256, 257, 1000])
def test_an_idle_replica_answers_in_the_unloaded_time(isl: int) -> None:
    told, _ = served_by_replica([(1.0, isl, 3)])
    chunk = SETTINGS.long_prefill_token_threshold
    assert told.first["r0"] - 1.0 == pytest.approx(unloaded_ttft_seconds(SMALL.step, isl, chunk_tokens=chunk))
    assert math.isfinite(told.end["r0"])
