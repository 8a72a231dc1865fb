"""What the demo saw, as facts: samples of the object's status, Events, phases and the load's outcomes.

Pure data with the readers that turn Kubernetes JSON into it; no I/O, no clock. Filled by `watching`, read by `verdict`,
`terminal` and `report`. `None` means unknown, never zero.
"""

from collections.abc import Mapping, Sequence
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
class Sample:
    """The object's status and its pods at one time (Unix seconds)."""

    at: float
    arrivals_per_second: float | None = None
    mix: Mapping[str, float] | None = None
    """Share of each pattern, 0 to 1."""
    ttft_p95_seconds: float | None = None
    itl_p95_seconds: float | None = None
    waiting: float | None = None
    running: float | None = None
    desired_replicas: int | None = None
    ready_replicas: int | None = None
    settings: Settings | None = None
    settings_generation: int | None = None
    settings_applied_replicas: int | None = None
    reason: str = ""
    message: str = ""
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
