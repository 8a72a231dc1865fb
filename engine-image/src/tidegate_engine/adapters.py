"""The LoRA adapters that clients may name as models: loaded and unloaded while the engine serves.

The HTTP process' word on which names are served, and the order of a change: an adapter's name is served once the engine
holds it, and is served no more before the engine lets go of it, which waits for the requests that have it. No torch, no
HTTP: `admin` takes the orders, `completions` asks for names, `serve` loads those of the command line.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tidegate_engine.engine import NO_ADAPTERS
from tidegate_engine.engine_client import EngineClient, EngineGone
from tidegate_engine.request import Adapter
from tidegate_engine.runner import ADAPTER_FILES, AdapterInfo
from tidegate_engine.weights import ModelError

POLL_SECONDS = 0.02
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
"""No comma and no quote: names are listed in a metric's label."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter whose name clients may use. `loaded_at` is in seconds of the epoch."""

    info: AdapterInfo
    key: Adapter
    loaded_at: int


class ServedAdapters:
    """One change at a time. `root`: the folder that live loads must lie in; None = adapters are off."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        base_names: tuple[str, ...],
        root: Path | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._base_names = base_names
        self._root = root
        self._clock = clock
        self._served: dict[str, ServedAdapter] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._lock = asyncio.Lock()

    @property
    def are_on(self) -> bool:
        return self._root is not None

    @property
    def served(self) -> Mapping[str, ServedAdapter]:
        """By name, in the order in which they were loaded."""
        return self._served

    def running(self, name: str) -> int:
        """Requests that have the adapter, waiting ones included."""
        live = self._engine.live_requests()
        return sum(1 for request in live if request.adapter is not None and request.adapter.name == name)

    async def load_below_root(self, name: str, path: str) -> AdapterInfo:
        """Load what an administrator names; raises ModelError, also for a folder outside of the root."""
        return await self.load(name, await asyncio.to_thread(self._below_root, path))

    async def load(self, name: str, folder: Path) -> AdapterInfo:
        """Have the engine hold the adapter in `folder`, then serve it; raises ModelError, and then nothing changed."""
        async with self._lock:
            self._check_name(name)
            info = await self._engine.load_adapter(name, folder)
            self._served[name] = ServedAdapter(info, Adapter(name, info.digest), int(self._clock()))
        logger.info("adapter %s of rank %d loaded from %s", name, info.rank, folder)
        return info

    async def unload(self, name: str, *, wait_seconds: float) -> bool:
        """Serve the adapter no more, and let go of it when its requests have ended; raises ModelError.

        Returns whether that was within `wait_seconds`; else it comes by itself.
        """
        async with self._lock:
            if name not in self._leaving:
                if name not in self._served:
                    raise ModelError("AdapterUnknown", f"no adapter {name!r} is loaded; {self.describe()}")
                del self._served[name]
                self._leaving[name] = asyncio.create_task(self._let_go(name))
            leaving = self._leaving[name]
        done, _ = await asyncio.wait((leaving,), timeout=wait_seconds)
        for task in done:
            task.result()
        return bool(done)

    def describe(self) -> str:
        """Which adapters are loaded, as the end of a sentence."""
        return f"LoRA adapters: {', '.join(self._served) or 'none'}"

    async def _let_go(self, name: str) -> None:
        try:
            while self.running(name):  # noqa: ASYNC110  # as a drain does: the end of requests has no event
                await asyncio.sleep(POLL_SECONDS)
            await self._engine.unload_adapter(name)
        except EngineGone as error:
            logger.warning("adapter %s is gone with the engine: %s", name, error)
            raise
        finally:
            del self._leaving[name]
        logger.info("adapter %s unloaded", name)

    def _check_name(self, name: str) -> None:
        if self._root is None:
            raise ModelError("AdaptersOff", NO_ADAPTERS)
        if not _NAME.fullmatch(name):
            raise ModelError(
                "AdapterNameInvalid",
                f"{name!r:.160} is no name for an adapter: up to 128 letters, digits and ._:/- are",
            )
        if name in self._base_names:
            raise ModelError("AdapterExists", f"{name!r} is the name of the model itself; name the adapter otherwise")
        if name in self._leaving:
            raise ModelError(
                "AdapterInUse",
                f"the adapter {name!r} is being unloaded, and {self.running(name)} requests still have it; "
                "wait for them, or take another name",
            )

    def _below_root(self, path: str) -> Path:
        """The folder, with both of its files, links followed, below the root. Relative paths start there."""
        if self._root is None:
            raise ModelError("AdaptersOff", NO_ADAPTERS)
        try:
            root = self._root.resolve()
            folder = (root / path).resolve()
            for each in (folder, *(folder / name for name in ADAPTER_FILES)):
                if not each.resolve().is_relative_to(root):
                    raise ModelError(
                        "AdapterPathRefused", f"{path!r:.200} is not below {root}, where adapters are loaded from"
                    )
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError("AdapterPathRefused", f"{path!r:.200} cannot be followed: {error}") from error
        return folder
