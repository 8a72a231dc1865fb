"""The HPA's arithmetic and memory, against sums done by hand after the controller's source and documentation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.baselines.hpa import (
    Bounds,
    ExternalMetric,
    Hpa,
    PodReadings,
    RequestsPerSecond,
    concurrency_per_pod,
    duty_cycle,
    propose,
    replicas_by_average,
    replicas_by_pods,
    waiting_per_pod,
    work_utilisation,
)
from tidegate_sim.controller import FleetView, PodView

MakePod = Callable[..., PodView]
MakeView = Callable[..., FleetView]
Phase = ReplicaPhase


@pytest.mark.parametrize(
    ("readings", "current", "target", "wanted"),
    [
        pytest.param(PodReadings((30.0, 50.0, 70.0)), 3, 30, 5, id="150 over three pods of 30: five"),
        pytest.param(PodReadings((33.0, 33.0)), 2, 30, 2, id="a tenth above is within tolerance"),
        pytest.param(PodReadings((33.1, 33.1)), 2, 30, 3, id="a little more is not"),
        pytest.param(PodReadings((27.0, 27.0)), 2, 30, 2, id="nor is a tenth below"),
        pytest.param(PodReadings((10.0, 10.0, 10.0)), 3, 30, 1, id="a third of the load"),
        pytest.param(PodReadings((60.0, 60.0), pending=1), 3, 30, 4, id="up, a pending pod is idle: 120 / 3 / 30 x 3"),
        pytest.param(PodReadings((60.0,), pending=3), 4, 30, 4, id="up that turns to down with the pending: hold"),
        pytest.param(PodReadings((10.0, 10.0), pending=4), 6, 30, 1, id="down, pending pods are not there"),
        pytest.param(PodReadings((15.0, 15.0), missing=2), 4, 30, 3, id="down, pods without it are at the target"),
        pytest.param(PodReadings((60.0, 60.0), missing=2), 4, 30, 4, id="up, pods without it are idle: all in all 1.0"),
        pytest.param(PodReadings((90.0, 90.0), missing=2), 4, 30, 6, id="up all the same: 180 / 4 / 30 x 4"),
        pytest.param(PodReadings((36.0, 36.0), missing=2), 4, 30, 4, id="up that turns to down: hold"),
        pytest.param(PodReadings((90.0,), pending=1), 5, 30, 5, id="up, but to fewer than there are: hold"),
        pytest.param(PodReadings((), missing=2), 2, 30, None, id="no pod has it: unknown"),
    ],
)
def test_a_metric_of_pods_gives_the_controllers_number(
    readings: PodReadings, current: int, target: float, wanted: int | None
) -> None:
    assert replicas_by_pods(readings, current=current, target=target) == wanted


@pytest.mark.parametrize(
    ("total", "existing", "wanted"),
    [(11, 2, 2), (11.1, 2, 3), (0, 4, 0), (26, 0, 6), (20, 4, 4)],
)
def test_an_external_average_is_the_total_over_the_target(total: float, existing: int, wanted: int) -> None:
    assert replicas_by_average(total, existing=existing, target=5) == wanted


@given(
    values=st.lists(st.floats(0, 100), min_size=1, max_size=6),
    pending=st.integers(0, 4),
    missing=st.integers(0, 4),
)
def test_unknown_pods_never_make_the_move_larger(values: list[float], pending: int, missing: int) -> None:
    current = len(values) + pending + missing
    known = replicas_by_pods(PodReadings(tuple(values)), current=current, target=30)
    with_unknown = replicas_by_pods(PodReadings(tuple(values), pending, missing), current=current, target=30)
    assert known is not None and with_unknown is not None
    if known > current:
        assert current <= with_unknown <= known


def test_pods_are_sorted_by_their_phase(pod: MakePod, view: MakeView) -> None:
    pods = [
        pod(waiting=60.0),
        pod(Phase.DRAINING, waiting=1000.0),
        pod(Phase.LOADING),
        pod(Phase.PULLING),
        pod(Phase.UNSCHEDULABLE),
    ]
    # 60 over one pod of 30 is up; with one that loads and two without a container it is 60 / 4 / 30, down: hold.
    assert propose(waiting_per_pod(30), view(pods, desired=4)) == 4
    # 300 over four is 2.5 times the target: ten.
    assert propose(waiting_per_pod(30), view([pod(waiting=300.0), *pods[1:]], desired=4)) == 10


def test_a_stale_pod_misses_the_metric(pod: MakePod, view: MakeView, now: float) -> None:
    stale = pod(Phase.READY, (now - 61, {("waiting",): 0.0}))
    # 15 of 30 says one pod; with the stale one at the target it is 45 / 2 / 30 x 2 = 1.5.
    assert propose(waiting_per_pod(30), view([pod(waiting=15.0), stale])) == 2


def test_duty_cycle_saturates_where_work_does_not(pod: MakePod, view: MakeView, now: float) -> None:
    samples = [(now - 60 + 15 * n, {("busy_seconds",): 15.0 * n, ("work_seconds",): 3.0 * n}) for n in range(5)]
    fleet = view([pod(Phase.READY, *samples)] * 2)
    assert propose(duty_cycle(0.5), fleet) == 4
    assert propose(work_utilisation(0.5), fleet) == 1


def test_concurrency_counts_queued_and_running(pod: MakePod, view: MakeView) -> None:
    assert propose(concurrency_per_pod(10), view([pod(running=12.0, waiting=8.0)])) == 2


def at(fleet: FleetView, seconds: float) -> FleetView:
    return replace(fleet, now=fleet.now + seconds)


def total_of(load: list[float]) -> ExternalMetric:
    return ExternalMetric("load", 1.0, lambda view: load[0])


def follow(hpa: Hpa, pod: PodView, *, make: MakeView, start: int, seconds: list[float]) -> list[int]:
    """Replicas after each sync at those seconds, every pod there at once."""
    count, counts = start, []
    for second in seconds:
        count = hpa.decide(at(make([pod] * count), second)).replicas
        counts.append(count)
    return counts


def test_it_goes_up_by_four_pods_or_to_twice_as_many_a_sync(pod: MakePod, view: MakeView) -> None:
    hpa = Hpa([total_of([100.0])], Bounds(1, 60))
    assert follow(hpa, pod(), make=view, start=1, seconds=[0, 15, 30, 45, 60]) == [5, 10, 20, 40, 60]


def test_syncs_within_the_period_share_its_limit(pod: MakePod, view: MakeView) -> None:
    hpa = Hpa([total_of([100.0])], Bounds(1, 60))
    assert follow(hpa, pod(), make=view, start=1, seconds=[0, 5, 10, 15]) == [5, 5, 5, 10]


def test_it_goes_down_to_the_highest_of_five_minutes(pod: MakePod, view: MakeView) -> None:
    load = [8.0]
    hpa = Hpa([total_of(load)], Bounds(1, 60))
    assert follow(hpa, pod(), make=view, start=8, seconds=[0]) == [8]
    load[0] = 4.0
    assert follow(hpa, pod(), make=view, start=8, seconds=[15]) == [8]
    load[0] = 2.0
    assert follow(hpa, pod(), make=view, start=8, seconds=[30, 285, 299]) == [8, 8, 8]
    # The eight are five minutes old; the four are not.
    assert follow(hpa, pod(), make=view, start=8, seconds=[301]) == [4]
    assert follow(hpa, pod(), make=view, start=4, seconds=[316]) == [2]


def test_the_first_replicas_count_as_a_recommendation(pod: MakePod, view: MakeView) -> None:
    hpa = Hpa([total_of([2.0])], Bounds(1, 60))
    assert follow(hpa, pod(), make=view, start=6, seconds=[0, 299, 300]) == [6, 6, 2]


def test_bounds_come_before_metrics(pod: MakePod, view: MakeView) -> None:
    assert Hpa([waiting_per_pod(5)], Bounds(1, 3)).decide(view([], desired=5)).replicas == 3
    assert Hpa([waiting_per_pod(5)], Bounds(2, 3)).decide(view([], desired=1)).replicas == 2
    assert Hpa([total_of([100.0])], Bounds(1, 4)).decide(view([pod()] * 3)).replicas == 4


def test_of_several_metrics_the_highest_counts_and_an_unknown_one_only_forbids_to_go_down(
    pod: MakePod, view: MakeView
) -> None:
    unknown = ExternalMetric("none", 1.0, lambda view: None)
    fleet = view([pod()] * 4)
    assert Hpa([total_of([6.0]), total_of([7.0])]).decide(fleet).replicas == 7
    assert Hpa([total_of([7.0]), unknown]).decide(fleet).replicas == 7
    hpa = Hpa([total_of([2.0]), unknown])
    assert follow(hpa, pod(), make=view, start=4, seconds=[0, 400, 800]) == [4, 4, 4]
    assert Hpa([unknown]).decide(fleet).reason == "FailedGetMetrics"


def test_requests_a_second_are_those_of_a_minute(pod: MakePod, view: MakeView, now: float) -> None:
    hpa = Hpa([RequestsPerSecond(2.0).metric()])
    assert hpa.decide(view([pod()], arrivals=0)).replicas == 1
    # 480 in a minute are 8 a second, four replicas of two.
    assert hpa.decide(view([pod()], now=now + 60, arrivals=480)).replicas == 4
