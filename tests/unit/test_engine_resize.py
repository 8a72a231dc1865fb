"""The KV cache gets another size while the engine serves: nobody is lost, no token differs, and the books balance."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tidegate_engine.blocks import blocks_that_hold, tokens_that_fit, windows_of
from tidegate_engine.engine import Engine
from tidegate_engine.modelled_runner import ModelledRunner, model_info
from tidegate_engine.resize import Order, ResizeMode, parse_order
from tidegate_engine.serve import Process
from tidegate_engine.settings import Violation
from tidegate_engine.steptime import Profile
from tidegate_engine.weights import ModelError

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
RESIZE = "/admin/v1/resize"
LEAST = 33
"""Blocks of 16 tokens that hold a context of 512, and the null block."""
BLOCKS = 65
MOST = 200


class Resizable(ModelledRunner):
    """With memory for MOST blocks; fails where it is told to, as one does that is out of memory."""

    def __init__(self, profile: Profile) -> None:
        info = model_info(profile, block_tokens=16, kv_blocks=BLOCKS, max_model_len=512)
        super().__init__(replace(profile, kv_blocks=MOST), info)
        self.fails = False

    def resize(self, kv_blocks: int) -> None:
        if self.fails:
            raise ModelError("ResizeFailed", "there is no memory; the old size is back")
        super().resize(kv_blocks)


@pytest.fixture
def runner(fast_profile: Profile) -> Resizable:
    return Resizable(fast_profile)


@pytest.fixture
async def engine(start_engine: StartEngine, runner: Resizable, admin_keys_file: Path) -> Process:
    return await start_engine(runner=runner, admin_keys=admin_keys_file)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.002)


async def until_idle(admin: httpx.AsyncClient) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while (body := (await admin.get(RESIZE)).json())["phase"] != "idle":  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.005)
    return dict(body)


async def resize(admin: httpx.AsyncClient, kv_blocks: int, **how: object) -> dict[str, Any]:
    """Resize and wait for the end; how it ended."""
    answer = await admin.post(RESIZE, json={"kv_blocks": kv_blocks, **how})
    assert answer.status_code == 202, answer.text
    return dict((await until_idle(admin))["last"])


async def ask(api: httpx.AsyncClient, seed: int, *, max_tokens: int = 200) -> str:
    """A stream's text; fails unless it came whole."""
    body = {"model": "fast", "prompt": [seed + 1] * 40, "max_tokens": max_tokens, "seed": seed}
    answer = await api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == max_tokens
    return str(answer.json()["choices"][0]["text"])


# --- what may be asked for


@pytest.mark.parametrize("windows", [(None,), (64,), (None, 48), (16, None, 100)])
@pytest.mark.parametrize("tokens", [1, 16, 17, 500, 512])
def test_so_many_blocks_hold_the_tokens_and_one_less_does_not(windows: tuple[int | None, ...], tokens: int) -> None:
    blocks = blocks_that_hold(tokens, 16, windows_of(windows))
    assert tokens_that_fit(blocks, 16, windows_of(windows)) >= tokens
    assert tokens_that_fit(blocks - 1, 16, windows_of(windows)) < tokens


@pytest.mark.parametrize(
    ("data", "field", "allowed"),
    [
        ([], "body", None),
        ({}, "kv_blocks", (LEAST, MOST)),
        ({"kv_blocks": 70, "kv_bytes": 1 << 20}, "kv_blocks", (LEAST, MOST)),
        ({"kv_blocks": LEAST - 1}, "kv_blocks", (LEAST, MOST)),
        ({"kv_blocks": MOST + 1}, "kv_blocks", (LEAST, MOST)),
        ({"kv_blocks": 70.0}, "kv_blocks", (LEAST, MOST)),
        ({"kv_blocks": True}, "kv_blocks", (LEAST, MOST)),
        ({"kv_bytes": LEAST * 2048 - 1}, "kv_bytes", (LEAST * 2048, MOST * 2048 + 2047)),
        ({"kv_blocks": 70, "mode": "swap"}, "mode", None),
        ({"kv_blocks": 70, "mode": ["drain"]}, "mode", None),
        ({"kv_blocks": 70, "timeout_seconds": -1}, "timeout_seconds", (0, 86_400.0)),
        ({"kv_blocks": 70, "timeout_seconds": "1"}, "timeout_seconds", (0, 86_400.0)),
        ({"blocks": 70}, "blocks", None),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    data: object, field: str, allowed: tuple[float, float] | None, runner: Resizable
) -> None:
    refused = parse_order(data, runner.info, bounds=(LEAST, MOST))
    assert isinstance(refused, Violation)
    assert (refused.field, refused.allowed) == (field, allowed) and refused.reason


def test_bytes_are_as_many_blocks_as_they_hold(runner: Resizable) -> None:
    order = parse_order({"kv_bytes": 70 * 2048 + 9, "mode": "drain"}, runner.info, bounds=(LEAST, MOST))
    assert order == Order(70, ResizeMode.DRAIN, None)


async def test_a_dry_run_and_the_size_that_is_there_change_nothing(admin: httpx.AsyncClient, runner: Resizable) -> None:
    before = (await admin.get(RESIZE)).json()
    assert before["allowed"] == [LEAST, MOST] and before["kv_blocks"] == BLOCKS and before["last"] is None
    assert before["block_bytes"] == 2048
    dry = await admin.post(RESIZE, json={"kv_blocks": 100}, params={"dryRun": "true"})
    same = await admin.post(RESIZE, json={"kv_blocks": BLOCKS})
    small = await admin.post(RESIZE, json={"kv_blocks": 5}, params={"dryRun": "true"})
    assert (dry.status_code, dry.json()["wanted_kv_blocks"], same.status_code) == (200, 100, 200)
    assert small.status_code == 422 and small.json()["error"]["allowed"] == [LEAST, MOST]
    assert (await admin.get(RESIZE)).json() == before and runner.info.kv_blocks == BLOCKS


async def test_a_cache_that_began_smaller_than_the_context_may_grow_and_not_shrink(
    start_engine: StartEngine,
    fast_profile: Profile,
    admin_keys_file: Path,
    admin_headers: Callable[[], dict[str, str]],
) -> None:
    engine = await start_engine(profile=replace(fast_profile, kv_blocks=20), admin_keys=admin_keys_file)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.admin_port}", timeout=30) as admin:
        answer = await admin.get(RESIZE, headers=admin_headers())
        assert answer.json()["allowed"] == [20, 20]


# --- what becomes of requests


async def test_sizes_change_under_load_and_no_request_is_lost_nor_any_token_changed(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops, runner: Resizable
) -> None:
    scheduler = loops[engine].scheduler
    undisturbed = [await ask(api, seed) for seed in range(3)]
    calls = [asyncio.create_task(ask(api, seed % 3)) for seed in range(12)]
    await until(lambda: scheduler.running > 2)
    sizes = (MOST, LEAST, 120, BLOCKS)
    count = 0
    while not all(call.done() for call in calls):
        ended = await resize(admin, sizes[count % len(sizes)])
        assert (ended["result"], ended["to_kv_blocks"]) == ("done", sizes[count % len(sizes)])
        assert runner.info.kv_blocks == scheduler.blocks.usable + 1 == sizes[count % len(sizes)]
        count += 1
        before = loops[engine].metrics.counts.generation_tokens
        await until(
            lambda before=before: (
                loops[engine].metrics.counts.generation_tokens > before  # type: ignore[misc]
                or all(call.done() for call in calls)
            )
        )
    assert count >= 4
    assert await asyncio.gather(*calls) == [undisturbed[seed % 3] for seed in range(12)]
    assert scheduler.preemptions["policy"] > 0
    await loops[engine].call(scheduler.check_integrity)
    assert scheduler.blocks.used == 0


async def test_prefixes_are_forgotten_and_everything_tells_the_new_size(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    for _ in range(2):
        await ask(api, 1, max_tokens=2)
    epoch = scheduler.blocks.epoch
    assert scheduler.blocks.cached == 2
    await resize(admin, 100)
    assert (scheduler.blocks.cached, scheduler.blocks.free) == (0, 99) and scheduler.blocks.epoch > epoch
    page = (await admin.get("/metrics")).text
    assert 'num_gpu_blocks="99"' in page and f'memory_bytes{{kind="kv"}} {100 * 2048:.1f}' in page
    assert 'tidegate_engine_config_updates_total{result="applied"} 1.0' in page
    assert (await admin.get("/admin/v1/info")).json()["kv_blocks"] == 100
    assert engine.state.loaded is not None
    assert engine.state.loaded.policy._completions.limits.kv_tokens == 99 * 16
    await ask(api, 1, max_tokens=2)
    await until(lambda: scheduler.blocks.cached == 2)


async def test_a_drain_waits_for_what_runs_while_the_replica_is_not_ready_and_what_comes_waits(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    running = [asyncio.create_task(ask(api, seed, max_tokens=300)) for seed in range(2)]
    await until(lambda: scheduler.running == 2)
    answer = await admin.post(RESIZE, json={"kv_blocks": 40, "mode": "drain"})
    assert (answer.status_code, answer.json()["phase"], answer.json()["wanted_kv_blocks"]) == (202, "draining", 40)
    ready = await admin.get("/readyz")
    assert ready.status_code == 503 and "resized: draining" in ready.text
    assert (await admin.get("/livez")).status_code == 200
    again = await admin.post(RESIZE, json={"kv_blocks": 41})
    assert again.status_code == 409 and again.json()["error"]["code"] == "resizing"
    late = asyncio.create_task(ask(api, 5, max_tokens=20))
    await until(lambda: scheduler.waiting == 1)
    progress = (await admin.get(RESIZE)).json()
    assert (progress["kv_blocks"], progress["running"], progress["waiting"]) == (BLOCKS, 2, 1)
    ended = (await until_idle(admin))["last"]
    assert (ended["result"], ended["error"]) == ("done", None)
    await asyncio.gather(*running, late)
    assert scheduler.preemptions == {"kv": 0, "policy": 0}, "nobody was sent back"
    assert scheduler.blocks.usable == 39 and (await admin.get("/readyz")).status_code == 200


async def test_a_drain_that_takes_too_long_ends_in_recomputing(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    undisturbed = await ask(api, 1, max_tokens=400)
    call = asyncio.create_task(ask(api, 1, max_tokens=400))
    await until(lambda: scheduler.running == 1)
    ended = await resize(admin, 40, mode="drain", timeout_seconds=0.05)
    assert ended["result"] == "done" and not call.done() and scheduler.preemptions["policy"] == 1
    assert await call == undisturbed


async def test_a_resize_that_waits_can_be_given_up(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    call = asyncio.create_task(ask(api, 1, max_tokens=400))
    await until(lambda: scheduler.running == 1)
    await admin.post(RESIZE, json={"kv_blocks": 40, "mode": "drain"})
    late = asyncio.create_task(ask(api, 2, max_tokens=5))
    await until(lambda: scheduler.waiting == 1)
    body = (await admin.delete(RESIZE)).json()
    assert (body["phase"], body["last"]["result"], body["kv_blocks"]) == ("idle", "cancelled", BLOCKS)
    await late
    assert not call.done(), "what waited starts beside what ran"
    await call
    assert (await admin.delete(RESIZE)).json() == {**body, "running": 0, "waiting": 0}


async def test_after_a_failure_the_old_size_is_back_and_everything_goes_on(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops, runner: Resizable
) -> None:
    scheduler = loops[engine].scheduler
    undisturbed = await ask(api, 1)
    call = asyncio.create_task(ask(api, 1))
    await until(lambda: scheduler.running == 1)
    runner.fails = True
    ended = await resize(admin, 100)
    assert ended["result"] == "failed" and "there is no memory" in ended["error"]
    assert scheduler.blocks.usable == BLOCKS - 1
    assert await call == undisturbed
    assert 'config_updates_total{result="reverted"} 1.0' in (await admin.get("/metrics")).text
    runner.fails = False
    assert (await resize(admin, 100))["result"] == "done"


async def test_frozen_requests_keep_their_cache_and_a_leaving_replica_has_other_things_to_do(
    engine: Process, admin: httpx.AsyncClient, api: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    call = asyncio.create_task(ask(api, 1, max_tokens=400))
    await until(lambda: scheduler.running == 1)
    await admin.post("/admin/v1/pause", json={"mode": "keep"})
    refused = await admin.post(RESIZE, json={"kv_blocks": 40})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "paused"
    with pytest.raises(ModelError, match="KvCacheKept"):
        await loops[engine].resize(40)
    await admin.post("/admin/v1/resume")
    await admin.post(RESIZE, json={"kv_blocks": 40, "mode": "drain"})
    late = asyncio.create_task(ask(api, 2, max_tokens=5))
    await until(lambda: scheduler.waiting == 1)
    assert (await admin.post("/admin/v1/drain", json={"timeout_seconds": 60})).status_code == 202
    assert (await until_idle(admin))["last"]["result"] == "cancelled"
    refused = await admin.post(RESIZE, json={"kv_blocks": 40})
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "draining"
    await asyncio.gather(call, late)
