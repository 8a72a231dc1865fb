"""What is kept from step to step is what each step would give from nothing."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.blocks import BlockPool
from tidegate_engine.ngrams import NgramSpeculation
from tidegate_engine.request import PoolingKind, Request, SampledToken, Step, StepItem, Window
from tidegate_engine.scheduler import Scheduler
from tidegate_engine.settings import BatchSettings
from tidegate_engine.step_inputs import Inputs, StepInputs
from tidegate_kernels.reference import Cache, Ragged, in_other_tables, ragged_batch

PROVE = bool(os.environ.get("TIDEGATE_PROVE"))
BLOCK = 4
NO_CACHE = Cache(torch.empty(1, 1, BLOCK, 1), torch.empty(1, 1, BLOCK, 1))


class Expected(NamedTuple):
    items: Sequence[StepItem]
    """In the order of their rows."""
    batch: Ragged
    token_ids: list[int]
    last_rows: dict[str, list[int]]
    """Of each request that gets a token: those of the last known one and of the drafts."""


def from_nothing(step: Step, *, groups: int) -> Expected:
    decodes = step.items[: len(step.decodes)]
    items = [*sorted(decodes, key=lambda item: item.start), *step.chunks]
    tables = [[item.blocks[group::groups] for item in items] for group in range(groups)]
    has_views = any(item.request.window for item in items)
    batch = ragged_batch(
        [item.count for item in items],
        [item.start + item.count for item in items],
        tables[0],
        cache=NO_CACHE,
        views=[item.request.window for item in items] if has_views else None,
    )
    batch = replace(batch, others=tuple(in_other_tables(batch, own) for own in tables[1:]))
    ids: list[int] = []
    last_rows = {}
    for item in items:
        ids += [*item.request.token_ids(item.start, item.count - len(item.drafts)), *item.drafts]
        if item.samples and item.request.pooling is None:
            last_rows[item.request.id] = list(range(len(ids) - 1 - len(item.drafts), len(ids)))
    return Expected(items, batch, ids, last_rows)


def assert_is(found: Inputs, step: Step, *, groups: int) -> None:
    expected = from_nothing(step, groups=groups)
    assert found.token_ids.tolist() == expected.token_ids
    pairs = [(found.batch, expected.batch), *zip(found.batch.others, expected.batch.others, strict=True)]
    for mine, other in pairs:
        for name in ("query_starts", "kv_lengths", "block_tables", "positions", "slots"):
            left, right = getattr(mine, name), getattr(other, name)
            assert left.dtype == right.dtype and left.is_contiguous(), name
            assert left.tolist() == right.tolist(), name
        assert [list(each) for each in mine.counts] == [list(each) for each in other.counts]
        assert (mine.views, mine.block_tokens, mine.groups) == (other.views, BLOCK, {})
    first_rows = dict(zip([item.request.id for item in step.items], found.first_rows.tolist(), strict=True))
    assert [first_rows[item.request.id] for item in expected.items] == expected.batch.query_starts.tolist()[:-1]
    assert [request.id for request in found.sampled] == [
        item.request.id for item in step.items if item.samples and item.request.pooling is None
    ]
    assert found.logits_rows.tolist() == [row for request in found.sampled for row in expected.last_rows[request.id]]
    for place, request in enumerate(found.sampled):
        assert len(found.drafts.get(place, ())) == len(expected.last_rows[request.id]) - 1
    begun = set()
    for item in step.items:
        end = item.start + item.count
        if end % BLOCK and end % BLOCK <= item.count:
            begun |= set(item.blocks[end // BLOCK * groups : (end // BLOCK + 1) * groups])
    assert set(found.begun_blocks) == begun


ACTS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 20), st.sampled_from([None, None, Window(6, 3)])),
    st.tuples(st.just("embed"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("apply"), st.integers(1, 6), st.integers(0, 12), st.integers(1, 9)),
    st.tuples(st.just("run"), st.integers(1, 12)),
)


@pytest.mark.prove
@settings(max_examples=400 if PROVE else 40, deadline=None)
@given(
    acts=st.lists(ACTS, min_size=3, max_size=25),
    windows=st.sampled_from([(None,), (None,), (None, 6), (5, 5, None)]),
    blocks=st.integers(16, 60),
    speculates=st.booleans(),
    deferred=st.integers(2, 9),
)
def test_every_step_of_any_history_is_laid_out_as_from_nothing(
    acts: list[tuple[object, ...]],
    windows: tuple[int | None, ...],
    blocks: int,
    speculates: bool,
    deferred: int,
) -> None:
    """Prompts in chunks, prefix hits, preemptions, aborts, drafts, tokens that are not ready, settings that change."""
    pool = BlockPool(1 + blocks * len(windows), BLOCK, windows=windows)
    scheduler = Scheduler(
        BatchSettings(4, 16, 5), pool, max_model_len=200, speculation=NgramSpeculation(3) if speculates else None
    )
    scheduler._reserve_ratio = 0.0  # so that some are preempted
    inputs = StepInputs(BLOCK, windows)
    made = 0
    steps = 0

    def run_once() -> None:
        nonlocal steps
        step = scheduler.plan(0.0)
        if step.is_empty:
            return
        assert_is(inputs.lay_out(step), step, groups=len(windows))
        steps += 1
        tokens = {}
        for place, item in enumerate(step.items):
            is_deferred = (steps + place) % deferred == 0 and not item.drafts and item.request.pooling is None
            following = tuple(SampledToken(token) for token in item.drafts[: steps % 3])
            first = SampledToken(item.drafts[0] if item.drafts else steps % 3, following=following[1:])
            tokens[item.request.id] = SampledToken(-1, is_deferred=True) if is_deferred else first
        scheduler.commit(step, tokens, 0.0)

    for act in acts:
        match act:
            case ("add", int(length), int(output), window):
                ids = [(place + length) % 3 for place in range(length)]
                own = window if windows == (None,) and isinstance(window, Window) else None
                scheduler.add(Request(f"r{made}", length, output, float(made), prompt_ids=ids, window=own))
                made += 1
            case ("embed", int(length)):
                request = Request(f"r{made}", length, 1, float(made), prompt_ids=[1] * length)
                request.pooling = PoolingKind.LAST
                scheduler.add(request)
                made += 1
            case ("abort", int(number)):
                scheduler.abort(f"r{number}")
            case ("apply", int(seqs), int(extra), int(threshold)):
                scheduler.apply(BatchSettings(seqs, seqs + extra, threshold))
            case ("run", int(count)):
                for _ in range(count):
                    run_once()
    for _ in range(400):
        if not scheduler.has_work:
            break
        run_once()


def test_a_batch_that_outgrows_its_buffers_is_laid_out_as_from_nothing() -> None:
    inputs = StepInputs(BLOCK, (None,))
    tables = [[1 + 300 * row + place for place in range(300)] for row in range(150)]
    requests = [Request(str(row), 1000, 100, 0.0, prompt_ids=[row] * 1000) for row in range(150)]
    for rows, end in ((3, 8), (150, 40), (150, 900), (2, 901), (2, 902)):
        items = [StepItem(requests[row], end - 1 - row % 2, 1, False, tables[row]) for row in range(rows)]
        step = Step(1, items, 1)
        assert_is(inputs.lay_out(step), step, groups=1)
