"""The plan: memory worked out by hand, refusals with their reason, a choice that follows the load and the prices."""

from dataclasses import replace
from typing import Any

import pytest

from tidegate_engine.settings import Envelope
from tidegate_operator.capacity import Targets
from tidegate_operator.gpus import GPUS, Gpu, Prices, find_gpu
from tidegate_operator.mix import Cell, Mix
from tidegate_operator.model_shapes import ModelShape, known_shape
from tidegate_operator.plan import (
    BOUND_BY,
    Answer,
    Held,
    Load,
    Option,
    Question,
    describe,
    group_sizes,
    held,
    memory_of,
    plan,
    workspace_bytes,
)

CHAT = Mix(1.0, (Cell(0.5, 250, 100, 64, 64), Cell(0.5, 1500, 300, 1024, 256)))


def gpu_of(name: str) -> Gpu:
    gpu = find_gpu(name)
    assert gpu is not None
    return gpu


def shape_of(name: str) -> ModelShape:
    shape = known_shape(name)
    assert shape is not None
    return shape


def asked(model: str = "Llama-2-7B", **changes: Any) -> Question:
    question = Question(
        shape=shape_of(model),
        mix=CHAT,
        targets=Targets(ttft_seconds=0.5),
        load=Load(),
        gpus=(gpu_of("H100"), gpu_of("L40S")),
        precisions=("bf16", "fp8"),
    )
    return replace(question, **changes)


# --- memory, by hand ---------------------------------------------------------------------------------------------


def test_weights_of_a_7b_model_in_every_precision() -> None:
    # Llama-2-7B: embedding and head 2 x 32,000 x 4,096 = 262,144,000; attention 32 x 4 x 4,096² = 2,147,483,648; MLPs
    # 32 x 3 x 4,096 x 11,008 = 4,328,521,728; norms 65 x 4,096 = 266,240. Together 6,738,415,616.
    shape = shape_of("Llama-2-7B")
    assert shape.parameters == 6_738_415_616
    assert shape.parameters_by_kind == {
        "embedding": 131_072_000,
        "head": 131_072_000,
        "attention": 2_147_483_648,
        "mlp": 4_328_521_728,
        "rest": 266_240,
    }
    assert shape.weight_bytes("fp32") == 6_738_415_616 * 4
    assert shape.weight_bytes("bf16") == 6_738_415_616 * 2
    # int8 and fp8: the layers' 6,476,005,376 values a byte each, and a scale of 4 bytes for each of a layer's
    # 4 x 4,096 + 2 x 11,008 + 4,096 = 42,496 rows: 32 x 42,496 x 4 = 5,439,488. The rest in 16 bits: 524,820,480.
    assert shape.weight_bytes("int8") == shape.weight_bytes("fp8") == 6_476_005_376 + 5_439_488 + 524_820_480
    # int4: half a byte, and a scale of 4 bytes for each 128 values.
    assert shape.weight_bytes("int4") == 6_476_005_376 // 2 + 6_476_005_376 // 128 * 4 + 524_820_480


def test_weights_of_a_70b_model_in_every_precision() -> None:
    # Llama-3.1-70B: 2 x 128,256 x 8,192 + 80 x (2 x 8,192² + 2 x 1,024 x 8,192 + 3 x 8,192 x 28,672) + 161 x 8,192.
    shape = shape_of("Llama-3.1-70B")
    assert shape.parameters == 70_553_706_496
    gigabytes = {name: round(shape.weight_bytes(name) / 1e9, 1) for name in ("fp32", "bf16", "fp8", "int8", "int4")}
    assert gigabytes == {"fp32": 282.2, "bf16": 141.1, "fp8": 72.7, "int8": 72.7, "int4": 40.6}


def test_kv_of_a_token_in_every_precision() -> None:
    # 7B: 2 x 32 layers x 32 heads x 128 = 262,144 values; in one byte a scale of 4 for each of 2,048 heads besides.
    seven, seventy = shape_of("Llama-2-7B"), shape_of("Llama-3.1-70B")
    kinds = ("fp32", "bf16", "fp8", "int8")
    assert [seven.kv_bytes_per_token(kind) for kind in kinds] == [1_048_576, 524_288, 270_336, 270_336]
    # 70B: 2 x 80 x 8 x 128 = 163,840 values, 1,280 heads.
    assert [seventy.kv_bytes_per_token(kind) for kind in kinds] == [655_360, 327_680, 168_960, 168_960]


def test_120_gb_in_32_bits_are_about_30_gb_in_int8_weights_and_kv_each() -> None:
    # Llama-2-7B with 88,736 tokens of KV. In 32 bits: weights 26.95 GB + KV 88,736 x 1 MiB = 93.05 GB: 120.0 GB.
    # In int8: weights 7.01 GB (embedding and head stay in 16 bits) + KV 88,736 x 270,336 = 23.99 GB: 30.99 GB.
    shape, tokens = shape_of("Llama-2-7B"), 88_736
    wide = shape.weight_bytes("fp32"), tokens * shape.kv_bytes_per_token("fp32")
    narrow = shape.weight_bytes("int8"), tokens * shape.kv_bytes_per_token("int8")
    assert [round(size / 1e9, 2) for size in (*wide, sum(wide))] == [26.95, 93.05, 120.0]
    assert [round(size / 1e9, 2) for size in (*narrow, sum(narrow))] == [7.01, 23.99, 30.99]
    # A100 40GB: 0.9 x 42.95 = 38.65 GB can be used of each. 32 bits: two GPUs have 77 GB, so four share it: 6.74 GB of
    # weights, 23.26 GB of KV and 1.6 GB of workspace in each. int8: one, with 2.25 GB of workspace beside its 30.99 GB.
    a100 = gpu_of("A100 40GB")

    def smallest(kinds: Held) -> int:
        sizes = (size for size in group_sizes(shape, a100) if holds(kinds, size))
        return next(sizes)

    def holds(kinds: Held, size: int) -> bool:
        return memory_of(shape, a100, kinds=kinds, tensor_parallel=size).kv_tokens >= tokens

    assert smallest(Held("fp32", "fp32")) == 4
    assert smallest(Held("int8", "int8")) == 1


def test_the_workspace_of_a_7b_model_by_hand() -> None:
    # 16,384 tokens x (4 x 4,096 + 3 x 11,008) x 2 bytes = 1,619,001,344; logits 256 x 32,000 x 4 bytes x 3 =
    # 98,304,000; 512 MiB for the runtime. Two GPUs: half of the MLP's part, and 400 MiB for all-reduces.
    shape = shape_of("Llama-2-7B")
    assert workspace_bytes(shape, Envelope(), tensor_parallel=1) == 1_619_001_344 + 98_304_000 + (512 << 20)
    half_mlp = 16_384 * 3 * 11_008
    assert workspace_bytes(shape, Envelope(), tensor_parallel=2) == (
        1_619_001_344 - half_mlp + 98_304_000 + (512 << 20) + (400 << 20)
    )


def test_a_70b_model_in_16_bits_needs_two_h100s_and_holds_little_there() -> None:
    # 70.55 GB of weights in each, of 0.9 x 85.52 = 76.97 GB. Workspace: 2 x 16,384 x (4 x 8,192 + 3 x 28,672 / 2) =
    # 2.48 GB, logits 256 x 128,256 x 12 = 0.39 GB, 0.96 GB fixed. Left: 2.58 GB at 163,840 bytes a token: 15,757.
    shape, h100 = shape_of("Llama-3.1-70B"), gpu_of("H100 SXM")
    assert memory_of(shape, h100, kinds=held("bf16"), tensor_parallel=1).kv_bytes < 0
    pair = memory_of(shape, h100, kinds=held("bf16"), tensor_parallel=2)
    assert pair.weight_bytes == pytest.approx(70.55e9, rel=1e-3)
    assert int(pair.kv_tokens) == 15_757
    assert memory_of(shape, h100, kinds=held("fp8"), tensor_parallel=2).kv_tokens > 200_000


def test_groups_divide_the_heads_and_stay_within_a_node() -> None:
    h100 = gpu_of("H100")
    assert group_sizes(shape_of("Llama-3.1-70B"), h100) == [1, 2, 4, 8]
    assert group_sizes(shape_of("Qwen2.5-7B"), h100) == [1, 2, 4]
    assert group_sizes(shape_of("SmolLM2-135M"), h100) == [1]
    assert group_sizes(shape_of("Llama-3.1-70B"), replace(h100, gpus_per_node=2)) == [1, 2]


# --- what is not possible ------------------------------------------------------------------------------------------


def test_a_precision_that_a_gpu_lacks_is_refused_with_the_reason() -> None:
    answer = plan(asked(gpus=(gpu_of("A100 80GB"),), precisions=("fp8", "int8")))
    (refusal,) = answer.refusals
    assert (refusal.gpu.name, refusal.precision) == ("A100 80GB", "fp8")
    assert "no fp8 in its tensor cores" in refusal.reason and "int8" in refusal.reason
    assert {option.kinds.weights for option in answer.options} == {"int8"}


def test_where_there_is_no_bf16_fp16_stands_in_and_the_refusal_is_told() -> None:
    answer = plan(asked(gpus=(gpu_of("T4"),), precisions=("bf16",)))
    assert [(refusal.precision) for refusal in answer.refusals] == ["bf16"]
    assert {option.kinds for option in answer.options} == {Held("fp16", "fp16")}


def test_int4_needs_no_int4_arithmetic() -> None:
    answer = plan(asked(gpus=(gpu_of("H100"),), precisions=("int4",)))
    assert answer.choice is not None and answer.choice.kinds == Held("int4", "bf16")


def test_a_model_that_fits_nowhere_is_told_with_its_sizes() -> None:
    answer = plan(asked("Llama-3.1-70B", gpus=(gpu_of("T4"),), precisions=("fp16",)))
    assert answer.choice is None and not answer.options
    (refusal,) = answer.refusals
    # 141.1 GB over eight of 0.9 x 16.1 = 14.5 GB each.
    assert "17.6 GB of weights" in refusal.reason and "14.5 GB can be used" in refusal.reason


def test_a_cache_too_small_for_one_request_does_not_fit() -> None:
    long = Mix(1.0, (Cell(1.0, 100_000, 1000, 65536, 256),))
    answer = plan(asked("Llama-3.1-8B", mix=long, gpus=(replace(gpu_of("L4"), gpus_per_node=1),), precisions=("fp8",)))
    (refusal,) = answer.refusals
    assert "one request needs 101,000" in refusal.reason


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everywhere() -> tuple[Question, Answer]:
    """500 requests at once at 10,000 tokens/s of a 7B model within 500 ms, asked of every GPU."""
    question = asked(
        gpus=GPUS, precisions=("bf16", "fp8", "int8"), load=Load(concurrency=500, tokens_per_second=10_000)
    )
    return question, plan(question)


def test_every_gpu_and_precision_is_answered(everywhere: tuple[Question, Answer]) -> None:
    question, answer = everywhere
    told = {(option.gpu.name, option.kinds.weights) for option in answer.options}
    told |= {(refusal.gpu.name, refusal.precision) for refusal in answer.refusals}
    assert told >= {(gpu.name, precision) for gpu in GPUS for precision in question.precisions}


def test_replicas_carry_the_load_within_the_goals_and_hold_its_requests(everywhere: tuple[Question, Answer]) -> None:
    question, answer = everywhere
    for option in answer.options:
        if option.misses:
            continue
        # 10,000 tokens/s of 200 each are 50 requests/s, and 500 at once at 10,000 tokens/s mean 50 ms a token.
        assert option.requests_per_second == pytest.approx(50)
        assert option.replicas * option.capacity.requests_per_second * question.keep >= 50 * (1 - 1e-9)
        assert option.prediction.itl_p95_seconds is not None and option.prediction.itl_p95_seconds <= 0.05
        assert option.prediction.ttft_p95_seconds is not None and option.prediction.ttft_p95_seconds <= 0.5
        assert option.replicas * option.settings.max_num_seqs >= 500
        # While it decodes, a request holds (100 x (250 + 50) + 300 x (1,500 + 150)) / 400 = 1,312 tokens on average.
        assert option.replicas * option.memory.kv_tokens >= 500 * 1312


def test_the_choice_is_the_cheapest_that_reaches_the_goals(everywhere: tuple[Question, Answer]) -> None:
    _, answer = everywhere
    choice = answer.choice
    assert choice is not None and choice is answer.options[0] and choice.cost_per_hour is not None
    others = [option.cost_per_hour for option in answer.options if not option.misses and option.cost_per_hour]
    assert choice.cost_per_hour == min(others)
    price = choice.gpu.price_per_hour
    assert price is not None
    assert choice.cost_per_hour == pytest.approx(choice.replicas * choice.memory.tensor_parallel * price)
    # 10,000 tokens/s are 36 million an hour.
    assert choice.cost_per_million_tokens == pytest.approx(choice.cost_per_hour / 36)
    assert "it reaches the goals for the least money" in answer.why
    assert BOUND_BY[choice.capacity.bottleneck] in answer.why and choice.capacity.binding in answer.why


def gpu_chosen(prices: Prices) -> str:
    choice = plan(asked(load=Load(requests_per_second=5), prices=prices)).choice
    assert choice is not None
    return choice.gpu.name


def test_prices_decide_between_gpus() -> None:
    assert gpu_chosen(Prices({"H100 SXM": 0.1, "L40S": 5.0})) == "H100 SXM"
    assert gpu_chosen(Prices({"H100 SXM": 50.0, "L40S": 0.1})) == "L40S"


def only(question: Question) -> Option:
    answer = plan(question)
    assert answer.choice is not None
    return answer.choice


def test_without_a_load_one_replica_is_planned_at_what_it_carries() -> None:
    option = only(asked(gpus=(gpu_of("H100"),), precisions=("bf16",)))
    assert option.replicas == 1
    assert option.requests_per_second == pytest.approx(0.85 * option.capacity.requests_per_second)


def test_twice_the_load_never_needs_fewer_replicas() -> None:
    counts = [
        only(asked(gpus=(gpu_of("L40S"),), precisions=("fp8",), load=Load(requests_per_second=rate))).replicas
        for rate in (2, 4, 8, 16)
    ]
    assert counts == sorted(counts) and counts[-1] > counts[0]


def test_requests_at_once_alone_are_spread_over_replicas_that_run_them_within_the_goals() -> None:
    question = asked(gpus=(gpu_of("H100"),), precisions=("fp8",), load=Load(concurrency=300))
    option = only(question)
    assert option.replicas > 1
    running = option.prediction.running
    assert running is not None and running * option.replicas == pytest.approx(300, rel=0.15)


def test_goals_out_of_reach_choose_nothing_and_say_what_is_reached() -> None:
    answer = plan(asked(targets=Targets(ttft_seconds=0.001), gpus=(gpu_of("L4"),)))
    assert answer.choice is None
    assert all("ttft" in option.misses for option in answer.options)
    assert "misses the goal for ttft" in answer.why and "ms to the first token" in answer.why


def test_a_load_without_goals_is_carried_and_no_goal_is_claimed_to_be_reached() -> None:
    load = Load(requests_per_second=1)
    answer = plan(asked(targets=Targets(), gpus=(gpu_of("L40S"),), precisions=("fp8",), load=load))
    assert "it carries the load for the least money" in answer.why and "goal" not in answer.why


def test_a_tighter_goal_takes_a_larger_group() -> None:
    loose = only(asked("Llama-3.1-70B", gpus=(gpu_of("H200"),), precisions=("fp8",), targets=Targets(itl_seconds=0.2)))
    tight = only(asked("Llama-3.1-70B", gpus=(gpu_of("H200"),), precisions=("fp8",), targets=Targets(itl_seconds=0.02)))
    assert tight.memory.tensor_parallel > loose.memory.tensor_parallel
    assert describe(tight) == f"1 replica of {tight.memory.tensor_parallel} x H200 in fp8"
