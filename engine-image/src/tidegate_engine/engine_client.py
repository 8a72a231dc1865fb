"""The engine as the HTTP process sees it: requests out, outputs in, and whether its process lives.

The other end of `engine_host`. It knows of the engine what it was told last, and of each request what it sent and got.
A process that ends, or that is not heard from for long, has failed: everybody who waits is told.
"""

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidegate_engine import engine_wire as wire
from tidegate_engine.engine import Health, Output, Report, Sink, Status
from tidegate_engine.engine_wire import Frame, Link, Row
from tidegate_engine.process_memory import resident_bytes
from tidegate_engine.ranks import ending_of
from tidegate_engine.request import FinishReason, Request
from tidegate_engine.runner import AdapterInfo
from tidegate_engine.settings import AdmissionPolicy, BatchSettings
from tidegate_engine.weights import ModelError

SILENCE_SECONDS = 20.0
MIN_SILENCE_SECONDS = 4.0
"""After so long without a sign of life the engine's process counts as lost; after a quarter of it as not ready."""
WATCH_SECONDS = 0.5
ENDING_SECONDS = 5.0
"""How long the engine's process may take to end before it is killed."""

logger = logging.getLogger(__name__)


class EngineGone(RuntimeError):
    """The engine's process ended, or says nothing any more."""


@dataclass(slots=True)
class EngineProcess:
    """The child; nobody else may wait for it."""

    pid: int
    ending: str | None = None
    """How it ended, once that is known."""

    def poll(self) -> str | None:
        if self.ending is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.ending = ending_of(status)
        return self.ending

    async def wait(self, seconds: float) -> str | None:
        """How it ended; None when it still runs after `seconds`."""
        until = time.monotonic() + seconds
        while self.poll() is None and time.monotonic() < until:  # noqa: ASYNC110  # a process has no event
            await asyncio.sleep(0.01)
        return self.ending

    async def end(self) -> None:
        """Wait for it a short while, then kill it."""
        if await self.wait(ENDING_SECONDS) is None:
            logger.warning("the engine's process does not end by itself and is killed")
            self.kill()
            await self.wait(ENDING_SECONDS)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@dataclass(slots=True)
class _Live:
    request: Request
    sink: Sink


class EngineClient:
    """Use it on one event loop. `connect` waits until the model is loaded."""

    def __init__(self, link: Link, ready: Frame, *, process: EngineProcess | None, silence_seconds: float) -> None:
        _, info, start_seconds = ready
        self.info = wire.INFO.validate_python(info)
        self.start_seconds = wire.SECONDS.validate_python(start_seconds)
        self.failure: str | None = None
        self.failed = asyncio.Event()
        self._silence_seconds = silence_seconds
        self._link = link
        self._process = process
        self._live: dict[int, _Live] = {}
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._sent_prompt: Sequence[int] | None = None
        """The last one: the choices of a prompt follow each other and share it, so it is sent once for all."""
        self._asks = 0
        self._status: Status | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._heard_at = self._clock()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def connect(
        cls, end: socket.socket, *, process: EngineProcess | None, silence_seconds: float = SILENCE_SECONDS
    ) -> "EngineClient":
        """The loaded engine; raises ModelError when the model cannot be served, EngineGone for any other reason."""
        link = await Link.open(end)
        ready = await link.receive()
        match ready:
            case ["ready", *_]:
                client = cls(link, ready, process=process, silence_seconds=silence_seconds)
                await client._begin()
                return client
            case ["failed", str(reason), message]:
                raise ModelError(reason, message)
            case ["failed", None, message]:
                raise EngineGone(f"the model could not be loaded: {message}")
        ending = None if process is None else await process.wait(ENDING_SECONDS)
        raise EngineGone(f"the engine's process ended while it loaded the model: {ending or 'for an unknown reason'}")

    async def _begin(self) -> None:
        """Hear the first beat, with which the status is known."""
        frame = await self._link.receive()
        if frame is None:
            raise EngineGone("the engine's process ended when it had loaded the model")
        self._hear(frame)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def stop(self) -> None:
        """Hang up, and wait for the end of the engine's process."""
        for task in self._tasks:
            task.cancel()
        await self._link.close()
        if self._process is not None:
            await self._process.end()

    # --- orders

    def submit(self, request: Request, sink: Sink) -> None:
        if self.failure is not None:
            sink.push(_FAILED)
            return
        number = self._number + 1
        try:
            prompt = None if request.prompt_ids is self._sent_prompt else request.prompt_ids
            self._link.send("add", number, wire.request_facts(request), prompt)
        except TypeError as error:
            message = f"the request holds a value that cannot be sent to the engine: {error}"
            sink.push(Output(None, FinishReason.ERROR, message, is_refusal=True))
            return
        self._number = number
        self._sent_prompt = request.prompt_ids
        self._live[number] = _Live(request, sink)

    def abort(self, request_id: str, *, reason: FinishReason = FinishReason.ABORT, error: str | None = None) -> None:
        """End a request in any state; one that has ended already is left alone."""
        if self.failure is None:
            self._link.send("abort", request_id, reason, error)

    async def apply(self, settings: BatchSettings) -> int:
        """Use `settings` from the next step on; returns its id. Whoever gives up waiting may find them applied."""
        return int(await self._ask("apply", wire.plain(wire.SETTINGS, settings)))

    async def admit_by(self, policy: AdmissionPolicy) -> None:
        """Start waiting requests by `policy` from the next step on."""
        await self._ask("admit_by", wire.plain(wire.ADMISSION, policy))

    async def freeze(self, is_frozen: bool) -> None:
        """Compute no further step and keep all requests as they are, or go on with them."""
        await self._ask("freeze", is_frozen)

    async def hold(self, is_held: bool) -> None:
        """Start no waiting request, while running ones go on; or start them again."""
        await self._ask("hold", is_held)

    async def kv_block_bounds(self) -> tuple[int, int]:
        """The fewest and the most KV blocks that `resize` takes."""
        low, high = await self._ask("kv_block_bounds")
        return int(low), int(high)

    async def resize(self, kv_blocks: int) -> None:
        """Have a KV cache of so many blocks, an empty one; raises ModelError. `info` tells what there is afterwards."""
        self.info = wire.INFO.validate_python(await self._ask("resize", kv_blocks))

    async def flush_cache(self) -> int:
        """Forget all cached prefixes; returns how many blocks held one."""
        return int(await self._ask("flush"))

    async def load_adapter(self, name: str, folder: Path) -> AdapterInfo:
        """Hold a LoRA adapter; raises ModelError. Whoever gives up waiting may find it loaded."""
        info: AdapterInfo = wire.ADAPTER.validate_python(await self._ask("load_adapter", [name, str(folder)]))
        return info

    async def unload_adapter(self, name: str) -> None:
        """Let go of an adapter; raises ModelError while a request has it."""
        await self._ask("unload_adapter", name)

    async def report(self) -> Report:
        report: Report = wire.REPORT.validate_python(await self._ask("report"))
        waiting = max(report.snapshot.waiting, self.status().waiting)  # the loop's mailbox is not in its own count
        report = Report(report.counts, replace(report.snapshot, waiting=waiting))
        engine, here = report.snapshot.memory_bytes.get("host"), resident_bytes()
        if engine is None or here is None or self._process is None:
            return report
        memory = {**report.snapshot.memory_bytes, "host": engine + here}
        return Report(report.counts, replace(report.snapshot, memory_bytes=memory))

    # --- what is known

    def live_requests(self) -> list[Request]:
        """Requests that have not ended, as far as was heard."""
        return [live.request for live in self._live.values()]

    @property
    def unfinished(self) -> int:
        return len(self._live)

    def status(self) -> Status:
        """What was heard last. Requests that the loop had not taken then wait, unless there was a place for them."""
        status = self._status
        assert status is not None
        free_places = 0 if status.waiting else max(0, status.settings.max_num_seqs - status.running)
        on_the_way = max(0, self._number - status.taken)
        return replace(status, waiting=status.waiting + max(0, on_the_way - free_places))

    def health(self) -> Health:
        health, silent = self.status().health, self._clock() - self._heard_at
        return replace(
            health,
            alive=health.alive and self.failure is None,
            stalled_seconds=health.stalled_seconds + (silent if silent > 2 * WATCH_SECONDS else 0.0),
            failure=self.failure,
            silent_seconds=silent,
        )

    @property
    def is_silent(self) -> bool:
        """Nothing was heard for longer than a healthy process would take."""
        return self._clock() - self._heard_at > self._silence_seconds / 4

    # --- listening

    async def _listen(self) -> None:
        try:
            while (frame := await self._link.receive()) is not None:
                self._hear(frame)
        except Exception as error:
            logger.exception("what the engine's process says cannot be understood")
            if self._process is not None:
                self._process.kill()
            self._fail(f"what the engine's process says cannot be understood: {type(error).__name__}: {error}")
            return
        ending = None if self._process is None else await self._process.wait(1.0)
        self._fail(f"the engine's process ended: {ending or 'for an unknown reason'}")

    async def _watch(self) -> None:
        """Give an engine up that says nothing. Time in which this process did not run itself does not count."""
        last = self._clock()
        while self.failure is None:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock()
            if now - last > 4 * WATCH_SECONDS:
                self._heard_at = now
            last = now
            if now - self._heard_at > self._silence_seconds:
                if self._process is not None:
                    self._process.kill()
                self._fail(f"the engine's process did not say anything for {self._silence_seconds:.0f} s")

    def _hear(self, frame: Frame) -> None:
        self._heard_at = self._clock()
        kind, fields = frame[0], frame[2:]
        self._status = status = wire.STATUS.validate_python(frame[1])
        match kind:
            case "outputs":
                for row in fields[0]:
                    self._give(row)
            case "beat":
                if status.health.failure is not None:
                    self._fail(status.health.failure)
            case "answer":
                number, value, error = fields
                future = self._asked.pop(number, None)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(value)
                    elif isinstance(error, list):
                        future.set_exception(ModelError(*error))
                    else:
                        future.set_exception(EngineGone(f"the engine refused: {error}"))
            case _:
                raise ValueError(f"a frame that nobody knows: {kind!r}")

    def _give(self, row: Row) -> None:
        live = self._live.get(row[0])
        if live is None:
            return
        output, request = wire.read_output(row), live.request
        if len(row) == 2:
            request.output_tokens += 1
            live.sink.push(output)
            return
        request.num_cached = row[-1]
        if output.token is not None:
            request.output_tokens += 1
        if output.finish_reason is not None:
            request.finish_reason = output.finish_reason
            del self._live[row[0]]
        live.sink.push(output)

    async def _ask(self, name: str, argument: object = None) -> Any:
        if self.failure is not None:
            raise EngineGone(self.failure)
        self._asks += 1
        number = self._asks
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self._link.send("ask", number, name, argument)
        try:
            return await future
        except asyncio.CancelledError:
            with suppress(KeyError):
                del self._asked[number]
                self._link.send("cancel", number)
            raise

    def _fail(self, message: str) -> None:
        """The engine is lost: tell everybody who waits for it, and why."""
        if self.failure is not None:
            return
        self.failure = message
        logger.error("the engine failed: %s", message)
        for live in self._live.values():
            live.request.finish_reason = FinishReason.ERROR
            live.sink.push(_FAILED)
        self._live.clear()
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineGone(message))
        self._asked.clear()
        self.failed.set()


_FAILED = Output(None, FinishReason.ERROR, "the engine failed")
