"""The live policy: what may change on a running engine beside its batch settings, and that it acts."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_engine.blocks import BlockPool
from tidegate_engine.context import ContextPolicy
from tidegate_engine.engine import Engine
from tidegate_engine.live_policy import LivePolicy, SchedulingPolicy, change_policy, policy_bounds
from tidegate_engine.request import Request, SampledToken, Window
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.serve import Process
from tidegate_engine.settings import AdmissionPolicy, BatchSettings, Violation
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
BOUNDS = policy_bounds(max_model_len=512, max_num_batched_tokens=1024)
POLICY = "/admin/v1/policy"


def test_a_change_names_some_values_and_keeps_the_others() -> None:
    policy = LivePolicy(max_num_queued_reqs=9, queue_timeout_s=3.0)
    data = {"context_policy": "truncate_left", "max_num_queued_reqs": None, "kv_admission_limit": 0.5}
    changed = change_policy(policy, data, bounds=BOUNDS)
    assert changed == replace(
        policy, context_policy=ContextPolicy.TRUNCATE_LEFT, max_num_queued_reqs=None, kv_admission_limit=0.5
    )


@pytest.mark.parametrize(
    ("data", "field", "allowed"),
    [
        ([], "body", None),
        ({"max_num_seqs": 4}, "max_num_seqs", None),
        ({"context_policy": "forget"}, "context_policy", None),
        ({"scheduling_policy": None}, "scheduling_policy", None),
        ({"default_max_tokens": 513}, "default_max_tokens", (1, 512)),
        ({"max_n": 0}, "max_n", (1, 16)),
        ({"max_n": None}, "max_n", (1, 16)),
        ({"max_n": True}, "max_n", (1, 16)),
        ({"stream_interval": 1.5}, "stream_interval", (1, 1024)),
        ({"kv_admission_limit": 1.01}, "kv_admission_limit", (0.05, 1.0)),
        ({"queue_timeout_s": float("nan")}, "queue_timeout_s", (0.001, 86_400.0)),
        ({"max_prefill_tokens_per_step": 1025}, "max_prefill_tokens_per_step", (1, 1024)),
        ({"max_prefill_tokens_per_step": 0}, "max_prefill_tokens_per_step", (1, 1024)),
        ({"watermark": 0.51}, "watermark", (0.0, 0.5)),
        ({"watermark": None}, "watermark", (0.0, 0.5)),
        ({"reserve_ratio": -0.1}, "reserve_ratio", (0.0, 1.0)),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching", None),
        ({"enable_prefix_caching": None}, "enable_prefix_caching", None),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_name(
    data: object, field: str, allowed: tuple[float, float] | None
) -> None:
    refused = change_policy(LivePolicy(), data, bounds=BOUNDS)
    assert isinstance(refused, Violation)
    assert (refused.field, refused.allowed) == (field, allowed) and field in refused.reason


def new_scheduler(policy: AdmissionPolicy, *, budget: int = 64, chunk: int = 16, blocks: int = 21) -> Scheduler:
    scheduler = Scheduler(
        BatchSettings(16, budget, chunk), BlockPool(blocks, 16, prefix_caching=False), max_model_len=512
    )
    scheduler.admit_by(policy)
    return scheduler


def run_step(scheduler: Scheduler, now: float = 0.0) -> None:
    scheduler.commit(scheduler.plan(now), None, now)
    scheduler.check_integrity()


def test_no_more_prompts_are_computed_in_parts_than_may_be() -> None:
    scheduler = new_scheduler(AdmissionPolicy(max_num_partial_prefills=1))
    for name in "abc":
        scheduler.add(Request(name, 40, 30, 0.0))
    seen = []
    for _ in range(9):
        step = scheduler.plan(0.0)
        seen.append(sum(item.count > 1 and not item.samples for item in step.items))
        scheduler.commit(step, None, 0.0)
    assert max(seen) == 1
    assert scheduler.running == 3, "the others begin when the one before is whole"


def test_admission_leaves_the_share_of_blocks_that_it_may_not_fill_and_a_lone_request_still_runs() -> None:
    def admitted(limit: float) -> int:
        scheduler = new_scheduler(AdmissionPolicy(kv_admission_limit=limit), budget=512, chunk=512)
        for name in "abcd":
            scheduler.add(Request(name, 64, 2, 0.0))
        run_step(scheduler)
        return scheduler.running

    assert [admitted(limit) for limit in (0.05, 0.5, 1.0)] == [1, 2, 4], "of twenty blocks, four each"


def test_the_watermark_leaves_blocks_free_that_raising_it_takes_from_nobody() -> None:
    scheduler = new_scheduler(AdmissionPolicy(watermark=0.0, reserve_ratio=0.0), budget=512, chunk=512)
    for name in "abcd":
        scheduler.add(Request(name, 64, 60, 0.0))
    run_step(scheduler)
    assert scheduler.running == 4, "sixteen of twenty blocks; the others are for growth"
    scheduler.add(Request("e", 16, 60, 1.0))
    scheduler.admit_by(AdmissionPolicy(watermark=0.5, reserve_ratio=0.0))
    for _ in range(3):
        run_step(scheduler)
    assert (scheduler.running, scheduler.waiting) == (4, 1), "who runs goes on"
    for name in "bcd":
        scheduler.abort(name)
    run_step(scheduler)
    assert scheduler.running == 2, "six blocks of twenty are used"
    scheduler.add(Request("f", 80, 2, 2.0))
    run_step(scheduler)
    assert (scheduler.running, scheduler.waiting) == (2, 1), "its five blocks would leave less than half"
    scheduler.admit_by(AdmissionPolicy(watermark=0.1, reserve_ratio=0.0))
    run_step(scheduler)
    assert scheduler.running == 3, "a lower one acts at the next step"


def test_the_share_of_the_output_to_come_that_admission_keeps_room_for_can_be_said() -> None:
    def admitted(ratio: float | None) -> int:
        scheduler = new_scheduler(AdmissionPolicy(reserve_ratio=ratio), budget=512, chunk=512)
        for name in "abcdefgh":
            scheduler.add(Request(name, 16, 64, 0.0))
        run_step(scheduler)
        return scheduler.running

    assert [admitted(ratio) for ratio in (0.0, 0.4, 1.0)] == [8, 5, 3], "one of twenty blocks each, and four to come"
    assert admitted(None) == admitted(0.4), "where nothing is known yet"


def test_a_reserve_that_is_said_does_not_adapt_itself_and_one_that_is_not_goes_on_where_it_was() -> None:
    scheduler = new_scheduler(AdmissionPolicy(reserve_ratio=0.7))
    scheduler.add(Request("a", 16, 200, 0.0))
    for _ in range(100):
        run_step(scheduler)
    assert scheduler.reserve_ratio == scheduler.limits["reserve_ratio"] == 0.7
    scheduler.admit_by(AdmissionPolicy())
    assert scheduler.reserve_ratio == pytest.approx(0.3)


def test_prompts_take_no_more_of_a_step_than_they_may_and_decodes_are_not_counted() -> None:
    scheduler = new_scheduler(AdmissionPolicy(max_prefill_tokens_per_step=24), budget=64, chunk=64)
    for name in "abc":
        scheduler.add(Request(name, 40, 9, 0.0))
    seen = []
    while scheduler.running or scheduler.waiting:
        step = scheduler.plan(0.0)
        prompt_tokens = sum(item.count for item in step.items if item.start + item.count <= 40)
        seen.append((prompt_tokens, len(step.items)))
        scheduler.commit(step, None, 0.0)
    assert max(prompt_tokens for prompt_tokens, _ in seen) == 24
    assert any(prompt_tokens and items > 1 for prompt_tokens, items in seen), "decodes go on beside them"
    scheduler.admit_by(AdmissionPolicy())
    scheduler.add(Request("d", 80, 1, 0.0))
    assert scheduler.plan(0.0).items[0].count == 64, "without a limit the whole budget"


def test_prefix_caching_can_be_switched_and_a_request_keeps_the_blocks_that_it_shares() -> None:
    scheduler = Scheduler(BatchSettings(16, 512, 512), BlockPool(41, 16), max_model_len=512)
    prompt = list(range(1, 81))

    def add(name: str, tokens: int = 40) -> Request:
        request = Request(name, 80, tokens, 0.0, prompt_ids=prompt)
        scheduler.add(request)
        run_step_with_token(scheduler)
        return request

    first, second = add("first"), add("second")
    assert (second.num_cached, second.blocks[:4]) == (64, first.blocks[:4])
    scheduler.admit_by(AdmissionPolicy(enable_prefix_caching=False))
    third = add("third")
    assert (third.num_cached, scheduler.blocks.cached) == (0, 0)
    assert second.blocks[:4] == first.blocks[:4]
    for name in ("first", "second"):
        scheduler.abort(name)
    assert scheduler.blocks.cached == 0, "what ends is kept for nobody"
    scheduler.admit_by(AdmissionPolicy())
    assert add("fourth").num_cached == 0, "what was written meanwhile is not known"
    for _ in range(40):
        run_step_with_token(scheduler)
    assert add("fifth").num_cached == 64


def run_step_with_token(scheduler: Scheduler) -> None:
    step = scheduler.plan(0.0)
    scheduler.commit(step, {item.request.id: SampledToken(7) for item in step.items}, 0.0)
    scheduler.check_integrity()


def test_only_those_that_never_began_are_overdue() -> None:
    scheduler = new_scheduler(AdmissionPolicy(queue_timeout_s=5.0), budget=16)
    scheduler.add(Request("begun", 16, 9, 0.0))
    run_step(scheduler, 1.0)
    scheduler.add(Request("old", 300, 1, 2.0))
    scheduler.add(Request("new", 16, 1, 6.0))
    assert [request.id for request in scheduler.overdue(7.5)] == ["old"]
    assert scheduler.overdue(7.0) == []


@pytest.fixture
async def engine(start_engine: StartEngine, admin_keys_file: Path, fast_profile: Profile) -> Process:
    slow = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.01))
    return await start_engine(admin_keys=admin_keys_file, profile=slow)


async def test_changes_have_versions_and_a_dry_run_changes_nothing(admin: httpx.AsyncClient) -> None:
    before = await admin.get(POLICY)
    assert before.headers["etag"] == '"1"' and before.json()["effective"]["max_n"] == 16
    assert before.json()["envelope"]["default_max_tokens"] == [1, 512]
    dry = await admin.patch(POLICY, json={"max_n": 2}, params={"dryRun": "true"})
    assert dry.status_code == 200 and dry.json()["effective"]["max_n"] == 2
    assert (await admin.get(POLICY)).json()["version"] == 1
    changed = await admin.patch(POLICY, json={"max_n": 2}, headers={"if-match": '"1"'})
    assert changed.json()["version"] == 2 and changed.headers["etag"] == '"2"'
    late = await admin.patch(POLICY, json={"max_n": 3}, headers={"if-match": '"1"'})
    assert late.status_code == 409 and late.json()["error"] == {
        "code": "version_conflict", "message": "the version is 2, not 1", "version": 2,
    }  # fmt: skip
    same = await admin.patch(POLICY, json={"max_n": 2})
    assert same.json()["version"] == 2
    wrong = await admin.patch(POLICY, json={"max_n": 99})
    assert wrong.status_code == 422 and wrong.json()["error"]["allowed"] == [1, 16]
    assert "tidegate_engine_policy_version 2.0" in (await admin.get("/metrics")).text
    assert (await admin.get("/admin/v1/info")).json()["policy_version"] == 2


async def test_what_calls_may_ask_for_changes_at_once(admin: httpx.AsyncClient, api: httpx.AsyncClient) -> None:
    chat: dict[str, Any] = {"model": "fast", "messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 2}
    assert (await api.post("/v1/chat/completions", json=chat)).status_code == 400
    body = {"context_policy": "truncate_middle", "default_max_tokens": 3, "max_n": 2, "scheduling_policy": "priority"}
    assert (await admin.patch(POLICY, json=body)).status_code == 200
    cut = await api.post("/v1/chat/completions", json=chat)
    assert cut.status_code == 200 and cut.json()["usage"]["truncated_tokens"] > 0
    short = {"model": "fast", "messages": [{"role": "user", "content": "hi"}]}
    default = await api.post("/v1/chat/completions", json={**short, "priority": -1})
    assert default.json()["usage"]["completion_tokens"] == 3
    many = await api.post("/v1/chat/completions", json={**short, "n": 3})
    assert many.status_code == 400 and "allows 2" in many.json()["error"]["message"]


async def test_a_window_can_be_set_for_calls_to_come_and_is_refused_where_layers_have_their_own(
    start_engine: StartEngine,
    make_script: Callable[..., Any],
    fast_profile: Profile,
    admin_keys_file: Path,
    admin_headers: Callable[[], dict[str, str]],
) -> None:
    own_windows = make_script("noon", profile=fast_profile)
    own_windows._info = replace(own_windows.info, kv_windows=(64,))
    small = replace(fast_profile, max_model_len=2048, kv_blocks=40)  # 624 tokens
    for runner, status in ((make_script("noon", profile=small), 200), (own_windows, 422)):
        engine = await start_engine(runner=runner, admin_keys=admin_keys_file, context_window=Window(128, 4))
        url, call = f"http://127.0.0.1:{engine.admin_port}{POLICY}", {"model": "fast", "prompt": [7] * 1000}
        async with httpx.AsyncClient(timeout=30) as client:
            changed = await client.patch(url, json={"context_policy": "sliding_window"}, headers=admin_headers())
            assert changed.status_code == status
            answer = await client.post(f"http://127.0.0.1:{engine.api_port}/v1/completions", json=call)
            if status == 422:
                assert "sliding_window is impossible" in changed.json()["error"]["reason"]
                assert (await client.get(url, headers=admin_headers())).json()["effective"][
                    "context_policy"
                ] == "reject"
            else:
                assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == 1000


async def test_a_stream_may_come_in_larger_chunks_with_the_same_text(
    admin: httpx.AsyncClient, api: httpx.AsyncClient
) -> None:
    body = {"model": "fast", "prompt": "the tide", "max_tokens": 21, "stream": True}

    async def chunks() -> list[str]:
        events = (await api.post("/v1/completions", json=body)).text.split("\n\n")
        data = [event.removeprefix("data: ") for event in events if event]
        return [json.loads(each)["choices"][0]["text"] for each in data if each != "[DONE]"]

    alone = await chunks()
    await admin.patch(POLICY, json={"stream_interval": 5})
    grouped = await chunks()
    assert "".join(grouped) == "".join(alone)
    assert len(grouped) <= 5, "the first token, then at least five at a time"


async def test_limits_reach_the_loop_between_two_steps_and_the_metrics_show_them(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    async def limits() -> dict[tuple[str, str], float]:
        page = (await admin.get("/metrics")).text
        found = re.findall(r'batching_limit\{kind="(\w+)",name="(\w+)"\} (\S+)', page)
        return {(name, kind): float(value) for kind, name, value in found}

    before = await limits()
    assert ("max_prefill_tokens_per_step", "spec") not in before, "no limit, no series"
    assert ("reserve_ratio", "spec") not in before and before["reserve_ratio", "effective"] == pytest.approx(0.4)
    body = {
        "max_prefill_tokens_per_step": 100, "watermark": 0.05, "reserve_ratio": 0.8, "enable_prefix_caching": False,
        "max_num_queued_reqs": 7, "kv_admission_limit": 0.9,
    }  # fmt: skip
    changed = await admin.patch(POLICY, json=body)
    assert changed.status_code == 200 and body.items() <= changed.json()["effective"].items()
    scheduler = loops[engine].scheduler
    assert {**scheduler.limits, **body} == {**body, **scheduler.limits}, "the loop goes by them"
    shown = await limits()
    for name, value in body.items():
        assert shown[name, "spec"] == shown[name, "effective"] == float(value), name
    capacity = {"max_prefill_tokens_per_step": 16384, "watermark": 0.5, "enable_prefix_caching": 1, "max_num_seqs": 256}
    assert {name: shown[name, "capacity"] for name in capacity} == capacity
    prompt = {"model": "fast", "prompt": [5] * 100, "max_tokens": 2}
    for _ in range(2):
        await api.post("/v1/completions", json=prompt)
    assert "tidegate_engine_cached_prompt_tokens_total 0.0" in (await admin.get("/metrics")).text
    await admin.patch(POLICY, json={"enable_prefix_caching": True})
    for _ in range(2):
        await api.post("/v1/completions", json=prompt)
    assert "tidegate_engine_cached_prompt_tokens_total 96.0" in (await admin.get("/metrics")).text


async def test_the_policy_of_a_replica_that_leaves_is_not_changed(admin: httpx.AsyncClient) -> None:
    await admin.post("/admin/v1/drain", json={"timeout_seconds": 60})
    refused = await admin.patch(POLICY, json={"max_n": 2})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "draining"
    await admin.delete("/admin/v1/drain")
    assert (await admin.patch(POLICY, json={"max_n": 2})).status_code == 200


async def test_a_queue_of_tokens_has_a_limit_and_those_who_wait_too_long_are_told(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    await loops[engine].call(lambda: scheduler.apply(BatchSettings(1, 64, 64)))
    long = asyncio.create_task(api.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 400}))
    waiting = asyncio.create_task(api.post("/v1/completions", json={"model": "fast", "prompt": "y" * 80}))
    assert engine.state.loaded is not None
    client = engine.state.loaded.engine
    async with asyncio.timeout(20):
        while not (scheduler.running and client.status().waiting_tokens):  # noqa: ASYNC110  # the engine's thread
            await asyncio.sleep(0.005)
    assert (await admin.patch(POLICY, json={"max_num_queued_tokens": 20})).status_code == 200
    refused = await api.post("/v1/completions", json={"model": "fast", "prompt": "z"})
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
    assert (await admin.patch(POLICY, json={"queue_timeout_s": 0.05})).status_code == 200
    given_up = await waiting
    assert given_up.status_code == 503 and "has waited" in given_up.json()["error"]["message"]
    assert int(given_up.headers["retry-after"]) > 0
    assert not long.done(), "who has begun goes on"
    assert (await long).json()["usage"]["completion_tokens"] == 400


async def test_flags_give_the_policy_at_the_start(start_engine: StartEngine) -> None:
    engine = await start_engine(policy=LivePolicy(scheduling_policy=SchedulingPolicy.PRIORITY, default_max_tokens=2))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30) as api:
        body = {"model": "fast", "messages": [{"role": "user", "content": "hi"}], "priority": 3}
        assert (await api.post("/v1/chat/completions", json=body)).json()["usage"]["completion_tokens"] == 2
