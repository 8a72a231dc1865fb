"""Fewest and most replicas that are allowed at a time: the object's bounds, its schedules, its GPU budget.

Pure: the time is an argument, the clock's zone a value. Called by `policy`, which applies what comes out as its last
rule.
"""

from collections.abc import Iterable
from datetime import UTC, datetime, time, timedelta, tzinfo
from zoneinfo import ZoneInfo

from tidegate_operator.api import WEEKDAYS, Autoscaling, Schedule, Spec
from tidegate_operator.observation import Limits


def limits_at(spec: Spec, now: float, *, start_seconds: float = 0.0, granted_gpus: int | None = None) -> Limits:
    """The bounds at `now`, Unix seconds.

    A schedule's minimum counts from `start_seconds` before its time, so that the replicas serve when it begins. GPU
    budgets bound minima too: the object's own, and what it was granted of GPUs that others want too (`granted_gpus`).
    """
    scaling = spec.autoscaling
    low, high = spec.replica_bounds()
    low_rule, high_rule = "MinReplicas", "MaxReplicas"
    holding = active_schedules(scaling, now)
    coming = active_schedules(scaling, now + start_seconds)
    minima = [item.min_replicas for item in (*holding, *coming) if item.min_replicas is not None]
    maxima = [item.max_replicas for item in holding if item.max_replicas is not None]
    if minima:
        low, low_rule = max(minima), "Schedule"
    if maxima:
        high, high_rule = max(maxima), "Schedule"
    high = max(low, high)
    budgets = [(scaling.max_gpus, "GPUBudget"), (granted_gpus, "GPUShare")]
    for gpus, rule in budgets:
        if gpus is None or spec.resources.gpu.count == 0:
            continue
        affordable = max(1, gpus // spec.resources.gpu.count)
        if affordable < high:
            high, high_rule = affordable, rule
        if affordable < low:
            low, low_rule = affordable, rule
    names = dict.fromkeys(item.name for item in (*holding, *coming))
    return Limits(low, high, low_rule, high_rule, tuple(names))


def active_schedules(scaling: Autoscaling, at: float) -> tuple[Schedule, ...]:
    """The schedules that hold at `at`, Unix seconds."""
    return tuple(item for item in scaling.schedules if any(start <= at < end for start, end in _times(item, at)))


def _times(schedule: Schedule, at: float) -> Iterable[tuple[float, float]]:
    """Beginnings and ends, Unix seconds, on the local day of `at` and on the one before.

    Where the clock shows a time twice (the night it is put back), the first is a beginning and the second an end. A
    time that it skips (the night it is put forward) is the time as much later as the clock skips.
    """
    zone = zone_of(schedule.time_zone)
    start, end = time.fromisoformat(schedule.start_time), time.fromisoformat(schedule.end_time)
    today = datetime.fromtimestamp(at, zone).date()
    for day in (today - timedelta(days=1), today):
        if not schedule.days_of_week or WEEKDAYS[day.weekday()] in schedule.days_of_week:
            last_day = day if end > start else day + timedelta(days=1)
            begins, ends = datetime.combine(day, start, zone), datetime.combine(last_day, end, zone)
            yield begins.timestamp(), max(ends.timestamp(), ends.replace(fold=1).timestamp())


def zone_of(name: str | None) -> tzinfo:
    """The zone of a schedule; UTC needs no table of zones."""
    return UTC if name is None or name == "UTC" else ZoneInfo(name)
