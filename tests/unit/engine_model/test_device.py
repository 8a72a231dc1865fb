"""What a model is held in on an architecture that lacks a type, and where it is computed: known without a GPU."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tidegate_engine.blocks import BlockPool
from tidegate_engine.device import fitted, moved, operations_of, place_of
from tidegate_engine.precision import parse_precision
from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.weights import ModelError
from tidegate_kernels.quantised import quantise_fp8, quantise_fp8_blocks, quantise_groups, quantise_int8
from tidegate_kernels.weight import Dense, Stacked, Weight

VALUES = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
KINDS: dict[str, Callable[[Tensor], Weight]] = {
    "bf16": lambda values: Dense(values.bfloat16()),
    "fp32": Dense,
    "fp8": quantise_fp8,
    "fp8 blocks": quantise_fp8_blocks,
    "int8": quantise_int8,
    "int4": lambda values: quantise_groups(values, bits=4, group=32),
    "int4 in order": lambda values: replace(quantise_groups(values, bits=4, group=32), order=torch.arange(64)),
    "int8 groups": lambda values: quantise_groups(values, bits=8, group=32),
    "two kinds": lambda values: Stacked((quantise_fp8(values[:16]), quantise_int8(values[16:]))),
}
AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.mark.parametrize(
    ("kind", "architecture", "held"),
    [
        ("bf16", AMPERE, "bfloat16"),
        ("fp32", HOPPER, "bfloat16"),
        ("fp8", AMPERE, "bfloat16"),
        ("fp8", HOPPER, "fp8"),
        ("fp8 blocks", AMPERE, "bfloat16"),
        ("fp8 blocks", HOPPER, "fp8-block128"),
        ("int8", AMPERE, "int8"),
        ("int4", AMPERE, "int4-g32"),
        ("int8 groups", HOPPER, "bfloat16"),
        ("two kinds", AMPERE, "bfloat16+int8"),
        ("two kinds", HOPPER, "fp8+int8"),
    ],
)
def test_what_the_architecture_does_not_multiply_is_held_in_bf16_with_its_values(
    kind: str, architecture: tuple[int, int], held: str
) -> None:
    weight = KINDS[kind](VALUES)
    found, reason = fitted(weight, architecture)
    assert found.precision == held
    assert (reason is None) == (held == weight.precision)
    torch.testing.assert_close(found.dequantised(), weight.dequantised(), rtol=2**-8, atol=0)


def test_vectors_stay_as_they_are() -> None:
    norm = Dense(torch.ones(8))
    assert fitted(norm, HOPPER) == (norm, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_goes_to_another_device_whole(kind: str) -> None:
    weight = KINDS[kind](VALUES)
    found = moved(weight, torch.device("meta"))
    assert type(found) is type(weight)
    assert (found.shape, found.precision, found.size_bytes) == (weight.shape, weight.precision, weight.size_bytes)
    parts = found.parts if isinstance(found, Stacked) else (found,)
    for part in parts:
        held = [getattr(part, field.name) for field in fields(part)]  # type: ignore[arg-type]
        held = [each for value in held for each in (value if isinstance(value, tuple) else (value,))]
        assert {each.device.type for each in held if isinstance(each, Tensor)} == {"meta"}


def runner_on(model: Path, architecture: tuple[int, int] | None) -> TorchRunner:
    precision = parse_precision("fp8", dtype="bfloat16", kv="fp8")
    return TorchRunner(
        model, options=TorchOptions(precision=precision, kv_blocks=20, threads=1, architecture=architecture)
    )


def test_a_model_in_fp8_is_loaded_as_it_is_from_ada_on_and_in_bf16_before_with_the_reasons(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        new = runner_on(tiny_model, HOPPER)
    assert new.info.weight_dtype.startswith("fp8") or "fp8" in new.info.weight_dtype
    assert new.info.kv_dtype == "fp8" and not [each for each in caplog.messages if "sm_" in each]
    with caplog.at_level(logging.WARNING):
        old = runner_on(tiny_model, AMPERE)
    assert (old.info.weight_dtype, old.info.kv_dtype) == ("bfloat16", "bfloat16")
    assert old.info.kv_token_bytes == 2 * 2 * 3 * 8 * 2
    weights, cache = (each for each in caplog.messages if "sm_89" in each and "sm_80" in each)
    assert "twice the memory" in weights and "int8" in weights
    assert "--kv-cache-dtype int8" in cache
    scheduler = Scheduler(BatchSettings(2, 64, 64), BlockPool(20, 16), max_model_len=64)
    params = SamplingParams(temperature=0, ignore_eos=True)
    request = Request("r", 3, 4, 0.0, prompt_ids=[5, 6, 7], params=params)
    scheduler.add(request)
    while scheduler.has_work:
        step = scheduler.plan(0.0)
        scheduler.commit(step, old.run(step), 0.0)
    assert len(request.output_ids) == 4


def test_an_architecture_that_no_kernel_runs_on_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match=r"GpuUnsupported: .* sm_75 has no bf16"):
        runner_on(tiny_model, (7, 5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="DeviceMissing: 1 GPUs are asked for, and torch finds 0 here"):
        TorchRunner(tiny_model, options=TorchOptions(device="cuda"))


def test_a_device_that_is_none_and_operations_that_a_gpu_does_not_have_are_refused() -> None:
    with pytest.raises(ModelError, match="DeviceUnknown"):
        place_of("tpu", "auto", rank=0, ranks=1, architecture=None)
    with pytest.raises(ModelError, match="KernelsNeedCpu"):
        operations_of("torch", is_gpu=True)
