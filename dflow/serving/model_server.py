"""A server of models: HTTP and gRPC on a thread with an event loop; another thread looks for versions and saves state.

Invariant: after `stop`, each request that was taken has been answered, or the time for that has passed; those that
come meanwhile are answered by 503.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.distributed.transport.security.policy import SecurityPolicy
from dflow.distributed.transport.security.shared_secret import SharedSecret
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.grpc_server import GrpcServer
from dflow.serving.http_api import HttpApi
from dflow.serving.http_connection import LOGGER as HTTP_LOGGER
from dflow.serving.http_server import HttpServer, bound_socket
from dflow.serving.inference_service import InferenceService
from dflow.serving.served_model import ServedModel, find_models, versions_in
from dflow.serving.served_version import ServingSettings
from dflow.serving.serving_metrics import ServingMetrics
from dflow.tracing.errors import ConfigError, ExportError, InternalError, SecurityError

LOGGER = logging.getLogger("dflow")

#: Longest wait for the event loop to start and to end, in s.
_LOOP_S = 30.0
#: Time for threads to end when the grace of a stop is over, in s.
_LEAST_S = 1.0
#: Time between two looks at the number of requests in progress, in s.
_LOOK_S = 0.01
#: Time between two looks whether a task has lost rows of tables, in s.
_LOOK_FOR_LOST_S = 1.0


class ModelServer:
    """Serves the models of a folder until `stop`. As a context manager, it stops at the exit.

    folder        an export, a folder of its versions, or a folder of models; see `find_models`
    address       where to listen; port 0 is a free one
    security      decides where it may listen, and which clients are accepted
    grpc          where to listen for gRPC too; port 0 is a free one
    poll_s        time between two looks for newer versions; 0 never looks, but on request
    save_every_s  time between two saves of state that calls have changed, as new versions; 0 never saves
    host_names    further names of this server in the `Host` of requests, such as a proxy's; only without certificates,
                  since with them a client checks the name
    limits        of connections; by default those of `ConnectionLimits`, whose body may take the time of the settings
    report        called with lines for the user

    raises  ConfigError, ExportError, SecurityError; OSError for an address in use
    """

    def __init__(
        self,
        folder: Path,
        address: TcpAddress,
        settings: ServingSettings,
        security: SecurityPolicy,
        *,
        grpc: TcpAddress | None = None,
        name: str | None = None,
        poll_s: float = 5.0,
        save_every_s: float = 0.0,
        host_names: Collection[str] = (),
        limits: ConnectionLimits | None = None,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        certificates = _certificates(security, [address] if grpc is None else [address, grpc])
        # A body that comes too late is first answered by 408.
        limits = limits or ConnectionLimits(body_s=settings.timeout_s + ConnectionLimits.request_s)
        if host_names and certificates is not None:
            raise ConfigError(
                f"--host-name is for a server without certificates, got {', '.join(host_names)}", "leave it out"
            )
        names = None if certificates is not None else [name.lower() for name in host_names]
        self._poll_s, self._save_every_s, self._report = poll_s, save_every_s, report
        self._tables = settings.tables
        self._stop_watching = threading.Event()
        metrics = ServingMetrics()
        folders = find_models(folder, name)
        if save_every_s:
            _check_savable(folders, learns=settings.learn)
        with ExitStack() as listeners:
            listener = listeners.enter_context(bound_socket(address, "give another --address, or port 0"))
            # gRPC makes its own socket, beside this one, which holds the port until then.
            other = listeners.enter_context(bound_socket(grpc, "give another --grpc, or port 0")) if grpc else None
            self.models: dict[str, ServedModel] = {}
            try:
                for model, each in folders.items():
                    self.models[model] = ServedModel(model, each, settings, metrics.batch, report)
                _check_one_is_served(self.models)
                metrics.models = self.models
                self._service = InferenceService(self.models, settings, metrics, lambda model: model.renew(self._swap))
                context = None if certificates is None else certificates.server_context
                self._server = HttpServer(HttpApi(self._service, names).app, context, limits, lifespan="off")
                self._grpc = GrpcServer(self._service, certificates, limits)
                #: Where gRPC is answered; None if it is not.
                self.grpc_address = TcpAddress(grpc.host, other.getsockname()[1]) if grpc and other else None
                self.url = f"{'https' if context else 'http'}://{TcpAddress(address.host, listener.getsockname()[1])}"
                self._start(socket.socket(fileno=listener.detach()))
            except BaseException:
                self._end_versions(_LEAST_S)
                raise

    def _start(self, listener: socket.socket) -> None:
        """Start the threads, and return when connections are accepted."""
        self._loop, self._stops_at = _new_loop(), 0.0
        self._refused: Exception | None = None
        self._serving = threading.Thread(target=self._serve, args=(listener,), name="dflow serve http", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="dflow serve versions", daemon=True)
        self._serving.start()
        while not self._server.started:
            self._serving.join(_LOOK_S)
            if not self._serving.is_alive():
                # As when another server, which has loaded its models meanwhile, listens at the port.
                raise OSError(f"cannot listen: {self._refused}; give another --address or --grpc, or port 0")
        self._watching.start()

    def stop(self, grace_s: float = 30.0) -> bool:
        """Refuse new requests, answer those taken within `grace_s`, and save; return whether all that went well.

        A second call does nothing.
        """
        if self._stop_watching.is_set():
            return True
        self._stop_watching.set()
        self._loop.call_soon_threadsafe(setattr, self._service, "is_stopping", True)
        self._stops_at = deadline = time.monotonic() + grace_s
        # The loop takes requests until it knows of the stop.
        while (self._service.in_progress or not self._service.is_stopping) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        is_clean = not self._service.in_progress
        self._loop.call_soon_threadsafe(self._service.abandon)
        self._watching.join(_until(deadline))
        if is_clean:
            is_clean = self._end_versions(_until(deadline))
        # Before the end of the loop, which waits for clients to read their answers.
        is_saved = self._save()
        self._server.should_exit = True
        self._serving.join(_until(deadline))
        if self._serving.is_alive():
            is_clean = False
            with suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._drop_connections)
            self._serving.join(_LOOP_S)
        return is_saved and is_clean and not self._watching.is_alive()

    def _end_versions(self, timeout_s: float) -> bool:
        """Answer the requests that wait, and free the memory of tasks; return whether the requests were in time."""
        versions = [model.current for model in self.models.values() if model.current]
        closed = [version.close(timeout_s) for version in versions]
        for version in versions if self._tables is not None else ():
            version.free()
        return all(closed)

    def _drop_connections(self) -> None:
        """Abort the connections of clients that do not read, and what is left of handlers; then the loop ends."""
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        for task in list(self._server.server_state.tasks):
            task.cancel()
        self._server.force_exit = True

    def _serve(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(_log_fault)
        try:
            self._loop.run_until_complete(self._served(listener))
        except (OSError, RuntimeError) as error:
            if self._server.started:
                raise
            self._refused = error
        finally:
            self._loop.close()
            listener.close()

    async def _served(self, listener: socket.socket) -> None:
        """Answer requests until `stop`, and until clients have read the answers."""
        if self.grpc_address is not None:
            await self._grpc.start(self.grpc_address)
        try:
            await self._server.serve(sockets=[listener])
        finally:
            await self._grpc.stop(_until(self._stops_at))

    def _swap(self, change: Callable[[], None]) -> None:
        """Run `change` on the loop, where no handler is between finding a version and submitting to it."""
        done = threading.Event()

        def run() -> None:
            change()
            done.set()

        self._loop.call_soon_threadsafe(run)
        if not done.wait(_LOOP_S):
            raise InternalError("the event loop of the server does not answer")

    def _watch(self) -> None:
        now = time.monotonic()
        looks_at = now + self._poll_s if self._poll_s else float("inf")
        saves_at = now + self._save_every_s if self._save_every_s else float("inf")
        longest = threading.TIMEOUT_MAX if self._tables is None else _LOOK_FOR_LOST_S
        while not self._stop_watching.wait(min(longest, min(looks_at, saves_at) - time.monotonic())):
            is_lost = any(model.current is not None and model.current.is_lost for model in self.models.values())
            if is_lost or time.monotonic() >= looks_at:
                self._renew()
                looks_at = time.monotonic() + self._poll_s if self._poll_s else float("inf")
            if time.monotonic() >= saves_at:
                self._save()
                saves_at = time.monotonic() + self._save_every_s

    def _renew(self) -> None:
        for model in self.models.values():
            try:
                model.renew(self._swap)
            except OSError as error:
                self._report(f"{model.name}: a newer version cannot be looked for: {error}")
            except Exception:
                LOGGER.exception("looking for a newer version of %s failed; the present one is served", model.name)

    def _save(self) -> bool:
        """Save changed state if the server saves any; return whether that went well."""
        is_saved = True
        for model in self.models.values() if self._save_every_s else ():
            try:
                model.save()
            except Exception as error:
                is_saved = False
                self._report(f"{model.name}: its state could not be saved, and will be tried again: {error}")
        return is_saved

    def __enter__(self) -> ModelServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _until(deadline: float) -> float:
    """Return the time until the deadline in s, and enough for idle threads to end if it has passed."""
    return max(_LEAST_S, deadline - time.monotonic())


def _log_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    HTTP_LOGGER.error("%s: %s", context.get("message"), context.get("exception"))


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, which takes a third less time for a request, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _certificates(security: SecurityPolicy, addresses: Sequence[TcpAddress]) -> MutualTls | None:
    """Return the certificates for listeners at these addresses, or None for plain text. Raises SecurityError."""
    if isinstance(security, SharedSecret):
        raise ConfigError(
            "serve: expected certificates, got a shared secret, which a client of HTTP cannot prove without sending it",
            "give --certificates DIR, or unset DFLOW_SECRET_FILE to listen on loopback alone",
        )
    for address in addresses:
        security.check_address(address, listens=True)
        # Whatever a policy says, no plain text leaves the machine.
        if not isinstance(security, MutualTls) and not address.is_loopback:
            raise SecurityError(f"serve: expected certificates for {address}, got none; give --certificates DIR")
    return security if isinstance(security, MutualTls) else None


def _check_one_is_served(models: Mapping[str, ServedModel]) -> None:
    """Raise ExportError if no model can be served; a server of several serves the others."""
    if not any(model.current for model in models.values()):
        reasons = "\n".join(model.unavailable for model in models.values())
        raise ExportError(f"{', '.join(models)}: no version can be served:\n{reasons}")


def _check_savable(folders: dict[str, Path], *, learns: bool) -> None:
    if not learns:
        raise ConfigError("--save-every saves what calls have learned, and --learn is absent", "give --learn too")
    for folder in folders.values():
        if folder in versions_in(folder).values():
            raise ConfigError(
                f"--save-every writes versions, and {folder} is one export",
                f"move it to {folder / '1'}, and serve {folder}",
            )
