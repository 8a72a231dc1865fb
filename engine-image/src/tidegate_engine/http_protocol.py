"""uvicorn's HTTP protocol on httptools, whose parser is C, with what it lacks: a bound, clients that would upgrade, and
few writes.

Used by `serve` for both listeners.
"""

import asyncio
import re
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers; the body's bound is `server`'s."""
HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


class GatheredWrites(asyncio.Transport):
    """A transport that writes at the end of a turn of the event loop what came in it: a head goes with what follows.

    And the client, which runs beside the server where these are on one machine, is woken when the turn's work is done.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._gathered: list[Any] = []

    def write(self, data: Any) -> None:
        if not self._gathered:
            self._loop.call_soon(self._flush)
        self._gathered.append(data)

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._gathered))

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)


class BoundedHttp(HttpToolsProtocol):
    """Hangs up on a client whose request's head does not end, and takes no notice of an offer of another protocol.

    The parser would end a request at such an offer and drop its body; Java's clients make one with every first request.
    So a head is parsed when it is there as a whole.
    """

    _unparsed = b""
    _is_between = True
    """No part of the next request has been parsed."""
    _head_bytes = 0
    _is_in_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(GatheredWrites(cast(asyncio.Transport, transport), asyncio.get_running_loop()))

    def data_received(self, data: bytes) -> None:
        if self._is_between:
            data = self._unparsed + data
            head, end, rest = data.partition(HEAD_END)
            # What cannot be a request is the parser's to refuse, at once.
            if not end and len(data) <= MAX_HEAD_BYTES and data[:1].isalpha():
                self._unparsed = data
                self._unset_keepalive_if_required()
                return
            self._unparsed = b""
            data = _UPGRADE.sub(b"", head) + end + rest
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The request's head is longer than {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_between = False
        self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_between = True
        super().on_message_complete()
