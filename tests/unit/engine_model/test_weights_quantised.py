"""Quantised modules as other programs store them, packed here bit by bit, against the formats' formulas."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidegate_engine.weights_quantised import QuantisationError, parts_of, read_scheme
from tidegate_kernels.quantised import Fp8, Groups, Int8
from tidegate_kernels.weight import Weight, linear

OUT, IN, GROUP = 24, 64, 32
NAME = "model.layers.0.mlp.up_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Which of eight columns each nibble holds, low ones first."""


def codes_of(bits: int, *shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << bits, shape)


def floats_of(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 2) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).sub(0.3).to(dtype)


def bit_row(codes: np.ndarray, bits: int) -> Tensor:
    """`[rows, n]` codes in a row of bits each, low ones first, as words of 32."""
    rows = []
    for row in codes.tolist():
        number = sum(code << (bits * place) for place, code in enumerate(row))
        rows.append([number >> (32 * word) & 0xFFFFFFFF for word in range(len(row) * bits // 32)])
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def whole_words(codes: np.ndarray, bits: int) -> Tensor:
    """`[rows, n]` codes, as many in a word as fit."""
    fit = 32 // bits
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % fit))).astype(np.uint64).reshape(codes.shape[0], -1, fit)
    words = sum(padded[..., place] << np.uint64(bits * place) for place in range(fit))
    return torch.from_numpy(np.asarray(words).astype(np.uint32).view(np.int32))


def weight_of(config: dict[str, Any], parts: Mapping[str, Tensor]) -> Weight:
    scheme = read_scheme(config)
    assert scheme is not None
    return scheme.weight(NAME, parts)


def check(weight: Weight, expected: Tensor) -> None:
    torch.testing.assert_close(weight.dequantised(), expected.float(), atol=0, rtol=0)
    x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(0))
    if isinstance(weight, Groups):
        torch.testing.assert_close(linear(x, weight), x @ expected.float().T, atol=1e-4, rtol=1e-4)


def by_group(values: Tensor | np.ndarray, group: int = GROUP) -> Tensor:
    """Each value for `group` neighbouring columns."""
    return torch.as_tensor(values).repeat_interleave(group, dim=1)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mlx_is_code_times_scale_plus_bias(bits: int, dtype: torch.dtype) -> None:
    codes, scales, biases = (
        codes_of(bits, OUT, IN),
        floats_of(OUT, 2, dtype=dtype),
        floats_of(OUT, 2, dtype=dtype, seed=3),
    )
    words = bit_row(codes, bits).view(torch.uint32)
    weight = weight_of(
        {"quantization": {"bits": bits, "group_size": GROUP, "mode": "affine"}},
        {"weight": words, "scales": scales, "biases": biases},
    )
    check(weight, torch.from_numpy(codes).float() * by_group(scales).float() + by_group(biases).float())
    assert weight.size_bytes == OUT * IN * bits // 8 + 2 * OUT * 2 * 2


def test_mlx_overrides_bits_and_groups_of_a_module() -> None:
    codes, scales, biases = codes_of(6, OUT, IN), floats_of(OUT, 1), floats_of(OUT, 1, seed=3)
    config = {"bits": 4, "group_size": GROUP, NAME: {"bits": 6, "group_size": 64}, "lm_head": False}
    parts = {"weight": bit_row(codes, 6), "scales": scales, "biases": biases}
    expected = torch.from_numpy(codes).float() * by_group(scales, 64).float() + by_group(biases, 64).float()
    check(weight_of({"quantization": config, "quantization_config": config}, parts), expected)
    scheme = read_scheme({"quantization": config})
    assert scheme is not None
    with pytest.raises(QuantisationError, match="has scales for lm_head, which it says is not quantised"):
        scheme.weight("lm_head", parts)


def awq_words(codes: np.ndarray) -> Tensor:
    rows, columns = codes.shape
    words = np.zeros((rows, columns // 8), dtype=np.uint32)
    for nibble, place in enumerate(AWQ_ORDER):
        words |= codes[:, place::8].astype(np.uint32) << np.uint32(4 * nibble)
    return torch.from_numpy(words.view(np.int32))


def test_awq_is_distance_from_zero_times_scale() -> None:
    codes, zeros, scales = codes_of(4, IN, OUT), codes_of(4, 2, OUT, seed=4), floats_of(2, OUT)
    weight = weight_of(
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}},
        {"qweight": awq_words(codes), "qzeros": awq_words(zeros), "scales": scales},
    )
    spread = [torch.as_tensor(values).repeat_interleave(GROUP, dim=0) for values in (zeros, scales)]
    check(weight, ((torch.from_numpy(codes) - spread[0]) * spread[1].float()).T)
    assert weight.size_bytes == OUT * IN // 2 + OUT * 2 * 3


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_gptq_takes_each_columns_group_and_its_first_versions_zeros_less_one(
    bits: int, form: str, ordered: bool
) -> None:
    outputs = 32
    codes, zeros, scales = codes_of(bits, IN, outputs), codes_of(bits, 2, outputs, seed=4), floats_of(2, outputs)
    groups = np.arange(IN) // GROUP
    if ordered:
        groups = np.random.default_rng(9).permutation(groups)
    weight = weight_of(
        {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": form}},
        {
            "qweight": bit_row(codes.T, bits).T.contiguous(),
            "qzeros": bit_row(zeros, bits),
            "scales": scales,
            "g_idx": torch.from_numpy(groups).int(),
        },
    )
    less = 1 if form == "gptq" else 0
    expected = (torch.from_numpy(codes) - torch.from_numpy(zeros)[groups] - less) * scales[groups].float()
    check(weight, expected.T)
    assert isinstance(weight, Groups) and (weight.order is not None) == ordered


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    activations = weights.pop("activations", None)
    group = {"targets": weights.pop("targets", ["Linear"]), "weights": weights, "input_activations": activations}
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}}
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_integers_are_distance_from_zero_times_scale(bits: int, symmetric: bool, strategy: str) -> None:
    groups = 2 if strategy == "group" else 1
    codes, zeros, scales = codes_of(bits, OUT, IN), codes_of(bits, OUT, groups, seed=4), floats_of(OUT, groups)
    parts = {
        "weight_packed": whole_words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUT, IN]),
        "weight_zero_point": whole_words(zeros.T, bits).T.contiguous(),
    }
    if symmetric:
        del parts["weight_zero_point"]
        zeros = np.full_like(zeros, 1 << (bits - 1))
    config = compressed("pack-quantized", num_bits=bits, type="int", strategy=strategy, symmetric=symmetric)
    expected = (torch.from_numpy(codes) - by_group(zeros, IN // groups)) * by_group(scales, IN // groups).float()
    check(weight_of(config, parts), expected)


def test_compressed_integers_keep_the_groups_of_reordered_columns() -> None:
    codes, scales = codes_of(4, OUT, IN), floats_of(OUT, 2)
    groups = np.random.default_rng(9).permutation(np.arange(IN) // GROUP)
    parts = {
        "weight_packed": whole_words(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUT, IN]),
        "weight_g_idx": torch.from_numpy(groups).int(),
    }
    weight = weight_of(compressed("pack-quantized", num_bits=4, type="int", strategy="group"), parts)
    check(weight, (torch.from_numpy(codes) - 8) * scales[:, groups].float())


def test_the_group_that_names_a_module_more_exactly_wins() -> None:
    codes, scales = codes_of(8, OUT, IN), floats_of(OUT, 1)
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="channel")
    described = config["quantization_config"]["config_groups"]
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    described["own"] = {"targets": ["re:.*up_proj$"], "weights": weights}
    parts = {
        "weight_packed": whole_words(codes, 8),
        "weight_scale": scales,
        "weight_shape": torch.tensor([OUT, IN]),
    }
    check(weight_of(config, parts), (torch.from_numpy(codes) - 128) * scales.float())


ACTIVATIONS = {"num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize("scales", [(1,), (OUT, 1), (OUT,)])
@pytest.mark.parametrize("activations", [ACTIVATIONS, None])
def test_compressed_int8_is_code_times_scale(scales: tuple[int, ...], activations: dict[str, Any] | None) -> None:
    codes = torch.from_numpy(codes_of(8, OUT, IN) - 128).to(torch.int8)
    scale = floats_of(*scales, dtype=torch.bfloat16)
    config = compressed("int-quantized", num_bits=8, type="int", strategy="channel", activations=activations)
    weight = weight_of(config, {"weight": codes, "weight_scale": scale})
    assert isinstance(weight, Groups if activations is None else Int8)
    check(weight, codes.float() * scale.float().reshape(-1, 1))


def fp8_codes(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(6)).to(torch.float8_e4m3fn)


FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quantization_config": {**FP8_CONFIG, "weight_block_size": [128, 128]}}, "weight_scale_inv"),
        (
            compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            "weight_scale",
        ),
    ],
    ids=["fp8", "compressed"],
)
def test_fp8_in_blocks_is_code_times_the_multiplier_of_its_block_under_either_name(
    config: dict[str, Any], name: str
) -> None:
    codes, scales = fp8_codes(200, 328), floats_of(2, 3, dtype=torch.float32)
    weight = weight_of(config, {"weight": codes, name: scales})
    expected = codes.float() * by_group(scales.repeat_interleave(128, dim=0), 128)[:200, :328]
    check(weight, expected)
    assert isinstance(weight, Fp8) and weight.in_blocks


@pytest.mark.parametrize("scales", [(), (1,), (OUT,), (OUT, 1)])
@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "compressed"])
def test_fp8_is_code_times_the_multiplier_of_its_row_or_of_all(method: str, scales: tuple[int, ...]) -> None:
    codes, scale = fp8_codes(OUT, IN), floats_of(*(scales or (1,)), dtype=torch.float32).reshape(scales)
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel", activations=ACTIVATIONS)
    if method != "compressed":
        config = {"quantization_config": {"quant_method": method}}
    weight = weight_of(config, {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(1)})
    check(weight, codes.float() * scale.reshape(-1, 1))
    assert isinstance(weight, Fp8) and weight.quantised_activations


def test_a_module_is_quantised_when_it_has_scales() -> None:
    names = {f"{NAME}.{part}" for part in ("weight", "scales", "biases")} | {"norm.weight", "a.qweight", "a.g_idx"}
    assert parts_of(NAME, names) == {part: f"{NAME}.{part}" for part in ("weight", "scales", "biases")}
    assert parts_of("norm", names) == {}
    assert parts_of("a", names) == {"qweight": "a.qweight", "g_idx": "a.g_idx"}
    assert read_scheme({"architectures": ["LlamaForCausalLM"]}) is None


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"quant_method": "bitsandbytes"}, "is quantised by 'bitsandbytes'; supported are mlx, awq, gptq, fp8"),
        ({"quant_method": "quip"}, "is quantised by 'quip'"),
        ({}, "is quantised by None"),
        ("int4", "is described as quantised by 'int4', which is no object"),
        ({"quant_method": "awq", "version": "gemv"}, "in the version 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "is quantised with 3 as bits"),
        ({"quant_method": "gptq", "bits": 16}, "is quantised with 16 as bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the format 'marlin'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "has FP8 weights in blocks of [64, 64]"),
        ({"quant_method": "mlx", "mode": "mxfp4"}, "by MLX in the mode 'mxfp4'; supported is affine"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "in the format 'nvfp4-pack"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "has no config_groups"),
        (compressed("float-quantized", num_bits=4, type="float"), "is compressed to 'float' of 4 bits"),
        (compressed("int-quantized", num_bits=8, targets=["re:("]), "which is no pattern"),
        (compressed("int-quantized", strategy="tensor_group"), "by the strategy 'tensor_group'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(described: Any, sentence: str) -> None:
    config = described if isinstance(described, dict) and "quantization_config" in described else None
    with pytest.raises(QuantisationError) as caught:
        read_scheme(config or {"quantization_config": described})
    assert sentence in str(caught.value)


SOUND: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]]]] = {
    "mlx": (
        {"quantization": {"bits": 3, "group_size": GROUP}},
        lambda: {"weight": bit_row(codes_of(3, OUT, IN), 3), "scales": floats_of(OUT, 2), "biases": floats_of(OUT, 2)},
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq"}},
        lambda: {
            "qweight": awq_words(codes_of(4, IN, OUT)), "qzeros": awq_words(codes_of(4, 2, OUT)),
            "scales": floats_of(2, OUT),
        },
    ),
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        lambda: {
            "qweight": bit_row(codes_of(4, OUT, IN), 4).T.contiguous(), "qzeros": bit_row(codes_of(4, 2, OUT), 4),
            "scales": floats_of(2, OUT), "g_idx": (torch.arange(IN) // GROUP).flip(0),
        },
    ),
    "fp8": (
        {"quantization_config": FP8_CONFIG},
        lambda: {"weight": fp8_codes(OUT, IN), "weight_scale": floats_of(OUT)},
    ),
    "packed": (
        compressed("pack-quantized", num_bits=3, type="int", strategy="group", symmetric=False),
        lambda: {
            "weight_packed": whole_words(codes_of(3, OUT, IN), 3), "weight_scale": floats_of(OUT, 2),
            "weight_shape": torch.tensor([OUT, IN]),
            "weight_zero_point": whole_words(codes_of(3, 2, OUT), 3).T.contiguous(),
        },
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        lambda: {"weight": torch.zeros(OUT, IN, dtype=torch.int8), "weight_scale": floats_of(OUT, 1)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", SOUND)
def test_a_missing_tensor_is_named(method: str) -> None:
    config, make = SOUND[method]
    for missing in make().keys() - {"g_idx"}:
        parts = make()
        del parts[missing]
        with pytest.raises(QuantisationError, match=f"lacks the tensor {NAME}.{missing}"):
            weight_of(config, parts)


@pytest.mark.parametrize("method", SOUND)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_tensors_of_any_shape_and_type_are_a_weight_or_refused(method: str, data: st.DataObject) -> None:
    config, make = SOUND[method]
    parts = make()
    name = data.draw(st.sampled_from(sorted(parts)))
    shape = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8, OUT, IN]), max_size=3))
    dtype = data.draw(st.sampled_from([torch.int32, torch.uint8, torch.float16, torch.int8, torch.float8_e4m3fn]))
    parts[name] = torch.ones(shape).to(dtype)
    try:
        weight = weight_of(config, parts)
    except QuantisationError as error:
        assert "\n" not in str(error)  # noqa: PT017  # either is right
        return
    assert torch.isfinite(weight.dequantised()).all()


@pytest.mark.parametrize("method", SOUND)
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_a_matrix_without_values_is_refused(method: str, side: str) -> None:
    config, make = SOUND[method]
    parts = make()
    across = (side == "columns") != (method in ("awq", "gptq"))
    for name in ("weight", "qweight", "weight_packed"):
        if name in parts:
            parts[name] = parts[name][:, :0] if across else parts[name][:0]
    of_rows = {
        "qzeros": 1,
        "weight_zero_point": 0,
        "weight_scale": 0,
        "scales": 0 if method == "mlx" else 1,
        "biases": 0,
    }
    of_columns = {"biases": 1, "scales": 1 if method == "mlx" else 2, "g_idx": 0}
    for name, dimension in (of_rows if side == "rows" else of_columns).items():
        if name in parts and dimension < parts[name].dim():
            parts[name] = parts[name].narrow(dimension, 0, 0)
    if method == "packed":
        parts["weight_shape"] = torch.tensor([0, IN] if side == "rows" else [OUT, 0])
    with pytest.raises(QuantisationError, match=rf"has {NAME}\.\w+ in the shape \(.*\), without a value"):
        weight_of(config, parts)


@pytest.mark.parametrize("method", SOUND)
def test_scales_that_are_not_finite_are_refused(method: str) -> None:
    config, make = SOUND[method]
    parts = make()
    name = "scales" if "scales" in parts else "weight_scale"
    parts[name].view(-1)[1] = torch.inf
    with pytest.raises(QuantisationError, match=f"is damaged: {NAME} has scales that are not finite"):
        weight_of(config, parts)
