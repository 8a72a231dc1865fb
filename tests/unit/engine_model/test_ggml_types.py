"""Every type of a GGUF file against the values that the format's own library gives it."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from tidegate_engine.ggml_types import is_finite, keeps_file_bytes, stored_weight
from tidegate_kernels.quantised import Blocks, Groups
from tidegate_kernels.weight import linear

READ_BY_GGUF = [kind for kind in sorted(quants._type_traits, key=lambda kind: kind.name) if kind.name != "BF16"]


def random_rows(kind: GGMLQuantizationType, *, rows: int, blocks: int) -> np.ndarray:
    """Bytes of every value, apart from scales: whatever would make one infinite has its exponent's top bit cleared."""
    size = GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(int(kind))
    data = generator.integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    for _ in range(200):
        with np.errstate(all="ignore"):
            bad = ~np.isfinite(quants.dequantize(data, kind).reshape(rows, blocks, -1)).all(-1)
        if not bad.any():
            return data
        view = data.reshape(rows, blocks, size)
        view[bad] = generator.integers(0, 256, view[bad].shape, dtype=np.uint8)
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", READ_BY_GGUF, ids=lambda kind: kind.name)
def test_a_type_has_the_values_that_its_library_gives_and_stays_as_small_as_in_the_file(
    kind: GGMLQuantizationType,
) -> None:
    columns = 2 * max(256, GGML_QUANT_SIZES[kind][0])
    data = random_rows(kind, rows=6, blocks=columns // GGML_QUANT_SIZES[kind][0])
    stored = torch.from_numpy(data).view(-1)
    weight = stored_weight(kind, (6, columns), stored)
    expected = torch.from_numpy(quants.dequantize(data, kind))
    assert weight.shape == (6, columns)
    assert weight.size_bytes == data.nbytes
    torch.testing.assert_close(weight.dequantised(), expected, atol=0, rtol=0)
    assert is_finite(kind, weight, stored)
    assert isinstance(weight, Blocks) == keeps_file_bytes(kind)
    rows = torch.tensor([4, 0])
    torch.testing.assert_close(weight.select(rows).dequantised(), expected[rows], atol=0, rtol=0)
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)) / expected.abs().max()
    product = x.double() @ expected.double().T
    torch.testing.assert_close(linear(x, weight).double(), product, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "F64"])
def test_floating_point_tensors_are_taken_as_they_are(name: str) -> None:
    kind = GGMLQuantizationType[name]
    values = torch.randn(4, 8)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}[name]
    stored = values.to(dtype).view(torch.uint8).view(-1)
    found = stored_weight(kind, (4, 8), stored)
    torch.testing.assert_close(found.dequantised(), values.to(dtype).float(), atol=0, rtol=0)


@pytest.mark.parametrize(
    "kind", [kind for kind in READ_BY_GGUF if kind.name not in ("MXFP4", "NVFP4")], ids=lambda kind: kind.name
)
def test_a_scale_that_is_not_a_number_is_seen(kind: GGMLQuantizationType) -> None:
    size = GGML_QUANT_SIZES[kind][1]
    data = random_rows(kind, rows=1, blocks=3)
    for place in range(0, size, 2):
        damaged = data.copy()
        damaged[0, size + place : size + place + 2] = [0xFF, 0x7F]
        stored = torch.from_numpy(damaged).view(-1)
        weight = stored_weight(kind, (1, 3 * GGML_QUANT_SIZES[kind][0]), stored)
        with np.errstate(all="ignore"):
            really = bool(np.isfinite(quants.dequantize(damaged, kind)).all())
            assert is_finite(kind, weight, stored) == really, place


def test_groups_are_made_of_the_types_that_are_groups() -> None:
    for name, bits in (("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 5), ("Q5_1", 5), ("Q8_0", 8)):
        kind = GGMLQuantizationType[name]
        weight = stored_weight(kind, (2, 64), torch.zeros(2 * 2 * GGML_QUANT_SIZES[kind][1], dtype=torch.uint8))
        assert isinstance(weight, Groups) and (weight.bits, weight.group) == (bits, 32)


def test_a_type_without_values_of_its_own_is_not_read() -> None:
    with pytest.raises(NotImplementedError):
        stored_weight(GGMLQuantizationType.Q8_K, (1, 256), torch.zeros(292, dtype=torch.uint8))
