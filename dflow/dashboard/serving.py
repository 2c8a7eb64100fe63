"""The dashboard as a web server: its address, TLS and token, and the thread that serves it.

Invariants: without certificates or a secret it listens on loopback only. With them, each request needs the token that
the printed address has, and off loopback all is encrypted.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Collection
from functools import partial

from dflow.dashboard.looks import LOOK_S
from dflow.dashboard.server import Dashboard
from dflow.dashboard.streams import MOST_PAGES
from dflow.distributed.launching.dashboard_address import require_dashboard
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.serving.http_connection import HttpLimits
from dflow.serving.http_server import HttpServer, bound_socket

#: Longest waits for the server to start and to end, in s.
START_S, END_S = 30.0, 5.0
LIMITS = HttpLimits(body_s=10.0, waiting=250, connections=500)


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
        self._socket = bound_socket(listens, "the dashboard ", "port 0 is any free one")
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
        self._server = HttpServer(
            self._dashboard.app, context, LIMITS, loop="asyncio", lifespan="on", timeout_graceful_shutdown=1
        )
        serve = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=serve, name="dflow dashboard", daemon=True)
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


def _shown_host(address: TcpAddress) -> str:
    """Return the host to show: this machine's name for all its addresses."""
    try:
        return socket.gethostname() if ipaddress.ip_address(address.host).is_unspecified else address.host
    except ValueError:
        return address.host
