"""However a request is cut, batched, cached or interrupted, it gets the tokens that it gets alone."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidegate_engine import torch_runner
from tidegate_engine.blocks import BlockPool
from tidegate_engine.engine import build_engine
from tidegate_engine.host_pool import HostPool
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.precision import Precision
from tidegate_engine.request import FinishReason, Request, SamplingParams, Step, StepItem
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import DEFAULT_PATTERNS, BatchSettings, Envelope, SettingsFile
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import build_decoder, forward, layer_caches, new_kv_pool
from tidegate_engine.weights import ModelError
from tidegate_engine.weights_gguf import load_gguf
from tidegate_kernels import native
from tidegate_kernels.reference import ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BLOCK = 4
OUTPUT = 12
GREEDY = SamplingParams(temperature=0, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def runner(tiny_model: Path) -> TorchRunner:
    return TorchRunner(tiny_model, options=TorchOptions(kv_blocks=200, block_tokens=BLOCK, threads=1))


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate((1, 4, 5, 17, 30, 44))]


def new_scheduler(
    *,
    budget: int = 512,
    chunk: int = 512,
    blocks: int = 200,
    caching: bool = False,
    speculation: NgramSpeculation | None = None,
) -> Scheduler:
    pool = BlockPool(blocks, BLOCK, prefix_caching=caching)
    return Scheduler(BatchSettings(16, budget, chunk), pool, max_model_len=256, speculation=speculation)


def serve(
    runner: TorchRunner,
    prompts: Sequence[Sequence[int]],
    *,
    scheduler: Scheduler | None = None,
    params: SamplingParams = GREEDY,
    output: int = OUTPUT,
) -> list[list[int]]:
    """Output ids of each prompt, all served together."""
    scheduler = scheduler or new_scheduler()
    requests = [
        Request(f"r{index}", len(ids), output, float(index), prompt_ids=ids, params=params)
        for index, ids in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
        scheduler.check_integrity()
    assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * len(requests)
    return [request.output_ids for request in requests]


@pytest.fixture(scope="module")
def alone(runner: TorchRunner) -> list[list[int]]:
    return [serve(runner, [ids])[0] for ids in PROMPTS]


def test_outputs_of_different_prompts_differ(alone: list[list[int]]) -> None:
    assert len({tuple(ids) for ids in alone}) == len(PROMPTS)
    assert max(len(set(ids)) for ids in alone) > 4


def test_a_batch_gives_each_request_what_it_gets_alone(runner: TorchRunner, alone: list[list[int]]) -> None:
    assert serve(runner, PROMPTS) == alone


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 16, 43, 44])
def test_a_prompt_in_chunks_gives_what_it_gives_whole(runner: TorchRunner, alone: list[list[int]], chunk: int) -> None:
    assert serve(runner, PROMPTS, scheduler=new_scheduler(budget=16 + chunk, chunk=chunk)) == alone


def test_a_prefix_hit_gives_what_a_miss_gives(runner: TorchRunner, alone: list[list[int]]) -> None:
    scheduler = new_scheduler(caching=True)
    assert serve(runner, PROMPTS, scheduler=scheduler) == alone
    again = Request("again", len(PROMPTS[-1]), OUTPUT, 9.0, prompt_ids=PROMPTS[-1], params=GREEDY)
    scheduler.add(again)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, runner.run(step), 0.0)
    assert again.num_cached >= 40
    assert again.output_ids == alone[-1]


@pytest.mark.parametrize(("slots", "kv"), [(8, "auto"), (200, "auto"), (200, "fp8")])
def test_a_prefix_that_was_in_host_memory_gives_what_a_miss_gives(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, slots: int, kv: str
) -> None:
    measured = iter([1.0, 0.0])  # a step and a copy, so that keeping blocks pays
    monkeypatch.setattr(torch_runner, "_seconds", lambda work: (work(), next(measured))[1])
    token_bytes = {"auto": 4 * 96, "fp8": 96 + 48}[kv]
    options = TorchOptions(
        precision=Precision(kv=kv), kv_blocks=40, block_tokens=BLOCK, threads=1, host_bytes=slots * BLOCK * token_bytes
    )
    runner = TorchRunner(tiny_model, options=options)
    assert (runner.info.kv_token_bytes, runner.info.host_blocks) == (token_bytes, slots)
    missed = serve(runner, PROMPTS[-1:], scheduler=new_scheduler(blocks=40))
    host = HostPool(slots)
    pool = BlockPool(40, BLOCK, host=host)
    scheduler = Scheduler(BatchSettings(4, 512, 512), pool, max_model_len=256)
    assert serve(runner, PROMPTS[-1:], scheduler=scheduler) == missed
    serve(runner, [prompt(seed, 60) for seed in (50, 51)], scheduler=scheduler)  # more than the cache beside it
    for part in runner._part.pool:
        part[:, :, pool._free] = 0
    assert serve(runner, PROMPTS[-1:], scheduler=scheduler) == missed
    assert host.stored_blocks > 0 and host.loaded_blocks > 0


def test_blocks_that_are_faster_computed_than_copied_are_not_kept(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_runner, "_seconds", lambda work: (work(), 1.0)[1])
    runner = TorchRunner(
        tiny_model, options=TorchOptions(kv_blocks=40, block_tokens=BLOCK, threads=1, host_bytes=1 << 20)
    )
    assert runner.info.host_blocks == 0


def test_more_host_memory_than_there_is_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="HostPoolTooLarge"):
        TorchRunner(tiny_model, options=TorchOptions(kv_blocks=40, block_tokens=BLOCK, host_bytes=1 << 50))


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempted_requests_end_as_undisturbed_ones(runner: TorchRunner, params: SamplingParams) -> None:
    undisturbed = [serve(runner, [ids], params=params, output=60)[0] for ids in PROMPTS[:4]]
    scheduler = new_scheduler(blocks=30)
    assert serve(runner, PROMPTS[:4], scheduler=scheduler, params=params, output=60) == undisturbed
    assert scheduler.preemptions["kv"] > 0


def test_a_seeded_request_does_not_depend_on_its_batch(runner: TorchRunner) -> None:
    batch = serve(runner, PROMPTS, params=SEEDED)
    assert batch == [serve(runner, [ids], params=SEEDED)[0] for ids in PROMPTS]
    assert batch != serve(runner, PROMPTS, params=dataclasses.replace(SEEDED, seed=12))


REPETITIVE = [[5, 6, 7] * 7, [*PROMPTS[3], *PROMPTS[3]], [9] * 11, [*PROMPTS[4][:9], 4, *PROMPTS[4][:9]]]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_guessing_ahead_changes_no_token_also_under_preemption(runner: TorchRunner, params: SamplingParams) -> None:
    # A random model that has few words to say repeats itself.
    params = dataclasses.replace(params, logit_bias=tuple((token_id, 100.0) for token_id in (5, 6, 7, 9)))
    alone = [serve(runner, [ids], params=params, output=60)[0] for ids in REPETITIVE]
    speculation = NgramSpeculation(4, 1, 3)
    scheduler = new_scheduler(speculation=speculation)
    assert serve(runner, REPETITIVE, scheduler=scheduler, params=params, output=60) == alone
    assert 20 < scheduler.accepted_tokens < scheduler.drafted_tokens
    tight = new_scheduler(blocks=45, speculation=speculation, caching=True)
    tight._reserve_ratio = 0.0
    assert serve(runner, REPETITIVE, scheduler=tight, params=params, output=60) == alone
    assert tight.preemptions["kv"] > 0


HEADS = [prompt(seed, 24) for seed in (70, 71)]
_ALONE: dict[tuple[tuple[int, ...], int], list[int]] = {}
"""Outputs of requests that were served by themselves."""


def alone_output(runner: TorchRunner, ids: Sequence[int], output: int) -> list[int]:
    key = (tuple(ids), output)
    if key not in _ALONE:
        _ALONE[key] = serve(runner, [ids], output=output)[0]
    return _ALONE[key]


BATCHES = st.builds(
    lambda seqs, extra, chunk: BatchSettings(seqs, seqs + extra, chunk),
    st.integers(1, 6), st.integers(0, 40), st.integers(1, 40),
)  # fmt: skip
CALLS = st.tuples(st.sampled_from(HEADS), st.integers(1, 24), st.lists(st.integers(3, 9), max_size=12))


@pytest.mark.prove
@pytest.mark.timeout(3600)
@hypothesis_settings(
    max_examples=400 if PROVE else 8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    calls=st.lists(CALLS, min_size=1, max_size=6),
    batches=st.lists(BATCHES, min_size=1, max_size=4),
    every=st.integers(1, 12),
    blocks=st.integers(16, 60),
    caching=st.booleans(),
    speculation=st.sampled_from([None, NgramSpeculation(4, 1, 2)]),
    aborts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=2),
    output=st.sampled_from([1, 12, 20]),
)
def test_no_schedule_changes_a_token_or_loses_a_block(
    runner: TorchRunner,
    calls: list[tuple[list[int], int, list[int]]],
    batches: list[BatchSettings],
    every: int,
    blocks: int,
    caching: bool,
    speculation: NgramSpeculation | None,
    aborts: list[tuple[int, int]],
    output: int,
) -> None:
    """Chunks, batches, prefix hits, guesses, preemptions, aborts and settings that change while requests run."""
    prompts = [[*head[:shared], *tail] for head, shared, tail in calls]
    pool = BlockPool(blocks, BLOCK, prefix_caching=caching)
    scheduler = Scheduler(batches[0], pool, max_model_len=256, speculation=speculation)
    scheduler._reserve_ratio = 0.0  # so that some are preempted
    requests = [
        Request(f"r{index}", len(ids), output, float(index), prompt_ids=ids, params=GREEDY)
        for index, ids in enumerate(prompts)
    ]
    for request in requests:
        scheduler.add(request)
    gone = set()
    steps = 0
    while scheduler.has_work:
        if steps % every == 0:
            scheduler.apply(batches[steps // every % len(batches)])
        step = scheduler.plan(0.0)
        assert step.items
        for index, when in aborts:
            if when == steps and index < len(requests) and scheduler.abort(f"r{index}") is not None:
                gone.add(f"r{index}")
        live = tuple(item for item in step.items if item.request.id not in gone)
        scheduler.commit(step, runner.run(Step(step.id, live, step.settings_version)) if live else {}, 0.0)
        scheduler.check_integrity()
        assert pool.used + pool.cached + pool.free == pool.usable
        steps += 1
    assert pool.used == 0
    for request, ids in zip(requests, prompts, strict=True):
        expected = alone_output(runner, ids, output)
        assert request.output_ids == (expected[: request.output_tokens] if request.id in gone else expected)


def test_the_paged_cache_gives_what_whole_recomputation_gives(
    tiny_model: Path, runner: TorchRunner, alone: list[list[int]]
) -> None:
    config, parameters = load_gguf(tiny_model, dtype=torch.float32)
    decoder = build_decoder(config, parameters)
    for ids, expected in zip(PROMPTS, alone, strict=True):
        known = list(ids)
        for _ in range(OUTPUT):
            caches = layer_caches(config, new_kv_pool(config, blocks=1, block_tokens=len(known), dtype=torch.float32))
            batch = ragged_batch([len(known)], [len(known)], [[0]], cache=caches[0])
            with torch.inference_mode():
                logits = forward(
                    decoder, torch.tensor(known), batch, caches=caches, logits_rows=torch.tensor([len(known) - 1])
                )
            known.append(int(logits.argmax()))
        assert known[len(ids) :] == expected


def test_what_an_earlier_request_left_in_a_block_reaches_no_later_one(tiny_model: Path, alone: list[list[int]]) -> None:
    runner = TorchRunner(tiny_model, options=TorchOptions(kv_blocks=40, block_tokens=BLOCK, threads=1))
    for part in runner._part.pool:
        part.fill_(torch.nan)
    assert serve(runner, PROMPTS[:3], scheduler=new_scheduler(blocks=40)) == alone[:3]


def test_logits_that_are_not_finite_end_their_own_request_only(tiny_model: Path, alone: list[list[int]]) -> None:
    runner = TorchRunner(tiny_model, options=TorchOptions(kv_blocks=40, block_tokens=BLOCK, threads=1))
    healthy = Request("healthy", len(PROMPTS[3]), OUTPUT, 0.0, prompt_ids=PROMPTS[3], params=GREEDY)
    sick = Request("sick", 4, OUTPUT, 0.0, prompt_ids=PROMPTS[1], params=GREEDY)
    runner.run(Step(1, (StepItem(sick, 0, 3, False, [1]),), 1))
    for part in runner._part.pool:
        part[:, :, 1] = torch.nan
    items = (StepItem(sick, 3, 1, True, [1]), StepItem(healthy, 0, 17, True, [2, 3, 4, 5, 6]))
    tokens = runner.run(Step(2, items, 1))
    assert tokens["sick"].error == "the model's logits are not finite"
    assert tokens["healthy"].error is None
    assert tokens["healthy"].token_id == alone[3][0]


def test_the_facts_about_the_model_are_those_of_the_file(runner: TorchRunner) -> None:
    info = runner.info
    assert (info.name, info.layers, info.kv_heads, info.head_size) == ("tiny", 2, 3, 8)
    assert (info.max_model_len, info.kv_blocks, info.block_tokens) == (256, 200, BLOCK)
    assert info.kv_token_bytes == 2 * 2 * 3 * 8 * 4
    assert info.eos_token_ids == (2,)
    assert set(runner.start_seconds) == {"weights", "warmup"}


def test_bfloat16_halves_the_bytes_and_serves(tiny_model: Path, runner: TorchRunner) -> None:
    half = TorchRunner(
        tiny_model, options=TorchOptions(precision=Precision(dtype="bfloat16"), kv_blocks=200, block_tokens=BLOCK)
    )
    assert half.info.weight_dtype == half.info.kv_dtype == "bfloat16"
    # Where torch multiplies, the tied head is laid out in fp32 beside the embedding.
    beside = 4 * half.info.vocab_size * 72 if native.library() is None else 0
    assert half.info.weight_bytes * 2 == runner.info.weight_bytes - beside
    assert [len(ids) for ids in serve(half, PROMPTS)] == [OUTPUT] * len(PROMPTS)


def test_a_context_beyond_the_models_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="ContextTooLong: a context of 300 tokens is asked for, and the model has 256"):
        TorchRunner(tiny_model, options=TorchOptions(kv_blocks=10, max_model_len=300))


def test_kernels_that_there_are_none_of_and_those_without_a_gpu_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelError, match=r"KernelsUnknown: .* choose auto, torch or triton"):
        TorchRunner(tiny_model, options=TorchOptions(kernels="cuda"))
    with pytest.raises(ModelError, match=r"KernelsNeedGpu: .* TRITON_INTERPRET=1"):
        TorchRunner(tiny_model, options=TorchOptions(kernels="triton"))


def test_a_cache_without_a_usable_block_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="KvCacheTooSmall: a KV cache needs 2 blocks"):
        TorchRunner(tiny_model, options=TorchOptions(kv_blocks=1))


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_loaded(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidegate_engine.cgroup import Machine

    monkeypatch.setattr(Machine, "available_bytes", lambda self: 100_000)
    with pytest.raises(ModelError, match="ModelTooLarge: the weights take"):
        TorchRunner(tiny_model)


def test_a_cache_takes_its_share_of_the_memory_that_is_left(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, runner: TorchRunner
) -> None:
    from tidegate_engine.cgroup import Machine

    monkeypatch.setattr(Machine, "available_bytes", lambda self: 10_000_000)
    blocks = TorchRunner(tiny_model, options=TorchOptions(block_tokens=BLOCK)).info.kv_blocks
    assert blocks == 5_000_000 // (runner.info.kv_token_bytes * BLOCK)


def test_the_memory_of_steps_is_told_apart_from_that_of_weights_and_cache(tiny_model: Path) -> None:
    options = TorchOptions(kv_blocks=2000, block_tokens=BLOCK, threads=1)
    engine = build_engine(
        TorchRunner(tiny_model, options=options),
        SettingsFile(0, BatchSettings(16, 512, 512), Envelope(), DEFAULT_PATTERNS),
    )
    info, scheduler = engine.runner.info, engine.scheduler
    assert isinstance(engine.runner, TorchRunner)
    serve(engine.runner, PROMPTS, scheduler=scheduler)
    memory = engine.report().snapshot.memory_bytes
    assert memory["weights"] == info.weight_bytes
    assert memory["kv"] == 2000 * BLOCK * info.kv_token_bytes
    assert 0 <= memory["workspace"] < 64 << 20
    before = memory["workspace"]
    kept = bytearray(200 << 20)  # what a step would take: memory that is neither weights nor cache
    grown = engine.report().snapshot.memory_bytes["workspace"] - before
    assert 150 << 20 < grown < 250 << 20
    del kept
    assert engine.report().snapshot.memory_bytes["workspace"] - before > 0.9 * grown  # the most that it ever was
