"""The simulator as a whole: the same again for the same seed, no request lost, and leaps that change nothing."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile, load_profile
from tidegate_operator.observation import ReplicaPhase
from tidegate_sim import synthetic
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, Order
from tidegate_sim.records import Outcome
from tidegate_sim.results import Result
from tidegate_sim.simulation import WorkloadOutOfOrder, simulate
from tidegate_sim.specification import (
    Balancing,
    CrashLoop,
    FleetSpec,
    GatewaySpec,
    MetricsOutage,
    OutageKind,
    PodCrash,
    Quota,
    StartTimes,
)

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
H100 = load_profile("h100-llama-3.1-8b")
SMALL = replace(H100, kv_blocks=400, max_model_len=4096)
"""So little KV that requests are preempted."""
NONE = StartTimes(0.0, 0.0, 5.0, jitter=0.0)


class Planned:
    """Orders what is written down: (from when, replicas, settings)."""

    name = "planned"

    def __init__(self, plan: Sequence[tuple[float, int, BatchSettings | None]], *, period_seconds: float = 5.0) -> None:
        self.period_seconds = period_seconds
        self.plan = plan
        self.views: list[FleetView] = []
        self.epoch: float | None = None

    def decide(self, view: FleetView) -> Order:
        self.views.append(view)
        self.epoch = view.now if self.epoch is None else self.epoch
        replicas, settings = next((r, s) for at, r, s in reversed(self.plan) if view.now - self.epoch >= at)
        return Order(replicas, settings, reason="AsPlanned")


def fixed(replicas: int = 1) -> Planned:
    return Planned([(0.0, replicas, None)])


def traffic(rate: float = 4.0, *, seconds: float = 60.0, seed: int = 1) -> list[Arrival]:
    kind = synthetic.Kind("tailed", synthetic.Tail(300, 0.8, 2000), synthetic.Tail(60, 0.8, 400))
    return list(
        synthetic.made_up(
            synthetic.steady(rate), synthetic.only(kind), duration_seconds=seconds, seed=seed, variation=2
        )
    )


def columns(result: Result) -> list[list[float | None]]:
    records = result.records
    return [
        [None if math.isnan(value) else round(value, 6) for value in column]
        for column in (records.ttft, records.itl, records.queue, records.ended)
    ]


def summed(result: Result) -> int:
    return sum(result.overall.outcomes.values())


def test_the_same_seed_gives_the_same_result_and_another_one_another() -> None:
    spec = FleetSpec(H100, faults=[PodCrash(20.0)], start=StartTimes(1.0, 2.0, 3.0))
    plan = [(0.0, 1, None), (10.0, 3, None), (40.0, 2, None)]
    one, same, other = (simulate(traffic(), spec, Planned(plan), seed=seed) for seed in (1, 1, 2))
    assert one.summary() == same.summary() and columns(one) == columns(same)
    assert one.timeline == same.timeline and one.changes == same.changes
    assert columns(other) != columns(one)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(max_examples=300 if PROVE else 6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(0.5, 20.0),
    profile=st.sampled_from([H100, SMALL]),
    max_num_seqs=st.integers(2, 40),
    balancing=st.sampled_from(list(Balancing)),
)
def test_leaping_over_equal_steps_changes_nothing(
    seed: int, rate: float, profile: Profile, max_num_seqs: int, balancing: Balancing
) -> None:
    settings = BatchSettings(max_num_seqs, 512, 256)
    spec = FleetSpec(profile, settings=settings, start=NONE, gateway=GatewaySpec(balancing))
    plan = [(0.0, 1, None), (5.0, 2, BatchSettings(max_num_seqs + 3, 600, 300)), (10.0, 1, None)]
    workload = traffic(rate, seconds=18.0, seed=seed)
    leaping, stepping = (simulate(workload, spec, Planned(plan), seed=seed, leaps=leaps) for leaps in (True, False))
    assert [list(map(_near, column)) for column in columns(leaping)] == columns(stepping)
    assert leaping.preemptions == stepping.preemptions
    assert [point.mix for point in leaping.timeline] == [point.mix for point in stepping.timeline]


def _near(value: float | None) -> object:
    return None if value is None else pytest.approx(value, abs=2e-6)


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(max_examples=300 if PROVE else 6, deadline=None)
@given(
    seed=st.integers(0, 1000),
    plan=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    crashes=st.lists(st.floats(1.0, 40.0), max_size=3),
    timeout=st.one_of(st.none(), st.floats(0.5, 20.0)),
    retries=st.booleans(),
    drain=st.floats(0.5, 30.0),
)
def test_no_request_is_lost_or_counted_twice(
    seed: int,
    plan: list[int],
    crashes: list[float],
    timeout: float | None,
    retries: bool,
    drain: float,
) -> None:
    spec = FleetSpec(
        SMALL,
        start=StartTimes(0.5, 1.0, 2.0),
        drain_timeout_seconds=drain,
        gateway=GatewaySpec(timeout_seconds=timeout, retries=retries),
        faults=[*(PodCrash(at, share=0.5) for at in crashes), Quota(20.0, 2), CrashLoop(30.0, 35.0)],
    )
    orders = [(7.0 * n, replicas, None) for n, replicas in enumerate(plan)]
    controller = Planned([*orders, (60.0, 1, None)])
    workload = traffic(8.0, seconds=45.0, seed=seed)
    result = simulate(workload, spec, controller, seed=seed)
    assert summed(result) == result.overall.arrived == len(workload)
    assert "in_flight" not in result.overall.outcomes
    last = controller.views[-1].gateway
    assert last.arrivals_total <= len(workload) and last.in_flight >= 0
    assert sum(service.arrived for service in result.patterns.values()) == len(workload)


def test_a_request_that_never_fits_is_refused_and_missed() -> None:
    workload = [Arrival(1.0, 100, 10), Arrival(2.0, 5000, 10)]
    result = simulate(workload, FleetSpec(SMALL), fixed())
    assert list(result.records.outcome) == [Outcome.FINISHED, Outcome.REFUSED]
    assert result.attainment == 0.5


def test_arrivals_out_of_order_are_refused() -> None:
    with pytest.raises(WorkloadOutOfOrder, match="sort the workload"):
        simulate([Arrival(2.0, 1, 1), Arrival(1.0, 1, 1)], FleetSpec(H100), fixed())


def test_nothing_is_lost_while_no_pod_stands() -> None:
    spec = FleetSpec(H100, initial_replicas=0, start=StartTimes(1.0, 4.0, 5.0, jitter=0.0))
    result = simulate([Arrival(2.0, 100, 10), Arrival(3.0, 100, 10)], spec, Planned([(0.0, 0, None), (5.0, 1, None)]))
    assert result.overall.finished == 2
    assert [math.floor(value) for value in result.records.ttft] == [13, 12]


def test_a_scale_down_takes_the_least_loaded_pod_and_lets_it_finish() -> None:
    workload = [Arrival(1.0 + 0.01 * n, 100 if n % 2 else 3000, 900) for n in range(8)]
    spec = FleetSpec(H100, initial_replicas=2, start=NONE)
    controller = Planned([(0.0, 2, None), (5.0, 1, None)], period_seconds=1.0)
    result = simulate(workload, spec, controller, duration_seconds=60.0)
    assert result.overall.finished == 8
    draining = [pod for view in controller.views for pod in view.pods if pod.replica.phase == "Draining"]
    assert draining and {pod.replica.name for pod in draining} == {"pod-1"}
    assert 60.0 < result.gpu_seconds < 120.0


def test_a_crash_breaks_streams_and_sends_the_rest_to_another_pod() -> None:
    workload = [*(Arrival(1.0, 100, 2000) for _ in range(4)), *(Arrival(4.999, 2000, 10) for _ in range(4))]
    spec = FleetSpec(H100, initial_replicas=2, start=NONE, faults=[PodCrash(5.0)])
    outcomes = simulate(workload, spec, fixed(2)).overall.outcomes
    assert outcomes == {"finished": 6, "failed": 2}
    refusing = replace(spec, gateway=GatewaySpec(retries=False))
    assert simulate(workload, refusing, fixed(2)).overall.outcomes == {"finished": 4, "failed": 4}


def test_pods_beyond_the_quota_wait_for_a_node_and_cost_nothing() -> None:
    spec = FleetSpec(H100, start=NONE, faults=[Quota(0.0, 2)])
    controller = Planned([(0.0, 4, None), (30.0, 1, None)])
    result = simulate([], spec, controller, duration_seconds=60.0)
    phases = [pod.replica.phase for pod in controller.views[4].pods]
    assert phases.count(ReplicaPhase.READY) == 2 and phases.count(ReplicaPhase.UNSCHEDULABLE) == 2
    assert result.gpu_seconds == pytest.approx(60.0 + 30.0)


def test_containers_in_a_crash_loop_are_restarted_ever_later() -> None:
    spec = FleetSpec(H100, start=NONE, faults=[CrashLoop(0.0, 40.0)])
    controller = Planned([(0.0, 2, None)], period_seconds=1.0)
    simulate([], spec, controller, duration_seconds=120.0)
    restarts = [max(pod.replica.restarts for pod in view.pods) for view in controller.views]
    assert restarts[-1] == 2
    assert controller.views[-1].count(ReplicaPhase.READY) == 2
    assert controller.views[10].count(ReplicaPhase.CRASH_LOOPING) == 1


@pytest.mark.parametrize(
    ("kind", "seen"), [(OutageKind.NO_SCRAPE, 0), (OutageKind.HALF, 1), (OutageKind.STALE, 2)], ids=str
)
def test_a_metrics_outage_shows_as_it_would(kind: OutageKind, seen: int) -> None:
    spec = FleetSpec(H100, initial_replicas=2, faults=[MetricsOutage(30.0, 100.0, kind)])
    controller = fixed(2)
    simulate(traffic(seconds=90.0), spec, controller)
    last = controller.views[17]
    fresh = [pod for pod in last.pods if pod.samples[-1].at > last.now - 10]
    assert len(fresh) == seen
    if kind is OutageKind.STALE:
        assert fresh[0].samples[-1].values == fresh[0].samples[-5].values


def test_a_late_scrape_is_not_seen_before_its_time() -> None:
    spec = FleetSpec(H100, scrape_delay_seconds=20.0)
    controller = fixed()
    simulate(traffic(), spec, controller)
    assert all(sample.at <= view.now - 20.0 for view in controller.views for sample in view.pods[0].samples)
    assert controller.views[-1].pods[0].samples


def test_a_preempted_request_finds_its_own_blocks_again_when_they_are_remembered() -> None:
    # There is room for 6,384 tokens, and in the end 9,000 are wanted.
    workload = [Arrival(0.0, 1600, 2200), Arrival(0.0, 1600, 1000), Arrival(0.01, 1600, 1000)]
    forgetting = FleetSpec(SMALL, settings=BatchSettings(8, 2048, 2048))
    remembering = replace(forgetting, own_blocks=True)
    first, second = (simulate(workload, spec, fixed()) for spec in (forgetting, remembering))
    assert first.preemptions and second.preemptions
    assert sum(second.records.ended) < sum(first.records.ended)


def test_clients_that_wait_no_longer_count_as_missed() -> None:
    spec = FleetSpec(H100, initial_replicas=0, gateway=GatewaySpec(timeout_seconds=3.0))
    result = simulate([Arrival(1.0, 100, 10)], spec, fixed(0), duration_seconds=20.0)
    assert result.overall.outcomes == {"timed_out": 1}
    assert result.attainment == 0.0
    assert result.records.ended[0] == pytest.approx(4.0)
