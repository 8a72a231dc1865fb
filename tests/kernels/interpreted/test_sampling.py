"""Chosen tokens against the reference, whose sums are in double precision and whose order is a stable sort's."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidegate_kernels import reference
from tidegate_kernels.reference import Adjustments, Choice
from tidegate_kernels.sampling import choose_tokens

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))


@dataclass(frozen=True, slots=True)
class Wish:
    """What one request asks for."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    random: float = 0.0


def choice_of(wishes: Sequence[Wish]) -> Choice:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(wish, name) for wish in wishes], dtype=dtype)

    return Choice(
        temperatures=column("temperature", torch.float32),
        top_ks=column("top_k", torch.int32),
        top_ps=column("top_p", torch.float32),
        min_ps=column("min_p", torch.float32),
        randoms=column("random", torch.float32),
    )


def adjustments_of(rows: int, size: int, generator: torch.Generator) -> Adjustments:
    """Some rows without entries, some with more than a program applies at once."""
    ids = [torch.randperm(size, generator=generator)[: [0, 3, 300][row % 3]] for row in range(rows)]
    total = sum(map(len, ids))
    return Adjustments(
        starts=torch.tensor([0, *map(len, ids)], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        ids=torch.cat(ids) if rows else torch.empty(0, dtype=torch.int64),
        counts=torch.randint(-1, 4, (total,), generator=generator, dtype=torch.int32),
        biases=torch.randn(total, generator=generator),
        repetitions=torch.rand(rows, generator=generator) + 0.5,
        presences=torch.randn(rows, generator=generator),
        frequencies=torch.randn(rows, generator=generator),
    )


wishes = st.builds(
    Wish,
    temperature=st.sampled_from([0.0, 1e-6, 0.2, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 1023, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.9]),
    # Sums of many equal weights would lie on rounder numbers exactly.
    random=st.integers(0, 2**23 - 1).map(lambda number: (2 * number + 1) / 2**24),
)


@settings(max_examples=150 if PROVE else 6, deadline=None, derandomize=not PROVE)
@given(
    asked=st.lists(wishes, min_size=0, max_size=4),
    size=st.sampled_from([1, 7, 1000, 1024, 1025, 2500]),
    is_tied=st.booleans(),
    has_adjustments=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_of_any_batch_are_the_references(
    asked: list[Wish], size: int, is_tied: bool, has_adjustments: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(asked), size + 3, generator=generator)[:, :size] * 4
    if is_tied:
        # As bf16 leaves them: many are equal.
        logits = logits.round()
    adjustments = adjustments_of(len(asked), size, generator) if has_adjustments else None
    mine, theirs = logits.clone(), logits.clone()
    found = choose_tokens(mine, choice_of(asked), adjustments)
    assert found.tolist() == reference.choose_tokens(theirs, choice_of(asked), adjustments).tolist()
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_token_is_the_same_whoever_else_is_in_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 1100, generator=generator)
    asked = [
        Wish(random=0.3),
        Wish(top_k=40, random=0.7),
        Wish(top_p=0.9, random=0.9),
        Wish(0.0),
        Wish(1.5, 20, 0.8, 0.01, 0.6),
    ]
    together = choose_tokens(logits.clone(), choice_of(asked)).tolist()
    alone = [int(choose_tokens(logits[row : row + 1].clone(), choice_of(asked[row : row + 1]))) for row in range(5)]
    reverse = choose_tokens(logits.flip(0).clone(), choice_of(asked[::-1])).tolist()
    assert together == alone == reverse[::-1]


def spread(count: int) -> list[float]:
    """Random numbers that divide [0, 1) evenly."""
    return [(index + 0.5) / count for index in range(count)]


def test_tokens_are_drawn_as_often_as_their_weights_say() -> None:
    shares = torch.tensor([0.5, 0.25, 0.2, 0.05])
    asked = [Wish(top_k=3, random=random) for random in spread(4000)]
    drawn = reference.choose_tokens(shares.log().repeat(4000, 1), choice_of(asked))
    expected = torch.tensor([0.5, 0.25, 0.2, 0.0]) / 0.95
    torch.testing.assert_close(drawn.bincount(minlength=4) / 4000, expected, atol=0.001, rtol=0)
    free = choice_of([Wish(random=random) for random in spread(32)])
    logits = shares.log().repeat(32, 1)
    assert choose_tokens(logits.clone(), free).tolist() == reference.choose_tokens(logits, free).tolist()


@pytest.mark.parametrize(
    ("wish", "kept"),
    [
        (Wish(top_k=2), {0, 1}),
        (Wish(top_k=4), {0, 1, 2, 3}),
        (Wish(top_p=0.35), {0, 1}),
        (Wish(top_p=1e-9), {0}),
        (Wish(top_p=0.0), {0}),
        (Wish(top_k=4, top_p=0.7), {0, 1, 2}),
        (Wish(min_p=0.9), {0, 1, 2}),
        (Wish(top_k=2, min_p=0.9), {0, 1}),
    ],
)
def test_of_equal_logits_the_lower_numbers_are_kept(wish: Wish, kept: set[int]) -> None:
    # Three of a quarter each, and two of an eighth.
    logits = torch.tensor([0.25, 0.25, 0.25, 0.125, 0.125]).log()
    asked = [replace(wish, random=random) for random in spread(13)]
    found = choose_tokens(logits.repeat(13, 1), choice_of(asked)).tolist()
    assert set(found) == kept
    assert found == reference.choose_tokens(logits.repeat(13, 1), choice_of(asked)).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_gets_no_token_and_its_neighbours_do(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 1100)
    logits[0, 1050] = bad
    logits[1] = float("-inf")
    logits[2, :] = float("-inf")
    logits[2, 1060] = -3.0
    assert choose_tokens(logits, choice_of([Wish(temperature)] * 3)).tolist() == [-1, -1, 1060]


def test_logits_in_another_type_or_in_pieces_are_refused() -> None:
    for logits in (torch.zeros(1, 4).half(), torch.zeros(4, 2).T):
        with pytest.raises(ValueError, match="fp32"):
            choose_tokens(logits, choice_of([Wish()] * len(logits)))


def test_every_field_of_a_choice_is_one_a_row() -> None:
    choice = choice_of([Wish(), Wish()])
    assert all(getattr(choice, field.name).shape == (2,) for field in fields(choice))
