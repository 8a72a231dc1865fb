"""Every kind of weight against the values that its format defines and the plain product with them."""

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch

from tidegate_kernels.float8 import from_fp8
from tidegate_kernels.quantised import (
    Blocks,
    Groups,
    pack_codes,
    quantise_fp8,
    quantise_fp8_blocks,
    quantise_groups,
    quantise_int8,
)
from tidegate_kernels.weight import Dense, Stacked, Weight, concat_rows, gather_rows, linear, slice_columns, slice_rows


def test_packed_weights_give_the_same_product_for_any_number_of_rows() -> None:
    weight, bias = torch.randn(48, 32), torch.randn(48)
    packed = Dense(weight).laid_out()
    assert packed.size_bytes == weight.nbytes
    torch.testing.assert_close(packed.dequantised(), weight, atol=0, rtol=0)
    for rows in (1, 2, 7, 64, 200):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(linear(x, packed, bias), x @ weight.T + bias, atol=1e-4, rtol=1e-4)


def test_an_embedding_gives_the_rows_asked_for() -> None:
    weight = torch.randn(10, 4)
    found = gather_rows(Dense(weight.bfloat16()), torch.tensor([3, 3, 0]), dtype=torch.float32)
    torch.testing.assert_close(found, weight.bfloat16().float()[[3, 3, 0]], atol=0, rtol=0)


def test_parts_of_one_kind_become_one_weight_and_parts_of_different_kinds_are_stacked() -> None:
    first, second = torch.randn(6, 8), torch.randn(4, 8)
    x, bias = torch.randn(3, 8), torch.randn(10)
    together = concat_rows([Dense(first), Dense(second)])
    assert isinstance(together, Dense)
    apart = concat_rows([Dense(first), Dense(second.bfloat16())])
    assert isinstance(apart, Stacked)
    assert apart.precision == "float32+bfloat16"
    assert apart.size_bytes == first.nbytes + second.nbytes // 2
    for weight in (together, apart, apart.laid_out()):
        assert weight.shape == (10, 8)
        expected = x @ weight.dequantised().T + bias
        torch.testing.assert_close(linear(x, weight, bias), expected, atol=2e-2, rtol=2e-2)


def random_groups(bits: int, *, group: int = 32, rows: int = 12, columns: int = 96, order: bool = False) -> Groups:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    scales = torch.rand(rows, columns // group, generator=generator).half()
    return Groups(
        bits=bits,
        planes=pack_codes(codes, bits=bits),
        scales=scales,
        zeros=torch.randint(0, 1 << bits, scales.shape, generator=generator).to(torch.uint8),
        minima=torch.randn(scales.shape, generator=generator).half(),
        order=torch.randperm(columns, generator=generator) if order else None,
    )


def a_weight(kind: str, *, rows: int = 160, columns: int = 192, seed: int = 0) -> Weight:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "fp8":
            return quantise_fp8(values)
        case "fp8-block128":
            return quantise_fp8_blocks(values)
        case "fp8, weights alone":
            return dataclasses.replace(quantise_fp8(values), quantised_activations=False)
        case "int8":
            return quantise_int8(values)
        case "ordered":
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(5))
            return dataclasses.replace(quantise_groups(values, bits=4, group=32), order=order)
        case "bfloat16" | "float16":
            return Dense(values.to(getattr(torch, kind)))
        case "blocks":
            return Blocks("q8", values.view(torch.uint8), columns, 1, lambda stored: stored.view(torch.float32).clone())
        case _:
            return quantise_groups(values, bits=int(kind.removeprefix("int")[0]), group=32)


KINDS = [
    "fp8", "fp8-block128", "fp8, weights alone", "int8", "int2-g32", "int3-g32", "int4-g32", "int5-g32", "int6-g32",
    "int8-g32", "ordered", "bfloat16", "float16", "blocks",
]  # fmt: skip
RELATIVE_STEP = {"fp8": 0.04, "fp8-block128": 0.04, "int8": 0.015}
"""How far rounding the activations moves a product; the other kinds round none."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_the_product_is_that_of_the_dequantised_values(kind: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = a_weight(kind)
    x, bias = torch.randn(tokens, 192), torch.randn(160)
    expected = x @ weight.dequantised().T + bias
    whole = linear(x, weight, bias)
    assert (whole - expected).norm() / expected.norm() < RELATIVE_STEP.get(kind, 1e-5)
    monkeypatch.setattr("tidegate_kernels.weight.BLOCK_VALUES", 192 * 7)
    torch.testing.assert_close(linear(x, weight, bias), whole, atol=1e-4, rtol=1e-5)
    half = linear(x.bfloat16(), weight, bias.bfloat16())
    assert half.dtype == torch.bfloat16
    assert (half.float() - expected).norm() / expected.norm() < 0.02 + RELATIVE_STEP.get(kind, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_selected_and_joined_rows_keep_their_values(kind: str) -> None:
    weight, other = a_weight(kind), a_weight(kind, rows=32, seed=1)
    values = weight.dequantised()
    rows = torch.tensor([150, 3, 3, 0])
    torch.testing.assert_close(gather_rows(weight, rows, dtype=torch.float32), values[rows], atol=0, rtol=0)
    torch.testing.assert_close(weight.rows(30, 50), values[30:50], atol=0, rtol=0)
    together = concat_rows([weight, other])
    torch.testing.assert_close(together.dequantised(), torch.cat((values, other.dequantised())), atol=0, rtol=0)
    assert together.shape == (192, 192)
    assert together.size_bytes == weight.size_bytes + other.size_bytes - (192 * 8 if kind == "ordered" else 0)


def test_what_is_not_alike_is_stacked_and_gives_the_same_product() -> None:
    parts = [a_weight(kind) for kind in ("int4-g32", "int5-g32", "int8", "fp8-block128")]
    one, other = a_weight("ordered"), a_weight("ordered")
    assert isinstance(other, Groups)
    parts += [one, dataclasses.replace(other, order=torch.arange(192).flip(0))]
    x = torch.randn(3, 192)
    for first, second in itertools.pairwise(parts):
        together = concat_rows([first, second])
        assert isinstance(together, Stacked)
        torch.testing.assert_close(linear(x, together), torch.cat((linear(x, first), linear(x, second)), dim=-1))


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_number_of_bits_take_as_many_and_come_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 64))
    planes = pack_codes(codes, bits=bits)
    assert sum(plane.nbytes for plane in planes) * 8 == 5 * 64 * bits
    groups = Groups(bits=bits, planes=planes, scales=torch.ones(5, 1), zeros=0)
    assert torch.equal(groups.dequantised(), codes.float())


def test_groups_are_scale_times_distance_from_zero_plus_minimum() -> None:
    groups = random_groups(4, order=True)
    values = groups.dequantised()
    assert isinstance(groups.zeros, torch.Tensor) and groups.minima is not None and groups.order is not None
    codes = groups.codes(0, 12)
    for row, stored in ((0, 0), (11, 95), (5, 33)):
        group = stored // 32
        expected = (codes[row, stored] - int(groups.zeros[row, group])) * groups.scales[row, group].float()
        assert values[row, groups.order[stored]] == expected + groups.minima[row, group].float()


@pytest.mark.parametrize(
    ("quantise", "step"),
    [
        (quantise_int8, 1 / 254),
        (lambda values: quantise_groups(values, bits=4, group=32), 1 / 15),
        (lambda values: quantise_groups(values, bits=8, group=64), 1 / 255),
    ],
)
def test_rounding_moves_no_value_by_more_than_a_step(quantise: Callable[[torch.Tensor], Weight], step: float) -> None:
    values = torch.randn(16, 64)
    values[3] = 0
    values[4] = 7
    found = quantise(values)
    assert (found.dequantised() - values).abs().max() <= step * values.abs().amax() * 1.01
    assert torch.isfinite(found.dequantised()).all()


@pytest.mark.parametrize("quantise", [quantise_fp8, quantise_fp8_blocks])
def test_fp8_keeps_three_bits_of_every_value_within_its_range(quantise: Callable[[torch.Tensor], Weight]) -> None:
    values = torch.randn(200, 300)
    values[:, 7] = 0
    found = quantise(values).dequantised()
    near = values.abs() > 0.01
    assert ((found - values).abs()[near] / values.abs()[near]).max() <= 1 / 16
    assert (found[:, 7] == 0).all()


def test_every_fp8_number_is_converted_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = codes.float()
    number = ~expected.isnan()
    torch.testing.assert_close(from_fp8(codes)[number], expected[number], atol=0, rtol=0)


def test_int8_and_fp8_products_are_those_of_the_library_on_the_same_rounded_numbers() -> None:
    x, values = torch.randn(17, 64), torch.randn(32, 64)
    int8 = quantise_int8(values)
    scales = x.abs().amax(-1, keepdim=True) / 127
    exact = torch._int_mm((x / scales).round().to(torch.int8), int8.codes.t())
    torch.testing.assert_close(linear(x, int8), exact.float() * scales * int8.scales[:, 0])
    fp8 = quantise_fp8(values)
    scales = x.abs().amax(-1, keepdim=True) / 448
    expected = torch._scaled_mm(
        (x / scales).to(torch.float8_e4m3fn), fp8.codes.t(), scale_a=scales, scale_b=fp8.scales.t(),
        out_dtype=torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(linear(x, fp8), expected, atol=1e-4, rtol=1e-4)


def test_bytes_are_those_of_codes_and_scales() -> None:
    values = torch.randn(128, 256)
    count = values.numel()
    assert quantise_fp8(values).size_bytes == quantise_int8(values).size_bytes == count + 128 * 4
    assert quantise_fp8_blocks(values).size_bytes == count + 2 * 4
    assert quantise_groups(values, bits=4, group=64).size_bytes == count // 2 + count // 64 * 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ordered"])
def test_columns_cut_out_keep_their_values_and_their_kind(kind: str) -> None:
    weight = a_weight(kind, columns=384)
    values = weight.dequantised()
    for first, count in ((0, 128), (128, 256), (256, 128)):
        part = slice_columns(weight, first, count)
        assert (type(part), part.precision, part.shape) == (type(weight), weight.precision, (160, count))
        assert part.size_bytes < weight.size_bytes
        torch.testing.assert_close(part.dequantised(), values[:, first : first + count], atol=0, rtol=0)
    stacked = slice_columns(concat_rows([weight, a_weight("int3-g32", columns=384)]), 128, 128)
    torch.testing.assert_close(stacked.dequantised()[:160], values[:, 128:256], atol=0, rtol=0)


def test_rows_of_stacked_parts_are_cut_across_their_border() -> None:
    parts = [a_weight("int8"), a_weight("int4-g32"), a_weight("fp8")]
    values = torch.cat([part.dequantised() for part in parts])
    found = slice_rows(concat_rows(parts), 100, 300)
    torch.testing.assert_close(found.dequantised(), values[100:400], atol=0, rtol=0)
    assert found.precision == "int8+int4-g32+fp8"
