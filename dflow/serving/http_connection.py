"""An HTTP connection of uvicorn with deadlines, and with limits on the memory that a client can take.

Why: uvicorn keeps a connection without a request, or with part of one, for ever, and its parser takes quadratic time
for a header line that comes in many pieces. Invariants:

- a connection waits for the rest of a request, and for its client to read an answer, for a limited time. One deadline
  holds for the whole head of a request, however slowly its bytes arrive;
- the bytes of a request besides its body are limited;
- events that clients cause are logged at a limited rate, each on one line.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import httptools
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dflow.distributed.transport.security.throttle import Throttle, on_one_line
from dflow.serving.connection_limits import ConnectionLimits

#: In the state of a request's scope: a function that aborts its connection without sending what is buffered.
ABORT = "dflow.abort"
#: Headers that offer another protocol, also as words of `Connection`.
_UPGRADE = (b"upgrade", b"http2-settings")
#: Time for a refused client to read the answer before its connection is aborted, in s.
_LINGER_S = 1.0


#: For events that clients cause.
LOGGER = logging.getLogger("dflow.http")
LOGGER.setLevel(logging.WARNING)
_throttle = Throttle()


def _on_one_line(record: logging.LogRecord) -> bool:
    """Return whether to log an entry, which becomes one line; the next one tells how many were left out."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, RuntimeError) and "handler is closed" in str(error):
        return False  # uvloop, when an answer is written to a client that has just left
    more = _throttle.ask()
    if more is None:
        return False
    reason = "" if error is None else f": {error!r}"
    record.msg, record.args, record.exc_info = on_one_line(record.getMessage() + reason) + more, (), None
    return True


LOGGER.addFilter(_on_one_line)


class HttpConnection(HttpToolsProtocol):  # type: ignore[misc]  # mypy does not follow it
    """An accepted connection; the caller asks `close_if_slow` from time to time.

    source   the address that it comes from
    refusal  called with it at its first request; returns why that is refused, or None
    on_end   called with it when it has ended
    """

    app: Any
    parser: Any
    app_state: dict[str, Any]
    transport: asyncio.Transport

    def __init__(
        self,
        sock: socket.socket,
        source: str,
        limits: ConnectionLimits,
        refusal: Callable[[HttpConnection], str | None],
        on_end: Callable[[HttpConnection], None],
        **uvicorn: Any,
    ) -> None:
        super().__init__(**uvicorn)
        self.logger = LOGGER
        self.sock, self.source, self.is_evicted = sock, source, False
        self._limits, self._refusal, self._on_end = limits, refusal, on_end
        self._answers: Any = self.app
        self.app = self._first_request
        self._has_request = False
        self._is_in_head = False
        #: The bytes that are being parsed.
        self._received = b""
        #: Bytes received since the last part of a body, without the received piece that a request begins in.
        self._head_bytes = 0
        self._is_refused = False
        self._was: tuple[Any, ...] = ()
        self._since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = self.app_state | {ABORT: transport.abort}
        self._since_s, self._was = self.loop.time(), self._waits_for()[:-1]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_end(self)

    def evict(self) -> None:
        """End the connection from outside its handshake or requests."""
        self.is_evicted = True
        with suppress(OSError):  # it has ended
            self.sock.shutdown(socket.SHUT_RDWR)

    async def _first_request(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer the first request, unless it is refused, and the requests that came together with it."""
        if not self._has_request and (text := self._refusal(self)):
            headers = {"Connection": "close", "Retry-After": "1"}
            await JSONResponse({"error": text}, 503, headers)(scope, receive, send)
        else:
            self._has_request, self.app = True, self._answers
            await self._answers(scope, receive, send)

    def close_if_slow(self) -> None:
        """Abort the connection if it has waited too long for its client."""
        *what, limit_s = self._waits_for()
        if (doing := tuple(what)) != self._was:
            self._was, self._since_s = doing, self.loop.time()
        elif limit_s is not None and self.loop.time() - self._since_s >= limit_s:
            self.transport.abort()

    def _waits_for(self) -> tuple[Any, ...]:
        """Return the request, what its connection waits for, and the longest time without a change of these in s."""
        cycle, unread = self.cycle, self.transport.get_write_buffer_size()
        if unread:
            return cycle, "reading", unread, self._limits.answer_s
        if cycle is None or cycle.response_complete:
            if cycle is None or cycle.more_body or self._is_in_head:
                return cycle, "request", 0, self._limits.request_s
            return cycle, "nothing", 0, self._limits.idle_s
        if cycle.more_body:
            return cycle, "body", 0, self._limits.body_s
        return cycle, "answer", 0, None

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._head_bytes += len(data)
        self._received = data
        super().data_received(data)
        self._received = b""
        if self._head_bytes > self._limits.head_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._head_bytes, self._is_in_head = 0, True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > self._limits.head_bytes:
            self._refuse_head()
            raise ValueError("the head is too large")  # ends the parser
        self._is_in_head = False
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        """Parse a request again without its offer of another protocol, such as HTTP/2, which Java's client makes.

        Called by uvicorn while the parser's exception, with the end of the head, is handled: it has no body of such a
        request.
        """
        end, method = sys.exc_info()[1].args[0], self.parser.get_method()  # type: ignore[union-attr]
        if method == b"CONNECT":
            self._refuse(405, "expected a request for this server, got CONNECT")
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _UPGRADE)
            if name not in _UPGRADE and value:
                lines.append(b"%s: %s" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", self._received[end:]]))

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request; called by uvicorn."""
        self._refuse(400, "expected a request of HTTP/1.1, got other bytes")

    def _refuse_head(self) -> None:
        most = self._limits.head_bytes
        self._refuse(431, f"the request's path and headers: expected at most {most} bytes, got more")

    def _refuse(self, status: int, text: str) -> None:
        """Answer a request that cannot be parsed, and end the connection."""
        if self._is_refused:
            return
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.more_body:  # the bytes are of a later request, and the answer to this one comes first
                cycle.keep_alive = False
                return
            if cycle.response_started or self.pipeline:
                self.transport.abort()
                return
            cycle.disconnected = True  # it gets no other answer
            cycle.message_event.set()
        body = json.dumps({"error": text}).encode()
        lines = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Content-Type: application/json", "Connection: close"
        head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
        self.transport.write(head.encode() + body)
        # Bytes that still come are ignored: a reset of the connection now could overtake the answer.
        self.loop.call_later(_LINGER_S, self.transport.abort)
