"""The step-time formula, the profiles that come with it, and the fit that learns it from an engine's own steps."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tidegate_engine.request import Request, Step, StepItem
from tidegate_engine.steptime import (
    MAX_CELLS,
    MIN_SAMPLES,
    TERMS,
    OnlineFit,
    StepModel,
    StepShape,
    load_profile,
    parse_profile,
    profile_names,
    shape_of,
    shape_of_step,
)

MODEL = StepModel(
    base_seconds=0.010,
    threshold_tokens=100,
    token_seconds=1e-4,
    kv_token_seconds=1e-6,
    sequence_seconds=1e-5,
    attention_seconds=1e-8,
    mixed_kv_token_seconds=5e-7,
)


# --- the formula


@pytest.mark.parametrize(
    ("shape", "seconds"),
    [
        (StepShape(1, 0, 1, 0, False), 0.010 + 1e-5),
        (StepShape(100, 0, 1, 0, True), 0.010 + 1e-5),
        (StepShape(300, 0, 1, 0, True), 0.010 + 0.020 + 1e-5),
        (StepShape(10, 5000, 10, 0, False), 0.010 + 0.005 + 1e-4),
        (StepShape(10, 5000, 10, 0, True), 0.010 + 0.005 + 1e-4 + 0.0025),
        (StepShape(50, 0, 1, 1e6, True), 0.010 + 1e-5 + 0.01),
    ],
)
def test_each_term_adds_what_it_says(shape: StepShape, seconds: float) -> None:
    assert MODEL.seconds(shape) == pytest.approx(seconds)


def test_a_shape_sums_its_items() -> None:
    shape = shape_of([(99, 1, False), (199, 1, False), (1000, 200, True)])
    assert shape == StepShape(202, 300, 3, 200 * (1000 + 100), True)
    assert shape_of([]) == StepShape(0, 0, 0, 0.0, False)


def test_a_planned_step_has_the_shape_of_its_items() -> None:
    request = Request("a", 4, 4, 0.0)
    decode, last_chunk = StepItem(request, 99, 1, True, ()), StepItem(request, 1000, 200, True, ())
    short_chunk = StepItem(request, 10, 1, False, ())
    assert shape_of_step(Step(1, (decode, last_chunk), 1)) == shape_of([(99, 1, False), (1000, 200, True)])
    assert shape_of_step(Step(1, (short_chunk,), 1)).has_prefill


# --- profiles


@pytest.mark.parametrize("name", ["h100-llama-3.1-8b", "l4-llama-3.1-8b", "l4-qwen2.5-14b"])
def test_a_profile_is_whole_and_plausible(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.weight_bytes + profile.kv_blocks * profile.block_tokens * profile.kv_token_bytes < 80 * 2**30
    dtype_bytes = {"bfloat16": 2, "float8_e4m3fn": 1}[profile.kv_dtype]
    assert profile.kv_token_bytes == 2 * profile.layers * profile.kv_heads * profile.head_size * dtype_bytes
    assert set(profile.start_seconds) == {"weights", "warmup"}
    one = profile.step.seconds(StepShape(1, 500, 1, 0, False))
    assert 0.003 < one < 0.1
    prefill = profile.step.seconds(StepShape(2048, 0, 1, 2048 * 1024, True))
    assert 5 * one < prefill or prefill > 0.04


def test_every_profile_of_the_package_can_be_read() -> None:
    assert profile_names() == sorted(profile_names()) and len(profile_names()) >= 3
    for name in profile_names():
        assert set(load_profile(name).source) >= set(TERMS)


def test_the_demo_profile_streams_no_more_than_two_cores_can() -> None:
    profile = load_profile("l4-qwen2.5-14b")
    held = (profile.kv_blocks - 1) * profile.block_tokens
    rates = []
    for context in (200, 600, 2000):
        batch = min(256, held // context)
        rates.append(batch / profile.step.seconds(StepShape(batch, batch * context, batch, 0, False)))
    assert max(rates) < 1500


def test_an_unknown_profile_is_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no profile 'h200'; there are h100-llama-3\.1-8b, l4-llama-3\.1-8b"):
        load_profile("h200")


def test_a_profile_can_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(profile_data()), encoding="utf-8")
    assert load_profile(str(file)) == load_profile("l4-llama-3.1-8b")
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read: No such file"):
        load_profile(str(tmp_path / "nowhere.json"))
    file.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        load_profile(str(file))


def profile_data() -> dict[str, Any]:
    profile = load_profile("l4-llama-3.1-8b")
    names = profile.__slots__
    return {name: getattr(profile, name) for name in names} | {"step": profile.step.as_dict()}


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data[key] = data = dict(data[key])
        del data[path[-1]]

    return change


def put(value: object, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data[key] = data = dict(data[key])
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (drop("kv_blocks"), "the profile lacks kv_blocks"),
        (put(1, "kv_blobs"), "the profile does not know kv_blobs"),
        (put(0, "kv_blocks"), "kv_blocks must be a whole number above 0, not 0"),
        (put(1, "kv_blocks"), "kv_blocks must be 2, of which one is never used, to 67108864"),
        (put(10**15, "kv_blocks"), "kv_blocks must be 2, of which one is never used, to 67108864"),
        (put(1e300, "step", "token_seconds"), "no step takes more than 3600"),
        (put(True, "gpus"), "gpus must be a whole number"),
        (put("", "gpu"), "gpu must be a text"),
        (put(7, "model"), "model must be a text, not 7"),
        (put([], "step"), "step must be an object"),
        (drop("step", "token_seconds"), "step lacks token_seconds"),
        (put(1, "step", "magic_seconds"), "step does not know magic_seconds"),
        (put(-1e-6, "step", "token_seconds"), "step.token_seconds must be a number of 0 or more"),
        (put("1e-6", "step", "token_seconds"), "step.token_seconds must be a number"),
        (put(float("nan"), "step", "token_seconds"), "step.token_seconds must be a number"),
        (put(0, "step", "base_seconds"), "base_seconds must be above 0"),
        (drop("start_seconds", "warmup"), "start_seconds lacks warmup"),
        (put(-1, "start_seconds", "weights"), "start_seconds.weights must be a number"),
        (drop("source", "attention_seconds"), "source must say where attention_seconds comes from"),
    ],
)
def test_a_bad_profile_is_named(change: Callable[[dict[str, Any]], None], complaint: str) -> None:
    data = profile_data()
    change(data)
    with pytest.raises(ValueError, match=complaint):
        parse_profile(data)


# --- the online fit


def draw_shapes(generator: random.Random, *, prefill_share: float = 0.3) -> Iterator[StepShape]:
    while True:
        sequences = generator.randint(1, 64)
        kv = sequences * generator.randint(100, 2000)
        if generator.random() < prefill_share:
            chunk, context = generator.choice((64, 256, 512, 1024)), generator.randint(0, 4000)
            attention = chunk * (context + chunk / 2)
            yield StepShape(sequences + chunk, kv, sequences + 1, attention, True)
        else:
            yield StepShape(sequences, kv, sequences, 0.0, False)


PROBES = (
    StepShape(16, 16 * 500, 16, 0, False),
    StepShape(64, 64 * 1000, 64, 0, False),
    StepShape(64 + 1024, 64 * 500, 65, 1024 * 1500, True),
    StepShape(1 + 512, 1000, 2, 512 * 256, True),
)


def assert_predicts(fit: OnlineFit, truth: StepModel, *, within: float) -> None:
    model = fit.model
    assert model is not None
    for probe in PROBES:
        assert model.seconds(probe) == pytest.approx(truth.seconds(probe), rel=within)


@pytest.mark.parametrize("name", ["h100-llama-3.1-8b", "l4-llama-3.1-8b", "l4-qwen2.5-14b"])
def test_the_fit_finds_a_profile_from_noisy_steps(name: str) -> None:
    truth, generator, fit = load_profile(name).step, random.Random(1), OnlineFit()
    for shape, _ in zip(draw_shapes(generator), range(2000), strict=False):
        fit.add(shape, truth.seconds(shape) * generator.uniform(0.95, 1.05))
    assert_predicts(fit, truth, within=0.06)
    assert fit.samples == 2000
    assert fit.residual_ratio is not None and fit.residual_ratio < 0.05


def test_outliers_do_not_move_the_fit() -> None:
    generator, fit = random.Random(2), OnlineFit()
    for shape, _ in zip(draw_shapes(generator), range(2000), strict=False):
        stall = generator.uniform(3, 100) if generator.random() < 0.03 else 1.0
        fit.add(shape, MODEL.seconds(shape) * generator.uniform(0.97, 1.03) * stall)
    assert_predicts(fit, MODEL, within=0.08)


def test_rare_mixed_steps_are_not_drowned_by_decodes() -> None:
    generator, fit = random.Random(3), OnlineFit()
    for shape, _ in zip(draw_shapes(generator), range(500), strict=False):
        fit.add(shape, MODEL.seconds(shape))
    for shape, _ in zip(draw_shapes(generator, prefill_share=0.0), range(4000), strict=False):
        fit.add(shape, MODEL.seconds(shape))
    assert_predicts(fit, MODEL, within=0.08)


def test_the_fit_follows_an_engine_that_became_slower() -> None:
    generator, fit = random.Random(4), OnlineFit()
    slower = replace(MODEL, base_seconds=0.02, token_seconds=2e-4, kv_token_seconds=2e-6)
    for truth in (MODEL, slower):
        for shape, _ in zip(draw_shapes(generator), range(4000), strict=False):
            fit.add(shape, truth.seconds(shape))
    assert_predicts(fit, slower, within=0.1)


def test_too_few_steps_say_nothing() -> None:
    generator, fit = random.Random(5), OnlineFit()
    for shape, _ in zip(draw_shapes(generator), range(MIN_SAMPLES - 1), strict=False):
        fit.add(shape, MODEL.seconds(shape))
    assert (fit.model, fit.residual_ratio, fit.fit) == (None, None, None)


def test_steps_of_one_shape_say_nothing() -> None:
    fit = OnlineFit()
    for number in range(1000):
        fit.add(StepShape(16, 8000 + number, 16, 0.0, False), 0.02)
    assert fit.model is None


def test_what_a_prefill_token_costs_is_not_invented_from_decodes() -> None:
    generator, fit = random.Random(6), OnlineFit()
    for shape, _ in zip(draw_shapes(generator, prefill_share=0.0), range(1000), strict=False):
        fit.add(shape, MODEL.seconds(shape))
    assert fit.model is None


def test_terms_that_the_data_cannot_tell_apart_are_left_out() -> None:
    generator, fit = random.Random(7), OnlineFit()
    truth = replace(MODEL, threshold_tokens=0, attention_seconds=0.0)
    for _ in range(2000):  # one prompt length, never in chunks: its attention is so many tokens
        decodes = generator.randint(1, 64)
        prompts = generator.choice((0, 0, 1, 3, 7))
        tokens = decodes + 256 * prompts
        attention = prompts * 256 * 128.0
        shape = StepShape(tokens, decodes * 500, decodes + prompts, attention, prompts > 0)
        fit.add(shape, truth.seconds(shape))
    result = fit.fit
    assert result is not None
    assert "token_seconds" in result.terms
    assert not {"attention_seconds", "sequence_seconds", "kv_token_seconds"} <= set(result.terms)
    for prompts in (0, 2):
        probe = StepShape(32 + 256 * prompts, 16000, 32 + prompts, prompts * 256 * 128.0, prompts > 0)
        assert result.model.seconds(probe) == pytest.approx(truth.seconds(probe), rel=0.03)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_left_out(seconds: float) -> None:
    fit = OnlineFit()
    fit.add(StepShape(1, 1, 1, 0.0, False), seconds)
    assert fit.samples == 0


@hypothesis_settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0.0, 2.0), count=st.integers(0, 400))
def test_no_coefficient_is_ever_negative(seed: int, noise: float, count: int) -> None:
    generator, fit = random.Random(seed), OnlineFit()
    for shape, _ in zip(draw_shapes(generator), range(count), strict=False):
        fit.add(shape, 1e-3 + noise * generator.random())
    if fit.model is not None:
        assert all(value >= 0 for value in fit.model.as_dict().values())
        assert fit.model.base_seconds > 0


def test_memory_is_bounded() -> None:
    fit = OnlineFit()
    for number in range(5000):
        tokens, kv, sequences = 1 + number % 4000, 7 ** (number % 12), 1 + number % 200
        fit.add(StepShape(tokens, kv, sequences, float(3 ** (number % 17)), number % 2 == 0), 0.01)
    assert len(fit._cells) <= MAX_CELLS
