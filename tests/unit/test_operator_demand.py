"""From samples to Demand: rates, resets, percentiles, freshness; unknown is never zero."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import TTFT_BUCKETS_SECONDS
from tidegate_engine.steptime import StepModel
from tidegate_operator.demand import (
    MIN_SCRAPES,
    RATE_TERMS,
    WINDOW_SECONDS,
    Measured,
    PodSample,
    PodWindow,
    combine,
    parse_exposition,
    quantile,
    share_within,
    step_model_of,
    window_of,
)
from tidegate_operator.observation import Demand, MetricsState

PAGE = """# HELP tidegate_engine_requests_arrived_total requests
# TYPE tidegate_engine_requests_arrived_total counter
tidegate_engine_requests_arrived_total{isl="0"} 3
tidegate_engine_requests_arrived_total{isl="1024"} 4.0 1700000000
tidegate_engine_requests_finished_total{isl="0",osl="16",reason="stop"} 2
tidegate_engine_requests_finished_total{isl="0",osl="16",reason="length"} 5
tidegate_engine_requests_running 7
tidegate_engine_requests_waiting NaN
tidegate_engine_ttft_seconds_bucket{isl="0",le="0.5"} 1
tidegate_engine_ttft_seconds_bucket{isl="64",le="0.50"} 2
tidegate_engine_ttft_seconds_bucket{isl="0",le="+Inf"} 4
tidegate_engine_ttft_seconds_sum{isl="0"} 4
tidegate_engine_kv_blocks{state="used"} 1
tidegate_engine_kv_blocks{state="cached"} 1
tidegate_engine_kv_blocks{state="free"} 2
tidegate_engine_step_model{term="base_seconds"} 0.005
vllm:num_requests_running{model_name="m"} 7
broken line
tidegate_engine_requests_running_other 1
"""


def test_a_page_is_read_and_labels_that_nobody_asks_for_are_summed_away() -> None:
    values = parse_exposition(PAGE, 1.0).values
    assert values["arrivals", "0"] == 3
    assert values["arrivals", "1024"] == 4
    assert values["finished", "0", "16"] == 7
    assert values["running",] == 7
    assert values["ttft", "0.5"] == 3
    assert values["ttft", "inf"] == 4
    assert not any(key[0] == "waiting" for key in values), "NaN is unknown"
    assert len(values) == 10


def sample(at: float, arrived: float, running: float = 1.0) -> PodSample:
    return PodSample(at, {("arrivals", "0"): arrived, ("running",): running})


def test_a_rate_is_the_increase_over_the_window() -> None:
    window = window_of("p", [sample(0, 10), sample(5, 15), sample(10, 20), sample(15, 40)])
    assert window is not None
    assert window.values["arrivals", "0"] == pytest.approx(30 / 15)
    assert (window.sampled_at, window.scrapes, window.seconds) == (15, 4, 15)


def test_below_four_scrapes_there_are_levels_but_no_rates() -> None:
    window = window_of("p", [sample(0, 10), sample(5, 15), sample(10, 20)])
    assert window is not None
    assert ("arrivals", "0") not in window.values
    assert window.values["running",] == 1


def test_a_counter_that_was_reset_gains_what_it_shows_since() -> None:
    window = window_of("p", [sample(0, 100), sample(5, 110), sample(10, 4), sample(15, 6)])
    assert window is not None
    assert window.values["arrivals", "0"] == pytest.approx((10 + 4 + 2) / 15)


def test_samples_older_than_the_window_do_not_count() -> None:
    old = [sample(at, 0) for at in (0.0, 10.0)]
    window = window_of("p", [*old, *(sample(100 + 10 * n, 10 * n) for n in range(7))])
    assert window is not None
    assert window.scrapes == 7
    assert window.values["arrivals", "0"] == pytest.approx(1.0)


def test_a_series_that_appears_later_counts_from_zero() -> None:
    samples = [PodSample(float(at), {("running",): 1.0}) for at in (0, 5, 10)] + [sample(15, 30)]
    window = window_of("p", samples)
    assert window is not None
    assert window.values["arrivals", "0"] == pytest.approx(2.0)


def plain_window(samples: Sequence[PodSample]) -> dict[tuple[str, ...], float]:
    """The definition, key by key and pair by pair."""
    newest = samples[-1]
    recent = [each for each in samples if each.at >= newest.at - WINDOW_SECONDS - 0.5]
    seconds = newest.at - recent[0].at
    values = {}
    for key, value in newest.values.items():
        if key[0] not in RATE_TERMS:
            values[key] = value
        elif len(recent) >= MIN_SCRAPES and seconds > 0:
            shown = [each.values.get(key, 0.0) for each in recent]
            gained = sum(after - before if after >= before else after for before, after in pairwise(shown))
            values[key] = gained / seconds
    return values


KEYS: tuple[tuple[str, ...], ...] = (
    ("arrivals", "0"),
    ("arrivals", "64"),
    ("ttft", "0.5"),
    ("prompt_tokens",),
    ("running",),
    ("waiting",),
)
SCRAPE = st.tuples(
    st.sampled_from([0.0, 3.75, 4.0, 15.0, 61.0]),
    st.permutations(KEYS),
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["on", "on", "on", "reset", "missing"])), min_size=6, max_size=6
    ),
)


@given(st.lists(SCRAPE, min_size=1, max_size=24), st.booleans())
def test_sliding_windows_are_what_the_definition_says(
    scrapes: list[tuple[float, list[tuple[str, ...]], list[tuple[int, str]]]], is_shuffled: bool
) -> None:
    """Under resets, missing series and any order of keys, also where windows share samples."""
    at, counters, samples = 100.0, dict.fromkeys(KEYS, 0.0), []
    for seconds, order, changes in scrapes:
        at += seconds
        for key, (step, kind) in zip(KEYS, changes, strict=True):
            counters[key] = float(step) if kind == "reset" else counters[key] + step
        told = {key for key, (_, kind) in zip(KEYS, changes, strict=True) if kind != "missing"}
        samples.append(PodSample(at, {key: counters[key] for key in (order if is_shuffled else KEYS) if key in told}))
    for end in range(1, len(samples) + 1):
        for chosen in (samples[:end], samples[:end:2]):
            found = window_of("p", chosen)
            assert found is not None
            assert found.values == plain_window(chosen)


def test_a_sample_that_was_compared_is_still_the_sample_it_was() -> None:
    compared, other = sample(0, 100), sample(0, 100)
    window_of("p", [compared, sample(5, 1), sample(10, 2), sample(15, 3)])
    assert compared == other
    assert repr(compared) == repr(other)


def test_no_sample_is_no_window() -> None:
    assert window_of("p", []) is None


def test_the_quantile_is_linear_inside_its_bucket() -> None:
    assert quantile({1.0: 0.0, 2.0: 10.0, math.inf: 10.0}, 0.5) == pytest.approx(1.5)
    assert quantile({1.0: 10.0, math.inf: 10.0}, 0.95) == pytest.approx(0.95)


def test_a_quantile_above_the_last_bound_is_that_bound() -> None:
    assert quantile({1.0: 1.0, 2.0: 2.0, math.inf: 100.0}, 0.95) == 2.0


@pytest.mark.parametrize("buckets", [{}, {1.0: 0.0, math.inf: 0.0}, {1.0: 5.0}])
def test_a_quantile_of_nothing_is_unknown(buckets: dict[float, float]) -> None:
    assert quantile(buckets, 0.95) is None


@settings(max_examples=60)
@given(st.lists(st.floats(0.0015, 150), min_size=1, max_size=60))
def test_the_quantile_lies_in_the_bucket_of_the_true_one(values: list[float]) -> None:
    bounds = (*TTFT_BUCKETS_SECONDS, math.inf)
    found = quantile({bound: float(sum(value <= bound for value in values)) for bound in bounds}, 0.95)
    rank = math.ceil(0.95 * len(values) - 1e-9)
    true = sorted(values)[rank - 1]
    upper = min(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in bounds if bound < true), default=0.0)
    assert found is not None
    assert lower - 1e-9 <= found <= upper + 1e-9


@given(st.lists(st.floats(0.0015, 150), min_size=1, max_size=60), st.floats(0.05, 0.99))
def test_the_share_within_a_quantile_is_its_own(values: list[float], q: float) -> None:
    bounds = (*TTFT_BUCKETS_SECONDS, math.inf)
    buckets = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    found = quantile(buckets, q)
    assert found is not None
    share = share_within(buckets, found)
    assert share is not None
    # A bound may have a longer run of empty buckets before it, and what is above the last bound is known as that only.
    assert share == pytest.approx(q) or (found == max(TTFT_BUCKETS_SECONDS) and share <= q)


def test_a_share_of_nothing_is_unknown() -> None:
    assert share_within({}, 1.0) is None
    assert share_within({1.0: 0.0, math.inf: 0.0}, 1.0) is None
    assert share_within({1.0: 5.0, math.inf: 10.0}, 99.0) == 0.5, "what is above the last bound may be above the goal"


def window(pod: str, *, at: float = 100.0, scrapes: int = MIN_SCRAPES, **levels: float) -> PodWindow:
    values: dict[tuple[str, ...], float] = {(name,): value for name, value in ({"running": 1.0} | levels).items()}
    values |= {("arrivals", "0"): 2.0, ("finished", "0", "16"): 1.0}
    values |= {("ttft", "1.0"): 10.0, ("ttft", "inf"): 10.0, ("kv_blocks", "used"): 1.0, ("kv_blocks", "free"): 3.0}
    return PodWindow(pod, at, 60.0, scrapes, values)


def combined(*windows: PodWindow, ready: tuple[str, ...] = ("a", "b")) -> tuple[Demand | None, MetricsState, str]:
    return combine(Measured(windows), ready=dict.fromkeys(ready), now=110.0, stale_after_seconds=60.0)


def test_pods_are_summed_and_the_oldest_of_the_newest_samples_dates_the_sum() -> None:
    demand, state, _ = combined(window("a", at=100), window("b", at=90, waiting=5.0))
    assert state is MetricsState.FRESH
    assert demand is not None
    assert demand.arrivals_per_second == {0: 4.0}
    assert demand.finished_per_second == {(0, 16): 2.0}
    assert (demand.running, demand.waiting, demand.pods_covered, demand.sampled_at) == (2.0, 5.0, 2, 90)
    assert demand.ttft_p95_seconds == pytest.approx(0.95)
    assert demand.buckets == {"ttft": {1.0: 20.0, math.inf: 20.0}}
    assert demand.kv_used_ratio == pytest.approx(0.25)
    assert demand.itl_p95_seconds is None
    assert demand.prompt_tokens_per_second is None


@pytest.mark.parametrize(
    ("ready_at", "counted"),
    [
        (80.0, 20 / 60),  # measured for 15 s of its 20 s
        (95.0, 15 / 60),  # Ready again after it had been unready: it was measured for longer
        (-900.0, 1.0),  # old, and not measured before
        (None, 1.0),
    ],
)
def test_what_came_to_a_young_pod_is_spread_over_the_window_of_the_others(
    ready_at: float | None, counted: float
) -> None:
    """The rates of the first pod are already those of the time before the second was there."""
    young = replace(window("b"), seconds=15.0)
    demand, _, _ = combine(
        Measured((window("a"), young)), ready={"a": 0.0, "b": ready_at}, now=110.0, stale_after_seconds=60.0
    )
    assert demand is not None
    assert demand.window_seconds == 60.0
    assert demand.arrivals_per_second[0] == pytest.approx(2.0 + 2.0 * counted)
    assert demand.buckets["ttft"][math.inf] == pytest.approx(10.0 + 10.0 * counted)
    assert demand.running == 2.0, "levels are as they are"


def test_what_came_lately_is_counted_apart() -> None:
    counts = {0.0: 0.0, 15.0: 40.0, 30.0: 70.0, 45.0: 90.0, 50.0: 5.0, 60.0: 35.0}
    ring = [PodSample(at, {("arrivals", "0"): count, ("running",): 1.0}) for at, count in counts.items()]
    seen = window_of("a", ring)
    assert seen is not None and seen.arrived_lately == 35, "the last 15 s, in which it began anew"
    demand, _, _ = combined(seen, seen)
    assert demand is not None and demand.arrived_lately == 70
    unknown, _, _ = combined(seen, window("b"))
    assert unknown is not None and unknown.arrived_lately is None


def test_series_of_pods_that_are_gone_do_not_count() -> None:
    demand, _, _ = combined(window("a"), window("gone", waiting=500.0))
    assert demand is not None
    assert (demand.pods_covered, demand.waiting) == (1, 0.0)


def test_a_stale_pod_is_left_out_and_all_stale_is_stale() -> None:
    demand, state, _ = combined(window("a"), window("b", at=40))
    assert demand is not None
    assert (demand.pods_covered, state) == (1, MetricsState.FRESH)
    nothing, state, message = combined(window("a", at=40), window("b", at=30))
    assert (nothing, state) == (None, MetricsState.STALE)
    assert "70 s old" in message


@pytest.mark.parametrize(
    ("measured", "ready", "words"),
    [
        (Measured(error="PrometheusError: down"), ("a",), "PrometheusError: down"),
        (Measured(), (), "no replica is ready"),
        (Measured(), ("a",), "none of the 1 ready replicas"),
        (Measured((window("a", scrapes=2),)), ("a",), "2 of the 4 scrapes"),
        (Measured((PodWindow("a", 100.0, 60.0, 9, {("arrivals", "0"): 1.0}),)), ("a",), "scrapes"),
    ],
)
def test_what_is_missing_is_said_and_there_is_no_demand(measured: Measured, ready: tuple[str, ...], words: str) -> None:
    demand, state, message = combine(measured, ready=dict.fromkeys(ready), now=110.0, stale_after_seconds=60.0)
    assert demand is None
    assert state is MetricsState.ABSENT
    assert words in message


def test_the_step_model_is_read_only_when_it_is_whole() -> None:
    values: dict[tuple[str, ...], float] = {("step_model", term.name): 1.0 for term in fields(StepModel)}
    values |= {("step_model_residual_ratio", ""): 0.1, ("step_model_samples", ""): 9.0}
    whole = PodWindow("a", 0, 60, 4, values)
    model, residual, samples = step_model_of(whole)
    assert model is not None
    assert (model.base_seconds, residual, samples) == (1.0, 0.1, 9.0)
    assert step_model_of(PodWindow("a", 0, 60, 4, {("step_model", "base_seconds"): 1.0}))[0] is None
    assert step_model_of(None) == (None, None, None)
