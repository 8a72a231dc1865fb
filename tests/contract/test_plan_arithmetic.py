"""What `tidegate plan` says of memory is what the engine takes: the same bytes for weights and for a token's KV."""

import pytest
import torch

from tidegate_engine.architecture import parameter_shapes
from tidegate_engine.precision import parse_precision, weight_bytes
from tidegate_engine.transformer import kv_token_bytes
from tidegate_operator.model_shapes import WELL_KNOWN, known_shape

KV_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Llama-2-7B", "Llama-3.1-70B"])
def test_a_token_of_kv_takes_what_the_engine_says(name: str) -> None:
    shape = known_shape(name)
    assert shape is not None
    for precision, dtype in KV_TYPES.items():
        assert shape.kv_bytes_per_token(precision) == kv_token_bytes(WELL_KNOWN[name], dtype)


@pytest.mark.parametrize("name", ["SmolLM2-135M", "Qwen2.5-7B", "Mixtral-8x7B"])
def test_weights_take_what_the_engines_policy_of_that_name_says(name: str) -> None:
    shape = known_shape(name)
    assert shape is not None
    shapes, tied = parameter_shapes(WELL_KNOWN[name]), WELL_KNOWN[name].tied_head
    for precision in ("bf16", "fp8", "int8", "int4"):
        policy = parse_precision(precision, dtype="bf16")
        assert shape.weight_bytes(precision) == weight_bytes(policy, shapes, {}, tied_head=tied)
