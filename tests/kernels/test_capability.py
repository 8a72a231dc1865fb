"""What is used where an architecture lacks a type."""

import pytest
import torch

from tidegate_kernels.capability import has_type, kv_type_for
from tidegate_kernels.float8 import FP8


@pytest.mark.parametrize(
    ("capability", "has_fp8"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_fp8_begins_with_ada(capability: tuple[int, int], has_fp8: bool) -> None:
    assert has_type(FP8, capability) is has_fp8
    assert has_type(torch.int8, capability)


@pytest.mark.parametrize("wanted", [FP8, torch.int8, torch.bfloat16, torch.float16])
def test_what_the_architecture_has_is_used_without_a_word(wanted: torch.dtype) -> None:
    assert kv_type_for(wanted, (9, 0)) == (wanted, None)


def test_without_fp8_the_cache_is_bf16_and_the_reason_names_both_architectures_and_the_way_out() -> None:
    dtype, reason = kv_type_for(FP8, (8, 6))
    assert dtype == torch.bfloat16
    assert reason is not None
    assert "sm_89" in reason
    assert "sm_86" in reason
    assert "--kv-cache-dtype int8" in reason


def test_an_architecture_without_bf16_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"sm_75 .* sm_80"):
        kv_type_for(torch.int8, (7, 5))
