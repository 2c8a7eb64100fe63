"""The dashboard as a web server: its address, TLS and token, and the thread that serves it.

Invariants: without certificates or a secret it listens on loopback only. With them, each request needs the token that
the printed address has, and off loopback all is encrypted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dflow.dashboard.looks import LOOK_S
from dflow.dashboard.server import Dashboard
from dflow.dashboard.streams import ABORT, MOST_PAGES
from dflow.distributed.launching.dashboard_sidecar import require_dashboard
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy

#: Most connections, and longest waits for the server to start and to end, in s.
MOST_CONNECTIONS, START_S, END_S = 500, 30.0, 5.0
#: A connection without a whole request after this time, in s, is closed.
REQUEST_S = 10.0


class DashboardServer:
    """Serves the dashboard of the cluster whose coordinator is at `coordinator`, from construction until `close`.

    place       where to listen, as `8080` for loopback or `HOST:8080`; port 0 is any free one
    security    that of the cluster; None for this machine alone
    host_names  further names of this server in browsers, such as a proxy's
    most_pages  number of pages that may be open concurrently
    every_s     time between two looks at the cluster, in s
    raises      ConfigError for a malformed place; SecurityError for one off loopback without certificates or a secret;
                OSError for a port in use
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: str,
        place: str = "0",
        *,
        security: SecurityPolicy | None = None,
        host_names: Collection[str] = (),
        most_pages: int = MOST_PAGES,
        every_s: float = LOOK_S,
    ) -> None:
        security = security or SameMachine()
        listens = require_dashboard(place, security)
        context = None if listens.is_loopback else security.browser_context()
        token = "" if isinstance(security, SameMachine) else secrets.token_urlsafe(32)
        self._socket = _listen(listens)
        port = self._socket.getsockname()[1]
        names = {name.lower() for name in host_names}
        if not listens.is_loopback:
            names |= {listens.host.lower(), socket.gethostname().lower()}
        scheme, shown = "http" if context is None else "https", TcpAddress(_shown_host(listens), port)
        #: The address to open in a browser.
        self.address = f"{scheme}://{shown}/" + (f"?token={token}" if token else "")
        self._dashboard = Dashboard(
            transport,
            coordinator,
            names=names,
            token=token,
            cookie=f"dflow-dashboard-{port}",
            is_secure=context is not None,
            most_pages=most_pages,
            every_s=every_s,
        )
        config = uvicorn.Config(
            self._dashboard.app,
            http=_Connection,
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16384,
        )
        config.load()
        config.ssl = context  # older versions of uvicorn take names of files alone
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="dflow dashboard", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._server.started:
            self.close()
            raise OSError(f"the dashboard could not be served at {shown}")

    def close(self) -> None:
        """End all pages' streams, and stop serving and watching."""
        self._dashboard.streams.close()
        self._server.should_exit = True
        self._thread.join(END_S)
        self._socket.close()
        self._dashboard.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


class _Connection(H11Protocol):  # type: ignore[misc]  # mypy does not follow it
    """A connection that is closed if it sends no whole request in time, and that a request can abort."""

    app_state: dict[str, Any]

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.app_state = self.app_state | {ABORT: transport.abort}
        self._check = self.loop.call_later(REQUEST_S, self._close_if_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._check.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, before: Any) -> None:
        """Close the connection if no request began since the last check, which saw `before`, and none is answered."""
        cycle = self.cycle
        if cycle is before and (cycle is None or cycle.response_complete or cycle.more_body):
            self.transport.abort()
        else:
            self._check = self.loop.call_later(REQUEST_S, self._close_if_idle, cycle)


def _listen(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        raise OSError(f"the dashboard cannot listen at {address}: {error.strerror}; port 0 is any free one") from error


def _shown_host(address: TcpAddress) -> str:
    """Return the host to show: this machine's name for all its addresses."""
    try:
        return socket.gethostname() if ipaddress.ip_address(address.host).is_unspecified else address.host
    except ValueError:
        return address.host
