"""A model in each precision of its weights and its cache: what it answers, what it takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from tidegate_engine.architecture import parameter_shapes
from tidegate_engine.blocks import BlockPool
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.precision import Precision, matrix_bytes, parse_precision, weight_bytes
from tidegate_engine.quantize import to_precision
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError
from tidegate_kernels import native
from tidegate_kernels.quantised import quantise_int8
from tidegate_kernels.weight import Dense

BLOCK = 8
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [100, 90, 80, 70, 60, 50]]


def runner_of(path: Path, precision: Precision) -> TorchRunner:
    options = TorchOptions(precision=precision, kv_blocks=60, block_tokens=BLOCK, threads=1)
    return TorchRunner(path, options=options)


def answers(runner: TorchRunner, *, chunk: int = 64) -> list[list[int]]:
    """Twelve greedy tokens to each prompt, all of them in one batch."""
    scheduler = Scheduler(BatchSettings(8, 64, chunk), BlockPool(60, BLOCK), max_model_len=256)
    for number, ids in enumerate(PROMPTS):
        params = SamplingParams(temperature=0, ignore_eos=True)
        scheduler.add(Request(str(number), len(ids), 12, 0.0, prompt_ids=ids, params=params))
    found: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        for event in scheduler.commit(step, runner.run(step), 0.0):
            if event.token:
                found[event.request.id].append(event.token.token_id)
    return list(found.values())


@pytest.fixture(scope="module")
def exact(tiny_model: Path) -> list[list[int]]:
    return answers(runner_of(tiny_model, Precision()))


def likeness(found: list[list[int]], expected: list[list[int]]) -> float:
    """Share of answers' tokens before the first that differs."""
    same = 0
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other) == 12
        same += next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), 12)
    return same / (12 * len(expected))


@pytest.mark.parametrize("text", ["fp8", "fp8-block128", "int8", "int8-g24", "int6-g8", "bf16", "fp16"])
def test_a_model_quantised_while_it_is_loaded_is_smaller_and_answers_nearly_the_same(
    tiny_model: Path, exact: list[list[int]], text: str
) -> None:
    runner = runner_of(tiny_model, parse_precision(text))
    dense = runner_of(tiny_model, Precision())
    assert runner.info.weight_bytes < dense.info.weight_bytes
    assert parse_precision(text).of("layers.0.q") in runner.info.weight_dtype.split("+")
    assert runner.info.kv_dtype == "float32"
    assert likeness(answers(runner), exact) > 0.3


def test_weights_take_the_bytes_that_arithmetic_says(tiny_model: Path) -> None:
    found = runner_of(tiny_model, parse_precision("{attn: int8, mlp: int4-g8, lm_head: bf16}")).info.weight_bytes
    attention = sum(matrix_bytes("int8", shape) for shape in ((72, 72), (24, 72), (24, 72), (72, 72)))
    mlp = sum(matrix_bytes("int4-g8", shape) for shape in ((96, 72), (96, 72), (72, 96)))
    vocabulary = 263
    assert found == 2 * (attention + mlp) + vocabulary * 72 * 2 + 5 * 72 * 4


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_in_fp32_takes_the_bytes_that_are_told_before_it_is_loaded(
    write_tiny_model: Callable[..., Path], tied: bool
) -> None:
    checkpoint = open_checkpoint(write_tiny_model(tied=tied))
    policy, shapes = parse_precision("stored"), parameter_shapes(checkpoint.config)
    told = weight_bytes(policy, shapes, checkpoint.stored_bytes, tied_head=tied, head_apart=native.library() is None)
    assert told == runner_of(checkpoint.path, policy).info.weight_bytes


@pytest.mark.parametrize(
    ("kv", "token_bytes", "least"),
    [("float32", 384, 1.0), ("bf16", 192, 0.3), ("fp16", 192, 0.5), ("fp8", 144, 0.2), ("int8", 144, 0.3)],
)
def test_a_cache_of_each_type_serves_and_takes_the_bytes_that_arithmetic_says(
    tiny_model: Path, exact: list[list[int]], kv: str, token_bytes: int, least: float
) -> None:
    """2 layers, keys and values, 3 heads of 8: 96 values; a quantised cache has 12 scales of 4 bytes."""
    runner = runner_of(tiny_model, Precision(kv=kv))
    assert runner.info.kv_token_bytes == token_bytes
    assert sum(part[:, :, 0].nbytes for part in runner._part.pool) == token_bytes * BLOCK
    found = answers(runner)
    assert likeness(found, exact) >= least
    assert likeness(answers(runner, chunk=3), found) == 1


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_what_an_earlier_request_left_in_a_quantised_block_reaches_no_later_one(tiny_model: Path, kv: str) -> None:
    runner = runner_of(tiny_model, Precision(kv=kv))
    clean = answers(runner)
    for part in runner._part.pool:
        if part.dtype == torch.float32:
            part.fill_(torch.nan)
        else:
            part.view(torch.uint8).fill_(0x7F)
    assert answers(runner) == clean


def test_a_quantised_file_is_kept_as_it_is_where_memory_is_short_and_answers_the_same(
    write_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, uncompiled: None
) -> None:
    from tidegate_engine.cgroup import Machine

    kinds = {"blk.0.ffn_down.weight": "Q4_1", "blk.1.ffn_down.weight": "Q8_0"}
    path = write_tiny_model(types={name: GGMLQuantizationType[kind] for name, kind in kinds.items()})
    dense = runner_of(path, Precision())
    assert dense.info.weight_dtype == "float32"
    monkeypatch.setattr(Machine, "available_bytes", lambda self: 1_500_000)
    stored = runner_of(path, Precision())
    assert stored.info.weight_dtype == "float32+int8-g32+int4-g32"
    saved = 2 * 72 * 96 * 4 - 72 * 96 // 32 * (20 + 34)
    assert stored.info.weight_bytes == dense.info.weight_bytes - saved
    assert answers(stored) == answers(dense)


def test_a_matrix_is_quantised_as_a_whole_by_any_number_of_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300, 64)
    for wanted in ("int8", "fp8-block128", "int4", "bfloat16"):
        whole = to_precision("q", Dense(values), wanted)
        monkeypatch.setattr("tidegate_engine.quantize.CHUNK_VALUES", 64)
        torch.testing.assert_close(
            to_precision("q", Dense(values), wanted).dequantised(), whole.dequantised(), atol=0, rtol=0
        )
        monkeypatch.undo()


def test_what_is_stored_or_has_the_precision_already_stays_the_same_weight() -> None:
    weight = quantise_int8(torch.randn(4, 8))
    assert to_precision("q", weight, "stored") is weight
    assert to_precision("q", weight, "int8") is weight
    torch.testing.assert_close(to_precision("q", weight, "float32").dequantised(), weight.dequantised(), atol=0, rtol=0)


def test_columns_that_no_group_divides_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"PrecisionUnsupported: layers.0.q has 72 columns, which the groups of int4"):
        to_precision("layers.0.q", Dense(torch.randn(4, 72)), "int4")


def test_a_checkpoint_quantised_in_another_way_than_was_said_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"QuantizationMismatch: .* is quantised by gguf, and awq was asked for"):
        TorchRunner(tiny_model, options=TorchOptions(quantisation="awq"))
    assert TorchRunner(tiny_model, options=TorchOptions(quantisation="gguf", kv_blocks=4)).info.layers == 2
