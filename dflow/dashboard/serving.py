"""The dashboard as a web server: its address, TLS and token, its page, and JSON about the cluster.

It reads, and changes nothing but that a page may ask for a trace of some steps. One watch of the cluster serves all
pages. Invariants:

- without certificates or a secret it listens on loopback only;
- with them, each request needs the token that the printed address has, and off loopback all is encrypted;
- at most `MOST_REQUESTS` requests are answered at a time, besides the streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from dflow.dashboard.access import AccessChecks, json_error
from dflow.dashboard.cluster_watch import ClusterWatch
from dflow.dashboard.dashboard_record import PageUpdate
from dflow.dashboard.function_requests import FunctionRequests, Refusal
from dflow.dashboard.looks import LOOK_S
from dflow.dashboard.streams import MOST_PAGES, Streams
from dflow.dashboard.timeline import LONGEST_S, MOST_STEPS, LastTimeline
from dflow.distributed.launching.dashboard_address import require_dashboard
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.base import Transport
from dflow.distributed.transport.security.policy import SameMachine, SecurityPolicy
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.http_server import HttpServer
from dflow.tracing.errors import DflowError, GraphNameError

#: Longest waits for the server to start and to end, in s.
START_S, END_S = 30.0, 5.0
LIMITS = ConnectionLimits(body_s=10.0, waiting=250, connections=500)
#: The page, and what it loads.
PAGE = Path(__file__).parent / "static"
MOST_REQUESTS = 50
MOST_BODY_BYTES = 4096

Data = dict[str, Any]


class TimelineOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Body of the request for a trace of the next `steps` steps of each worker, waiting at most `timeout_s`."""

    steps: int = 5
    timeout_s: float = 60.0


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
        self._socket = _listen(listens)
        self.streams = Streams(self._first, most_pages)
        self.timeline = LastTimeline(transport, coordinator, lambda data: self.streams.publish([("timeline", data)]))
        self._functions = FunctionRequests(transport, coordinator)
        #: Answers requests that ask no task, so that they do not wait for a thread that waits for one.
        self._quick = ThreadPoolExecutor(2, "dflow dashboard state")
        self._watch = ClusterWatch(transport, coordinator, self._publish, every_s=every_s)
        token = "" if isinstance(security, SameMachine) else secrets.token_urlsafe(32)
        shown = TcpAddress(_shown_host(listens), self._socket.getsockname()[1])
        names = {name.lower() for name in host_names}
        if not listens.is_loopback:
            names |= {listens.host.lower(), socket.gethostname().lower()}
        cookie = f"dflow-dashboard-{shown.port}"
        checks = Middleware(AccessChecks, names=names, token=token, cookie=cookie, is_secure=context is not None)
        app = self._app(checks)
        #: The address to open in a browser.
        self.address = f"{'http' if context is None else 'https'}://{shown}/" + (f"?token={token}" if token else "")
        self._server = HttpServer(app, context, LIMITS, loop="asyncio", lifespan="on", timeout_graceful_shutdown=1)
        serve = partial(self._server.run, sockets=[self._socket])
        self._thread = threading.Thread(target=serve, name="dflow dashboard", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_S
        while not self._server.started and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not self._server.started:
            self.close()
            raise OSError(f"the dashboard could not be served at {shown}")

    def _app(self, checks: Middleware) -> ASGIApp:
        routes: list[BaseRoute] = [
            Route("/", _page),
            Route("/api/state", self._get(lambda request: self._state(), self._quick)),
            Route("/api/history", self._get(self._history, self._quick)),
            Route("/api/events", self._get(self._events, self._quick)),
            Route("/api/stream", self.streams, methods=["GET"]),
            Route("/api/functions", self._get(lambda request: self._functions.functions())),
            Route("/api/traces", self._get(self._traces)),
            Route("/api/graph", self._get(self._graph)),
            Route("/api/timeline", self._get(lambda request: self.timeline.json())),
            Route("/api/timeline", self._start_timeline, methods=["POST"]),
            Route("/api/timeline/trace.json", self._timeline_file),
        ]
        if PAGE.is_dir():
            routes.append(Mount("/static", StaticFiles(directory=PAGE)))
        faults = {HTTPException: _http_error, Exception: _fault}
        middleware = [checks, Middleware(_limited)]
        return Starlette(routes=routes, middleware=middleware, exception_handlers=faults, lifespan=self._lifespan)

    def close(self) -> None:
        """End all pages' streams, and stop serving and watching."""
        self.streams.close()
        self._server.should_exit = True
        self._thread.join(END_S)
        self._socket.close()
        self._watch.close()
        self._functions.close()
        self._quick.shutdown()
        self.timeline.close()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.streams.open()
        yield
        self.streams.close()

    def _publish(self, updates: Sequence[PageUpdate]) -> None:
        pages = {"pages": self.streams.pages}
        self.streams.publish([(name, data | pages if name == "state" else data) for name, data in updates])

    def _first(self) -> list[PageUpdate]:
        return [("state", self._state()), ("timeline", self.timeline.json())]

    def _state(self) -> Data:
        return self._watch.state() | {"pages": self.streams.pages}

    def _history(self, request: Request) -> Data:
        names = request.query_params.get("names", "")
        return self._watch.history({name for name in names.split(",") if name})

    def _events(self, request: Request) -> Data:
        return self._watch.events(_number(request, "since", 0))

    def _traces(self, request: Request) -> Data:
        return self._functions.traces(_text(request, "task"), _number(request, "id"))

    def _graph(self, request: Request) -> Data:
        number, trace = _number(request, "id"), _number(request, "trace", 0)
        return self._functions.graph(_text(request, "task"), number, trace)

    def _get(
        self, data_of: Callable[[Request], Data], pool: ThreadPoolExecutor | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint that answers with JSON data, made on a thread of the pool, or of the shared one."""

        def answer(request: Request) -> Response:
            try:
                return _json(data_of(request))
            except Refusal as refusal:
                return json_error(*refusal.args)
            except GraphNameError as error:
                return json_error(404, *_parts(error))
            except (DflowError, OSError) as error:
                return json_error(504, *_parts(error))

        async def endpoint(request: Request) -> Response:
            if pool is not None:
                return await asyncio.get_running_loop().run_in_executor(pool, answer, request)
            return await run_in_threadpool(answer, request)

        return endpoint

    async def _start_timeline(self, request: Request) -> Response:
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > MOST_BODY_BYTES:
                    return json_error(413, f"body: expected at most {MOST_BODY_BYTES} bytes, got more", "send steps")
            order = msgspec.json.decode(bytes(body or b"{}"), type=TimelineOrder)
        except ClientDisconnect:
            return json_error(400, "body: expected JSON, got the end of the connection")
        except msgspec.DecodeError as error:
            return json_error(400, f"body: expected JSON with steps and timeout_s: {error}", 'send {"steps": 5}')
        for name, value, least, most in (
            ("steps", order.steps, 1, MOST_STEPS),
            ("timeout_s", order.timeout_s, 1, LONGEST_S),
        ):
            if not least <= value <= most:
                return json_error(400, f"{name}: expected {least} to {most:g}, got {value}", f'send {{"{name}": 5}}')
        if not await run_in_threadpool(self.timeline.start, order.steps, order.timeout_s):
            return json_error(409, "timeline: expected none under way, got one", "wait until it is done")
        return _json(self.timeline.json(), 202)

    async def _timeline_file(self, request: Request) -> Response:
        path = self.timeline.file()
        if path is None:
            return json_error(404, "timeline: expected a trace, got none", "ask for one by POST api/timeline")
        return FileResponse(path, media_type="application/json", filename="trace.json")


def _listen(address: TcpAddress) -> socket.socket:
    """Return a socket that listens at the address: of two dashboards with one port, the second raises OSError here."""
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


async def _page(request: Request) -> Response:
    path = PAGE / "index.html"
    if not path.is_file():
        return json_error(404, f"page: expected the file {path}, got none", "install dflow again, with its pages")
    return FileResponse(path, headers={"cache-control": "no-cache"})


def _limited(app: ASGIApp) -> ASGIApp:
    """Return the application, with an error for requests beyond `MOST_REQUESTS` at a time.

    Streams have a limit of their own.
    """
    running = 0

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal running
        if scope["type"] != "http" or scope["path"].endswith("/api/stream"):
            await app(scope, receive, send)
        elif running >= MOST_REQUESTS:
            text = f"requests: expected at most {MOST_REQUESTS} at a time, got one more"
            await json_error(503, text, "ask again later", {"retry-after": "1"})(scope, receive, send)
        else:
            running += 1
            try:
                await app(scope, receive, send)
            finally:
                running -= 1

    return limited


def _json(data: Data, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


def _parts(error: Exception) -> tuple[str, str]:
    """Return the text of an error and its remedy, which begins at the second line."""
    text, _, remedy = str(error).partition("\n")
    return text, " ".join(line.strip() for line in remedy.splitlines())


def _text(request: Request, name: str) -> str:
    value = str(request.query_params.get(name, ""))
    if not value:
        raise Refusal(400, f"{name}: expected a value, got none", f"add ?{name}= to the address")
    return value


def _number(request: Request, name: str, default: int | None = None) -> int:
    value = request.query_params.get(name)
    if value is None and default is not None:
        return default
    if value is None or not (value.isascii() and value.isdigit() and len(value) < 16):
        raise Refusal(400, f"{name}: expected a whole number, got {(value or 'none')[:100]!r}", f"give ?{name}=1")
    return int(value)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    remedies = {404: "see docs/monitoring.md for the addresses", 405: "use GET"}
    text = {404: f"path: expected a known one, got {path!r}", 405: f"method: got {request.method} for {path!r}"}
    status = error.status_code
    return json_error(status, text.get(status, error.detail), remedies.get(status, ""), error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return json_error(500, f"the dashboard failed: {type(error).__name__}", "see its output")
