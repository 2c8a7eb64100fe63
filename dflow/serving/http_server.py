"""An HTTP server on a listening socket: uvicorn, with limits on the number and time of connections.

A connection is *waiting* until its TLS handshake is done and its first request has come. Invariants:

- a waiting connection ends after `ConnectionLimits.request_s`, or twice that with TLS;
- at most `ConnectionLimits.waiting` connections wait: a further one ends the oldest of the address with most of them;
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
from typing import Any

import uvicorn

from dflow.distributed.process.open_files import OTHER_FILES, raise_open_files
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.admission import Admission
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.http_connection import LOGGER, HttpConnection
from dflow.tracing.errors import TransportClosed

#: Time between two looks at the connections in s, at most; a quarter of the shortest limit if that is less.
_LOOK_S = 1.0
#: Pause after a connection could not be accepted, in s.
_AFTER_FAULT_S = 0.1
#: Connections that the system queues before they are accepted.
_BACKLOG = 1024


def bound_socket(address: TcpAddress, remedy: str) -> socket.socket:
    """Return a socket at the address, which does not listen yet. Raises OSError with the remedy."""
    sock = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise OSError(f"cannot listen at {address}: {error.strerror}; {remedy}") from error
    return sock


class HttpServer(uvicorn.Server):  # type: ignore[misc]  # mypy does not follow it
    """A server of uvicorn that accepts connections within limits; it is also the server of asyncio that uvicorn closes.

    context  for TLS; None for plain text
    options  those of uvicorn
    """

    def __init__(self, app: Any, context: ssl.SSLContext | None, limits: ConnectionLimits, **options: Any) -> None:
        fixed = {"log_config": None, "access_log": False, "server_header": False, "proxy_headers": False, "ws": "none"}
        idle_s = math.ceil(limits.idle_s)
        super().__init__(
            uvicorn.Config(app, http=HttpConnection, log_level="warning", timeout_keep_alive=idle_s, **fixed, **options)
        )
        self._context, self._limits = context, limits
        self._connecting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Accept connections at the socket that was given to `serve`."""
        assert sockets is not None
        await self.lifespan.startup()
        [sock] = sockets
        limits, files = self._limits, raise_open_files()
        waiting = min(limits.waiting, files // 4)
        self._most = min(limits.connections, max(files - waiting - OTHER_FILES, files // 2))
        self._admission: Admission[HttpConnection] = Admission(
            connections=self._most, unauthenticated=waiting, per_source=waiting
        )
        sock.setblocking(False)
        sock.listen(_BACKLOG)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._accept(sock)), loop.create_task(self._end_slow_ones())]
        self.servers = [self]
        self.started = True

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, source = await loop.sock_accept(listener)
            except OSError as error:
                LOGGER.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_AFTER_FAULT_S)
            else:
                self._arrive(sock, str(source[0]) if source else "")

    def _arrive(self, sock: socket.socket, source: str) -> None:
        """Serve a new connection; another waiting one may be ended for it."""
        connection = HttpConnection(
            sock,
            source,
            self._limits,
            self._refusal,
            self._admission.leave,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        evicted = self._admission.arrive(connection, source)
        if evicted is not None:
            LOGGER.warning("too many connections without a request: one of %s was ended", evicted[0].source)
            evicted[0].evict()
        task = asyncio.get_running_loop().create_task(self._shake_hands(connection))
        self._connecting.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._connecting.discard)

    def close(self) -> None:
        """Accept no more connections, and end those without a first request; called by uvicorn."""
        self._tasks[0].cancel()
        for connection in list(self._admission.unauthenticated):
            connection.evict()

    async def wait_closed(self) -> None:
        """Stop looking at connections, which have all ended; called by uvicorn."""
        self._tasks[1].cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _shake_hands(self, connection: HttpConnection) -> None:
        limit_s = None if self._context is None else self._limits.request_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                connection.sock,
                ssl=self._context,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except (OSError, asyncio.CancelledError) as error:
            self._admission.leave(connection)
            connection.sock.close()
            if not connection.is_evicted:
                reason = str(error) or "it ended in its handshake"
                LOGGER.warning("connection from %s closed: %s", connection.source, reason)

    def _refusal(self, connection: HttpConnection) -> str | None:
        """Count a connection as one with a request; return why there is no room, or None."""
        try:
            has_room = self._admission.believe(connection)
        except TransportClosed:  # ended for another one: no client reads the answer
            has_room = False
        if has_room:
            return None
        remedy = "raise its limit of open files (ulimit -n)" if self._most < self._limits.connections else "try again"
        return f"the server has {self._most} connections, the most; {remedy}"

    async def _end_slow_ones(self) -> None:
        limits = self._limits
        every_s = min(_LOOK_S, *(limit_s / 4 for limit_s in (limits.request_s, limits.body_s, limits.answer_s)))
        while True:
            await asyncio.sleep(every_s)
            for connection in list(self.server_state.connections):
                connection.close_if_slow()
