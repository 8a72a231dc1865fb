"""What one decision leaves for the next: bounded JSON in the object's status, so that a restart forgets nothing.

Pure. It changes only when another value could lead to another decision: stamps are whole buckets of time, and at rest
nothing is written. Reading is lenient: what cannot be read was never known, which only makes `policy` more careful.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidegate_engine.settings import SETTING_NAMES, BatchSettings
from tidegate_operator.forecast import Forecast, dump_forecast, load_forecast
from tidegate_operator.lengths import Remembered, dump_lengths, load_lengths
from tidegate_operator.zero import ZeroState, dump_zero, load_zero

VERSION = 1
MAX_HISTORY = 40
MAX_SCALES = 24


@dataclass(frozen=True, slots=True)
class Want:
    """From `at` until the next entry: the most that was wanted on the way down, the least on the way up."""

    at: float
    most: int
    least: int


@dataclass(frozen=True, slots=True)
class Scale:
    """A change of the replicas that was decided."""

    at: float
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings changes under watch: what held before them, what was measured then, and what was predicted."""

    at: float
    """Of the last change."""
    before: BatchSettings
    measured: Mapping[str, float]
    """Before the first change: ttft_seconds, itl_seconds and such, rate, prefill_tokens, decode_tokens, late."""
    predicted: Mapping[str, float]
    """With the new settings: ttft_seconds, itl_seconds, capacity; `…_before` with the old ones."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Everything that a decision may know of the past."""

    settings: BatchSettings | None = None
    generation: int = 0
    changed_at: float | None = None
    trial: Trial | None = None
    effect: Mapping[str, float] = field(default_factory=dict)
    """Predicted and measured figures of the last trial that ended."""
    cooldown_until: float | None = None
    settled: tuple[float, ...] = ()
    """The mix and model for which the present settings were found good enough."""
    watched: tuple[float, ...] = ()
    watched_since: float | None = None
    """The mix as it was then, and since when it has been about that."""
    history: tuple[Want, ...] = ()
    since: float | None = None
    """Start of the history without a gap."""
    pending_at: float | None = None
    """Last bucket in which fewer replicas than there are were wanted."""
    scales: tuple[Scale, ...] = ()
    missing_since: float | None = None
    correction: float = 1.0
    """Measured over predicted capacity, at most 1."""
    corrected_at: float | None = None
    corrected_for: tuple[float, ...] = ()
    """The mix under which the correction was found; it holds for no other."""
    lengths: Remembered | None = None
    forecast: Forecast = field(default_factory=Forecast)
    zero: ZeroState = field(default_factory=ZeroState)

    @property
    def last_scale_at(self) -> float | None:
        return self.scales[-1].at if self.scales else None


def load_memory(data: Mapping[str, object]) -> Memory:
    """Read what `dump_memory` wrote; anything unreadable is forgotten as a whole."""
    try:
        if data.get("version") != VERSION:
            return Memory()
        return Memory(
            settings=_settings(data.get("settings")),
            generation=int(_number(data.get("generation")) or 0),
            changed_at=_number(data.get("changedAt")),
            trial=_trial(data.get("trial")),
            effect=_figures(data.get("effect")),
            cooldown_until=_number(data.get("cooldownUntil")),
            settled=tuple(float(item) for item in _list(data.get("settled"))),
            watched=tuple(float(item) for item in _list(data.get("watched"))),
            watched_since=_number(data.get("watchedSince")),
            history=tuple(Want(float(at), int(most), int(least)) for at, most, least in _rows(data.get("history"))),
            since=_number(data.get("since")),
            pending_at=_number(data.get("pendingAt")),
            scales=tuple(Scale(float(at), int(before), int(after)) for at, before, after in _rows(data.get("scales"))),
            missing_since=_number(data.get("missingSince")),
            correction=_number(data.get("correction")) or 1.0,
            corrected_at=_number(data.get("correctedAt")),
            corrected_for=tuple(float(item) for item in _list(data.get("correctedFor"))),
            lengths=load_lengths(data.get("lengths")),
            forecast=load_forecast(data.get("forecast")),
            zero=load_zero(data.get("zero")),
        )
    except (TypeError, ValueError, LookupError, OverflowError):
        return Memory()


def dump_memory(memory: Memory) -> dict[str, object]:
    """JSON without what is unknown or at rest."""
    trial = memory.trial
    data: dict[str, object | None] = {
        "version": VERSION,
        "settings": None if memory.settings is None else _settings_list(memory.settings),
        "generation": memory.generation,
        "changedAt": _stamp(memory.changed_at),
        "trial": None
        if trial is None
        else {
            "at": _stamp(trial.at),
            "before": _settings_list(trial.before),
            "measured": dict(trial.measured),
            "predicted": dict(trial.predicted),
        },
        "effect": dict(memory.effect) or None,
        "cooldownUntil": _stamp(memory.cooldown_until),
        "settled": list(memory.settled) or None,
        "watched": list(memory.watched) or None,
        "watchedSince": _stamp(memory.watched_since),
        "history": [[_stamp(item.at), item.most, item.least] for item in memory.history] or None,
        "since": _stamp(memory.since),
        "pendingAt": _stamp(memory.pending_at),
        "scales": [[_stamp(item.at), item.before, item.after] for item in memory.scales] or None,
        "missingSince": _stamp(memory.missing_since),
        "correction": None if memory.correction == 1 else memory.correction,
        "correctedAt": _stamp(memory.corrected_at),
        "correctedFor": list(memory.corrected_for) or None,
        "lengths": dump_lengths(memory.lengths),
        "forecast": dump_forecast(memory.forecast) or None,
        "zero": dump_zero(memory.zero),
    }
    return {name: value for name, value in data.items() if value is not None}


def _stamp(at: float | None) -> float | None:
    return None if at is None else round(at, 1)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _list(value: object) -> Sequence[float]:
    return value if isinstance(value, list | tuple) else ()


def _rows(value: object) -> Sequence[tuple[float, float, float]]:
    return value if isinstance(value, list | tuple) else ()


def _figures(value: object) -> dict[str, float]:
    return {str(name): float(item) for name, item in value.items()} if isinstance(value, Mapping) else {}


def _settings_list(settings: BatchSettings) -> list[int]:
    return [getattr(settings, name) for name in SETTING_NAMES]


def _settings(value: object) -> BatchSettings | None:
    if not isinstance(value, list | tuple):
        return None
    return BatchSettings(**{name: int(item) for name, item in zip(SETTING_NAMES, value, strict=True)})


def _trial(value: object) -> Trial | None:
    if not isinstance(value, Mapping):
        return None
    before = _settings(value["before"])
    if before is None:
        return None
    return Trial(float(value["at"]), before, _figures(value["measured"]), _figures(value["predicted"]))


@dataclass(frozen=True, slots=True)
class Buckets:
    """How the history is kept: width of a bucket, how far back, and what pause makes it void."""

    seconds: float
    keep_seconds: float
    gap_seconds: float


def buckets_for(windows: Sequence[int], *, sync_seconds: float) -> Buckets:
    """Fine against the shortest window, few enough for the longest."""
    given = [window for window in windows if window > 0] or [1]
    width = max(1.0, min(given) / 6, max(given) / (MAX_HISTORY - 8))
    return Buckets(width, float(max(given)), max(4 * width, 4 * sync_seconds, 60.0))


def remember_want(memory: Memory, want: Want, *, current: int, buckets: Buckets) -> Memory:
    """Add a recommendation. The same one again writes nothing, unless fewer replicas are wanted than there are."""
    stamp = want.at // buckets.seconds * buckets.seconds
    pending = want.most < current
    gap = memory.pending_at is not None and want.at - memory.pending_at > buckets.gap_seconds
    history, since = list(memory.history), memory.since
    if since is None or not history or gap:
        # Nobody watched: whatever was needed meanwhile is unknown, so the present number counts as wanted.
        history, since = [Want(stamp, max(want.most, current), want.least)], want.at
    elif history[-1].at >= stamp:
        last = history[-1]
        history[-1] = Want(last.at, max(last.most, want.most), min(last.least, want.least))
    elif (history[-1].most, history[-1].least) != (want.most, want.least):
        history.append(Want(stamp, want.most, want.least))
    while len(history) > 1 and history[1].at <= want.at - buckets.keep_seconds:
        history.pop(0)
    return replace(
        memory,
        history=tuple(history[-MAX_HISTORY:]),
        since=since,
        pending_at=stamp if pending else None,
    )


def wants_within(memory: Memory, *, now: float, seconds: float) -> tuple[Want, ...]:
    """The entries in force at some time of the window."""
    start = now - seconds
    inside = [
        item
        for index, item in enumerate(memory.history)
        if index + 1 == len(memory.history) or memory.history[index + 1].at > start
    ]
    return tuple(inside)


def forget_wants(memory: Memory) -> Memory:
    """The window is empty again: it must fill before anything is taken away."""
    return replace(memory, history=(), since=None, pending_at=None)


def remember_scale(memory: Memory, scale: Scale, *, keep_seconds: float) -> Memory:
    kept = [item for item in memory.scales if item.at > scale.at - keep_seconds]
    return replace(memory, scales=(*kept, scale)[-MAX_SCALES:])


def forget_unlanded_scale(memory: Memory, *, current: int) -> Memory:
    """A change that was decided but never reached the cluster does not count against the limits."""
    last = memory.scales[-1] if memory.scales else None
    if last is not None and last.after != current and last.before == current:
        return replace(memory, scales=memory.scales[:-1])
    return memory
