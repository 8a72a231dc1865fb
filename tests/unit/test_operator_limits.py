"""Bounds at a time of the day: schedules in their own time zones, over changes of the clock, and GPU budgets."""

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_operator.api import WEEKDAYS, InvalidSpec, Spec, parse_spec
from tidegate_operator.limits import active_schedules, limits_at
from tidegate_operator.observation import Limits

BERLIN = "Europe/Berlin"


def spec_of(*schedules: dict[str, Any], gpus: int = 1, **autoscaling: Any) -> Spec:
    return parse_spec(
        {
            "model": {"uri": "file:///m"},
            "autoscaling": {"minReplicas": 2, "maxReplicas": 8, "schedules": list(schedules), **autoscaling},
            "resources": {"gpu": {"count": gpus}},
        }
    )


def schedule(start: str, end: str, **fields: Any) -> dict[str, Any]:
    return {"name": "busy", "startTime": start, "endTime": end, "minReplicas": 5, **fields}


def at(text: str, zone: str = "UTC", fold: int = 0) -> float:
    """Unix seconds of a wall clock: `2026-03-29 02:30`."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone), fold=fold).timestamp()


def holds(given_schedule: dict[str, Any], when: float) -> bool:
    return bool(active_schedules(spec_of(given_schedule).autoscaling, when))


def test_without_schedules_the_objects_bounds_hold() -> None:
    assert limits_at(spec_of(), at("2026-06-01 12:00")) == Limits(2, 8)


def test_a_schedule_replaces_the_bounds_that_it_gives_and_no_others() -> None:
    spec = spec_of(schedule("08:00", "18:00"))
    assert limits_at(spec, at("2026-06-01 07:59")) == Limits(2, 8)
    assert limits_at(spec, at("2026-06-01 08:00")) == Limits(5, 8, "Schedule", "MaxReplicas", ("busy",))
    assert limits_at(spec, at("2026-06-01 17:59")).low == 5
    assert limits_at(spec, at("2026-06-01 18:00")).low == 2
    quiet = spec_of(schedule("22:00", "06:00", minReplicas=1, maxReplicas=3))
    assert limits_at(quiet, at("2026-06-01 23:00")) == Limits(1, 3, "Schedule", "Schedule", ("busy",))


def test_a_minimum_holds_a_replicas_start_earlier_and_a_maximum_does_not() -> None:
    spec = spec_of(schedule("08:00", "18:00", maxReplicas=6))
    early = limits_at(spec, at("2026-06-01 07:58"), start_seconds=180)
    assert (early.low, early.high) == (5, 8)
    assert limits_at(spec, at("2026-06-01 07:56"), start_seconds=180).low == 2


def test_a_schedule_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    night = schedule("22:00", "06:00", daysOfWeek=["Friday"])
    assert holds(night, at("2026-06-05 23:00")), "Friday evening"
    assert holds(night, at("2026-06-06 05:59")), "the morning after it"
    assert not holds(night, at("2026-06-05 05:00")), "Friday morning belongs to Thursday"
    assert not holds(night, at("2026-06-06 23:00"))


def test_equal_times_are_a_whole_day() -> None:
    friday = schedule("09:00", "09:00", daysOfWeek=["Friday"])
    assert holds(friday, at("2026-06-05 09:00")) and holds(friday, at("2026-06-06 08:59"))
    assert not holds(friday, at("2026-06-05 08:59")) and not holds(friday, at("2026-06-06 09:00"))


def test_the_clock_is_the_zones_own_all_year() -> None:
    morning = schedule("08:00", "18:00", timeZone=BERLIN)
    assert holds(morning, at("2026-01-15 07:30")) and not holds(morning, at("2026-01-15 06:30"))
    assert holds(morning, at("2026-07-15 06:30")) and not holds(morning, at("2026-07-15 05:30"))


def test_the_night_of_a_skipped_hour_shortens_a_schedule_by_it() -> None:
    night = schedule("01:00", "04:00", timeZone=BERLIN)
    start, end = at("2026-03-29 01:00", BERLIN), at("2026-03-29 04:00", BERLIN)
    assert end - start == 2 * 3600
    assert holds(night, start) and holds(night, end - 1) and not holds(night, end) and not holds(night, start - 1)


def test_a_start_that_the_clock_skips_is_an_hour_later() -> None:
    skipped = schedule("02:30", "05:00", timeZone=BERLIN)
    assert not holds(skipped, at("2026-03-29 03:29", BERLIN)) and holds(skipped, at("2026-03-29 03:30", BERLIN))


def test_an_end_that_the_clock_shows_twice_is_the_second_one_without_a_gap() -> None:
    night = schedule("01:00", "02:30", timeZone=BERLIN)
    first, second = at("2026-10-25 02:29", BERLIN), at("2026-10-25 02:29", BERLIN, fold=1)
    assert second - first == 3600
    assert all(holds(night, first + minute * 60) for minute in range(61))
    assert not holds(night, second + 60)


def test_a_start_that_the_clock_shows_twice_is_the_first_one() -> None:
    night = schedule("02:30", "05:00", timeZone=BERLIN)
    assert holds(night, at("2026-10-25 02:30", BERLIN)) and holds(night, at("2026-10-25 02:00", BERLIN, fold=1))


def test_of_several_schedules_the_highest_of_each_bound_counts() -> None:
    spec = spec_of(
        schedule("08:00", "18:00", name="day", minReplicas=4, maxReplicas=6),
        schedule("12:00", "14:00", name="noon", minReplicas=7),
    )
    noon = limits_at(spec, at("2026-06-01 13:00"))
    assert (noon.low, noon.high, noon.schedules) == (7, 7, ("day", "noon"))


@pytest.mark.parametrize(("gpus", "expected"), [(1, (2, 5)), (2, (2, 2)), (4, (1, 1)), (0, (2, 8))])
def test_the_gpu_budget_bounds_both_ends(gpus: int, expected: tuple[int, int]) -> None:
    found = limits_at(spec_of(gpus=gpus, maxGPUs=5), at("2026-06-01 13:00"))
    assert (found.low, found.high) == expected
    assert found.high_rule == ("MaxReplicas" if gpus == 0 else "GPUBudget")


def test_the_smaller_of_budget_and_granted_share_counts() -> None:
    spec = spec_of(schedule("00:00", "00:00"), maxGPUs=6)
    assert limits_at(spec, at("2026-06-01 13:00"), granted_gpus=4) == Limits(4, 4, "GPUShare", "GPUShare", ("busy",))
    assert limits_at(spec, at("2026-06-01 13:00"), granted_gpus=7).high_rule == "GPUBudget"


def test_an_unknown_time_zone_is_told_with_its_field() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.autoscaling\.schedules\.0\.timeZone: .*Mars/Olympus"):
        spec_of(schedule("08:00", "18:00", timeZone="Mars/Olympus"))


clocks = st.builds("{:02d}:{:02d}".format, st.integers(0, 23), st.integers(0, 59))
ZONES = ("UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Asia/Kolkata")


@settings(max_examples=100, deadline=None)
@given(
    clocks,
    clocks,
    st.sampled_from(ZONES),
    st.sets(st.sampled_from(WEEKDAYS)),
    st.integers(0, 365 * 24 * 60),
    st.integers(0, 7),
)
def test_away_from_changes_of_the_clock_it_holds_when_the_wall_clock_says_so(
    start: str, end: str, zone: str, days: set[str], minute: int, weeks: int
) -> None:
    when = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute, weeks=weeks)
    local = when.astimezone(ZoneInfo(zone))
    offsets = {(local + timedelta(days=step)).utcoffset() for step in (-2, -1, 0, 1, 2)}
    if len(offsets) > 1:
        return  # the nights of a change are tested one by one
    given_schedule = schedule(start, end, timeZone=zone, **({"daysOfWeek": sorted(days)} if days else {}))
    clock = f"{local:%H:%M}"
    yesterday = local - timedelta(days=1)
    on_day = [not days or WEEKDAYS[day.weekday()] in days for day in (local, yesterday)]
    expected = (
        on_day[0] and start <= clock < end
        if start < end
        else (on_day[0] and clock >= start) or (on_day[1] and clock < end)
    )
    assert holds(given_schedule, when.timestamp()) == expected
