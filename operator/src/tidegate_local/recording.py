"""What the demo saw, as facts: samples of the object's status, Events, phases and the load's outcomes.

Pure data with the readers that turn Kubernetes JSON into it; no I/O, no clock. Filled by `watching`, read by `verdict`,
`terminal` and `report`. `None` means unknown, never zero.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from tidegate_local.load import Outcome

SETTING_FIELDS = ("maxSequences", "maxBatchedTokens", "prefillChunkTokens")


@dataclass(frozen=True, slots=True)
class Settings:
    """The live batch settings as the object names them."""

    max_sequences: int
    max_batched_tokens: int
    prefill_chunk_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.max_sequences} sequences, {self.max_batched_tokens} tokens a step, "
            f"prefill in chunks of {self.prefill_chunk_tokens}"
        )


@dataclass(frozen=True, slots=True)
class PodFact:
    """One engine pod as the API server shows it."""

    name: str
    uid: str
    ready: bool
    restarts: int
    terminating: bool = False


@dataclass(frozen=True, slots=True)
class DecisionFact:
    """An entry of the object's history of decisions."""

    at: float
    action: str
    reason: str
    message: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The object's status and its pods at one time (Unix seconds)."""

    at: float
    arrivals_per_second: float | None = None
    mix: Mapping[str, float] | None = None
    """Share of each pattern, 0 to 1."""
    ttft_p95_seconds: float | None = None
    itl_p95_seconds: float | None = None
    queue_p95_seconds: float | None = None
    waiting: float | None = None
    running: float | None = None
    desired_replicas: int | None = None
    ready_replicas: int | None = None
    settings: Settings | None = None
    settings_generation: int | None = None
    settings_applied_replicas: int | None = None
    settings_reason: str = ""
    settings_message: str = ""
    """Why the settings were changed last, with the predicted effect."""
    reason: str = ""
    message: str = ""
    """The newest decision's."""
    decisions: tuple[DecisionFact, ...] = ()
    """The object's history: decisions that changed something, oldest first."""
    pods: tuple[PodFact, ...] = ()

    @property
    def dominant_pattern(self) -> str | None:
        return max(self.mix, key=lambda name: (self.mix or {})[name]) if self.mix else None


@dataclass(frozen=True, slots=True)
class EventFact:
    """One Kubernetes Event about the object."""

    at: float
    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """When a phase of the load began and what it sends."""

    name: str
    at: float
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class Targets:
    """The object's objectives; None where it sets none."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    queue_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything the report is made of. Sequences are in order of time."""

    title: str
    targets: Targets = Targets()
    samples: Sequence[Sample] = ()
    events: Sequence[EventFact] = ()
    phases: Sequence[PhaseMark] = ()
    outcomes: Sequence[Outcome] = ()
    ended_at: float | None = None
    facts: Sequence[tuple[str, str]] = ()
    """Name and value of what stands at the top of the report: profile, images, versions, answer of the real model."""


def unix_seconds(timestamp: object) -> float | None:
    """RFC 3339 as the API server writes it; None of anything else."""
    if not isinstance(timestamp, str):
        return None
    try:
        return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def settings_of(data: object) -> Settings | None:
    """Read `status.batching.desired`; None unless all three are there."""
    if not isinstance(data, Mapping):
        return None
    values = [data.get(name) for name in SETTING_FIELDS]
    if not all(isinstance(value, int) for value in values):
        return None
    return Settings(*[int(str(value)) for value in values])


def pod_fact(pod: Mapping[str, object]) -> PodFact:
    metadata = _mapping(pod.get("metadata"))
    status = _mapping(pod.get("status"))
    conditions = [item for item in _list(status.get("conditions")) if isinstance(item, Mapping)]
    containers = [item for item in _list(status.get("containerStatuses")) if isinstance(item, Mapping)]
    return PodFact(
        name=str(metadata.get("name", "")),
        uid=str(metadata.get("uid", "")),
        ready=any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions),
        restarts=sum(int(str(item.get("restartCount", 0))) for item in containers),
        terminating=metadata.get("deletionTimestamp") is not None,
    )


def event_fact(event: Mapping[str, object]) -> EventFact | None:
    """Read an Event of either API; None when it carries no time."""
    for name in ("eventTime", "lastTimestamp", "firstTimestamp", "deprecatedLastTimestamp"):
        at = unix_seconds(event.get(name))
        if at is not None:
            break
    else:
        at = unix_seconds(_mapping(event.get("metadata")).get("creationTimestamp"))
    if at is None:
        return None
    return EventFact(
        at=at,
        reason=str(event.get("reason", "")),
        message=str(event.get("message") or event.get("note") or ""),
        warning=event.get("type") == "Warning",
    )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def conditions_of(resource: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """`status.conditions` by type."""
    items = _list(_mapping(resource.get("status")).get("conditions"))
    return {str(item.get("type")): item for item in items if isinstance(item, Mapping)}


def condition_is_true(resource: Mapping[str, object], kind: str) -> bool:
    """Whether the condition is True for the object's present generation."""
    generation = _mapping(resource.get("metadata")).get("generation")
    condition = conditions_of(resource).get(kind, {})
    return condition.get("status") == "True" and condition.get("observedGeneration", generation) == generation


def condition_news(before: Mapping[str, object], now: Mapping[str, object], kinds: Collection[str] = ()) -> list[str]:
    """Sentences on conditions that changed between two readings of one object; of `kinds` only, when given.

    A condition that starts out Unknown is no news.
    """
    old = conditions_of(before)

    def told(condition: Mapping[str, object]) -> tuple[object, object, object]:
        return condition.get("status", "Unknown"), condition.get("reason"), condition.get("message")

    return [
        f"{kind}={condition.get('status')} ({condition.get('reason')})"
        + (f": {condition['message']}" if condition.get("message") else "")
        for kind, condition in conditions_of(now).items()
        if (not kinds or kind in kinds)
        and told(condition) != told(old.get(kind, {}))
        and not (condition.get("status") == "Unknown" and kind not in old)
    ]


def sample_of(resource: Mapping[str, object], pods: Sequence[Mapping[str, object]], at: float) -> Sample:
    """Read an LLMDeployment's status; what it does not say stays unknown."""
    status = _mapping(resource.get("status"))
    traffic, objectives = _mapping(status.get("traffic")), _mapping(status.get("objectives"))
    scaling, batching = _mapping(status.get("autoscaling")), _mapping(status.get("batching"))
    decision = _mapping(scaling.get("lastDecision"))
    classes = [item for item in _list(traffic.get("classes")) if isinstance(item, Mapping)]
    shares = {str(item.get("name")): number(item.get("sharePercent")) for item in classes}
    facts = tuple(pod_fact(pod) for pod in pods)
    return Sample(
        at=at,
        arrivals_per_second=number(traffic.get("arrivalRate")),
        mix=_normalised({name: share for name, share in shares.items() if share}),
        ttft_p95_seconds=_seconds(objectives.get("ttftP95Milliseconds")),
        itl_p95_seconds=_seconds(objectives.get("itlP95Milliseconds")),
        queue_p95_seconds=_seconds(objectives.get("queueP95Milliseconds")),
        desired_replicas=_integer(scaling.get("desiredReplicas")),
        ready_replicas=sum(pod.ready and not pod.terminating for pod in facts),
        settings=settings_of(batching.get("desired")),
        settings_generation=_integer(batching.get("generation")),
        settings_applied_replicas=_integer(batching.get("appliedReplicas")),
        settings_reason=str(batching.get("lastReason", "")),
        settings_message=str(batching.get("lastMessage", "")),
        reason=str(decision.get("reason", "")),
        message=str(decision.get("message", "")),
        decisions=tuple(fact for item in _list(scaling.get("decisions")) if (fact := _decision_fact(item))),
        pods=facts,
    )


def _normalised(shares: Mapping[str, float]) -> dict[str, float] | None:
    """Shares that sum to one: those in status are rounded, and follow at their own pace."""
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total > 0 else None


def _decision_fact(item: object) -> DecisionFact | None:
    data = _mapping(item)
    at, replicas = unix_seconds(data.get("time")), _integer(data.get("replicas"))
    if at is None or replicas is None:
        return None
    return DecisionFact(
        at, str(data.get("action", "")), str(data.get("reason", "")), str(data.get("message", "")), replicas
    )


def gauge_total(exposition: str, name: str) -> float | None:
    """Sum of a gauge's series in Prometheus' text format; None when it is not there."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in exposition.splitlines()
        if line.startswith(name) and line[len(name) : len(name) + 1] in (" ", "{")
    ]
    return sum(values) if values else None


def _seconds(milliseconds: object) -> float | None:
    value = number(milliseconds)
    return None if value is None else value / 1000


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
