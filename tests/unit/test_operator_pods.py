"""Reading pods: every phase, with the words of whoever gave them."""

from dataclasses import replace
from typing import Any

import pytest

from tidegate_operator.observation import Replica, ReplicaPhase
from tidegate_operator.pods import (
    deletion_costs,
    is_finished,
    newest_template_hash,
    replica_of,
    rollout_in_progress,
    start_seconds,
    workload_complaint,
)

SCHEDULED = {"type": "PodScheduled", "status": "True"}
RUNNING = {"state": {"running": {"startedAt": "2026-01-01T00:00:10Z"}}, "ready": False, "restartCount": 0}


def pod(**parts: Any) -> dict[str, Any]:
    metadata = {
        "name": "m-abc-1",
        "uid": "u1",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {"pod-template-hash": "abc"},
    } | parts.pop("metadata", {})
    return {"metadata": metadata, "spec": parts.pop("spec", {"nodeName": "n"}), "status": parts}


def died(code: int = 1, *, reason: str = "Error", message: str = "", lived: int = 5) -> dict[str, Any]:
    return {
        "exitCode": code,
        "reason": reason,
        "message": message,
        "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": f"2026-01-01T00:{lived // 60:02d}:{lived % 60:02d}Z",
    }


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}, "restartCount": 1} | more


CASES: list[tuple[str, dict[str, Any], ReplicaPhase, str, str]] = [
    ("just created", pod(spec={}), ReplicaPhase.STARTING, "Pending", ""),
    (
        "no node has room",
        pod(
            spec={},
            conditions=[
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: no gpu"}
            ],
        ),
        ReplicaPhase.UNSCHEDULABLE,
        "Unschedulable",
        "no gpu",
    ),
    (
        "a scheduling gate",
        pod(
            spec={"schedulingGates": [{"name": "kueue"}]},
            conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}],
        ),
        ReplicaPhase.GATED,
        "SchedulingGated",
        "kueue",
    ),
    ("scheduled", pod(conditions=[SCHEDULED]), ReplicaPhase.PULLING, "ContainerCreating", ""),
    (
        "the init container copies the model",
        pod(
            conditions=[SCHEDULED],
            initContainerStatuses=[RUNNING],
            containerStatuses=[waiting("PodInitializing", restartCount=0)],
        ),
        ReplicaPhase.PULLING,
        "PodInitializing",
        "",
    ),
    ("the model loads", pod(containerStatuses=[RUNNING]), ReplicaPhase.LOADING, "", ""),
    (
        "ready",
        pod(
            conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}],
            containerStatuses=[RUNNING | {"ready": True}],
        ),
        ReplicaPhase.READY,
        "",
        "",
    ),
    (
        "ready after two crashes",
        pod(
            conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:00Z"}],
            containerStatuses=[RUNNING | {"ready": True, "restartCount": 2, "lastState": {"terminated": died(3)}}],
        ),
        ReplicaPhase.READY,
        "",
        "",
    ),
    (
        "deleted",
        pod(metadata={"deletionTimestamp": "2026-01-01T00:09:00Z"}, containerStatuses=[RUNNING]),
        ReplicaPhase.DRAINING,
        "Terminating",
        "",
    ),
    (
        "image not there",
        pod(containerStatuses=[waiting("ErrImageNeverPull", 'Container image "x" is not present')]),
        ReplicaPhase.PULL_FAILED,
        "ErrImageNeverPull",
        "is not present",
    ),
    (
        "the model image cannot be pulled",
        pod(initContainerStatuses=[waiting("ImagePullBackOff", "back-off")], containerStatuses=[]),
        ReplicaPhase.PULL_FAILED,
        "ImagePullBackOff",
        "back-off",
    ),
    (
        "the engine says why",
        pod(
            containerStatuses=[
                waiting(
                    "CrashLoopBackOff",
                    lastState={"terminated": died(3, message="log\nModelNotFound: /m.gguf does not exist\n")},
                )
            ]
        ),
        ReplicaPhase.CRASH_LOOPING,
        "ModelNotFound",
        "/m.gguf does not exist",
    ),
    (
        "the engine dies without a word",
        pod(containerStatuses=[waiting("CrashLoopBackOff", lastState={"terminated": died(139)})]),
        ReplicaPhase.CRASH_LOOPING,
        "Error",
        "exit code 139",
    ),
    (
        "out of memory",
        pod(containerStatuses=[waiting("CrashLoopBackOff", lastState={"terminated": died(137, reason="OOMKilled")})]),
        ReplicaPhase.CRASH_LOOPING,
        "OOMKilled",
        "out of memory",
    ),
    (
        "the copy fails",
        pod(
            initContainerStatuses=[
                waiting("CrashLoopBackOff", lastState={"terminated": died(1, message="cp: cannot stat '/models'")})
            ]
        ),
        ReplicaPhase.CRASH_LOOPING,
        "Error",
        "cp: cannot stat",
    ),
    (
        "a hopeless engine runs again, between two crashes",
        pod(
            containerStatuses=[
                RUNNING
                | {"restartCount": 1, "lastState": {"terminated": died(2, message="SettingsInvalid: max_num_seqs")}}
            ]
        ),
        ReplicaPhase.CRASH_LOOPING,
        "SettingsInvalid",
        "max_num_seqs",
    ),
    (
        "one crash is not a loop, but it is told",
        pod(containerStatuses=[RUNNING | {"restartCount": 1, "lastState": {"terminated": died(1)}}]),
        ReplicaPhase.LOADING,
        "Error",
        "exit code 1",
    ),
    (
        "two quick crashes are",
        pod(containerStatuses=[RUNNING | {"restartCount": 2, "lastState": {"terminated": died(1)}}]),
        ReplicaPhase.CRASH_LOOPING,
        "Error",
        "exit code 1",
    ),
    (
        "a restart after a long life is not a loop",
        pod(containerStatuses=[RUNNING | {"restartCount": 9, "lastState": {"terminated": died(1, lived=3000)}}]),
        ReplicaPhase.LOADING,
        "Error",
        "exit code 1",
    ),
    (
        "a clean restart",
        pod(containerStatuses=[RUNNING | {"restartCount": 9, "lastState": {"terminated": died(0)}}]),
        ReplicaPhase.LOADING,
        "",
        "",
    ),
    (
        "the kubelet cannot make the container",
        pod(containerStatuses=[waiting("CreateContainerConfigError", 'configmap "m-engine" not found')]),
        ReplicaPhase.CRASH_LOOPING,
        "CreateContainerConfigError",
        "not found",
    ),
]


@pytest.mark.parametrize(("name", "manifest", "phase", "reason", "words"), CASES, ids=[case[0] for case in CASES])
def test_a_pod_is_what_its_status_says(
    name: str, manifest: dict[str, Any], phase: ReplicaPhase, reason: str, words: str
) -> None:
    replica = replica_of(manifest, newest_hash="abc")
    assert (replica.phase, replica.reason) == (phase, reason)
    assert words in replica.message


def test_every_phase_has_a_case() -> None:
    assert {case[2] for case in CASES} == set(ReplicaPhase)


def test_the_phase_does_not_flip_between_two_crashes_of_a_hopeless_engine() -> None:
    last = {"lastState": {"terminated": died(3, message="ModelInvalid: truncated")}, "restartCount": 1}
    running = replica_of(pod(containerStatuses=[RUNNING | last]), newest_hash=None)
    backing_off = replica_of(pod(containerStatuses=[waiting("CrashLoopBackOff") | last]), newest_hash=None)
    ended = replica_of(pod(containerStatuses=[{"state": last["lastState"], "restartCount": 1}]), newest_hash=None)
    assert running == backing_off == ended


def test_times_address_and_restarts_are_read() -> None:
    replica = replica_of(CASES[7][1] | {"status": CASES[7][1]["status"] | {"podIP": "10.0.0.5"}}, newest_hash="abc")
    assert replica.ready_at is not None
    assert replica.ready_at - replica.created_at == 60
    assert (replica.ip, replica.restarts) == ("10.0.0.5", 2)
    assert start_seconds([replica], longest_seconds=3600) is None, "its start-up was not one start-up"
    started = replica_of(CASES[6][1], newest_hash="abc")
    assert start_seconds([started], longest_seconds=3600) == 60
    ready_again = replace(started, ready_at=started.created_at + 86_400)
    assert start_seconds([started, ready_again], longest_seconds=3600) == 60, "its readiness only came back"


def test_a_long_message_is_cut() -> None:
    replica = replica_of(pod(containerStatuses=[waiting("ErrImagePull", "x" * 5000)]), newest_hash=None)
    assert len(replica.message) == 1024


def test_the_newest_template_is_the_youngest_pods_once_one_exists() -> None:
    old = pod(metadata={"creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"pod-template-hash": "old"}})
    new = pod(metadata={"creationTimestamp": "2026-01-02T00:00:00Z", "labels": {"pod-template-hash": "new"}})
    assert newest_template_hash({"status": {"updatedReplicas": 1}}, [new, old]) == "new"
    unknown = newest_template_hash({"status": {}}, [old])
    assert not replica_of(old, newest_hash=unknown).updated, "no pod of the newest template exists"
    assert replica_of(old, newest_hash=newest_template_hash(None, [old])).updated


def test_a_rollout_is_over_when_no_older_pod_stands() -> None:
    assert rollout_in_progress({"status": {"replicas": 3, "updatedReplicas": 1}})
    assert not rollout_in_progress({"status": {"replicas": 3, "updatedReplicas": 3}})
    assert not rollout_in_progress(None)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota"}, "FailedCreate"),
        ({"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}, "ProgressDeadlineExceeded"),
        ({"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}, ""),
    ],
)
def test_the_deployments_own_complaint_is_heard(condition: dict[str, str], reason: str) -> None:
    assert workload_complaint({"status": {"conditions": [condition]}})[0] == reason


def test_evicted_pods_do_not_count() -> None:
    assert is_finished(pod(phase="Failed"))
    assert not is_finished(pod(phase="Running"))


def replica(name: str, phase: ReplicaPhase, tokens: float | None = None) -> Replica:
    return Replica(name, name, "10.0.0.1", phase, 0.0, running_context_tokens=tokens)


def test_the_least_loaded_replica_costs_least_and_an_unready_one_less_and_unknown_load_most() -> None:
    costs = deletion_costs(
        [
            replica("busy", ReplicaPhase.READY, 9e12),
            replica("idle", ReplicaPhase.READY, 0.0),
            replica("half", ReplicaPhase.READY, 500.0),
            replica("loading", ReplicaPhase.LOADING),
            replica("unknown", ReplicaPhase.READY),
            replica("leaving", ReplicaPhase.DRAINING),
        ]
    )
    assert sorted(costs, key=lambda name: costs[name]) == ["loading", "idle", "half", "busy", "unknown"]
    assert all(-(2**31) <= cost < 2**31 for cost in costs.values())
