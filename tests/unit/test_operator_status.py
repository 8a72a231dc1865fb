"""The status: truthful conditions for every way in which pods fail, quiet under noise, Events on change only."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import BatchSettings
from tidegate_operator import api, api_status, status
from tidegate_operator.observation import (
    Action,
    Decision,
    Demand,
    EngineInfo,
    GpuPrice,
    Limits,
    MetricsState,
    Observation,
    PatternShare,
    Replica,
    ReplicaPhase,
)

NOW = 1_800_000_000.0
LATER = NOW + 3600
LOAD = BatchSettings(64, 4096, 1024)


def target(generation: int = 1, **fields: Any) -> api.Target:
    spec = api.parse_spec({"model": {"uri": "file:///models/m.gguf"}, **fields})
    return api.Target("chat", "team", "uid", generation, spec)


def pod(phase: ReplicaPhase = ReplicaPhase.READY, **fields: Any) -> Replica:
    known: dict[str, Any] = {"name": "p", "uid": "u", "ip": "10.0.0.1", "created_at": NOW, "settings_generation": 1}
    return Replica(**{**known, "phase": phase, **fields})


def demand(**fields: Any) -> Demand:
    known: dict[str, Any] = {
        "window_seconds": 60.0, "sampled_at": NOW, "arrivals_per_second": {0: 1.0, 1024: 2.0},
        "finished_per_second": {}, "running": 3.0, "waiting": 0.0, "waiting_prompt_tokens": 0.0,
        "running_context_tokens": 900.0, "running_past_output_edge": {}, "ttft_p95_seconds": 0.4,
        "itl_p95_seconds": 0.03, "queue_p95_seconds": 0.1, "prompt_tokens_per_second": 1.0,
        "cached_prompt_tokens_per_second": 0.0, "generation_tokens_per_second": 1.0, "kv_used_ratio": 0.1,
        "preemptions_per_second": 0.0, "pods_covered": 1,
    }  # fmt: skip
    return Demand(**{**known, **fields})


def seen(*pods: Replica, **fields: Any) -> Observation:
    known: dict[str, Any] = {
        "now": NOW, "current_replicas": len(pods), "replicas": pods, "metrics_state": MetricsState.FRESH,
    }  # fmt: skip
    return Observation(**{**known, **fields})


def chosen(replicas: int = 1, **fields: Any) -> Decision:
    known: dict[str, Any] = {
        "settings": LOAD, "settings_generation": 1, "action": Action.HOLD, "reason": "LoadAsExpected",
        "message": "1 replica is enough", "recheck_after_seconds": 15.0,
    }  # fmt: skip
    return Decision(**{**known, "replicas": replicas, **fields})


def build(
    observation: Observation, decision: Decision | None = None, previous: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    asked = decision or chosen(max(1, len(observation.replicas)))
    return status.build(target(**spec), observation, asked, previous or {}, now=NOW if not previous else LATER)


def condition(built: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any]
    (found,) = [item for item in built["conditions"] if item["type"] == kind]
    return found


def states(built: dict[str, Any]) -> dict[str, str]:
    return {item["type"]: item["status"] for item in built["conditions"]}


def test_a_serving_object_is_ready_and_nothing_is_left_to_do() -> None:
    built = build(seen(pod()))
    told = states(built)
    assert {kind for kind, state in told.items() if state == "True"} == {
        "Ready", "Available", "Progressing", "ModelReady", "CapacityAvailable", "MetricsAvailable", "AbleToScale",
        "BatchingApplied",
    }  # fmt: skip
    assert told["Reconciling"] == told["Stalled"] == told["Degraded"] == "False"
    assert built["replicas"] == built["readyReplicas"] == built["updatedReplicas"] == 1
    assert built["url"] == "http://chat.team.svc:8000/v1"
    assert built["selector"] == "app.kubernetes.io/name=tidegate-engine,app.kubernetes.io/instance=chat"


def test_the_first_status_of_an_object_is_not_ready_and_reconciling() -> None:
    built = build(seen(current_replicas=0, metrics_state=MetricsState.ABSENT))
    assert condition(built, "Ready")["status"] == "False"
    assert condition(built, "Reconciling")["status"] == "True"
    assert condition(built, "ModelReady")["status"] == "Unknown"
    assert condition(built, "MetricsAvailable")["status"] == "Unknown"


def test_every_condition_type_is_stated_for_the_generation_that_was_read() -> None:
    built = status.build(target(generation=7), seen(pod()), chosen(), {}, now=NOW)
    assert {item["type"] for item in built["conditions"]} == {str(kind) for kind in api.ConditionType}
    assert {item["observedGeneration"] for item in built["conditions"]} == {7}
    assert built["observedGeneration"] == 7


CRASH = ReplicaPhase.CRASH_LOOPING
FAILURES = [
    (pod(CRASH, reason="ModelNotFound", message="/models/m.gguf does not exist"), "ModelNotFound", True),
    (pod(CRASH, reason="ModelInvalid", message="the file ends early"), "ModelInvalid", True),
    (pod(CRASH, reason="SettingsInvalid", message="max_num_seqs is 0"), "SettingsInvalid", True),
    (pod(CRASH, reason="Error", message="cp: cannot stat '/models/x'"), "ModelNotFound", True),
    (pod(CRASH, reason="Error", message="Segmentation fault", restarts=1), "EngineFailed", False),
    (pod(CRASH, reason="Error", message="Segmentation fault", restarts=3), "EngineFailed", True),
    (pod(CRASH, reason="EngineFailed", message="3 steps failed", restarts=1), "EngineFailed", False),
    (pod(CRASH, reason="ConnectionError", message="no route", restarts=1), "ConnectionError", False),
    (pod(CRASH, reason="ConnectionError", message="no route", restarts=3), "ConnectionError", True),
    (pod(CRASH, reason="OOMKilled", message="", restarts=1), "OutOfMemory", False),
    (pod(CRASH, reason="OOMKilled", message="", restarts=3), "OutOfMemory", True),
    (pod(ReplicaPhase.PULL_FAILED, reason="ErrImagePull", message="x: not found"), "ImagePullFailed", True),
    (pod(ReplicaPhase.PULL_FAILED, reason="ErrImagePull", message="i/o timeout"), "ImagePullFailed", False),
    (pod(ReplicaPhase.PULL_FAILED, reason="ErrImageNeverPull", message="x"), "ImagePullFailed", True),
    (pod(ReplicaPhase.UNSCHEDULABLE, message="0/1 nodes: 1 Insufficient nvidia.com/gpu"), "Unschedulable", False),
    (pod(ReplicaPhase.GATED, message="waits for the scheduling gates q"), "Gated", False),
]


@pytest.mark.parametrize(("failing", "reason", "permanent"), FAILURES, ids=[f"{f[1]}-{f[2]}" for f in FAILURES])
def test_a_pod_that_cannot_serve_is_told_with_its_reason(failing: Replica, reason: str, permanent: bool) -> None:
    built = build(seen(failing))
    ready = condition(built, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert ready["message"]
    assert condition(built, "Stalled")["status"] == str(permanent)
    assert condition(built, "Reconciling")["status"] == str(not permanent)
    assert condition(built, "Degraded")["status"] == "True"
    assert condition(built, "Available")["status"] == "False"


def test_the_engines_own_sentence_stands_in_the_condition() -> None:
    built = build(seen(pod(CRASH, reason="ModelNotFound", message="/models/m.gguf does not exist")))
    assert condition(built, "ModelReady")["message"] == "/models/m.gguf does not exist"


def test_a_lack_of_nodes_is_a_matter_of_capacity_not_of_the_model() -> None:
    built = build(seen(pod(ReplicaPhase.UNSCHEDULABLE, message="no room")))
    assert condition(built, "CapacityAvailable")["status"] == "False"
    assert condition(built, "ModelReady")["reason"] == "ModelLoading"


def test_a_quota_is_told_although_no_pod_exists() -> None:
    observation = seen(
        current_replicas=1, workload_reason="FailedCreate", workload_message="pods is forbidden: exceeded quota: gpus"
    )
    built = build(observation, chosen(1))
    assert condition(built, "CapacityAvailable")["reason"] == "QuotaExceeded"
    assert condition(built, "Ready")["reason"] == "QuotaExceeded"


def test_a_broken_new_version_beside_a_serving_old_one_is_available_but_not_ready() -> None:
    old, new = pod(updated=False), pod(CRASH, reason="ModelInvalid", message="bad magic")
    built = build(seen(old, new, current_replicas=1, rollout_in_progress=True), chosen(1))
    assert condition(built, "Available")["status"] == "True"
    assert condition(built, "Ready")["reason"] == "ModelInvalid"
    assert condition(built, "Stalled")["status"] == "True"


def test_one_broken_pod_among_serving_ones_is_degraded_but_ready() -> None:
    built = build(seen(pod(), pod(CRASH, reason="OOMKilled", restarts=9)))
    assert condition(built, "Ready")["status"] == "True"
    assert condition(built, "Degraded")["reason"] == "OutOfMemory"
    assert condition(built, "Stalled")["status"] == "False"


def test_pods_that_drain_are_counted_apart() -> None:
    built = build(seen(pod(), pod(ReplicaPhase.DRAINING), current_replicas=1), chosen(1))
    assert (built["replicas"], built["drainingReplicas"]) == (1, 1)
    assert condition(built, "Reconciling")["status"] == "False"


def test_none_asked_for_is_ready_but_not_available() -> None:
    built = build(seen(), chosen(0), replicas=0)
    assert condition(built, "Ready")["reason"] == "ScaledToZero"
    assert condition(built, "Available")["status"] == "False"


@pytest.mark.parametrize(
    ("state", "message", "expected"),
    [
        (MetricsState.FRESH, "", ("True", "MetricsFound")),
        (MetricsState.STALE, "", ("False", "MetricsStale")),
        (MetricsState.ABSENT, "", ("False", "MetricsMissing")),
        (MetricsState.ABSENT, "PrometheusError: connection refused", ("False", "PrometheusError")),
    ],
)
def test_missing_metrics_are_told(state: MetricsState, message: str, expected: tuple[str, str]) -> None:
    built = build(seen(pod(), metrics_state=state, metrics_message=message), autoscaling={"maxReplicas": 3})
    told = condition(built, "MetricsAvailable")
    assert (told["status"], told["reason"]) == expected
    assert condition(built, "ScalingActive")["status"] == expected[0]


def test_the_time_of_the_last_sample_is_written_only_once_samples_stop() -> None:
    fresh = build(seen(pod(), demand=demand()))
    assert "lastSampleTime" not in fresh["metrics"]
    stale = build(seen(pod(), metrics_state=MetricsState.STALE), previous=fresh)
    assert stale["metrics"]["lastSampleTime"] == "2027-01-15T07:59:00Z"
    gone = build(seen(pod(), metrics_state=MetricsState.ABSENT), previous=stale)
    assert gone["metrics"]["lastSampleTime"] == "2027-01-15T07:59:00Z"
    never = build(seen(pod(), metrics_state=MetricsState.ABSENT))
    assert "lastSampleTime" not in never["metrics"]


@pytest.mark.parametrize(
    ("autoscaling", "reason"),
    [
        (None, "ScalingOff"),
        ({"mode": "External"}, "ScaledByOthers"),
        ({"mode": "Observe", "maxReplicas": 3}, "ObservingOnly"),
        ({"maxReplicas": 3, "paused": True}, "ScalingPaused"),
    ],
)
def test_it_is_said_why_the_operator_does_not_scale(autoscaling: dict[str, Any] | None, reason: str) -> None:
    spec: dict[str, Any] = {"autoscaling": autoscaling} if autoscaling else {}
    built = build(seen(pod()), **spec)
    told = condition(built, "ScalingActive")
    assert (told["status"], told["reason"]) == ("False", reason)


@pytest.mark.parametrize(("wanted", "reason"), [(9, "TooManyReplicas"), (1, "TooFewReplicas"), (3, "WithinBounds")])
def test_bounds_that_hold_the_number_are_told(wanted: int, reason: str) -> None:
    decision = chosen(3, wanted_replicas=wanted, limits=Limits(2, 4))
    built = build(seen(pod()), decision, autoscaling={"minReplicas": 2, "maxReplicas": 4})
    assert condition(built, "ScalingLimited")["reason"] == reason


def test_settings_count_as_applied_when_every_ready_pod_acknowledged_them() -> None:
    waiting = build(seen(pod(settings_generation=2), pod(settings_generation=1)), chosen(2, settings_generation=2))
    assert condition(waiting, "BatchingApplied")["status"] == "False"
    assert waiting["batching"]["appliedReplicas"] == 1
    pods = (pod(settings_generation=2), pod(ReplicaPhase.LOADING, settings_generation=None))
    assert condition(build(seen(*pods), chosen(2, settings_generation=2)), "BatchingApplied")["status"] == "True"


GOAL: dict[str, Any] = {"objectives": {"ttft": {"milliseconds": 500}}}


def test_objectives_are_judged_with_a_margin_on_the_way_back() -> None:
    def judged(seconds: float | None, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        return build(seen(pod(), demand=demand(ttft_p95_seconds=seconds)), previous=previous, **GOAL)

    assert condition(judged(0.4), "ObjectivesMet")["status"] == "True"
    missed = judged(0.6)
    assert condition(missed, "ObjectivesMet")["reason"] == "Missed"
    still = judged(0.49, missed)
    assert condition(still, "ObjectivesMet")["status"] == "False"
    assert condition(judged(0.44, still), "ObjectivesMet")["status"] == "True"
    assert condition(judged(None), "ObjectivesMet")["reason"] == "NoTraffic"
    assert condition(build(seen(pod())), "ObjectivesMet")["reason"] == "NoObjectives"


def test_the_share_that_is_asked_for_is_told_and_judged() -> None:
    def built(late: float, previous: dict[str, Any] | None = None, **asked: int) -> dict[str, Any]:
        buckets = {"ttft": {0.25: 0.0, 0.5: 100.0 - late, 1.0: 100.0, math.inf: 100.0}}
        goal: dict[str, Any] = {"objectives": {"ttft": {"milliseconds": 500}, **asked}}
        return build(seen(pod(), demand=demand(buckets=buckets)), previous=previous, **goal)

    assert condition(built(3.0), "ObjectivesMet")["status"] == "True"
    missed = built(3.0, attainmentPercent=99)
    assert missed["objectives"]["attainmentPercent"] == 97
    assert "at the 99th percentile: time to first token" in condition(missed, "ObjectivesMet")["message"]
    assert built(3.6, missed, attainmentPercent=99)["objectives"]["attainmentPercent"] == 97, "noise"
    assert built(9.0, missed, attainmentPercent=99)["objectives"]["attainmentPercent"] == 91
    assert "attainmentPercent" not in build(seen(pod(), demand=demand()), **GOAL)["objectives"]


# --- quiet ---------------------------------------------------------------------------------------------------------

noise = st.floats(0.95, 1.05)


@given(rate=noise, ttft=noise, share=st.floats(-0.02, 0.02))
@settings(max_examples=50)
def test_noise_changes_nothing(rate: float, ttft: float, share: float) -> None:
    def built(rate: float, ttft: float, share: float, previous: dict[str, Any] | None = None) -> dict[str, Any]:
        load = demand(arrivals_per_second={0: 3.3 * rate}, ttft_p95_seconds=0.4 * ttft)
        mix = (
            PatternShare("LongInShortOut", 0.55 + share, 2.0, 3000 * rate, 100 * ttft),
            PatternShare("ShortInLongOut", 0.45 - share, 1.0, 100, 700),
        )
        return build(seen(pod(), demand=load), chosen(mix=mix, inputs={"rate": rate}), previous, **GOAL)

    first = built(1.0, 1.0, 0.0)
    assert built(rate, ttft, share, first) == first


def test_a_real_change_of_the_load_is_shown() -> None:
    first = build(seen(pod(), demand=demand(arrivals_per_second={0: 1.0})))
    second = build(seen(pod(), demand=demand(arrivals_per_second={0: 2.0})), previous=first)
    assert (first["traffic"]["arrivalRate"], second["traffic"]["arrivalRate"]) == (1.0, 2.0)
    quiet = build(seen(pod(), demand=demand(arrivals_per_second={0: 0.0})), previous=second)
    assert quiet["traffic"]["arrivalRate"] == 0.0


def test_the_same_facts_an_hour_later_give_the_same_status() -> None:
    for observation in (seen(pod(), demand=demand()), seen(pod(CRASH, reason="ModelNotFound", message="x"))):
        first = build(observation)
        assert build(observation, previous=first) == first


def test_a_kubelets_wavering_words_change_nothing() -> None:
    pulling = pod(ReplicaPhase.PULL_FAILED, reason="ErrImagePull", message="x: not found")
    first = build(seen(pulling))
    waiting = replace(
        pulling, reason="ImagePullBackOff", message='Back-off pulling image "r.example/x:1": ErrImagePull: x: not found'
    )
    assert build(seen(waiting), previous=first) == first
    unschedulable = build(seen(pod(ReplicaPhase.UNSCHEDULABLE, message="0/9 nodes: 5 Insufficient cpu")))
    moved = seen(pod(ReplicaPhase.UNSCHEDULABLE, message="0/9 nodes: 4 Insufficient cpu"))
    assert build(moved, previous=unschedulable) == unschedulable


def test_another_spec_gets_its_own_message_though_only_a_figure_differs() -> None:
    def missing(generation: int, previous: dict[str, Any]) -> dict[str, Any]:
        failing = seen(pod(CRASH, reason="ModelNotFound", message=f"/models/v{generation}.gguf does not exist"))
        return status.build(target(generation), failing, chosen(), previous, now=NOW)

    assert condition(missing(2, missing(1, {})), "Ready")["message"] == "/models/v2.gguf does not exist"


def test_a_transition_time_moves_only_when_the_status_flips() -> None:
    starting = build(seen(pod(ReplicaPhase.LOADING)))
    serving = build(seen(pod()), previous=starting)
    assert condition(serving, "Ready")["lastTransitionTime"] > condition(starting, "Ready")["lastTransitionTime"]
    kept = condition(serving, "Stalled")["lastTransitionTime"]
    assert kept == condition(starting, "Stalled")["lastTransitionTime"]


def test_every_field_is_one_of_the_schemas() -> None:
    mix = (PatternShare("LongInShortOut", 1.0, 2.0, 3000.0, 100.0),)
    decision = chosen(
        2,
        action=Action.SCALE_UP,
        mix=mix,
        wanted_replicas=2,
        bounded_by=("Step",),
        inputs={"a": 1.23456},
        memory={"a": [], "b": [[1.5, 2]]},
    )
    built = build(seen(pod(), demand=demand(), metrics_state=MetricsState.STALE), decision, **GOAL)
    read = api_status.Status.model_validate(built)
    assert read.model_dump(mode="json", by_alias=True, exclude_none=True) == built
    assert status.memory_of(built) == decision.memory


@pytest.mark.parametrize("memory", [None, "", "{", "[]", {"an": "object"}])
def test_a_memory_that_cannot_be_read_is_none(memory: object) -> None:
    assert status.memory_of({"autoscaling": {"memory": memory}}) == {}


def test_metrics_that_are_missing_are_an_event_only_when_they_were_there() -> None:
    def told(before: MetricsState | None) -> list[str]:
        first = build(seen(pod(), metrics_state=before)) if before else {}
        later = build(seen(pod(), metrics_state=MetricsState.ABSENT), previous=first)
        return [event.reason for event in status.events(first, later) if event.reason.startswith("Metrics")]

    assert told(None) == []
    assert told(MetricsState.FRESH) == ["MetricsMissing"]


def test_an_event_always_says_something() -> None:
    broken = build(seen(pod(phase=ReplicaPhase.CRASH_LOOPING, message="it fell")))
    mended = build(seen(pod()), previous=broken)
    assert all(event.message for event in status.events(broken, mended))


# --- decisions and Events ------------------------------------------------------------------------------------------


def scale_up(replicas: int) -> Decision:
    return chosen(replicas, action=Action.SCALE_UP, reason="DemandAboveCapacity", message=f"{replicas} are needed")


def test_decisions_that_act_are_kept_and_holding_is_not() -> None:
    built = build(seen(pod()), scale_up(2))
    built = build(seen(pod(), pod()), chosen(2), previous=built)
    built = build(seen(pod(), pod()), scale_up(4), previous=built)
    assert [entry["replicas"] for entry in built["autoscaling"]["decisions"]] == [2, 4]
    assert built["autoscaling"]["lastScaleTime"] == "2027-01-15T09:00:00Z"


def test_no_more_than_ten_decisions_are_kept() -> None:
    built: dict[str, Any] = {}
    for replicas in range(2, 20):
        built = build(seen(pod()), scale_up(replicas), previous=built)
    assert [entry["replicas"] for entry in built["autoscaling"]["decisions"]] == list(range(10, 20))


def test_a_change_of_the_settings_tells_when_and_why() -> None:
    first = build(seen(pod()))
    assert "lastChangeTime" not in first["batching"]
    retuned = chosen(
        settings=BatchSettings(32, 8192, 2048), settings_generation=2, action=Action.RETUNE, reason="RetunedForMix"
    )
    second = build(seen(pod()), retuned, previous=first)
    assert second["batching"]["desired"]["maxSequences"] == 32
    assert second["batching"]["lastReason"] == "RetunedForMix"
    back = replace(retuned, settings=LOAD, settings_generation=3, reason="SettingsRolledBack")
    third = build(seen(pod()), back, previous=second)
    assert third["batching"]["rolledBack"] is True
    assert len(third["autoscaling"]["decisions"]) == 2


def test_events_tell_a_start_once() -> None:
    starting = build(seen(pod(ReplicaPhase.LOADING)))
    serving = build(seen(pod()), previous=starting)
    assert status.events({}, starting) == []
    assert [(event.type, event.reason) for event in status.events(starting, serving)] == [("Normal", "Serving")]
    assert status.events(serving, serving) == []


def test_events_tell_a_failure_and_the_recovery() -> None:
    serving = build(seen(pod()))
    broken = build(seen(pod(CRASH, reason="ModelNotFound", message="no such file")), previous=serving)
    assert status.events(serving, broken)[0] == status.Event("Warning", "ModelNotFound", "no such file")
    assert {event.type for event in status.events(serving, broken)} == {"Warning"}
    assert ("Normal", "Serving") in [(event.type, event.reason) for event in status.events(broken, serving)]


def test_events_tell_each_decision_once() -> None:
    first = build(seen(pod()))
    second = build(seen(pod()), scale_up(2), previous=first)
    assert status.events(first, second) == [status.Event("Normal", "DemandAboveCapacity", "ScaleUp: 2 are needed")]
    third = build(seen(pod(), pod()), chosen(2), previous=second)
    assert status.events(second, third) == []


# --- objects that cannot be acted on -------------------------------------------------------------------------------


def test_a_spec_that_cannot_be_read_stalls_the_object_and_keeps_what_was_known() -> None:
    serving = build(seen(pod()))
    problem = status.Problem("InvalidSpec", "spec.model.uri: Field required", permanent=True)
    built = status.build_problem(problem, serving, generation=2, now=LATER)
    assert built["observedGeneration"] == 2
    assert built["readyReplicas"] == 1
    assert condition(built, "Ready")["reason"] == condition(built, "Stalled")["reason"] == "InvalidSpec"
    assert condition(built, "Reconciling")["status"] == "False"
    assert status.build_problem(problem, built, generation=2, now=LATER + 60) == built


def test_a_pass_that_failed_leaves_serving_pods_ready_and_says_that_it_tries_again() -> None:
    serving = build(seen(pod()))
    problem = status.Problem("ReconcileFailed", "the API server did not answer", permanent=False)
    built = status.build_problem(problem, serving, generation=1, now=LATER)
    assert condition(built, "Ready")["status"] == "True"
    assert condition(built, "Reconciling")["reason"] == "ReconcileFailed"
    fresh = status.build_problem(problem, {}, generation=1, now=LATER)
    assert condition(fresh, "Ready")["status"] == "False"


# --- cost ------------------------------------------------------------------------------------------------------------

TWO_L4S = EngineInfo(
    kv_blocks=1, block_tokens=16, max_model_len=1, kv_token_bytes=1, weight_bytes=1, gpu_product="NVIDIA L4",
    gpu_count=2, version="", step_model=None, step_model_residual_ratio=None, step_model_samples=None,
)  # fmt: skip
PRICE = GpuPrice("L4", 0.5, is_default=False)


def test_cost_counts_the_gpus_of_every_pod_that_has_a_node() -> None:
    pods = (
        pod(),
        pod(ReplicaPhase.LOADING, name="q"),
        pod(ReplicaPhase.DRAINING, name="r"),
        pod(ReplicaPhase.UNSCHEDULABLE, name="s"),
    )
    built = build(seen(*pods, engine=TWO_L4S, price=PRICE, demand=demand(generation_tokens_per_second=1000.0)))
    # Three pods of two GPUs at 0.50; 1,000 tokens/s are 3.6 million an hour: 3.00 / 3.6.
    assert built["cost"] == {
        "gpu": "L4",
        "gpus": 6,
        "dollarsPerHour": 3.0,
        "dollarsPerMillionOutputTokens": 0.83,
        "price": "Installation",
    }


def test_cost_of_tokens_is_unknown_without_fresh_traffic() -> None:
    default = replace(PRICE, is_default=True)
    for state, rate in ((MetricsState.STALE, 1000.0), (MetricsState.FRESH, 0.0), (MetricsState.FRESH, None)):
        facts = seen(
            pod(), engine=TWO_L4S, price=default, metrics_state=state, demand=demand(generation_tokens_per_second=rate)
        )
        cost = build(facts)["cost"]
        assert cost == {"gpu": "L4", "gpus": 2, "dollarsPerHour": 1.0, "price": "Default"}


def test_without_a_price_or_a_gpu_there_is_no_cost() -> None:
    assert "cost" not in build(seen(pod()))
    assert "cost" not in build(seen(pod(), engine=TWO_L4S))
    assert "cost" not in build(seen(pod(), engine=replace(TWO_L4S, gpu_count=0), price=PRICE))


def test_the_cost_of_tokens_does_not_waver_with_the_traffic() -> None:
    def at(rate: float) -> Observation:
        return seen(pod(), engine=TWO_L4S, price=PRICE, demand=demand(generation_tokens_per_second=rate))

    first = build(at(1000.0))
    assert build(at(1050.0), previous=first)["cost"] == first["cost"]
    assert build(at(2000.0), previous=first)["cost"] != first["cost"]
