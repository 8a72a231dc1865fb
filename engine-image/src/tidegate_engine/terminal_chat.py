"""A chat in the terminal: reads lines, prints answers as they come, keeps the conversation.

The answers come from a backend: an engine in this process, or a server by URL. Answers go to standard output and
everything else to standard error, so that it works in a pipe. Called by `cli`.
"""

import asyncio
import http.client
import json
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO
from urllib.parse import urlsplit

from tidegate_engine.context import DEFAULT_WINDOW
from tidegate_engine.request import Window

if TYPE_CHECKING:
    from tidegate_engine.openai import ApiError, Delta, Ending
    from tidegate_engine.serve import Model

HELP = """\
/reset         forget the conversation; the system message stays
/system TEXT   set the system message; without TEXT there is none
/help          this
/quit          end, as Ctrl-D does
Ctrl-C stops an answer; what has been said of it stays in the conversation."""
LOAD_SILENCE_SECONDS = 600.0
URL_TIMEOUT_SECONDS = 600.0
"""Without a byte from the server, a prompt's computation included."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

Message = dict[str, str]


class ChatError(Exception):
    """The answer failed; the message says why, and what to do."""


class Piece(NamedTuple):
    """A part of an answer."""

    text: str = ""
    thought: str = ""


class Backend(Protocol):
    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """The next answer as it comes; raises ChatError. Closing the iterator ends the request."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Conversation:
    """What was said; the system message stands before it."""

    system: str | None = None
    turns: list[Message] | None = None

    def messages(self, said: str) -> list[Message]:
        """All of it, with what the user says now."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *(self.turns or []), {"role": "user", "content": said}]

    def add(self, said: str, answer: str) -> None:
        self.turns = [
            *(self.turns or []), {"role": "user", "content": said}, {"role": "assistant", "content": answer},
        ]  # fmt: skip


def run_chat(
    backend: Backend, *, system: str | None, message: str | None, streams: tuple[TextIO, TextIO, TextIO] | None = None
) -> int:
    """Chat until the input ends; with `message` answer that and end. Returns 1 when the last answer failed.

    `streams` are standard input, output and error unless given.
    """
    source, out, notes = streams or (sys.stdin, sys.stdout, sys.stderr)
    screen = _Screen(out, notes, is_terminal=out.isatty())
    conversation = Conversation(system)
    if message is not None:
        return 0 if _take_turn(backend, conversation, message, screen) else 1
    is_well = True
    lines = _lines(source, notes, is_terminal=source.isatty())
    for line in lines:
        if line.startswith("/"):
            command, _, rest = line.partition(" ")
            if command in ("/quit", "/exit", "/bye"):
                break
            _obey(command, rest.strip(), conversation, screen)
        elif line.strip():
            is_well = _take_turn(backend, conversation, line, screen)
    return 0 if is_well else 1


class _Screen:
    """Where answers and notes go; thoughts are shown on a terminal only."""

    def __init__(self, out: TextIO, notes: TextIO, *, is_terminal: bool) -> None:
        self._out = out
        self._notes = notes
        self._is_terminal = is_terminal
        self._is_dim = False

    def show(self, piece: Piece) -> None:
        if piece.thought and self._is_terminal:
            self._out.write((DIM if not self._is_dim else "") + piece.thought)
            self._is_dim = True
        if piece.text:
            self._undim("\n\n")
            self._out.write(piece.text)
        self._out.flush()

    def end(self) -> None:
        self._undim("")
        self._out.write("\n")
        self._out.flush()

    def note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def _undim(self, gap: str) -> None:
        if self._is_dim:
            self._out.write(PLAIN + gap)
            self._is_dim = False


def _lines(source: TextIO, notes: TextIO, *, is_terminal: bool) -> Iterator[str]:
    """The user's lines; on a terminal with a prompt, history and editing."""
    if not is_terminal:
        for line in source:
            yield line.rstrip("\r\n")
        return
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=notes)
            return
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends", file=notes)


def _obey(command: str, rest: str, conversation: Conversation, screen: _Screen) -> None:
    match command:
        case "/reset":
            conversation.turns = None
            screen.note("the conversation is forgotten")
        case "/system":
            conversation.system = rest or None
            screen.note("the system message is set" if rest else "there is no system message now")
        case "/help":
            screen.note(HELP)
        case _:
            screen.note(f"{command} is unknown\n{HELP}")


def _take_turn(backend: Backend, conversation: Conversation, said: str, screen: _Screen) -> bool:
    """Show the answer and remember it; False when it failed, and then nothing is remembered."""
    answer = ""
    pieces = backend.answer(conversation.messages(said))
    try:
        for piece in pieces:
            answer += piece.text
            screen.show(piece)
    except KeyboardInterrupt:
        screen.end()
        screen.note("stopped")
    except ChatError as error:
        if answer:
            screen.end()
        screen.note(f"Error: {error}")
        return False
    else:
        screen.end()
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()
    conversation.add(said, answer)
    return True


class UrlBackend:
    """A server that speaks OpenAI's API. `fields` are more members of each call."""

    def __init__(self, url: str, *, api_key: str | None, model: str | None, fields: Mapping[str, object]) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{url!r} is no address of a server; it looks like http://localhost:8000")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        host, port = parts.hostname, parts.port
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: kind(host, port, timeout=URL_TIMEOUT_SECONDS)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._fields = fields
        self.model = model or self._first_model()

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        body = {**self._fields, "model": self.model, "messages": messages, "stream": True}
        connection, response = self._ask("POST", "/chat/completions", json.dumps(body))
        try:
            for line in response:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield _piece_of(json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"the connection broke: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def close(self) -> None:
        return

    def _first_model(self) -> str:
        connection, response = self._ask("GET", "/models", None)
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
            raise ChatError("the server names no model; give one with --served-model-name") from error
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: str | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ChatError(_reason_of(response.status, response.read(65_536)))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ChatError(f"{connection.host}:{connection.port} does not answer: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection, response


def _piece_of(chunk: Mapping[str, object]) -> Piece:
    if isinstance(error := chunk.get("error"), Mapping):
        raise ChatError(str(error.get("message")))
    choices = chunk.get("choices")
    if not isinstance(choices, list) or not choices:
        return Piece()
    delta = choices[0].get("delta") or {}
    return Piece(delta.get("content") or "", delta.get("reasoning") or delta.get("reasoning_content") or "")


def _reason_of(status: int, body: bytes) -> str:
    try:
        return f"{json.loads(body)['error']['message']} ({status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answers with the status {status}"


class LocalBackend:
    """An engine in this process: the engine's loop, and what serves calls, on an event loop of their own thread."""

    def __init__(
        self,
        model: "Model",
        *,
        reasoning_parser: str | None,
        fields: Mapping[str, object],
        window: Window = DEFAULT_WINDOW,
    ) -> None:
        self._model = model
        self._window = window
        self._reasoning_parser = reasoning_parser
        self._fields = fields
        self._ready: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="chat-engine", daemon=True)
        self._thread.start()
        if (error := self._ready.get()) is not None:
            raise error

    def answer(self, messages: Sequence[Message]) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | ChatError | None] = queue.SimpleQueue()
        task = asyncio.run_coroutine_threadsafe(self._generate(messages, pieces), self._loop)
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, ChatError):
                    raise piece
                yield piece
        finally:
            task.cancel()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001  # it belongs to the thread that waits
            self._ready.put(error)

    async def _serve(self) -> None:
        from tidegate_engine.adapters import ServedAdapters
        from tidegate_engine.blocks import tokens_that_fit, windows_of
        from tidegate_engine.completions import Completions, Limits
        from tidegate_engine.engine import Engine, build_engine
        from tidegate_engine.engine_host import host_engine
        from tidegate_engine.reasoning import FORMATS
        from tidegate_engine.serve import connect
        from tidegate_engine.settings import DEFAULT_PATTERNS, DEFAULT_SETTINGS, Envelope, SettingsFile

        def load() -> Engine:
            runner, on_idle = self._model.load_runner()
            file = SettingsFile(0, DEFAULT_SETTINGS, Envelope(), DEFAULT_PATTERNS)
            return build_engine(runner, file, on_idle=on_idle)

        end, engine_end = socket.socketpair()
        host = asyncio.create_task(host_engine(engine_end, load))
        loaded = await connect(end, self._model, process=None, stall_seconds=LOAD_SILENCE_SECONDS)
        info = loaded.engine.info
        limits = Limits(
            (info.name,),
            info.max_model_len,
            tokens_that_fit(info.group_blocks - 1, info.block_tokens, windows_of(info.kv_windows)),
            window=self._window if info.kv_windows == (None,) else None,
            reasoning_format=FORMATS[self._reasoning_parser] if self._reasoning_parser else None,
        )
        adapters = ServedAdapters(loaded.engine, base_names=limits.served_names, root=None)
        self._completions: Completions = Completions(loaded.engine, loaded.tokenizer, limits, adapters)
        self._ready.put(None)
        await self._ended.wait()
        await loaded.engine.stop()
        await host

    async def _generate(
        self, messages: Sequence[Message], pieces: "queue.SimpleQueue[Piece | ChatError | None]"
    ) -> None:
        from tidegate_engine.openai import ApiError, ChatCall, validated

        completions = self._completions
        try:
            data = {**self._fields, "model": completions.limits.served_names[0], "messages": messages, "stream": True}
            generation = await completions.begin_chat(
                validated(ChatCall, data), arrival=time.monotonic(), make_wire=lambda: _PieceWire(pieces)
            )
            generation.start()
            async for _ in generation.stream():
                pass
        except ApiError as error:
            pieces.put(ChatError(error.message))
        finally:
            pieces.put(None)


class _PieceWire:
    """The answer's parts as they come, for this process."""

    id = "chat"
    media_type = ""

    def __init__(self, pieces: "queue.SimpleQueue[Piece | ChatError | None]") -> None:
        self._pieces = pieces

    def answer(self, choices: "Sequence[Delta]", ending: "Ending") -> dict[str, object]:
        raise NotImplementedError("a chat is always streamed")

    def begin(self) -> bytes:
        return b""

    def chunks(self, deltas: "Sequence[Delta]") -> bytes:
        for delta in deltas:
            self._pieces.put(Piece(delta.text, delta.reasoning))
        return b""

    def end(self, ending: "Ending") -> bytes:
        return b""

    def error(self, error: "ApiError") -> bytes:
        self._pieces.put(ChatError(error.message))
        return b""
