"""A KV cache of another size while the engine serves: the order, who is waited for, and how far it has come.

No request is lost: what waits goes on waiting, what runs ends first (`drain`) or is computed again (`recompute`).
Nobody but an administrator orders it, and `admin` routes it here. The change itself is `Engine.resize`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum

from starlette.responses import Response

from tidegate_engine.drain import POLL_SECONDS, Drain, DrainPhase
from tidegate_engine.engine_client import EngineClient, EngineGone
from tidegate_engine.metrics import Counts
from tidegate_engine.runner import ModelInfo
from tidegate_engine.server import JsonResponse
from tidegate_engine.settings import Violation
from tidegate_engine.weights import ModelError

MAX_WAIT_SECONDS = 86_400.0

logger = logging.getLogger(__name__)


class ResizeMode(StrEnum):
    RECOMPUTE = "recompute"
    """What runs is sent back to the queue, and computed again afterwards."""
    DRAIN = "drain"
    """What runs comes to its end first, while nothing else starts."""


class ResizePhase(StrEnum):
    IDLE = "idle"
    DRAINING = "draining"
    RESIZING = "resizing"


@dataclass(frozen=True, slots=True)
class Order:
    """A checked body of POST. A drain that takes longer than `timeout_seconds` ends as `recompute`; None = it waits."""

    kv_blocks: int
    mode: ResizeMode
    timeout_seconds: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """The last resize: done, failed (the old size is back), or cancelled."""

    result: str
    from_kv_blocks: int
    to_kv_blocks: int
    """What was asked for."""
    seconds: float
    error: str | None = None


def parse_order(data: object, info: ModelInfo, *, bounds: tuple[int, int]) -> Order | Violation:
    """Read a POST body: `kv_blocks` or `kv_bytes`, and how."""
    if not isinstance(data, Mapping):
        return Violation("body", None, "the body must be a JSON object")
    known = ("kv_blocks", "kv_bytes", "mode", "timeout_seconds")
    for name in data:
        if name not in known:
            return Violation(str(name), None, f"{name} is unknown; known are {', '.join(known)}")
    sizes = [name for name in known[:2] if data.get(name) is not None]
    if len(sizes) != 1:
        return Violation("kv_blocks", bounds, "give kv_blocks or kv_bytes, one of them")
    (name,) = sizes
    unit = 1 if name == "kv_blocks" else info.kv_token_bytes * info.block_tokens
    low, high = bounds[0] * unit, (bounds[1] + 1) * unit - 1
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        why = f"{name} is {value!r}; allowed is a whole number of {low}, with which a request may fill the context of "
        why += f"{info.max_model_len} tokens or what it was given at the start, to {high}, for which there is memory"
        return Violation(name, (low, high), why)
    mode = data.get("mode", ResizeMode.RECOMPUTE)
    if mode not in tuple(ResizeMode):
        return Violation("mode", None, f"mode is {mode!r}; allowed are {', '.join(ResizeMode)}")
    timeout = data.get("timeout_seconds")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 <= timeout <= MAX_WAIT_SECONDS):
        why = f"timeout_seconds is {timeout!r}; allowed are 0 to {MAX_WAIT_SECONDS:.0f}"
        return Violation("timeout_seconds", (0, MAX_WAIT_SECONDS), why)
    return Order(value // unit, ResizeMode(mode), timeout)


class ResizeControl:
    """One resize at a time. `on_resized` is told when there is another size."""

    def __init__(
        self,
        engine: EngineClient,
        drain: Drain,
        *,
        on_resized: Callable[[], None],
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = ResizePhase.IDLE
        """Anything else, and the replica is not ready."""
        self._engine = engine
        self._drain = drain
        self._on_resized = on_resized
        self._counts = counts
        self._clock = clock
        self._order: Order | None = None
        self._ended: Ended | None = None
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None

    async def begin(self, data: object, *, dry_run: bool) -> Response:
        """Act on a POST body; the answer is the HTTP response, and does not wait for the end."""
        order = parse_order(data, self._engine.info, bounds=await self._engine.kv_block_bounds())
        if isinstance(order, Violation):
            self._counts.settings_changes["rejected"] += 1
            allowed = order.allowed and list(order.allowed)
            return JsonResponse({"error": {"field": order.field, "allowed": allowed, "reason": order.reason}}, 422)
        if (conflict := self._conflict()) is not None:
            self._counts.settings_changes["rejected"] += 1
            code, message = conflict
            return JsonResponse({"error": {"code": code, "message": message}}, 409)
        if dry_run or order.kv_blocks == self._engine.info.kv_blocks:
            return JsonResponse({**await self.describe(), "wanted_kv_blocks": order.kv_blocks, "mode": order.mode})
        self._order = order
        self._is_cancelled = False
        self.phase = ResizePhase.DRAINING if order.mode is ResizeMode.DRAIN else ResizePhase.RESIZING
        self._task = asyncio.get_running_loop().create_task(self._run(order))
        return JsonResponse(await self.describe(), 202)

    async def cancel(self) -> Response:
        """Give up a resize that still waits for requests; one that is being made is left alone."""
        if self.phase is ResizePhase.DRAINING and self._task is not None:
            self._is_cancelled = True
            await asyncio.wait([self._task])
        return JsonResponse(await self.describe())

    async def describe(self) -> dict[str, object]:
        """How far it has come, and what is possible."""
        status, order = self._engine.status(), self._order
        return {
            "phase": self.phase,
            "kv_blocks": self._engine.info.kv_blocks,
            "block_bytes": self._engine.info.kv_token_bytes * self._engine.info.block_tokens,
            "allowed": list(await self._engine.kv_block_bounds()),
            "wanted_kv_blocks": None if order is None else order.kv_blocks,
            "mode": None if order is None else order.mode,
            "running": status.running,
            "waiting": status.waiting,
            "last": None if self._ended is None else asdict(self._ended),
        }

    def _conflict(self) -> tuple[str, str] | None:
        if self.phase is not ResizePhase.IDLE:
            return "resizing", f"a resize is {self.phase} already"
        if self._drain.phase is not DrainPhase.SERVING:
            return "draining", "the KV cache of a draining replica is not resized"
        if self._engine.status().is_frozen:
            return "paused", "the pause keeps what requests have computed; resume first, or pause in another mode"
        return None

    async def _run(self, order: Order) -> None:
        engine, before, began = self._engine, self._engine.info.kv_blocks, self._clock()
        result, error = "cancelled", None
        logger.info("resizing the KV cache from %d to %d blocks (%s)", before, order.kv_blocks, order.mode)
        try:
            if order.mode is ResizeMode.RECOMPUTE or await self._wait(order, began):
                self.phase = ResizePhase.RESIZING
                await engine.resize(order.kv_blocks)
                self._on_resized()
                result = "done"
        except (ModelError, EngineGone) as problem:
            result, error = "failed", str(problem)
        finally:
            if order.mode is ResizeMode.DRAIN:
                with suppress(EngineGone):
                    await engine.hold(False)
            self._counts.settings_changes["applied" if result == "done" else "reverted"] += 1
            self._ended = Ended(result, before, order.kv_blocks, self._clock() - began, error)
            self._order = None
            self.phase = ResizePhase.IDLE
            logger.log(logging.INFO if error is None else logging.ERROR, "the resize ended: %s", self._ended)

    async def _wait(self, order: Order, began: float) -> bool:
        """Until nothing runs, or for so long. False when it is cancelled, or the replica leaves and needs no cache."""
        await self._engine.hold(True)
        while self._engine.status().running:
            if not self._may_go_on:
                return False
            if order.timeout_seconds is not None and self._clock() - began >= order.timeout_seconds:
                return True
            await asyncio.sleep(POLL_SECONDS)
        return self._may_go_on

    @property
    def _may_go_on(self) -> bool:
        return not self._is_cancelled and self._drain.phase is DrainPhase.SERVING
