"""An HTTP server on a listening socket: uvicorn, with limits on the number and time of connections.

A connection is *waiting* until its TLS handshake is done and its first request has come. Invariants:

- a waiting connection ends after `HttpLimits.request_s`, or twice that with TLS;
- at most `HttpLimits.waiting` connections wait: a further one ends the oldest of the address with most of them;
- the process keeps file descriptors for its files.

This module accepts connections instead of uvicorn, which allows a minute for a TLS handshake and cannot count or end
connections before the handshake is done.
"""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import uvicorn

from dflow.distributed.process.open_files import OTHER_FILES, raise_open_files
from dflow.distributed.transport.security.admission import Admission
from dflow.serving.http_connection import LOGGER, HttpConnection, HttpLimits
from dflow.tracing.errors import TransportClosed

#: Time between two looks at the connections in s, at most; a quarter of the shortest limit if that is less.
_LOOK_S = 1.0
#: Pause after a connection could not be accepted, in s.
_AFTER_FAULT_S = 0.1
#: Connections that the system queues before they are accepted.
_BACKLOG = 1024


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # mypy does not follow it
    """A server of uvicorn that accepts connections within limits.

    context  for TLS; None for plain text
    options  those of uvicorn
    """

    def __init__(self, app: Any, context: ssl.SSLContext | None, limits: HttpLimits, **options: Any) -> None:
        fixed = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False, "ws": "none"}
        idle_s = math.ceil(limits.idle_s)
        super().__init__(
            uvicorn.Config(app, http=HttpConnection, log_level="warning", timeout_keep_alive=idle_s, **fixed, **options)
        )
        self._context, self._limits = context, limits

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept connections at `sockets`: uvicorn passes the sockets that were given to `serve`."""
        assert sockets is not None
        await self.lifespan.startup()
        [sock] = sockets
        self.servers = [_Arrivals(self, self._context, self._limits, sock)]
        self.started = True


class _Arrival:
    """An accepted connection; `http` answers its requests."""

    def __init__(self, sock: socket.socket, source: str) -> None:
        self.sock, self.source = sock, source
        self.is_ended = False

    def end(self) -> None:
        """End the connection from outside its handshake or requests."""
        self.is_ended = True
        with suppress(OSError):  # it has ended
            self.sock.shutdown(socket.SHUT_RDWR)


class _Arrivals:
    """The connections of a server, which are accepted until `close`; as a server of asyncio, for uvicorn."""

    def __init__(
        self, server: HttpServer, context: ssl.SSLContext | None, limits: HttpLimits, sock: socket.socket
    ) -> None:
        self._server, self._context, self._limits, self._sock = server, context, limits, sock
        files = raise_open_files()
        waiting = min(limits.waiting, files // 4)
        self._most = min(limits.connections, max(files - waiting - OTHER_FILES, files // 2))
        self._cause = "raise its limit of open files (ulimit -n)" if self._most < limits.connections else "try again"
        self._admission: Admission[_Arrival] = Admission(
            connections=self._most, unauthenticated=waiting, per_source=waiting
        )
        self._connecting: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept()), loop.create_task(self._end_slow_ones())]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, source = await loop.sock_accept(self._sock)
            except OSError as error:
                LOGGER.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_AFTER_FAULT_S)
            else:
                self._arrive(_Arrival(sock, str(source[0]) if source else ""))

    def _arrive(self, arrival: _Arrival) -> None:
        """Serve a new connection; another waiting one may be ended for it."""
        evicted = self._admission.arrive(arrival, arrival.source)
        if evicted is not None:
            LOGGER.warning("too many connections without a request: one of %s was ended", evicted[0].source)
            evicted[0].end()
        task = asyncio.get_running_loop().create_task(self._serve(arrival))
        self._connecting.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._connecting.discard)

    def close(self) -> None:
        """Accept no more connections, and end those without a first request."""
        self._tasks[0].cancel()
        for arrival in list(self._admission.unauthenticated):
            arrival.end()

    async def wait_closed(self) -> None:
        """Stop looking at connections, which have all ended."""
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, arrival: _Arrival) -> None:
        """Shake hands, and let the connection's requests be answered."""
        http = HttpConnection(
            self._limits,
            lambda: self._refusal(arrival),
            lambda: self._admission.leave(arrival),
            config=self._server.config,
            server_state=self._server.server_state,
            app_state=self._server.lifespan.state,
        )
        limit_s = None if self._context is None else self._limits.request_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: http,
                arrival.sock,
                ssl=self._context,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            self._admission.leave(arrival)
            arrival.sock.close()
            if not arrival.is_ended:
                reason = str(error) or "it ended in its handshake"
                LOGGER.warning("connection from %s closed: %s", arrival.source, reason)

    def _refusal(self, arrival: _Arrival) -> str | None:
        """Count a connection as one with a request; return why there is no room, or None."""
        try:
            has_room = self._admission.believe(arrival)
        except TransportClosed:  # ended for another one: no client reads the answer
            has_room = False
        return None if has_room else f"the server has {self._most} connections, the most; {self._cause}"

    async def _end_slow_ones(self) -> None:
        """Look at the connections from time to time, until cancelled."""
        limits = self._limits
        every_s = min(_LOOK_S, *(limit_s / 4 for limit_s in (limits.request_s, limits.body_s, limits.answer_s)))
        while True:
            await asyncio.sleep(every_s)
            for connection in list(self._server.server_state.connections):
                connection.close_if_slow()
