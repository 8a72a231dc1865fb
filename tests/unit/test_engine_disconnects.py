"""Clients that go away at any moment, streaming or not: whatever they held is free again, and others are served."""

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import httpx
import pytest

from tidegate_engine.engine import Engine
from tidegate_engine.serve import Process
from tidegate_engine.settings import BatchSettings
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
DISCONNECTS = 1_000 if PROVE else 60
AT_ONCE = 20
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/api/chat", "/api/generate")


def request_of(path: str, source: random.Random) -> bytes:
    text = f"{source.random()} " + "tide " * source.randint(1, 250)
    stream = source.random() < 0.5
    limits = {"max_tokens": 60, "n": source.choice((1, 1, 3))}
    bodies: dict[str, dict[str, object]] = {
        "/v1/completions": {"prompt": text, **limits},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}], **limits},
        "/v1/responses": {"input": text, "max_output_tokens": 60},
        "/api/chat": {"messages": [{"role": "user", "content": text}], "options": {"num_predict": 60}},
        "/api/generate": {"prompt": text, "options": {"num_predict": 60}},
    }
    content = json.dumps({"model": "fast", "stream": stream, **bodies[path]}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.prove
@pytest.mark.timeout(1800 if PROVE else 120)
async def test_disconnects_in_queue_prefill_and_decode_leave_all_blocks_free(
    start_engine: StartEngine, fast_profile: Profile, loops: Loops
) -> None:
    # Four at a time in small chunks: most clients wait or are in their prompt when they leave.
    small_batch = BatchSettings(4, 32, 16)
    slow = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.004))
    engine = await start_engine(profile=slow)
    loop = loops[engine]
    assert engine.state.loaded is not None
    client = engine.state.loaded.engine
    await loop.call(lambda: loop.scheduler.apply(small_batch))
    seen: set[str] = set()

    async def leave_early(seed: int) -> None:
        source = random.Random(seed)
        data = request_of(source.choice(PATHS), source)
        _, writer = await asyncio.open_connection("127.0.0.1", engine.api_port)
        # Some leave before their request is whole.
        writer.write(data if source.random() < 0.95 else data[: source.randrange(len(data))])
        await asyncio.sleep(source.expovariate(1 / 0.05))
        scheduler = loop.scheduler
        seen.update(
            name
            for name, is_so in (
                ("queue", scheduler.waiting > 0),
                ("prefill", any(r.blocks and not r.output_tokens for r in scheduler.live_requests())),
                ("decode", any(r.output_tokens for r in scheduler.live_requests())),
            )
            if is_so
        )
        writer.close()

    seeds = iter(range(DISCONNECTS))

    async def worker() -> None:
        for seed in seeds:
            await leave_early(seed)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    async with asyncio.timeout(30):
        while client.unfinished or loop.scheduler.has_work:  # noqa: ASYNC110  # the engine's thread changes it
            await asyncio.sleep(0.01)
    assert seen == {"queue", "prefill", "decode"}
    assert loop.scheduler.blocks.used == 0
    loop.scheduler.check_integrity()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30) as http:
        answer = await http.post("/v1/completions", json={"model": "fast", "prompt": "still there?", "max_tokens": 5})
    assert answer.json()["usage"]["completion_tokens"] == 5
