"""Readings of pods and counters."""

from collections.abc import Callable

import pytest

from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.baselines import signals
from tidegate_sim.controller import PodView

MakePod = Callable[..., PodView]
READY = ReplicaPhase.READY


def test_a_rate_is_the_increase_of_all_labels_and_survives_a_reset(pod: MakePod, now: float) -> None:
    made = pod(
        READY,
        (now - 90, {("arrivals", "0"): 0.0, ("arrivals", "64"): 0.0}),
        (now - 60, {("arrivals", "0"): 10.0, ("arrivals", "64"): 20.0}),
        (now - 30, {("arrivals", "0"): 20.0, ("arrivals", "64"): 40.0}),
        (now, {("arrivals", "0"): 6.0, ("arrivals", "64"): 0.0}),
    )
    assert signals.rate(made, "arrivals", now=now, window_seconds=60) == pytest.approx((30 + 6) / 60)
    assert signals.rate(made, "arrivals", now=now, window_seconds=20) is None


def test_what_is_stale_is_unknown(pod: MakePod, now: float) -> None:
    made = pod(READY, (now - 75, {("running",): 1.0}), (now - 61, {("running",): 3.0}))
    assert signals.newest(made, "running", now=now) is None
    assert signals.rate(made, "running", now=now, window_seconds=120) is None
    assert signals.newest(made, "running", now=now - 1) == 3.0
    assert signals.newest_total([made], "running", now=now) is None


def test_levels_over_a_window(pod: MakePod, now: float) -> None:
    made = pod(READY, *[(now - 15 * n, {("waiting",): float(n)}) for n in reversed(range(6))])
    assert signals.max_level(made, "waiting", now=now, window_seconds=60) == 4.0
    assert signals.max_level(made, "running", now=now, window_seconds=60) is None


def test_a_counter_that_is_looked_at_gives_the_rate_of_any_window() -> None:
    counter = signals.WindowedCounter(60)
    counter.record(0, 0)
    assert counter.rate(60) is None
    for second in range(10, 101, 10):
        counter.record(second, 2.0 * second)
    counter.record(110, 300)
    assert counter.rate(10) == pytest.approx(10)
    assert counter.rate(5) == pytest.approx(10)
    assert counter.rate(60) == pytest.approx((300 - 100) / 60)


def test_the_mean_answer_is_that_of_those_that_ended_whatever_is_under_way(pod: MakePod, now: float) -> None:
    def stand(short: float, long: float, made: float) -> dict[tuple[str, ...], float]:
        return {("finished", "0", "64"): short, ("finished", "64", "256"): long, ("generation_tokens",): made}

    # The cells from 64 and from 256 have their middles at 128 and 512; ten of each are 6400, and so many were made.
    even = pod(READY, (now - 60, stand(0, 0, 0)), (now, stand(10, 10, 6400)))
    assert signals.mean_output_tokens([even], now=now, window_seconds=60) == pytest.approx(320)
    # Answers a quarter longer than the middles.
    longer = pod(READY, (now - 60, stand(0, 0, 0)), (now, stand(10, 10, 8000)))
    assert signals.mean_output_tokens([longer], now=now, window_seconds=60) == pytest.approx(400)
    # Only short ones ended of late.
    turned = pod(READY, (now - 60, stand(10, 10, 6400)), (now, stand(30, 10, 6400 + 20 * 128)))
    assert signals.mean_output_tokens([turned, even], now=now, window_seconds=60) == pytest.approx(
        (20 * 128 + 6400) / 40
    )
    assert signals.mean_output_tokens([pod()], now=now, window_seconds=60) is None
