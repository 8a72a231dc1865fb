"""The embeddings API over real sockets: shapes, encodings, refusals, batches, clients that leave. The numbers are made
up here; that a model's are right is shown beside the models."""

import asyncio
import base64
import math
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import ollama
import openai
import pytest

from tidegate_engine.engine import Engine
from tidegate_engine.live_policy import LivePolicy
from tidegate_engine.modelled_runner import ModelledRunner, model_info
from tidegate_engine.pooled_batcher import PooledLimits
from tidegate_engine.request import PoolingKind, SampledToken, Step
from tidegate_engine.serve import Process
from tidegate_engine.steptime import Profile

StartEngine = Callable[..., Awaitable[Process]]
Loops = Mapping[Process, Engine]
SIZE = 4


class PoolingRunner(ModelledRunner):
    """Gives a prompt (tokens, first id, last id, 1) as its embedding, of the length one; counts what a step ended."""

    def __init__(self, profile: Profile) -> None:
        info = model_info(
            profile, block_tokens=profile.block_tokens, kv_blocks=profile.kv_blocks, max_model_len=profile.max_model_len
        )
        super().__init__(profile, replace(info, embedding_size=SIZE, pooling=PoolingKind.LAST))
        self.batches: list[int] = []

    def run(self, step: Step) -> Mapping[str, SampledToken]:
        tokens = dict(super().run(step))
        pooled = [item for item in step.items if item.request.pooling is not None]
        self.batches += [len(pooled)] if pooled else []
        for item in pooled:
            if item.samples:
                ids = item.request.prompt_ids
                tokens[item.request.id] = SampledToken(-1, embedding=struct.pack("<4f", *unit(ids)))
        return tokens


def unit(ids: Any) -> list[float]:
    numbers = [len(ids), ids[0] % 97, ids[-1] % 89, 1]
    return [number / math.hypot(*numbers) for number in numbers]


@pytest.fixture
def runner(fast_profile: Profile) -> PoolingRunner:
    return PoolingRunner(fast_profile)


@pytest.fixture
async def engine(start_engine: StartEngine, runner: PoolingRunner) -> Process:
    return await start_engine(runner=runner)


def client_of(engine: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none", max_retries=0)


def http_of(engine: Process) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{engine.api_port}", timeout=30)


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize(
    ("inputs", "prompts"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        ("abcdefgh", [[0x161626364, 0x165666768]]),
        (["abcd", "efgh"], [[0x161626364], [0x165666768]]),
    ],
    ids=["ids", "lists of ids", "text", "texts"],
)
async def test_every_kind_of_input_comes_back_in_its_order_in_both_encodings(
    engine: Process, inputs: Any, prompts: list[list[int]], encoding: Any
) -> None:
    async with client_of(engine) as client:
        answer = await client.embeddings.create(model="fast", input=inputs, encoding_format=encoding)
    assert [row.index for row in answer.data] == list(range(len(prompts)))
    for row, ids in zip(answer.data, prompts, strict=True):
        numbers: Any = row.embedding
        if isinstance(numbers, str):
            numbers = struct.unpack("<4f", base64.b64decode(numbers))
        assert numbers == pytest.approx(unit(ids), abs=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts))


async def test_dimensions_give_the_first_numbers_with_the_length_one(engine: Process) -> None:
    async with client_of(engine) as client:
        cut = await client.embeddings.create(model="fast", input=[5, 6, 7], dimensions=2)
        assert cut.data[0].embedding == pytest.approx(
            [n / math.hypot(*unit([5, 6, 7])[:2]) for n in unit([5, 6, 7])[:2]]
        )
        with pytest.raises(openai.BadRequestError, match=r"dimensions is 5.*have 4"):
            await client.embeddings.create(model="fast", input="x", dimensions=5)


async def test_an_input_may_fill_the_context_and_one_that_is_longer_is_refused_with_both_numbers(
    engine: Process,
) -> None:
    async with client_of(engine) as client:
        full = await client.embeddings.create(model="fast", input=list(range(1, 513)))
        assert full.usage.prompt_tokens == 512
        with pytest.raises(openai.BadRequestError, match=r"input 1 has 513 tokens.*holds 512"):
            await client.embeddings.create(model="fast", input=[[1], list(range(513))])
        with pytest.raises(openai.BadRequestError, match="input 0 is empty"):
            await client.embeddings.create(model="fast", input="")
        body = {"truncate_prompt_tokens": 2}
        cut = await client.embeddings.create(model="fast", input=[5, 6, 7, 8], extra_body=body)
        assert cut.usage.prompt_tokens == 2
        assert cut.data[0].embedding == pytest.approx(unit([7, 8]), abs=1e-6)


async def test_an_engine_that_makes_its_text_up_says_so(start_engine: StartEngine) -> None:
    engine = await start_engine()
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError, match="computes no embeddings"):
            await client.embeddings.create(model="fast", input="x")
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="x")


async def test_inputs_of_several_calls_are_computed_together(start_engine: StartEngine, runner: PoolingRunner) -> None:
    """A wait that is longer than the test: they go since they have enough tokens together, in one step."""
    engine = await start_engine(runner=runner, pooled=PooledLimits(max_tokens=12, max_wait_seconds=60.0))
    async with client_of(engine) as client:
        calls = [client.embeddings.create(model="fast", input=[number, 1, 2]) for number in range(1, 5)]
        answers = await asyncio.gather(*calls)
    assert [answer.data[0].embedding for answer in answers] == [
        pytest.approx(unit([number, 1, 2]), abs=1e-6) for number in range(1, 5)
    ]
    assert runner.batches == [4]


async def test_a_long_list_is_computed_a_few_inputs_at_a_time_whatever_the_queue_holds(
    start_engine: StartEngine, runner: PoolingRunner
) -> None:
    engine = await start_engine(runner=runner, policy=LivePolicy(max_num_queued_reqs=64))
    inputs = [[1 + number % 7, number] for number in range(1, 201)]
    async with client_of(engine) as client:
        answer = await client.embeddings.create(model="fast", input=inputs)
    assert [row.embedding for row in answer.data] == [pytest.approx(unit(ids), abs=1e-6) for ids in inputs]
    assert max(runner.batches) <= 32


async def test_generation_goes_on_beside_them_and_both_are_counted(engine: Process) -> None:
    async with client_of(engine) as client:
        text = asyncio.create_task(client.completions.create(model="fast", prompt="the tide", max_tokens=30))
        embeddings = await client.embeddings.create(model="fast", input=[[1, 2, 3]] * 20)
        assert len(embeddings.data) == 20
        usage = (await text).usage
        assert usage is not None and usage.completion_tokens == 30
    async with http_of(engine) as http:
        page = (await http.get("/metrics")).text
    assert "tidegate_engine_pooled_requests_total 20.0" in page
    assert 'tidegate_engine_requests_finished_total{isl="0",osl="0",reason="stop"} 20.0' in page
    assert "tidegate_engine_generation_tokens_total 30.0" in page, "an embedding is no token"
    assert 'tidegate_engine_ttft_seconds_count{isl="0"} 1.0' in page


@pytest.mark.parametrize("held", [True, False], ids=["while it waits", "while it is computed"])
async def test_a_client_that_leaves_frees_everything(
    start_engine: StartEngine, fast_profile: Profile, loops: Loops, held: bool
) -> None:
    slow = replace(fast_profile, step=replace(fast_profile.step, base_seconds=0.05))
    wait = PooledLimits(max_wait_seconds=60.0) if held else PooledLimits(max_tokens=1)
    engine = await start_engine(runner=PoolingRunner(slow), pooled=wait)
    loop = loops[engine]
    assert engine.state.loaded is not None
    client = engine.state.loaded.engine
    async with http_of(engine) as http:
        call = asyncio.create_task(http.post("/v1/embeddings", json={"model": "fast", "input": [[1, 2, 3]] * 100}))
        async with asyncio.timeout(20):
            while not client.unfinished:  # noqa: ASYNC110  # another task changes it
                await asyncio.sleep(0.005)
        call.cancel()
        async with asyncio.timeout(20):
            while client.unfinished or loop.scheduler.has_work:  # noqa: ASYNC110  # the engine's thread changes it
                await asyncio.sleep(0.005)
    assert loop.scheduler.blocks.used == 0 and loop.status().waiting == 0
    loop.scheduler.check_integrity()


async def test_ollamas_client_gets_embeddings_too(engine: Process) -> None:
    client = ollama.AsyncClient(host=f"http://127.0.0.1:{engine.api_port}")
    answer = await client.embed(model="fast", input=["abcd", "efgh"])
    assert [list(row) for row in answer.embeddings] == [
        pytest.approx(unit([0x161626364]), abs=1e-6), pytest.approx(unit([0x165666768]), abs=1e-6),
    ]  # fmt: skip
    assert answer.prompt_eval_count == 2
    assert "embedding" in ((await client.show("fast")).capabilities or [])
