"""What a recording shows: live changes of settings, scalings, and whether all that the demo promises was seen.

Pure: a `Recording` in, facts and sentences out. Called by the demo for its exit code and by `report` for its tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tidegate_local.load import summarise
from tidegate_local.recording import DecisionFact, PodFact, Recording, Sample, Settings

EFFECT_WINDOW_SECONDS = 40.0
"""Longest stretch before and after a change that its effect is measured on."""
NOTICEABLE = 1.1
"""A measured latency above this many times the one before counts as worse."""
SETTLE_SECONDS = 5.0
"""Requests that began this shortly after a change still saw the old batch."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the clients felt over a stretch of one phase; None = no request to measure."""

    requests: int
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    itl_p95_seconds: float | None
    output_tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class LiveChange:
    """A change of batch settings while pods ran."""

    at: float
    before: Settings
    after: Settings
    reason: str
    message: str
    pattern: str | None
    """The dominant pattern that the operator saw at the change."""
    mix_changed: bool
    """Whether another pattern was dominant at the change before (or at the start)."""
    pods_kept: tuple[PodFact, ...]
    """Ready pods that acknowledged the change and are the same as before it: same uid, no restart."""
    felt_before: Measured
    felt_after: Measured


@dataclass(frozen=True, slots=True)
class Scaling:
    """A change of the replica count that the operator wants."""

    at: float
    before: int
    after: int
    reason: str
    message: str
    ready_at: float | None
    """When as many pods as wanted were ready."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise of the demo, and whether it was seen."""

    promise: str
    seen: bool
    detail: str


def live_changes(recording: Recording) -> list[LiveChange]:
    changes: list[LiveChange] = []
    known = [sample for sample in recording.samples if sample.settings is not None]
    pattern_before = next((s.dominant_pattern for s in known if s.dominant_pattern is not None), None)
    for before, after in pairwise(known):
        if before.settings is None or after.settings is None or before.settings == after.settings:
            continue
        # The mix that the change answers may already stand in the sample before it.
        changes.append(
            LiveChange(
                at=after.at,
                before=before.settings,
                after=after.settings,
                reason=after.settings_reason,
                message=after.settings_message,
                pattern=after.dominant_pattern,
                mix_changed=after.dominant_pattern is not None and after.dominant_pattern != pattern_before,
                pods_kept=_kept(before, _acknowledged(recording.samples, after)),
                felt_before=felt(recording, after.at, start=after.at - EFFECT_WINDOW_SECONDS),
                felt_after=felt(recording, after.at, start=after.at + SETTLE_SECONDS),
            )
        )
        pattern_before = after.dominant_pattern or pattern_before
    return changes


def _acknowledged(samples: Sequence[Sample], change: Sample) -> Sample | None:
    """The first sample in which every ready pod runs the change's settings generation."""
    for sample in samples:
        if sample.at < change.at or sample.settings_generation != change.settings_generation:
            continue
        ready = sum(pod.ready for pod in sample.pods)
        if ready and sample.settings_applied_replicas is not None and sample.settings_applied_replicas >= ready:
            return sample
    return None


def _kept(before: Sample, after: Sample | None) -> tuple[PodFact, ...]:
    if after is None:
        return ()
    old = {pod.uid: pod for pod in before.pods if pod.ready}
    return tuple(
        pod for pod in after.pods if pod.ready and pod.uid in old and pod.restarts == old[pod.uid].restarts == 0
    )


def felt(recording: Recording, change_at: float, *, start: float) -> Measured:
    """What clients felt from requests that arrived within a window from `start`, in the phase of `change_at` only.

    Keeping to one phase keeps the mix equal on both sides of a change; `start` before it ends the window at it.
    """
    phase = next((mark.name for mark in reversed(recording.phases) if mark.at <= change_at), None)
    end = change_at if start < change_at else start + EFFECT_WINDOW_SECONDS
    chosen = [o for o in recording.outcomes if o.phase == phase and start <= o.arrived_at < end]
    if not chosen:
        return Measured(0, None, None, None, None)
    summary = summarise(chosen)
    arrivals = [outcome.arrived_at for outcome in chosen]
    seconds = max(arrivals) - min(arrivals)
    return Measured(
        requests=len(chosen),
        ttft_p50_seconds=summary.ttft_p50_seconds,
        ttft_p95_seconds=summary.ttft_p95_seconds,
        itl_p95_seconds=summary.itl_p95_seconds,
        output_tokens_per_second=summary.output_tokens / seconds if seconds > 0 else None,
    )


def scalings(recording: Recording) -> list[Scaling]:
    found: list[Scaling] = []
    known = [sample for sample in recording.samples if sample.desired_replicas is not None]
    for before, after in pairwise(known):
        old, new = before.desired_replicas, after.desired_replicas
        if old is None or new is None or old == new:
            continue
        ready_at = next((s.at for s in known if s.at >= after.at and s.ready_replicas == new), None)
        decision = _decision_behind(after, new)
        reason, message = (decision.reason, decision.message) if decision else (after.reason, after.message)
        found.append(Scaling(after.at, old, new, reason, message, ready_at))
    return found


def _decision_behind(sample: Sample, replicas: int) -> DecisionFact | None:
    """The newest decision in the object's history that chose so many replicas by scaling."""
    scaled = [d for d in sample.decisions if d.replicas == replicas and d.action in ("ScaleUp", "ScaleDown")]
    return scaled[-1] if scaled else None


def findings(recording: Recording) -> list[Finding]:
    """Every promise of the demo; all must be seen for it to succeed."""
    changes = live_changes(recording)
    moves = scalings(recording)
    summary = summarise(list(recording.outcomes))
    because_of_mix = [change for change in changes if change.mix_changed and change.pods_kept]
    clearest = max(because_of_mix, key=_evidence, default=None)
    up = next((move for move in moves if move.after > move.before and move.ready_at is not None), None)
    down = next(
        (move for move in moves if up and move.at > up.at and move.after < move.before and move.ready_at is not None),
        None,
    )
    failures = ", ".join(f"{count} x {kind}" for kind, count in summary.failures.items())
    return [
        Finding(
            "Batch settings changed on running pods because of the mix, without a restart",
            clearest is not None,
            _why_no_change(changes) if clearest is None else _change_sentence(clearest),
        ),
        Finding(
            "Scaled up",
            up is not None,
            _scaling_sentence(up) if up else "no scale-up that became ready was seen",
        ),
        Finding(
            "Scaled down again",
            down is not None,
            _scaling_sentence(down) if down else "no completed scale-down after a scale-up was seen",
        ),
        Finding(
            "Every request was answered to its end",
            summary.sent > 0 and summary.failed == 0,
            f"{summary.sent} requests, {summary.output_tokens} tokens streamed, {summary.failed} failed"
            + (f" ({failures})" if failures else ""),
        ),
    ]


def _evidence(change: LiveChange) -> int:
    """Requests that were measured on both sides of it."""
    return min(change.felt_before.requests, change.felt_after.requests)


def _change_sentence(change: LiveChange) -> str:
    pods = ", ".join(pod.name for pod in change.pods_kept)
    old, new = change.felt_before, change.felt_after
    return (
        f"{change.before} → {change.after} when {change.pattern} came to lead the mix; {pods}: same pod, 0 restarts; "
        f"{change.message}; measured by the clients: TTFT p50 {_seconds(old.ttft_p50_seconds)} → "
        f"{_seconds(new.ttft_p50_seconds)}, p95 {_seconds(old.ttft_p95_seconds)} → {_seconds(new.ttft_p95_seconds)}"
        f"{'' if _is_no_worse(change) else '; the clients felt no gain in this stretch, whose load changed too'}"
    )


def _is_no_worse(change: LiveChange) -> bool:
    old, new = change.felt_before.ttft_p95_seconds, change.felt_after.ttft_p95_seconds
    return old is None or new is None or new <= old * NOTICEABLE


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def _why_no_change(changes: Sequence[LiveChange]) -> str:
    if not changes:
        return "the settings never changed"
    if not any(change.pods_kept for change in changes):
        return f"the settings changed {len(changes)} times, but no pod was seen to run the new ones without a restart"
    return f"the settings changed {len(changes)} times, but never with the leading pattern of the mix"


def _scaling_sentence(move: Scaling) -> str:
    took = "" if move.ready_at is None else f", done after {move.ready_at - move.at:.0f} s"
    return f"{move.before} → {move.after} replicas{took}: {move.reason}"
