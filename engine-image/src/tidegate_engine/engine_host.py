"""The engine's process: loads the model, runs the engine loop, and serves it to the HTTP process over a socket.

It ends when the other end is gone. Signals that end a service go to both processes: this one leaves them to the other,
which drains. Forked by `serve` before anything has threads.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from tidegate_engine import engine_wire as wire
from tidegate_engine.engine import Engine, Output
from tidegate_engine.engine_wire import Frame, Link, Row
from tidegate_engine.ranks import Team, die_with
from tidegate_engine.request import FinishReason, Request
from tidegate_engine.weights import ModelError

BEAT_SECONDS = 0.5
"""How often the HTTP process hears from this one, whatever the loop does."""
SWITCH_INTERVAL_SECONDS = 0.001
"""How long the event loop may keep the loop's thread from taking the interpreter after a step."""

logger = logging.getLogger(__name__)


def run_engine(end: socket.socket, load: Callable[[], Engine], *, parent: int, team: Team | None = None) -> NoReturn:
    """Be the engine's process, to its end; `team`: the other ranks of its model, its children."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(host_engine(end, load, team))
        code = 0
    except Exception:
        logger.exception("the engine's process failed")
    finally:
        logging.shutdown()
        os._exit(code)  # a thread inside native code would keep the interpreter from ending


async def host_engine(end: socket.socket, load: Callable[[], Engine], team: Team | None = None) -> None:
    """Load, then serve until the other end hangs up. A model that cannot be loaded is reported there, as is a rank that
    ends: whoever waits for it, in the middle of a step, waits for ever."""
    link = await Link.open(end)
    lost: asyncio.Future[tuple[str | None, str]] = asyncio.get_running_loop().create_future()
    if team is not None:
        team.watch(partial(_tell_lost, asyncio.get_running_loop(), lost))
    loading = asyncio.ensure_future(asyncio.to_thread(load))
    both: list[asyncio.Future[Any]] = [loading, lost]
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if lost.done():
        link.send("failed", *lost.result())
        await link.close()
        return
    try:
        engine = loading.result()
    except ModelError as error:
        link.send("failed", error.reason, error.message)
    except Exception as error:
        logger.exception("the model could not be loaded")
        link.send("failed", None, f"{type(error).__name__}: {error}")
    else:
        gc.freeze()
        engine.start()
        host = _Host(engine, link)
        lost.add_done_callback(lambda found: host.lose(found.result()[1]))
        await host.serve()
        engine.stop()
    await link.close()


def _tell_lost(
    loop: asyncio.AbstractEventLoop, lost: "asyncio.Future[tuple[str | None, str]]", reason: str | None, message: str
) -> None:
    """From any thread; the first to be lost is the cause of the others' end."""

    def tell() -> None:
        if not lost.done():
            lost.set_result((reason, message))

    loop.call_soon_threadsafe(tell)


class _Host:
    """Turns frames into calls of the engine, and its outputs into frames: one for all outputs of a step."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._rows: list[Row] = []
        self._unreadable = 0
        self._prompt: list[int] | None = None
        self._answers: dict[int, asyncio.Task[None]] = {}
        self._lost: str | None = None

    def lose(self, message: str) -> None:
        """Tell the other side that the engine has failed, whatever its loop waits for."""
        self._lost = message
        self._send("beat")

    async def serve(self) -> None:
        runner = self._engine.runner
        self._link.send(
            "ready", wire.plain(wire.INFO, runner.info), wire.plain(wire.SECONDS, runner.start_seconds)
        )  # fmt: skip
        beat = asyncio.create_task(self._beat())
        failed = asyncio.create_task(self._tell_failure())
        try:
            while (frame := await self._link.receive()) is not None:
                self._act(frame)
        finally:
            for task in (beat, failed, *self._answers.values()):
                task.cancel()

    def put(self, row: Row) -> None:
        """An output for the other side. Rows that come in one turn of the event loop go in one frame."""
        rows = self._rows
        if not rows:
            asyncio.get_running_loop().call_soon(self._flush)
        rows.append(row)

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        self._send("outputs", rows)

    def _send(self, kind: str, *fields: object) -> None:
        """Every frame tells the status, so that the other side knows it without asking."""
        status = self._engine.status()
        status = replace(status, taken=status.taken + self._unreadable)
        if self._lost is not None:
            status = replace(status, health=replace(status.health, alive=False, failure=self._lost))
        self._link.send(kind, wire.plain(wire.STATUS, status), *fields)

    async def _beat(self) -> None:
        while True:
            self._send("beat")
            await asyncio.sleep(BEAT_SECONDS)

    async def _tell_failure(self) -> None:
        await self._engine.failed.wait()
        self._send("beat")

    def _act(self, frame: Frame) -> None:
        match frame:
            case ["add", number, facts, prompt]:
                self._add(number, facts, prompt)
            case ["abort", request_id, reason, error]:
                self._engine.abort(request_id, reason=FinishReason(reason), error=error)
            case ["ask", number, name, argument]:
                answer = self._answers[number] = asyncio.create_task(self._answer(number, name, argument))
                answer.add_done_callback(lambda _: self._answers.pop(number, None))
            case ["cancel", number]:
                if (task := self._answers.get(number)) is not None:
                    task.cancel()
            case _:
                raise ValueError(f"a frame that nobody knows: {frame[0]!r}")

    def _add(self, number: int, facts: object, prompt: object) -> None:
        """`prompt` None = the ids of the one before."""
        try:
            if prompt is not None:
                self._prompt = None
                self._prompt = wire.PROMPT.validate_python(prompt)
            if self._prompt is None:
                raise ValueError("the ids of its prompt could not be read")
            request = wire.read_request(facts, self._prompt)
        except ValueError as error:  # the other side's mistake, and the end of this one request only
            logger.exception("a request cannot be read")
            self._unreadable += 1
            self.put(wire.output_row(number, Output(None, FinishReason.ERROR, f"unreadable: {error}"), cached=0))
        else:
            self._engine.submit(request, _Sink(self, number, request))

    async def _answer(self, number: int, name: str, argument: Any) -> None:
        value: object = None
        error: object = None
        try:
            value = await self._ask(name, argument)
        except ModelError as problem:
            error = [problem.reason, problem.message]
        except Exception as problem:  # noqa: BLE001  # it belongs to whoever asked
            error = f"{type(problem).__name__}: {problem}"
        self._send("answer", number, value, error)

    async def _ask(self, name: str, argument: Any) -> object:
        engine = self._engine
        match name:
            case "apply":
                return await engine.apply(wire.SETTINGS.validate_python(argument))
            case "admit_by":
                await engine.admit_by(wire.ADMISSION.validate_python(argument))
                return None
            case "freeze":
                await engine.freeze(bool(argument))
                return None
            case "hold":
                await engine.hold(bool(argument))
                return None
            case "kv_block_bounds":
                return engine.kv_block_bounds()
            case "resize":
                return wire.plain(wire.INFO, await engine.resize(int(argument)))
            case "flush":
                return await engine.flush_cache()
            case "load_adapter":
                adapter, folder = argument
                return wire.plain(wire.ADAPTER, await engine.load_adapter(adapter, Path(folder)))
            case "unload_adapter":
                await engine.unload_adapter(argument)
                return None
            case "report":
                return wire.plain(wire.REPORT, engine.report())
            case _:
                raise ValueError(f"nobody can answer {name!r}")


class _Sink:
    """Where the engine puts the outputs of a request of the other side."""

    __slots__ = ("_has_begun", "_number", "_put", "_request")

    def __init__(self, host: _Host, number: int, request: Request) -> None:
        self._put = host.put
        self._number = number
        self._request = request
        self._has_begun = False

    def push(self, output: Output) -> None:
        token, reason, _, _ = output
        if self._has_begun and token is not None and reason is None and not token.is_eos and token.logprobs is None:
            self._put((self._number, token.token_id))
        else:
            self._has_begun = True
            self._put(wire.output_row(self._number, output, cached=self._request.num_cached))
