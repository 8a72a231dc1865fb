"""Every rule of `decide`, and its properties."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import BatchSettings, find_violation
from tidegate_engine.steptime import StepModel, load_profile
from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.forecast import SLOT_SECONDS, SLOTS, Forecast, Record, dump_forecast
from tidegate_operator.formula import carried, replicas_for
from tidegate_operator.memory import dump_memory, load_memory
from tidegate_operator.observation import (
    Action,
    Decision,
    Demand,
    EngineInfo,
    MetricsState,
    Observation,
    Replica,
    ReplicaPhase,
)
from tidegate_operator.policy import decide

NOW = 1_700_000_000.0
H100 = load_profile("h100-llama-3.1-8b")
ENGINE = EngineInfo(
    kv_blocks=22_000,
    block_tokens=16,
    max_model_len=32768,
    kv_token_bytes=131072,
    weight_bytes=1,
    gpu_product=None,
    gpu_count=1,
    version="test",
    step_model=H100.step,
    step_model_residual_ratio=0.01,
    step_model_samples=1000,
)
EXAMPLES = 600 if os.environ.get("TIDEGATE_PROVE") else 40
FIXED = {"batching": {"mode": "Fixed"}}


def spec_of(**parts: Any) -> Spec:
    base: dict[str, Any] = {
        "model": {"uri": "file:///models/m.gguf"},
        "objectives": {"ttft": {"milliseconds": 1000}, "interTokenLatency": {"milliseconds": 50}},
        "autoscaling": {"minReplicas": 1, "maxReplicas": 10},
        **FIXED,
    }
    for name, value in parts.items():
        base[name] = {**base.get(name, {}), **value} if isinstance(value, dict) else value
    return parse_spec(base)


def pods(
    count: int, *, phase: ReplicaPhase = ReplicaPhase.READY, age: float = 1000, first: int = 0
) -> tuple[Replica, ...]:
    return tuple(
        Replica(
            name=f"pod-{index}",
            uid=str(index),
            ip="10.0.0.1",
            phase=phase,
            created_at=NOW - age,
            ready_at=NOW - age + 20 if phase == ReplicaPhase.READY else None,
            settings_generation=None,
        )
        for index in range(first, first + count)
    )


def demand_of(rate: float, *, isl: int = 256, osl: int = 64, **fields: Any) -> Demand:
    """`rate` requests/s of one cell in a steady state."""
    base = Demand(
        window_seconds=60,
        sampled_at=NOW,
        arrivals_per_second={isl: rate} if rate else {},
        finished_per_second={(isl, osl): rate} if rate else {},
        running=0,
        waiting=0,
        waiting_prompt_tokens=0,
        running_context_tokens=0,
        running_past_output_edge={},
        ttft_p95_seconds=0.1 if rate else None,
        itl_p95_seconds=0.02 if rate else None,
        queue_p95_seconds=0.0 if rate else None,
        prompt_tokens_per_second=None,
        cached_prompt_tokens_per_second=None,
        generation_tokens_per_second=None,
        kv_used_ratio=0.1,
        preemptions_per_second=0,
        pods_covered=1,
    )
    return replace(base, **fields)


def seen(demand: Demand | None, *, ready: int, **fields: Any) -> Observation:
    if demand is not None and "pods_covered" not in fields:
        demand = replace(demand, pods_covered=ready)
    fields.pop("pods_covered", None)
    base = Observation(
        now=NOW,
        current_replicas=ready,
        replicas=pods(ready),
        demand=demand,
        metrics_state=MetricsState.FRESH if demand else MetricsState.ABSENT,
        engine=ENGINE,
        start_seconds=20.0,
    )
    return replace(base, **fields)


def capacity_of_one(spec: Spec) -> float:
    return decide(spec, seen(demand_of(1.0), ready=1), {}).inputs["capacityPerReplica"]


def filled_memory(spec: Spec, observation: Observation, *, seconds: float = 700) -> Mapping[str, object]:
    """Memory after the load of `observation` was seen for a while."""
    memory: Mapping[str, object] = {}
    step = spec.autoscaling.sync_period_seconds
    for index in range(int(seconds / step), 0, -1):
        still = replace(observation, now=observation.now - index * step)
        memory = decide(spec, still, memory).memory
    return memory


def at_capacity(spec: Spec, replicas: float) -> Demand:
    """Load that needs `replicas` with the headroom."""
    keep = 1 - spec.autoscaling.headroom_percent / 100
    figures = decide(spec, seen(demand_of(1.0), ready=1), {}).inputs
    return demand_of(carried(figures["capacityPerReplica"], figures["capacityInPool"], replicas) * keep)


# --- who decides


def test_mode_off_keeps_the_replicas_of_the_object() -> None:
    decision = decide(spec_of(replicas=3, autoscaling={"mode": "Off"}), seen(demand_of(500), ready=3), {})
    assert (decision.replicas, decision.action, decision.reason) == (3, Action.HOLD, "ScalingOff")


def test_mode_off_without_replicas_means_one() -> None:
    spec = parse_spec({"model": {"uri": "file:///m"}})
    assert decide(spec, Observation(now=NOW, current_replicas=0), {}).replicas == 1


def test_mode_external_follows_the_scale_subresource_down_to_zero() -> None:
    spec = spec_of(replicas=2, autoscaling={"mode": "External"})
    decision = decide(spec, seen(demand_of(500), ready=2, spec_replicas=0), {})
    assert (decision.replicas, decision.reason) == (0, "ScaledByOthers")


@pytest.mark.parametrize("mode", ["Off", "External"])
def test_settings_are_tuned_also_where_others_set_the_replicas(mode: str) -> None:
    spec = spec_of(replicas=2, autoscaling={"mode": mode}, batching={"mode": "Auto"})
    decision = decide(spec, seen(demand_of(9, isl=64, osl=1024), ready=2), {})
    assert (decision.action, decision.reason) == (Action.RETUNE, "RetunedForMix")
    assert decision.settings_generation == 2


def test_paused_changes_nothing() -> None:
    spec = spec_of(autoscaling={"paused": True}, batching={"mode": "Auto"})
    decision = decide(spec, seen(demand_of(500, isl=64, osl=1024), ready=2), {})
    assert (decision.replicas, decision.action, decision.reason) == (2, Action.HOLD, "ScalingPaused")
    assert decision.settings == spec.initial_settings()


def test_observe_says_it_and_keeps_the_replicas() -> None:
    spec = spec_of(replicas=2, autoscaling={"mode": "Observe"})
    decision = decide(spec, seen(at_capacity(spec_of(), 6.5), ready=2), {})
    assert (decision.replicas, decision.action, decision.reason) == (2, Action.HOLD, "ObservingOnly")
    assert decision.wanted_replicas == 7
    assert "would hold" in decision.message


def test_observe_holds_the_replicas_of_the_object_while_paused_too() -> None:
    spec = spec_of(replicas=3, autoscaling={"mode": "Observe", "paused": True})
    decision = decide(spec, seen(at_capacity(spec_of(), 6.5), ready=2, spec_replicas=3), {})
    assert (decision.replicas, decision.reason) == (3, "ObservingOnly")


def test_the_first_replicas_are_the_fewest_allowed() -> None:
    decision = decide(spec_of(autoscaling={"minReplicas": 2}), Observation(now=NOW, current_replicas=0), {})
    assert (decision.replicas, decision.action, decision.reason) == (2, Action.SCALE_UP, "FirstReplicas")


# --- metrics


@pytest.mark.parametrize("state", [MetricsState.STALE, MetricsState.ABSENT])
@pytest.mark.parametrize("demand", [None, demand_of(0)])
def test_never_scales_down_on_missing_metrics(state: MetricsState, demand: Demand | None) -> None:
    spec = spec_of()
    memory = filled_memory(spec, seen(at_capacity(spec, 4.5), ready=5))
    decision = decide(spec, seen(demand, ready=5, metrics_state=state), memory)
    assert (decision.replicas, decision.action) == (5, Action.HOLD)
    assert decision.reason in ("MetricsStale", "MetricsMissing")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_figures_that_are_no_numbers_are_missing_metrics(value: float) -> None:
    spec = spec_of()
    decision = decide(
        spec, seen(demand_of(1, waiting=value), ready=5), filled_memory(spec, seen(demand_of(1), ready=5))
    )
    assert (decision.replicas, decision.reason) == (5, "MetricsMissing")


def test_the_fallback_comes_after_the_hold_and_never_lowers() -> None:
    spec = spec_of(
        metrics={"onMissing": {"policy": "Fallback", "holdSeconds": 100, "fallbackReplicas": 4}},
    )
    blind = seen(None, ready=2)
    first = decide(spec, blind, {})
    assert (first.replicas, first.reason) == (2, "MetricsMissing")
    later = decide(spec, replace(blind, now=NOW + 101), first.memory)
    assert (later.replicas, later.reason) == (4, "MetricsMissingFallback")
    many = decide(spec, replace(seen(None, ready=7), now=NOW + 101), first.memory)
    assert many.replicas == 7


def test_waiting_for_the_first_ready_replica_is_no_outage() -> None:
    observation = seen(None, ready=1, replicas=pods(1, phase=ReplicaPhase.LOADING, age=5))
    assert decide(spec_of(), observation, {}).reason == "WaitingForReplicas"


def test_after_an_outage_nothing_is_taken_away_before_the_window_is_full_again() -> None:
    spec = spec_of()
    quiet = seen(demand_of(0.01), ready=5)
    memory = filled_memory(spec, quiet)
    assert decide(spec, quiet, memory).replicas == 2
    blind = decide(spec, replace(seen(None, ready=5), now=NOW), memory)
    after = decide(spec, replace(quiet, now=NOW + 15), blind.memory)
    assert (after.replicas, after.reason) == (5, "StabilizationWindow")


def test_pods_that_are_not_seen_count_as_full_on_the_way_down() -> None:
    spec = spec_of()
    all_seen = seen(at_capacity(spec, 1.5), ready=4)
    assert all_seen.demand is not None
    half_seen = replace(all_seen, demand=replace(all_seen.demand, pods_covered=2))
    assert decide(spec, all_seen, filled_memory(spec, all_seen)).replicas == 2
    assert decide(spec, half_seen, filled_memory(spec, half_seen)).replicas == 4


# --- how many


def test_the_wanted_number_is_load_over_usable_capacity() -> None:
    spec = spec_of()
    decision = decide(spec, seen(at_capacity(spec, 3.4), ready=2), {})
    assert (decision.replicas, decision.wanted_replicas, decision.reason) == (4, 4, "DemandAboveCapacity")
    figures = decision.inputs
    share = figures["correction"] * (1 - figures["headroomPercent"] / 100)
    load = figures["arrivalsPerSecond"] + figures["backlogPerSecond"]
    needed = replicas_for(load, figures["capacityPerReplica"] * share, figures["capacityInPool"] * share)
    assert math.ceil(needed) == decision.wanted_replicas


def test_the_same_request_rate_needs_more_replicas_when_prompts_grow() -> None:
    spec = spec_of()
    short = decide(spec, seen(demand_of(20, isl=64, osl=64), ready=1), {})
    long = decide(spec, seen(demand_of(20, isl=4096, osl=64), ready=1), {})
    assert short.replicas == 1
    assert long.wanted_replicas is not None and long.wanted_replicas > 3


LASTING = {"isl": 256, "osl": 16384}


def rate_counted(arrivals: float, **fields: Any) -> float:
    """`arrivalsPerSecond` of a decision."""
    return decide(spec_of(), seen(demand_of(arrivals, **LASTING, **fields), ready=1), {}).inputs["arrivalsPerSecond"]


def test_of_requests_that_stay_long_those_that_run_tell_the_load() -> None:
    """Chance doubles or ends what arrives in a minute; what runs hardly changes by it."""
    usual = rate_counted(0.2, running=0.0)
    stay = 60 * 0.2 / usual
    assert stay > 120, "or nothing is tested here"
    steady = 0.2 * stay
    assert rate_counted(0.2, running=steady) == pytest.approx(0.2, rel=0.01), "what is steady is counted as it is"
    assert rate_counted(0.4, running=steady) == pytest.approx(0.2 * (1 + 60 / stay), rel=0.01)
    assert rate_counted(0.4, running=steady, waiting=9.0) == pytest.approx(0.4), "more than can run arrives"


def test_of_requests_that_are_soon_gone_what_arrives_tells_the_load() -> None:
    decision = decide(spec_of(), seen(demand_of(5, running=500.0), ready=1), {})
    assert decision.inputs["arrivalsPerSecond"] == 5


@pytest.mark.parametrize(
    ("lately", "waiting", "counted"),
    [
        (200.0, 30.0, (200 - math.sqrt(200)) / 15),
        (200.0, 1.0, 5.0),  # the replicas take it in
        (100.0, 30.0, 5.0),  # 75 ± 9 are usual
        (0.0, 30.0, 5.0),  # fewer than usual is not said so soon
        (None, 30.0, 5.0),
    ],
)
def test_a_jump_beyond_chance_that_makes_requests_wait_is_seen_before_the_minute_is_over(
    lately: float | None, waiting: float, counted: float
) -> None:
    load = demand_of(5.0, waiting=waiting, arrived_lately=lately)
    decision = decide(spec_of(), seen(load, ready=2), {})
    assert decision.inputs["arrivalsPerSecond"] == pytest.approx(counted, rel=1e-3)


def test_a_backlog_adds_replicas() -> None:
    spec = spec_of()
    load = at_capacity(spec, 0.9)
    decision = decide(spec, seen(replace(load, waiting=2000.0), ready=1), {})
    assert (decision.action, decision.reason) == (Action.SCALE_UP, "BacklogAboveTarget")


def test_late_requests_inside_a_full_batch_are_backlog_too() -> None:
    spec = spec_of()
    crowded = replace(at_capacity(spec, 0.9), running=600.0, ttft_p95_seconds=30.0)
    assert decide(spec, seen(crowded, ready=1), {}).inputs["backlogPerSecond"] > 0
    merely_many = replace(crowded, ttft_p95_seconds=0.5)
    assert decide(spec, seen(merely_many, ready=1), {}).inputs["backlogPerSecond"] == 0


@pytest.mark.parametrize(("needed", "expected"), [(2.15, 2), (2.3, 3)])
def test_a_small_lack_is_tolerated(needed: float, expected: int) -> None:
    spec = spec_of()
    assert decide(spec, seen(at_capacity(spec, needed), ready=2), {}).replicas == expected


@pytest.mark.parametrize(("needed", "expected"), [(2.05, 3), (1.95, 2)])
def test_fewer_replicas_must_hold_the_load(needed: float, expected: int) -> None:
    spec = spec_of()
    observation = seen(at_capacity(spec, needed), ready=3)
    assert decide(spec, observation, filled_memory(spec, observation)).replicas == expected


def test_what_runs_must_find_room_in_the_replicas_that_stay() -> None:
    spec = spec_of()
    idle_but_running = seen(demand_of(0, running=180.0), ready=4)
    assert decide(spec, idle_but_running, filled_memory(spec, idle_but_running)).replicas == 4
    context = 0.7 * 22_000 * 16 * 3
    full_kv = seen(demand_of(0, running=10.0, running_context_tokens=context), ready=4)
    decision = decide(spec, full_kv, filled_memory(spec, full_kv))
    assert (decision.wanted_replicas, decision.replicas) == (3, 3)


def test_no_traffic_at_all_goes_down_to_the_minimum_by_halves() -> None:
    spec = spec_of(autoscaling={"minReplicas": 2})
    idle = seen(demand_of(0), ready=8)
    decision = decide(spec, idle, filled_memory(spec, idle))
    assert (decision.replicas, decision.wanted_replicas) == (4, 1)


# --- without a step model


BLIND_ENGINE = replace(ENGINE, step_model=None)
GUESSED_ENGINE = replace(BLIND_ENGINE, prior=H100.step)


def test_without_a_step_model_a_missed_target_adds_a_replica() -> None:
    slow = replace(demand_of(5), ttft_p95_seconds=1.4)
    decision = decide(spec_of(), seen(slow, ready=2, engine=BLIND_ENGINE), {})
    assert (decision.replicas, decision.reason) == (3, "SignalAboveTarget")
    assert "capacityPerReplica" not in decision.inputs


def test_without_a_step_model_the_next_step_waits_for_the_last_one_to_start() -> None:
    slow = replace(demand_of(5), ttft_p95_seconds=5.0)
    starting = seen(
        slow,
        ready=2,
        engine=BLIND_ENGINE,
        current_replicas=3,
        replicas=pods(2) + pods(1, phase=ReplicaPhase.LOADING, age=5, first=2),
    )
    assert decide(spec_of(), starting, {}).replicas == 3
    overdue = replace(starting, replicas=pods(2) + pods(1, phase=ReplicaPhase.LOADING, age=500, first=2))
    assert decide(spec_of(), overdue, {}).replicas > 3


def test_without_a_step_model_well_met_targets_let_one_replica_go() -> None:
    spec = spec_of()
    easy = seen(replace(demand_of(1), running=2.0, itl_p95_seconds=0.01), ready=4, engine=BLIND_ENGINE)
    assert decide(spec, easy, filled_memory(spec, easy)).replicas == 3
    busy = seen(replace(demand_of(1), ttft_p95_seconds=0.6), ready=4, engine=BLIND_ENGINE)
    assert decide(spec, busy, filled_memory(spec, busy)).replicas == 4


def test_a_prior_adds_a_replica_before_any_pod_has_measured_itself() -> None:
    spec = spec_of()
    load = at_capacity(spec, 3)
    blind = decide(spec, seen(load, ready=1, engine=BLIND_ENGINE), {})
    guessed = decide(spec, seen(load, ready=1, engine=GUESSED_ENGINE), {})
    assert blind.action is Action.HOLD
    assert (guessed.action, guessed.replicas) == (Action.SCALE_UP, 2)
    # Three replicas' load, by a guess that is taken to be a quarter too low.
    assert guessed.inputs["pressure_prior"] == pytest.approx(3 / 1.25, rel=0.02)
    assert "prior at 2.4" in guessed.message and "capacityPerReplica" not in guessed.inputs


@pytest.mark.parametrize("rate", [0.01, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("ready", [1, 2, 4])
def test_a_prior_never_takes_a_replica_away(rate: float, ready: int) -> None:
    spec = spec_of(autoscaling={"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}})
    load = demand_of(rate)
    blind = decide(spec, seen(load, ready=ready, engine=BLIND_ENGINE), {})
    guessed = decide(spec, seen(load, ready=ready, engine=GUESSED_ENGINE), {})
    assert guessed.replicas >= blind.replicas


def test_settings_are_not_tuned_by_a_prior() -> None:
    spec = spec_of(batching={"mode": "Auto"})
    decision = decide(spec, seen(at_capacity(spec, 0.5), ready=1, engine=GUESSED_ENGINE), {})
    assert decision.settings == spec.initial_settings() and decision.settings_reason == ""


def test_how_much_of_the_model_was_measured_stands_in_the_inputs() -> None:
    spec = spec_of()
    known = decide(spec, seen(demand_of(1.0), ready=1, engine=replace(ENGINE, step_model_confidence=0.8)), {})
    assert known.inputs["modelConfidence"] == 0.8
    assert "modelConfidence" not in decide(spec, seen(demand_of(1.0), ready=1, engine=GUESSED_ENGINE), {}).inputs


# --- feedback


def test_a_missed_target_corrects_the_capacity_and_adds_a_replica() -> None:
    spec = spec_of()
    missed = seen(replace(at_capacity(spec, 1.9), ttft_p95_seconds=3.0), ready=2)
    decision = decide(spec, missed, {})
    assert (decision.action, decision.reason) == (Action.SCALE_UP, "TargetMissed")
    assert decision.inputs["correction"] < 1
    again = decide(spec, replace(missed, now=NOW + 15), decision.memory)
    assert again.inputs["correction"] == decision.inputs["correction"]


def test_a_share_that_is_asked_for_and_missed_adds_a_replica_where_the_95th_percentile_is_well() -> None:
    goal = {"ttft": {"milliseconds": 2000}}
    usual, strict = (spec_of(objectives=goal | {"attainmentPercent": share}) for share in (95, 99))
    late = {"ttft": {1.0: 0.0, 2.0: 96.0, 4.0: 100.0, math.inf: 100.0}}
    measured = seen(replace(at_capacity(usual, 1.9), ttft_p95_seconds=1.99, buckets=late), ready=2)
    assert decide(usual, measured, {}).replicas == 2
    decision = decide(strict, measured, {})
    assert (decision.replicas, decision.reason) == (3, "TargetMissed")


def test_no_correction_while_new_replicas_start_or_settle() -> None:
    spec = spec_of()
    missed = replace(at_capacity(spec, 1.9), ttft_p95_seconds=3.0)
    starting = seen(
        missed, ready=2, current_replicas=3, replicas=pods(2) + pods(1, phase=ReplicaPhase.PULLING, age=5, first=2)
    )
    assert decide(spec, starting, {}).inputs["correction"] == 1
    fresh = seen(missed, ready=2, replicas=pods(2, age=40))
    assert decide(spec, fresh, {}).inputs["correction"] == 1


def test_a_target_that_no_replica_can_reach_adds_none() -> None:
    spec = spec_of(objectives={"ttft": {"milliseconds": 1}})
    decision = decide(spec, seen(replace(demand_of(0.5), ttft_p95_seconds=0.2), ready=2), {})
    assert decision.replicas == 2
    assert "no number of replicas reaches the target for ttft" in decision.message


# --- how fast


def test_down_waits_for_its_window_and_takes_the_most_wanted_in_it() -> None:
    spec = spec_of()
    busy = seen(at_capacity(spec, 4.4), ready=5)
    memory = filled_memory(spec, busy)
    quiet = seen(demand_of(0.01), ready=5)
    decisions = []
    for index in range(30):
        decision = decide(spec, replace(quiet, now=NOW + 15 * index), memory)
        memory = decision.memory
        decisions.append(decision)
    first_down = next(index for index, item in enumerate(decisions) if item.replicas < 5)
    assert 300 <= 15 * first_down <= 360
    assert decisions[0].reason == "StabilizationWindow" and "StabilizationWindow" in decisions[0].bounded_by


def test_what_was_just_added_is_not_taken_away_at_the_next_look() -> None:
    spec = spec_of()
    memory = filled_memory(spec, seen(at_capacity(spec, 2.0), ready=2))
    surge = decide(spec, seen(at_capacity(spec, 3.6), ready=2), memory)
    assert surge.replicas == 4
    memory, found = surge.memory, []
    for second in range(15, 400, 15):
        decision = decide(spec, seen(at_capacity(spec, 2.0), ready=4, now=NOW + second), memory)
        memory = decision.memory
        found.append((second, decision.replicas))
    assert 300 <= next(second for second, replicas in found if replicas < 4) <= 360


def test_without_memory_nothing_goes_down() -> None:
    decision = decide(spec_of(), seen(demand_of(0.01), ready=5), {})
    assert (decision.replicas, decision.reason, decision.wanted_replicas) == (5, "StabilizationWindow", 1)


def test_up_waits_for_its_window_when_there_is_one() -> None:
    spec = spec_of(autoscaling={"behavior": {"scaleUp": {"stabilizationWindowSeconds": 60}}})
    memory = filled_memory(spec, seen(demand_of(0.01), ready=1))
    surge = seen(at_capacity(spec, 3.4), ready=1)
    for second in range(0, 60, 15):
        decision = decide(spec, replace(surge, now=NOW + second), memory)
        assert decision.replicas == 1
        memory = decision.memory
    # The window's end falls into a bucket of ten seconds.
    assert decide(spec, replace(surge, now=NOW + 75), memory).replicas > 1


def test_scale_up_policies_limit_the_growth_within_their_period() -> None:
    spec = spec_of(
        autoscaling={
            "maxReplicas": 100,
            "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 30}]}},
        }
    )
    load = at_capacity(spec, 50)
    first = decide(spec, seen(load, ready=2), {})
    assert (first.replicas, first.bounded_by) == (5, ("ScaleUpPolicy",))
    within = decide(spec, replace(seen(load, ready=5), now=NOW + 15), first.memory)
    assert (within.replicas, within.reason) == (5, "ScaleUpPolicy")
    after = decide(spec, replace(seen(load, ready=5), now=NOW + 31), within.memory)
    assert after.replicas == 8


@pytest.mark.parametrize(("engine", "period"), [(ENGINE, 15), (BLIND_ENGINE, 120)], ids=["known", "unknown"])
def test_by_default_replicas_at_most_double_in_a_period_that_is_a_start_while_capacity_is_unknown(
    engine: EngineInfo, period: int
) -> None:
    spec = spec_of(autoscaling={"maxReplicas": 100})
    load = replace(at_capacity(spec, 50), ttft_p95_seconds=30.0)

    def look(ready: int, seconds: float, memory: Mapping[str, object]) -> Decision:
        observation = seen(load, ready=ready, engine=engine, start_seconds=120.0)
        return decide(spec, replace(observation, now=NOW + seconds), memory)

    first = look(4, 0, {})
    soon = look(8, period - 5, first.memory)
    later = look(8, period + 5, soon.memory)
    assert (first.replicas, soon.replicas, later.replicas) == (8, 8, 16)


def test_a_decision_that_never_reached_the_cluster_does_not_count_against_the_limit() -> None:
    spec = spec_of(
        autoscaling={
            "maxReplicas": 100,
            "behavior": {"scaleUp": {"policies": [{"type": "Pods", "value": 3, "periodSeconds": 30}]}},
        }
    )
    load = seen(at_capacity(spec, 50), ready=2)
    first = decide(spec, load, {})
    assert decide(spec, replace(load, now=NOW + 15), first.memory).replicas == 5


@pytest.mark.parametrize(
    ("select", "expected"), [("Max", 8), ("Min", 6), ("Disabled", 4)], ids=["Max", "Min", "Disabled"]
)
def test_select_policy_chooses_among_the_limits(select: str, expected: int) -> None:
    policies = [
        {"type": "Percent", "value": 100, "periodSeconds": 60},
        {"type": "Pods", "value": 2, "periodSeconds": 60},
    ]
    spec = spec_of(
        autoscaling={"maxReplicas": 100, "behavior": {"scaleUp": {"policies": policies, "selectPolicy": select}}}
    )
    assert decide(spec, seen(at_capacity(spec, 50), ready=4), {}).replicas == expected


@pytest.mark.parametrize("select", ["Max", "Min", "Disabled"])
def test_scale_down_policies_work_likewise(select: str) -> None:
    policies = [
        {"type": "Percent", "value": 50, "periodSeconds": 60},
        {"type": "Pods", "value": 2, "periodSeconds": 60},
    ]
    down = {"policies": policies, "selectPolicy": select, "stabilizationWindowSeconds": 0}
    spec = spec_of(autoscaling={"maxReplicas": 100, "behavior": {"scaleDown": down}})
    expected = {"Max": 4, "Min": 6, "Disabled": 8}[select]
    assert decide(spec, seen(demand_of(0.01), ready=8), {}).replicas == expected


def test_bounds_hold_whatever_is_wanted() -> None:
    spec = spec_of(autoscaling={"minReplicas": 2, "maxReplicas": 3})
    assert decide(spec, seen(at_capacity(spec, 50), ready=2), {}).replicas == 3
    above = decide(spec, seen(None, ready=6), {})
    assert (above.replicas, above.reason) == (3, "MaxReplicas")
    below = decide(spec, seen(None, ready=1), {})
    assert (below.replicas, below.reason) == (2, "MinReplicas")


# --- pods that are no supply


def stuck(count: int, *, age: float, phase: ReplicaPhase, load: Demand, ready: int = 2) -> Observation:
    return seen(
        load,
        ready=ready,
        current_replicas=ready + count,
        replicas=pods(ready) + pods(count, phase=phase, age=age, first=ready),
    )


@pytest.mark.parametrize("phase", [ReplicaPhase.UNSCHEDULABLE, ReplicaPhase.GATED])
def test_no_more_is_asked_for_while_pods_find_no_node(phase: ReplicaPhase) -> None:
    spec = spec_of()
    decision = decide(spec, stuck(1, age=30, phase=phase, load=at_capacity(spec, 8)), {})
    assert (decision.replicas, decision.reason) == (3, "Unschedulable")
    assert decision.wanted_replicas == 8


def test_after_a_while_all_but_one_pod_without_a_node_are_withdrawn() -> None:
    spec = spec_of()
    decision = decide(spec, stuck(3, age=400, phase=ReplicaPhase.UNSCHEDULABLE, load=at_capacity(spec, 8)), {})
    assert decision.replicas == 3
    steady = decide(spec, stuck(1, age=400, phase=ReplicaPhase.UNSCHEDULABLE, load=at_capacity(spec, 8)), {})
    assert steady.replicas == 3


@pytest.mark.parametrize("phase", [ReplicaPhase.UNSCHEDULABLE, ReplicaPhase.CRASH_LOOPING, ReplicaPhase.PULL_FAILED])
def test_a_pod_that_cannot_start_does_not_block_the_way_down(phase: ReplicaPhase) -> None:
    spec = spec_of()
    observation = stuck(1, age=400, phase=phase, load=demand_of(0.01))
    assert decide(spec, observation, filled_memory(spec, observation)).replicas == 1


@pytest.mark.parametrize("phase", [ReplicaPhase.CRASH_LOOPING, ReplicaPhase.PULL_FAILED])
def test_one_more_is_asked_for_in_the_place_of_pods_that_do_not_come_up(phase: ReplicaPhase) -> None:
    spec = spec_of()
    decision = decide(spec, stuck(1, age=900, phase=phase, load=at_capacity(spec, 2.6)), {})
    assert (decision.replicas, decision.wanted_replicas) == (4, 4)
    assert decision.inputs["lostReplicas"] == 1
    enough = decide(spec, stuck(1, age=900, phase=phase, load=at_capacity(spec, 1.9)), {})
    assert enough.replicas == 3


def test_a_crash_loop_of_every_new_pod_is_no_storm() -> None:
    spec = spec_of(autoscaling={"maxReplicas": 40})
    replicas = 2
    memory: Mapping[str, object] = {}
    for minute in range(30):
        observation = stuck(replicas - 2, age=900, phase=ReplicaPhase.CRASH_LOOPING, load=at_capacity(spec, 8), ready=2)
        decision = decide(spec, replace(observation, now=NOW + 60 * minute), memory)
        replicas, memory = decision.replicas, decision.memory
    assert replicas == 9, "what the load needs, and one"


def test_where_no_pod_of_the_version_serves_none_is_added_for_the_lost() -> None:
    spec = spec_of()
    observation = stuck(1, age=900, phase=ReplicaPhase.CRASH_LOOPING, load=at_capacity(spec, 2.6))
    old = replace(observation, replicas=tuple(replace(item, updated=False) for item in observation.replicas))
    assert decide(spec, old, {}).replicas == 3


@pytest.mark.parametrize(("age", "restarts", "expected"), [(60, 0, 3), (500, 0, 4), (500, 1, 3)])
def test_a_starting_pod_is_credited_until_its_deadline_and_again_after_a_restart(
    age: float, restarts: int, expected: int
) -> None:
    spec = spec_of()
    observation = stuck(1, age=age, phase=ReplicaPhase.LOADING, load=at_capacity(spec, 2.6))
    starting = replace(observation.replicas[2], restarts=restarts)
    observation = replace(observation, replicas=(*observation.replicas[:2], starting))
    assert decide(spec, observation, {}).replicas == expected


# --- schedules, budgets, forecasts


def test_a_schedule_raises_and_lowers_whatever_is_measured_and_says_which() -> None:
    always = {"name": "launch", "startTime": "00:00", "endTime": "00:00"}
    raised = spec_of(autoscaling={"schedules": [{**always, "minReplicas": 4}]})
    for observation in (seen(demand_of(0.01), ready=2), seen(None, ready=2)):
        decision = decide(raised, observation, {})
        assert (decision.replicas, decision.reason) == (4, "Schedule")
        assert "schedule launch: 4 to 10 replicas" in decision.message
    lowered = spec_of(autoscaling={"schedules": [{**always, "maxReplicas": 3}]})
    decision = decide(lowered, seen(at_capacity(spec_of(), 8.5), ready=2), {})
    assert (decision.replicas, decision.bounded_by[-1], decision.wanted_replicas) == (3, "Schedule", 9)


def test_the_gpu_budget_bounds_the_replicas() -> None:
    spec = spec_of(autoscaling={"maxGPUs": 7}, resources={"gpu": {"count": 2}})
    decision = decide(spec, seen(at_capacity(spec, 8.5), ready=2), {})
    assert (decision.replicas, decision.bounded_by[-1]) == (3, "GPUBudget")
    shared = decide(spec, seen(at_capacity(spec, 8.5), ready=2, granted_gpus=4), {})
    assert (shared.replicas, shared.reason) == (2, "GPUShare")


def foreseen_forecast(
    level: float, *, belief: float, step: float = 0.69, at: float = NOW
) -> dict[str, dict[str, object]]:
    """Part of a memory: days on which the load moves, by default doubles, in the slot after `at`."""
    slot = int(at // SLOT_SECONDS)
    forecast = Forecast(
        level=level,
        checked=slot,
        steps=(((slot + 1) % SLOTS, step),),
        records=(Record(belief), Record(), Record()),
    )
    return {"forecast": dump_forecast(forecast)}


def foreseen_memory(spec: Spec, level: float, *, belief: float, step: float = 0.69) -> Mapping[str, object]:
    first = decide(spec, seen(at_capacity(spec, 1.9), ready=2), {})
    return {**first.memory, **foreseen_forecast(level, belief=belief, step=step)}


def level_of(spec: Spec, load: Demand) -> float:
    memory = decide(spec, seen(load, ready=2), {}).memory["forecast"]
    assert isinstance(memory, dict)
    return float(memory["level"])


def test_a_believed_forecast_adds_replicas_before_the_load_is_there() -> None:
    spec = spec_of()
    load = at_capacity(spec, 1.9)
    level = level_of(spec, load)
    slow = seen(load, ready=2, start_seconds=300.0)
    early = decide(spec, slow, foreseen_memory(spec, level, belief=0.9))
    assert (early.replicas, early.reason) == (4, "LoadForeseen")
    assert "by its season" in early.message
    assert early.inputs["forecastPerSecond"] == pytest.approx(2 * early.inputs["arrivalsPerSecond"], rel=0.02)
    doubted = decide(spec, slow, foreseen_memory(spec, level, belief=0.3))
    assert doubted.replicas == 2 and "forecastPerSecond" not in doubted.inputs


def test_a_forecast_never_takes_a_replica_away_and_keeps_those_that_it_will_need() -> None:
    spec = spec_of(autoscaling={"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}})
    load = at_capacity(spec, 1.6)
    observation = seen(load, ready=4, start_seconds=300.0)
    level = level_of(spec, load)
    assert decide(spec, observation, {}).wanted_replicas == 2
    assert decide(spec, observation, foreseen_memory(spec, level, belief=0.9)).wanted_replicas == 4
    falling = foreseen_memory(spec, level, belief=0.9, step=-1.0)
    assert decide(spec, observation, falling).wanted_replicas == 2


# --- settings


AUTO = {"batching": {"mode": "Auto"}}


def tuned_spec(**batching: Any) -> Spec:
    return spec_of(batching={"mode": "Auto", "minIntervalSeconds": 10, "verificationSeconds": 60, **batching})


LONG_ANSWERS = {"isl": 64, "osl": 1024}


def running_on(observation: Observation, decision: Decision) -> Observation:
    """The same, with every pod on the settings of `decision`."""
    return replace(
        observation,
        replicas=tuple(
            replace(replica, settings_generation=decision.settings_generation, settings=decision.settings)
            for replica in observation.replicas
        ),
    )


def test_settings_start_as_the_object_says_with_generation_one() -> None:
    spec = spec_of(batching={"mode": "Auto", "maxSequences": {"initial": 32}})
    decision = decide(spec, Observation(now=NOW, current_replicas=0), {})
    assert (decision.settings.max_num_seqs, decision.settings_generation) == (32, 1)


@pytest.mark.parametrize(("isl", "carries_more"), [(2048, True), (4096, False)])
def test_settings_that_serve_are_not_given_up_for_safer_ones_that_carry_less(isl: int, carries_more: bool) -> None:
    """Both mixes have settings that are better by a tenth and more, when what a full batch does to the ITL counts."""
    profile = load_profile("l4-qwen2.5-14b")
    engine = replace(ENGINE, kv_blocks=profile.kv_blocks, step_model=profile.step, max_model_len=8192)
    first = {"maxSequences": 12, "maxBatchedTokens": 4096, "prefillChunkTokens": 512}
    spec = tuned_spec(**{name: {"initial": value} for name, value in first.items()})
    loose = {"ttft": {"milliseconds": 2000}, "interTokenLatency": {"milliseconds": 200}}
    spec = spec.model_copy(update={"objectives": spec_of(objectives=loose).objectives})
    decision = decide(spec, seen(demand_of(1.0, isl=isl, osl=64), ready=4, engine=engine), {})
    assert (decision.settings_reason == "RetunedForMix") == carries_more


def test_settings_follow_the_mix_in_limited_steps() -> None:
    spec = tuned_spec(maxStepPercent=50)
    decision = decide(spec, seen(demand_of(9, **LONG_ANSWERS), ready=2), {})
    assert decision.reason == "RetunedForMix"
    assert 64 < decision.settings.max_num_seqs <= 96
    assert "predicted" in decision.message and "capacity" in decision.message
    assert decision.inputs["trial_predicted_capacity"] > decision.inputs["trial_predicted_capacity_before"]


def test_each_mix_gets_its_own_settings() -> None:
    spec = tuned_spec(maxStepPercent=400)
    many = decide(spec, seen(demand_of(9, **LONG_ANSWERS), ready=2), {}).settings
    few = decide(spec, seen(demand_of(9, isl=4096, osl=16), ready=2), {}).settings
    assert many.max_num_seqs > 64 > few.max_num_seqs


def test_settings_wait_for_the_interval_and_for_every_pod() -> None:
    spec = tuned_spec(maxStepPercent=50)
    observation = seen(demand_of(9, **LONG_ANSWERS), ready=2)
    first = decide(spec, observation, {})
    applied = running_on(observation, first)
    assert decide(spec, replace(applied, now=NOW + 5), first.memory).settings == first.settings
    lagging = replace(applied, replicas=(replace(applied.replicas[0], settings_generation=1), applied.replicas[1]))
    assert decide(spec, replace(lagging, now=NOW + 15), first.memory).settings == first.settings
    second = decide(spec, replace(applied, now=NOW + 15), first.memory)
    assert second.settings.max_num_seqs > first.settings.max_num_seqs
    assert second.settings_generation == first.settings_generation + 1


@pytest.mark.parametrize("state", [MetricsState.STALE, MetricsState.ABSENT])
def test_settings_stay_on_missing_metrics(state: MetricsState) -> None:
    observation = seen(demand_of(9, **LONG_ANSWERS), ready=2, metrics_state=state)
    assert decide(tuned_spec(), observation, {}).settings_generation == 1


def test_settings_stay_while_a_pod_is_not_seen_or_too_little_finished() -> None:
    spec = tuned_spec()
    load = demand_of(9, **LONG_ANSWERS)
    half_seen = seen(load, ready=2)
    half_seen = replace(half_seen, demand=replace(load, pods_covered=1))
    assert decide(spec, half_seen, {}).settings_generation == 1
    nothing_finished = seen(replace(load, finished_per_second={}), ready=2)
    assert decide(spec, nothing_finished, {}).settings_generation == 1


def test_observing_says_what_it_would_set_and_keeps_it() -> None:
    spec = tuned_spec(mode="Observe")
    decision = decide(spec, seen(demand_of(9, **LONG_ANSWERS), ready=2), {})
    assert decision.settings == spec.initial_settings() and decision.settings_generation == 1
    assert "would set batch settings" in decision.message
    assert decision.inputs["aim_max_num_seqs"] > 64


def test_fixed_settings_follow_the_object_only() -> None:
    spec = spec_of(batching={"mode": "Fixed", "maxSequences": {"initial": 48}})
    first = decide(spec, seen(demand_of(9, **LONG_ANSWERS), ready=2), {})
    assert (first.settings.max_num_seqs, first.settings_generation) == (48, 1)
    edited = spec_of(batching={"mode": "Fixed", "maxSequences": {"initial": 40}})
    second = decide(edited, seen(demand_of(0), ready=2), first.memory)
    assert (second.settings.max_num_seqs, second.settings_generation) == (40, 2)
    assert (second.action, second.reason) == (Action.RETUNE, "SettingsFixed")


def test_a_narrower_envelope_moves_the_settings_to_its_edge() -> None:
    first = decide(spec_of(), seen(demand_of(1), ready=1), {})
    narrow = spec_of(batching={"mode": "Observe", "maxSequences": {"max": 16}})
    second = decide(narrow, seen(demand_of(1), ready=1), first.memory)
    assert (second.settings.max_num_seqs, second.settings_generation) == (16, 2)
    assert second.reason == "SettingsClamped"


def test_a_change_whose_record_was_lost_is_taken_over_from_the_pods() -> None:
    newer = BatchSettings(100, 2048, 512)
    observation = seen(demand_of(0), ready=2)
    told = replace(
        observation,
        replicas=(
            replace(observation.replicas[0], settings_generation=7, settings=newer),
            replace(observation.replicas[1], settings_generation=6, settings=BatchSettings(64, 4096, 1024)),
        ),
    )
    decision = decide(tuned_spec(), told, {})
    assert (decision.settings, decision.settings_generation) == (newer, 7)


def verified(*, ttft_after: float, rate_after: float = 9.0, verification: int = 60) -> tuple[Decision, Decision]:
    """A change of the settings, and the decision at the end of its verification."""
    spec = tuned_spec(maxStepPercent=400, verificationSeconds=verification)
    before = seen(demand_of(9, ttft_p95_seconds=0.5, **LONG_ANSWERS), ready=2)
    changed = decide(spec, before, {})
    after = running_on(seen(demand_of(rate_after, ttft_p95_seconds=ttft_after, **LONG_ANSWERS), ready=2), changed)
    return changed, decide(spec, replace(after, now=NOW + 61), changed.memory)


def test_a_change_that_makes_the_objective_worse_is_rolled_back_and_not_tried_again_soon() -> None:
    changed, decision = verified(ttft_after=4.0)
    spec = tuned_spec(maxStepPercent=400)
    assert decision.settings_reason == "SettingsRolledBack"
    assert decision.settings == BatchSettings(64, 4096, 1024)
    assert decision.settings_generation == changed.settings_generation + 1
    again = running_on(seen(demand_of(9, ttft_p95_seconds=0.5, **LONG_ANSWERS), ready=2), decision)
    assert decide(spec, replace(again, now=NOW + 120), decision.memory).settings == decision.settings
    assert decide(spec, replace(again, now=NOW + 900), decision.memory).settings != decision.settings


def test_a_change_that_does_no_harm_is_kept_and_its_effect_told() -> None:
    changed, decision = verified(ttft_after=0.3)
    assert decision.settings == changed.settings
    assert decision.reason == "SettingsVerified"
    assert "measured TTFT p95 500 → 300 ms" in decision.message
    assert decision.inputs["effect_measured_ttft_seconds"] == pytest.approx(0.3)
    assert "effect_predicted_capacity" in decision.inputs


def test_a_worse_objective_under_a_much_higher_load_is_no_reason_to_roll_back() -> None:
    changed, decision = verified(ttft_after=4.0, rate_after=30.0)
    assert decision.settings == changed.settings


def test_replicas_do_not_go_down_while_settings_are_verified() -> None:
    spec = spec_of(
        batching={"mode": "Auto", "maxStepPercent": 400, "verificationSeconds": 60},
        autoscaling={"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}},
    )
    observation = seen(demand_of(9, **LONG_ANSWERS), ready=8)
    changed = decide(spec, observation, {})
    assert (changed.replicas, "SettingsVerification" in changed.bounded_by) == (8, True)
    applied = running_on(observation, changed)
    during = decide(spec, replace(applied, now=NOW + 30), changed.memory)
    assert (during.replicas, during.reason) == (8, "SettingsVerification")
    assert decide(spec, replace(applied, now=NOW + 61), during.memory).replicas < 8


def test_a_mix_that_is_still_changing_is_waited_for() -> None:
    spec = tuned_spec()
    first = decide(spec, seen(demand_of(2, osl=16), ready=2), {})
    settings = first.settings
    changing = running_on(seen(demand_of(2, **LONG_ANSWERS), ready=2), first)
    at_once = decide(spec, replace(changing, now=NOW + 40), first.memory)
    assert at_once.settings == settings
    later = decide(spec, replace(changing, now=NOW + 60), at_once.memory)
    assert later.reason == "RetunedForMix"


def test_settings_that_cannot_carry_the_load_do_not_wait_for_the_mix_to_settle() -> None:
    spec = tuned_spec()
    first = decide(spec, seen(demand_of(6, osl=16), ready=1), {})
    flooded = running_on(seen(demand_of(6, osl=1024), ready=1), first)
    assert decide(spec, replace(flooded, now=NOW + 40), first.memory).settings_reason == "RetunedForMix"


def test_in_a_backlog_settings_are_chosen_to_drain_it_and_no_steady_latency_is_promised() -> None:
    spec = tuned_spec(maxSequences={"initial": 8})
    waiting = demand_of(4, waiting=300.0, running=16.0, ttft_p95_seconds=23.0, **LONG_ANSWERS)
    decision = decide(spec, seen(waiting, ready=2), {})
    assert decision.settings_reason == "RetunedForMix"
    assert "late requests a replica drain in" in decision.settings_message
    assert "TTFT" not in decision.settings_message
    assert decision.inputs["trial_predicted_drain_seconds"] > 1


def test_longer_waits_while_a_backlog_drains_do_not_roll_settings_back() -> None:
    spec = tuned_spec(maxSequences={"initial": 8}, verificationSeconds=60)
    waiting = demand_of(4, waiting=300.0, running=16.0, ttft_p95_seconds=8.0, **LONG_ANSWERS)
    changed = decide(spec, seen(waiting, ready=2), {})
    still = running_on(seen(replace(waiting, waiting=200.0, ttft_p95_seconds=10.0), ready=2), changed)
    judged = decide(spec, replace(still, now=NOW + 61), changed.memory)
    assert judged.settings == changed.settings
    slower = running_on(seen(replace(waiting, ttft_p95_seconds=10.0, itl_p95_seconds=0.5), ready=2), changed)
    assert decide(spec, replace(slower, now=NOW + 61), changed.memory).settings_reason == "SettingsRolledBack"


@pytest.mark.parametrize(("window_seconds", "grows"), [(3.0, False), (35.0, True)])
def test_few_requests_right_after_the_first_samples_add_no_replica(window_seconds: float, grows: bool) -> None:
    spec = spec_of()
    rate = capacity_of_one(spec_of(objectives={"ttft": {"milliseconds": 1000}})) * 1.5
    few = demand_of(5 / 3.0 if not grows else rate, isl=16384, osl=1024, window_seconds=window_seconds)
    decision = decide(spec, seen(few, ready=1), {})
    assert decision.wanted_replicas is not None and decision.wanted_replicas > 1
    assert (decision.replicas > 1) == grows
    assert ("TooFewRequests" in decision.bounded_by) == (not grows)


# --- objectives


def with_two_patterns(rate: float) -> Demand:
    """Half short questions with long answers, half long prompts with short answers."""
    return replace(
        demand_of(rate),
        arrivals_per_second={64: rate / 2, 4096: rate / 2},
        finished_per_second={(64, 256): rate / 2, (4096, 64): rate / 2},
    )


def class_spec(mode: str = "Auto", **objectives: Any) -> Spec:
    """A class of each pattern; `objectives` of either by name."""
    classes = [
        {"name": "Answers", "inputTokens": {"max": 1024}},
        {"name": "Documents", "inputTokens": {"min": 1024}},
    ]
    return spec_of(
        batching={"mode": mode},
        objectives={"ttft": {"milliseconds": 4000}, "interTokenLatency": {"milliseconds": 200}},
        trafficClasses=[
            item | {"objectives": objectives[str(item["name"])]} if item["name"] in objectives else item
            for item in classes
        ],
    )


def test_the_plan_follows_the_pattern_that_binds_and_the_decision_says_which() -> None:
    observation = seen(with_two_patterns(4.0), ready=2)
    hurried = decide(class_spec(Documents={"ttft": {"milliseconds": 500}}), observation, {})
    smooth = decide(class_spec(Answers={"interTokenLatency": {"milliseconds": 20}}), observation, {})
    assert hurried.binding == "ttft:Documents" and "ttft of Documents binds" in hurried.message
    kept = decide(class_spec("Fixed", Answers={"interTokenLatency": {"milliseconds": 30}}), observation, {})
    assert kept.binding == "itl:Answers" and "itl of Answers binds" in kept.message
    assert hurried.settings.long_prefill_token_threshold > smooth.settings.long_prefill_token_threshold
    assert smooth.inputs["capacityPerReplica"] != hurried.inputs["capacityPerReplica"]


def test_feedback_works_on_the_pattern_that_misses_its_goal() -> None:
    spec = class_spec("Fixed", Documents={"ttft": {"milliseconds": 900}})
    observed = {
        ("ttft", "Documents"): {4.0: 0.0, 6.3: 1.0, math.inf: 1.0},
        ("ttft", "Answers"): {0.1: 0.0, 0.16: 1.0, math.inf: 1.0},
    }
    calm = seen(with_two_patterns(2.5), ready=1)
    missed = seen(replace(with_two_patterns(2.5), finished_buckets=observed), ready=1)
    assert decide(spec, calm, {}).replicas == 1
    decision = decide(spec, missed, {})
    assert decision.replicas > 1 and decision.reason == "TargetMissed"


def test_a_goal_for_whole_answers_needs_more_replicas_than_one_for_first_tokens() -> None:
    load = demand_of(6.0, isl=256, osl=256)
    first = decide(spec_of(), seen(load, ready=1), {})
    whole = decide(spec_of(objectives={"endToEnd": {"milliseconds": 6000}}), seen(load, ready=1), {})
    assert whole.inputs["capacityPerReplica"] < first.inputs["capacityPerReplica"]
    assert whole.binding == "endToEnd"


def test_a_floor_of_tokens_keeps_replicas_that_the_load_does_not_ask_for() -> None:
    load = demand_of(0.5, isl=256, osl=256)
    spec = spec_of(objectives={"outputTokensPerSecond": 20_000})
    decision = decide(spec, seen(load, ready=1), {})
    assert decision.replicas > decide(spec_of(), seen(load, ready=1), {}).replicas
    assert "as outputTokensPerSecond asks" in decision.message
    tokens = decision.inputs["floorPerSecond"] * 256
    assert tokens == pytest.approx(20_000, rel=0.6), "in requests of the length that is seen"


def test_priority_cost_takes_no_replica_for_the_headroom() -> None:
    spec = spec_of(autoscaling={"headroomPercent": 40})
    load = demand_of(1.5 * capacity_of_one(spec))
    thrifty = spec_of(autoscaling={"headroomPercent": 40}, objectives={"priority": "Cost"})
    assert decide(spec, seen(load, ready=1), {}).replicas == 3
    assert decide(thrifty, seen(load, ready=1), {}).replicas == 2


# --- properties


rates = st.floats(0, 60, allow_nan=False)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    ready = draw(st.integers(0, 8))
    starting = draw(st.integers(0, 3))
    lost = draw(st.integers(0, 2))
    state = draw(st.sampled_from(list(MetricsState)))
    demand = demand_of(
        draw(rates),
        isl=draw(st.sampled_from([0, 64, 1024, 4096])),
        osl=draw(st.sampled_from([0, 64, 256, 1024])),
        waiting=draw(st.floats(0, 500)),
        running=draw(st.floats(0, 500)),
        ttft_p95_seconds=draw(st.none() | st.floats(0, 60)),
        itl_p95_seconds=draw(st.none() | st.floats(0, 2)),
    )
    return seen(
        draw(st.none() | st.just(demand)),
        ready=ready,
        current_replicas=ready + starting + lost,
        replicas=pods(ready)
        + pods(starting, phase=ReplicaPhase.LOADING, age=draw(st.floats(0, 900)), first=20)
        + pods(lost, phase=ReplicaPhase.UNSCHEDULABLE, age=draw(st.floats(0, 900)), first=40),
        metrics_state=state,
        engine=draw(st.sampled_from([ENGINE, BLIND_ENGINE, None])),
    )


SPEC = tuned_spec()


@settings(max_examples=80, deadline=None)
@given(observations())
def test_replicas_and_settings_stay_within_their_bounds(observation: Observation) -> None:
    decision = decide(SPEC, observation, {})
    assert 1 <= decision.replicas <= 10
    assert find_violation(decision.settings, SPEC.envelope()) is None
    assert decision.reason and decision.reason[0].isupper() and " " not in decision.reason
    assert decision.message
    assert 1 <= decision.recheck_after_seconds <= SPEC.autoscaling.sync_period_seconds
    assert all(math.isfinite(value) for value in decision.inputs.values()) and len(decision.inputs) <= 64


@settings(max_examples=80, deadline=None)
@given(observations())
def test_the_decision_taken_again_once_it_is_done_changes_nothing(observation: Observation) -> None:
    first = decide(SPEC, observation, {})
    done = replace(observation, current_replicas=first.replicas)
    second = decide(SPEC, done, json.loads(json.dumps(dict(first.memory))))
    third = decide(SPEC, replace(done, current_replicas=second.replicas), second.memory)
    assert (third.settings, third.settings_generation) == (second.settings, second.settings_generation)
    assert second.settings_generation == first.settings_generation
    if observation.metrics_state != MetricsState.FRESH:
        assert second.replicas == first.replicas


@settings(max_examples=80, deadline=None)
@given(observations())
def test_nothing_is_taken_away_without_fresh_data(observation: Observation) -> None:
    blind = replace(observation, metrics_state=MetricsState.STALE)
    withdrawn = sum(
        replica.phase == ReplicaPhase.UNSCHEDULABLE and NOW - replica.created_at > 300 for replica in blind.replicas
    )
    decision = decide(SPEC, blind, {})
    assert decision.replicas >= min(10, blind.current_replicas - withdrawn)


@settings(max_examples=60, deadline=None)
@given(rates, rates, st.integers(1, 8), st.sampled_from([64, 1024]), st.sampled_from([64, 256]))
def test_more_load_never_gives_fewer_replicas(first: float, second: float, ready: int, isl: int, osl: int) -> None:
    spec = spec_of(autoscaling={"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}})
    low, high = sorted((first, second))
    fewer = decide(spec, seen(demand_of(low, isl=isl, osl=osl), ready=ready), {})
    more = decide(spec, seen(demand_of(high, isl=isl, osl=osl), ready=ready), {})
    assert more.replicas >= fewer.replicas


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(observations(), st.floats(1, 400)), min_size=1, max_size=12))
def test_memory_survives_json_and_stays_small(steps: list[tuple[Observation, float]]) -> None:
    memory: Mapping[str, object] = {}
    now = NOW
    for observation, delay in steps:
        now += delay
        decision = decide(SPEC, replace(observation, now=now), memory)
        memory = json.loads(json.dumps(dict(decision.memory)))
        assert memory == decision.memory
        assert len(json.dumps(memory)) < 6000


def test_the_order_of_the_series_does_not_matter() -> None:
    cells = {(64, 64): 3.0, (4096, 16): 1.0, (1024, 256): 2.0}
    arrivals = {64: 3.0, 4096: 1.0, 1024: 2.0}
    one = replace(demand_of(1), arrivals_per_second=arrivals, finished_per_second=cells)
    other = replace(
        demand_of(1),
        arrivals_per_second=dict(reversed(arrivals.items())),
        finished_per_second=dict(reversed(cells.items())),
    )
    assert decide(SPEC, seen(one, ready=2), {}) == decide(SPEC, seen(other, ready=2), {})


DAY_SECONDS = 86_400
levels = st.floats(-4, 1)
"""Of a forecast: the load of a tenth of a replica to that of ten."""
steps_of = st.lists(st.tuples(observations(), st.floats(1, 900)), min_size=1, max_size=8)


def lived(spec: Spec, steps: list[tuple[Observation, float]], *, start: float = NOW) -> list[Decision]:
    """Decisions one after the other, from the first one's empty memory."""
    decisions: list[Decision] = []
    now, memory = start, dict[str, object]()
    for observation, delay in steps:
        now += delay
        decisions.append(decide(spec, moved(observation, now - NOW), memory))
        memory = dict(decisions[-1].memory)
    return decisions


def moved(observation: Observation, seconds: float) -> Observation:
    """The same so much later."""
    replicas = tuple(
        replace(
            item,
            created_at=item.created_at + seconds,
            ready_at=None if item.ready_at is None else item.ready_at + seconds,
        )
        for item in observation.replicas
    )
    return replace(observation, now=observation.now + seconds, replicas=replicas)


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps_of)
def test_a_restart_between_any_two_decisions_changes_none_of_them(steps: list[tuple[Observation, float]]) -> None:
    now, memory = NOW, dict[str, object]()
    for (observation, delay), expected in zip(steps, lived(SPEC, steps), strict=True):
        now += delay
        decision = decide(SPEC, moved(observation, now - NOW), memory)
        assert decision == expected
        memory = json.loads(json.dumps(dump_memory(load_memory(decision.memory))))


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps_of, st.integers(1, 400))
def test_the_day_on_which_it_happens_does_not_matter(steps: list[tuple[Observation, float]], days: int) -> None:
    whole = [(observation, float(round(delay))) for observation, delay in steps]
    one, other = lived(SPEC, whole), lived(SPEC, whole, start=NOW + days * DAY_SECONDS)
    for mine, theirs in zip(one, other, strict=True):
        assert (mine.replicas, mine.reason, mine.settings, mine.inputs) == (
            theirs.replicas,
            theirs.reason,
            theirs.settings,
            theirs.inputs,
        )


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    steps_of,
    rates,
    rates,
    st.integers(1, 8),
    st.sampled_from([0.0, 0.9]),
    levels,
)
def test_more_load_never_gives_fewer_replicas_whatever_came_before(
    steps: list[tuple[Observation, float]], first: float, second: float, ready: int, belief: float, level: float
) -> None:
    spec = spec_of()
    last = lived(spec, steps)[-1]
    low, high = sorted((first, second))
    later = NOW + sum(delay for _, delay in steps) + 15
    memory = {**last.memory, **foreseen_forecast(level, belief=belief, at=later)}
    fewer, more = (decide(spec, moved(seen(demand_of(rate), ready=ready), later - NOW), memory) for rate in (low, high))
    assert more.replicas >= fewer.replicas


@settings(max_examples=EXAMPLES, deadline=None)
@given(steps_of, rates, st.integers(1, 8), st.sampled_from([0.0, 0.9]), levels)
def test_a_forecast_never_gives_fewer_replicas_than_none(
    steps: list[tuple[Observation, float]], rate: float, ready: int, belief: float, level: float
) -> None:
    spec = spec_of()
    last = lived(spec, steps)[-1]
    later = NOW + sum(delay for _, delay in steps) + 15
    observation = moved(seen(demand_of(rate), ready=ready, start_seconds=300.0), later - NOW)
    plain = {name: value for name, value in last.memory.items() if name != "forecast"}
    without = decide(spec, observation, plain)
    with_it = decide(spec, observation, {**plain, **foreseen_forecast(level, belief=belief, at=later)})
    assert with_it.replicas >= without.replicas


@settings(max_examples=EXAMPLES, deadline=None)
@given(rates, st.integers(2, 8), st.integers(1, 7))
def test_pods_that_are_not_seen_never_let_more_go(rate: float, ready: int, unseen: int) -> None:
    spec = spec_of(autoscaling={"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}})
    demand = demand_of(rate, pods_covered=ready)
    partly = replace(demand, pods_covered=max(1, ready - unseen))
    assert decide(spec, seen(partly, ready=ready), {}).replicas >= decide(spec, seen(demand, ready=ready), {}).replicas


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.floats(0.5, 60), st.sampled_from([0.5, 2.0, 4.0]), st.sampled_from([(256, 64), (2048, 32), (64, 512)]))
def test_a_world_that_runs_slower_needs_as_many_replicas_for_as_much_less(
    rate: float, slower: float, lengths: tuple[int, int]
) -> None:
    """Every time times a factor, every rate over it: steps, targets, window and start."""
    isl, osl = lengths
    model = StepModel(
        **{name: value * (slower if name.endswith("_seconds") else 1) for name, value in H100.step.as_dict().items()}
    )
    targets = {"ttft": {"milliseconds": 2000}, "interTokenLatency": {"milliseconds": 100}}
    slow_targets = {name: {"milliseconds": int(goal["milliseconds"] * slower)} for name, goal in targets.items()}
    plain = decide(spec_of(objectives=targets), seen(demand_of(rate, isl=isl, osl=osl), ready=2), {})
    observation = seen(
        demand_of(rate / slower, isl=isl, osl=osl, window_seconds=60 * slower),
        ready=2,
        engine=replace(ENGINE, step_model=model),
        start_seconds=20 * slower,
    )
    slow = decide(spec_of(objectives=slow_targets), observation, {})
    assert slow.inputs["needed"] == pytest.approx(plain.inputs["needed"], rel=0.03)
