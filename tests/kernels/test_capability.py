"""What is used where an architecture lacks a type."""

import pytest
import torch

from tidegate_kernels.capability import INT4_GROUP_MULTIPLE, has_type, kv_type_for, weight_precision_for
from tidegate_kernels.float8 import FP8
from tidegate_kernels.int4_gemm import repack
from tidegate_kernels.quantised import quantise_groups


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


@pytest.mark.parametrize(
    ("wanted", "capability"),
    [
        ("bfloat16", (8, 0)),
        ("int8", (8, 0)),
        ("int4-g128", (8, 0)),
        ("int4-g32", (9, 0)),
        ("fp8", (8, 9)),
        ("fp8-block128", (10, 0)),
    ],
)
def test_weights_with_a_kernel_stay_as_they_are(wanted: str, capability: tuple[int, int]) -> None:
    assert weight_precision_for(wanted, capability) == (wanted, None)


@pytest.mark.parametrize(
    ("wanted", "capability", "words"),
    [
        ("fp8", (8, 6), ["sm_89", "sm_86", "twice the memory", "int4"]),
        ("fp8-block128", (8, 0), ["sm_89", "sm_80"]),
        ("int5-g32", (9, 0), ["int5-g32", "four bits"]),
        ("int4-g16", (9, 0), ["int4-g16", "multiple of 32"]),
        ("Q4_K", (9, 0), ["Q4_K"]),
        ("IQ4_XS", (9, 0), ["IQ4_XS"]),
        ("float32", (9, 0), ["--dtype bfloat16"]),
    ],
)
def test_weights_without_a_kernel_are_held_in_bf16_and_the_reason_says_what_to_do(
    wanted: str, capability: tuple[int, int], words: list[str]
) -> None:
    precision, reason = weight_precision_for(wanted, capability)
    assert precision == "bfloat16"
    assert reason is not None
    assert all(word in reason for word in words)


def test_a_precision_that_is_none_and_an_architecture_that_is_too_old_are_refused() -> None:
    with pytest.raises(ValueError, match="'ternary' is no precision"):
        weight_precision_for("ternary", (9, 0))
    with pytest.raises(ValueError, match="sm_75"):
        weight_precision_for("int8", (7, 5))


@pytest.mark.parametrize("group", [16, 32, 48, 64, 96, 128])
def test_the_gate_lets_through_exactly_the_groups_that_the_layout_takes(group: int) -> None:
    weight = quantise_groups(torch.ones(2, 2 * group), bits=4, group=group)
    if weight_precision_for(weight.precision, (9, 0))[1] is None:
        assert repack(weight).group == group
    else:
        with pytest.raises(ValueError, match=str(INT4_GROUP_MULTIPLE)):
            repack(weight)
