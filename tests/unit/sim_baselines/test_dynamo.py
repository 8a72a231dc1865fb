"""Dynamo's planner: its forecasts, its divisions, and its steps of one."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.baselines.dynamo import (
    Correction,
    Dynamo,
    EngineLoad,
    Traffic,
    bucket_mean,
    engine_rate,
    replicas_by_load,
    replicas_by_throughput,
    replicas_with_corrections,
)
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.predictors import Constant, Kalman
from tidegate_sim.controller import FleetView, PodView

MakePod = Callable[..., PodView]
MakeView = Callable[..., FleetView]


def test_the_filter_moves_as_by_hand() -> None:
    kalman = Kalman()
    kalman.add(0)
    assert kalman.predict() == 0.0
    kalman.add(100)
    assert kalman.predict() == 100.0
    kalman.add(110)
    # Before the second value: P = (1000 + 1000 + 1, 1000, 1000.1), so the gains are 2001/2011 and 1000/2011.
    level, trend = 100 + 2001 / 2011 * 10, 1000 / 2011 * 10
    assert kalman.predict() == pytest.approx(level + trend)
    assert kalman.predict() == pytest.approx(level + trend), "asking twice does not move it"
    p = (1 - 2001 / 2011) * 2001, (1 - 2001 / 2011) * 1000, 1000.1 - 1000 / 2011 * 1000
    ahead = p[0] + 2 * p[1] + p[2] + 1
    kalman.add(120)
    gains = ahead / (ahead + 10), (p[1] + p[2]) / (ahead + 10)
    error = 120 - (level + trend)
    assert kalman.predict() == pytest.approx(level + trend + gains[0] * error + trend + gains[1] * error)


@given(start=st.floats(1, 1e5), slope=st.floats(-10, 10))
def test_the_filter_learns_a_line(start: float, slope: float) -> None:
    kalman = Kalman()
    for step in range(60):
        kalman.add(start + 1000 + slope * step)
    assert kalman.predict() == pytest.approx(start + 1000 + slope * 60, rel=0.02)


def test_what_is_no_number_counts_as_nothing() -> None:
    for predictor in (Constant(), Kalman()):
        predictor.add(math.nan)
        assert predictor.predict() == 0.0
    constant = Constant()
    constant.add(5)
    constant.add(math.inf)
    assert constant.predict() == 0.0


def test_an_engines_rate_is_its_largest_batch_over_its_time(plant: Plant) -> None:
    # ISL 100, OSL 100: a step of x decodes and x prompt tokens takes 10 + 0.2 x ms, within 50 ms to 200; 64 slots.
    # At 64: 22.8 ms a step; 64 / (100 x 0.0228).
    assert engine_rate(plant, isl=100, osl=100) == pytest.approx(64 / 2.28)
    tight = replace(plant, itl_seconds=0.0141)
    # Within 14.1 ms: 20 decodes.
    assert engine_rate(tight, isl=100, osl=100) == pytest.approx(20 / (100 * 0.014))
    # Unreachable: one at a time.
    assert engine_rate(replace(plant, itl_seconds=0.001), isl=100, osl=100) == pytest.approx(1 / (100 * 0.0102))
    assert engine_rate(plant, isl=0, osl=100) == 0.0


def test_the_first_token_bounds_the_batch_too(plant: Plant) -> None:
    # ISL 2000, OSL 100: x decodes beside 20 x prompt tokens; a prompt's 2000 more tokens take 2 or 3 steps of 1000.
    slow = replace(plant, ttft_seconds=0.24)
    # x = 5: 2100 tokens: 2 x (10 + 100.5) + 10 + 10.5 = 241.5 ms; x = 4: 2080: 2 x 110.4 + 18.4 = 239.2.
    assert engine_rate(slow, isl=2000, osl=100) == pytest.approx(4 / (100 * (0.01 + 0.0084)))


def test_the_throughput_is_a_division(plant: Plant) -> None:
    assert replicas_by_throughput(plant, Traffic(100, 100, 100)) == math.ceil(100 / (64 / 2.28))
    assert replicas_by_throughput(plant, Traffic(0, 100, 100)) == 1
    assert replicas_by_throughput(plant, Traffic(10, 0, 0)) is None


def test_the_older_formulation_corrects_its_profile(plant: Plant) -> None:
    # Prefill: 100 tokens in 20 ms, 5000/s. Decode: 64 in 16.4 ms, 3902/s.
    traffic = Traffic(100, 100, 100)
    assert replicas_with_corrections(plant, traffic, Correction()) == math.ceil(2 + 10_000 / (64 / 0.0164))
    # Prompts seen twice as fast as the profile says, and steps four times as slow: 12.5 ms, 25 decodes.
    corrected = replicas_with_corrections(plant, traffic, Correction(prefill=0.5, decode=4.0))
    assert corrected == math.ceil(1 + 10_000 / (25 / 0.0125))
    # Prompts that take longer, as they queue, do not count as more work.
    assert replicas_with_corrections(plant, traffic, Correction(prefill=9.0)) == 5


IDLE = EngineLoad(queued_prefill=0, decoding=1, decode_kv=100, prefill_per_step=10)


def test_the_load_moves_by_one_when_all_engines_agree(plant: Plant) -> None:
    queued = replace(IDLE, queued_prefill=5000)
    # 5100 tokens: five steps of 110.1 ms and one of 20.1: above half a second.
    assert replicas_by_load(plant, [queued, queued], isl=100) == 3
    assert replicas_by_load(plant, [queued, IDLE], isl=100) == 2, "one of them is no reason, and a reason to stay"
    assert replicas_by_load(plant, [IDLE, IDLE], isl=100) == 1
    assert replicas_by_load(plant, [IDLE], isl=100) == 1
    full = replace(IDLE, decode_kv=51_000)
    assert replicas_by_load(plant, [full, full], isl=100) == 2, "one cache would not hold both"


def test_the_load_does_not_undo_its_own_step(plant: Plant) -> None:
    # 300 decodes of 0.1 ms each: 40 ms and more with twice as many, above 80 % of 50 ms.
    busy = replace(IDLE, decoding=160)
    assert replicas_by_load(plant, [busy, busy], isl=100) == 2
    assert replicas_by_load(plant, [replace(busy, decoding=140)] * 2, isl=100) == 1


def counted(stand: float, waiting: float = 0.0) -> dict[tuple[str, ...], float]:
    """An engine that has served `stand` requests of 100 tokens in and out."""
    return {
        ("arrivals", "64"): stand,
        ("finished", "64", "64"): stand,
        ("prompt_tokens",): 100 * stand,
        ("generation_tokens",): 100 * stand,
        ("waiting_prompt_tokens",): waiting,
        ("running",): 1.0,
        ("running_context_tokens",): 100.0,
    }


def test_the_planner_looks_back_over_its_interval(pod: MakePod, view: MakeView, now: float, plant: Plant) -> None:
    planner = Dynamo(plant)
    assert planner.period_seconds == 180
    serving = pod(ReplicaPhase.READY, (now, counted(0)), (now + 90, counted(9000)), (now + 180, counted(18_000)))
    assert planner.decide(view([serving], arrivals=0)).replicas == 1
    # 100 requests/s need four.
    assert planner.decide(view([serving], now=now + 180, arrivals=18_000)).replicas == 4
    starting = [serving, pod(ReplicaPhase.LOADING)]
    assert planner.decide(view(starting, now=now + 360, arrivals=18_000)).reason == "NotReady"


def test_the_throughput_is_the_loads_floor(pod: MakePod, view: MakeView, now: float, plant: Plant) -> None:
    planner = Dynamo(plant, load=True)
    assert planner.period_seconds == 5

    def at(after: float, count: int, waiting: float = 0.0) -> int:
        samples = [(now + after - 60, counted(18_000 - 6000)), (now + after, counted(18_000, waiting))]
        serving = [pod(ReplicaPhase.READY, *samples)] * count
        return planner.decide(view(serving, now=now + after, arrivals=100 * after)).replicas

    assert at(0, 6) == 5, "nothing is queued"
    assert at(180, 5) == 4
    assert at(185, 4) == 4, "the throughput's four are the floor"
    assert at(190, 4, waiting=9000) == 5


def test_the_mean_of_a_histogram_is_that_of_its_buckets_middles(pod: MakePod, now: float) -> None:
    before = {("itl", "0.01"): 5.0, ("itl", "0.02"): 5.0, ("itl", "inf"): 5.0}
    after = {("itl", "0.01"): 15.0, ("itl", "0.02"): 35.0, ("itl", "inf"): 35.0}
    seen = pod(ReplicaPhase.READY, (now - 60, before), (now, after))
    # Ten at 5 ms, twenty at 15 ms.
    assert bucket_mean([seen], "itl", now=now, window_seconds=60) == pytest.approx((10 * 0.005 + 20 * 0.015) / 30)
    assert bucket_mean([seen], "ttft", now=now, window_seconds=60) is None


def test_a_planner_without_a_mode_is_refused(plant: Plant) -> None:
    with pytest.raises(ValueError, match="by throughput, by load, or by both"):
        Dynamo(plant, throughput=False)
