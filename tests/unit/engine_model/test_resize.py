"""The torch runner's KV cache gets another size: computed with, given back, and put right again where it cannot be."""

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import httpx
import pytest
import torch

from tidegate_engine import model_part, torch_runner, transformer
from tidegate_engine.blocks import BlockPool
from tidegate_engine.cgroup import Machine
from tidegate_engine.engine import Engine
from tidegate_engine.host_pool import HostPool
from tidegate_engine.process_memory import resident_bytes
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.serve import Process
from tidegate_engine.settings import BatchSettings
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError

BLOCK = 4
OUTPUT = 24
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
PROMPTS = [
    torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 5, 17, 30)
]


def is_done(call: asyncio.Task[str]) -> bool:
    return call.done()


def make_runner(model: Path, *, kv_blocks: int = 60, host_bytes: int = 0) -> TorchRunner:
    options = TorchOptions(kv_blocks=kv_blocks, block_tokens=BLOCK, threads=1, host_bytes=host_bytes)
    return TorchRunner(model, options=options)


def serve(runner: TorchRunner, *, sizes: Mapping[int, int], host_slots: int = 0) -> list[list[int]]:
    """Output ids of each prompt; before the step of a number in `sizes` the cache gets that size."""
    host = HostPool(host_slots) if host_slots else None
    info = runner.info
    pool = BlockPool(info.group_blocks, BLOCK, host=host, windows=info.kv_windows)
    scheduler = Scheduler(BatchSettings(16, 64, 16), pool, max_model_len=256)
    requests = [
        Request(f"r{index}", len(ids), OUTPUT, float(index), prompt_ids=ids, params=GREEDY)
        for index, ids in enumerate(PROMPTS)
    ]
    for request in requests:
        scheduler.add(request)
    number = 0
    while scheduler.has_work:
        if number in sizes:
            scheduler.preempt_all()
            runner.resize(sizes[number])
            scheduler.resize(runner.info.group_blocks)
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
        scheduler.check_integrity()
        number += 1
    return [request.output_ids for request in requests]


@pytest.mark.parametrize("compiled", [True, False])
def test_tokens_are_the_same_whatever_the_size_becomes(
    tiny_model: Path, compiled: bool, request: pytest.FixtureRequest
) -> None:
    if not compiled:
        request.getfixturevalue("uncompiled")
    undisturbed = serve(make_runner(tiny_model), sizes={})
    assert len({tuple(ids) for ids in undisturbed}) == len(PROMPTS)
    runner = make_runner(tiny_model)
    assert serve(runner, sizes={3: 200, 8: 16, 14: 61, 15: 60}) == undisturbed
    assert runner.info.kv_blocks == 60


def test_blocks_in_host_memory_are_copied_to_and_from_the_new_cache(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = serve(make_runner(tiny_model), sizes={})
    measured = iter([1.0, 0.0])  # computing a block, and copying one back
    monkeypatch.setattr(torch_runner, "_seconds", lambda work: (work(), next(measured))[1])
    runner = make_runner(tiny_model, host_bytes=1 << 20)
    assert runner.info.host_blocks > 0
    slots = runner.info.host_blocks
    assert serve(runner, sizes={5: 16, 20: 18}, host_slots=slots) == undisturbed
    assert serve(runner, sizes={}, host_slots=slots) == undisturbed


def test_the_memory_of_the_old_cache_is_given_back(tiny_model: Path) -> None:
    runner = make_runner(tiny_model, kv_blocks=80_000)
    size = 80_000 * BLOCK * runner.info.kv_token_bytes
    assert size > 100 << 20
    for part in runner._part.pool:
        part.fill_(1)
    before = resident_bytes()
    del part
    runner.resize(100)
    gc.collect()
    after = resident_bytes()
    assert before is not None and after is not None
    assert before - after > 0.9 * size
    assert runner.grown_bytes() is not None and (runner.grown_bytes() or 0) < 0.2 * size


def test_what_does_not_fit_leaves_the_old_size(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tiny_model)
    undisturbed = serve(make_runner(tiny_model), sizes={})
    block_bytes = runner.info.kv_token_bytes * BLOCK
    monkeypatch.setattr(Machine, "available_bytes", lambda self: 100 * block_bytes)
    assert runner.most_kv_blocks(written=20) == 96, "four fifths of what there is, what is written among it"
    with pytest.raises(ModelError, match=r"KvCacheTooLarge: a KV cache of 101 blocks takes .*; it has 60 blocks again"):
        runner.resize(101)
    assert runner.info.kv_blocks == 60
    assert serve(runner, sizes={}) == undisturbed
    monkeypatch.undo()
    makes = transformer.new_kv_pool

    def fail_once(*arguments: object, **options: object) -> object:
        monkeypatch.setattr(model_part, "new_kv_pool", makes)
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(model_part, "new_kv_pool", fail_once)
    with pytest.raises(ModelError, match=r"ResizeFailed: .*Cannot allocate memory; it has 60 blocks again"):
        runner.resize(70)
    assert serve(runner, sizes={}) == undisturbed


@pytest.mark.parametrize("mode", ["recompute", "drain"])
async def test_greedy_answers_over_http_are_those_of_an_undisturbed_server(
    start_engine: Callable[..., Awaitable[Process]],
    tiny_model: Path,
    admin_keys_file: Path,
    admin_headers: Callable[[], dict[str, str]],
    loops: Mapping[Process, Engine],
    mode: str,
) -> None:
    runner = make_runner(tiny_model, kv_blocks=80)
    engine = await start_engine(
        runner=runner, tokenizer=load_tokenizer(tiny_model), served_names=("tiny",), admin_keys=admin_keys_file
    )
    loop = loops[engine]
    url = f"http://127.0.0.1:{engine.admin_port}/admin/v1/resize"

    async def ask(client: httpx.AsyncClient, ids: list[int]) -> str:
        body = {"model": "tiny", "prompt": ids, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
        text = ""
        async with client.stream("POST", f"http://127.0.0.1:{engine.api_port}/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                assert "error" not in line
                text += line
        assert text.endswith("[DONE]")
        return "".join(part.partition('"')[0] for part in text.split('"text":"')[1:])

    async with httpx.AsyncClient(timeout=60, headers=admin_headers()) as client:
        undisturbed = [await ask(client, ids) for ids in PROMPTS]
        assert len(set(undisturbed)) == len(PROMPTS)
        calls = [asyncio.create_task(ask(client, ids)) for ids in PROMPTS * 3]
        low = (await client.get(url)).json()["allowed"][0]
        assert low == 65, "a context of 256 tokens, and the null block"
        for size in (low, 300, 80):
            before = loop.metrics.counts.generation_tokens
            async with asyncio.timeout(30):
                while loop.metrics.counts.generation_tokens < before + 20 and not all(map(is_done, calls)):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            answer = await client.post(url, json={"kv_blocks": size, "mode": mode})
            assert answer.status_code == 202, answer.text
            async with asyncio.timeout(60):
                while (body := (await client.get(url)).json())["phase"] != "idle":  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            assert (body["last"]["result"], body["kv_blocks"], runner.info.kv_blocks) == ("done", size, size)
        assert await asyncio.gather(*calls) == undisturbed * 3
    assert (loop.scheduler.preemptions["policy"] > 0) == (mode == "recompute")
    await loop.call(loop.scheduler.check_integrity)
    assert loop.scheduler.blocks.used == 0
