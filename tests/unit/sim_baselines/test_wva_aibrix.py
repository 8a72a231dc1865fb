"""The saturation analyzer of llm-d's autoscaler with its HPA, and AIBrix's two."""

from collections.abc import Callable

import pytest

from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.baselines.aibrix import Aibrix, apa_replicas, guarded, kpa_replicas
from tidegate_sim.baselines.hpa import Bounds
from tidegate_sim.baselines.wva import ReplicaLoad, Thresholds, Wva, saturation_target
from tidegate_sim.controller import FleetView, PodView

MakePod = Callable[..., PodView]
MakeView = Callable[..., FleetView]


@pytest.mark.parametrize(
    ("loads", "current", "wanted_before", "wanted"),
    [
        pytest.param([(0.5, 0), (0.5, 0)], 2, 2, 2, id="one would have 1.0 of KV"),
        pytest.param([(0.3, 0), (0.3, 0)], 2, 2, 1, id="one would have 0.6, which leaves 0.2"),
        pytest.param([(0.35, 0), (0.35, 0)], 2, 2, 1, id="0.7 leaves 0.10, just enough"),
        pytest.param([(0.36, 0), (0.36, 0)], 2, 2, 2, id="0.72 does not"),
        pytest.param([(0.71, 0), (0.72, 0)], 2, 2, 3, id="spare KV below a tenth"),
        pytest.param([(0.1, 2), (0.1, 3)], 2, 2, 3, id="spare queue of 2.5"),
        pytest.param([(0.1, 2), (0.1, 2)], 2, 2, 2, id="spare queue of 3, but one would have four"),
        pytest.param([(0.9, 0), (0.1, 0)], 2, 2, 2, id="saturated ones are left out of the mean"),
        pytest.param([(0.9, 0), (0.1, 9)], 2, 2, 3, id="all saturated: no spare at all"),
        pytest.param([(0.1, 0)], 1, 1, 1, id="the last one stays"),
        pytest.param([(0.9, 0)] * 3, 3, 4, 4, id="the wanted number is not there yet"),
        pytest.param([(0.9, 0)] * 3, 4, 4, 4, id="a replica has no metrics yet"),
        pytest.param([(0.9, 0)] * 3, 3, None, 4, id="first pass"),
        pytest.param([], 3, 3, 3, id="no metrics"),
    ],
)
def test_the_analyzer_moves_by_one(
    loads: list[tuple[float, float]], current: int, wanted_before: int | None, wanted: int
) -> None:
    made = [ReplicaLoad(*load) for load in loads]
    target = saturation_target(made, current=current, wanted=wanted_before, pending=0, thresholds=Thresholds())
    assert target == wanted


def kv(used: float, waiting: float = 0.0) -> dict[tuple[str, ...], float]:
    return {("kv_blocks", "used"): used * 100, ("kv_blocks", "free"): 100 - used * 100, ("waiting",): waiting}


def test_it_sees_the_highest_of_a_minute_and_looks_once_a_minute(pod: MakePod, view: MakeView, now: float) -> None:
    wva = Wva(bounds=Bounds(1, 20))
    peaked = pod(ReplicaPhase.READY, (now - 70, kv(0.9)), (now - 40, kv(0.75)), (now, kv(0.1)))
    assert wva.decide(view([peaked])).replicas == 2

    def at(after: float) -> int:
        low = pod(ReplicaPhase.READY, (now + after, kv(0.1)))
        return wva.decide(view([low, low], now=now + after)).replicas

    # A second replica is there and all is low. The next look is after a minute; going down waits for five more.
    assert [at(seconds) for seconds in (15, 45, 60, 120, 344, 345)] == [2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize(
    ("use", "current", "wanted"),
    [
        pytest.param(0.55, 4, 4, id="within a tenth"),
        pytest.param(0.60, 4, 5, id="4 x 1.2"),
        pytest.param(2.0, 4, 8, id="four times as much: twice at most"),
        pytest.param(0.40, 4, 4, id="4 x 0.8, rounded up"),
        pytest.param(0.30, 4, 3, id="4 x 0.6, rounded up"),
        pytest.param(0.01, 5, 2, id="half at most, rounded down"),
    ],
)
def test_apa_goes_by_the_ratio_within_rates(use: float, current: int, wanted: int) -> None:
    assert apa_replicas(use, current=current, target=0.5) == wanted


@pytest.mark.parametrize(
    ("stable", "panicking", "current", "wanted"),
    [
        pytest.param(1.0, 1.0, 2, 2, id="a total of one for targets of a half"),
        pytest.param(1.0, 1.9, 2, 2, id="not yet twice: the long window"),
        pytest.param(1.0, 2.1, 4, 5, id="panic: the short one"),
        pytest.param(1.0, 9.0, 4, 8, id="twice at most"),
        pytest.param(0.1, 0.1, 5, 2, id="half at most"),
    ],
)
def test_kpa_goes_by_the_windows(stable: float, panicking: float, current: int, wanted: int) -> None:
    assert kpa_replicas(stable, panicking, current=current, target=0.5) == wanted


def test_starting_pods_count_as_idle_up_and_as_full_down() -> None:
    # Use 0.9 of 0.5 on 2 of 4: 0.9 x 2 / 0.5 = 3.6, which is not more than there are.
    assert guarded(8, use=0.9, ready=2, current=4, target=0.5) == 4
    assert guarded(8, use=2.0, ready=2, current=4, target=0.5) == 8
    assert guarded(2, use=0.1, ready=2, current=4, target=0.5) == 3
    assert guarded(2, use=0.1, ready=4, current=4, target=0.5) == 2


def test_aibrix_takes_the_lowest_recommendation_on_the_way_down(pod: MakePod, view: MakeView, now: float) -> None:
    apa = Aibrix(bounds=Bounds(1, 20))

    def at(after: float, used: float) -> int:
        pods = [pod(ReplicaPhase.READY, (now + after, kv(used)))] * 8
        return apa.decide(view(pods, now=now + after)).replicas

    assert at(0, 0.2) == 4
    assert at(10, 0.4) == 4, "seven would do now, but the four of ten seconds ago are lower"
    assert at(311, 0.4) == 7
    assert at(321, 0.9) == 15


def test_aibrix_holds_without_metrics(pod: MakePod, view: MakeView) -> None:
    assert Aibrix().decide(view([pod()] * 3)).reason == "NoMetrics"


def test_kpa_takes_means_of_totals(pod: MakePod, view: MakeView, now: float) -> None:
    kpa = Aibrix(bounds=Bounds(1, 20), windows=True)

    def at(after: float, used: float) -> int:
        pods = [pod(ReplicaPhase.READY, (now + after, kv(used)))] * 2
        return kpa.decide(view(pods, now=now + after)).replicas

    assert at(0, 0.5) == 2
    # The mean of two totals, 1.0 and 1.8, is 1.4.
    assert at(10, 0.9) == 3
