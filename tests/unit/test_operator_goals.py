"""What was asked of latencies, read once for all: the object's goals, those of classes, and what was observed."""

import math
from dataclasses import replace

import pytest

from tidegate_operator.api import Spec, parse_spec
from tidegate_operator.goals import (
    attained,
    goals_of,
    headroom_percent,
    in_short,
    judge,
    pattern_targets_of,
    prefers_safety,
    targets_of,
    worst_ratio,
)
from tidegate_operator.observation import Demand

CHAT: dict[str, object] = {"name": "Chat", "inputTokens": {"max": 1024}, "objectives": {"ttft": {"milliseconds": 500}}}
DEMAND = Demand(
    window_seconds=60,
    sampled_at=0.0,
    arrivals_per_second={256: 1.0},
    finished_per_second={},
    running=1,
    waiting=0,
    waiting_prompt_tokens=0,
    running_context_tokens=0,
    running_past_output_edge={},
    ttft_p95_seconds=3.0,
    itl_p95_seconds=0.04,
    queue_p95_seconds=None,
    prompt_tokens_per_second=None,
    cached_prompt_tokens_per_second=None,
    generation_tokens_per_second=None,
    kv_used_ratio=None,
    preemptions_per_second=None,
    pods_covered=1,
    finished_buckets={
        ("ttft", "Chat"): {0.4: 0.0, 0.5: 1.0, math.inf: 1.0},
        ("ttft", "Other"): {2.0: 0.0, 4.0: 1.0, math.inf: 1.0},
        ("endToEnd", "Chat"): {4.0: 0.5, 10.0: 1.0, math.inf: 1.0},
    },
)


def spec_of(objectives: dict[str, object], classes: tuple[dict[str, object], ...] = ()) -> Spec:
    return parse_spec(
        {"model": {"uri": "file:///m"}, "objectives": objectives, "trafficClasses": list(classes)},
    )


def test_a_class_takes_from_the_object_what_it_does_not_give() -> None:
    spec = spec_of({"ttft": {"milliseconds": 2000}, "interTokenLatency": {"milliseconds": 50}}, (CHAT,))
    assert targets_of(spec).ttft_seconds == 2.0
    ((name, targets),) = pattern_targets_of(spec).own
    assert (name, targets.ttft_seconds, targets.itl_seconds) == ("Chat", 0.5, 0.05)


def test_a_class_with_its_own_goals_is_judged_by_itself_and_the_rest_without_it() -> None:
    judged = {item.key: item for item in judge(spec_of({"ttft": {"milliseconds": 2000}}, (CHAT,)), DEMAND)}
    seen, rest = judged["ttft:Chat"].seen_seconds, judged["ttft"].seen_seconds
    assert seen is not None and 0.4 < seen <= 0.5
    assert rest is not None and rest > 3.5, "not the 3 s of all requests together"


def test_without_classes_the_figures_are_those_of_first_tokens() -> None:
    judged = {item.key: item for item in judge(spec_of({"ttft": {"milliseconds": 2000}}), DEMAND)}
    assert judged["ttft"].seen_seconds == 3.0
    assert worst_ratio(list(judged.values())) == 1.5
    assert worst_ratio(list(judged.values()), without=("ttft",)) == 0


def test_the_share_that_is_asked_for_is_the_percentile_that_is_judged() -> None:
    measured = replace(
        DEMAND, buckets={"ttft": {1.0: 0.0, 2.0: 96.0, 4.0: 100.0, math.inf: 100.0}}, ttft_p95_seconds=1.99
    )
    goal: dict[str, object] = {"ttft": {"milliseconds": 2000}}
    (usual,) = judge(spec_of(goal), measured)
    (strict,) = judge(spec_of(goal | {"attainmentPercent": 99}), measured)
    assert usual.seen_seconds == 1.99 and worst_ratio([usual]) < 1
    assert strict.seen_seconds == pytest.approx(3.5) and worst_ratio([strict]) == pytest.approx(1.75)
    assert attained(spec_of(goal), measured, {}) == pytest.approx(0.96)


def test_the_share_is_asked_of_classes_too() -> None:
    spec = spec_of({"ttft": {"milliseconds": 2500}, "attainmentPercent": 99}, (CHAT,))
    judged = {item.key: item.seen_seconds for item in judge(spec, DEMAND)}
    assert judged["ttft:Chat"] == pytest.approx(0.499) and judged["ttft"] == pytest.approx(3.98)
    assert attained(spec, DEMAND, {}) == pytest.approx(0.25), "of the rest, which keeps to its goal least"


def test_what_share_was_within_the_goals_is_unknown_without_goals_or_requests() -> None:
    assert attained(spec_of({}), DEMAND, {}) is None
    assert attained(spec_of({"queueTime": {"milliseconds": 1}}), DEMAND, {}) is None


def test_what_was_not_measured_is_unknown_and_misses_nothing() -> None:
    spec = spec_of({"endToEnd": {"milliseconds": 1}, "queueTime": {"milliseconds": 1}})
    judged = judge(spec, replace(DEMAND, finished_buckets={}))
    assert [item.seen_seconds for item in judged] == [None, None]
    assert worst_ratio(judged) == 0


def test_every_goal_has_words() -> None:
    spec = spec_of(
        {name: {"milliseconds": 9} for name in ("ttft", "interTokenLatency", "queueTime", "endToEnd")}, (CHAT,)
    )
    assert len(goals_of(spec)) == 7
    assert {item.words for item in goals_of(spec)} >= {"time to first token of Chat", "end-to-end time"}
    assert in_short("ttft:Chat") == "ttft of Chat"


def test_priority_says_what_is_given_up_for_what() -> None:
    latency, throughput, cost = (spec_of({"priority": word}) for word in ("Latency", "Throughput", "Cost"))
    assert [prefers_safety(spec) for spec in (latency, throughput, cost)] == [True, False, False]
    assert [headroom_percent(spec) for spec in (latency, throughput, cost)] == [15, 15, 0]
