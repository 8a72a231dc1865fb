"""Weights of four bits: their layout against what the formats define, exactly; their products against the reference."""

import os
from collections.abc import Callable, Mapping
from random import Random

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from tidegate_engine.weights_quantised import read_scheme
from tidegate_kernels.ggml import groups_of
from tidegate_kernels.int4_gemm import int4_linear, repack, unpack
from tidegate_kernels.quantised import Groups, pack_codes, quantise_groups

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
ROWS, COLUMNS, GROUP = 24, 256, 64
NIBBLES = torch.arange(0, 32, 4)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_of(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (rows, columns), generator=generator(seed))


def words(codes: Tensor) -> Tensor:
    """int32 `[rows, columns / 8]` with a code in each nibble, the first in the lowest."""
    joined = (codes.view(codes.shape[0], -1, 8) << NIBBLES).sum(-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32)


def half_scales(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=generator(9)).add_(0.1).half()


def read(config: Mapping[str, object], parts: dict[str, Tensor]) -> Groups:
    scheme = read_scheme(config)
    assert scheme is not None
    weight = scheme.weight("layer", parts)
    assert isinstance(weight, Groups)
    return weight


def gguf(name: str) -> tuple[Groups, Tensor]:
    kind = GGMLQuantizationType[name]
    values = torch.randn(ROWS, COLUMNS, generator=generator(1)).numpy()
    stored = quants.quantize(values, kind)
    return groups_of(name, torch.from_numpy(stored)), torch.from_numpy(quants.dequantize(stored, kind))


def awq() -> tuple[Groups, Tensor]:
    codes, zeros, scales = codes_of(COLUMNS, ROWS), codes_of(COLUMNS // GROUP, ROWS, 1), half_scales(4, ROWS)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    shuffled = [part.view(part.shape[0], -1, 8)[:, :, order].flatten(1) for part in (codes, zeros)]
    parts = {"qweight": words(shuffled[0]), "qzeros": words(shuffled[1]), "scales": scales}
    group = torch.arange(COLUMNS) // GROUP
    return read({"quantization_config": {"quant_method": "awq"}}, parts), (
        (codes - zeros[group]) * scales[group].float()
    ).T


def gptq(*, shuffled: bool) -> tuple[Groups, Tensor]:
    codes, zeros, scales = codes_of(COLUMNS, ROWS), codes_of(COLUMNS // GROUP, ROWS, 1), half_scales(4, ROWS)
    group = torch.arange(COLUMNS) // GROUP
    if shuffled:
        group = group[torch.randperm(COLUMNS, generator=generator(2))]
    parts = {"qweight": words(codes.T).T, "qzeros": words(zeros), "scales": scales, "g_idx": group.int()}
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    # The format stores zero points less one.
    return read(config, parts), ((codes - zeros[group] - 1) * scales[group].float()).T


def mlx() -> tuple[Groups, Tensor]:
    codes, scales = codes_of(ROWS, COLUMNS), half_scales(ROWS, 4)
    biases = torch.randn(ROWS, 4, generator=generator(3)).half()
    config = {"quantization": {"bits": 4, "group_size": GROUP}}
    parts = {"weight": words(codes).view(torch.uint32), "scales": scales, "biases": biases}
    group = torch.arange(COLUMNS) // GROUP
    return read(config, parts), codes * scales[:, group].float() + biases[:, group].float()


FORMATS: dict[str, Callable[[], tuple[Groups, Tensor]]] = {
    "Q4_0": lambda: gguf("Q4_0"),
    "Q4_1": lambda: gguf("Q4_1"),
    "awq": awq,
    "gptq": lambda: gptq(shuffled=False),
    "gptq in order of importance": lambda: gptq(shuffled=True),
    "mlx": mlx,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_its_values_through_the_layout_exactly(name: str) -> None:
    groups, expected = FORMATS[name]()
    repacked = repack(groups)
    assert torch.equal(unpack(repacked).dequantised(), expected)
    assert torch.equal(unpack(repacked).planes[0], groups.planes[0])
    assert repacked.shape == groups.shape


@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_multiplies_what_the_format_defines(name: str) -> None:
    groups, expected = FORMATS[name]()
    # A row for each column: the product is the matrix itself, up to the order of a sum of one term.
    found = int4_linear(torch.eye(COLUMNS)[:, :], repack(groups))
    assert torch.equal(found.T, expected)


def weight_of(out: int, columns: int, group: int, kind: str) -> Groups:
    values = torch.randn(out, columns, generator=generator(out))
    if kind == "minima":
        return quantise_groups(values, bits=4, group=group)
    codes, scales = codes_of(out, columns), half_scales(out, columns // group)
    zeros = codes_of(out, columns // group, 5).byte() if kind == "zeros" else 8
    return Groups(bits=4, planes=pack_codes(codes, bits=4), scales=scales, zeros=zeros)


def drawn(seed: int) -> tuple[int, int, int, int, str]:
    random = Random(seed)
    group = random.choice([32, 64, 96, 128])
    columns = group * random.randint(1, 4)
    return random.randint(1, 80), random.randint(1, 140), columns, group, random.choice(["minima", "zeros", "middle"])


CASES = (
    (0, 8, 64, 32, "middle"),
    (1, 1, 32, 32, "minima"),
    (2, 65, 96, 32, "zeros"),
    (16, 64, 96, 96, "minima"),
    (17, 63, 128, 128, "middle"),
    (65, 129, 160, 32, "zeros"),
    (3, 30, 576, 576, "zeros"),
)


@pytest.mark.parametrize("case", [*CASES, *map(drawn, range(60 if PROVE else 3))])
def test_products_of_any_shape_are_the_references(case: tuple[int, int, int, int, str]) -> None:
    rows, out, columns, group, kind = case
    weight = weight_of(out, columns, group, kind)
    x = torch.randn(rows, columns + 5, generator=generator(rows))[:, :columns]
    bias = torch.randn(out, generator=generator(4)) if rows % 2 else None
    expected = weight.multiply(x, bias)
    torch.testing.assert_close(int4_linear(x, repack(weight), bias), expected, rtol=1e-4, atol=1e-3)


def test_what_the_layout_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bits"):
        repack(quantise_groups(torch.ones(2, 64), bits=5, group=32))
    with pytest.raises(ValueError, match="groups of 16"):
        repack(quantise_groups(torch.ones(2, 64), bits=4, group=16))
