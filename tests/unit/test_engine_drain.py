"""Leaving without cutting anybody: by SIGTERM in a real process, and by the admin API."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from tidegate_engine import serve
from tidegate_engine.drain import Drain, DrainPhase
from tidegate_engine.serve import Process
from tidegate_engine.server import Guard
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
MakeHeaders = Callable[[], dict[str, str]]
DRAIN = "/admin/v1/drain"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Running:
    """A `tidegate-engine serve` of its own."""

    def __init__(self, profile: Path, *flags: str) -> None:
        port, admin_port = free_port(), free_port()
        self.api = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=10)
        command = [sys.executable, "-m", "tidegate_engine.cli", "serve", "--runner", "modelled"]
        command += ["--profile", str(profile), "--served-model-name", "fast", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--admin-port", str(admin_port), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    async def probe(self, path: str) -> int:
        """The probe's status; 0 while nothing listens."""
        try:
            return (await self.admin.get(path)).status_code
        except httpx.TransportError:
            return 0

    async def until_probe(self, path: str, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.probe(path) != status:
                assert self.process.poll() is None, self.process.communicate()[1]
                await asyncio.sleep(0.02)

    async def exit_code(self) -> int:
        return await asyncio.to_thread(self.process.wait, 30)


@asynccontextmanager
async def running(profile: Path, *flags: str) -> AsyncIterator[Running]:
    engine = Running(profile, *flags)
    try:
        yield engine
    finally:
        await engine.api.aclose()
        await engine.admin.aclose()
        engine.process.kill()
        engine.process.communicate()


async def read_stream(client: httpx.AsyncClient, *, tokens: int, begun: asyncio.Event | None = None) -> list[str]:
    """The events of one streamed call."""
    body = {"model": "fast", "prompt": "x", "max_tokens": tokens, "stream": True}
    events = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line:
                events.append(line.removeprefix("data: "))
                if begun is not None:
                    begun.set()
    return events


async def start_streams(client: httpx.AsyncClient, count: int, *, tokens: int) -> list[asyncio.Task[list[str]]]:
    """Streams that all have begun."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(read_stream(client, tokens=tokens, begun=event)) for event in begun]
    async with asyncio.timeout(30):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def until_phase(admin: httpx.AsyncClient, *phases: str) -> None:
    async with asyncio.timeout(20):
        while (await admin.get(DRAIN)).json()["phase"] not in phases:  # noqa: ASYNC110  # it is another's state
            await asyncio.sleep(0.02)


async def until_gone(admin: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                await admin.get("/readyz")
            except httpx.TransportError:
                return
            await asyncio.sleep(0.02)


async def test_sigterm_lets_ten_streams_end_with_done_and_exits_with_0(fast_profile_file: Path) -> None:
    async with running(fast_profile_file, "--endpoint-removal-seconds", "2") as engine:
        await engine.until_probe("/readyz", 200)
        streams = await start_streams(engine.api, 10, tokens=300)
        os.kill(engine.process.pid, signal.SIGTERM)
        await engine.until_probe("/readyz", 503)
        assert await engine.probe("/livez") == 200
        late = await read_stream(engine.api, tokens=3)
        assert late[-1] == "[DONE]", "a client that does not know yet is served"
        for events in await asyncio.gather(*streams):
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert await engine.exit_code() == 0


async def test_sigterm_at_the_timeout_ends_streams_with_an_error_event_not_a_cut(
    fast_profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(asdict(replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.05)))))
    async with running(path, "--endpoint-removal-seconds", "0", "--shutdown-timeout", "0.5") as engine:
        await engine.until_probe("/readyz", 200)
        streams = await start_streams(engine.api, 3, tokens=500)
        os.kill(engine.process.pid, signal.SIGTERM)
        for events in await asyncio.gather(*streams):
            assert events[-1] == "[DONE]"
            error = json.loads(events[-2])["error"]
            assert error["code"] == "aborted" and "shutting down" in error["message"]
        assert await engine.exit_code() == 0


async def test_probes_answer_while_the_model_loads_and_sigterm_then_ends_at_once(
    fast_profile: Profile, tmp_path: Path
) -> None:
    path = tmp_path / "slow-start.json"
    path.write_text(json.dumps(asdict(replace(fast_profile, start_seconds={"weights": 600.0, "warmup": 0.0}))))
    async with running(path) as engine:
        await engine.until_probe("/startupz", 503)
        assert (await engine.probe("/livez"), await engine.probe("/readyz")) == (200, 503)
        assert await engine.probe("/metrics") == 200
        os.kill(engine.process.pid, signal.SIGTERM)
        assert await engine.exit_code() == 0


async def test_a_drain_serves_then_refuses_and_its_end_can_be_seen_and_cancelled(
    start_engine: StartEngine, fast_profile: Profile, admin_keys_file: Path, admin_headers: MakeHeaders
) -> None:
    slower = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.006))
    engine = await start_engine(profile=slower, admin_keys=admin_keys_file, endpoint_removal_seconds=2.0)
    api_url, admin_url = (f"http://127.0.0.1:{port}" for port in (engine.api_port, engine.admin_port))
    async with (
        httpx.AsyncClient(base_url=api_url, timeout=30) as api,
        httpx.AsyncClient(base_url=admin_url, timeout=30, headers=admin_headers()) as admin,
    ):
        body = {"model": "fast", "prompt": "x", "max_tokens": 2}
        assert (await admin.get(DRAIN)).json()["phase"] == "serving"
        streams = await start_streams(api, 2, tokens=500)
        started = await admin.post(DRAIN, json={"timeout_seconds": 60})
        assert started.status_code == 202
        assert started.json()["running"] == 2 and started.json()["longest_remaining_tokens"] > 0
        assert (await admin.get("/readyz")).status_code == 503
        assert (await api.post("/v1/completions", json=body)).status_code == 200
        await until_phase(admin, "refusing", "drained")
        refused = await api.post("/v1/completions", json=body)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "shutting_down"
        patched = await admin.patch("/admin/v1/batching", json={"max_num_seqs": 2})
        assert patched.status_code == 409 and patched.json()["error"]["code"] == "draining"
        assert all(events[-1] == "[DONE]" for events in await asyncio.gather(*streams))
        await until_phase(admin, "drained")
        assert (await admin.get("/livez")).status_code == 200, "only SIGTERM ends the process"
        assert (await admin.delete(DRAIN)).json()["phase"] == "serving"
        assert (await admin.get("/readyz")).status_code == 200
        assert (await api.post("/v1/completions", json=body)).status_code == 200
        assert (await admin.post(DRAIN, json={"timeout_seconds": -1})).status_code == 422


async def test_a_drain_by_a_signal_is_not_cancelled_and_cuts_no_stream(
    start_engine: StartEngine, fast_profile: Profile, admin_keys_file: Path, admin_headers: MakeHeaders
) -> None:
    slower = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.006))
    engine = await start_engine(profile=slower, admin_keys=admin_keys_file, shutdown_timeout_seconds=30.0)
    api_url, admin_url = (f"http://127.0.0.1:{port}" for port in (engine.api_port, engine.admin_port))
    async with (
        httpx.AsyncClient(base_url=api_url, timeout=30) as api,
        httpx.AsyncClient(base_url=admin_url, timeout=30, headers=admin_headers()) as admin,
    ):
        # Longer than a listener waits for its connections when it ends.
        streams = await start_streams(api, 2, tokens=500)
        engine.leave.set()
        await until_phase(admin, "refusing")
        assert (await admin.delete(DRAIN)).json()["phase"] == "refusing"
        for events in await asyncio.gather(*streams):
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"


async def test_a_process_whose_api_listener_is_gone_ends_and_does_not_look_ready(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, original = asyncio.Event(), serve._Listener.main_loop

    async def main_loop(listener: serve._Listener) -> None:
        await (ended.wait() if isinstance(listener.config.app, Guard) else original(listener))

    monkeypatch.setattr(serve._Listener, "main_loop", main_loop)
    engine = await start_engine()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.admin_port}", timeout=30) as admin:
        assert (await admin.get("/readyz")).status_code == 200
        ended.set()
        await until_gone(admin)


async def test_a_timeout_below_the_removal_of_the_endpoints_still_serves_who_cannot_know_yet(
    start_engine: StartEngine,
) -> None:
    engine = await start_engine(shutdown_timeout_seconds=0.0, endpoint_removal_seconds=1.0)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30) as api:
        engine.leave.set()
        assert engine.state.loaded is not None
        drain = engine.state.loaded.drain
        async with asyncio.timeout(20):
            while drain.phase is DrainPhase.SERVING:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0)
        answer = await api.post("/v1/completions", json={"model": "fast", "prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200


async def test_a_call_that_is_still_being_prepared_is_not_cut_by_a_drain(start_engine: StartEngine) -> None:
    engine = await start_engine()
    assert engine.state.loaded is not None
    drain = engine.state.loaded.drain
    body = json.dumps({"model": "fast", "prompt": "x", "max_tokens": 2}).encode()
    drained: list[asyncio.Task[None]] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield body[:9]
        async with asyncio.timeout(20):
            while not drain._has_work:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0.001)
        drained.append(drain.begin(60, at_once=True))
        await asyncio.wait(drained, timeout=0.1)
        assert drain.phase is DrainPhase.REFUSING
        yield body[9:]

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30) as api:
        answer = await api.post("/v1/completions", content=chunks())
    assert answer.status_code == 200
    await asyncio.wait_for(drained[0], timeout=20)


async def test_at_the_timeout_also_what_was_being_prepared_is_aborted() -> None:
    aborted: list[str] = []
    drain = Drain(lambda: 0, aborted.append, endpoint_removal_seconds=0)
    with drain.preparing():
        task = drain.begin(0)
        async with asyncio.timeout(20):
            while len(aborted) < 2:  # noqa: ASYNC110  # it has no event
                await asyncio.sleep(0)
        assert not task.done()
    await asyncio.wait_for(task, timeout=20)


async def test_the_timeout_of_a_final_drain_overrules_a_longer_one_before() -> None:
    now = [100.0]
    drain = Drain(lambda: 1, lambda _: None, endpoint_removal_seconds=0, clock=lambda: now[0])
    drain.begin(3600)
    now[0] += 10
    task = drain.begin(5, is_final=True)
    assert drain.seconds_left == 5
    drain.begin(60)
    assert drain.seconds_left == 5, "nothing makes the time longer than the process has"
    assert not drain.cancel()
    task.cancel()
