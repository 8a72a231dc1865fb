"""What the HTTP process and the engine process say to each other: frames of JSON, and how facts become JSON and back.

Pure of both sides: `engine_client` speaks for the HTTP process, `engine_host` for the engine. A frame is four bytes of
length and a JSON list that begins with its kind. Never pickle: a frame can hold nothing but plain facts.
"""

import asyncio
import base64
import math
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic import TypeAdapter

from tidegate_engine.engine import Output, Report, Status
from tidegate_engine.request import FinishReason, Request, SampledToken, TokenLogprobs
from tidegate_engine.runner import AdapterInfo, ModelInfo
from tidegate_engine.settings import AdmissionPolicy, BatchSettings

REQUEST = TypeAdapter(Request)
PROMPT = TypeAdapter(list[int])
STATUS = TypeAdapter(Status)
REPORT = TypeAdapter(Report)
INFO = TypeAdapter(ModelInfo)
ADMISSION = TypeAdapter(AdmissionPolicy)
SETTINGS = TypeAdapter(BatchSettings)
ADAPTER = TypeAdapter(AdapterInfo)
SECONDS = TypeAdapter(Mapping[str, float])
CLOSE_SECONDS = 5.0
_LENGTH = struct.Struct("!I")

Frame = list[Any]
Row = Sequence[Any]
"""An output: the request's number, token id, is_eos, logprobs, finish reason, error, is_refusal, embedding,
cached tokens.

Or a plain token, as most are: number and token id. It never is a request's first output.
"""


class Link:
    """One end of the socket. `send` never waits; `receive` gives None when the other end is gone.

    Frames that are sent in one turn of the event loop are written together.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._gathered: list[bytes] = []

    @classmethod
    async def open(cls, end: socket.socket) -> "Link":
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end))

    def send(self, *frame: object) -> None:
        data = orjson.dumps(frame)
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered += (_LENGTH.pack(len(data)), data)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._writer.write(b"".join(gathered))

    async def receive(self) -> Frame | None:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            frame: Frame = orjson.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return frame

    async def close(self) -> None:
        """Send what is left, and hang up; an end that reads nothing any more is not waited for."""
        self._flush()
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), CLOSE_SECONDS)
        except TimeoutError:
            self._writer.transport.abort()
        except ConnectionError:
            return


def plain(adapter: "TypeAdapter[Any]", value: object) -> object:
    """`value` as JSON knows it."""
    return adapter.dump_python(value, mode="json")


def request_facts(request: Request) -> object:
    """A request as JSON knows it, without its prompt's ids, which go beside it."""
    return REQUEST.dump_python(request, mode="json", exclude={"prompt_ids"}, exclude_defaults=True)


def read_request(facts: object, prompt_ids: Sequence[int]) -> Request:
    """The other way round; `prompt_ids` is shared, not copied."""
    request: Request = REQUEST.validate_python(facts)
    request.prompt_ids = prompt_ids
    return request


def output_row(number: int, output: Output, *, cached: int) -> Row:
    token = output.token
    if token is None:
        return number, None, False, None, output.finish_reason, output.error, output.is_refusal, None, cached
    embedding = None if token.embedding is None else base64.b64encode(token.embedding).decode()
    logprobs = None if token.logprobs is None else _logprobs_row(token.logprobs)
    return (
        number, token.token_id, token.is_eos, logprobs,
        output.finish_reason, output.error, output.is_refusal, embedding, cached,
    )  # fmt: skip


def read_output(row: Row) -> Output:
    if len(row) == 2:
        return Output(SampledToken(row[1]))
    _, token_id, is_eos, logprobs, reason, error, is_refusal, embedding, _ = row
    token = None
    if token_id is not None:
        token = SampledToken(
            token_id,
            is_eos,
            None if logprobs is None else _read_logprobs(logprobs),
            embedding=None if embedding is None else base64.b64decode(embedding),
        )
    return Output(token, None if reason is None else FinishReason(reason), error, is_refusal)


def _logprobs_row(logprobs: TokenLogprobs) -> Row:
    """JSON knows no infinity: the logprob of what cannot come is sent as null."""
    top = [(token_id, value if math.isfinite(value) else None) for token_id, value in logprobs.top]
    return logprobs.logprob if math.isfinite(logprobs.logprob) else None, top


def _read_logprobs(row: Row) -> TokenLogprobs:
    chosen, top = row
    pairs = tuple((token_id, -math.inf if value is None else value) for token_id, value in top)
    return TokenLogprobs(-math.inf if chosen is None else chosen, pairs)
