"""From Kubernetes' pod and Deployment objects to `Replica`s: a pure reading of their status. No I/O, no clock.

Called by `reconcile`. What a kubelet, a scheduler or the engine itself gave as a reason is kept word for word.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tidegate_operator.observation import Replica, ReplicaPhase

Manifest = Mapping[str, Any]

DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
TEMPLATE_HASH_LABEL = "pod-template-hash"

PULL_FAILURES = frozenset(
    {"ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
    | {"RegistryUnavailable", "SignatureValidationFailed"}
)
START_FAILURES = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
    | {"PostStartHookError", "PreStartHookError"}
)
PERMANENT_EXIT_CODES = frozenset({2, 3})
"""The engine's: wrong flags or settings, and a model that cannot be loaded. Trying again does not help."""
SHORT_LIFE_SECONDS = 600.0
"""A container that lived longer than this before it died is not looping."""
MAX_MESSAGE = 1024

_REASONED = re.compile(r"^([A-Z][A-Za-z]+): (.+)$")


def seconds_of(timestamp: str | None) -> float | None:
    """Unix seconds of a Kubernetes timestamp."""
    return None if not timestamp else datetime.fromisoformat(timestamp).timestamp()


def incarnation(replica: Replica) -> str:
    """Name of a pod's present life: a container that restarted has forgotten everything."""
    return f"{replica.uid}/{replica.restarts}"


def is_finished(pod: Manifest) -> bool:
    """Whether the pod has ended for good (evicted, completed): its controller does not count it either."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_made_by(deployment: str, pod: Manifest) -> bool:
    """Whether the pod comes from the Deployment: one that only carries the labels is neither counted nor asked."""
    metadata = pod["metadata"]
    return bool(metadata.get("replicaSet") == f"{deployment}-{metadata.get('labels', {}).get(TEMPLATE_HASH_LABEL)}")


def replica_of(pod: Manifest, *, newest_hash: str | None) -> Replica:
    """Classify one pod. `newest_hash` is the template hash of the Deployment's newest template, None when unknown."""
    metadata, status = pod["metadata"], pod.get("status", {})
    phase, reason, message = _phase(pod)
    ready = _condition(status, "Ready")
    template_hash = metadata.get("labels", {}).get(TEMPLATE_HASH_LABEL)
    return Replica(
        name=metadata["name"],
        uid=metadata["uid"],
        ip=status.get("podIP") or None,
        phase=phase,
        created_at=seconds_of(metadata.get("creationTimestamp")) or 0.0,
        ready_at=seconds_of(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None,
        restarts=sum(int(container.get("restartCount", 0)) for container in status.get("containerStatuses") or ()),
        reason=reason,
        message=message,
        updated=newest_hash is None or template_hash == newest_hash,
    )


def _phase(pod: Manifest) -> tuple[ReplicaPhase, str, str]:
    """Phase, reason and message. The order is from what overrules everything to what is usual."""
    spec, status = pod.get("spec", {}), pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp"):
        return ReplicaPhase.DRAINING, "Terminating", ""
    scheduled = _condition(status, "PodScheduled")
    if spec.get("schedulingGates"):
        gates = ", ".join(gate.get("name", "") for gate in spec["schedulingGates"])
        return ReplicaPhase.GATED, "SchedulingGated", f"waits for the scheduling gates {gates}"
    if scheduled.get("status") == "False":
        return ReplicaPhase.UNSCHEDULABLE, scheduled.get("reason", "Unschedulable"), scheduled.get("message", "")
    init, main = status.get("initContainerStatuses") or (), status.get("containerStatuses") or ()
    for container in (*init, *main):
        if failure := _failure(container):
            return failure
    if _condition(status, "Ready").get("status") == "True":
        return ReplicaPhase.READY, "", ""
    if any("running" in container.get("state", {}) for container in main):
        died = next(filter(None, map(_death, main)), None)
        return ReplicaPhase.LOADING, *(_cause(died) if died else ("", ""))
    if spec.get("nodeName") or scheduled.get("status") == "True":
        return ReplicaPhase.PULLING, _waiting_reason((*init, *main)), ""
    return ReplicaPhase.STARTING, "Pending", ""


def _failure(container: Manifest) -> tuple[ReplicaPhase, str, str] | None:
    """What is wrong with a container, None when nothing is (or when it may still recover by itself)."""
    waiting = container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason", "")
    if reason in PULL_FAILURES:
        return ReplicaPhase.PULL_FAILED, reason, _short(waiting.get("message", ""))
    died = _death(container)
    if reason in START_FAILURES:
        cause = _cause(died) if died else (reason, _short(waiting.get("message", "")))
        return ReplicaPhase.CRASH_LOOPING, *cause
    if died is None or container.get("ready"):
        return None
    lived = (seconds_of(died.get("finishedAt")) or 0.0) - (seconds_of(died.get("startedAt")) or 0.0)
    loops = int(container.get("restartCount", 0)) >= 2 and lived < SHORT_LIFE_SECONDS
    if died["exitCode"] in PERMANENT_EXIT_CODES or loops:
        return ReplicaPhase.CRASH_LOOPING, *_cause(died)
    return None


def _death(container: Manifest) -> Manifest | None:
    """The container's last end, if it was a failure."""
    died: Manifest = (
        container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    )
    return died if died.get("exitCode", 0) != 0 else None


def _cause(terminated: Manifest) -> tuple[str, str]:
    """Why a container ended: the engine's own `Reason: sentence` if it left one, else the kubelet's words."""
    reason = terminated.get("reason") or "Error"
    if reason == "OOMKilled":
        return reason, "the container ran out of memory"
    lines = [line.strip() for line in (terminated.get("message") or "").splitlines() if line.strip()]
    for line in reversed(lines):
        if match := _REASONED.match(line):
            return match.group(1), _short(match.group(2))
    last = _short(lines[-1]) if lines else f"the container ended with exit code {terminated.get('exitCode')}"
    return reason, last


def _waiting_reason(containers: Iterable[Manifest]) -> str:
    reasons = [container.get("state", {}).get("waiting", {}).get("reason", "") for container in containers]
    return next((reason for reason in reasons if reason), "ContainerCreating")


def _condition(status: Manifest, kind: str) -> Manifest:
    return next((item for item in status.get("conditions") or () if item.get("type") == kind), {})


def _short(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else text[: MAX_MESSAGE - 1] + "…"


def newest_template_hash(deployment: Manifest | None, pods: Sequence[Manifest]) -> str | None:
    """Hash of the Deployment's newest template: the youngest pod's, once a pod of it exists; None when unknown."""
    if deployment is None or not pods:
        return None
    if not deployment.get("status", {}).get("updatedReplicas"):
        return ""
    youngest = max(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))
    return str(youngest["metadata"].get("labels", {}).get(TEMPLATE_HASH_LABEL, ""))


def rollout_in_progress(deployment: Manifest | None) -> bool:
    """Whether pods of an older template still stand."""
    status = (deployment or {}).get("status", {})
    return int(status.get("replicas", 0)) > int(status.get("updatedReplicas", 0))


def workload_complaint(deployment: Manifest | None) -> tuple[str, str]:
    """What the Deployment itself says is wrong: pods that cannot be made, or no progress; empty when nothing is."""
    status = (deployment or {}).get("status", {})
    failure, progress = _condition(status, "ReplicaFailure"), _condition(status, "Progressing")
    for condition, bad in ((failure, "True"), (progress, "False")):
        if condition.get("status") == bad:
            return condition.get("reason", ""), _short(condition.get("message", ""))
    return "", ""


def start_seconds(replicas: Iterable[Replica], *, longest_seconds: float) -> float | None:
    """Slowest time from creation to Ready among pods that never restarted; None before one was ready.

    A pod whose readiness came back later tells nothing of its start: its time is above `longest_seconds`, and left out.
    """
    times = [
        replica.ready_at - replica.created_at
        for replica in replicas
        if replica.ready_at is not None and replica.restarts == 0
    ]
    return max((seconds for seconds in times if seconds <= longest_seconds), default=None)


_NOT_SERVING_COST = -1
_UNKNOWN_COST = 1_000_000_000


def deletion_costs(replicas: Iterable[Replica]) -> dict[str, int]:
    """Deletion cost by pod name: those that do not serve first, then the fewest context tokens; unknown load last.

    Kubernetes takes the lowest first, but compares readiness before cost; the order here agrees with that.
    """
    costs = {}
    for replica in replicas:
        if replica.phase is ReplicaPhase.DRAINING:
            continue
        if replica.phase is not ReplicaPhase.READY:
            costs[replica.name] = _NOT_SERVING_COST
        elif replica.running_context_tokens is None:
            costs[replica.name] = _UNKNOWN_COST
        else:
            costs[replica.name] = min(int(replica.running_context_tokens), _UNKNOWN_COST - 1)
    return costs
