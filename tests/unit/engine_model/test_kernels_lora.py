"""The low-rank operation against its formula, one row at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_kernels.lora import LowRank, OutputPart, add_low_rank

INPUTS, COLUMNS = 6, 11


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta(ranks: tuple[int, ...], seed: int) -> LowRank:
    """One part of two columns for each rank, at columns 1, 4, 7."""
    parts = tuple(
        OutputPart(draw(2, rank, seed=seed + index), 1 + 3 * index, sum(ranks[:index]))
        for index, rank in enumerate(ranks)
    )
    return LowRank(draw(sum(ranks), INPUTS, seed=seed + 10), parts)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([None, 0, 1]), min_size=1, max_size=12))
def test_each_row_gets_the_delta_of_its_own_adapter_and_no_other_value_changes(owners: list[int | None]) -> None:
    adapters = (delta((1, 3), seed=1), delta((2, 2, 5), seed=50))
    x, before = draw(len(owners), INPUTS, seed=7), draw(len(owners), COLUMNS, seed=8)
    rows = [torch.tensor([row for row, own in enumerate(owners) if own == index]) for index in range(2)]
    found = before.clone()
    segments = [(each, own.long()) for each, own in zip(adapters, rows, strict=True) if len(own)]
    add_low_rank(found, x, segments)
    for row, owner in enumerate(owners):
        expected = before[row].double()
        for part in () if owner is None else adapters[owner].parts:
            a = adapters[owner or 0].a[part.first_rank : part.first_rank + part.b.shape[1]]
            expected[part.first_column : part.first_column + 2] += part.b.double() @ (a.double() @ x[row].double())
        torch.testing.assert_close(found[row].double(), expected, atol=1e-5, rtol=1e-5)
        if owner is None:
            assert torch.equal(found[row], before[row])
