"""Pooled requests go together, at a number of tokens or after a wait that is bounded; none is lost or goes twice."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tidegate_engine.pooled_batcher import PooledBatcher, PooledLimits
from tidegate_engine.request import PoolingKind, Request

LIMITS = PooledLimits(max_tokens=10, max_wait_seconds=0.5)


def request(name: str, tokens: int) -> Request:
    return Request(name, tokens, 1, 0.0, pooling=PoolingKind.LAST)


def names(batch: Sequence[Request]) -> list[str]:
    return [each.id for each in batch]


def test_few_tokens_wait_and_go_together_when_the_first_has_waited_long_enough() -> None:
    batcher = PooledBatcher(LIMITS)
    assert batcher.take(100.0) == []
    batcher.add(request("a", 3), 100.0)
    batcher.add(request("b", 4), 100.4)
    assert batcher.due_at == 100.5
    assert batcher.take(100.49) == []
    assert (batcher.waiting, batcher.tokens) == (2, 7)
    assert names(batcher.take(100.5)) == ["a", "b"]
    assert (batcher.waiting, batcher.tokens) == (0, 0) and batcher.take(200.0) == []


def test_enough_tokens_go_at_once() -> None:
    batcher = PooledBatcher(LIMITS)
    batcher.add(request("a", 3), 100.0)
    batcher.add(request("b", 7), 100.0)
    assert names(batcher.take(100.0)) == ["a", "b"]


def test_what_was_aborted_does_not_go() -> None:
    batcher = PooledBatcher(LIMITS)
    for name in "ab":
        batcher.add(request(name, 4), 100.0)
    removed = batcher.remove("a")
    assert removed is not None and removed.id == "a"
    assert batcher.remove("a") is None and batcher.tokens == 4
    assert names(batcher.take(101.0)) == ["b"]


@given(st.lists(st.tuples(st.floats(0, 0.4), st.integers(1, 12), st.booleans()), max_size=40))
def test_none_waits_longer_than_the_limit_or_goes_twice(arrivals: list[tuple[float, int, bool]]) -> None:
    batcher, now, went = PooledBatcher(LIMITS), 0.0, dict[str, float]()
    arrived: dict[str, float] = {}
    aborted: set[str] = set()

    def release() -> None:
        for each in batcher.take(now):
            assert each.id not in went
            went[each.id] = now

    for number, (gap, tokens, leaves) in enumerate(arrivals):
        # The loop wakes when a batch is due, as the engine's does.
        if batcher.due_at is not None and batcher.due_at <= now + gap:
            now_before, now = now, max(now, batcher.due_at)
            release()
            now = now_before
        now += gap
        name = str(number)
        batcher.add(request(name, tokens), now)
        arrived[name] = now
        if leaves:
            assert batcher.remove(name) is not None
            aborted.add(name)
        release()
    if batcher.due_at is not None:
        now = batcher.due_at
    release()
    assert set(went) == set(arrived) - aborted and batcher.tokens == 0
    assert all(went[name] - arrived[name] <= LIMITS.max_wait_seconds + 1e-9 for name in went)
