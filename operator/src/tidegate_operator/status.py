"""The status of an LLMDeployment and the Events about it, from what was seen and decided.

Pure. The same facts give the same status: noise is rounded away against the previous status, and a condition's time
moves only when its status flips, so that at rest nothing is written. `reconcile` writes what `build` returns.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tidegate_engine.settings import BatchSettings, Pattern
from tidegate_operator import api, api_status
from tidegate_operator.api import ConditionType, Reason, ScalingMode, Target
from tidegate_operator.goals import allowed_in, attained, eased, goals_of, judge, seen_of
from tidegate_operator.observation import (
    STARTING_PHASES,
    WAITING_PHASES,
    Action,
    Decision,
    MetricsState,
    Observation,
    Replica,
    ReplicaPhase,
)

StatusDict = dict[str, Any]

RESTARTS_BEFORE_STALLED = 3
RATE_TOLERANCE = 0.1
LATENCY_TOLERANCE = 0.2
SHARE_TOLERANCE_PERCENT = 5
RECOVERY_MARGIN = 0.9
"""A missed objective counts as met again only below this share of the goal."""
KUBELET_WORDS = frozenset(
    {"Error", "Completed", "ContainerCannotRun", "DeadlineExceeded", "StartError", "NotReady", "ContainerStatusUnknown"}
    | {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
    | {"PostStartHookError", "PreStartHookError"}
)
"""Reasons that say nothing about the cause; any other word of a crashed engine is its own."""
HOPELESS_PULLS = re.compile(r"not found|denied|unauthorized|forbidden|invalid|no basic auth|never", re.IGNORECASE)
BACK_OFF = re.compile(r'^Back-off pulling image "[^"]*"(: ErrImagePull: )?')
"""The kubelet's word between two tries; the cause follows it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What keeps the object from being as asked. `permanent`: only a human helps."""

    reason: str
    message: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes Event to be recorded about the object."""

    type: str
    """Normal or Warning."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a condition states. `foreign`: the message is another program's, whose figures may waver."""

    status: str
    reason: str
    message: str
    foreign: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """All that a condition may look at."""

    target: Target
    observation: Observation
    decision: Decision
    previous: Mapping[str, Any]
    problem: Problem | None

    @property
    def desired(self) -> int:
        return self.decision.replicas

    @property
    def standing(self) -> tuple[Replica, ...]:
        """Pods that do not drain."""
        return tuple(pod for pod in self.observation.replicas if pod.phase is not ReplicaPhase.DRAINING)

    @property
    def ready(self) -> int:
        return self.observation.count(ReplicaPhase.READY)

    @property
    def newest_serves(self) -> bool:
        """Whether a pod of the newest version is ready."""
        return any(pod.phase is ReplicaPhase.READY and pod.updated for pod in self.observation.replicas)

    @property
    def is_stalled(self) -> bool:
        return self.problem is not None and self.problem.permanent and not self.newest_serves


def build(
    target: Target, observation: Observation, decision: Decision, previous: Mapping[str, Any], *, now: float
) -> StatusDict:
    """The whole status; equal to `previous` when nothing material changed. `now` in Unix seconds."""
    view = View(target, observation, decision, previous, find_problem(observation))
    standing = view.standing
    status = api_status.Status(
        observed_generation=target.generation,
        replicas=len(standing),
        ready_replicas=view.ready,
        available_replicas=view.ready,
        updated_replicas=sum(pod.updated for pod in standing),
        starting_replicas=observation.count(*STARTING_PHASES),
        draining_replicas=observation.count(ReplicaPhase.DRAINING),
        unschedulable_replicas=observation.count(*WAITING_PHASES),
        selector=",".join(f"{key}={value}" for key, value in api.selector(target.name).items()),
        url=f"http://{target.name}.{target.namespace}.svc:{target.spec.service.port}/v1",
        batching=_batching(view, now),
        traffic=_traffic(view),
        objectives=_objectives(view),
        autoscaling=_autoscaling(view, now),
        cost=_cost(view),
        metrics=_metrics(view),
    )
    return _dump(status) | {"conditions": _conditions(view, now)}


def memory_of(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the last decision left for the next one; empty when there is none that can be read."""
    try:
        memory = json.loads((status.get("autoscaling") or {}).get("memory") or "{}")
    except (TypeError, ValueError):
        return {}
    return memory if isinstance(memory, dict) else {}


def build_problem(problem: Problem, previous: Mapping[str, Any], *, generation: int, now: float) -> StatusDict:
    """Status of an object that cannot be acted on: the last known facts stay, the conditions tell the problem.

    A permanent problem is the user's (a spec that cannot be read); a temporary one will be tried again, and is why an
    object that does not serve yet does not.
    """
    not_ready = Verdict("False", problem.reason, problem.message, foreign=True)
    trouble = Verdict("True", problem.reason, problem.message, foreign=True)
    fine = Verdict("False", Reason.AS_EXPECTED, "")
    verdicts = {
        ConditionType.RECONCILING: fine if problem.permanent else trouble,
        ConditionType.STALLED: trouble if problem.permanent else fine,
    }
    before = _by_type(previous)
    if problem.permanent or before.get(ConditionType.READY, {}).get("status") != "True":
        # Pods that serve go on serving while a pass fails: only a spec that means nothing takes Ready away.
        verdicts = {ConditionType.READY: not_ready, **verdicts}
    told = [_condition(kind, verdict, before.get(kind, {}), (generation, now)) for kind, verdict in verdicts.items()]
    kept = [condition for kind, condition in before.items() if kind not in verdicts]
    return {**previous, "observedGeneration": generation, "conditions": _ordered([*told, *kept])}


def events(previous: Mapping[str, Any], current: Mapping[str, Any]) -> list[Event]:
    """What is worth an Event in the step from one status to the next; nothing when nothing flipped."""
    found: list[Event] = []
    before, after = _by_type(previous), _by_type(current)
    for kind, good in _REPORTED.items():
        old, new = before.get(kind, {}), after.get(kind)
        if new is None or new["status"] == "Unknown":
            continue
        flipped = old.get("status") != new["status"]
        if new["status"] == good:
            if flipped and (kind is ConditionType.READY or _inverse(good) == old.get("status")):
                found.append(Event("Normal", new["reason"], new["message"] or f"{kind} no more"))
        elif new["reason"] == Reason.METRICS_MISSING and old.get("status") != "True":
            continue  # Pods that have just become ready have given none yet.
        elif new["reason"] not in _EXPECTED_REASONS and (flipped or old.get("reason") != new["reason"]):
            found.append(Event("Warning", new["reason"], new["message"]))
    known = _decisions(previous)
    for entry in _decisions(current):
        if entry not in known:
            found.append(Event("Normal", entry["reason"], f"{entry['action']}: {entry['message']}"))
    return list(dict.fromkeys(found))


_REPORTED = {
    ConditionType.READY: "True",
    ConditionType.STALLED: "False",
    ConditionType.DEGRADED: "False",
    ConditionType.CAPACITY_AVAILABLE: "True",
    ConditionType.METRICS_AVAILABLE: "True",
    ConditionType.OBJECTIVES_MET: "True",
}
"""Conditions whose changes are told as Events, with the status that is good."""
_EXPECTED_REASONS = frozenset({Reason.STARTING, Reason.SCALED_TO_ZERO})


def _inverse(status: str) -> str:
    return "False" if status == "True" else "True"


# --- what is wrong -------------------------------------------------------------------------------------------------


def find_problem(observation: Observation) -> Problem | None:
    """The worst thing that keeps pods of the newest version from serving, None when there is none."""
    standing = [pod for pod in observation.replicas if pod.phase is not ReplicaPhase.DRAINING]
    newest = [pod for pod in standing if pod.updated] or standing
    problems = [problem for pod in newest if (problem := _pod_problem(pod)) is not None]
    if observation.workload_reason:
        problems.append(_workload_problem(observation.workload_reason, observation.workload_message))
    return next((problem for problem in problems if problem.permanent), problems[0] if problems else None)


def _pod_problem(pod: Replica) -> Problem | None:
    if pod.phase is ReplicaPhase.CRASH_LOOPING:
        return _crash(pod)
    if pod.phase is ReplicaPhase.PULL_FAILED:
        hopeless = bool(HOPELESS_PULLS.search(f"{pod.reason} {pod.message}"))
        message = BACK_OFF.sub("", pod.message) or pod.reason
        return Problem(Reason.IMAGE_PULL_FAILED, f"an image cannot be pulled: {message}", permanent=hopeless)
    if pod.phase is ReplicaPhase.UNSCHEDULABLE:
        return Problem(Reason.UNSCHEDULABLE, pod.message or "no node has room for the pod", permanent=False)
    if pod.phase is ReplicaPhase.GATED:
        return Problem(Reason.GATED, pod.message or "the pod waits for a scheduling gate", permanent=False)
    return None


def _crash(pod: Replica) -> Problem:
    often = pod.restarts >= RESTARTS_BEFORE_STALLED
    if pod.reason == "OOMKilled":
        message = "the engine ran out of memory: raise resources.limits.memory or lower engine.maxModelLength"
        return Problem(Reason.OUT_OF_MEMORY, message, permanent=often)
    message = pod.message or f"the engine ended: {pod.reason}"
    if pod.message.startswith("cp:"):
        return Problem(Reason.MODEL_NOT_FOUND, f"the model could not be copied: {pod.message}", permanent=True)
    if pod.reason in KUBELET_WORDS or not pod.reason:
        return Problem(Reason.ENGINE_FAILED, message, permanent=often)
    # Steps that failed, or the last line of a traceback: unlike a flag or a model that is wrong, it may pass.
    may_pass = pod.reason == Reason.ENGINE_FAILED or pod.reason.endswith(("Error", "Exception"))
    return Problem(pod.reason, message, permanent=often or not may_pass)


def _workload_problem(reason: str, message: str) -> Problem:
    if "exceeded quota" in message:
        return Problem(Reason.QUOTA_EXCEEDED, message, permanent=True)
    return Problem(reason, message, permanent=True)


_CAPACITY_REASONS = frozenset({Reason.UNSCHEDULABLE, Reason.GATED, Reason.QUOTA_EXCEEDED})


# --- conditions ----------------------------------------------------------------------------------------------------


def _is_ready(view: View) -> Verdict:
    if view.is_stalled and view.problem is not None:
        return Verdict("False", view.problem.reason, view.problem.message, foreign=True)
    if view.ready:
        return Verdict("True", Reason.SERVING, f"{view.ready} of {view.desired} replicas serve")
    if view.desired == 0:
        return Verdict("True", Reason.SCALED_TO_ZERO, "no replica is asked for")
    if view.problem is not None:
        return Verdict("False", view.problem.reason, view.problem.message, foreign=True)
    return Verdict("False", Reason.STARTING, f"none of {view.desired} replicas serves yet")


def _is_reconciling(view: View) -> Verdict:
    if view.is_stalled:
        return Verdict("False", Reason.SETTLED, "")
    if view.observation.rollout_in_progress:
        return Verdict("True", Reason.ROLLING_OUT, "pods of an older version still stand")
    standing = len(view.standing)
    if standing != view.desired or view.observation.current_replicas != view.desired:
        return Verdict("True", Reason.SCALING, f"{standing} pods stand, {view.desired} are asked for")
    if view.ready < view.desired:
        return Verdict("True", Reason.STARTING, f"{view.ready} of {view.desired} replicas serve")
    return Verdict("False", Reason.SETTLED, "")


def _is_stalled(view: View) -> Verdict:
    if view.is_stalled and view.problem is not None:
        return Verdict("True", view.problem.reason, view.problem.message, foreign=True)
    return Verdict("False", Reason.AS_EXPECTED, "")


def _is_available(view: View) -> Verdict:
    if view.ready:
        return Verdict("True", Reason.MINIMUM_AVAILABLE, "the model answers")
    return Verdict("False", Reason.NO_READY_REPLICA, "no replica is ready")


def _is_progressing(view: View) -> Verdict:
    if view.is_stalled and view.problem is not None:
        return Verdict("False", view.problem.reason, view.problem.message, foreign=True)
    reconciling = _is_reconciling(view)
    return Verdict("True", reconciling.reason, reconciling.message)


def _is_degraded(view: View) -> Verdict:
    if view.problem is not None:
        return Verdict("True", view.problem.reason, view.problem.message, foreign=True)
    return Verdict("False", Reason.AS_EXPECTED, "")


def _is_model_ready(view: View) -> Verdict:
    if view.newest_serves:
        return Verdict("True", Reason.MODEL_LOADED, "the model is loaded")
    if view.problem is not None and view.problem.reason not in _CAPACITY_REASONS:
        return Verdict("False", view.problem.reason, view.problem.message, foreign=True)
    if view.ready:
        return Verdict("True", Reason.MODEL_LOADED, "pods of the older version have the model loaded")
    if not view.standing:
        return Verdict("Unknown", Reason.NO_READY_REPLICA, "no pod has tried to load the model yet")
    return Verdict("False", Reason.MODEL_LOADING, "no replica has loaded the model yet")


def _is_capacity_available(view: View) -> Verdict:
    if view.problem is not None and view.problem.reason in _CAPACITY_REASONS:
        return Verdict("False", view.problem.reason, view.problem.message, foreign=True)
    if view.observation.count(*WAITING_PHASES):
        waiting = next(pod for pod in view.observation.replicas if pod.phase in WAITING_PHASES)
        return Verdict("False", Reason.UNSCHEDULABLE, waiting.message, foreign=True)
    if not view.standing and view.desired:
        return Verdict("Unknown", Reason.STARTING, "no pod exists yet")
    return Verdict("True", Reason.SCHEDULED, "every pod has a node")


def _is_metrics_available(view: View) -> Verdict:
    state, message = view.observation.metrics_state, view.observation.metrics_message
    if state is MetricsState.FRESH:
        return Verdict("True", Reason.METRICS_FOUND, "fresh samples of the engine pods are at hand")
    if not view.ready:
        return Verdict("Unknown", Reason.NO_READY_REPLICA, "no replica is ready to be measured")
    reason: str = Reason.METRICS_STALE if state is MetricsState.STALE else Reason.METRICS_MISSING
    if named := re.match(r"([A-Z][A-Za-z]+): (.+)", message, re.DOTALL):
        reason, message = named.groups()
    return Verdict("False", reason, message or "no fresh samples of the engine pods", foreign=True)


def _is_able_to_scale(view: View) -> Verdict:
    if view.is_stalled and view.problem is not None:
        return Verdict("False", view.problem.reason, "the pods cannot run, so another number of them would not help")
    return Verdict("True", Reason.READY_FOR_NEW_SCALE, "the number of replicas can be changed")


def _is_scaling_active(view: View) -> Verdict:
    autoscaling = view.target.spec.autoscaling
    idle = {
        ScalingMode.OFF: (Reason.SCALING_OFF, "autoscaling is off: spec.replicas holds"),
        ScalingMode.EXTERNAL: (Reason.SCALED_BY_OTHERS, "others set spec.replicas through the scale subresource"),
        ScalingMode.OBSERVE: (Reason.OBSERVING_ONLY, "autoscaling only observes: spec.replicas holds"),
    }
    if autoscaling.mode in idle:
        return Verdict("False", *idle[autoscaling.mode])
    if autoscaling.paused:
        return Verdict("False", Reason.SCALING_PAUSED, "spec.autoscaling.paused is set")
    measured = _is_metrics_available(view)
    if measured.status != "True":
        return Verdict("False", measured.reason, measured.message, foreign=True)
    return Verdict("True", Reason.VALID_METRIC_FOUND, "replicas follow the measured load")


_BOUNDS = {
    "MinReplicas": "minReplicas",
    "MaxReplicas": "maxReplicas",
    "Schedule": "the schedule allows",
    "GPUBudget": "maxGPUs allows",
    "GPUShare": "its share of the GPUs allows",
}
"""Words for what set a bound (`limits`)."""


def _is_scaling_limited(view: View) -> Verdict:
    wanted, limits = view.decision.wanted_replicas, view.decision.limits
    if view.target.spec.autoscaling.mode is not ScalingMode.AUTO or wanted is None or limits is None:
        return Verdict("False", Reason.WITHIN_BOUNDS, "")
    if wanted > limits.high:
        bound = f"{_BOUNDS[limits.high_rule]} ({limits.high})"
        return Verdict("True", Reason.TOO_MANY_REPLICAS, f"the load asks for more than {bound}")
    if wanted < limits.low:
        bound = f"{_BOUNDS[limits.low_rule]} ({limits.low})"
        return Verdict("True", Reason.TOO_FEW_REPLICAS, f"the load asks for fewer than {bound}")
    return Verdict("False", Reason.WITHIN_BOUNDS, "")


def _is_batching_applied(view: View) -> Verdict:
    applied, generation = _applied_replicas(view), view.decision.settings_generation
    if not view.ready:
        return Verdict("Unknown", Reason.NO_READY_REPLICA, "no replica is ready to take settings")
    if applied == view.ready:
        return Verdict("True", Reason.ALL_REPLICAS_APPLIED, f"all replicas acknowledged generation {generation}")
    message = f"{applied} of {view.ready} replicas acknowledged generation {generation}"
    return Verdict("False", Reason.WAITING_FOR_REPLICAS, message)


def _is_objectives_met(view: View) -> Verdict:
    spec, demand = view.target.spec, view.observation.demand
    before = _by_type(view.previous).get(ConditionType.OBJECTIVES_MET, {})
    margin = RECOVERY_MARGIN if before.get("reason") == Reason.MISSED else 1.0
    if not goals_of(spec):
        return Verdict("Unknown", Reason.NO_OBJECTIVES, "spec.objectives is empty")
    goals = eased(judge(spec, demand), allowed_in(view.decision.inputs)) if demand else ()
    measured = [item for item in goals if item.seen_seconds is not None]
    if not measured:
        return Verdict("Unknown", Reason.NO_TRAFFIC, "no requests were measured")
    missed = [item.words for item in measured if (item.seen_seconds or 0.0) > item.goal_seconds * margin]
    if missed:
        percentile = f"{spec.objectives.attainment_percent}th percentile"
        return Verdict("False", Reason.MISSED, f"above the goal at the {percentile}: {', '.join(missed)}")
    return Verdict("True", Reason.MET, "every measured objective is met")


CONDITIONS: Mapping[ConditionType, Callable[[View], Verdict]] = {
    ConditionType.READY: _is_ready,
    ConditionType.RECONCILING: _is_reconciling,
    ConditionType.STALLED: _is_stalled,
    ConditionType.AVAILABLE: _is_available,
    ConditionType.PROGRESSING: _is_progressing,
    ConditionType.DEGRADED: _is_degraded,
    ConditionType.MODEL_READY: _is_model_ready,
    ConditionType.CAPACITY_AVAILABLE: _is_capacity_available,
    ConditionType.METRICS_AVAILABLE: _is_metrics_available,
    ConditionType.ABLE_TO_SCALE: _is_able_to_scale,
    ConditionType.SCALING_ACTIVE: _is_scaling_active,
    ConditionType.SCALING_LIMITED: _is_scaling_limited,
    ConditionType.BATCHING_APPLIED: _is_batching_applied,
    ConditionType.OBJECTIVES_MET: _is_objectives_met,
}


def _conditions(view: View, now: float) -> list[StatusDict]:
    before = _by_type(view.previous)
    stamp = (view.target.generation, now)
    return [_condition(kind, judge(view), before.get(kind, {}), stamp) for kind, judge in CONDITIONS.items()]


def _condition(kind: str, verdict: Verdict, before: Mapping[str, Any], stamp: tuple[int, float]) -> StatusDict:
    generation, now = stamp
    told_before = (before.get("status"), before.get("reason"), before.get("observedGeneration"))
    same = told_before == (verdict.status, verdict.reason, generation)
    message = verdict.message[:4096]
    if same and verdict.foreign and _without_figures(message) == _without_figures(before.get("message", "")):
        message = before["message"]
    flipped = before.get("status") != verdict.status
    condition = api_status.Condition.model_validate(
        {
            "type": str(kind),
            "status": verdict.status,
            "reason": str(verdict.reason),
            "message": message,
            "observedGeneration": generation,
            "lastTransitionTime": _timestamp(now) if flipped else before["lastTransitionTime"],
        }
    )
    return _dump(condition)


def _without_figures(text: str) -> str:
    """A foreign message without the numbers, which waver: nodes that lack room, seconds until the next try."""
    return re.sub(r"\d+", "#", text)


def _by_type(status: Mapping[str, Any]) -> dict[str, StatusDict]:
    return {condition["type"]: condition for condition in status.get("conditions") or ()}


def _ordered(conditions: list[StatusDict]) -> list[StatusDict]:
    order = {str(kind): index for index, kind in enumerate(CONDITIONS)}
    return sorted(conditions, key=lambda condition: order.get(condition["type"], len(order)))


# --- the parts -----------------------------------------------------------------------------------------------------


def _settings(settings: BatchSettings) -> api_status.Settings:
    return api_status.Settings(
        max_sequences=settings.max_num_seqs,
        max_batched_tokens=settings.max_num_batched_tokens,
        prefill_chunk_tokens=settings.long_prefill_token_threshold,
    )


def _applied_replicas(view: View) -> int:
    return sum(
        pod.settings_generation is not None and pod.settings_generation >= view.decision.settings_generation
        for pod in view.observation.replicas
        if pod.phase is ReplicaPhase.READY
    )


def _batching(view: View, now: float) -> api_status.BatchingStatus:
    before = view.previous.get("batching") or {}
    decision = view.decision
    changed = bool(before) and before.get("generation") != decision.settings_generation
    return api_status.BatchingStatus(
        mode=view.target.spec.batching.mode,
        desired=_settings(decision.settings),
        generation=decision.settings_generation,
        applied_replicas=_applied_replicas(view),
        last_change_time=_timestamp(now) if changed else before.get("lastChangeTime"),
        last_reason=(decision.settings_reason or decision.reason) if changed else before.get("lastReason"),
        last_message=(decision.settings_message or decision.message) if changed else before.get("lastMessage"),
        rolled_back=_is_rollback(decision.settings_reason or decision.reason)
        if changed
        else before.get("rolledBack", False),
    )


def _is_rollback(reason: str) -> bool:
    return "RolledBack" in reason or "Rollback" in reason


def _traffic(view: View) -> api_status.TrafficStatus:
    before = view.previous.get("traffic") or {}
    demand = view.observation.demand
    known = {entry["name"]: entry for entry in before.get("classes") or ()}
    classes = tuple(_class(view, pattern, known.get(pattern.name, {})) for pattern in view.target.spec.patterns())
    rate = None if demand is None else sum(demand.arrivals_per_second.values())
    return api_status.TrafficStatus(
        window_seconds=None if demand is None else round(demand.window_seconds),
        arrival_rate=_quiet(rate, before.get("arrivalRate"), RATE_TOLERANCE),
        dominant_class=_dominant(classes, before.get("dominantClass")),
        classes=classes,
    )


def _class(view: View, pattern: Pattern, before: Mapping[str, Any]) -> api_status.ClassStatus:
    decision, demand = view.decision, view.observation.demand

    def milliseconds(figure: str, name: str) -> int | None:
        seconds = seen_of(demand, figure, [pattern.name]) if demand else None
        return _quiet_int(None if seconds is None else seconds * 1000, before.get(name))

    share = next((share for share in decision.mix if share.name == pattern.name), None)
    percent = None if not decision.mix else round(100 * share.share) if share else 0
    old = before.get("sharePercent")
    if (
        percent is not None
        and old is not None
        and abs(percent - old) <= SHARE_TOLERANCE_PERCENT
        and (percent or not old)
    ):
        percent = old
    seen = share if share is not None and share.share > 0 else None
    return api_status.ClassStatus(
        name=pattern.name,
        input_tokens=api_status.Tokens(min=pattern.isl_min, max=pattern.isl_max),
        output_tokens=api_status.Tokens(min=pattern.osl_min, max=pattern.osl_max),
        share_percent=percent,
        input_tokens_mean=_quiet_int(seen.isl_mean_tokens if seen else None, before.get("inputTokensMean")),
        output_tokens_mean=_quiet_int(seen.osl_mean_tokens if seen else None, before.get("outputTokensMean")),
        ttft_p95_milliseconds=milliseconds("ttft", "ttftP95Milliseconds"),
        itl_p95_milliseconds=milliseconds("itl", "itlP95Milliseconds"),
        end_to_end_p95_milliseconds=milliseconds("endToEnd", "endToEndP95Milliseconds"),
    )


def _dominant(classes: tuple[api_status.ClassStatus, ...], before: str | None) -> str | None:
    """The class with the largest share; the one before while it is as large."""
    shares = {entry.name: entry.share_percent for entry in classes if entry.share_percent}
    if not shares:
        return None
    largest = max(shares.values())
    return before if before and shares.get(before) == largest else next(n for n, s in shares.items() if s == largest)


def _objectives(view: View) -> api_status.ObjectivesStatus | None:
    before = view.previous.get("objectives") or {}
    demand = view.observation.demand
    if demand is None:
        return None

    def milliseconds(seconds: float | None, name: str) -> int | None:
        return _quiet_int(None if seconds is None else seconds * 1000, before.get(name))

    measured = api_status.ObjectivesStatus(
        ttft_p95_milliseconds=milliseconds(demand.ttft_p95_seconds, "ttftP95Milliseconds"),
        itl_p95_milliseconds=milliseconds(demand.itl_p95_seconds, "itlP95Milliseconds"),
        queue_p95_milliseconds=milliseconds(demand.queue_p95_seconds, "queueP95Milliseconds"),
        end_to_end_p95_milliseconds=milliseconds(
            seen_of(demand, "endToEnd", [pattern.name for pattern in view.target.spec.patterns()]),
            "endToEndP95Milliseconds",
        ),
        attainment_percent=_steady_percent(
            attained(view.target.spec, demand, allowed_in(view.decision.inputs)), before.get("attainmentPercent")
        ),
    )
    return measured if _dump(measured) else None


def _steady_percent(share: float | None, before: int | None) -> int | None:
    """Rounded down; a step of one is none."""
    if share is None:
        return None
    percent = int(100 * share + 1e-9)
    return before if before is not None and abs(percent - before) <= 1 else percent


def _autoscaling(view: View, now: float) -> api_status.AutoscalingStatus:
    before = view.previous.get("autoscaling") or {}
    decision = view.decision
    entry = api_status.DecisionStatus(
        time=_timestamp(now),
        action=decision.action,
        reason=decision.reason,
        message=decision.message[:4096],
        replicas=decision.replicas,
        wanted=decision.wanted_replicas,
        bounded_by=decision.bounded_by[:16],
        bottleneck=decision.bottleneck,
        binding=decision.binding or None,
        inputs={name: _significant(value, 4) for name, value in sorted(decision.inputs.items())[:64]},
    )
    last, dumped = before.get("lastDecision"), _dump(entry)
    retuned = decision.settings_generation != (view.previous.get("batching") or {}).get("generation")
    is_new = not last or _kind(last) != _kind(dumped) or (retuned and decision.action is Action.RETUNE)
    newest, history = (dumped if is_new else last), _decisions(view.previous)
    if is_new and decision.action is not Action.HOLD:
        history = [*history, dumped][-api_status.HISTORY_LENGTH :]
    scaled = is_new and decision.action in (Action.SCALE_UP, Action.SCALE_DOWN)
    return api_status.AutoscalingStatus.model_validate(
        {
            "mode": view.target.spec.autoscaling.mode,
            "desiredReplicas": decision.replicas,
            "wantedReplicas": decision.wanted_replicas,
            "lastScaleTime": _timestamp(now) if scaled else before.get("lastScaleTime"),
            "lastDecision": newest,
            "decisions": history,
            "memory": json.dumps(decision.memory, separators=(",", ":"), sort_keys=True),
        }
    )


def _kind(entry: Mapping[str, Any]) -> tuple[object, ...]:
    """What makes a decision another one. Its figures do not: they waver."""
    return entry["action"], entry["reason"], entry["replicas"]


def _decisions(status: Mapping[str, Any]) -> list[StatusDict]:
    return list((status.get("autoscaling") or {}).get("decisions") or ())


def _cost(view: View) -> api_status.CostStatus | None:
    """Of every pod that has a node: also while it starts or drains, its GPUs are nobody else's."""
    seen, price, engine = view.observation, view.observation.price, view.observation.engine
    if price is None or engine is None or engine.gpu_count < 1:
        return None
    gpus = engine.gpu_count * sum(pod.phase not in WAITING_PHASES for pod in seen.replicas)
    hourly = gpus * price.dollars_per_hour
    rate = None if seen.demand is None else seen.demand.generation_tokens_per_second
    million = hourly / (rate * 3600 / 1e6) if rate and seen.metrics_state is MetricsState.FRESH else None
    before = (view.previous.get("cost") or {}).get("dollarsPerMillionOutputTokens")
    return api_status.CostStatus(
        gpu=price.gpu,
        gpus=gpus,
        dollars_per_hour=_significant(hourly, 4),
        dollars_per_million_output_tokens=_quiet(million, before, LATENCY_TOLERANCE),
        price="Default" if price.is_default else "Installation",
    )


def _metrics(view: View) -> api_status.MetricsStatus:
    state, before = view.observation.metrics_state, view.previous.get("metrics") or {}
    if state is MetricsState.FRESH:
        return api_status.MetricsStatus(state=state)
    last = before.get("lastSampleTime")
    if before.get("state") == MetricsState.FRESH:
        # Fresh until this pass: what is fresh is at most so old.
        last = _timestamp(view.observation.now - view.target.spec.metrics.stale_after_seconds)
    return api_status.MetricsStatus(state=state, last_sample_time=last)


# --- rounding ------------------------------------------------------------------------------------------------------


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _significant(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _quiet(value: float | None, before: float | None, tolerance: float) -> float | None:
    """`value` in two significant digits, or `before` while it lies within the tolerance of it."""
    if value is None:
        return None
    if before is not None and abs(value - before) <= tolerance * abs(before):
        return before
    return _significant(value, 2)


def _quiet_int(value: float | None, before: int | None) -> int | None:
    quiet = _quiet(value, before, LATENCY_TOLERANCE)
    return None if quiet is None else round(quiet)


def _dump(part: api.Part) -> StatusDict:
    dumped: StatusDict = part.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped
