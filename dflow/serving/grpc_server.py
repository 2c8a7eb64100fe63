"""The Open Inference Protocol v2 over gRPC, on the event loop that HTTP has.

Every refusal is a status of gRPC with the text that HTTP answers. Each method takes its one message as a stream does,
so that it can refuse a request before it reads it, and end one that does not arrive. gRPC itself ends a request of
more than `max_bytes`, before or after decompression, with the status RESOURCE_EXHAUSTED.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from dflow import __version__
from dflow.distributed.process.open_files import raise_open_files
from dflow.distributed.transport.addresses import TcpAddress
from dflow.distributed.transport.security.mutual_tls import MutualTls
from dflow.serving.connection_limits import ConnectionLimits
from dflow.serving.grpc_messages import MESSAGES, METHODS, SERVICE
from dflow.serving.grpc_tensors import decode_message, encode_message, parameters_of
from dflow.serving.inference_service import InferenceService, run_sized
from dflow.serving.request_members import RefusedRequest, check_parameters
from dflow.serving.serving_metrics import UNKNOWN

LOGGER = logging.getLogger("dflow")

_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
#: gRPC logs here, with a traceback, each client that leaves while its answer is sent.
logging.getLogger("grpc._cython.cygrpc").addFilter(lambda record: "ExecuteBatchError" not in record.getMessage())
#: Most bytes of a refusal's text: a client drops a response whose headers have more than 8 kB, and encodes a byte as 3.
_MOST_TEXT = 2000
#: Time without a further request, in s, after which a stop finds that no more come, and most looks for that.
_QUIET_S, _MOST_LOOKS = 0.05, 10


class GrpcServer:
    """Answers requests of gRPC. All methods run on the event loop's thread.

    security  has the certificates; None for plain text
    limits    of connections
    """

    def __init__(self, service: InferenceService, security: MutualTls | None, limits: ConnectionLimits) -> None:
        self._service, self._security, self._limits = service, security, limits
        self._server: Any = None
        #: Of `stop`: whether it holds requests, how many it has held, and when it answers them.
        self._is_closing, self._held, self._closed = False, 0, asyncio.Event()

    async def start(self, address: TcpAddress) -> None:
        """Listen at an address and answer requests. Raises RuntimeError for an address in use."""
        limits = self._limits
        self._server = grpc.aio.server(
            options=[
                ("grpc.so_reuseport", 0),  # otherwise another server may share the port, and get half of the requests
                ("grpc.max_receive_message_length", self._service.settings.max_bytes),
                ("grpc.max_concurrent_streams", limits.streams),
                # One limit: between a soft and a hard one gRPC refuses requests by chance.
                ("grpc.max_metadata_size", limits.head_bytes),
                ("grpc.absolute_max_metadata_size", limits.head_bytes),
                ("grpc.server_handshake_timeout_ms", int(1e3 * limits.request_s)),
                ("grpc.max_connection_idle_ms", int(1e3 * limits.idle_s)),
                ("grpc.keepalive_time_ms", int(1e3 * limits.idle_s)),
                ("grpc.keepalive_timeout_ms", int(1e3 * limits.answer_s)),
                ("grpc.max_allowed_incoming_connections", min(limits.connections, raise_open_files() // 4)),
            ]
        )
        methods = {
            name: self._method(name, self._infer if name == "ModelInfer" else partial(self._answer, name))
            for name in METHODS
        }
        self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        if self._security is None:
            self._server.add_insecure_port(str(address))
        else:
            certificate, key, authority = (path.read_bytes() for path in self._security.files)
            self._server.add_secure_port(
                str(address), grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
            )
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Accept no more requests, and end those in progress after `grace_s`, if the server was started.

        gRPC would cancel requests that it has received and given to no handler, and clients repeat UNAVAILABLE alone.
        So handlers wait until no more requests come, and answer when gRPC has sent clients the end of the server.
        """
        if self._server is None:
            return
        self._is_closing = True
        for _ in range(_MOST_LOOKS):
            held = self._held
            await asyncio.sleep(_QUIET_S)
            if self._held == held:
                break
        stopping = asyncio.create_task(self._server.stop(grace_s))
        await asyncio.sleep(_QUIET_S)
        self._closed.set()
        await stopping

    def _method(self, name: str, answer: Callable[[Any], Awaitable[bytes]]) -> Any:
        """Return the handler of a method, which answers exceptions by a status."""

        async def handle(_: Any, context: Any) -> bytes:
            if self._is_closing:
                self._held += 1
                await self._closed.wait()
            try:
                return await answer(context)
            except Exception as error:
                refusal = _refusal_of(error, name)
            text = str(refusal).encode(errors="replace")[:_MOST_TEXT].decode(errors="ignore")
            await context.abort(_STATUSES[refusal.status], text)
            raise AssertionError("abort raises")

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _answer(self, method: str, context: Any) -> bytes:
        """Answer a method about the server or its models."""
        async with self._service.in_time():
            body = await self._received(context)
        fields = await self._fields(method, _parsed(f"{method}Request", body))
        encoded: bytes = MESSAGES[f"{method}Response"](**fields).SerializeToString()
        return encoded

    async def _fields(self, method: str, asked: Any) -> dict[str, Any]:
        """Return the fields of a response. Raises RefusedRequest."""
        match method:
            case "ServerLive":
                return {"live": True}
            case "ServerReady":
                return {"ready": not self._service.is_stopping}
            case "ModelReady":
                return {"ready": not self._service.is_stopping and self._service.is_served(asked.name, asked.version)}
            case "ServerMetadata":
                return {"name": "dflow", "version": __version__}
            case "ModelMetadata":
                return self._service.metadata(asked.name, asked.version)
        if asked.repository_name:
            name = asked.repository_name[:100]
            raise RefusedRequest(400, f"repository_name: expected none, got {name!r}; leave it out")
        if method == "RepositoryIndex":
            return {"models": self._service.index(ready=asked.ready)}
        check_parameters("the request", parameters_of(asked), {})
        await self._service.load(asked.model_name)
        return {}

    async def _infer(self, context: Any) -> bytes:
        began_s, status, name = time.monotonic(), "CANCELLED", UNKNOWN
        try:
            with self._service.in_progress_here():
                self._service.check_going_on()
                async with self._service.arriving():
                    body = await self._received(context)
                    self._service.count_bytes(len(body))
                message = await run_sized(len(body), _parsed, "ModelInferRequest", body)
                name = self._service.found(message.model_name, message.model_version)[0].tensors.name
                request, arrays = await run_sized(len(body), decode_message, message)
                answer = await self._service.answer(message.model_name, message.model_version, request, arrays, began_s)
                is_raw = bool(message.raw_input_contents) or not message.inputs
                encoded = await run_sized(answer.nbytes, lambda: encode_message(answer, request, is_raw=is_raw))
                status = "OK"
                return encoded
        except Exception as error:
            refusal = _refusal_of(error, "ModelInfer")
            status = _STATUSES[refusal.status].name
            raise refusal from error
        finally:
            self._service.metrics.request(name, status, time.monotonic() - began_s)

    async def _received(self, context: Any) -> bytes:
        """Return the bytes of a request's message. Raises RefusedRequest."""
        body = await context.read()
        if body is grpc.aio.EOF:  # gRPC itself has answered the client if the message is too large
            most = self._service.settings.max_bytes
            text = f"the request: expected a message of at most {most} bytes, as --max-bytes says, got none"
            raise RefusedRequest(413, text)
        received: bytes = body
        return received


def _refusal_of(error: Exception, name: str) -> RefusedRequest:
    """Return the refusal that answers an exception, which is logged if it is a fault of the server."""
    if isinstance(error, RefusedRequest):
        return error
    LOGGER.error("%s failed", name, exc_info=error)
    return RefusedRequest(500, "the server failed; its log has the reason")


def _parsed(kind: str, body: bytes) -> Any:
    try:
        return MESSAGES[kind].FromString(body)
    except DecodeError:
        raise RefusedRequest(400, f"expected the message {kind}, got other bytes") from None
