"""A forecast is believed once it has proven itself, comes early where it is right, and ends soon where it is wrong."""

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.forecast import (
    BELIEVED,
    LARGEST,
    MAX_STEPS,
    Forecast,
    Record,
    dump_forecast,
    foresee,
    interrupt,
    load_forecast,
    observe,
)

DAY = 86_400
HOUR = 3600
MIDNIGHT = 1_700_006_400.0
PERIOD = 60
LEAD = 300.0
RATE = 20.0
"""Requests per second at the quiet times of the day."""


@dataclass
class Watched:
    """What came out of watching a load for some days."""

    state: Forecast = field(default_factory=Forecast)
    writes: list[float] = field(default_factory=list)
    early: list[float] = field(default_factory=list)
    """Times at which more was foreseen than there was."""


def watch(
    rate: Callable[[float], float], *, days: float, seed: int = 1, above: float = 1.2, unit: float = 1
) -> Watched:
    """`rate` gets the seconds since the first midnight, each look sees Poisson noise; what is written is read again."""
    dice, seen = random.Random(seed), Watched()
    for index in range(round(days * DAY / PERIOD)):
        elapsed = index * PERIOD
        mean = rate(elapsed) * PERIOD
        arrived, now = max(1.0, dice.gauss(mean, math.sqrt(mean))) / PERIOD, MIDNIGHT + elapsed
        if foresee(seen.state, now=now, lead_seconds=LEAD).work > above * arrived * unit:
            seen.early.append(elapsed)
        state = observe(seen.state, now=now, work=arrived * unit, requests=PERIOD * arrived, lead_seconds=LEAD)
        if state != seen.state:
            seen.writes.append(elapsed)
            seen.state = load_forecast(json.loads(json.dumps(dump_forecast(state))))
            assert seen.state == state
    return seen


def office(elapsed: float) -> float:
    hour = elapsed % DAY / HOUR
    return 4 * RATE if 9 <= hour < 12 or 13 <= hour < 17 else RATE


def test_a_steady_load_is_written_once_however_long_it_lasts() -> None:
    seen = watch(lambda elapsed: RATE, days=3)
    assert len(seen.writes) == 1 and seen.early == []


def test_a_rise_at_the_same_time_every_day_is_foreseen_once_it_has_proven_itself() -> None:
    seen = watch(office, days=6)
    assert not [at for at in seen.early if at < 2 * DAY], "two days are not enough to believe it"
    for day in range(4, 6):
        for opening in (9 * HOUR, 13 * HOUR):
            start = day * DAY + opening
            assert [at for at in seen.early if start - LEAD - PERIOD <= at < start], "as early as a start takes"
    assert all(office(at + LEAD + 300) > office(at) or office(at - 90) < office(at) for at in seen.early)


def working_week(elapsed: float) -> float:
    """The first midnight is a Wednesday's."""
    return office(elapsed) if (elapsed // DAY + 2) % 7 < 5 else RATE


def week_of(times: list[float], week: int) -> list[float]:
    return [at for at in times if week * 7 <= at / DAY < (week + 1) * 7]


def is_weekend(elapsed: float) -> bool:
    return (elapsed // DAY + 2) % 7 >= 5


def test_a_weekend_is_no_working_day_once_the_week_has_proven_itself() -> None:
    seen = watch(working_week, days=21)
    taken_in = [at for at in week_of(seen.early, 0) if is_weekend(at)]
    assert taken_in, "the day alone takes the first Saturday for a Friday"
    early = week_of(seen.early, 2)
    assert not [at for at in early if is_weekend(at)]
    for day in (0, 1, 2, 5, 6):  # Wednesday to Friday, Monday and Tuesday
        for opening in (9 * HOUR, 13 * HOUR):
            start = (14 + day) * DAY + opening
            assert [at for at in early if start - LEAD - PERIOD <= at < start], (day, opening)
    assert len(json.dumps(dump_forecast(seen.state))) < 1500


def test_where_all_days_are_alike_the_week_is_never_asked() -> None:
    seen = watch(office, days=18)
    assert seen.state.records[2].belief == 0.0 and seen.state.records[2].awaited is None
    assert len(seen.state.week_steps) == 7 * 4


def test_before_a_whole_week_was_watched_the_week_says_nothing() -> None:
    seen = watch(working_week, days=6.9)
    assert seen.state.week_steps and seen.state.records[2] == Record()
    broken = interrupt(seen.state)
    assert broken.week_since is None and broken.week_steps == seen.state.week_steps
    back = observe(broken, now=MIDNIGHT + 7 * DAY, work=RATE, requests=1000, lead_seconds=LEAD)
    assert back.week_since == (MIDNIGHT + 7 * DAY) // 300
    assert interrupt(watch(working_week, days=7.1).state).week_since == 0, "once whole, a break takes nothing from it"


def test_a_new_habit_of_every_day_is_foreseen_though_the_week_does_not_know_it() -> None:
    def with_evenings(elapsed: float) -> float:
        return 4 * RATE if elapsed >= 21 * DAY and 20 <= elapsed % DAY / HOUR < 22 else working_week(elapsed)

    seen = watch(with_evenings, days=23.9)
    start = 23 * DAY + 20 * HOUR
    assert [at for at in seen.early if start - LEAD - PERIOD <= at < start], "after two evenings, not after weeks"


def test_what_is_foreseen_is_bounded_by_twice_the_present_level() -> None:
    seen = watch(lambda elapsed: 10 * RATE if 9 <= elapsed % DAY / HOUR < 12 else RATE, days=5)
    foreseen = foresee(seen.state, now=MIDNIGHT + 5 * DAY + 9 * HOUR - 60, lead_seconds=LEAD)
    assert foreseen.by == "season"
    assert seen.state.level is not None
    assert foreseen.work == pytest.approx(math.exp(seen.state.level + LARGEST))


def test_a_day_that_is_shifted_ends_the_belief_with_its_first_wrong_rise() -> None:
    seen = watch(lambda elapsed: office(elapsed + (6 * HOUR if elapsed >= 5 * DAY else 0)), days=8)
    wrong = [at for at in seen.early if at >= 5 * DAY]
    assert wrong and max(wrong) - min(wrong) < 20 * 60
    assert all(record.belief < BELIEVED for record in seen.state.records)


@pytest.mark.parametrize("seed", range(2))
def test_bursts_without_a_rule_are_never_foreseen(seed: int) -> None:
    dice = random.Random(seed)
    bursts = [dice.random() < 0.15 for _ in range(8 * 96)]
    seen = watch(lambda elapsed: RATE * (5 if bursts[int(elapsed // 900)] else 1), days=4, seed=seed)
    assert seen.early == []


def test_a_smooth_tide_needs_no_forecast_and_gets_none() -> None:
    seen = watch(lambda elapsed: RATE * (1.5 + math.sin(2 * math.pi * elapsed / DAY)), days=4)
    assert seen.early == []


def test_a_steep_growth_is_continued_by_its_trend() -> None:
    seen = watch(lambda elapsed: RATE * 2 ** (elapsed % (2 * HOUR) / 1500), days=1, above=1.05)
    assert len(seen.early) > 200
    assert seen.state.records[1].belief >= BELIEVED


def test_a_lasting_change_of_the_level_is_forgotten_as_a_step_of_the_day() -> None:
    seen = watch(lambda elapsed: RATE if elapsed < DAY / 2 else 3 * RATE, days=8)
    assert seen.early == [] and seen.state.steps == ()
    assert len(seen.writes) < 40


def test_nothing_is_learned_from_a_time_that_was_not_measured() -> None:
    known = watch(office, days=5).state
    blind = interrupt(known)
    assert foresee(blind, now=MIDNIGHT + 5 * DAY + 9 * HOUR - 60, lead_seconds=LEAD).work == 0
    back = observe(blind, now=MIDNIGHT + 5.5 * DAY, work=4 * RATE, requests=4000, lead_seconds=LEAD)
    later = observe(back, now=MIDNIGHT + 5.5 * DAY + 15, work=4 * RATE, requests=4000, lead_seconds=LEAD)
    assert (later.steps, later.records[0].belief) == (known.steps, known.records[0].belief)
    assert interrupt(blind) == blind


def test_no_load_and_few_requests_say_nothing() -> None:
    state = observe(Forecast(), now=MIDNIGHT, work=1.0, requests=600, lead_seconds=LEAD)
    assert observe(state, now=MIDNIGHT + 15, work=0.0, requests=0, lead_seconds=LEAD) == state
    few = observe(Forecast(), now=MIDNIGHT, work=0.1, requests=3, lead_seconds=LEAD)
    assert observe(few, now=MIDNIGHT + 15, work=0.4, requests=12, lead_seconds=LEAD) == few


times = st.floats(0, 20 * DAY)
looks = st.lists(st.tuples(times, st.floats(0.01, 1000), st.booleans()), max_size=60)


@settings(max_examples=60, deadline=None)
@given(looks, st.floats(10, 900))
def test_the_state_stays_small_and_whole_whatever_comes(looks: list[tuple[float, float, bool]], lead: float) -> None:
    state = Forecast()
    for elapsed, rate, gap in sorted(looks):
        state = interrupt(state) if gap else state
        state = observe(state, now=MIDNIGHT + elapsed, work=rate, requests=60 * rate, lead_seconds=lead)
        foreseen = foresee(state, now=MIDNIGHT + elapsed, lead_seconds=lead)
        assert state.level is not None
        assert 0 <= foreseen.work <= math.exp(state.level + LARGEST) * 1.001
        assert all(-1 <= record.belief <= 1 for record in state.records)
    text = json.dumps(dump_forecast(state))
    assert load_forecast(json.loads(text)) == state and len(text) < 4000
    assert len(state.steps) <= MAX_STEPS and len(state.week_steps) <= MAX_STEPS


@pytest.mark.parametrize("unit", [math.exp(-7), math.exp(4)])
def test_the_unit_of_work_does_not_matter(unit: float) -> None:
    one, other = watch(office, days=3), watch(office, days=3, unit=unit)
    assert one.early == other.early and one.early
    assert dict(one.state.steps) == pytest.approx(dict(other.state.steps), abs=0.02)


@pytest.mark.parametrize("data", [3, [1], {"today": 4}, {"moves": [[1]]}, {"level": "x"}, {"steps": [["a", "b"]]}])
def test_what_cannot_be_read_is_refused(data: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        load_forecast(data)
