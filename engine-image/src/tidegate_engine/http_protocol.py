"""uvicorn's HTTP protocol on httptools, whose parser is C, with what it lacks: a bound, and clients that would upgrade.

Used by `serve` for both listeners.
"""

import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers; the body's bound is `server`'s."""
HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)


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
