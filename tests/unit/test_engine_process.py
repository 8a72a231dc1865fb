"""Two processes that are one server: what crosses between them is whole, and neither's end is a silence."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine import engine_wire as wire
from tidegate_engine.engine import Health, Output, Report, Status
from tidegate_engine.engine_client import EngineClient, EngineGone
from tidegate_engine.engine_host import _Host
from tidegate_engine.engine_wire import Link
from tidegate_engine.metrics import EngineMetrics, Snapshot
from tidegate_engine.request import (
    Adapter,
    FinishReason,
    PoolingKind,
    Request,
    SampledToken,
    SamplingParams,
    TokenLogprobs,
    Window,
)
from tidegate_engine.settings import DEFAULT_PATTERNS, BatchSettings
from tidegate_engine.steptime import TERMS, Profile, StepModel
from tidegate_engine.weights import ModelError

LOGPROBS = st.builds(
    TokenLogprobs,
    st.floats(max_value=0, allow_nan=False),
    st.lists(st.tuples(st.integers(0, 9), st.floats(max_value=0, allow_nan=False)), max_size=3).map(tuple),
)
TOKENS = st.builds(
    SampledToken,
    st.integers(0, 200_000),
    st.booleans(),
    st.none() | LOGPROBS,
    error=st.none(),
    # What only the scheduler and the loop need stays on their side.
    is_corrupted=st.just(False),
    is_final=st.just(False),
    following=st.just(()),
    is_deferred=st.just(False),
    embedding=st.none() | st.binary(max_size=16),
)
OUTPUTS = st.builds(
    Output, st.none() | TOKENS, st.none() | st.sampled_from(FinishReason), st.none() | st.text(), st.booleans()
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PARAMS = st.builds(
    SamplingParams,
    **{each.name: FINITE for each in fields(SamplingParams) if each.type is float},
    seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
)


@settings(max_examples=100, deadline=None)
@given(OUTPUTS)
def test_an_output_crosses_whole(output: Output) -> None:
    row = orjson.loads(orjson.dumps(wire.output_row(7, output, cached=3)))
    assert (row[0], row[-1]) == (7, 3)
    assert wire.read_output(row) == output


@settings(max_examples=60, deadline=None)
@given(PARAMS, st.lists(st.integers(0, 1 << 20), max_size=20), st.text(max_size=9))
def test_a_request_crosses_whole(params: SamplingParams, prompt: list[int], salt: str) -> None:
    request = Request(
        "cmpl-1-0",
        len(prompt),
        9,
        123.456,
        prompt_ids=prompt,
        params=params,
        priority=-2,
        cache_salt=salt,
        adapter=Adapter("sql", "digest") if salt else None,
        pooling=PoolingKind.MEAN if salt else None,
        window=Window(5, sinks=2),
    )
    facts, ids = orjson.loads(orjson.dumps([wire.request_facts(request), request.prompt_ids]))
    got = wire.read_request(facts, ids)
    assert asdict(got) == asdict(request)


def make_report() -> Report:
    metrics = EngineMetrics(DEFAULT_PATTERNS)
    metrics.first_token(2, ttft_seconds=0.25, queue_seconds=0.1)
    limits = BatchSettings(4, 1024, 256)
    snapshot = Snapshot(
        running=6,
        waiting=2,
        waiting_prompt_tokens=300,
        running_context_tokens=900,
        running_output_past_edges={0: 6, 16: 2},
        kv_used=10,
        kv_cached=5,
        kv_free=15,
        preemptions={"kv": 3, "policy": 0},
        spec=limits,
        effective=limits,
        capacity=limits,
        settings_generation=7,
        step_model=StepModel(*(0.5,) * len(TERMS)),
        step_model_residual_ratio=None,
        step_model_samples=12,
        memory_bytes={"weights": 100},
        start_seconds={"weights": 1.5},
    )
    return Report(metrics.counts, snapshot)


def test_a_report_crosses_whole() -> None:
    report = make_report()
    got = wire.REPORT.validate_python(orjson.loads(orjson.dumps(wire.plain(wire.REPORT, report))))
    assert asdict(got) == asdict(report)


async def links() -> tuple[socket.socket, Link]:
    """The client's socket, and the other end."""
    end, other = socket.socketpair()
    return end, await Link.open(other)


async def send_ready(link: Link) -> None:
    info = {
        "name": "m", "layers": 1, "kv_heads": 1, "head_size": 1, "vocab_size": 9, "max_model_len": 64,
        "weight_dtype": "f", "kv_dtype": "f", "weight_bytes": 1, "kv_token_bytes": 1, "kv_blocks": 4,
        "block_tokens": 16, "gpu_product": None, "gpu_count": 0, "eos_token_ids": [],
    }  # fmt: skip
    link.send("ready", info, {"weights": 1.0})
    send_beat(link, Health(True, 0.0, 1))


def send_beat(link: Link, health: Health, *, taken: int = 0) -> None:
    status = Status(2, 0, taken, 0, BatchSettings(4, 64, 64), health)
    link.send("beat", wire.plain(wire.STATUS, status))


class Kept:
    def __init__(self) -> None:
        self.outputs: list[Output] = []

    def push(self, output: Output) -> None:
        self.outputs.append(output)


async def test_a_model_that_cannot_be_loaded_is_an_error_of_the_model_here() -> None:
    end, link = await links()
    link.send("failed", "ModelUnsupported", "no such family")
    with pytest.raises(ModelError, match="ModelUnsupported: no such family"):
        await EngineClient.connect(end, process=None)


async def test_an_end_while_loading_is_said_and_not_waited_for() -> None:
    end, link = await links()
    await link.close()
    with pytest.raises(EngineGone, match="ended while it loaded"):
        await EngineClient.connect(end, process=None)


async def test_requests_on_their_way_wait_where_no_place_is_free_for_them() -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None)
    for number in range(5):
        client.submit(Request(f"r{number}", 1, 1, 0.0, prompt_ids=[1]), Kept())
    assert (client.status().waiting, client.unfinished) == (3, 5), "two of four places are taken"
    send_beat(link, Health(True, 0.0, 1), taken=4)
    async with asyncio.timeout(10):
        while client.status().waiting:  # noqa: ASYNC110  # it is heard in another task
            await asyncio.sleep(0.001)
    await client.stop()


async def test_a_number_that_no_frame_can_hold_is_refused_alone() -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None)
    bad, good = Kept(), Kept()
    client.submit(Request("bad", 1, 1, 0.0, prompt_ids=[1], params=SamplingParams(seed=1 << 70)), bad)
    client.submit(Request("good", 1, 1, 0.0, prompt_ids=[1]), good)
    assert [output.is_refusal for output in bad.outputs] == [True]
    frame = await link.receive()
    assert frame is not None and frame[:2] == ["add", 1] and frame[2]["id"] == "good"
    await client.stop()


async def test_a_prompt_is_sent_once_for_all_its_choices() -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None)
    first, second = [1, 2, 3], [1, 2, 3]
    for number, prompt in enumerate([first, first, second, second, first]):
        params = SamplingParams(seed=1 << 70 if number == 2 else number)
        client.submit(Request(f"r{number}", 3, 1, 0.0, prompt_ids=prompt, params=params), Kept())
    frames = [await link.receive() for _ in range(4)]
    assert [frame and (frame[2]["id"], frame[3]) for frame in frames] == [
        ("r0", first), ("r1", None), ("r3", second), ("r4", first),
    ], "what could not be sent brought no ids"  # fmt: skip
    await client.stop()


async def test_metrics_count_requests_on_their_way_as_waiting() -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None)
    for number in range(9):
        client.submit(Request(f"r{number}", 1, 1, 0.0, prompt_ids=[1]), Kept())
        assert await link.receive() is not None
    asked = asyncio.ensure_future(client.report())
    assert (await link.receive() or [])[:3] == ["ask", 1, "report"]
    status = wire.plain(wire.STATUS, Status(2, 0, 0, 0, BatchSettings(4, 64, 64), Health(True, 0.0, 1)))
    link.send("answer", status, 1, wire.plain(wire.REPORT, make_report()), None)
    assert (await asked).snapshot.waiting == 7, "two of four places are free; the loop itself knows of two requests"
    await client.stop()


async def test_stopping_does_not_wait_for_an_engine_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None)
    monkeypatch.setattr(wire, "CLOSE_SECONDS", 0.01)
    client.submit(Request("a", 1, 1, 0.0, prompt_ids=[1] * 2_000_000), Kept())
    await asyncio.wait_for(client.stop(), timeout=20)
    await link.close()


async def test_a_question_that_is_withdrawn_at_once_leaves_nothing_behind() -> None:
    _, link = await links()
    engine: Any = None
    host = _Host(engine, link)
    host._act(["ask", 1, "flush", None])
    host._act(["cancel", 1])
    await asyncio.gather(*host._answers.values(), return_exceptions=True)
    await asyncio.sleep(0)
    assert not host._answers
    await link.close()


@pytest.mark.parametrize(
    "how", ["hangs up", "reports its failure", "says nothing", "says what cannot be understood", "answers nonsense"]
)
async def test_who_waits_for_an_engine_that_fails_is_told(how: str) -> None:
    end, link = await links()
    await send_ready(link)
    client = await EngineClient.connect(end, process=None, silence_seconds=0.2 if how == "says nothing" else 60.0)
    kept, late = Kept(), Kept()
    client.submit(Request("a", 1, 1, 0.0, prompt_ids=[1]), kept)
    asked = asyncio.ensure_future(client.flush_cache())
    await asyncio.sleep(0)
    if how == "hangs up":
        await link.close()
    elif how == "reports its failure":
        send_beat(link, Health(False, 0.0, 1, "the device is lost"))
    elif how == "says what cannot be understood":
        link.send("beat", {"running": "many"})
    elif how == "answers nonsense":
        status = wire.plain(wire.STATUS, Status(2, 0, 0, 0, BatchSettings(4, 64, 64), Health(True, 0.0, 1)))
        link.send("outputs", status, [[1, 7, False, None, "no such reason", None, False, 0]])
    await asyncio.wait_for(client.failed.wait(), timeout=20)
    client.submit(Request("b", 1, 1, 0.0, prompt_ids=[1]), late)
    for outputs in (kept.outputs, late.outputs):
        assert [(output.finish_reason, output.error) for output in outputs] == [
            (FinishReason.ERROR, "the engine failed")
        ]
    with pytest.raises(EngineGone):
        await asked
    health = client.health()
    assert not health.alive and health.failure and client.unfinished == 0
    await client.stop()


# --- real processes

RESIZE = "/admin/v1/resize"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Server:
    """A `tidegate-engine serve` of its own, and the engine's process behind it."""

    def __init__(self, profile: Path, *flags: str) -> None:
        port, admin_port = free_port(), free_port()
        self.api = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=10)
        command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--runner", "modelled"]
        command += ["--profile", str(profile), "--served-model-name", "fast", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--admin-port", str(admin_port), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._errors = ""

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    async def probe(self, path: str) -> int:
        """The probe's status; 0 while nothing listens."""
        try:
            return (await self.admin.get(path)).status_code
        except httpx.TransportError:
            return 0

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while await self.probe("/readyz") != 200:
                assert self.process.poll() is None, self.process.communicate()[1]
                await asyncio.sleep(0.02)

    async def until_not(self, path: str) -> None:
        async with asyncio.timeout(60):
            while await self.probe(path) == 200:  # noqa: ASYNC110  # it is another's state
                await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)

    def end(self) -> str:
        """Kill it if it runs; what it wrote to stderr."""
        self.process.kill()
        if not self._errors:
            self._errors = self.process.communicate()[1]
        return self._errors


@asynccontextmanager
async def serving(profile: Path, *flags: str) -> AsyncIterator[Server]:
    server = Server(profile, *flags)
    try:
        yield server
    finally:
        await server.api.aclose()
        await server.admin.aclose()
        server.end()


async def read_until_end(api: httpx.AsyncClient, begun: asyncio.Event) -> list[str]:
    body = {"model": "fast", "prompt": "x", "max_tokens": 500, "stream": True}
    events = []
    async with api.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                begun.set()
    return events


@pytest.fixture
def slow_profile_file(fast_profile: Profile, tmp_path: Path) -> Path:
    """Streams of it last for half a minute."""
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(asdict(replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.06)))))
    return path


@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_is_lost_makes_the_server_unready_then_dead_and_its_clients_are_told(
    slow_profile_file: Path, lost_by: signal.Signals
) -> None:
    async with serving(slow_profile_file, "--liveness-stall-seconds", "3") as server:
        await server.until_ready()
        engine_pid, begun = server.engine_pid, asyncio.Event()
        stream = asyncio.create_task(read_until_end(server.api, begun))
        whole = asyncio.create_task(
            server.api.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 500})
        )
        await asyncio.wait_for(begun.wait(), timeout=30)
        os.kill(engine_pid, lost_by)
        await server.until_not("/readyz")
        await server.until_not("/livez")
        events = await asyncio.wait_for(stream, timeout=60)
        assert "the engine failed" in json.loads(events[-2])["error"]["message"] and events[-1] == "[DONE]"
        answer = await whole
        assert answer.status_code == 500 and "the engine failed" in answer.json()["error"]["message"]
        assert await server.exit_code() == 1
        assert ("signal SIGKILL" if lost_by is signal.SIGKILL else "did not say anything") in server.end()
        assert not is_running(engine_pid)


async def test_the_cache_is_resized_behind_running_streams_by_an_order_to_the_other_process(
    fast_profile_file: Path,
    admin_keys_file: Path,
    admin_headers: Callable[[], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIDEGATE_OBJECT_UID", "6f0c5d1e-0000-4000-8000-000000000001")
    async with serving(fast_profile_file, "--admin-keys", str(admin_keys_file)) as server:
        await server.until_ready()
        undisturbed = await read_until_end(server.api, asyncio.Event())
        begun = asyncio.Event()
        streams = [asyncio.create_task(read_until_end(server.api, begun)) for _ in range(3)]
        await asyncio.wait_for(begun.wait(), timeout=30)
        for size in (40, 65, 33):
            answer = await server.admin.post(RESIZE, json={"kv_blocks": size}, headers=admin_headers())
            assert answer.status_code == 202, answer.text
            async with asyncio.timeout(30):
                while (body := await read_resize(server, admin_headers()))["phase"] != "idle":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (body["last"]["result"], body["kv_blocks"]) == ("done", size)
        for stream in streams:
            assert text_of(await asyncio.wait_for(stream, timeout=60)) == text_of(undisturbed)
        too_large = await server.admin.post(RESIZE, json={"kv_blocks": 66}, headers=admin_headers())
        assert too_large.status_code == 422 and too_large.json()["error"]["allowed"] == [33, 65]
        page = (await server.admin.get("/metrics")).text
        assert 'tidegate_engine_kv_blocks{state="used"} 0.0' in page and 'num_gpu_blocks="32"' in page


async def read_resize(server: Server, headers: dict[str, str]) -> dict[str, Any]:
    return dict((await server.admin.get(RESIZE, headers=headers)).json())


def text_of(events: list[str]) -> str:
    """What a stream said, which ended as it should; how many tokens come in a chunk is the clock's affair."""
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)


async def test_no_engine_is_left_behind_by_a_server_that_is_killed(fast_profile_file: Path) -> None:
    async with serving(fast_profile_file) as server:
        await server.until_ready()
        engine_pid = server.engine_pid
        assert is_running(engine_pid)
        server.process.kill()
        await server.exit_code()
        async with asyncio.timeout(30):
            while is_running(engine_pid):  # noqa: ASYNC110  # it is another's state
                await asyncio.sleep(0.02)


async def test_signals_to_both_processes_drain_as_one_to_the_server_does(slow_profile_file: Path) -> None:
    async with serving(slow_profile_file, "--endpoint-removal-seconds", "0") as server:
        await server.until_ready()
        engine_pid = server.engine_pid
        body = {"model": "fast", "prompt": "x", "max_tokens": 30}
        whole = asyncio.create_task(server.api.post("/v1/completions", json=body))
        async with asyncio.timeout(30):
            while (await server.api.get("/load")).json()["requests_running"] != 1:  # noqa: ASYNC110  # it is another's state
                await asyncio.sleep(0.01)
        for pid in (engine_pid, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        finished = await whole
        assert finished.status_code == 200 and finished.json()["usage"]["completion_tokens"] == 30
        assert await server.exit_code() == 0
        assert not is_running(engine_pid)
