"""The admin client, the fleet's memory and the direct scrape against real engines (a modelled GPU, real HTTP)."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tidegate_engine.settings import BatchSettings
from tidegate_operator.demand import MIN_SCRAPES, combine
from tidegate_operator.engines import Applied, EngineClient, Refused, Unreachable, admin_url, parse_info
from tidegate_operator.fleet import FRESH_SECONDS, Fleet
from tidegate_operator.metrics import Metrics
from tidegate_operator.observation import MetricsState, Replica, ReplicaPhase
from tidegate_operator.scrape import Scraper
from tidegate_operator.tokens import KeyRing, new_private_key, rotated, sign

UID = "6f0c5d1e-0000-4000-8000-000000000001"
Start = Callable[..., Awaitable[Any]]


@pytest.fixture
def ring() -> KeyRing:
    return rotated(None, new_key=new_private_key(), now=0.0)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest.fixture
async def engine(start_engine: Start, ring: KeyRing, tmp_path: Path) -> Any:
    """An engine that knows the operator's public keys."""
    keys = tmp_path / "operator-keys.json"
    keys.write_text(json.dumps(ring.jwks()))
    return await start_engine(admin_keys=keys)


@pytest.fixture
def client(session: aiohttp.ClientSession, engine: Any) -> EngineClient:
    return EngineClient(session, Metrics(), port=engine.admin_port)


@pytest.fixture
def token(ring: KeyRing) -> str:
    return sign(ring, audience=UID, now=time.time())


def ready(name: str = "m-1", *, uid: str = "u1", restarts: int = 0) -> Replica:
    return Replica(name, uid, "127.0.0.1", ReplicaPhase.READY, 0.0, restarts=restarts)


CHANGED = BatchSettings(max_num_seqs=16, max_num_batched_tokens=512, long_prefill_token_threshold=256)


async def test_settings_are_applied_and_told(client: EngineClient, token: str) -> None:
    before = await client.batching("127.0.0.1", token=token)
    assert isinstance(before, Applied)
    assert before.generation == 1
    applied = await client.apply("127.0.0.1", token=token, generation=7, settings=CHANGED)
    assert applied == Applied(7, CHANGED)
    assert await client.batching("127.0.0.1", token=token) == Applied(7, CHANGED)


async def test_the_same_again_is_no_change_and_an_older_generation_is_refused(client: EngineClient, token: str) -> None:
    for _ in range(2):
        assert await client.apply("127.0.0.1", token=token, generation=7, settings=CHANGED) == Applied(7, CHANGED)
    refused = await client.apply("127.0.0.1", token=token, generation=6, settings=CHANGED)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.code) == (409, "generation_conflict")


async def test_a_value_outside_the_envelope_is_refused_with_its_reason(client: EngineClient, token: str) -> None:
    wild = replace(CHANGED, max_num_seqs=100_000)
    refused = await client.apply("127.0.0.1", token=token, generation=8, settings=wild)
    assert isinstance(refused, Refused)
    assert refused.status == 422
    assert "max_num_seqs" in refused.reason


async def test_a_token_of_another_object_or_of_long_ago_opens_nothing(client: EngineClient, ring: KeyRing) -> None:
    for bad in (sign(ring, audience="other", now=time.time()), sign(ring, audience=UID, now=time.time() - 300)):
        refused = await client.apply("127.0.0.1", token=bad, generation=9, settings=CHANGED)
        assert isinstance(refused, Refused)
        assert refused.status == 401
        assert await client.info("127.0.0.1", token=bad) is None


async def test_the_engine_tells_what_capacity_needs(client: EngineClient, token: str) -> None:
    info = await client.info("127.0.0.1", token=token)
    assert info is not None
    assert (info.block_tokens, info.max_model_len, info.gpu_count) == (16, 512, 1)
    assert info.kv_blocks > 0
    assert info.step_model is not None
    assert info.step_model.base_seconds == pytest.approx(0.002)
    assert info.layers is not None and info.layers > 0 and info.weight_dtype


async def test_an_engine_that_is_not_there_is_a_finding_not_an_error(
    session: aiohttp.ClientSession, token: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        gone = EngineClient(session, Metrics(), port=free.getsockname()[1])
    assert isinstance(await gone.batching("127.0.0.1", token=token), Unreachable)
    assert await gone.info("127.0.0.1", token=token) is None


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert admin_url("fd00::1", 8001) == "http://[fd00::1]:8001"


@pytest.mark.parametrize("data", [None, [], "text", {}, {"kv_blocks": "many"}])
def test_an_info_that_cannot_be_read_is_unknown(data: object) -> None:
    assert parse_info(data) is None


class CountingEngines:
    """The real client, counting how often it is asked."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.calls = client, {"batching": 0, "apply": 0, "info": 0}

    async def batching(self, ip: str, *, token: str) -> Any:
        self.calls["batching"] += 1
        return await self.client.batching(ip, token=token)

    async def apply(self, ip: str, *, token: str, generation: int, settings: BatchSettings) -> Any:
        self.calls["apply"] += 1
        return await self.client.apply(ip, token=token, generation=generation, settings=settings)

    async def info(self, ip: str, *, token: str) -> Any:
        self.calls["info"] += 1
        return await self.client.info(ip, token=token)


async def test_a_pod_is_told_once_and_asked_rarely(client: EngineClient, token: str) -> None:
    engines = CountingEngines(client)
    fleet = Fleet(engines)
    (seen,) = await fleet.look([ready()], token=token, now=100.0)
    assert seen.settings_generation == 1
    (told,), refusals = await fleet.send([seen], token=token, generation=3, settings=CHANGED, now=100.0)
    assert (told.settings_generation, told.settings, refusals) == (3, CHANGED, ())
    for later in (101.0, 130.0):
        (seen,) = await fleet.look([ready()], token=token, now=later)
        (seen,), _ = await fleet.send([seen], token=token, generation=3, settings=CHANGED, now=later)
        assert await fleet.info([seen], token=token, now=later) is not None
    assert engines.calls == {"batching": 1, "apply": 1, "info": 1}
    await fleet.look([ready()], token=token, now=101.0 + FRESH_SECONDS)
    assert engines.calls["batching"] == 2


async def test_a_container_that_restarted_is_asked_anew(client: EngineClient, token: str) -> None:
    engines = CountingEngines(client)
    fleet = Fleet(engines)
    await fleet.look([ready()], token=token, now=100.0)
    await fleet.look([ready(restarts=1)], token=token, now=101.0)
    assert engines.calls["batching"] == 2


async def test_a_refusal_is_reported_and_the_pod_stays_unacknowledged(client: EngineClient, token: str) -> None:
    fleet = Fleet(client)
    await client.apply("127.0.0.1", token=token, generation=9, settings=CHANGED)
    (replica,), refusals = await fleet.send([ready()], token=token, generation=3, settings=CHANGED, now=1.0)
    assert replica.settings_generation is None
    assert [(refusal.pod, refusal.answer.status) for refusal in refusals] == [("m-1", 409)]


async def test_only_ready_pods_are_asked(client: EngineClient, token: str) -> None:
    engines = CountingEngines(client)
    loading = replace(ready(), phase=ReplicaPhase.LOADING)
    fleet = Fleet(engines)
    assert await fleet.look([loading], token=token, now=1.0) == (loading,)
    assert await fleet.info([loading], token=token, now=1.0) is None
    await fleet.send([loading], token=token, generation=2, settings=CHANGED, now=1.0)
    assert sum(engines.calls.values()) == 0


async def test_pruning_forgets_pods_that_are_gone(client: EngineClient, token: str) -> None:
    engines = CountingEngines(client)
    fleet = Fleet(engines)
    await fleet.look([ready()], token=token, now=100.0)
    fleet.prune(1000.0, keep_seconds=600.0)
    await fleet.look([ready()], token=token, now=101.0)
    assert engines.calls["batching"] == 2


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # the scraper has no event of its own
            await asyncio.sleep(0.02)


async def test_scraped_traffic_becomes_demand(session: aiohttp.ClientSession, engine: Any) -> None:
    scraper = Scraper(session, port=engine.admin_port)
    pods = [("u1/0", "m-1", "127.0.0.1")]
    scraper.watch(pods, sync_period_seconds=4)
    task = asyncio.create_task(scraper.run())
    try:
        await until(lambda: bool(scraper.measured(["u1/0"]).windows))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=20) as api:
            for _ in range(5):
                answer = await api.post(
                    "/v1/completions", json={"model": "fast", "prompt": "tide " * 20, "max_tokens": 20}
                )
                assert answer.status_code == 200, answer.text
        await until(lambda: scraper.measured(["u1/0"]).windows[0].scrapes >= MIN_SCRAPES)
        demand, state, _ = combine(
            scraper.measured(["u1/0"]), ready=dict.fromkeys(["m-1"]), now=time.time(), stale_after_seconds=30
        )
    finally:
        task.cancel()
    assert state is MetricsState.FRESH
    assert demand is not None
    window = demand.window_seconds
    assert sum(demand.arrivals_per_second.values()) * window == pytest.approx(5)
    assert sum(demand.finished_per_second.values()) * window == pytest.approx(5)
    assert {osl for _, osl in demand.finished_per_second if demand.finished_per_second[_, osl]} == {16}
    assert demand.generation_tokens_per_second is not None
    assert demand.generation_tokens_per_second * window == pytest.approx(100)
    assert demand.ttft_p95_seconds is not None
    assert 0.001 < demand.ttft_p95_seconds < 5
    assert demand.running == demand.waiting == 0


async def test_a_pod_that_cannot_be_scraped_has_no_window(session: aiohttp.ClientSession) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        scraper = Scraper(session, port=free.getsockname()[1])
    scraper.watch([("u1/0", "m-1", "127.0.0.1")], sync_period_seconds=4)
    task = asyncio.create_task(scraper.run())
    await asyncio.sleep(0.2)
    task.cancel()
    assert scraper.measured(["u1/0"]).windows == ()
