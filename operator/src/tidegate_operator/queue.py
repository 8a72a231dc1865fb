"""A keyed work queue: each key waits at most once, is processed by at most one worker, and backs off alone.

Owns no work and knows no Kubernetes. Fed by `handlers`, the resync and the delays that `reconcile` returns; drained by
the workers of `__main__`. Lives in one event loop; not thread-safe.
"""

import asyncio
import itertools
import random
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

FIRST_BACKOFF_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 60.0
PATIENCE_SECONDS = 20.0
"""For so long a key whose timer ended lets others go first: somebody waits for what was added without a timer."""


def backoff_seconds(failures: int, jitter: float) -> float:
    """Delay before the next try after `failures` in a row; `jitter` in [0, 1) spreads it by half to one and a half."""
    return min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures, 16), LONGEST_BACKOFF_SECONDS) * (0.5 + jitter)


class KeyedQueue(Generic[Key]):
    """Invariant: a key waits at most once (`_dirty`), never while it is processed, and has at most one timer."""

    def __init__(self, jitter: random.Random | None = None) -> None:
        self._ready: asyncio.PriorityQueue[tuple[float, int, Key]] = asyncio.PriorityQueue()
        self._dirty: dict[Key, tuple[float, int]] = {}
        """Rank of every key that waits: when it is due, and a number of its own. Others in `_ready` are void."""
        self._numbers = itertools.count()
        self._processing: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._jitter = jitter or random.Random()

    def __len__(self) -> int:
        """Keys that wait now; those with a timer do not count."""
        return len(self._dirty)

    def add(self, key: Key) -> None:
        """Process `key` as soon as possible; once more if it is being processed."""
        self._add(key, asyncio.get_running_loop().time())

    def add_after(self, key: Key, seconds: float) -> None:
        """Process `key` in `seconds`, or earlier when an earlier time is set already."""
        if key in self._dirty:
            return
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if timer is not None and timer.when() <= loop.time() + seconds:
            return
        self._cancel_timer(key)
        self._timers[key] = loop.call_later(seconds, self._end_timer, key)

    async def get(self) -> Key:
        """Wait for the next key; the caller ends it with `done` or `failed`."""
        while True:
            due, number, key = await self._ready.get()
            if self._dirty.get(key) == (due, number) and key not in self._processing:
                del self._dirty[key]
                self._processing.add(key)
                return key

    def done(self, key: Key, recheck_after_seconds: float | None = None) -> None:
        """The pass ended well: failures are forgotten."""
        self._failures.pop(key, None)
        self._release(key)
        if recheck_after_seconds is not None:
            self.add_after(key, recheck_after_seconds)

    def failed(self, key: Key) -> float:
        """The pass failed: `key` comes again after its own backoff, which is returned in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self._release(key)
        delay = backoff_seconds(failures, self._jitter.random())
        self.add_after(key, delay)
        return delay

    def _release(self, key: Key) -> None:
        self._processing.discard(key)
        if key in self._dirty:
            self._ready.put_nowait((*self._dirty[key], key))

    def _end_timer(self, key: Key) -> None:
        self._add(key, asyncio.get_running_loop().time() + PATIENCE_SECONDS)

    def _add(self, key: Key, due: float) -> None:
        self._cancel_timer(key)
        if key in self._dirty and self._dirty[key][0] <= due:
            return
        self._dirty[key] = (due, next(self._numbers))
        if key not in self._processing:
            self._ready.put_nowait((*self._dirty[key], key))

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
