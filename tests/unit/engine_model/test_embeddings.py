"""Embeddings are transformers' hidden states, pooled: however they are cut, batched, cached or interrupted."""

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import torch.nn.functional as F

from tidegate_engine.blocks import BlockPool
from tidegate_engine.pooling import Pooling, parse_pooler_config, pooling_of_folder, pooling_of_metadata
from tidegate_engine.request import FinishReason, PoolingKind, Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.serve import Process
from tidegate_engine.settings import BatchSettings
from tidegate_engine.tokenizer import load_tokenizer
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError

StartEngine = Callable[..., Awaitable[Process]]
BLOCK = 4
CASES = ("llama-tied", "qwen3", "mistral-window")
KINDS = tuple(PoolingKind)
LENGTHS = (1, 4, 5, 17, 60)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 150, (length,), generator=generator).tolist() for length in LENGTHS]


def new_scheduler(*, budget: int = 512, chunk: int = 512, blocks: int = 100, caching: bool = False) -> Scheduler:
    pool = BlockPool(blocks, BLOCK, prefix_caching=caching)
    return Scheduler(BatchSettings(16, budget, chunk), pool, max_model_len=256)


def embed(
    runner: TorchRunner, inputs: Sequence[Sequence[int]], kind: PoolingKind, *, scheduler: Scheduler | None = None
) -> torch.Tensor:
    """Embeddings `[inputs, hidden]`, all computed together."""
    scheduler = scheduler or new_scheduler()
    requests = [
        Request(f"r{index}", len(ids), 1, float(index), prompt_ids=ids, pooling=kind)
        for index, ids in enumerate(inputs)
    ]
    for request in requests:
        scheduler.add(request)
    found: dict[str, bytes] = {}
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        for event in scheduler.commit(step, runner.run(step), 0.0):
            assert event.token is not None and event.token.embedding is not None
            found[event.request.id] = event.token.embedding
        scheduler.check_integrity()
    assert {request.finish_reason for request in requests} == {FinishReason.STOP}
    return torch.stack([torch.frombuffer(bytearray(found[request.id]), dtype=torch.float32) for request in requests])


def pooled(states: torch.Tensor, kind: PoolingKind) -> torch.Tensor:
    chosen = {PoolingKind.LAST: states[-1], PoolingKind.CLS: states[0], PoolingKind.MEAN: states.mean(dim=0)}
    return F.normalize(chosen[kind].float(), dim=0)


@pytest.fixture(scope="module")
def runners(save_family: Callable[[str], tuple[Path, Any]]) -> dict[str, tuple[TorchRunner, Any]]:
    options = TorchOptions(kv_blocks=100, block_tokens=BLOCK, threads=1)
    return {case: (TorchRunner(save_family(case)[0], options=options), save_family(case)[1]) for case in CASES}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_embeddings_are_the_pooled_hidden_states_of_transformers(
    runners: dict[str, tuple[TorchRunner, Any]], case: str, kind: PoolingKind
) -> None:
    runner, model = runners[case]
    with torch.inference_mode():
        states = [model.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts()]
    expected = torch.stack([pooled(each, kind) for each in states])
    torch.testing.assert_close(embed(runner, prompts(), kind), expected, atol=1e-4, rtol=1e-4)


def test_a_file_of_the_decoder_alone_is_read(runners: dict[str, tuple[TorchRunner, Any]], tmp_path: Path) -> None:
    """As embedding models are saved: no head, and no `model.` before the names."""
    runner, model = runners["llama-tied"]
    model.model.save_pretrained(tmp_path)
    alone = TorchRunner(tmp_path, options=TorchOptions(kv_blocks=100, block_tokens=BLOCK, threads=1))
    torch.testing.assert_close(embed(alone, prompts(), PoolingKind.LAST), embed(runner, prompts(), PoolingKind.LAST))


def test_a_model_that_wants_its_end_behind_a_text_gets_it(write_tiny_model: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(write_tiny_model(metadata={"tokenizer.ggml.add_eos_token": 1}))
    ids = tokenizer.encode("the tide", add_special=False)
    assert tokenizer.encode("the tide") == [*ids, 2]
    damaged = write_tiny_model(metadata={"tokenizer.ggml.add_eos_token": 1, "tokenizer.ggml.eos_token_id": 9999})
    with pytest.raises(ModelError, match="names the token 9999 as the end"):
        load_tokenizer(damaged)


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_the_same_alone_in_chunks_and_after_a_hit(
    runners: dict[str, tuple[TorchRunner, Any]], kind: PoolingKind
) -> None:
    runner, _ = runners["llama-tied"]
    alone = torch.cat([embed(runner, [ids], kind) for ids in prompts()])

    def check(found: torch.Tensor) -> None:
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=1e-5)

    check(embed(runner, prompts(), kind))
    for chunk in (1, 3, 7):
        check(embed(runner, prompts(), kind, scheduler=new_scheduler(budget=9, chunk=chunk)))
    cached = new_scheduler(caching=True)
    check(embed(runner, prompts(), kind, scheduler=cached))
    check(embed(runner, prompts(), kind, scheduler=cached))


def test_a_preempted_mean_begins_again(runners: dict[str, tuple[TorchRunner, Any]]) -> None:
    runner, _ = runners["llama-tied"]
    ids = prompts()[-1]
    alone = embed(runner, [ids], PoolingKind.MEAN)
    scheduler = Scheduler(BatchSettings(1, 16, 8), BlockPool(100, BLOCK, prefix_caching=False), max_model_len=256)
    scheduler.add(Request("mean", len(ids), 1, 1000.0, prompt_ids=ids, pooling=PoolingKind.MEAN, priority=5))
    found = b""
    for number in range(100):
        if number == 3:
            params = SamplingParams(temperature=0, ignore_eos=True)
            scheduler.add(Request("urgent", 4, 2, 1000.0, prompt_ids=[5, 6, 7, 8], params=params, priority=-5))
        step = scheduler.plan(1000.0)
        for event in scheduler.commit(step, runner.run(step), 1000.0):
            if event.token is not None and event.token.embedding is not None:
                found = event.token.embedding
        if not scheduler.has_work:
            break
    assert scheduler.preemptions["policy"] == 1
    torch.testing.assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32), alone[0], atol=1e-5, rtol=1e-5)


def test_states_that_are_no_numbers_fail_their_own_request(runners: dict[str, tuple[TorchRunner, Any]]) -> None:
    from tidegate_engine.pooler import Pooler
    from tidegate_engine.request import StepItem

    rows = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]])
    requests = [Request(name, 1, 1, 0.0, prompt_ids=[1], pooling=PoolingKind.LAST) for name in "ab"]
    items = [StepItem(request, 0, 1, True, [1]) for request in requests]
    found = Pooler(is_normalised=True).pool(rows, items, [0, 1, 2])
    assert found["a"].error is None and found["b"].is_corrupted and found["b"].error


async def test_the_real_model_over_http_with_the_official_client(start_engine: StartEngine, real_model: Path) -> None:
    tokenizer = load_tokenizer(real_model)
    runner = TorchRunner(real_model, options=TorchOptions(kv_blocks=64, threads=1))
    engine = await start_engine(runner=runner, tokenizer=tokenizer)
    texts = ["The tide rises at noon.", "High water is at twelve o'clock.", "def main(): return 0"]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{engine.api_port}/v1", api_key="none") as client:
        decoded = await client.embeddings.create(model="fast", input=texts)  # base64 on the wire
        plain = await client.embeddings.create(model="fast", input=texts, encoding_format="float")
        short = await client.embeddings.create(model="fast", input=texts[0], dimensions=64)
        text = await client.completions.create(model="fast", prompt="The capital of France is", max_tokens=4)
    found = torch.tensor([row.embedding for row in plain.data])
    torch.testing.assert_close(torch.tensor([row.embedding for row in decoded.data]), found)
    assert found.shape == (3, 576) and found.norm(dim=1).allclose(torch.ones(3))
    torch.testing.assert_close(torch.tensor(short.data[0].embedding), F.normalize(found[0, :64], dim=0))
    assert text.choices[0].text and plain.usage.prompt_tokens == sum(len(tokenizer.encode(each)) for each in texts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"pooling_type": "MEAN"}', Pooling(PoolingKind.MEAN)),
        ('{"seq_pooling_type": "cls", "normalize": false}', Pooling(PoolingKind.CLS, False)),
        ("{}", Pooling()),
    ],
)
def test_the_flag_says_how_states_are_pooled(text: str, expected: Pooling) -> None:
    assert parse_pooler_config(text) == expected


@pytest.mark.parametrize("text", ["[]", "{", '{"pooling_type": "max"}', '{"step_tag_id": 3}', '{"normalize": 1}'])
def test_a_flag_that_asks_for_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_pooler_config(text)


def write_modules(folder: Path, kinds: Sequence[str], mode: str | None) -> Path:
    rows = [
        {"idx": place, "name": str(place), "path": f"{place}_{kind}" if place else "", "type": f"st.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    if mode is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, mode: True}))
    return folder


def test_a_folder_of_sentence_transformers_says_how_it_is_pooled(tmp_path: Path) -> None:
    assert pooling_of_folder(tmp_path) == Pooling()
    write_modules(tmp_path, ("Transformer", "Pooling"), "pooling_mode_mean_tokens")
    assert pooling_of_folder(tmp_path) == Pooling(PoolingKind.MEAN, False)


@pytest.mark.parametrize(
    ("kinds", "mode", "what"),
    [
        (("Transformer", "Pooling", "Dense"), "pooling_mode_mean_tokens", "the module Dense"),
        (("Transformer", "Pooling"), "pooling_mode_max_tokens", "pooling_mode_max_tokens"),
        (("Transformer", "Pooling"), None, "cannot be read"),
    ],
)
def test_a_folder_that_needs_more_is_refused_by_name_unless_the_flag_says_otherwise(
    save_family: Callable[[str], tuple[Path, Any]], tmp_path: Path, kinds: Sequence[str], mode: str | None, what: str
) -> None:
    source, _ = save_family("llama-tied")
    for file in source.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_modules(tmp_path, kinds, mode)
    options = TorchOptions(kv_blocks=8, threads=1)
    with pytest.raises(ModelError, match=what):
        TorchRunner(tmp_path, options=options)
    told = TorchOptions(kv_blocks=8, threads=1, pooling=Pooling(PoolingKind.MEAN))
    assert TorchRunner(tmp_path, options=told).info.pooling is PoolingKind.MEAN


def test_a_gguf_file_says_how_it_is_pooled() -> None:
    def of(kind: int | None) -> Pooling | ModelError:
        metadata: dict[str, object] = {"general.architecture": "qwen3"}
        if kind is not None:
            metadata["qwen3.pooling_type"] = kind
        return pooling_of_metadata(metadata, path=Path("m.gguf"))

    assert [of(kind) for kind in (None, 0, 1, 2, 3)] == [
        Pooling(), Pooling(), Pooling(PoolingKind.MEAN), Pooling(PoolingKind.CLS), Pooling(PoolingKind.LAST),
    ]  # fmt: skip
    refused = of(4)
    assert isinstance(refused, ModelError) and "pooling_type 4" in refused.message
