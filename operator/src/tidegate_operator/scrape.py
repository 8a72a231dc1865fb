"""Direct scrape of engine pods: a light poller that keeps the last minute of samples of each pod, in memory only.

The embedded default where no Prometheus is given. `reconcile` says which pods it wants (`watch`); one task scrapes them
all. Nothing here is durable: after a restart rates are unknown until enough scrapes exist again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import aiohttp

from tidegate_operator.demand import WINDOW_SECONDS, Measured, PodSample, measured_of, parse_exposition
from tidegate_operator.engines import admin_url, read_bounded

TIMEOUT = aiohttp.ClientTimeout(total=4, connect=2)
CONCURRENCY = 16
SHORTEST_INTERVAL_SECONDS = 1.0
SCRAPES_PER_SYNC = 4
FORGET_AFTER_SECONDS = 150.0
"""A pod that no pass asked for in this time is dropped."""
MAX_PAGE_BYTES = 4 << 20

logger = logging.getLogger(__name__)


def interval_seconds(sync_period_seconds: float) -> float:
    """Time between two scrapes of a pod: enough for four in each sync period."""
    return max(SHORTEST_INTERVAL_SECONDS, sync_period_seconds / SCRAPES_PER_SYNC)


@dataclass(slots=True)
class _Target:
    name: str
    ip: str
    interval: float
    wanted_at: float
    due_at: float
    samples: deque[PodSample] = field(default_factory=deque)
    busy: bool = False


class Scraper:
    """Invariant: a target has at most one scrape in flight, and its samples span at most a window and one interval."""

    def __init__(self, session: aiohttp.ClientSession, *, port: int) -> None:
        self._session, self._port = session, port
        self._targets: dict[str, _Target] = {}
        self._slots = asyncio.Semaphore(CONCURRENCY)
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    def watch(self, pods: Iterable[tuple[str, str, str]], *, sync_period_seconds: float) -> None:
        """Scrape these (incarnation, name, ip) from now on; an incarnation is a pod's uid and its restarts."""
        now, interval = time.time(), interval_seconds(sync_period_seconds)
        for incarnation, name, ip in pods:
            target = self._targets.get(incarnation)
            if target is None or target.ip != ip:
                self._targets[incarnation] = _Target(name, ip, interval, now, now)
                self._wake.set()
            else:
                target.wanted_at, target.interval = now, interval

    def measured(self, incarnations: Iterable[str]) -> Measured:
        """Windows of these pods, as far as they have been scraped."""
        targets = filter(None, map(self._targets.get, incarnations))
        return measured_of({target.name: tuple(target.samples) for target in targets})

    async def run(self) -> None:
        """Scrape what is due, for ever."""
        try:
            while True:
                now = time.time()
                for incarnation, target in list(self._targets.items()):
                    if now - target.wanted_at > FORGET_AFTER_SECONDS:
                        del self._targets[incarnation]
                    elif target.due_at <= now and not target.busy:
                        target.busy, target.due_at = True, now + target.interval
                        task = asyncio.create_task(self._scrape(target))
                        self._running.add(task)
                        task.add_done_callback(self._running.discard)
                due = min((target.due_at for target in self._targets.values()), default=now + 5.0)
                self._wake.clear()
                try:
                    await asyncio.wait_for(self._wake.wait(), max(0.05, min(5.0, due - time.time())))
                except TimeoutError:
                    continue
        finally:
            for task in self._running:
                task.cancel()

    async def _scrape(self, target: _Target) -> None:
        address = admin_url(target.ip, self._port)
        try:
            async with (
                self._slots,
                self._session.get(f"{address}/metrics", timeout=TIMEOUT, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise ValueError(f"HTTP {response.status}")
                page = await read_bounded(response, MAX_PAGE_BYTES)
                sample = parse_exposition(page.decode("utf-8", "replace"), time.time())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            logger.debug("Scrape of %s failed: %s", target.name, error)
            return
        finally:
            target.busy = False
        target.samples.append(sample)
        while target.samples and target.samples[0].at < sample.at - WINDOW_SECONDS - target.interval:
            target.samples.popleft()
