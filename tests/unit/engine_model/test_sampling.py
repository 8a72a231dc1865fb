"""Properties of the sampler, on small vocabularies and by counting draws."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.request import Request, SamplingParams
from tidegate_engine.sampling import choose, sample, uniform

VOCAB = 50
EOS = (7,)
ENTROPY = b"0123456789abcdef"


def request(name: str = "a", *, output: list[int] | None = None, **params: Any) -> Request:
    made = Request(name, 3, 100, 0.0, prompt_ids=[1, 2, 3], params=SamplingParams(**params))
    made.output_ids = output or []
    made.output_tokens = len(made.output_ids)
    return made


def draw_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def chosen_ids(logits: torch.Tensor, params: SamplingParams, draws: int = 400) -> Counter[int]:
    """How often each token is chosen when the randomness runs evenly through [0, 1)."""
    return Counter(choose(logits, params, (place + 0.5) / draws) for place in range(draws))


def test_temperature_zero_takes_the_most_likely() -> None:
    logits = draw_logits(1, rows=5)
    tokens = sample(logits, [request(str(i), temperature=0) for i in range(5)], eos_ids=EOS, entropy=ENTROPY)
    assert [token.token_id for token in tokens] == logits.argmax(-1).tolist()


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = draw_logits(2)[0]
    for temperature in (0.5, 1.0, 3.0):
        counts = chosen_ids(logits, SamplingParams(temperature=temperature), draws=2000)
        expected = torch.softmax(logits / temperature, -1)
        found = torch.tensor([counts[token] / 2000 for token in range(VOCAB)])
        assert (found - expected).abs().max() < 1e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, VOCAB + 5))
def test_top_k_leaves_the_k_most_likely(seed: int, top_k: int) -> None:
    logits = draw_logits(seed)[0]
    allowed = set(logits.topk(min(top_k, VOCAB)).indices.tolist())
    assert set(chosen_ids(logits, SamplingParams(top_k=top_k), draws=50)) <= allowed


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 0.999))
def test_top_p_leaves_the_fewest_that_reach_p(seed: int, top_p: float) -> None:
    logits = draw_logits(seed)[0]
    values, ids = torch.softmax(logits, -1).sort(descending=True)
    count = int((values.cumsum(0) < top_p).sum()) + 1
    chosen = set(chosen_ids(logits, SamplingParams(top_p=top_p), draws=300))
    assert chosen <= set(ids[: count + 1].tolist())  # one more where rounding decides
    assert set(ids[: max(1, count - 1)][values[: max(1, count - 1)] > 0.01].tolist()) <= chosen


def test_top_p_reaches_beyond_the_tokens_that_are_sorted_first() -> None:
    logits = torch.zeros(2000)
    chosen = chosen_ids(logits, SamplingParams(top_p=0.9), draws=2000)
    assert len(chosen) == 1800


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 1.0))
def test_min_p_leaves_what_is_not_far_below_the_most_likely(seed: int, min_p: float) -> None:
    logits = draw_logits(seed)[0]
    probabilities = torch.softmax(logits, -1)
    for token in chosen_ids(logits, SamplingParams(min_p=min_p), draws=200):
        assert probabilities[token] >= min_p * probabilities.max() * 0.9999


def test_penalties_lower_what_was_said() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.0
    logits[0, 9] = 0.5
    penalties: list[dict[str, Any]] = [
        {"presence_penalty": 0.6},
        {"frequency_penalty": 0.3},
        {"repetition_penalty": 3.0},
    ]
    for params in penalties:
        said = request(output=[4, 4], temperature=0, **params)
        assert sample(logits, [said], eos_ids=EOS, entropy=ENTROPY)[0].token_id == 9, params
        fresh = request(temperature=0, **params)
        assert sample(logits, [fresh], eos_ids=EOS, entropy=ENTROPY)[0].token_id == 4


def test_repetition_is_penalised_in_the_prompt_too_and_makes_negative_logits_less_likely() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 2], logits[0, 9] = -1.0, -1.5
    tokens = sample(logits, [request(temperature=0, repetition_penalty=2.0)], eos_ids=EOS, entropy=ENTROPY)
    assert tokens[0].token_id == 9


def test_no_end_before_the_minimum_length() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 5.0, 4.0, 3.0
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (8,)}
    early = sample(logits, [request(output=[1], **params)], eos_ids=EOS, entropy=ENTROPY)[0]
    late = sample(logits, [request(output=[1, 1], **params)], eos_ids=EOS, entropy=ENTROPY)[0]
    assert (early.token_id, early.is_eos) == (9, False)
    assert (late.token_id, late.is_eos) == (7, True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_a_result_does_not_depend_on_the_batch(seed: int, others: int) -> None:
    logits = draw_logits(seed, rows=others + 1)
    mine = request("mine", seed=seed, top_p=0.9, top_k=20, logprobs=2, presence_penalty=0.3, output=[4])
    rest = [request(f"other {i}", temperature=0.2 * i, min_p=0.1, seed=3) for i in range(others)]
    alone = sample(logits[:1], [mine], eos_ids=EOS, entropy=ENTROPY)[0]
    first = sample(logits, [mine, *rest], eos_ids=EOS, entropy=ENTROPY)[0]
    last = sample(logits.flip(0), [*rest, mine], eos_ids=EOS, entropy=ENTROPY)[-1]
    assert alone == first == last


def test_a_seed_fixes_the_result_and_another_seed_or_position_changes_it() -> None:
    logits = draw_logits(4)
    flat = logits * 0.01

    def ids(**changes: Any) -> list[int]:
        return [
            sample(flat, [request("x", output=[1] * place, **changes)], eos_ids=EOS, entropy=ENTROPY)[0].token_id
            for place in range(20)
        ]

    assert ids(seed=1) == ids(seed=1)
    assert ids(seed=1) != ids(seed=2)
    assert len(set(ids(seed=1))) > 5


def test_without_a_seed_requests_of_one_batch_differ() -> None:
    flat = torch.zeros(30, VOCAB)
    tokens = sample(flat, [request(str(i)) for i in range(30)], eos_ids=EOS, entropy=ENTROPY)
    assert len({token.token_id for token in tokens}) > 10


def test_the_random_numbers_are_even() -> None:
    numbers = [uniform(b"seed", position) for position in range(2000)]
    assert all(0 <= number < 1 for number in numbers)
    counts = Counter(int(number * 10) for number in numbers)
    assert all(140 < counts[tenth] < 260 for tenth in range(10))


def test_logprobs_are_those_of_the_model_whatever_the_temperature() -> None:
    logits = draw_logits(6)
    token = sample(logits, [request(temperature=0.1, seed=1, logprobs=3)], eos_ids=EOS, entropy=ENTROPY)[0]
    expected = torch.log_softmax(logits[0], -1)
    assert token.logprobs is not None
    assert math.isclose(token.logprobs.logprob, float(expected[token.token_id]), abs_tol=1e-5)
    assert [token_id for token_id, _ in token.logprobs.top] == logits[0].topk(3).indices.tolist()
    assert sample(logits, [request(logprobs=0)], eos_ids=EOS, entropy=ENTROPY)[0].logprobs is not None
    assert sample(logits, [request()], eos_ids=EOS, entropy=ENTROPY)[0].logprobs is None


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_own_row(spoil: float) -> None:
    logits = draw_logits(8, rows=3)
    clean = sample(logits, [request(str(i), seed=1) for i in range(3)], eos_ids=EOS, entropy=ENTROPY)
    logits[1, 30] = spoil
    tokens = sample(logits, [request(str(i), seed=1) for i in range(3)], eos_ids=EOS, entropy=ENTROPY)
    assert tokens[1].error == "the model's logits are not finite"
    assert [tokens[0], tokens[2]] == [clean[0], clean[2]]


def test_a_tiny_temperature_is_as_good_as_zero() -> None:
    logits = draw_logits(9)[0] * 100
    assert choose(logits, SamplingParams(temperature=1e-9), 0.999) == int(logits.argmax())
