"""The lengths of requests over some minutes."""

import json
from random import Random

import pytest

from tidegate_operator.lengths import MOST_CELLS, Lengths, Remembered, dump_lengths, follow, load_lengths

MINUTE = 60.0
CHAT = {(64, 64): 0.3, (256, 256): 0.5, (1024, 256): 0.15, (4096, 1024): 0.05}


def sample(shares: dict[tuple[int, int], float], *, requests: int, random: Random) -> Lengths:
    drawn = random.choices(list(shares), list(shares.values()), k=requests)
    return Lengths({key: drawn.count(key) / requests for key in set(drawn)}, 0.5, 0.5, requests)


def minutes(
    past: Remembered | None, windows: list[Lengths], *, start: float = 0.0
) -> tuple[list[Lengths], Remembered | None]:
    told = []
    for number, seen in enumerate(windows):
        now = start + MINUTE * number
        lengths, past = follow(past, seen, now=now, arrived=seen.requests, window_seconds=MINUTE)
        told.append(lengths)
    return told, past


def test_the_share_of_rare_long_requests_is_steadier_than_a_window_tells_it() -> None:
    random = Random(1)
    windows = [sample(CHAT, requests=180, random=random) for _ in range(40)]
    told, _ = minutes(None, windows)
    own = [abs(seen.shares.get((4096, 1024), 0.0) - 0.05) for seen in windows[10:]]
    pooled = [abs(lengths.shares.get((4096, 1024), 0.0) - 0.05) for lengths in told[10:]]
    assert max(pooled) < max(own) / 2
    assert sum(pooled) < sum(own) / 2


def test_another_mix_is_followed_with_the_first_window_that_holds_it() -> None:
    random = Random(2)
    _, past = minutes(None, [sample(CHAT, requests=180, random=random) for _ in range(20)])
    other = sample({(4096, 16): 1.0}, requests=30, random=random)
    (told,), kept = minutes(past, [other], start=20 * MINUTE)
    assert told == other
    assert kept is not None and kept.lengths.shares == {(4096, 16): 1.0}


def test_prompts_that_grow_inside_their_cell_are_another_mix() -> None:
    past = Remembered(0.0, Lengths({(256, 64): 1.0}, 0.1, 0.5, 2000.0))
    grown = Lengths({(256, 64): 1.0}, 0.9, 0.5, 200.0)
    told, _ = follow(past, grown, now=MINUTE, arrived=200, window_seconds=MINUTE)
    assert told.prompt_place == 0.9


def test_answers_to_the_load_before_a_fall_do_not_bend_the_mix() -> None:
    past = Remembered(0.0, Lengths(CHAT, 0.5, 0.5, 2000.0))
    late = Lengths({(64, 64): 0.3, (256, 1024): 0.5, (1024, 256): 0.15, (4096, 1024): 0.05}, 0.5, 0.5, 200.0)
    falling, _ = follow(past, late, now=MINUTE, arrived=100, window_seconds=MINUTE)
    assert (256, 1024) not in {cell for cell, share in falling.shares.items() if share > 0}
    steady, _ = follow(past, late, now=MINUTE, arrived=200, window_seconds=MINUTE)
    assert steady.shares == late.shares


def test_the_first_short_window_is_not_remembered() -> None:
    seen = Lengths({(64, 16): 1.0}, 0.5, 0.5, 50.0)
    assert follow(None, seen, now=0.0, arrived=50, window_seconds=20.0) == (seen, None)


def test_the_same_lengths_again_write_nothing() -> None:
    seen = Lengths(CHAT, 0.5, 0.5, 120.0)
    _, first = minutes(None, [seen])
    _, later = minutes(first, [seen] * 30, start=MINUTE)
    assert later == first


def test_few_cells_are_kept_and_come_back_from_json() -> None:
    many = {(isl, osl): 1 / 49 for isl in range(7) for osl in range(7)}
    _, kept = follow(None, Lengths(many, 0.5, 0.5, 500.0), now=1e6, arrived=500, window_seconds=MINUTE)
    assert kept is not None and len(kept.lengths.shares) == MOST_CELLS
    assert sum(kept.lengths.shares.values()) == pytest.approx(1, abs=0.02)
    assert load_lengths(json.loads(json.dumps(dump_lengths(kept)))) == kept
    assert load_lengths(None) is None
