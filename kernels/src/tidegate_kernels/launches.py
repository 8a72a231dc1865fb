"""How kernels are cut into programs, by architecture and rows: the reader of `launches.tsv`, and its only one.

A row is "heuristic" until somebody measured it; `kernels/bench` does. Kernels ask when they are launched; nothing is
tried out while serving.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE_PATH = Path(__file__).with_name("launches.tsv")
SOURCES = ("heuristic", "measured")
ANY = 0
"""The architecture of rows for all that have none of their own, the interpreter's among them."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: ROWS × COLUMNS of the output a program, DEPTH of the sum at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Choice:
    """A row of the table."""

    kernel: str
    architecture: int
    rows_at_most: int | None
    """None = any number of rows."""
    tiles: Tiles
    source: str


def tiles_of(kernel: str, *, rows: int, architecture: int) -> Tiles:
    """The choice for so many rows: the architecture's own where it has any. Raises KeyError for an unknown kernel."""
    known = _table()
    choices = known.get((kernel, architecture)) or known[kernel, ANY]
    return next(each.tiles for each in choices if each.rows_at_most is None or rows <= each.rows_at_most)


def read_choices(text: str) -> list[Choice]:
    """The table's rows. Raises ValueError for one whose source is neither of SOURCES."""
    found = []
    for line in text.splitlines()[1:]:
        kernel, architecture, rows, *numbers, source = line.split("\t")
        if source not in SOURCES:
            raise ValueError(f"{line!r} is from {source!r}; a choice is {' or '.join(SOURCES)}")
        tiles = Tiles(*map(int, numbers))
        found.append(Choice(kernel, int(architecture), None if rows == "any" else int(rows), tiles, source))
    return found


@cache
def _table() -> Mapping[tuple[str, int], Sequence[Choice]]:
    """By kernel and architecture, those for the fewest rows first."""
    table: dict[tuple[str, int], list[Choice]] = {}
    for choice in read_choices(TABLE_PATH.read_text(encoding="utf-8")):
        table.setdefault((choice.kernel, choice.architecture), []).append(choice)
    for choices in table.values():
        choices.sort(key=lambda each: float("inf") if each.rows_at_most is None else each.rows_at_most)
        if choices[-1].rows_at_most is not None:
            raise ValueError(f"{TABLE_PATH.name} has no choice of {choices[-1].kernel} for any number of rows")
    return table
