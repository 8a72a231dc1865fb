"""Paged attention against the reference, whose caches hold zeros where the kernel's hold NaN."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch

from tidegate_kernels import reference
from tidegate_kernels.float8 import FP8
from tidegate_kernels.paged_attention import MAX_SPLITS, launch_for, paged_attention, splits_for
from tidegate_kernels.reference import AttentionRule, Cache, Ragged, View, ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
NewCache = Callable[..., Cache]
Lengths = Sequence[tuple[int, int]]
"""New tokens of each sequence, and those before them."""
MODELS = ((1, 1), (4, 1), (9, 3), (4, 4), (20, 1), (10, 2))
"""Query heads and key-value heads."""
BLOCKS = 40


class Step:
    """A step's caches, filled for the kernel and for the reference, with the blocks of a sequence anywhere."""

    def __init__(
        self,
        lengths: Lengths,
        new_cache: NewCache,
        *,
        heads: tuple[int, int],
        shape: tuple[int, int],
        dtype: torch.dtype = torch.float32,
        views: Sequence[View | None] | None = None,
    ) -> None:
        size, block_tokens = shape
        self._generator = torch.Generator().manual_seed(len(lengths))
        caches = (BLOCKS, heads[1], block_tokens, size)
        self.cache, self._sound = new_cache(caches, dtype, fill=float("nan")), new_cache(caches, dtype)
        blocks = torch.randperm(BLOCKS, generator=self._generator).tolist()
        self._tables = []
        for new, before in lengths:
            self._tables.append([blocks.pop() for _ in range(max(1, -(-(new + before) // block_tokens)))])
            for cache in (self.cache, self._sound):
                history = ragged_batch([new + before], [new + before], self._tables[-1:], cache=cache)
                if cache is self.cache:
                    tokens = self._draw(2, new + before, heads[1], size)
                if new + before:
                    reference.store_kv(tokens[0], tokens[1], cache, history.slots)
        # Slices of one projection: rows lie apart.
        self.query = self._draw(sum(new for new, _ in lengths), heads[0] + 3, size)[:, : heads[0]]
        self.sinks = self._draw(heads[0])
        self.batch = self._batch(lengths, self.cache, views)
        kept = [index for index, (new, _) in enumerate(lengths) if new]
        self._tables = [self._tables[index] for index in kept]
        kept_views = None if views is None else [views[index] for index in kept]
        self._kept = self._batch([lengths[index] for index in kept], self._sound, kept_views) if kept else None

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def _batch(self, lengths: Lengths, cache: Cache, views: Sequence[View | None] | None) -> Ragged:
        totals = [new + before for new, before in lengths]
        return ragged_batch([new for new, _ in lengths], totals, self._tables, cache=cache, views=views)

    def assert_equal(self, rule: AttentionRule, *, splits: int) -> None:
        found = paged_attention(self.query, self.cache, self.batch, rule, splits=splits)
        expected = self.query.new_empty(0, found.shape[1])
        if self._kept is not None:
            expected = reference.paged_attention(self.query, self._sound, self._kept, rule)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@dataclass(frozen=True, slots=True)
class Case:
    lengths: Lengths
    heads: tuple[int, int]
    shape: tuple[int, int]
    """Head size, and tokens of a block."""
    dtype: torch.dtype
    splits: int
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False
    views: Sequence[View | None] | None = None
    """How far each sequence sees, and how many first tokens stay seen."""


EXAMPLES = (
    Case([(1, 15), (1, 16), (1, 0), (1, 63), (1, 64)], (9, 3), (64, 16), FP8, splits=1),
    Case([(16, 0), (17, 16), (1, 31), (0, 5)], (4, 1), (96, 16), torch.int8, splits=2, window=5),
    Case([(33, 31)], (10, 2), (80, 32), FP8, splits=2, cap=0.7, has_sinks=True),
    Case([(0, 0)], (1, 1), (64, 16), FP8, splits=2, has_sinks=True),
    Case([(1, 200), (1, 40), (1, 150)], (4, 2), (64, 16), FP8, splits=1, views=[(20, 4), None, (33, 40)]),
    Case([(20, 170), (1, 90)], (4, 2), (64, 16), torch.float32, splits=2, views=[(16, 70), (1, 0)], has_sinks=True),
    Case([(1, 100), (1, 3)], (20, 1), (256, 16), torch.bfloat16, splits=8, window=64, has_sinks=True),
)


def drawn(seed: int) -> Case:
    """Decodes, or chunks of prefills with decodes among them; some sequences have no new token, or none at all."""
    random = Random(seed)
    if random.random() < 0.5:
        lengths = [(random.randint(0, 1), random.randint(0, 90)) for _ in range(random.randint(1, 5))]
    else:
        lengths = [(random.randint(0, 37), random.randint(0, 70)) for _ in range(random.randint(1, 3))]
    window, views = random.choice([None, 1, 5, 16, 64, 65, 1000]), None
    if window is None and random.random() < 0.7:
        views = [random.choice([None, (random.randint(1, 80), random.randint(0, 70))]) for _ in lengths]
    return Case(
        lengths,
        heads=random.choice(MODELS),
        shape=(random.choice([64, 80, 96, 128, 256]), random.choice([16, 32])),
        dtype=random.choice([FP8, torch.int8, torch.bfloat16, torch.float32]),
        splits=random.choice([1, 2, 8]),
        window=window,
        cap=random.choice([None, 0.7]),
        has_sinks=random.random() < 0.5,
        views=views,
    )


@pytest.mark.parametrize("case", [*EXAMPLES, *map(drawn, range(300 if PROVE else 8))], ids=repr)
def test_any_step_is_attended_as_by_the_reference(new_cache: NewCache, case: Case) -> None:
    step = Step(case.lengths, new_cache, heads=case.heads, shape=case.shape, dtype=case.dtype, views=case.views)
    rule = AttentionRule(case.shape[0] ** -0.5, case.window, case.cap, step.sinks if case.has_sinks else None)
    step.assert_equal(rule, splits=case.splits)


def test_what_a_view_hides_is_not_read(new_cache: NewCache) -> None:
    step = Step([(1, 200)], new_cache, heads=(2, 1), shape=(64, 16), views=[(16, 16)])
    # Two tiles of 32 tokens hold all that is seen: the first, and the last.
    hidden = step.batch.block_tables[0, 2:-3]
    step.cache.keys[hidden] = torch.nan
    step.cache.values[hidden] = torch.nan
    step.assert_equal(AttentionRule(0.1), splits=1)


def test_views_in_layers_with_a_window_are_refused(new_cache: NewCache) -> None:
    step = Step([(1, 20)], new_cache, heads=(2, 1), shape=(64, 16), views=[(8, 0)])
    with pytest.raises(ValueError, match="no window"):
        paged_attention(step.query, step.cache, step.batch, AttentionRule(0.1, window=4))


@pytest.mark.parametrize("splits", [1, 4])
def test_scores_far_beyond_what_an_exponential_holds_stay_finite(new_cache: NewCache, splits: int) -> None:
    step = Step([(3, 90), (1, 40)], new_cache, heads=(4, 2), shape=(64, 16))
    step.query *= 1e4
    for cap in (None, 50.0):
        step.assert_equal(AttentionRule(1.0, soft_cap=cap), splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_a_sequence_without_any_token_gets_zeros_and_rows_behind_the_last_are_left_alone(
    new_cache: NewCache, splits: int
) -> None:
    step = Step([(1, 20), (1, 0)], new_cache, heads=(2, 1), shape=(64, 16))
    batch = replace(step.batch, kv_lengths=torch.tensor([21, 0], dtype=torch.int32))
    query = torch.cat((step.query, step.query[:1]))
    found = paged_attention(query, step.cache, batch, AttentionRule(0.1), splits=splits)
    assert found[0].isfinite().all()
    assert found[0].count_nonzero() == 128
    assert found[1].eq(0).all()
    assert found[2].isnan().all()


def test_the_number_of_splits_follows_from_what_the_gpu_has_left() -> None:
    def splits(programs: int, kv_tokens: int, split_bytes: int = 4096) -> int:
        return splits_for(programs, kv_tokens, processors=132, split_bytes=split_bytes)

    assert splits(8, 131_072) == 32 == MAX_SPLITS
    assert splits(8, 2048) == 4
    assert splits(64, 131_072) == 4
    assert splits(264, 131_072) == 1
    assert splits(8, 100) == 1
    assert splits(8, 131_072, split_bytes=16 << 20) == 4
    assert splits(8, 131_072, split_bytes=1 << 30) == 1


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_a_program_holds_at_least_what_the_matrix_units_take(size: int, architecture: int) -> None:
    rows = [launch_for(size, rows=rows, architecture=architecture).rows for rows in (1, 40, 10_000)]
    assert rows == [16, 64, 64]
