"""Tidegate's own rules over a simulated fleet: what they do in minutes of traffic, with the load of real schedulers."""

from collections.abc import Iterator
from functools import lru_cache

import pytest

from tidegate_engine.steptime import load_profile
from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.observation import ReplicaPhase
from tidegate_operator.zero import ScaleToZero
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.operator_controller import OperatorController, scrape_seconds
from tidegate_sim.replica import engine_info
from tidegate_sim.results import Result
from tidegate_sim.simulation import simulate
from tidegate_sim.specification import Fault, FleetSpec, MetricsOutage, OutageKind, PodCrash, Quota, start_times

L4 = load_profile("l4-llama-3.1-8b")
"""Slow, so that few requests make a load."""
BURST_AT, BURST_UNTIL = 150.0, 330.0


def spec_with(*, tunes: bool = False, **autoscaling: object) -> Spec:
    return parse_spec(
        {
            "model": {"uri": "file:///models/none"},
            "objectives": {"ttft": {"milliseconds": 2000}, "interTokenLatency": {"milliseconds": 150}},
            "batching": {"mode": "Auto" if tunes else "Fixed", "minIntervalSeconds": 10, "verificationSeconds": 20},
            "autoscaling": {
                "mode": "Auto",
                "minReplicas": 1,
                "maxReplicas": 8,
                "behavior": {
                    "scaleDown": {
                        "stabilizationWindowSeconds": 60,
                        "policies": [{"type": "Percent", "value": 50, "periodSeconds": 15}],
                    }
                },
                **autoscaling,
            },
        }
    )


def served(
    workload: list[Arrival],
    *faults: Fault,
    spec: Spec | None = None,
    seconds: float | None = None,
    zero: ScaleToZero | None = None,
) -> Result:
    spec = spec or spec_with()
    fleet = FleetSpec(
        L4,
        settings=spec.initial_settings(),
        start=start_times(20.0),
        scrape_seconds=scrape_seconds(spec),
        faults=faults,
    )
    controller = OperatorController(spec, engine_info(L4), zero=zero)
    return simulate(workload, fleet, controller, seed=1, duration_seconds=seconds)


def bursts() -> Iterator[Arrival]:
    rate = synthetic.steps([(0, 0.5), (BURST_AT, 9.0), (BURST_UNTIL, 0.3)])
    kind = synthetic.Kind("chat", synthetic.Tail(400, 0.5), synthetic.Tail(120, 0.5))
    return synthetic.made_up(rate, synthetic.only(kind), duration_seconds=500.0, seed=2)


@lru_cache(maxsize=1)
def burst() -> tuple[list[Arrival], Result]:
    workload = list(bursts())
    return workload, served(workload, seconds=600.0)


def test_a_burst_adds_replicas_within_seconds_and_quiet_takes_them_away_after_the_window() -> None:
    _, result = burst()
    ups = [change for change in result.scalings if change.after > change.before]
    downs = [change for change in result.scalings if change.after < change.before]
    assert BURST_AT < ups[0].at <= BURST_AT + 60
    assert [change for change in downs if change.at < BURST_UNTIL and change.after < 3] == [], "the burst needs three"
    assert next(change.at for change in downs if change.after == 1) >= BURST_UNTIL + 60
    assert result.timeline[-1].desired == 1
    assert result.overall.finished == result.overall.arrived


def test_every_change_tells_its_reason() -> None:
    _, result = burst()
    assert all(change.reason and change.message for change in result.changes)
    assert result.orders == sum(result.reasons.values())


@pytest.mark.parametrize("kind", [OutageKind.NO_SCRAPE, OutageKind.HALF], ids=str)
def test_an_outage_of_the_metrics_at_the_peak_takes_nothing_away(kind: OutageKind) -> None:
    workload, _ = burst()
    start = BURST_AT + 90
    result = served(workload, MetricsOutage(start, start + 300, kind))
    # Of half of the pods something is known, so that they may go when the load has long gone.
    until = start + 300 if kind is OutageKind.NO_SCRAPE else BURST_UNTIL + 60
    blind = [change for change in result.scalings if start + 75 <= change.at < until]
    assert [change for change in blind if change.after < change.before] == []
    assert result.overall.finished == result.overall.arrived


def test_a_crash_is_neither_counted_twice_nor_answered_with_a_storm() -> None:
    workload, quiet = burst()
    result = served(workload, PodCrash(BURST_AT + 120, share=0.3))
    assert max(point.desired for point in result.timeline) <= max(point.desired for point in quiet.timeline) + 2
    assert result.overall.outcomes.get("failed", 0) <= 40


def test_pods_without_a_node_do_not_stop_the_way_down() -> None:
    workload, _ = burst()
    result = served(workload, Quota(0.0, 2), seconds=700.0)
    assert max(point.pods(ReplicaPhase.UNSCHEDULABLE) for point in result.timeline) >= 1
    assert max(point.pods(ReplicaPhase.READY) for point in result.timeline) == 2
    assert result.timeline[-1].desired == 1


def test_another_mix_at_the_same_rate_changes_settings_or_replicas() -> None:
    shares = synthetic.shifting(
        synthetic.Kind("answers", synthetic.Tail(120), synthetic.Tail(200)),
        synthetic.Kind("documents", synthetic.Tail(2500), synthetic.Tail(20)),
        at_seconds=150.0,
    )
    workload = list(synthetic.made_up(synthetic.steady(1.2), shares, duration_seconds=300.0, seed=3))
    result = served(workload, spec=spec_with(tunes=True))
    assert [change for change in result.changes if 150 < change.at < 300]
    assert set(result.patterns) == {"ShortInShortOut", "LongInShortOut"}


def test_steady_load_is_no_event() -> None:
    kind = synthetic.Kind("chat", synthetic.Tail(400, 0.3), synthetic.Tail(100, 0.3))
    workload = list(synthetic.made_up(synthetic.steady(0.6), synthetic.only(kind), duration_seconds=900.0, seed=4))
    result = served(workload)
    assert [change for change in result.scalings if change.at > 300] == []


def visits() -> list[Arrival]:
    """A minute of requests, ten without any, and a minute again."""
    rate = synthetic.steps([(0, 1.0), (60.0, 0.0), (660.0, 1.0)])
    kind = synthetic.Kind("chat", synthetic.Tail(300, 0.3), synthetic.Tail(60, 0.3))
    return list(synthetic.made_up(rate, synthetic.only(kind), duration_seconds=720.0, seed=5))


def test_an_idle_fleet_goes_to_zero_and_comes_back_for_what_is_held() -> None:
    workload = visits()
    result = served(workload, zero=ScaleToZero(idle_seconds=120.0))
    (slept,) = [change for change in result.scalings if change.after == 0]
    (woke,) = [change for change in result.scalings if change.before == 0]
    first = next(each.at_seconds for each in workload if each.at_seconds > 600)
    assert (slept.reason, woke.reason) == ("Idle", "RequestsHeld")
    ended = max(at for at in result.records.ended if at < 600)
    assert ended + 120 <= slept.at < ended + 60 + 120 + 30, "after what was measured last had left the window"
    assert 0 <= woke.at - first <= 15
    assert result.overall.finished == result.overall.arrived == len(workload)
    index = next(n for n, each in enumerate(workload) if each.at_seconds == first)
    assert 15 < result.records.ttft[index] < 15 + 24 + 5, "held for a look and a start of about 20 s"
    awake = served(workload)
    assert result.gpu_hours < 0.6 * awake.gpu_hours and not any(change.after == 0 for change in awake.scalings)


def test_a_fleet_that_begins_at_zero_loads_its_model_once_unasked() -> None:
    """Before a pod was ever ready nothing says that there is a model to wake."""
    spec = spec_with()
    fleet = FleetSpec(L4, initial_replicas=0, settings=spec.initial_settings(), start=start_times(20.0))
    controller = OperatorController(spec, engine_info(L4), zero=ScaleToZero(idle_seconds=60.0))
    result = simulate([], fleet, controller, seed=1, duration_seconds=600.0)
    assert [(change.after, change.reason) for change in result.scalings] == [(1, "FirstReplicas"), (0, "Idle")]
