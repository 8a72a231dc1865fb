"""Which batch settings act, who set them, and until when: the state behind `/admin/v1/batching`.

Pure: versions, generations and expiry are facts in, facts out. Applying them to the scheduler is `admin`'s part.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidegate_engine.settings import SETTING_NAMES, BatchSettings, Envelope, Violation, find_violation

MAX_TTL_SECONDS = 86_400


@dataclass(frozen=True, slots=True)
class BatchingState:
    """`version` counts every change here; `generation` is the operator's number of its decision."""

    version: int
    generation: int
    spec: BatchSettings
    generation_spec: BatchSettings
    """What `generation` set; a person may have changed `spec` since."""
    base: BatchSettings
    base_generation: int
    """The last settings set without a time to live, to which the others fall back."""
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A checked body of PATCH: the settings named in it and the conditions."""

    settings: Mapping[str, int]
    generation: int | None = None
    ttl_seconds: int | None = None
    if_version: int | None = None


@dataclass(frozen=True, slots=True)
class Conflict:
    """Somebody else was first."""

    code: str
    message: str


def initial_state(settings: BatchSettings, generation: int) -> BatchingState:
    return BatchingState(1, generation, settings, settings, settings, generation)


def parse_change(data: object, *, if_match: str | None) -> Change | Violation:
    """Read a PATCH body and its If-Match header."""
    if not isinstance(data, Mapping):
        return Violation("body", None, "the body must be a JSON object")
    known = {*SETTING_NAMES, "generation", "ttl_s"}
    for name, value in data.items():
        if name not in known:
            return Violation(str(name), None, f"{name} is unknown; known are {', '.join(sorted(known))}")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            return Violation(name, None, f"{name} must be a whole number")
    ttl_seconds = data.get("ttl_s")
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        return Violation("ttl_s", (1, MAX_TTL_SECONDS), f"ttl_s is {ttl_seconds}; allowed are 1 to {MAX_TTL_SECONDS}")
    version = parse_if_match(if_match)
    if isinstance(version, Violation):
        return version
    settings = {name: data[name] for name in SETTING_NAMES if data.get(name) is not None}
    return Change(settings, data.get("generation"), ttl_seconds, version)


def parse_if_match(header: str | None) -> int | Violation | None:
    """The version that a change is meant for; None = any."""
    if header is None or header == "*":
        return None
    text = header.strip('"')
    if not text.isdecimal():
        return Violation("If-Match", None, 'If-Match must be a version, such as "3"')
    return int(text)


def apply_change(
    state: BatchingState, change: Change, envelope: Envelope, *, now: float
) -> BatchingState | Conflict | Violation:
    """The state after `change`, or why it is refused. The same generation with the same settings may come again."""
    if change.if_version is not None and change.if_version != state.version:
        return Conflict("version_conflict", f"the version is {state.version}, not {change.if_version}")
    spec = replace(state.spec, **change.settings)
    generation = state.generation if change.generation is None else change.generation
    if generation < state.generation:
        return Conflict(
            "generation_conflict", f"generation {state.generation} acts here; {generation} is older and is refused"
        )
    is_repeat = change.generation is not None and change.generation == state.generation
    if is_repeat and spec != state.generation_spec:
        return Conflict("generation_conflict", f"generation {generation} was set here with other settings")
    if violation := find_violation(spec, envelope):
        return violation
    expires_at = None if change.ttl_seconds is None else now + change.ttl_seconds
    is_same = spec == state.spec and generation == state.generation
    keeps_base = expires_at is not None
    return BatchingState(
        version=state.version if is_same and expires_at == state.expires_at else state.version + 1,
        generation=generation,
        spec=spec,
        generation_spec=state.generation_spec if change.generation is None else spec,
        base=state.base if keeps_base else spec,
        base_generation=state.base_generation if keeps_base else generation,
        expires_at=expires_at,
    )


def expire(state: BatchingState, now: float) -> BatchingState:
    """Fall back to the base when the time to live is over; otherwise the same state."""
    if state.expires_at is None or now < state.expires_at:
        return state
    return BatchingState(
        state.version + 1, state.base_generation, state.base, state.base, state.base, state.base_generation
    )
