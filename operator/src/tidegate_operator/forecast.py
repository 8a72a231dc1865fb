"""Foreseeing the arriving work over the time that a replica needs to start: by the time of day or week, or the trend.

Pure. Three ways, each with a record of its own past forecasts. Day and trend are believed only while that record says
that they beat "no change". The week is believed only while it beats what is said without it, as where weekends differ,
and then stands in place of the day. A forecast only ever adds. The state is a few hundred numbers at most, and changes
only when the load moves by a real step: under a steady load nothing is written. Kept in `memory`, called by `policy`.

Levels are natural logarithms of work, so that steps are ratios. Time is cut into slots; `steps` says by how much the
level moves in a slot of the day, `week_steps` in one of the week, so a lasting change of the level is one step once,
which the following days and weeks forget.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

SLOT_SECONDS = 300
SLOTS = 86_400 // SLOT_SECONDS
WEEK_SLOTS = 7 * SLOTS
MOVE = 0.3
"""A smaller change of the level is none."""
NOISE_DEVIATIONS = 6
"""Nor is one that so many standard deviations of the number of requests explain."""
MIN_REQUESTS = 30
"""Fewer requests in a window count as so many: below, a level says nothing."""
LEARNING = 0.5
"""Weight of the newest day against those before."""
FORGOTTEN = 0.15
MAX_STEPS = 96
"""Of a day, and of a week; the smallest are left out."""
MATTERS = 0.1
"""A smaller rise is not foreseen: the tolerance of the scaling would not follow it."""
LARGEST = math.log(2)
"""No forecast is higher than this above the present level."""
BELIEVED = 0.4
GAINED, LOST = 0.2, 0.5
"""Weight of a forecast that was better than no change, and of one that was worse: belief comes slowly, goes quickly."""
WAYS = ("season", "trend", "week")
TREND_SECONDS = 3 * SLOT_SECONDS
"""Two moves further apart make no trend."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A forecast whose time has not come: the level that it must beat, and the one that it foretold."""

    due: float
    base: float
    level: float


@dataclass(frozen=True, slots=True)
class Record:
    """What became of the forecasts of one way: 1 when all were exact, 0 when what they must beat was as good, -1 at
    worst."""

    belief: float = 0.0
    awaited: Awaited | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """Everything that is remembered."""

    level: float | None = None
    """None while nothing is known, as after a gap in the measurements."""
    moves: tuple[tuple[float, float], ...] = ()
    """The last two moves: when, and the level after it."""
    today: tuple[int, float] | None = None
    """The slot of the last move, counted since 1970, and the sum of the moves in it."""
    checked: int | None = None
    """Slots before this one have been compared with `steps`."""
    steps: tuple[tuple[int, float], ...] = ()
    """Slots of the day in which the level moves, and by how much."""
    week_steps: tuple[tuple[int, float], ...] = ()
    """Likewise of the week."""
    week_since: int | None = None
    """The slot since which the week is watched without a break; 0 once it was whole: before, what it does not know of
    may be a step all the same."""
    records: tuple[Record, ...] = (Record(), Record(), Record())
    """Of `WAYS`."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The most work per second within the lead, and the way that says so; empty where nothing is foreseen."""

    work: float = 0.0
    by: str = ""


def foresee(state: Forecast, *, now: float, lead_seconds: float) -> Foreseen:
    """What is believed of the time until `now + lead_seconds`."""
    if state.level is None:
        return Foreseen()
    seasonal = _season(state, now, lead_seconds)
    week = _week_rise(state, now, lead_seconds)
    if week is not None and _is_believed(state, "week"):
        seasonal = week, "week"
    trend = (_trend_rise(state, now, lead_seconds), "trend") if _is_believed(state, "trend") else (0.0, "")
    believed = [(rise, way) for rise, way in (seasonal, trend) if rise > MATTERS]
    if not believed:
        return Foreseen()
    rise, way = max(believed)
    return Foreseen(math.exp(state.level + min(rise, LARGEST)), way)


def observe(state: Forecast, *, now: float, work: float, requests: float, lead_seconds: float) -> Forecast:
    """Take in the present work per second, of which `requests` arrived in the window."""
    if work <= 0 or requests <= 0:
        return state
    level = math.log(work * max(1.0, MIN_REQUESTS / requests))
    slot = int(now // SLOT_SECONDS)
    if state.level is None:
        since = slot if state.week_since is None else state.week_since
        return replace(state, level=round(level, 2), checked=slot, week_since=since)
    state = replace(state, records=tuple(_judge(record, now, level) for record in state.records))
    state = _learn(state, slot)
    if state.week_since and slot - state.week_since >= WEEK_SLOTS:
        state = replace(state, week_since=0)
    noise = NOISE_DEVIATIONS / math.sqrt(max(requests, MIN_REQUESTS))
    if abs(level - (state.level or 0.0)) > max(MOVE, noise):
        state = _move(state, now, level)
    return _foretell(state, now, level, lead_seconds=lead_seconds)


def interrupt(state: Forecast) -> Forecast:
    """Nothing was measured for a while: what happened meanwhile is unknown, and no forecast can be judged."""
    if state.level is None:
        return state
    records = tuple(replace(record, awaited=None) for record in state.records)
    since = None if state.week_since else state.week_since
    return replace(state, level=None, moves=(), today=None, checked=None, week_since=since, records=records)


def _move(state: Forecast, now: float, level: float) -> Forecast:
    slot = int(now // SLOT_SECONDS)
    step = level - (state.level or 0.0)
    if state.today is not None and state.today[0] == slot:
        step += state.today[1]
    level = round(level, 2)
    moves = (*state.moves, (float(round(now)), level))[-2:]
    return replace(state, level=level, moves=moves, today=(slot, round(step, 2)))


def _learn(state: Forecast, slot: int) -> Forecast:
    """Compare the slots that have passed with what the day and the week were thought to be."""
    moved = state.today if state.today is not None and state.today[0] < slot else None
    first = slot if state.checked is None else state.checked
    steps = _learned(state.steps, SLOTS, range(first, slot), moved)
    week_steps = _learned(state.week_steps, WEEK_SLOTS, range(first, slot), moved)
    if moved is None and steps is None and week_steps is None:
        return state
    return replace(
        state,
        steps=state.steps if steps is None else steps,
        week_steps=state.week_steps if week_steps is None else week_steps,
        checked=slot,
        today=state.today if moved is None else None,
    )


def _learned(
    steps: tuple[tuple[int, float], ...], period: int, passed: range, moved: tuple[int, float] | None
) -> tuple[tuple[int, float], ...] | None:
    """The steps of a period of so many slots, after the passed ones, of which one moved; None where nothing is new."""
    known = dict(steps)
    passed = passed[-period:]
    news: dict[int, float] = {}
    for place, step in steps:
        last = passed.stop - 1 - (passed.stop - 1 - place) % period
        if last in passed:
            actual = moved[1] if moved is not None and moved[0] == last else 0.0
            news[place] = round((1 - LEARNING) * step + LEARNING * actual, 2)
    if moved is not None and moved[1] and moved[0] in passed:
        news.setdefault(moved[0] % period, moved[1])
    if not news:
        return None
    largest = sorted((known | news).items(), key=lambda item: (-abs(item[1]), item[0]))[:MAX_STEPS]
    return tuple(sorted((place, step) for place, step in largest if abs(step) >= FORGOTTEN))


def _is_believed(state: Forecast, way: str) -> bool:
    return state.records[WAYS.index(way)].belief >= BELIEVED


def _season(state: Forecast, now: float, lead_seconds: float) -> tuple[float, str]:
    """The rise that the day is believed to bring."""
    if not _is_believed(state, "season"):
        return 0.0, ""
    return _rise(state, state.steps, SLOTS, now=now, lead_seconds=lead_seconds), "season"


def _week_rise(state: Forecast, now: float, lead_seconds: float) -> float | None:
    """The rise that the week brings; None before a whole one was watched."""
    if state.week_since != 0:
        return None
    return _rise(state, state.week_steps, WEEK_SLOTS, now=now, lead_seconds=lead_seconds)


def _rise(
    state: Forecast, steps: tuple[tuple[int, float], ...], period: int, *, now: float, lead_seconds: float
) -> float:
    """The highest that the steps lead to within the lead; what is left of the present slot's included."""
    slot = int(now // SLOT_SECONDS)
    known = dict(steps)
    done = state.today[1] if state.today is not None and state.today[0] == slot else 0.0
    present = known.get(slot % period, 0.0)
    total = highest = max(0.0, present - done) if present > 0 else 0.0
    for coming in range(slot + 1, int((now + lead_seconds) // SLOT_SECONDS) + 1):
        total += known.get(coming % period, 0.0)
        highest = max(highest, total)
    return highest


def _trend_rise(state: Forecast, now: float, lead_seconds: float) -> float:
    """The last two moves continued, until the next one is overdue."""
    if len(state.moves) < 2:
        return 0.0
    (before, low), (last, high) = state.moves
    gap = max(1.0, last - before)
    if gap > TREND_SECONDS or now - last > gap + SLOT_SECONDS:
        return 0.0
    return (high - low) / gap * lead_seconds


def _foretell(state: Forecast, now: float, level: float, *, lead_seconds: float) -> Forecast:
    """Write down what each way says, believed or not, where that is something and no other forecast is awaited."""
    slot_end = (int((now + lead_seconds) // SLOT_SECONDS) + 1.0) * SLOT_SECONDS
    season = _rise(state, state.steps, SLOTS, now=now, lead_seconds=lead_seconds)
    without_week, _ = _season(state, now, lead_seconds)
    week = _week_rise(state, now, lead_seconds)
    ways = (
        (0.0, season, slot_end),
        (0.0, max(0.0, _trend_rise(state, now, lead_seconds)), now + lead_seconds),
        (without_week, without_week if week is None else week, slot_end),
    )
    records = []
    for record, (other, rise, due) in zip(state.records, ways, strict=True):
        other, rise = min(other, LARGEST), min(rise, LARGEST)
        if record.awaited is None and abs(rise - other) > MATTERS:
            foretold = Awaited(float(round(due)), round(level + other, 2), round(level + rise, 2))
            record = replace(record, awaited=foretold)
        records.append(record)
    return replace(state, records=tuple(records))


def _judge(record: Record, now: float, level: float) -> Record:
    """Where a forecast is due: was it nearer to what came than what it must beat? A long overdue one tells nothing."""
    awaited, belief = record.awaited, record.belief
    if awaited is None or now < awaited.due:
        return record
    if now - awaited.due <= SLOT_SECONDS:
        rise = abs(awaited.level - awaited.base)
        gain = (abs(level - awaited.base) - abs(level - awaited.level)) / rise
        weight = (GAINED if gain > 0 else LOST) * min(1.0, rise / LARGEST)
        belief = round((1 - weight) * belief + weight * gain, 2)
    return Record(belief)


# --- as JSON -------------------------------------------------------------------------------------------------------


def dump_forecast(state: Forecast) -> dict[str, object]:
    """JSON without what is unknown."""
    data: dict[str, object | None] = {
        "level": state.level,
        "moves": [list(move) for move in state.moves] or None,
        "today": None if state.today is None else list(state.today),
        "checked": state.checked,
        "steps": [list(step) for step in state.steps] or None,
        "weekSteps": [list(step) for step in state.week_steps] or None,
        "weekSince": state.week_since,
        **{way: _dump_record(record) for way, record in zip(WAYS, state.records, strict=True)},
    }
    return {name: value for name, value in data.items() if value is not None}


def _dump_record(record: Record) -> list[float] | None:
    awaited = record.awaited
    if record == Record():
        return None
    return [record.belief] if awaited is None else [record.belief, awaited.due, awaited.base, awaited.level]


def load_forecast(data: object) -> Forecast:
    """Read what `dump_forecast` wrote. Raises TypeError or ValueError for anything else."""
    if data is None:
        return Forecast()
    if not isinstance(data, Mapping):
        raise TypeError("a forecast is an object")
    today, level, checked = data.get("today"), data.get("level"), data.get("checked")
    since = data.get("weekSince")
    return Forecast(
        level=None if level is None else float(level),
        moves=tuple((float(at), float(to)) for at, to in _rows(data, "moves"))[-2:],
        today=None if today is None else (int(today[0]), float(today[1])),
        checked=None if checked is None else int(checked),
        steps=tuple((int(slot) % SLOTS, float(step)) for slot, step in _rows(data, "steps"))[:MAX_STEPS],
        week_steps=tuple((int(slot) % WEEK_SLOTS, float(step)) for slot, step in _rows(data, "weekSteps"))[:MAX_STEPS],
        week_since=None if since is None else int(since),
        records=tuple(_load_record(data.get(way)) for way in WAYS),
    )


def _rows(data: Mapping[str, object], name: str) -> Iterator[Sequence[float]]:
    value = data.get(name)
    yield from value if isinstance(value, list | tuple) else ()


def _load_record(value: object) -> Record:
    if not isinstance(value, list | tuple) or not value:
        return Record()
    belief, *awaited = (float(item) for item in value)
    return Record(belief, Awaited(*awaited) if awaited else None)
