"""Leaving without cutting anybody: the order in which an engine stops taking requests and ends.

Not ready at once; new requests are served until the endpoints are surely gone, then refused; running ones finish or hit
the timeout. Used by SIGTERM and `/admin/v1/drain` alike; a pause only stops new requests. It knows no HTTP.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

PAUSE_MODES = ("wait", "abort", "keep")
"""What becomes of the requests that have begun: they go on, they end, or they are frozen until the resume."""
POLL_SECONDS = 0.02
ABORT_SECONDS = 5.0


class DrainPhase(StrEnum):
    SERVING = "serving"
    LEAVING = "leaving"
    """Not ready any more, but new requests are still served: clients may not know yet."""
    REFUSING = "refusing"
    DRAINED = "drained"


class Drain:
    """One drain at a time; a second `begin` keeps the first's start and the longer timeout; a final one has its own."""

    def __init__(
        self,
        unfinished: Callable[[], int],
        abort_all: Callable[[str], None],
        *,
        endpoint_removal_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._unfinished = unfinished
        self._abort_all = abort_all
        self._endpoint_removal_seconds = endpoint_removal_seconds
        self._clock = clock
        self._began_at: float | None = None
        self._timeout_seconds = 0.0
        self._is_final = False
        self._preparing = 0
        self._task: asyncio.Task[None] | None = None
        self.pause_mode: str | None = None
        """Set by an administrator: new requests are refused. Leaving goes over it."""

    @property
    def phase(self) -> DrainPhase:
        if self._began_at is None:
            return DrainPhase.SERVING
        if self._task is not None and self._task.done():
            return DrainPhase.DRAINED
        if self._clock() < self._began_at + self._leaving_seconds:
            return DrainPhase.LEAVING
        return DrainPhase.REFUSING

    @property
    def is_paused(self) -> bool:
        return self.pause_mode is not None

    @property
    def accepts(self) -> bool:
        """Whether a new request is served."""
        return self.phase in (DrainPhase.SERVING, DrainPhase.LEAVING)

    @property
    def seconds_left(self) -> float | None:
        """Until running requests are cut; None when not draining."""
        if self._began_at is None:
            return None
        return max(0.0, self._began_at + self._timeout_seconds - self._clock())

    @property
    def _leaving_seconds(self) -> float:
        return min(self._endpoint_removal_seconds, self._timeout_seconds)

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """A call was accepted whose requests the engine may not know yet: it is waited for as they are."""
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1

    @property
    def _has_work(self) -> bool:
        return self._preparing > 0 or self._unfinished() > 0

    def begin(self, timeout_seconds: float, *, at_once: bool = False, is_final: bool = False) -> asyncio.Task[None]:
        """Start to drain; the task ends when nothing runs any more. `at_once` refuses new requests immediately.

        A final drain ends the process: it cannot be cancelled, and its timeout counts from now, whatever was asked
        before, since whoever sent the signal kills the process when its own time is over.
        """
        if at_once:
            self._endpoint_removal_seconds = 0.0
        now = self._clock()
        if self._began_at is None:
            self._began_at = now
        until = now - self._began_at + timeout_seconds
        if is_final:
            self._timeout_seconds = until
        elif not self._is_final:
            self._timeout_seconds = max(self._timeout_seconds, until)
        self._is_final = self._is_final or is_final
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._finish())
        return self._task

    def cancel(self) -> bool:
        """Serve again; False when it was not draining, or drains for good."""
        if self._began_at is None or self._is_final:
            return False
        self._began_at = None
        self._timeout_seconds = 0.0
        if self._task is not None:
            self._task.cancel()
            self._task = None
        return True

    async def _finish(self) -> None:
        began_at = self._began_at
        assert began_at is not None
        while self._clock() < began_at + self._leaving_seconds or self._has_work:
            if self._clock() >= began_at + self._timeout_seconds:
                await self._abort()
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _abort(self) -> None:
        """Aborts act between two steps: give them one long step, and meanwhile abort what was still being prepared."""
        until = self._clock() + ABORT_SECONDS
        while self._has_work and self._clock() < until:
            self._abort_all("the server is shutting down and the time for running requests is over")
            await asyncio.sleep(POLL_SECONDS)
