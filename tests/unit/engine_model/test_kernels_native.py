import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tidegate_engine.architecture import DecoderConfig, Experts, LayerConfig, Rope, parameter_shapes
from tidegate_engine.blocks import NULL_BLOCK
from tidegate_engine.checkpoint import open_checkpoint
from tidegate_engine.ggml_types import stored_weight
from tidegate_engine.native_decoder import MAX_ROWS, native_decoder
from tidegate_engine.precision import Precision, as_stored
from tidegate_engine.request import Request, SamplingParams, Step, StepItem
from tidegate_engine.torch_runner import TorchOptions, TorchRunner
from tidegate_engine.transformer import Decoder, build_decoder, forward, kv_groups, layer_caches, new_kv_pool
from tidegate_kernels import native
from tidegate_kernels.quantised import Groups, pack_codes, quantise_groups
from tidegate_kernels.reference import in_other_tables, ragged_batch
from tidegate_kernels.weight import Dense, Stacked, Weight, linear

REPOSITORY = Path(__file__).parents[3]
IS_COMPILED = native.library() is not None
compiled = pytest.mark.skipif(not IS_COMPILED, reason="no C compiler was there, or the CPU has no AVX2")
ROUNDING = 1e-6
"""Of a sum of products of fp32 numbers, relative to the sum of their sizes."""


@pytest.fixture(params=["avx2", "avx512"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each library that this CPU can run."""
    own = native.library()
    if own is None or (request.param == "avx512" and own.name != "avx512"):
        pytest.skip("this CPU has other instructions, or no C compiler was there")
    monkeypatch.setattr(native, "_instructions", lambda: request.param)
    native.library.cache_clear()
    yield request.param
    native.library.cache_clear()


@pytest.fixture(scope="module")
def build_native() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_native", REPOSITORY / "kernels" / "build_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ggml(name: str, rows: int, columns: int) -> Weight:
    """A GGUF tensor of random bytes, its fp16 scales small numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    from tidegate_engine.ggml_types import _SCALE_BYTES

    kind = GGMLQuantizationType[name]
    values, size = GGML_QUANT_SIZES[kind]
    generator = torch.Generator().manual_seed(rows + columns)
    blocks = torch.randint(0, 256, (rows * columns // values, size), generator=generator).to(torch.uint8)
    for place in _SCALE_BYTES[name]:
        scales = torch.rand(len(blocks), generator=generator).sub_(0.5).half()
        blocks[:, place : place + 2] = scales.view(torch.uint8).view(-1, 2)
    return stored_weight(kind, (rows, columns), blocks.flatten())


def groups(rows: int, columns: int, *, bits: int, group: int, scales: torch.dtype, zeros: bool) -> Groups:
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=torch.Generator().manual_seed(columns))
    count = columns // group
    return Groups(
        bits=bits,
        planes=pack_codes(codes, bits=bits),
        scales=draw(rows, count).to(scales),
        # Of eight bits they may be one more than a byte holds.
        zeros=codes[:, :count].to(torch.uint8 if bits < 8 else torch.int16) if zeros else 1 << (bits - 1),
        minima=None,
    )


def misaligned(values: Tensor) -> Tensor:
    """The same values, one element behind where an allocation begins."""
    return torch.cat((values.new_zeros(1), values.flatten()))[1:].view(values.shape)


def rounding_errors(product: Tensor, x: Tensor, weight: Weight) -> float:
    """The largest difference from the product in fp64, relative to the sum of its terms' sizes."""
    exact, values = weight.dequantised().double(), x.double()
    errors = (product - values @ exact.T).abs() / (1 + values.abs() @ exact.abs().T)
    return float(errors.max()) if errors.numel() else 0.0


WEIGHTS: dict[str, Callable[[int], Weight]] = {
    "float32": lambda rows: Dense(misaligned(draw(rows, 75))),
    "bfloat16": lambda rows: Dense(misaligned(draw(rows, 61).bfloat16())),
    "float16 of 7 columns": lambda rows: Dense(misaligned(draw(rows, 7).half())),
    "float16": lambda rows: Dense(draw(rows, 160).half()),
    "Q4_0": lambda rows: ggml("Q4_0", rows, 96),
    "Q4_1": lambda rows: ggml("Q4_1", rows, 64),
    "Q4_1 of an odd number of groups": lambda rows: ggml("Q4_1", rows, 288),
    "Q8_0": lambda rows: ggml("Q8_0", rows, 96),
    "Q4_K": lambda rows: ggml("Q4_K", rows, 512),
    "Q6_K": lambda rows: ggml("Q6_K", rows, 256),
    "int4-g64": lambda rows: quantise_groups(draw(rows, 192), bits=4, group=64),
    "int8-g16": lambda rows: quantise_groups(draw(rows, 48), bits=8, group=16),
    "int8-g48": lambda rows: quantise_groups(draw(rows, 96), bits=8, group=48),
    "zeros of each group": lambda rows: groups(rows, 128, bits=4, group=32, scales=torch.float16, zeros=True),
    "zeros of two bytes": lambda rows: groups(rows, 128, bits=8, group=32, scales=torch.float16, zeros=True),
    "scales in bfloat16": lambda rows: groups(rows, 128, bits=8, group=32, scales=torch.bfloat16, zeros=False),
    "scales in float32": lambda rows: groups(rows, 64, bits=4, group=64, scales=torch.float32, zeros=False),
    "many columns": lambda rows: ggml("Q4_0", rows, 2112),
    "stacked": lambda rows: Stacked((ggml("Q4_K", rows, 256), ggml("Q6_K", 5, 256), Dense(draw(2, 256)))),
}


@compiled
@pytest.mark.parametrize("name", WEIGHTS)
def test_products_are_those_with_the_dequantised_weights(instructions: str, name: str) -> None:
    for rows in (1, 3, 4, 13, 70):
        weight = WEIGHTS[name](rows)
        laid_out = native.laid_out(weight)
        assert isinstance(laid_out, native.Native), f"{instructions} has no products with {weight.precision}"
        for count in (0, 1, 2, 5, 6, 7, 13, 125):
            x, bias = misaligned(draw(count, weight.shape[1])), draw(laid_out.shape[0])
            found = linear(x, laid_out, bias)
            assert found.shape == (count, laid_out.shape[0])
            assert rounding_errors(found - bias, x, weight) < 2 * ROUNDING, (rows, count)
        half = draw(3, weight.shape[1]).bfloat16()
        assert torch.equal(linear(half, laid_out), linear(half.float(), laid_out).bfloat16())


ROUNDED = (
    "int8-g16", "int8-g48", "int4-g64", "scales in float32", "zeros of each group", "zeros of two bytes",
)  # fmt: skip
"""Of which products and sums are rounded."""


@compiled
@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "stacked"])
def test_values_are_those_that_the_format_defines(instructions: str, name: str) -> None:
    weight = WEIGHTS[name](9)
    found = native.laid_out(weight).rows(2, 7)
    if name in ROUNDED:
        torch.testing.assert_close(found, weight.dequantised()[2:7], rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(found, weight.dequantised()[2:7])


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "zeros of two bytes"])
def test_a_weight_is_multiplied_where_it_lies(name: str) -> None:
    weight = WEIGHTS[name](9)
    found = native.projection_of(weight)
    if found is None:
        pytest.skip("there is no library for this CPU")
    assert sum(tensor.nbytes for tensor in found[1]) <= weight.size_bytes, "nothing is held a second time"
    again = native.projection_of(native.laid_out(weight), torch.zeros(weight.shape[0]))
    assert again is not None
    mine = {tensor.data_ptr() for tensor in native.laid_out(weight).kept}  # type: ignore[attr-defined]
    assert mine == {tensor.data_ptr() for tensor in found[1]} <= {tensor.data_ptr() for tensor in again[1]}


@compiled
@pytest.mark.parametrize("name", ["float32", "bfloat16", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_in_its_row_and_stays_none(instructions: str, name: str, value: float) -> None:
    weight = WEIGHTS[name](6)
    for count in (1, 4, 9):
        x = draw(count, weight.shape[1])
        undisturbed = linear(x, native.laid_out(weight))
        x[count - 1, 5] = value
        found = linear(x, native.laid_out(weight))
        assert torch.equal(found[: count - 1], undisturbed[: count - 1])
        torch.testing.assert_close(
            found[count - 1], x[count - 1] @ weight.dequantised().T, equal_nan=True, rtol=1e-4, atol=1e-4
        )


@compiled
def test_many_rows_are_multiplied_by_torch_with_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FEW_VALUES", 100)
    monkeypatch.setattr(native, "FEW_COLUMNS", 2)
    monkeypatch.setattr(native, "BLOCK_VALUES", 1000)
    for name, make in WEIGHTS.items():
        weight, x = make(33), draw(40, make(1).shape[1])
        assert rounding_errors(linear(x, native.laid_out(weight)), x, weight) < ROUNDING, name


@compiled
def test_any_number_of_threads_gives_the_same_numbers() -> None:
    weight, x = native.laid_out(ggml("Q4_1", 700, 256)), draw(5, 256)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@compiled
def test_weights_of_other_kinds_stay_torchs() -> None:
    ordered = groups(8, 128, bits=4, group=32, scales=torch.float16, zeros=False)
    ordered = Groups(**{name: getattr(ordered, name) for name in ordered.__slots__} | {"order": torch.arange(128)})
    five_bits = groups(8, 128, bits=5, group=32, scales=torch.float16, zeros=False)
    narrow = quantise_groups(draw(8, 64), bits=4, group=8)
    for weight in (ordered, five_bits, narrow, Dense(draw(8, 6).double())):
        assert not isinstance(native.laid_out(weight), native.Native)


CONFIG = DecoderConfig(
    layers=(LayerConfig(heads=4, kv_heads=2, inner=48), LayerConfig(heads=6, kv_heads=2, inner=32)),
    hidden=40,
    head_size=24,
    vocab_size=90,
    context_tokens=64,
    norm_eps=1e-5,
    ropes=(Rope(10_000.0), Rope(500.0)),
    tied_head=False,
)
GEMMA_LAYERS = (
    LayerConfig(heads=4, kv_heads=2, inner=48, window=7, rope=1),
    LayerConfig(heads=4, kv_heads=2, inner=48, rope=0),
    LayerConfig(heads=4, kv_heads=2, inner=48, window=1, rope=None),
)


def config(**changes: object) -> DecoderConfig:
    fields = {name: getattr(CONFIG, name) for name in CONFIG.__slots__}
    return DecoderConfig(**fields | changes)


CONFIGS = {
    "plain": config(),
    "tied": config(tied_head=True),
    "biases and norms of heads": config(qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True),
    "part of a head turned": config(rotated=16),
    "windows, caps, norms after": config(
        layers=GEMMA_LAYERS,
        post_norms=True,
        activation="gelu_tanh",
        attention_scale=0.3,
        attention_soft_cap=5.0,
        logit_soft_cap=3.0,
        embedding_scale=6.3,
    ),
}


def random_decoder(own: DecoderConfig, generator: torch.Generator) -> Decoder:
    parameters: dict[str, Weight] = {
        parameter: Dense(torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1))
        for parameter, shape in parameter_shapes(own).items()
    }
    return build_decoder(own, parameters)


@compiled
@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_is_what_torch_computes(instructions: str, name: str, kv: torch.dtype) -> None:
    """A prompt, a chunk of another beside decodes, and decodes, each by both from caches of their own."""
    own = CONFIGS[name]
    generator = torch.Generator().manual_seed(1)
    decoder = random_decoder(own, generator)
    pools = [new_kv_pool(own, blocks=16, block_tokens=8, dtype=kv) for _ in range(2)]
    by_torch, by_code = (layer_caches(own, pool) for pool in pools)
    found = native_decoder(decoder, by_code)
    assert found is not None
    tables = [[1, 2, 3], [9, 7, 5], [4, 6, 8]]
    for new, lengths in (([19], [19]), ([1, 9], [20, 9]), ([1, 1, 3], [21, 10, 3]), ([1, 1, 1], [22, 11, 4])):
        ids = torch.randint(0, own.vocab_size, (sum(new),), generator=generator)
        batch = ragged_batch(new, lengths, tables[: len(new)], cache=by_torch[0])
        wanted = torch.tensor([sum(new) - 1, 0])
        assert found.takes(batch)
        logits = found.forward(ids, batch, logits_rows=wanted)
        expected = forward(decoder, ids, batch, caches=by_torch, logits_rows=wanted)
        tolerance = 2e-4 if kv.itemsize == 4 else 0.05  # a last bit apart may round to the neighbour in the cache
        torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    if kv == torch.float32:
        for ours, theirs in zip(*pools, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@compiled
def test_layers_in_groups_have_tables_of_their_own_and_look_at_no_block_that_was_given_back(instructions: str) -> None:
    own = CONFIGS["windows, caps, norms after"]
    generator = torch.Generator().manual_seed(2)
    decoder, groups = random_decoder(own, generator), kv_groups(own)
    assert [group.window for group in groups] == [7, None, 1]
    pools = [new_kv_pool(own, blocks=10, block_tokens=8, dtype=torch.float32, groups=groups) for _ in range(2)]
    by_torch, by_code = (layer_caches(own, pool, groups) for pool in pools)
    found = native_decoder(decoder, by_code)
    assert found is not None
    for pool in pools:
        pool[0][:, :, NULL_BLOCK] = torch.nan
    steps = (
        (0, 19, [[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (19, 1, [[0, 2, 3], [4, 5, 6], [0, 0, 9]]),
        (20, 4, [[0, 2, 3], [4, 5, 6], [0, 0, 9]]),
        (24, 1, [[0, 0, 3, 1], [4, 5, 6, 2], [0, 0, 0, 7]]),
    )
    for start, count, (first, *others) in steps:
        ids = torch.randint(0, own.vocab_size, (count,), generator=generator)
        batch = ragged_batch([count], [start + count], [first], cache=by_torch[0])
        batch = replace(batch, others=tuple(in_other_tables(batch, [table]) for table in others))
        wanted = torch.arange(count)
        assert found.takes(batch)
        logits = found.forward(ids, batch, logits_rows=wanted)
        expected = forward(decoder, ids, batch, caches=by_torch, logits_rows=wanted)
        assert logits.isfinite().all()
        torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@compiled
def test_what_a_request_sees_by_a_window_of_its_own_is_left_to_torch() -> None:
    decoder = random_decoder(CONFIG, torch.Generator().manual_seed(3))
    caches = layer_caches(CONFIG, new_kv_pool(CONFIG, blocks=4, block_tokens=8, dtype=torch.float32))
    found = native_decoder(decoder, caches)
    assert found is not None
    for views, is_taken in ((None, True), ([(5, 2)], False)):
        assert found.takes(ragged_batch([1], [20], [[1, 2, 3]], cache=caches[0], views=views)) is is_taken


@compiled
def test_what_is_not_known_is_left_to_torch() -> None:
    mixture = config(layers=(LayerConfig(heads=4, kv_heads=2, inner=48, experts=Experts(2, 1, True)),))
    for own, dtype in ((mixture, torch.float32), (CONFIG, torch.bfloat16)):
        parameters: dict[str, Weight] = {
            name: Dense(draw(*shape).to(dtype)) for name, shape in parameter_shapes(own).items()
        }
        decoder = build_decoder(own, parameters)
        caches = layer_caches(own, new_kv_pool(own, blocks=4, block_tokens=8, dtype=dtype))
        assert native_decoder(decoder, caches) is None


@compiled
def test_the_real_model_as_stored_has_torchs_logits(real_model: Path, instructions: str) -> None:
    checkpoint = open_checkpoint(real_model)
    own = checkpoint.config
    with torch.inference_mode():
        decoder = build_decoder(own, checkpoint.load(torch.float32, as_stored(Precision())))
        assert decoder.weight_precision == "int4-g32+int8-g32"
        caches = [layer_caches(own, new_kv_pool(own, blocks=8, block_tokens=16, dtype=torch.float32)) for _ in "ab"]
        found = native_decoder(decoder, caches[0])
        assert found is not None
        ids = torch.randint(100, 40_000, (MAX_ROWS,), generator=torch.Generator().manual_seed(0))
        batch = ragged_batch([MAX_ROWS], [MAX_ROWS], [range(1, 5)], cache=caches[0][0])
        rows = torch.arange(MAX_ROWS)
        logits = found.forward(ids, batch, logits_rows=rows)
        expected = forward(decoder, ids, batch, caches=caches[1], logits_rows=rows)
    assert (logits - expected).abs().max() < 5e-4  # logits reach 30
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def first_tokens(model: Path, count: int) -> list[int]:
    runner = TorchRunner(model, options=TorchOptions(kv_blocks=16, threads=1))
    request = Request("a", 5, count, 0.0, prompt_ids=[3, 1, 4, 1, 5], params=SamplingParams(temperature=0))
    tokens: list[int] = []
    for start, new in ((0, 5), *((5 + index, 1) for index in range(count - 1))):
        token = runner.run(Step(0, (StepItem(request, start, new, True, [1, 2]),), 0))["a"].token_id
        request.output_ids.append(token)
        tokens.append(token)
    return tokens


@compiled
def test_without_the_library_torch_answers_the_same_and_one_line_says_so(
    tiny_model: Path, uncompiled: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        slowly = first_tokens(tiny_model, 8)
    assert [record.message for record in caplog.records if "by torch alone" in record.message] == [
        "weights are multiplied by torch alone, slower: /nonexistent/native.so is missing: install the package again "
        "where there is a C compiler (gcc, libc6-dev)"
    ]
    monkeypatch.undo()
    native.library.cache_clear()
    assert first_tokens(tiny_model, 8) == slowly


def test_a_build_without_a_compiler_says_one_line_and_makes_nothing(
    build_native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "native.c").write_text("int nothing;")
    monkeypatch.setattr(build_native, "PACKAGE", tmp_path)
    monkeypatch.setenv("PATH", "")
    assert build_native.build() == []
    assert capsys.readouterr().out.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["native.c"]


@compiled
def test_a_library_is_made_anew_when_its_source_changed(
    build_native: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_native, "PACKAGE", tmp_path)
    (tmp_path / "native.c").write_text("int nothing;")
    before = build_native.build()
    assert before == build_native.build()
    assert {path.name for path in before} == {
        native.file_name(name, b"int nothing;") for name in native.INSTRUCTIONS.values()
    }
    (tmp_path / "native.c").write_text("int something;")
    after = build_native.build()
    assert {*tmp_path.glob("*.so")} == {*after}
    assert not {*before} & {*after}
    (tmp_path / "native.c").write_text("no program")
    assert build_native.build() == []
