"""The mix from one window of traffic."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import DEFAULT_PATTERNS, ISL_EDGES, OSL_EDGES
from tidegate_operator.mix import estimate_mix, joint_rates, pattern_shares
from tidegate_operator.observation import Demand

NOTHING = Demand(
    window_seconds=60,
    sampled_at=0,
    arrivals_per_second={},
    finished_per_second={},
    running=0,
    waiting=0,
    waiting_prompt_tokens=0,
    running_context_tokens=0,
    running_past_output_edge={},
    ttft_p95_seconds=None,
    itl_p95_seconds=None,
    queue_p95_seconds=None,
    prompt_tokens_per_second=None,
    cached_prompt_tokens_per_second=None,
    generation_tokens_per_second=None,
    kv_used_ratio=None,
    preemptions_per_second=None,
    pods_covered=1,
)


def test_no_traffic_is_an_empty_mix() -> None:
    assert estimate_mix(NOTHING).cells == ()


def test_the_joint_distribution_is_kept_where_the_means_are_equal() -> None:
    apart = replace(
        NOTHING,
        arrivals_per_second={64: 1.0, 4096: 1.0},
        finished_per_second={(64, 1024): 1.0, (4096, 16): 1.0},
    )
    together = replace(
        NOTHING,
        arrivals_per_second={64: 1.0, 4096: 1.0},
        finished_per_second={(64, 16): 1.0, (4096, 1024): 1.0},
    )
    names = [share.name for share in pattern_shares(estimate_mix(apart), DEFAULT_PATTERNS)]
    assert sorted(names) == ["LongInShortOut", "ShortInLongOut"]
    names = [share.name for share in pattern_shares(estimate_mix(together), DEFAULT_PATTERNS)]
    assert sorted(names) == ["LongInLongOut", "ShortInShortOut"]


def test_long_answers_count_before_the_first_of_them_ends() -> None:
    short_ones_only = replace(NOTHING, arrivals_per_second={64: 2.0}, finished_per_second={(64, 16): 1.0})
    with_long_ones = replace(short_ones_only, running=60, running_past_output_edge={0: 60, 16: 60, 64: 60, 256: 55})
    short = sum(cell.share * cell.osl for cell in estimate_mix(short_ones_only).cells)
    long = sum(cell.share * cell.osl for cell in estimate_mix(with_long_ones).cells)
    assert long > 2 * short


def test_in_a_steady_state_running_requests_do_not_bend_the_mix() -> None:
    steady = replace(
        NOTHING,
        arrivals_per_second={64: 2.0},
        finished_per_second={(64, 16): 1.9},
        running=60,
        running_past_output_edge={0: 60, 16: 60, 64: 60, 256: 55},
    )
    assert joint_rates(steady) == pytest.approx({(64, 16): 2.0})


def test_lengths_inside_the_cells_follow_the_token_rates() -> None:
    demand = replace(
        NOTHING,
        arrivals_per_second={256: 2.0},
        finished_per_second={(256, 64): 2.0},
        prompt_tokens_per_second=2 * 300.0,
        generation_tokens_per_second=2 * 200.0,
    )
    (cell,) = estimate_mix(demand).cells
    assert cell.isl == pytest.approx(300, rel=0.02)
    assert cell.osl == pytest.approx(200, rel=0.02)


def test_lengths_stay_in_their_cells_whatever_the_token_rates_say() -> None:
    demand = replace(
        NOTHING,
        arrivals_per_second={256: 2.0},
        finished_per_second={(256, 64): 2.0},
        prompt_tokens_per_second=1e9,
        generation_tokens_per_second=1e-3,
    )
    (cell,) = estimate_mix(demand).cells
    assert 256 <= cell.isl <= 1023
    assert 64 <= cell.osl <= 255


def test_the_context_bounds_the_lengths() -> None:
    demand = replace(NOTHING, arrivals_per_second={4096: 1.0}, finished_per_second={(4096, 16384): 1.0})
    (cell,) = estimate_mix(demand, max_model_len=8192).cells
    assert cell.isl + cell.osl <= 8192 + cell.isl - 4096


def test_the_prefix_cache_is_believed_only_up_to_a_limit() -> None:
    demand = replace(
        NOTHING,
        arrivals_per_second={64: 1.0},
        finished_per_second={(64, 16): 1.0},
        prompt_tokens_per_second=100.0,
        cached_prompt_tokens_per_second=100.0,
    )
    assert estimate_mix(demand).cached_ratio == pytest.approx(0.9)


rates = st.floats(0, 50, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(ISL_EDGES), rates, max_size=7),
    st.dictionaries(st.tuples(st.sampled_from(ISL_EDGES), st.sampled_from(OSL_EDGES)), rates, max_size=12),
    st.dictionaries(st.sampled_from(OSL_EDGES), st.integers(0, 500), max_size=7),
)
def test_all_that_arrives_is_in_the_mix_and_shares_sum_to_one(
    arrivals: dict[int, float], finished: dict[tuple[int, int], float], running: dict[int, float]
) -> None:
    demand = replace(
        NOTHING, arrivals_per_second=arrivals, finished_per_second=finished, running_past_output_edge=running
    )
    mix = estimate_mix(demand, max_model_len=32768)
    assert mix.requests_per_second == pytest.approx(sum(rate for rate in arrivals.values() if rate > 0))
    if mix.cells:
        assert sum(cell.share for cell in mix.cells) == pytest.approx(1)
        assert all(cell.isl >= 1 and cell.osl >= 1 for cell in mix.cells)
