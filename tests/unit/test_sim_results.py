"""Figures from what was recorded: a request that was not served in time is missed, whatever became of it."""

import math

from tidegate_engine.settings import DEFAULT_SETTINGS
from tidegate_engine.steptime import load_profile
from tidegate_sim.arrivals import Arrival
from tidegate_sim.records import Outcome, Records, Use
from tidegate_sim.results import Change, Result, quantile, services, spread, ttft_limit
from tidegate_sim.specification import FleetSpec, Goals

FLEET = FleetSpec(load_profile("h100-llama-3.1-8b"))
PLAIN = Goals(ttft_seconds=1.0, itl_seconds=0.05, unloaded_factor=0.0)
MISSING = math.nan


def recorded(rows: list[tuple[float, float, float, Outcome]], *, isl: int = 100, osl: int = 10) -> Records:
    """(at, ttft, itl, outcome) of each request."""
    records = Records()
    for at, ttft, itl, outcome in rows:
        index = records.arrived(Arrival(at, isl, osl))
        records.ttft[index], records.itl[index], records.outcome[index] = ttft, itl, outcome
    return records


def result_of(records: Records, *, changes: list[Change] | None = None, seconds: float = 3600.0) -> Result:
    overall, patterns = services(records, PLAIN, FLEET)
    return Result(
        controller="test",
        seed=0,
        duration_seconds=seconds,
        ended_at_seconds=seconds,
        fleet=FLEET,
        goals=PLAIN,
        records=records,
        timeline=[],
        changes=changes or [],
        orders=0,
        reasons={},
        uses={"h100": Use(7200.0, 1, 2.0)},
        preemptions=0,
        overall=overall,
        patterns=patterns,
    )


def scaled(at: float, before: int, after: int) -> Change:
    return Change(at, before, after, DEFAULT_SETTINGS, DEFAULT_SETTINGS, "Test", "")


def test_only_requests_that_finished_in_time_are_met() -> None:
    rows = [
        (0.0, 0.9, 0.04, Outcome.FINISHED),
        (1.0, 0.9, MISSING, Outcome.FINISHED),  # a single token follows no other
        (2.0, 1.1, 0.04, Outcome.FINISHED),
        (3.0, 0.9, 0.06, Outcome.FINISHED),
        (4.0, 0.1, 0.01, Outcome.FAILED),
        (5.0, MISSING, MISSING, Outcome.REFUSED),
        (6.0, MISSING, MISSING, Outcome.TIMED_OUT),
        (7.0, MISSING, MISSING, Outcome.IN_FLIGHT),
    ]
    result = result_of(recorded(rows))
    assert result.attainment == 2 / 8
    assert result.goodput == 2 / 3600
    assert result.overall.outcomes == {"finished": 4, "failed": 1, "refused": 1, "timed_out": 1, "in_flight": 1}
    assert sum(service.met for service in result.patterns.values()) == 2


def test_cost_and_scalings_are_counted() -> None:
    moves = [scaled(0, 1, 3), scaled(300, 3, 2), scaled(500, 2, 1), scaled(2000, 1, 2)]
    result = result_of(recorded([]), changes=moves, seconds=7200.0)
    assert (result.gpu_hours, result.cost, result.attainment) == (2.0, 4.0, None)
    assert (result.scalings_per_hour, result.reversals, result.largest_step) == (2.0, 1, 2)


def test_a_burst_is_told_apart_and_so_is_when_it_was_over() -> None:
    rows = [(float(at), 0.1 if at < 600 or at >= 900 else 5.0, 0.01, Outcome.FINISHED) for at in range(0, 1800, 10)]
    result = result_of(recorded(rows))
    assert result.between(600, 900).attainment == 0.0 and result.between(0, 600).attainment == 1.0
    assert result.between(600, 900).ttft.p99 == 5.0
    assert result.recovered_at(600) == 900
    assert result.recovered_at(0) == 0
    assert result_of(recorded([(0.0, 9.0, 0.01, Outcome.FINISHED)])).recovered_at(0) is None


def test_a_long_prompt_may_take_three_times_what_an_idle_replica_takes() -> None:
    goals = Goals(ttft_seconds=0.5)
    assert ttft_limit(100, goals, FLEET) == 0.5
    long = ttft_limit(30_000, goals, FLEET)
    assert long > 1.5
    assert ttft_limit(60_000, goals, FLEET) > 2 * long


def test_percentiles_are_values_that_were_seen() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], q) for q in (0.5, 0.95, 1.0)] == [2.0, 4.0, 4.0]
    found = spread([3.0, MISSING, 1.0])
    assert (found.p50, found.p99, found.mean) == (1.0, 3.0, 2.0)
    assert spread([]).p50 is None
