"""Pods of several kinds behind one gateway, and several fleets on the same nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import load_profile
from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.arrivals import Arrival
from tidegate_sim.controller import FleetView, KindOrder, Order
from tidegate_sim.simulation import Deployment, simulate, simulate_together
from tidegate_sim.specification import FleetSpec, PodKind, StartTimes

H100 = load_profile("h100-llama-3.1-8b")
SLOW = replace(
    H100,
    gpu="NVIDIA L4",
    step=replace(H100.step, **{name: 4 * value for name, value in H100.step.as_dict().items()}),
)
FIVE_SECONDS = StartTimes(0.0, 0.0, 5.0, jitter=0.0)
SMALL, LARGE = BatchSettings(8, 512, 256), BatchSettings(32, 2048, 512)
TWO_KINDS = FleetSpec(
    H100,
    initial_replicas=1,
    start=FIVE_SECONDS,
    gpu_price_per_hour=2.0,
    other_kinds=(PodKind("slow", SLOW, initial_replicas=1, start=FIVE_SECONDS, gpu_price_per_hour=0.5),),
)


class ByKind:
    """Orders what is written down: (from when, orders)."""

    name = "by-kind"
    period_seconds = 5.0

    def __init__(self, plan: Sequence[tuple[float, Sequence[KindOrder]]]) -> None:
        self.plan = plan
        self.views: list[FleetView] = []

    def decide(self, view: FleetView) -> Order:
        self.views.append(view)
        since = view.now - self.views[0].now
        return Order(0, kinds=next(tuple(orders) for at, orders in reversed(self.plan) if since >= at))


class Following:
    """Orders so many replicas from a time on."""

    name = "following"
    period_seconds = 5.0

    def __init__(self, *plan: tuple[float, int]) -> None:
        self.plan = plan
        self.epoch: float | None = None

    def decide(self, view: FleetView) -> Order:
        self.epoch = view.now if self.epoch is None else self.epoch
        return Order(next(replicas for at, replicas in reversed(self.plan) if view.now - (self.epoch or 0.0) >= at))


def requests(*, every: float, until: float, isl: int = 200, osl: int = 100) -> list[Arrival]:
    return [Arrival(number * every, isl, osl) for number in range(int(until / every))]


def test_each_kind_is_scaled_and_set_by_itself_and_its_gpu_hours_are_told_apart() -> None:
    controller = ByKind(
        [
            (0.0, [KindOrder(H100.gpu, 1, LARGE), KindOrder("slow", 1, SMALL)]),
            (60.0, [KindOrder(H100.gpu, 0), KindOrder("slow", 3)]),
        ]
    )
    result = simulate(requests(every=1.0, until=120.0), TWO_KINDS, controller, duration_seconds=120.0)
    before, after = controller.views[10], controller.views[-1]
    assert {pod.kind: pod.replica.settings for pod in before.pods} == {H100.gpu: LARGE, "slow": SMALL}
    assert [(kind.name, kind.desired_replicas, kind.settings) for kind in after.kinds] == [
        (H100.gpu, 0, LARGE),
        ("slow", 3, SMALL),
    ]
    assert [pod.kind for pod in after.pods] == ["slow"] * 3
    assert result.attainment == 1.0
    # The fast pod drains the answer it has: less than a second more.
    fast, slow = result.uses[H100.gpu], result.uses["slow"]
    assert 60 <= fast.gpu_seconds < 63 and slow.gpu_seconds == 120 + 2 * 60
    assert result.gpu_seconds == fast.gpu_seconds + slow.gpu_seconds
    assert result.cost == pytest.approx((2.0 * fast.gpu_seconds + 0.5 * slow.gpu_seconds) / 3600)
    assert result.timeline[-1].kinds["slow"].phases == {ReplicaPhase.READY: 3}
    # Settings and replicas of both kinds: four changes, and no scaling of one kind takes back one of the other.
    assert [(change.kind, change.before, change.after) for change in result.scalings] == [
        (H100.gpu, 1, 0),
        ("slow", 1, 3),
    ]
    assert len(result.retunings) == 2 and result.reversals == 0


def running_of(view: FleetView) -> Mapping[str, float]:
    return {pod.kind: pod.replica.running or 0.0 for pod in view.pods}


@pytest.mark.parametrize(("weight", "ratio"), [(1.0, 1.0), (3.0, 3.0)])
def test_the_gateway_keeps_as_many_in_flight_as_a_kind_has_weight(weight: float, ratio: float) -> None:
    controller = ByKind([(0.0, [KindOrder(H100.gpu, 1, LARGE, weight=weight), KindOrder("slow", 1, LARGE, weight=1)])])
    simulate(requests(every=0.2, until=100.0, osl=400), TWO_KINDS, controller)
    full = [running_of(view) for view in controller.views[10:20]]
    assert sum(each[H100.gpu] for each in full) / sum(each["slow"] for each in full) == pytest.approx(ratio, rel=0.15)


def test_kinds_need_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="names of their own"):
        FleetSpec(H100, other_kinds=(PodKind(H100.gpu, SLOW),))


def deployment(controller: Following, *, replicas: int) -> Deployment:
    fleet = FleetSpec(H100, initial_replicas=replicas, start=FIVE_SECONDS)
    return Deployment(requests(every=1.0, until=100.0), fleet, controller)


def test_a_pod_that_finds_no_gpu_waits_until_another_fleet_frees_one() -> None:
    first, second = simulate_together(
        [
            deployment(Following((0.0, 3), (60.0, 1)), replicas=2),
            deployment(Following((0.0, 1), (20.0, 3)), replicas=1),
        ],
        gpus={H100.gpu: 4},
        duration_seconds=100.0,
        point_seconds=5.0,
    )
    phases = [
        {phase: point.pods(phase) for phase in (ReplicaPhase.READY, ReplicaPhase.UNSCHEDULABLE)}
        for point in second.timeline
    ]
    waiting = {ReplicaPhase.READY: 1, ReplicaPhase.UNSCHEDULABLE: 2}
    assert phases[8] == waiting and phases[10] == waiting
    assert phases[-1] == {ReplicaPhase.READY: 3, ReplicaPhase.UNSCHEDULABLE: 0}
    for here, there in zip(first.timeline, second.timeline, strict=True):
        taken = [point.pods(*ReplicaPhase) - point.pods(ReplicaPhase.UNSCHEDULABLE) for point in (here, there)]
        assert sum(taken) <= 4
    assert first.attainment == second.attainment == 1.0
    assert len(first.records) == len(second.records) == 100


def test_of_pods_that_wait_the_first_created_comes_first() -> None:
    holder, late, early = simulate_together(
        [
            deployment(Following((0.0, 2), (60.0, 1)), replicas=2),
            deployment(Following((0.0, 1), (40.0, 2)), replicas=1),
            deployment(Following((0.0, 1), (20.0, 2)), replicas=1),
        ],
        gpus={H100.gpu: 4},
        duration_seconds=100.0,
    )
    assert [result.timeline[-1].pods(ReplicaPhase.READY) for result in (holder, late, early)] == [1, 1, 2]


def test_pods_that_are_there_at_first_need_gpus_too() -> None:
    with pytest.raises(ValueError, match="too few"):
        simulate_together([deployment(Following((0.0, 3)), replicas=3)], gpus={H100.gpu: 2})
