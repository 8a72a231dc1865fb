"""The table of how kernels are cut: what is read of it, and that every choice in it can be launched."""

import pytest

from tidegate_kernels.launches import ANY, TABLE_PATH, Choice, Tiles, read_choices, tiles_of
from tidegate_kernels.quantised import FP8_BLOCK

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
