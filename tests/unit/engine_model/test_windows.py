"""Layers that see only a window: their blocks are given back, and every token stays transformers'.

What is given back is overwritten with NaN at once, so that whatever still looked at it would be noticed.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tidegate_engine import model_part, torch_runner
from tidegate_engine.architecture import DecoderConfig, LayerConfig, Rope
from tidegate_engine.blocks import NULL_BLOCK, BlockPool
from tidegate_engine.host_pool import HostPool
from tidegate_engine.pooling import Pooling
from tidegate_engine.request import PoolingKind, Request, SamplingParams, Window
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import kv_groups, kv_token_bytes, layer_caches, new_kv_pool

SaveFamily = Callable[[str], tuple[Path, Any]]
BLOCK = 4
GREEDY = SamplingParams(temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture(params=["compiled", "torch"])
def computing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compiled code where it is there, and by torch alone."""
    if request.param == "torch":
        monkeypatch.setattr(model_part, "native_decoder", lambda *_: None)


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate((1, 9, 37))]


def new_scheduler(
    runner: TorchRunner, *, blocks: int | None = None, caching: bool = False, host: HostPool | None = None
) -> Scheduler:
    info = runner.info
    pool = BlockPool(blocks or info.group_blocks, BLOCK, prefix_caching=caching, host=host, windows=info.kv_windows)
    return Scheduler(BatchSettings(8, 40, 14), pool, max_model_len=info.max_model_len)


def serve(
    runner: TorchRunner, prompts: Sequence[list[int]], *, scheduler: Scheduler, output: int
) -> tuple[list[list[int]], list[list[float]], int]:
    """Tokens and their logprobs of each prompt, and the most blocks that were in use."""
    requests = [
        Request(f"r{index}", len(ids), output, float(index), prompt_ids=ids, params=GREEDY)
        for index, ids in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    logprobs: dict[str, list[float]] = {request.id: [] for request in requests}
    most = 0
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        most = max(most, scheduler.blocks.used)
        for request, token, _, _ in scheduler.commit(step, runner.run(step), 0.0):
            assert token is not None and token.error is None and token.logprobs is not None
            logprobs[request.id].append(token.logprobs.logprob)
        scheduler.check_integrity()
        for part in runner._part.pool:
            part[:, :, [NULL_BLOCK, *scheduler.blocks._free]] = torch.nan
    return [request.output_ids for request in requests], list(logprobs.values()), most


def assert_as_transformers(oracle: Any, ids: list[int], output: list[int], logprobs: list[float]) -> None:
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*ids, *output]])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    assert output == logits.argmax(-1).tolist()
    found = torch.tensor(logprobs)
    torch.testing.assert_close(found, expected.gather(1, torch.tensor(output)[:, None])[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize(
    ("case", "windows"),
    [
        ("mistral-window", (11,)),
        ("phi3", (30,)),
        ("gemma2", (16, 16, None)),  # two layers of three have one: a block of one layer each
        ("gemma3", (16, 16, None)),
        ("qwen2-window", (None, 9)),
        ("llama", (None,)),
    ],
)
def test_a_model_with_windows_says_what_transformers_says_while_it_gives_blocks_back(
    save_family: SaveFamily, case: str, windows: tuple[int | None, ...]
) -> None:
    folder, oracle = save_family(case)
    runner = TorchRunner(folder, options=TorchOptions(kv_blocks=120, block_tokens=BLOCK, threads=1))
    assert runner.info.kv_windows == windows
    outputs, logprobs, _ = serve(runner, PROMPTS, scheduler=new_scheduler(runner), output=60)
    for ids, output, found in zip(PROMPTS, outputs, logprobs, strict=True):
        assert_as_transformers(oracle, ids, output, found)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("window", [1, 2, 8, 9, 10, 12, 13])
def test_the_edge_of_the_window_is_transformers_at_every_place_of_a_block(
    save_family: SaveFamily, tmp_path: Path, window: int
) -> None:
    from transformers import MistralForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(save_family("mistral-window")[0], folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    oracle = MistralForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    most = -(-(window - 1) // BLOCK) + 1
    runner = TorchRunner(folder, options=TorchOptions(kv_blocks=30, block_tokens=BLOCK, threads=1))
    # With no block more than the window needs, so that each is given back at the first moment.
    scheduler = new_scheduler(runner, blocks=1 + most)
    (output,), (logprobs,), used = serve(runner, [PROMPTS[-1]], scheduler=scheduler, output=40)
    assert used == most
    assert_as_transformers(oracle, PROMPTS[-1], output, logprobs)


@pytest.mark.usefixtures("computing")
@pytest.mark.parametrize("case", ["mistral-window", "gemma2"])
def test_a_prefix_of_a_model_with_windows_is_found_again_also_in_host_memory(
    save_family: SaveFamily, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    measured = iter([1.0, 0.0])  # a step and a copy, so that keeping blocks pays
    monkeypatch.setattr(torch_runner, "_seconds", lambda work: (work(), next(measured))[1])
    folder, oracle = save_family(case)
    options = TorchOptions(kv_blocks=24, block_tokens=BLOCK, threads=1, host_bytes=1 << 20)
    runner = TorchRunner(folder, options=options)
    host = HostPool(runner.info.host_blocks)
    scheduler = new_scheduler(runner, caching=True, host=host)
    document = prompt(9, 60)
    for question in ([5], [6, 7]):
        serve(runner, [[*document, *question]], scheduler=scheduler, output=2)
    serve(runner, [prompt(seed, 70) for seed in (50, 51, 52)], scheduler=scheduler, output=2)
    for part in runner._part.pool:
        part[:, :, list(scheduler.blocks._free)] = torch.nan
    last = Request("again", 61, 20, 9.0, prompt_ids=[*document, 8], params=GREEDY)
    scheduler.add(last)
    logprobs = []
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        for _, token, _, _ in scheduler.commit(step, runner.run(step), 0.0):
            assert token is not None and token.logprobs is not None
            logprobs.append(token.logprobs.logprob)
    assert last.num_cached == 60
    assert host.loaded_blocks > 0
    assert_as_transformers(oracle, [*document, 8], last.output_ids, logprobs)


@pytest.mark.parametrize("case", ["mistral-window", "gemma3"])
def test_the_mean_of_a_models_states_is_transformers_while_it_gives_blocks_back(
    save_family: SaveFamily, case: str
) -> None:
    folder, oracle = save_family(case)
    options = TorchOptions(
        kv_blocks=30, block_tokens=BLOCK, threads=1, pooling=Pooling(PoolingKind.MEAN, is_normalised=False)
    )
    runner = TorchRunner(folder, options=options)
    scheduler = new_scheduler(runner, caching=True)
    ids = prompt(4, 70)
    with torch.inference_mode():
        expected = oracle.model(torch.tensor([ids])).last_hidden_state[0].mean(dim=0)
    for number in range(2):  # the second takes nothing of the first one's, whose states it needs
        request = Request(f"m{number}", len(ids), 1, 0.0, prompt_ids=ids, pooling=PoolingKind.MEAN)
        scheduler.add(request)
        embedding = b""
        while scheduler.has_work:
            step = scheduler.plan(0.0)
            for _, token, _, _ in scheduler.commit(step, runner.run(step), 0.0):
                assert token is not None and token.embedding is not None
                embedding = token.embedding
            scheduler.check_integrity()
            for part in runner._part.pool:
                part[:, :, [NULL_BLOCK, *scheduler.blocks._free]] = torch.nan
        assert request.num_cached == 0
        found = torch.frombuffer(bytearray(embedding), dtype=torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_window_with_sinks_says_what_transformers_says_with_such_a_mask(save_family: SaveFamily) -> None:
    folder, oracle = save_family("llama")
    runner = TorchRunner(folder, options=TorchOptions(kv_blocks=200, block_tokens=BLOCK, threads=1))
    scheduler = new_scheduler(runner, caching=True)
    window = Window(11, sinks=3)
    ids = prompt(3, 50)
    for number in range(2):  # the second finds the first one's prefix
        windowed = Request(f"w{number}", len(ids), 30, 0.0, prompt_ids=ids, params=GREEDY, window=window)
        plain = Request(f"p{number}", len(ids), 30, 1.0, prompt_ids=ids, params=GREEDY)
        scheduler.add(windowed)
        scheduler.add(plain)
        logprobs = []
        while scheduler.has_work:
            step = scheduler.plan(0.0)
            for request, token, _, _ in scheduler.commit(step, runner.run(step), 0.0):
                assert token is not None and token.logprobs is not None
                if request is windowed:
                    logprobs.append(token.logprobs.logprob)
            scheduler.check_integrity()
            for part in runner._part.pool:
                part[:, :, [NULL_BLOCK, *scheduler.blocks._free]] = torch.nan
        assert windowed.num_cached == (48 if number else 0)
        whole = torch.tensor([[*ids, *windowed.output_ids]])
        rows = torch.arange(whole.shape[1])
        seen = (rows <= rows[:, None]) & ((rows > rows[:, None] - window.tokens) | (rows < window.sinks))
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
        with torch.inference_mode():
            logits = oracle(whole, attention_mask=mask).logits[0, len(ids) - 1 : -1]
        expected = torch.log_softmax(logits, dim=-1).gather(1, whole[0, len(ids) :, None])[:, 0]
        assert windowed.output_ids == logits.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=1e-4)
        assert windowed.output_ids != plain.output_ids


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        ("fffff", [5]),
        ("wwww", [4]),
        ("wfwfwf", [3, 3]),
        ("wwwwwfwwwwwfwwwwwfwwwwwfww", [4, 4, 4, 4, 4, 2, 4]),  # Gemma 3 1B
        ("f" + "w" * 29, [30]),  # a group for each layer would be too many
    ],
)
def test_layers_form_groups_of_one_size(layers: str, sizes: list[int]) -> None:
    config = DecoderConfig(
        tuple(LayerConfig(4, 2, 16, window=8 if kind == "w" else None) for kind in layers),
        32, 8, 100, 64, 1e-6, (Rope(10_000.0),), tied_head=True,
    )  # fmt: skip
    groups = kv_groups(config)
    assert [len(group.layers) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(layers)))
    pool = new_kv_pool(config, blocks=3 * len(groups), block_tokens=4, dtype=torch.float32, groups=groups)
    assert sum(part.nbytes for part in pool) == 3 * 4 * kv_token_bytes(config, torch.float32, groups)
    caches = layer_caches(config, pool, groups)
    own = {(cache.keys.data_ptr(), cache.group) for cache in caches}
    assert len(own) == len(layers)
