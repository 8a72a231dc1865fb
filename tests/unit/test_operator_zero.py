"""Scale to and from zero: only what is known to be idle sleeps, whatever is held wakes it, restarts forget nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.observation import Decision, Demand, MetricsState, Observation, Replica, ReplicaPhase
from tidegate_operator.policy import decide
from tidegate_operator.zero import ScaleToZero, ZeroState, is_idle, load_zero

NOW = 1_700_000_000.0
ASKED = ScaleToZero(idle_seconds=600)


def spec_of(**autoscaling: Any) -> Spec:
    return parse_spec(
        {"model": {"uri": "file:///m"}, "autoscaling": {"minReplicas": 1, "maxReplicas": 8, **autoscaling}}
    )


def demand_of(*, running: float = 0, waiting: float = 0, rate: float = 0, pods: int = 1) -> Demand:
    return Demand(
        window_seconds=60,
        sampled_at=NOW,
        arrivals_per_second={64: rate},
        finished_per_second={},
        running=running,
        waiting=waiting,
        waiting_prompt_tokens=0,
        running_context_tokens=0,
        running_past_output_edge={},
        ttft_p95_seconds=None,
        itl_p95_seconds=None,
        queue_p95_seconds=None,
        prompt_tokens_per_second=None,
        cached_prompt_tokens_per_second=None,
        generation_tokens_per_second=None,
        kv_used_ratio=0,
        preemptions_per_second=0,
        pods_covered=pods,
    )


def pod(phase: ReplicaPhase = ReplicaPhase.READY, index: int = 0) -> Replica:
    return Replica(name=f"pod-{index}", uid=str(index), ip="10.0.0.1", phase=phase, created_at=NOW - 1000)


def seen(count: int, *, held: float | None = 0, demand: Demand | None = None, **fields: Any) -> Observation:
    base = Observation(
        now=NOW,
        current_replicas=count,
        replicas=tuple(pod(index=index) for index in range(count)),
        demand=demand,
        metrics_state=MetricsState.FRESH if demand else MetricsState.ABSENT,
        held_requests=held,
    )
    return replace(base, **fields)


@dataclass
class Life:
    """An object over time; every decision starts from memory that went through JSON."""

    spec: Spec = field(default_factory=spec_of)
    memory: Mapping[str, object] = field(default_factory=dict)
    now: float = NOW

    def look(self, observation: Observation, *, after: float = 15) -> Decision:
        self.now += after
        decision = decide(self.spec, replace(observation, now=self.now), self.memory, zero=ASKED)
        self.memory = json.loads(json.dumps(dict(decision.memory)))
        return decision


IDLE = seen(1, demand=demand_of())


def asleep() -> Life:
    life = Life()
    life.look(IDLE)
    assert life.look(IDLE, after=600).replicas == 0
    return life


def test_an_idle_object_sleeps_after_its_time_and_not_before() -> None:
    life = Life()
    assert life.look(IDLE).replicas == 1
    assert life.look(IDLE, after=590).replicas == 1
    slept = life.look(IDLE, after=15)
    assert (slept.replicas, slept.reason) == (0, "Idle")


@pytest.mark.parametrize(
    "busy",
    [
        seen(1, demand=demand_of(running=1)),
        seen(1, demand=demand_of(waiting=1)),
        seen(1, demand=demand_of(rate=0.02)),
        seen(1, held=3, demand=demand_of()),
        seen(1, held=None, demand=demand_of()),
        seen(1, demand=None),
        seen(1, demand=demand_of(), metrics_state=MetricsState.STALE),
        seen(2, demand=demand_of(pods=1)),
    ],
    ids=["running", "waiting", "arriving", "held", "no gateway", "no metrics", "stale", "a pod unseen"],
)
def test_what_is_busy_or_unknown_is_not_idle_and_starts_the_time_anew(busy: Observation) -> None:
    life = Life()
    life.look(IDLE)
    assert life.look(busy, after=700).replicas >= 1
    assert life.look(IDLE, after=15).replicas >= 1
    assert life.look(IDLE, after=590).replicas >= 1
    assert life.look(IDLE, after=15).replicas == 0


def test_many_idle_replicas_go_to_zero_at_once() -> None:
    life = Life()
    idle = seen(4, demand=demand_of(pods=4))
    life.look(idle)
    assert life.look(idle, after=601).replicas == 0


def test_it_stays_at_zero_while_nothing_is_held_and_nothing_is_written() -> None:
    life = asleep()
    first = life.look(seen(0))
    later = life.look(seen(0), after=86_400)
    assert (first.replicas, first.reason) == (later.replicas, later.reason) == (0, "ScaledToZero")
    assert first.memory == later.memory


def test_a_gateway_that_does_not_answer_neither_wakes_nor_sends_to_sleep() -> None:
    life = asleep()
    held_unknown = life.look(seen(0, held=None))
    assert held_unknown.replicas == 0 and "unknown" in held_unknown.message


@pytest.mark.parametrize(("held", "expected"), [(1, 1), (64, 1), (100, 2), (5000, 2)])
def test_held_requests_wake_as_many_as_take_them_but_no_storm(held: float, expected: int) -> None:
    woken = asleep().look(seen(0, held=held))
    assert (woken.replicas, woken.reason) == (expected, "RequestsHeld")


def test_it_wakes_to_its_minimum_and_never_beyond_its_maximum() -> None:
    life = asleep()
    life.spec = spec_of(minReplicas=4)
    assert life.look(seen(0, held=1)).replicas == 4
    life.spec = spec_of(maxReplicas=1)
    assert life.look(seen(0, held=500)).replicas == 1


def test_a_waking_replica_is_waited_for_while_requests_are_held_and_let_go_when_they_gave_up() -> None:
    life = asleep()
    life.look(seen(0, held=2))
    loading = seen(1, held=2, replicas=(pod(ReplicaPhase.LOADING),))
    assert life.look(loading, after=1200).replicas == 1
    given_up = replace(loading, held_requests=0.0)
    assert life.look(given_up).replicas == 1
    assert life.look(given_up, after=601).replicas == 0


def test_a_model_that_never_loaded_is_started_without_a_request_and_kept_until_it_has() -> None:
    life = Life()
    assert life.look(seen(0)).reason == "FirstReplicas"
    loading = seen(1, replicas=(pod(ReplicaPhase.LOADING),))
    assert life.look(loading).replicas == 1
    assert life.look(loading, after=10_000).replicas == 1


def test_a_draining_pod_may_still_run_requests() -> None:
    draining = seen(1, replicas=(pod(ReplicaPhase.DRAINING),))
    assert not is_idle(draining) and is_idle(seen(0))


def test_without_the_wish_nothing_ever_sleeps() -> None:
    memory: Mapping[str, object] = {}
    for hour in range(5):
        decision = decide(spec_of(), replace(IDLE, now=NOW + 3600 * hour), memory)
        memory = decision.memory
        assert decision.replicas == 1
    assert "zero" not in memory


def test_others_who_scale_are_left_alone() -> None:
    spec = parse_spec({"model": {"uri": "file:///m"}, "replicas": 2, "autoscaling": {"mode": "External"}})
    decision = decide(spec, seen(0, held=4, spec_replicas=2), {}, zero=ASKED)
    assert (decision.replicas, decision.reason) == (2, "ScaledByOthers")


@st.composite
def looks(draw: st.DrawFn) -> tuple[float, float | None, float, bool]:
    """Seconds later, held, running, whether metrics are fresh."""
    return (
        draw(st.floats(1, 900)),
        draw(st.none() | st.sampled_from([0.0, 0.0, 0.0, 3.0])),
        draw(st.sampled_from([0.0, 0.0, 2.0])),
        draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(looks(), max_size=25))
def test_it_sleeps_only_after_a_whole_idle_time_and_wakes_at_the_first_held_request(
    steps: list[tuple[float, float | None, float, bool]],
) -> None:
    life, replicas, idle_from = Life(memory=decide(spec_of(), IDLE, {}, zero=ASKED).memory), 1, NOW
    for after, held, running, fresh in steps:
        observation = seen(replicas, held=held, demand=demand_of(running=running, pods=replicas) if fresh else None)
        known_idle = held == 0 and (replicas == 0 or (fresh and running == 0))
        if not known_idle:
            idle_from = life.now + after
        decision = life.look(observation, after=after)
        if replicas > 0 and decision.replicas == 0:
            assert known_idle and life.now - idle_from >= ASKED.idle_seconds
        if replicas == 0:
            assert (decision.replicas > 0) == bool(held)
        replicas = decision.replicas


@pytest.mark.parametrize("data", ["ab", 3, [1], {"a": 1, "b": 2}])
def test_what_cannot_be_read_is_refused(data: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        load_zero(data)
    assert load_zero(None) == ZeroState()
