"""What decisions remember."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate_engine.settings import BatchSettings
from tidegate_operator.lengths import Lengths, Remembered
from tidegate_operator.memory import (
    MAX_HISTORY,
    MAX_SCALES,
    Buckets,
    Memory,
    Scale,
    Trial,
    Want,
    buckets_for,
    dump_memory,
    forget_unlanded_scale,
    load_memory,
    remember_scale,
    remember_want,
    wants_within,
)

FULL = Memory(
    settings=BatchSettings(64, 4096, 1024),
    generation=7,
    changed_at=100.0,
    trial=Trial(100.0, BatchSettings(32, 2048, 512), {"rate": 2.0}, {"capacity": 3.0}),
    effect={"generation": 6.0},
    cooldown_until=900.0,
    settled=(1.0, 2.0),
    history=(Want(50.0, 3, 2), Want(60.0, 4, 3)),
    since=50.0,
    pending_at=60.0,
    scales=(Scale(90.0, 2, 3),),
    missing_since=99.0,
    correction=0.8,
    corrected_at=98.0,
    lengths=Remembered(97.0, Lengths({(64, 16): 0.75, (4096, 256): 0.25}, 0.4, 0.6, 300.0)),
)


def test_memory_comes_back_from_json_as_it_was() -> None:
    assert load_memory(json.loads(json.dumps(dump_memory(FULL)))) == FULL
    assert load_memory(dump_memory(Memory())) == Memory()


def test_unreadable_memory_is_no_memory() -> None:
    assert load_memory({}) == Memory()
    assert load_memory({"version": 99, "generation": 5}) == Memory()
    assert load_memory({"version": 1, "settings": [1, 2]}) == Memory()
    assert load_memory({"version": 1, "history": [["a", "b", "c"]]}) == Memory()
    assert load_memory({"version": 1, "trial": {"at": 1}}) == Memory()
    assert load_memory({"version": 1, "forecast": {"today": [1]}}) == Memory()
    assert load_memory({"version": 1, "generation": float("inf")}) == Memory()
    assert load_memory({"version": 1, "lengths": {"at": 1, "cells": [[64, 16]]}}) == Memory()


BUCKETS = buckets_for((300, 0), sync_seconds=15)


def test_the_same_want_again_writes_nothing() -> None:
    memory = remember_want(Memory(), Want(1000, 3, 3), current=3, buckets=BUCKETS)
    later = memory
    for at in range(1015, 3000, 15):
        later = remember_want(later, Want(at, 3, 3), current=3, buckets=BUCKETS)
    assert dump_memory(later) == dump_memory(memory)


def test_the_most_wanted_of_a_window_is_known_after_a_dip() -> None:
    memory = remember_want(Memory(), Want(1000, 5, 5), current=5, buckets=BUCKETS)
    memory = remember_want(memory, Want(1100, 2, 2), current=5, buckets=BUCKETS)
    assert max(want.most for want in wants_within(memory, now=1390, seconds=300)) == 5
    assert max(want.most for want in wants_within(memory, now=1410, seconds=300)) == 2


def test_a_pause_while_less_was_wanted_starts_the_window_anew() -> None:
    memory = remember_want(Memory(), Want(1000, 2, 2), current=5, buckets=BUCKETS)
    memory = remember_want(memory, Want(5000, 2, 2), current=5, buckets=BUCKETS)
    assert memory.since == 5000
    assert max(want.most for want in memory.history) == 5


def test_a_scale_that_never_reached_the_cluster_is_forgotten() -> None:
    memory = remember_scale(Memory(), Scale(100, 2, 4), keep_seconds=60)
    assert forget_unlanded_scale(memory, current=2).scales == ()
    assert forget_unlanded_scale(memory, current=4) == memory


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 400), st.integers(1, 1000), st.integers(1, 1000)), max_size=120),
    st.sampled_from([(300, 0), (0, 0), (3600, 10), (20, 60)]),
)
def test_memory_stays_small(steps: list[tuple[float, int, int]], windows: tuple[int, int]) -> None:
    buckets: Buckets = buckets_for(windows, sync_seconds=5)
    memory, now = FULL, 1_700_000_000.0
    for delay, most, least in steps:
        now += delay
        memory = remember_want(memory, Want(now, most, least), current=500, buckets=buckets)
        memory = remember_scale(memory, Scale(now, most, least), keep_seconds=3600)
    assert len(memory.history) <= MAX_HISTORY and len(memory.scales) <= MAX_SCALES
    assert len(json.dumps(dump_memory(memory))) < 4096
