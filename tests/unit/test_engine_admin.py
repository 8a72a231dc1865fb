"""The admin listener: probes for everybody, orders for holders of a valid token, live settings under load."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine import admin as admin_module
from tidegate_engine.admin_keys import AdminKeys, TokenRefused
from tidegate_engine.batching import BatchingState, Change, Conflict, apply_change, expire, initial_state
from tidegate_engine.engine import Engine, Health, Output
from tidegate_engine.modelled_runner import ModelledRunner, model_info
from tidegate_engine.request import Request, SampledToken, Step
from tidegate_engine.serve import Process
from tidegate_engine.settings import BatchSettings, Envelope
from tidegate_engine.steptime import TERMS, Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
MakeHeaders = Callable[[], dict[str, str]]
UID = "6f0c5d1e-0000-4000-8000-000000000001"
BATCHING = "/admin/v1/batching"
PROBES = ("/livez", "/readyz", "/startupz")


def admin_of(engine: Process) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.admin_port}", timeout=30)


def api_of(engine: Process) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=60)


def swap(path: Path, text: str) -> None:
    """Replace a file as the kubelet does: the new content is there at once, in another file."""
    new = path.with_name("next")
    new.write_text(text)
    new.rename(path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.005)


class BlockingRunner(ModelledRunner):
    """Hangs in a step until it is let go."""

    def __init__(self, profile: Profile) -> None:
        info = model_info(
            profile, block_tokens=profile.block_tokens, kv_blocks=profile.kv_blocks, max_model_len=profile.max_model_len
        )
        super().__init__(profile, info)
        self.is_held = True

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        while self.is_held:
            time.sleep(0.005)
        return super().run(step)


@pytest.fixture
async def engine(start_engine: StartEngine, admin_keys_file: Path) -> Process:
    return await start_engine(admin_keys=admin_keys_file)


async def test_probes_and_metrics_are_open_and_everything_else_is_denied(engine: Process) -> None:
    async with admin_of(engine) as client:
        for path in (*PROBES, "/metrics"):
            assert (await client.get(path)).status_code == 200, path
        for path in (BATCHING, "/admin/v1/info", "/admin/v1/drain", "/docs", "/", "/admin/v1/nothing"):
            answer = await client.get(path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "unauthorized"


async def test_only_a_fresh_token_of_a_known_key_for_this_object_is_accepted(
    engine: Process, admin_key: Ed25519PrivateKey, subtests: pytest.Subtests
) -> None:
    now = int(time.time())
    good = {"aud": UID, "exp": now + 50}
    secret = "a shared secret of more than thirty-two bytes"

    def sign(claims: dict[str, Any], key: Any = admin_key, algorithm: str = "EdDSA", kid: str = "current") -> str:
        return "Bearer " + jwt.encode(claims, key, algorithm=algorithm, headers={"kid": kid})

    refused = {
        "no token": "",
        "another scheme": "Basic dTpw",
        "garbage": "Bearer a.b.c",
        "expired": sign({**good, "exp": now - 30}),
        "no expiry": sign({"aud": UID}),
        "an hour long": sign({**good, "exp": now + 3600}),
        "another object": sign({**good, "aud": "another-uid"}),
        "no audience": sign({"exp": now + 50}),
        "not yet valid": sign({**good, "nbf": now + 40}),
        "unknown key id": sign(good, kid="other"),
        "foreign key": sign(good, key=Ed25519PrivateKey.generate()),
        "shared secret": sign(good, key=secret, algorithm="HS256"),
        "no signature": sign(good, key=None, algorithm="none"),
    }
    async with admin_of(engine) as client:
        for name, value in refused.items():
            with subtests.test(name):
                assert (await client.get(BATCHING, headers={"authorization": value})).status_code == 401
        assert (await client.get(BATCHING, headers={"authorization": sign(good)})).status_code == 200


async def test_keys_are_read_again_when_the_file_changes(
    engine: Process, admin: httpx.AsyncClient, admin_keys_file: Path
) -> None:
    assert (await admin.get(BATCHING)).status_code == 200
    keys = admin_keys_file.read_text()  # noqa: ASYNC240
    for text in ('{"keys": []}', "not json"):
        swap(admin_keys_file, text)
        assert (await admin.get(BATCHING)).status_code == 401
    swap(admin_keys_file, keys)
    assert (await admin.get(BATCHING)).status_code == 200


def test_keys_that_cannot_be_read_are_told_once_not_for_each_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = AdminKeys(tmp_path / "missing.json", UID)
    for _ in range(3):
        with pytest.raises(TokenRefused):
            keys.check("a.b.c")
    assert len(caplog.records) == 1


async def test_without_keys_or_uid_the_admin_api_is_off(
    start_engine: StartEngine, admin_keys_file: Path, admin_headers: MakeHeaders
) -> None:
    for options in ({"admin_keys": None}, {"admin_keys": admin_keys_file, "object_uid": None}):
        engine = await start_engine(**options)
        async with admin_of(engine) as client:
            assert (await client.get("/readyz")).status_code == 200
            assert (await client.get(BATCHING, headers=admin_headers())).status_code == 403


async def test_info_says_what_capacity_needs(admin: httpx.AsyncClient) -> None:
    info = (await admin.get("/admin/v1/info")).json()
    assert info["kv_blocks"] == 65 and info["block_tokens"] == 16 and info["max_model_len"] == 512
    assert info["gpu_product"] == "Test GPU" and info["runner"] == "modelled" and info["profile"] == "fast"
    assert set(info["step_model"]) == set(TERMS) and info["settings_generation"] == 1
    assert set(info["start_seconds"]) == {"weights", "warmup"}


async def test_settings_are_shown_with_envelope_version_and_etag(admin: httpx.AsyncClient) -> None:
    answer = await admin.get(BATCHING)
    body = answer.json()
    assert answer.headers["etag"] == '"1"' and body["version"] == 1 and body["generation"] == 1
    assert body["spec"] == body["effective"]
    assert body["envelope"]["max_num_seqs"] == [1, 256]
    assert body["status"] == {"running": 0, "over_cap": 0, "draining_to": None}


async def test_a_patch_acts_is_acknowledged_and_may_come_again(
    engine: Process, admin: httpx.AsyncClient, loops: Loops
) -> None:
    body = {"generation": 5, "max_num_seqs": 8}
    first = (await admin.patch(BATCHING, json=body)).json()
    again = (await admin.patch(BATCHING, json=body)).json()
    assert first == again | {"applied_at_step": first["applied_at_step"]}
    assert first["effective"]["max_num_seqs"] == 8 and first["version"] == 2 and first["generation"] == 5
    assert loops[engine].scheduler.settings.max_num_seqs == 8
    metrics = (await admin.get("/metrics")).text
    assert "tidegate_engine_settings_generation 5.0" in metrics
    assert 'tidegate_engine_batching_limit{kind="effective",name="max_num_seqs"} 8.0' in metrics


async def test_older_generations_and_stale_versions_conflict(admin: httpx.AsyncClient) -> None:
    assert (await admin.patch(BATCHING, json={"generation": 5, "max_num_seqs": 8})).status_code == 200
    older = await admin.patch(BATCHING, json={"generation": 4, "max_num_seqs": 9})
    assert older.status_code == 409 and older.json()["error"]["code"] == "generation_conflict"
    reused = await admin.patch(BATCHING, json={"generation": 5, "max_num_seqs": 9})
    assert reused.status_code == 409 and reused.json()["error"]["code"] == "generation_conflict"
    stale = await admin.patch(BATCHING, json={"max_num_seqs": 9}, headers={"if-match": '"1"'})
    assert stale.status_code == 409 and stale.json()["error"]["code"] == "version_conflict"
    assert (await admin.patch(BATCHING, json={"max_num_seqs": 9}, headers={"if-match": '"2"'})).status_code == 200
    assert (await admin.get(BATCHING)).json()["effective"]["max_num_seqs"] == 9


async def test_refused_settings_name_field_bounds_and_reason(
    admin: httpx.AsyncClient, subtests: pytest.Subtests
) -> None:
    cases: list[tuple[dict[str, Any], str, list[int] | None]] = [
        ({"max_num_seqs": 0}, "max_num_seqs", [1, 256]),
        ({"max_num_seqs": 257}, "max_num_seqs", [1, 256]),
        ({"max_num_seqs": "8"}, "max_num_seqs", None),
        ({"max_num_seqs": True}, "max_num_seqs", None),
        ({"max_seqs": 8}, "max_seqs", None),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens", [512, 16384]),
        ({"ttl_s": 0, "max_num_seqs": 8}, "ttl_s", [1, 86400]),
    ]
    for body, field, allowed in cases:
        with subtests.test(str(body)):
            answer = await admin.patch(BATCHING, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["field"], error["allowed"]) == (422, field, allowed)
            assert error["reason"]
    assert (await admin.patch(BATCHING, content=b"[1]")).status_code == 422
    assert (await admin.patch(BATCHING, content=b"{")).status_code == 400
    assert (await admin.get(BATCHING)).json()["version"] == 1


async def test_a_dry_run_answers_as_if_and_changes_nothing(admin: httpx.AsyncClient) -> None:
    answer = await admin.patch(BATCHING + "?dryRun=true", json={"generation": 9, "max_num_seqs": 4})
    assert answer.status_code == 200 and answer.json()["effective"]["max_num_seqs"] == 4
    assert (await admin.patch(BATCHING + "?dryRun=true", json={"max_num_seqs": 0})).status_code == 422
    now = (await admin.get(BATCHING)).json()
    assert now["version"] == 1 and now["generation"] == 1 and now["effective"]["max_num_seqs"] == 32


async def test_settings_with_a_time_to_live_fall_back_to_the_last_ones_without(
    engine: Process, admin: httpx.AsyncClient, loops: Loops
) -> None:
    await admin.patch(BATCHING, json={"generation": 2, "max_num_seqs": 16})
    await admin.patch(BATCHING, json={"generation": 3, "max_num_seqs": 4, "ttl_s": 1})
    scheduler = loops[engine].scheduler
    assert scheduler.settings.max_num_seqs == 4
    await until(lambda: scheduler.settings.max_num_seqs == 16)
    await until(lambda: engine.state.loaded is not None and engine.state.loaded.batching.state.generation == 2)
    assert (await admin.patch(BATCHING, json={"generation": 3, "max_num_seqs": 4})).status_code == 200


async def test_patches_under_load_drop_no_request_and_change_no_text(
    start_engine: StartEngine, fast_profile: Profile, admin_keys_file: Path, admin_headers: MakeHeaders, loops: Loops
) -> None:
    engine = await start_engine(profile=replace(fast_profile, kv_blocks=1001), admin_keys=admin_keys_file)
    scheduler = loops[engine].scheduler

    async def ask(client: httpx.AsyncClient, seed: int) -> str:
        body = {"model": "fast", "prompt": [seed + 1] * 20, "max_tokens": 200, "seed": seed}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 200
        return str(answer.json()["choices"][0]["text"])

    async with api_of(engine) as client, admin_of(engine) as admin:
        admin.headers.update(admin_headers())
        undisturbed = [await ask(client, seed) for seed in range(3)]
        calls = [asyncio.create_task(ask(client, seed % 3)) for seed in range(30)]
        await until(lambda: scheduler.running > 4)
        overs = []
        generation = 4
        while not all(call.done() for call in calls):
            limit = (1, 24, 2, 7)[generation % 4]
            answer = await admin.patch(BATCHING, json={"generation": generation, "max_num_seqs": limit})
            assert answer.status_code == 200
            overs.append((await admin.get(BATCHING)).json()["status"]["over_cap"])
            generation += 1
        texts = await asyncio.gather(*calls)
    assert texts == [undisturbed[seed % 3] for seed in range(30)]
    assert max(overs) > 0, "a lowered cap drains, it does not cut"
    scheduler.check_integrity()


async def test_abort_ends_all_choices_of_a_call_with_an_error(engine: Process, admin: httpx.AsyncClient) -> None:
    async with api_of(engine) as client:
        body = {"model": "fast", "prompt": "x", "max_tokens": 500, "n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            call_id = json.loads((await anext(lines)).removeprefix("data: "))["id"]
            aborted = await admin.post("/admin/v1/abort", json={"request_id": call_id})
            assert aborted.json() == {"aborted": [f"{call_id}-0", f"{call_id}-1"]}
            rest = [line async for line in lines if line]
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "aborted"
    assert rest[-1] == "data: [DONE]"
    assert (await admin.post("/admin/v1/abort", json={"request_id": call_id})).status_code == 404
    assert (await admin.post("/admin/v1/abort", json={})).status_code == 422


async def test_flush_empties_the_prefix_cache(engine: Process, admin: httpx.AsyncClient) -> None:
    async with api_of(engine) as client:
        await client.post("/v1/completions", json={"model": "fast", "prompt": [3] * 100, "max_tokens": 1})
    assert (await admin.post("/admin/v1/cache/flush")).json() == {"flushed_blocks": 6}
    assert 'tidegate_engine_kv_blocks{state="cached"} 0.0' in (await admin.get("/metrics")).text


async def test_a_hung_step_is_first_not_ready_then_not_alive_and_an_idle_engine_is_both(
    start_engine: StartEngine, fast_profile: Profile
) -> None:
    runner = BlockingRunner(fast_profile)
    engine = await start_engine(runner=runner, stall_seconds=1.0)
    try:
        async with admin_of(engine) as admin, api_of(engine) as client:
            await asyncio.sleep(1.2)  # longer than the stall time: idling is not hanging
            assert [(await admin.get(path)).status_code for path in PROBES] == [200, 200, 200]
            call = asyncio.create_task(
                client.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 3})
            )
            seen: list[tuple[int, int]] = []
            async with asyncio.timeout(20):
                while not seen or seen[-1] != (503, 503):
                    state = ((await admin.get("/livez")).status_code, (await admin.get("/readyz")).status_code)
                    if not seen or seen[-1] != state:
                        seen.append(state)
            assert seen == [(200, 200), (200, 503), (503, 503)]
            assert (await client.get("/health")).status_code == 503
            runner.is_held = False
            assert (await call).status_code == 200
            assert [(await admin.get(path)).status_code for path in PROBES] == [200, 200, 200]
    finally:
        runner.is_held = False


async def test_an_order_that_nobody_waits_for_any_more_is_dropped_and_the_engine_goes_on(
    start_engine: StartEngine,
    fast_profile: Profile,
    admin_keys_file: Path,
    admin_headers: MakeHeaders,
    monkeypatch: pytest.MonkeyPatch,
    loops: Loops,
) -> None:
    monkeypatch.setattr(admin_module, "CALL_TIMEOUT_SECONDS", 0.05)
    runner = BlockingRunner(fast_profile)
    engine = await start_engine(runner=runner, admin_keys=admin_keys_file)
    loop = loops[engine]
    try:
        async with admin_of(engine) as admin, api_of(engine) as client:
            admin.headers.update(admin_headers())
            call = asyncio.create_task(
                client.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 3})
            )
            await until(lambda: loop.scheduler.step_id > 0)
            late = await admin.patch(BATCHING, json={"max_num_seqs": 8})
            assert late.status_code == 503 and late.json()["error"]["code"] == "busy"
            runner.is_held = False
            monkeypatch.setattr(admin_module, "CALL_TIMEOUT_SECONDS", 30.0)
            assert (await call).status_code == 200
            assert (await admin.get(BATCHING)).json()["effective"]["max_num_seqs"] == 32
            assert (await admin.patch(BATCHING, json={"max_num_seqs": 8})).status_code == 200
    finally:
        runner.is_held = False


async def test_settings_whose_time_ends_in_a_step_longer_than_any_wait_fall_back_after_it(
    start_engine: StartEngine,
    fast_profile: Profile,
    admin_keys_file: Path,
    admin_headers: MakeHeaders,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = BlockingRunner(fast_profile)
    engine = await start_engine(runner=runner, admin_keys=admin_keys_file)
    assert engine.state.loaded is not None
    batching = engine.state.loaded.batching
    try:
        async with admin_of(engine) as admin, api_of(engine) as client:
            admin.headers.update(admin_headers())
            assert (await admin.patch(BATCHING, json={"max_num_seqs": 8, "ttl_s": 1})).status_code == 200
            monkeypatch.setattr(admin_module, "CALL_TIMEOUT_SECONDS", 0.05)
            call = asyncio.create_task(
                client.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 3})
            )
            await asyncio.sleep(1.2)  # the time to live and some waits for the step
            assert batching.effective.max_num_seqs == 8
            runner.is_held = False
            assert (await call).status_code == 200
            await until(lambda: batching.effective.max_num_seqs == 32)
    finally:
        runner.is_held = False


async def test_requests_that_an_engine_never_came_to_are_told_when_it_fails(
    start_engine: StartEngine, fast_profile: Profile, monkeypatch: pytest.MonkeyPatch, loops: Loops
) -> None:
    def lose_the_books(*_: object) -> None:
        raise RuntimeError("the books are lost")

    runner = BlockingRunner(fast_profile)
    engine = await start_engine(runner=runner)
    loop = loops[engine]
    monkeypatch.setattr(loop.scheduler, "commit", lose_the_books)
    body = {"model": "fast", "prompt": "x", "max_tokens": 3}
    try:
        async with api_of(engine) as client:
            running = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: loop.scheduler.step_id > 0)
            unread = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: loop._mailbox.qsize() == 1)
            runner.is_held = False
            for answer in await asyncio.gather(running, unread):
                assert answer.status_code == 500 and "the engine failed" in answer.json()["error"]["message"]
    finally:
        runner.is_held = False


async def test_steps_that_keep_failing_end_the_engine_with_a_reason(
    start_engine: StartEngine, fast_profile: Profile, loops: Loops
) -> None:
    class Broken(BlockingRunner):
        def run(self, step: Step) -> Mapping[str, SampledToken]:
            raise RuntimeError("device lost")

    engine = await start_engine(runner=Broken(fast_profile))
    loop = loops[engine]
    async with api_of(engine) as client:
        for _ in range(3):
            answer = await client.post("/v1/completions", json={"model": "fast", "prompt": "x"})
            assert answer.status_code == 500
        await until(lambda: loop.failure is not None)
    late: list[Output] = []

    class Late:
        def push(self, output: Output) -> None:
            late.append(output)

    loop.submit(Request("late", 1, 1, 0.0, prompt_ids=[1]), Late())
    assert [output.error for output in late] == ["the engine failed"], "nobody waits for an engine that is gone"
    health: Health = loop.health()
    assert not health.alive and "device lost" in (health.failure or "")


SETTINGS = st.builds(
    BatchSettings, st.integers(1, 300), st.sampled_from([512, 2048, 16384]), st.sampled_from([256, 8192])
)
CHANGES = st.builds(
    Change,
    st.fixed_dictionaries({}, optional={"max_num_seqs": st.integers(0, 300)}),
    st.none() | st.integers(0, 6),
    st.none() | st.integers(1, 9),
    st.none(),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(CHANGES, st.floats(0, 20)), max_size=12))
def test_any_sequence_of_changes_keeps_versions_rising_and_settings_inside_the_envelope(
    changes: list[tuple[Change, float]],
) -> None:
    state: BatchingState = initial_state(BatchSettings(32, 1024, 256), 1)
    now = 0.0
    for change, delay in changes:
        now += delay
        expired = expire(state, now)
        assert expired.version >= state.version
        assert expired.expires_at is None or expired.expires_at > now
        state = expired
        after = apply_change(state, change, Envelope(), now=now)
        if isinstance(after, BatchingState):
            assert after.version >= state.version
            assert after.generation >= state.generation
            assert 1 <= after.spec.max_num_seqs <= 256
            assert after.version > state.version or after.spec == state.spec
            state = after
        elif isinstance(after, Conflict):
            assert change.generation is not None


def test_the_operator_may_repeat_its_generation_after_a_person_changed_the_settings() -> None:
    start = initial_state(BatchSettings(32, 1024, 256), 1)
    by_operator = apply_change(start, Change({"max_num_seqs": 8}, generation=2), Envelope(), now=0.0)
    assert isinstance(by_operator, BatchingState)
    by_hand = apply_change(by_operator, Change({"max_num_seqs": 9}), Envelope(), now=0.0)
    assert isinstance(by_hand, BatchingState) and by_hand.generation == 2
    repeated = apply_change(by_hand, Change({"max_num_seqs": 8}, generation=2), Envelope(), now=0.0)
    assert isinstance(repeated, BatchingState) and repeated.spec.max_num_seqs == 8
    assert replace(repeated, version=by_operator.version) == by_operator


async def test_kept_requests_stand_still_and_go_on_at_the_resume(
    engine: Process, admin: httpx.AsyncClient, loops: Loops
) -> None:
    loop = loops[engine]
    body = {"model": "fast", "prompt": "x", "max_tokens": 200}
    async with api_of(engine) as api:
        undisturbed = (await api.post("/v1/completions", json=body)).json()
        running = asyncio.create_task(api.post("/v1/completions", json=body))
        await until(lambda: any(r.output_tokens > 3 for r in loop.scheduler.live_requests()))
        paused = (await admin.post("/admin/v1/pause", json={"mode": "keep"})).json()
        assert (paused["mode"], paused["frozen"], paused["running"], paused["aborted"]) == ("keep", True, 1, [])
        step = loop.scheduler.step_id
        for _ in range(3):  # the engine answers, and computes nothing
            await admin.get("/admin/v1/info")
            await loop.call(lambda: None)
        assert loop.scheduler.step_id == step and not running.done()
        assert (await admin.get("/readyz")).status_code == 503 and (await admin.get("/livez")).status_code == 200
        info = (await admin.get("/admin/v1/info")).json()
        assert (info["paused"], info["pause_mode"]) == (True, "keep")
        assert 'tidegate_engine_paused{mode="keep"} 1.0' in (await admin.get("/metrics")).text
        assert (await api.post("/v1/completions", json=body)).status_code == 503
        resumed = (await admin.post("/admin/v1/resume")).json()
        assert (resumed["paused"], resumed["mode"], resumed["frozen"]) == (False, None, False)
        answer = (await running).json()
        assert answer["choices"][0]["text"] == undisturbed["choices"][0]["text"]
        assert 'tidegate_engine_paused{mode="keep"} 0.0' in (await admin.get("/metrics")).text


async def test_a_pause_takes_nothing_of_the_time_that_requests_may_wait(
    engine: Process, admin: httpx.AsyncClient, loops: Loops, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = loops[engine]
    clock = loop._clock
    await admin.patch("/admin/v1/policy", json={"queue_timeout_s": 60})
    await loop.call(lambda: loop.scheduler.apply(BatchSettings(1, 64, 64)))
    call = {"model": "fast", "prompt": "x", "max_tokens": 200}
    async with api_of(engine) as api:
        calls = [asyncio.create_task(api.post("/v1/completions", json=call)) for _ in range(3)]
        await until(lambda: (loop.scheduler.running, loop.scheduler.waiting) == (1, 2))
        for _ in range(2):  # a second order to pause is the same pause
            await admin.post("/admin/v1/pause", json={"mode": "keep"})
        monkeypatch.setattr(loop, "_clock", lambda: clock() + 3600)
        await admin.post("/admin/v1/resume")
        assert [(await each).status_code for each in calls] == [200] * 3


async def test_kept_requests_can_leave_be_aborted_and_are_finished_by_a_drain(
    engine: Process, admin: httpx.AsyncClient, loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    body = {"model": "fast", "prompt": "x", "max_tokens": 100}
    async with api_of(engine) as api:
        tasks = [asyncio.create_task(api.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: scheduler.running == 3)
        await admin.post("/admin/v1/pause", json={"mode": "keep"})
        tasks[0].cancel()
        await until(lambda: scheduler.running == 2)
        victim = scheduler.live_requests()[0].id
        assert (await admin.post("/admin/v1/abort", json={"request_id": victim})).json()["aborted"] == [victim]
        await until(lambda: scheduler.running == 1)
        await admin.post("/admin/v1/drain", json={"timeout_seconds": 20})
        answers = await asyncio.gather(*tasks[1:])
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    refused = await admin.post("/admin/v1/pause", json={"mode": "keep"})
    assert refused.status_code == 409


async def test_a_paused_replica_is_not_ready_and_refuses_until_it_is_resumed(
    engine: Process, admin: httpx.AsyncClient, loops: Loops
) -> None:
    body = {"model": "fast", "prompt": "x", "max_tokens": 300}
    async with api_of(engine) as api:
        scheduler = loops[engine].scheduler
        running = asyncio.create_task(api.post("/v1/completions", json=body))
        await until(lambda: scheduler.running > 0)
        paused = (await admin.post("/admin/v1/pause")).json()
        assert paused["paused"] and paused["aborted"] == []
        assert (await admin.get("/readyz")).text == "paused\n"
        assert (await admin.get("/livez")).status_code == 200
        refused = await api.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "paused"
        assert refused.headers["retry-after"] == "5"
        assert (await running).json()["usage"]["completion_tokens"] == 300
        assert (await admin.get("/admin/v1/pause")).json() == {
            "paused": True,
            "mode": "wait",
            "frozen": False,
            "running": 0,
            "waiting": 0,
        }
        assert (await admin.post("/admin/v1/resume")).json()["paused"] is False
        assert (await admin.get("/readyz")).status_code == 200
        assert (await api.post("/v1/completions", json={**body, "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize(("path", "body"), [("pause", {"mode": "abort"}), ("abort", {"all": True})])
async def test_all_requests_can_be_aborted_by_one_order(
    engine: Process, admin: httpx.AsyncClient, path: str, body: dict[str, object], loops: Loops
) -> None:
    scheduler = loops[engine].scheduler
    call = {"model": "fast", "prompt": [5] * 40, "max_tokens": 400}
    async with api_of(engine) as api:
        calls = [asyncio.create_task(api.post("/v1/completions", json=call)) for _ in range(4)]
        await until(lambda: scheduler.running == 4)
        answer = await admin.post(f"/admin/v1/{path}", json=body)
        assert len(answer.json()["aborted"]) == 4
        assert [(await done).status_code for done in calls] == [503] * 4
    assert scheduler.blocks.used == 0
    assert (await admin.post("/admin/v1/abort", json={"all": True})).json() == {"aborted": []}
    assert (await admin.post("/admin/v1/abort", json={"all": True, "request_id": "x"})).status_code == 422
    assert (await admin.post("/admin/v1/pause", json={"mode": "freeze"})).status_code == 422


async def test_every_order_leaves_a_line_in_the_audit_log_and_no_question_does(
    admin: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tidegate_engine.audit")
    await admin.get("/admin/v1/info")
    await admin.post("/admin/v1/cache/flush")
    await admin.post("/admin/v1/abort", json={"request_id": "cmpl-none"})
    await admin.patch(BATCHING, json={"max_num_seqs": 8})
    await admin.post("/admin/v1/pause", headers={"authorization": "Bearer forged"})
    lines = [record.getMessage() for record in caplog.records if record.name == "tidegate_engine.audit"]
    assert lines == [
        "POST /admin/v1/cache/flush by 'key current' from 127.0.0.1: 200, 0 blocks flushed",
        "POST /admin/v1/abort by 'key current' from 127.0.0.1: 404, 0 requests aborted",
        "PATCH /admin/v1/batching by 'key current' from 127.0.0.1: 200",
    ]
