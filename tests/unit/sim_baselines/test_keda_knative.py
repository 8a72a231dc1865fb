"""KEDA's two loops and Knative's two windows."""

from collections.abc import Callable

import pytest

from tidegate_sim.baselines.hpa import Bounds
from tidegate_sim.baselines.keda import Keda
from tidegate_sim.baselines.knative import Knative, Panic, arrivals, decide_pods
from tidegate_sim.controller import FleetView, PodView

MakePod = Callable[..., PodView]
MakeView = Callable[..., FleetView]


def test_keda_asks_for_a_replica_for_each_five_that_wait(pod: MakePod, view: MakeView) -> None:
    assert Keda(bounds=Bounds(1, 20)).decide(view([pod(waiting=9.0), pod(waiting=7.0)])).replicas == 4


def test_keda_falls_to_its_least_when_the_queue_is_empty_though_all_run(pod: MakePod, view: MakeView) -> None:
    keda = Keda(bounds=Bounds(1, 20))
    busy = [pod(waiting=0.0, running=64.0)] * 6
    assert keda.decide(view(busy)).replicas == 6
    assert keda.decide(view(busy, now=10_030.0)).replicas == 6
    assert [keda.decide(view([], now=10_000.0 + after, desired=6)).replicas for after in (299, 301)] == [6, 1]


def test_keda_goes_to_zero_after_its_cooldown_and_back_at_a_poll(pod: MakePod, view: MakeView, now: float) -> None:
    keda = Keda(bounds=Bounds(0, 20))
    idle = [pod(waiting=0.0)]
    assert keda.decide(view(idle, now=now)).replicas == 1
    stale = [pod()]
    assert keda.decide(view(stale, now=now + 300)).replicas == 1
    assert keda.decide(view(stale, now=now + 315)).replicas == 0
    # It reads the engines' queue, and there is no engine: nothing wakes it.
    assert keda.decide(view([], now=now + 330, held=50.0)).replicas == 0


@pytest.mark.parametrize(
    ("panic", "stable", "panicking", "ready", "wanted", "after"),
    [
        pytest.param(Panic(), 30, 30, 3, 3, Panic(), id="at the target"),
        pytest.param(Panic(), 35, 35, 3, 4, Panic(), id="rounded up"),
        pytest.param(Panic(), 30, 55, 3, 6, Panic(100.0, 6), id="twice the ready pods: panic, and its number"),
        pytest.param(Panic(), 30, 50, 3, 3, Panic(), id="five for three is no panic: the stable window rules"),
        pytest.param(Panic(90.0, 9), 20, 20, 9, 9, Panic(90.0, 9), id="nothing goes down in panic"),
        pytest.param(Panic(90.0, 9), 95, 20, 9, 10, Panic(90.0, 10), id="the stable window may ask for more in it"),
        pytest.param(Panic(40.0, 9), 20, 20, 9, 9, Panic(40.0, 9), id="sixty seconds are not over at sixty"),
        pytest.param(Panic(39.0, 9), 20, 20, 9, 4, Panic(), id="they are later, and a tick halves at most"),
        pytest.param(Panic(39.0, 9), 20, 200, 9, 20, Panic(100.0, 20), id="a new cause begins them anew"),
        pytest.param(Panic(), 10, 15, 0, 2, Panic(100.0, 2), id="no ready pod counts as one"),
        pytest.param(Panic(), 0, 0, 1, 0, Panic(), id="nothing to do"),
    ],
)
def test_knative_decides_by_both_windows(
    panic: Panic, stable: float, panicking: float, ready: int, wanted: int, after: Panic
) -> None:
    decided = decide_pods(panic, stable=stable, panicking=panicking, ready=ready, target=10, now=100.0)
    assert decided == (wanted, after)


def test_knative_takes_the_means_of_six_seconds_and_of_a_minute(pod: MakePod, view: MakeView, now: float) -> None:
    knative = Knative(target=10, bounds=Bounds(1, 50))
    pods = [pod()]
    seconds_in_flight, replicas = 0.0, []
    for tick in range(40):
        replicas.append(knative.decide(view(pods, now=now + 2 * tick, in_flight_seconds=seconds_in_flight)).replicas)
        seconds_in_flight += 2 * (7.0 if tick < 34 else 70.0)
    # Seven in flight is 70 % of ten, one pod. Seventy for two seconds: (4 x 7 + 2 x 70) / 6 = 28, four pods; panic.
    assert replicas[34] == 1
    assert replicas[35:38] == [4, 7, 10]
    assert replicas[39] == 10


def test_knative_begins_in_panic_with_more_than_one_pod(pod: MakePod, view: MakeView, now: float) -> None:
    knative = Knative(target=10)
    pods = [pod()] * 4
    counts = [knative.decide(view(pods, now=now + 2 * tick)).replicas for tick in range(40)]
    assert counts[1:31] == [4] * 30
    assert counts[31:33] == [2, 2]


def test_knative_counts_requests_where_it_is_told_so(pod: MakePod, view: MakeView, now: float) -> None:
    knative = Knative(target=10, counter=arrivals)
    knative.decide(view([pod()], now=now, arrivals=0))
    assert knative.decide(view([pod()], now=now + 2, arrivals=56)).replicas == 4
