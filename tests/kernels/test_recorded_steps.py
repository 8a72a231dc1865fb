"""A decode step as a CUDA graph records it, on tensors of a GPU that is not there: whatever waits for the device, or
takes a tensor from elsewhere, fails here as it would there. Kernels are not launched, only called."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="what is interpreted is not launched")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tidegate_engine import decode_graphs  # noqa: E402
from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, parameter_shapes  # noqa: E402
from tidegate_engine.decode_graphs import DecodeGraphs, can_be_recorded  # noqa: E402
from tidegate_engine.transformer import Decoder, build_decoder, layer_caches, new_kv_pool  # noqa: E402
from tidegate_kernels.aot import absent_driver  # noqa: E402
from tidegate_kernels.compiled import TRITON  # noqa: E402
from tidegate_kernels.float8 import FP8  # noqa: E402
from tidegate_kernels.quantised import Fp8, Int8, quantise_groups  # noqa: E402
from tidegate_kernels.weight import Dense, Weight  # noqa: E402

GPU = torch.device("cuda", 0)
PLAIN = DecoderConfig(
    layers=(LayerConfig(heads=4, kv_heads=2, inner=96),),
    hidden=64,
    head_size=64,
    vocab_size=50,
    context_tokens=256,
    norm_eps=1e-5,
    ropes=(Rope(10_000.0),),
    tied_head=False,
)
MIXTURE = replace(PLAIN, layers=(replace(PLAIN.layers[0], experts=Experts(4, 2, normalised=True)),))
KINDS: dict[str, Callable[[Tensor], Weight]] = {
    "bf16": Dense,
    "fp8": lambda values: Fp8(values.to(FP8), torch.ones(len(values), 1, device=GPU), in_blocks=False),
    "int8": lambda values: Int8(values.to(torch.int8), torch.ones(len(values), 1, device=GPU)),
}


@pytest.fixture
def launched() -> Iterator[list[str]]:
    """Names of the kernels that were called, none of which runs."""
    names: list[str] = []

    def run(self: Any, *_: object, **__: object) -> None:
        names.append(self.fn.__name__)

    def record(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        return step

    with (
        mock.patch.object(driver, "_active", absent_driver(90)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(decode_graphs, "_graph_of", record),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=132)),
        FakeTensorMode(),
    ):
        yield names


def decoder_of(config: DecoderConfig, kind: str) -> Decoder:
    parameters: dict[str, Weight] = {}
    for name, shape in parameter_shapes(config).items():
        values = torch.ones(shape, dtype=torch.bfloat16, device=GPU)
        is_kept = len(shape) == 1 or name in ("embedding", "head") or "router" in name
        parameters[name] = Dense(values) if is_kept else KINDS[kind](values)
    return build_decoder(config, parameters, TRITON)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_nothing_in_a_recorded_step_waits_for_the_gpu_or_comes_from_the_host(
    kind: str, name: str, launched: list[str]
) -> None:
    config = PLAIN if name == "dense" else MIXTURE
    decoder = decoder_of(config, kind)
    assert can_be_recorded(decoder)
    pool = new_kv_pool(config, blocks=9, block_tokens=16, dtype=FP8, device=GPU)
    DecodeGraphs(decoder, layer_caches(config, pool), sizes=(4,), context_tokens=128)
    assert {"norm_kernel", "turn_and_store_kernel", "attend_kernel", "gate_kernel"} <= set(launched)
    assert launched.count("grouped_kernel") == (2 if name == "mixture" else 0)


def test_experts_that_are_multiplied_one_by_one_are_not_recorded() -> None:
    parameters: dict[str, Weight] = {}
    for name, shape in parameter_shapes(MIXTURE).items():
        values = torch.ones(shape)
        parameters[name] = quantise_groups(values, bits=4, group=32) if "experts" in name else Dense(values)
    assert not can_be_recorded(build_decoder(MIXTURE, parameters, TRITON))
