"""Low-rank deltas of linear layers, for batches whose rows have different ones: the plain-torch path, and the oracle.

A delta adds `(x @ A.T) @ B.T` to a product `y = x @ W.T`, whatever W is held in (LoRA, arXiv:2106.09685; many in one
batch as in Punica, arXiv:2310.18547). Rows that have none are neither read nor written. The engine's `lora` makes the
deltas, its `transformer` calls `add_low_rank`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class OutputPart:
    """The output columns `[first_column, first_column + n)` take `B` `[n, r]` times `[first_rank, first_rank + r)` of
    what A makes. Its scale is in B."""

    b: Tensor
    first_column: int
    first_rank: int


@dataclass(frozen=True, slots=True)
class LowRank:
    """The delta of one product, which may be a fused one: A `[R, in]` holds the A of all parts, one below the other."""

    a: Tensor
    parts: tuple[OutputPart, ...]

    @property
    def size_bytes(self) -> int:
        return self.a.nbytes + sum(part.b.nbytes for part in self.parts)


def add_low_rank(y: Tensor, x: Tensor, segments: Sequence[tuple[LowRank, Tensor]]) -> None:
    """Add to the product `y` `[T, out]` of `x` `[T, in]`, in place, each delta for the rows (int64) that have it.

    No row stands in two segments.
    """
    for delta, rows in segments:
        low = x.index_select(0, rows) @ delta.a.T
        for part in delta.parts:
            columns, ranks = part.b.shape
            values = low[:, part.first_rank : part.first_rank + ranks] @ part.b.T
            y[:, part.first_column : part.first_column + columns].index_add_(0, rows, values)
