"""The rest of the baselines, and the table of all."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate_operator.observation import ReplicaPhase
from tidegate_sim.arrivals import Arrival
from tidegate_sim.baselines import table
from tidegate_sim.baselines.chiron import Chiron, next_batch
from tidegate_sim.baselines.plant import Plant
from tidegate_sim.baselines.schedule import Scheduled, Static, ahead
from tidegate_sim.baselines.token_velocity import TokenVelocity, replicas_by_velocity
from tidegate_sim.controller import FleetView, PodView

MakePod = Callable[..., PodView]
MakeView = Callable[..., FleetView]
READY = ReplicaPhase.READY


@pytest.mark.parametrize(
    ("batch", "pressure", "filled", "wanted"),
    [
        pytest.param(64, 1.25, 1.0, 51, id="by the back-pressure: 64 / 1.25"),
        pytest.param(64, 9.0, 1.0, 32, id="halved at most"),
        pytest.param(8, 2.0, 1.0, 8, id="the least"),
        pytest.param(64, 0.5, 0.9, 80, id="a quarter more"),
        pytest.param(64, 0.5, 0.5, 64, id="not filled"),
        pytest.param(64, 0.9, 1.0, 64, id="near the goal"),
        pytest.param(240, 0.1, 1.0, 256, id="the most"),
        pytest.param(64, None, 1.0, 64, id="unknown"),
    ],
)
def test_chirons_batch_follows_the_back_pressure(
    batch: int, pressure: float | None, filled: float, wanted: int
) -> None:
    assert next_batch(batch, pressure=pressure, filled=filled) == wanted


def test_chiron_keeps_a_spare_share(pod: MakePod, view: MakeView, now: float, plant: Plant) -> None:
    chiron = Chiron(plant, busy_share=0.5)
    busy = [pod(running=48.0, waiting=16.0)] * 3
    # Three full batches of 64 may be half of the instances.
    assert chiron.decide(view(busy)).replicas == 6

    def idle(after: float) -> int:
        return chiron.decide(view([pod(READY, (now + after, {("running",): 32.0}))] * 6, now=now + after)).replicas

    assert [idle(60), idle(105), idle(120)] == [6, 6, 6]
    assert idle(135) == 6, "six half-full batches are three busy ones"


def test_chiron_goes_down_after_one_start(pod: MakePod, view: MakeView, now: float, plant: Plant) -> None:
    chiron = Chiron(plant, busy_share=0.5)

    def at(after: float) -> int:
        return chiron.decide(view([pod(READY, (now + after, {("running",): 16.0}))] * 8, now=now + after)).replicas

    assert [at(0), at(45), at(60)] == [8, 8, 4]


def test_chiron_orders_the_batch_with_a_new_generation(pod: MakePod, view: MakeView, now: float, plant: Plant) -> None:
    slow = {("itl", "0.1"): 0.0, ("itl", "0.2"): 0.0, ("itl", "inf"): 0.0, ("running",): 60.0}
    then = {**slow, ("itl", "0.2"): 100.0, ("itl", "inf"): 100.0}
    order = Chiron(plant).decide(view([pod(READY, (now - 60, slow), (now, then))]))
    # 150 ms of 50 is three times the goal.
    assert order.settings is not None and order.settings.max_num_seqs == 32
    assert order.settings_generation == 2


def test_velocities_of_the_two_stages_add_up(plant: Plant) -> None:
    # ISL 100 in 20 ms, 5000/s; 64 decodes in 16.4 ms, 3902/s. 10,000 and 7,800 tokens/s are 2 + 2 replicas.
    def at(use: float) -> int:
        return replicas_by_velocity(plant, prompt_rate=10_000, output_rate=7_800, isl=100, osl=100, use=use)

    assert [at(1.0), at(0.8), at(0.5)] == [4, 5, 8]


def test_token_velocity_counts_what_comes_and_keeps_a_minute(
    pod: MakePod, view: MakeView, now: float, plant: Plant
) -> None:
    policy = TokenVelocity(plant, use=1.0)

    def at(after: float, arrivals: float) -> int:
        samples = [
            (
                now + after - 60 + 15 * n,
                {
                    ("arrivals", "64"): 10.0 * n,
                    ("prompt_tokens",): 1000.0 * n,
                    ("generation_tokens",): 1000.0 * n,
                    ("finished", "64", "64"): 10.0 * n,
                },
            )
            for n in range(5)
        ]
        return policy.decide(view([pod(READY, *samples)], now=now + after, arrivals=arrivals)).replicas

    assert at(0, 0) == 1
    # 100 requests/s of 100 in and out: 10,000 tokens/s each way: 2 + 2.56.
    assert at(30, 3000) == 5
    assert at(60, 3000) == 5, "half a minute later"
    assert at(91, 3000) == 1


def test_a_schedule_is_ahead_of_its_need() -> None:
    assert ahead([1, 1, 1, 3, 3, 1, 1, 1], slot_seconds=15, lead_seconds=20) == [(0, 1), (15, 3), (75, 1)]
    assert ahead([2, 1], slot_seconds=15, lead_seconds=0) == [(0, 2), (15, 1)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 6))
def test_an_order_precedes_its_need_by_the_lead(wanted: list[int], lead: int) -> None:
    steps = ahead(wanted, slot_seconds=1, lead_seconds=lead)
    for slot, count in enumerate(wanted):
        ordered = [next(n for at, n in reversed(steps) if at <= when) for when in range(max(0, slot - lead), slot + 1)]
        assert min(ordered) >= count


def test_a_schedule_begins_with_the_first_view(view: MakeView, now: float) -> None:
    scheduled = Scheduled([(0, 2), (60, 5)])
    assert [scheduled.decide(view(now=now + after)).replicas for after in (0, 59, 60, 600)] == [2, 2, 5, 5]
    with pytest.raises(ValueError, match="at least one step"):
        Scheduled([])


def test_static_is_static(view: MakeView) -> None:
    assert Static(7).decide(view([])).replicas == 7


ARRIVALS = [Arrival(second / 10, 500, 100) for second in range(600, 6000)]
"""Ten a second, after a silent minute."""


def values_of(stand: float) -> Mapping[tuple[str, ...], float]:
    return {
        ("arrivals", "64"): stand,
        ("finished", "64", "64"): stand,
        ("prompt_tokens",): 100 * stand,
        ("generation_tokens",): 100 * stand,
        ("waiting_prompt_tokens",): 0.0,
        ("running",): 10.0,
        ("waiting",): 1.0,
        ("running_context_tokens",): 100.0,
        ("busy_seconds",): stand / 100,
        ("work_seconds",): stand / 200,
        ("kv_blocks", "used"): 10.0,
        ("kv_blocks", "free"): 90.0,
    }


@pytest.mark.parametrize("name", table.BASELINES)
def test_every_baseline_stays_within_its_bounds_whatever_it_sees(
    name: str, pod: MakePod, view: MakeView, now: float, plant: Plant
) -> None:
    plant = replace(plant, lowest_replicas=2, highest_replicas=5)
    for knob in table.BASELINES[name].grid:
        controller = table.make(name, plant, knob=knob, arrivals=ARRIVALS)
        assert controller.name.startswith(name)
        count = 3
        for tick in range(20):
            at = now + tick * controller.period_seconds
            samples = [(at - 60 + 15 * n, values_of(tick * 1000.0 + 250 * n)) for n in range(5)]
            phases = [READY, READY, ReplicaPhase.LOADING, ReplicaPhase.DRAINING] if tick % 3 else []
            pods = [pod(phase, *samples if phase == READY else ()) for phase in phases]
            order = controller.decide(view(pods, now=at, desired=count, arrivals=1000.0 * tick))
            assert 2 <= order.replicas <= 5
            count = order.replicas


def test_the_clairvoyant_is_ready_when_the_load_comes(plant: Plant) -> None:
    schedule = table.clairvoyant_schedule(plant, 0.0, ARRIVALS)
    # A request is 50 ms of prompt and 99 decodes of 0.1 ms + 10 / 64 ms: ten a second are 0.754 replicas; one does.
    assert schedule == [(0.0, 1)]
    doubled = table.clairvoyant_schedule(plant, 1.0, ARRIVALS)
    # Twice that is two: needed from the slot at 60 s, ordered a start and a slot before.
    assert doubled == [(0.0, 2), (600.0, 1)]


def test_what_is_not_there_is_refused(plant: Plant) -> None:
    with pytest.raises(ValueError, match="there is no baseline 'hpa'; there are static"):
        table.make("hpa", plant)
    with pytest.raises(ValueError, match="needs the workload's arrivals"):
        table.make("clairvoyant", plant)
