"""The load generator: its plan, and a real exchange with an aiohttp server in this process."""

import asyncio
import json
import random
import subprocess
import sys

import pytest
from aiohttp import web

from tidegate_engine.load_client import Endpoint
from tidegate_local import load

SHORT = load.TrafficClass("short", (10, 20), (2, 4))
LONG = load.TrafficClass("long", (2000, 3000), (5, 6), share=3.0)


def test_the_file_runs_in_the_operators_image_which_has_neither_the_demo_nor_a_server() -> None:
    command = f"import runpy, sys; runpy.run_path({load.__file__!r}); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"tidegate_local", "torch", "fastapi", "uvicorn", "orjson", "openai", "rich"}
    assert "aiohttp" in loaded


def phase(name: str, seconds: float, rate: float) -> load.Phase:
    return load.Phase(name, seconds, rate, (SHORT, LONG))


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    phases = (phase("a", 30, 5), phase("b", 30, 1))
    assert load.plan(phases, random.Random(7)) == load.plan(phases, random.Random(7))
    assert load.plan(phases, random.Random(7)) != load.plan(phases, random.Random(8))


def test_arrivals_keep_to_their_phase_its_rate_and_its_mix() -> None:
    planned = load.plan((phase("a", 100, 10), phase("silent", 50, 0), phase("b", 100, 2)), random.Random(1))
    first = [request for request in planned if request.phase == "a"]
    second = [request for request in planned if request.phase == "b"]
    assert 850 < len(first) < 1150 and 150 < len(second) < 260
    assert all(request.at_seconds < 100 for request in first)
    assert all(150 <= request.at_seconds < 250 for request in second)
    assert 0.65 < sum(request.traffic_class == "long" for request in first) / len(first) < 0.85
    assert all(2000 <= request.input_tokens <= 3000 for request in first if request.traffic_class == "long")


def test_phases_survive_a_round_trip_through_json() -> None:
    phases = (phase("a", 1.5, 2.5),)
    assert load.parse_phases(json.loads(load.phases_json(phases))) == phases


@pytest.mark.parametrize("wrong", [{}, [], [{"name": "a"}], [{"name": "a", "seconds": "x"}]])
def test_wrong_phases_are_refused_with_a_sentence(wrong: object) -> None:
    with pytest.raises(ValueError, match="phases are not as expected"):
        load.parse_phases(wrong)


def test_prompts_have_the_asked_length_and_share_no_prefix() -> None:
    requests = [load.PlannedRequest(n, 0.0, "a", "short", 100, 1) for n in range(3)]
    prompts = [load.prompt_text(request, seed=1, characters_per_token=4) for request in requests]
    assert all(len(prompt) == 400 for prompt in prompts)
    assert len({prompt[:16] for prompt in prompts}) == 3


async def answer(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    tokens = body["max_tokens"]
    if tokens == 11:
        return web.json_response({"error": {"message": "too long"}}, status=400)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for n in range(tokens):
        reason = "length" if n == tokens - 1 else None
        event = {"choices": [{"text": "error", "finish_reason": reason}]}
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if tokens == 12 and n == 3:
            await response.write(b'data: {"error": {"message": "drained"}}\n\ndata: [DONE]\n\n')
            return response
        if tokens == 13 and n == 3:
            return response
        if tokens == 14 and n == 3:
            assert request.transport is not None
            request.transport.abort()
            return response
    usage = {"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": len(body["prompt"]) // 4}}
    await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def exchange(output_tokens: int) -> tuple[list[load.Outcome], list[dict[str, object]]]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    kind = load.TrafficClass("k", (50, 50), (output_tokens, output_tokens))
    records: list[dict[str, object]] = []
    outcomes = await load.run(
        (load.Phase("p", 0.2, 40, (kind,)),),
        Endpoint(f"http://127.0.0.1:{port}", "m", timeout_seconds=5),
        seed=3,
        report=records.append,
    )
    await runner.cleanup()
    return outcomes, records


def test_a_good_stream_is_measured_and_recorded() -> None:
    outcomes, records = asyncio.run(exchange(5))
    assert outcomes and all(outcome.failure is None for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.output_tokens == 5 and outcome.prompt_tokens_counted == 50 and outcome.finish_reason == "length"
        assert outcome.ttft_seconds is not None and outcome.e2e_seconds is not None
        assert 0 <= outcome.ttft_seconds <= outcome.e2e_seconds
    assert [record["kind"] for record in records if record["kind"] != "request"] == ["phase", "end"]
    assert {load.outcome_of(record) for record in records if record["kind"] == "request"} == set(outcomes)


@pytest.mark.parametrize(
    ("output_tokens", "failure"),
    [(11, "HTTP 400"), (12, "error in the stream"), (13, "cut"), (14, "Client")],
)
def test_every_kind_of_failure_is_counted_as_one(output_tokens: int, failure: str) -> None:
    outcomes, _ = asyncio.run(exchange(output_tokens))
    assert outcomes and all(outcome.failure and failure in outcome.failure for outcome in outcomes)
    assert load.summarise(outcomes).failed == len(outcomes)


def test_a_refused_connection_is_a_failure_not_an_exception() -> None:
    endpoint = Endpoint("http://127.0.0.1:9", "m", timeout_seconds=2)
    outcomes = asyncio.run(
        load.run((load.Phase("p", 0.1, 50, (SHORT,)),), endpoint, seed=1, report=lambda record: None)
    )
    assert outcomes and all(outcome.failure for outcome in outcomes)
