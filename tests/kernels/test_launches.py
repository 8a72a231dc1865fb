"""The table of how kernels are cut: what is read of it, that every choice in it can be launched, and that there is one
for every launch: nothing is tried out while serving."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidegate_kernels.launches import ANY, TABLE_PATH, Choice, Tiles, read_choices, tiles_of
from tidegate_kernels.quantised import FP8_BLOCK

ARCHITECTURES = (ANY, 80, 86, 89, 90, 100, 103, 120)
PACKAGES = [TABLE_PATH.parent, TABLE_PATH.parents[3] / "engine-image" / "src" / "tidegate_engine"]
TRIES = {"autotune", "Autotuner", "heuristics", "do_bench", "do_bench_cudagraph"}
"""What Triton tries out or times launches by."""
TEXT = TABLE_PATH.read_text(encoding="utf-8")
CHOICES = read_choices(TEXT)


def test_a_row_count_gets_the_smallest_class_that_holds_it() -> None:
    assert [tiles_of("scaled", rows=rows, architecture=90).rows for rows in (1, 16, 17, 64, 65, 10**6)] == [
        16, 16, 32, 64, 128, 128
    ]  # fmt: skip


def test_an_architectures_own_rows_go_before_those_for_all() -> None:
    found = {each: tiles_of("block_scaled", rows=500, architecture=each) for each in (ANY, 80, 89, 90, 100, 103, 120)}
    wide, narrow = Tiles(128, 128, FP8_BLOCK, 8, 3), Tiles(128, 64, FP8_BLOCK, 8, 3)
    assert found == {ANY: narrow, 80: narrow, 89: narrow, 90: wide, 100: wide, 103: wide, 120: narrow}


def test_every_kernel_has_rows_for_all_architectures_and_no_class_twice() -> None:
    keys = [(each.kernel, each.architecture, each.rows_at_most) for each in CHOICES]
    assert len(keys) == len(set(keys))
    for kernel, architecture, _ in keys:
        assert (kernel, ANY, None) in keys and (kernel, architecture, None) in keys


@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: f"{each.kernel} {each.architecture} {each.rows_at_most}")
def test_tiles_are_powers_of_two_that_matrix_units_take(choice: Choice) -> None:
    tiles = choice.tiles
    assert all(size & (size - 1) == 0 for size in (tiles.rows, tiles.columns, tiles.depth, tiles.warps))
    assert min(tiles.rows, tiles.columns, tiles.depth) >= 16
    if choice.kernel == "block_scaled":
        assert tiles.depth == FP8_BLOCK and FP8_BLOCK % tiles.columns == 0


def test_a_choice_says_whether_it_was_measured() -> None:
    with pytest.raises(ValueError, match="a choice is heuristic or measured"):
        read_choices(TEXT.replace("heuristic", "guessed", 1))


def sources() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted(package.glob("*.py")):
            yield path, path.read_text(encoding="utf-8")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_launch_that_asks_finds_a_row_whatever_its_rows_and_architecture(architecture: int) -> None:
    asked = {name for _, text in sources() for name in re.findall(r'tiles_of\(\s*"(\w+)"', text)}
    assert asked == {each.kernel for each in CHOICES}
    for kernel in asked:
        for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 129, 2048, 1 << 20):
            tiles = tiles_of(kernel, rows=rows, architecture=architecture)
            assert tiles in [each.tiles for each in CHOICES if each.kernel == kernel]


def test_nothing_that_serves_tries_launches_out() -> None:
    """No name of Triton's tuner, and nothing of the measurements, whose `tune` writes the table."""
    for path, text in sources():
        used = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(ast.parse(text))}
        assert not TRIES & used, path
        imported = re.findall(r"^\s*(?:from|import) (tune|speed|measuring|h200)\b", text, re.M)
        assert not imported, path
