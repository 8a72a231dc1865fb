"""Properties of the sampler, on small vocabularies and by counting draws."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine import sampling
from tidegate_engine.request import Request, SampledToken, SamplingParams
from tidegate_engine.sampling import Row, Sampler, key_of, rules_of, uniforms

VOCAB = 50
EOS = (7,)
ENTROPY = b"0123456789abcdef"


def request(name: str = "a", *, output: list[int] | None = None, **params: Any) -> Request:
    made = Request(name, 3, 100, 0.0, prompt_ids=[1, 2, 3], params=SamplingParams(**params))
    made.output_ids = output or []
    made.output_tokens = len(made.output_ids)
    return made


def sample(logits: torch.Tensor, requests: list[Request]) -> list[SampledToken]:
    return Sampler(eos_ids=EOS, entropy=ENTROPY).sample(logits, requests)


def choose(logits: torch.Tensor, params: list[SamplingParams], randoms: list[float]) -> list[int]:
    return sampling.choose(logits, rules_of(params, vocab=logits.shape[1], device=logits.device), randoms)


def draw_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def chosen_ids(logits: torch.Tensor, params: SamplingParams, draws: int = 400) -> Counter[int]:
    """How often each token is chosen when the randomness runs evenly through [0, 1)."""
    randoms = [(place + 0.5) / draws for place in range(draws)]
    return Counter(choose(logits.repeat(draws, 1), [params] * draws, randoms))


def test_temperature_zero_takes_the_most_likely() -> None:
    logits = draw_logits(1, rows=5)
    tokens = sample(logits, [request(str(i), temperature=0) for i in range(5)])
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
        assert sample(logits, [said])[0].token_id == 9, params
        fresh = request(temperature=0, **params)
        assert sample(logits, [fresh])[0].token_id == 4


def test_repetition_is_penalised_in_the_prompt_too_and_makes_negative_logits_less_likely() -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 2], logits[0, 9] = -1.0, -1.5
    tokens = sample(logits, [request(temperature=0, repetition_penalty=2.0)])
    assert tokens[0].token_id == 9


def test_no_end_before_the_minimum_length() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9] = 5.0, 4.0, 3.0
    params: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": (8,)}
    early = sample(logits, [request(output=[1], **params)])[0]
    late = sample(logits, [request(output=[1, 1], **params)])[0]
    assert (early.token_id, early.is_eos) == (9, False)
    assert (late.token_id, late.is_eos) == (7, True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 6))
def test_a_result_does_not_depend_on_the_batch(seed: int, others: int) -> None:
    logits = draw_logits(seed, rows=others + 1)
    mine = request("mine", seed=seed, top_p=0.9, top_k=20, logprobs=2, presence_penalty=0.3, output=[4])
    rest = [request(f"other {i}", temperature=0.2 * i, min_p=0.1, seed=3) for i in range(others)]
    alone = sample(logits[:1], [mine])[0]
    first = sample(logits, [mine, *rest])[0]
    last = sample(logits.flip(0), [*rest, mine])[-1]
    assert alone == first == last


def test_a_seed_fixes_the_result_and_another_seed_or_position_changes_it() -> None:
    logits = draw_logits(4)
    flat = logits * 0.01

    def ids(**changes: Any) -> list[int]:
        return [sample(flat, [request("x", output=[1] * place, **changes)])[0].token_id for place in range(20)]

    assert ids(seed=1) == ids(seed=1)
    assert ids(seed=1) != ids(seed=2)
    assert len(set(ids(seed=1))) > 5


def test_without_a_seed_requests_of_one_batch_differ() -> None:
    flat = torch.zeros(30, VOCAB)
    tokens = sample(flat, [request(str(i)) for i in range(30)])
    assert len({token.token_id for token in tokens}) > 10


def test_the_random_numbers_are_even() -> None:
    numbers = uniforms(np.full(2000, key_of(b"seed"), np.uint64), np.arange(2000)).tolist()
    assert all(0 <= number < 1 for number in numbers)
    counts = Counter(int(number * 10) for number in numbers)
    assert all(140 < counts[tenth] < 260 for tenth in range(10))


def test_logprobs_are_those_of_the_model_whatever_the_temperature() -> None:
    logits = draw_logits(6)
    token = sample(logits, [request(temperature=0.1, seed=1, logprobs=3)])[0]
    expected = torch.log_softmax(logits[0], -1)
    assert token.logprobs is not None
    assert math.isclose(token.logprobs.logprob, float(expected[token.token_id]), abs_tol=1e-5)
    assert [token_id for token_id, _ in token.logprobs.top] == logits[0].topk(3).indices.tolist()
    assert sample(logits, [request(logprobs=0)])[0].logprobs is not None
    assert sample(logits, [request()])[0].logprobs is None


@pytest.mark.parametrize("spoil", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_own_row(spoil: float) -> None:
    logits = draw_logits(8, rows=3)
    clean = sample(logits, [request(str(i), seed=1) for i in range(3)])
    logits[1, 30] = spoil
    tokens = sample(logits, [request(str(i), seed=1) for i in range(3)])
    assert tokens[1].error == "the model's logits are not finite" and tokens[1].is_corrupted
    assert [tokens[0], tokens[2]] == [clean[0], clean[2]]


def test_a_tiny_temperature_is_as_good_as_zero() -> None:
    logits = draw_logits(9)[0] * 100
    token = sample(logits[None], [request(temperature=1e-9)])[0]
    assert token.token_id == int(logits.argmax())
    assert choose(logits[None].clone(), [SamplingParams(temperature=2e-5)], [0.999]) == [token.token_id]


def test_a_bias_moves_its_tokens_and_no_other() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4] = 5.0
    biased = request(temperature=0, logit_bias=((4, -100.0), (9, 0.5)))
    assert [token.token_id for token in sample(logits, [biased, request("b", temperature=0)])] == [9, 4]
    assert {sample(logits, [request(str(n), logit_bias=((30, 100.0),)), biased])[0].token_id for n in range(20)} == {30}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.data())
def test_rows_of_every_kind_side_by_side_get_what_each_gets_alone(seed: int, data: st.DataObject) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2, "temperature": 2.0},
        {"top_k": 40, "top_p": 0.5, "seed": 3},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "output": [4, 9, 4]},
        {"logit_bias": ((7, -100.0),), "top_p": 0.9},
        {"min_tokens": 5, "logprobs": 3},
        {"temperature": 0, "logprobs": 0, "presence_penalty": -1.0, "output": [1]},
    ]
    rows = data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=12))
    logits = draw_logits(seed, rows=len(rows))
    requests = [request(str(index), **kind) for index, kind in enumerate(rows)]
    together = sample(logits, requests)
    for index, mine in enumerate(requests):
        alone = sample(logits[index : index + 1], [mine])[0]
        assert together[index].token_id == alone.token_id
        assert (together[index].logprobs is None) == (mine.params.logprobs is None)


def test_a_large_vocabulary_is_drawn_from_evenly_also_beyond_the_last_whole_span() -> None:
    vocab = 128 * 3 + 5
    randoms = [(place + 0.5) / vocab for place in range(vocab)]
    assert choose(torch.zeros(vocab, vocab), [SamplingParams()] * vocab, randoms) == list(range(vocab))
    edge = 1 - 2**-53
    logits = torch.zeros(1, vocab)
    logits[0, 200:] = -torch.inf
    assert choose(logits.clone(), [SamplingParams()], [edge]) == [199]
    assert choose(logits.clone(), [SamplingParams(top_p=0.999999)], [edge])[0] < 200
    assert choose(logits.clone(), [SamplingParams(min_p=1.0)], [0.0]) == [0]


def test_drafts_are_accepted_as_far_as_they_are_what_would_have_been_chosen() -> None:
    logits = draw_logits(3, rows=4)
    for params in ({"temperature": 0}, {"seed": 5}, {"seed": 5, "frequency_penalty": 1.0, "top_p": 0.9}):
        said = request(output=[8], **params)
        expected: list[int] = []
        for row in range(4):
            step = request(output=[8, *expected], **params)
            expected.append(sample(logits[row : row + 1], [step])[0].token_id)
        for right in range(4):
            drafts = [*expected[:right], *[(token + 1) % VOCAB for token in expected[right:3]]]
            token = Sampler(eos_ids=EOS, entropy=ENTROPY).sample(logits, [said], {0: drafts})[0]
            assert [token.token_id, *(later.token_id for later in token.following)] == expected[: right + 1]


def test_a_draft_after_which_the_logits_are_not_finite_is_left_to_the_next_step() -> None:
    logits = draw_logits(4, rows=3)
    best = logits.argmax(-1).tolist()
    logits[1] = math.nan
    token = Sampler(eos_ids=EOS, entropy=ENTROPY).sample(logits, [request(temperature=0)], {0: best[:2]})[0]
    assert (token.token_id, token.error, token.following) == (best[0], None, ())


def test_a_request_that_bans_every_token_fails_alone() -> None:
    logits = torch.full((2, VOCAB), -torch.inf)
    logits[:, 7] = 1.0
    tokens = sample(logits, [request(temperature=0, min_tokens=3), request("b", temperature=0)])
    assert (tokens[0].error, tokens[0].is_corrupted) == ("no token is left to choose from", False)
    assert tokens[1].token_id == 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_makes_logits_infinite_fails_its_own_request(temperature: float) -> None:
    logits = draw_logits(6, rows=2).abs()
    plain = request("plain", temperature=temperature, seed=1)
    tokens = sample(logits, [request(repetition_penalty=1e-300, temperature=temperature), plain])
    assert "infinite" in (tokens[0].error or "") and not tokens[0].is_corrupted
    assert tokens[1] == sample(logits[1:], [plain])[0] and tokens[1].error is None


class RaisingMasks:
    """Fails for one request, as nothing should."""

    eos_ids = EOS

    def prepare(self, requests: Iterable[Request]) -> None: ...

    def allowed(self, rows: Sequence[Row], *, may_wait: bool) -> tuple[torch.Tensor, list[SampledToken | None]]:
        if any(row.request.id == "bad" for row in rows):
            raise IndexError("the 3rd of 2")
        return torch.ones(len(rows), VOCAB, dtype=torch.bool), [None] * len(rows)


def test_whatever_is_raised_for_one_request_costs_the_others_nothing() -> None:
    logits = draw_logits(7, rows=4)
    good, bad, last = request("good", grammar="x", seed=3), request("bad", grammar="x"), request("last", seed=4)
    tokens = Sampler(eos_ids=EOS, entropy=ENTROPY, masks=RaisingMasks()).sample(logits, [good, bad, last], {0: [8]})
    assert tokens[1].error == "choosing the token failed: IndexError: the 3rd of 2"
    assert (
        tokens[0] == Sampler(eos_ids=EOS, entropy=ENTROPY, masks=RaisingMasks()).sample(logits[:2], [good], {0: [8]})[0]
    )
    assert tokens[0].error is None
    assert tokens[2] == sample(logits[3:], [last])[0]


def test_logits_that_cannot_be_read_fail_the_step() -> None:
    """As those of a device that is lost."""
    with pytest.raises(RuntimeError):
        sample(torch.empty(1, VOCAB, device="meta"), [request()])
