"""The Open Inference Protocol v2 over HTTP, as an ASGI application. Every refusal is a JSON object with `error`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dflow import __version__
from dflow.serving.content_encoding import LEAST_COMPRESSED, compressed, decompressed, encoding_of, takes_gzip
from dflow.serving.host_check import LOCAL_NAMES, is_own_host
from dflow.serving.inference_service import InferenceAnswer, InferenceService, run_sized
from dflow.serving.request_members import (
    IndexRequest,
    InferenceRequest,
    LoadRequest,
    RefusedRequest,
    check_parameters,
    decode_members,
)
from dflow.serving.serving_metrics import UNKNOWN
from dflow.serving.tensors import BINARY_HEADER, decode_request, encode_response

LOGGER = logging.getLogger("dflow")

#: Most bytes of a request about the repository.
_MOST_SMALL = 1 << 16
#: The addresses in the answer to a request for an unknown path.
_READ = "/v2/models/NAME, /v2/health/ready and /metrics"
#: The path of an inference request: a function, and its version if one is named.
_INFER = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")
#: In the scope of an inference request: the name of the function that it calls, for the metrics.
_NAME = "dflow.function"
Handler = Callable[[Request], Awaitable[Response]]


class HttpApi:
    """Answers requests. All methods run on the event loop's thread.

    names  host names of this server besides localhost and IP addresses, in lower case; None takes any `Host`
    """

    def __init__(self, service: InferenceService, names: Collection[str] | None = None) -> None:
        self._service = service
        paths = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        # `_inferring` answers these; they are here for the answer to other methods.
        routes = [Route(f"{path}/infer", self._infer, methods=["POST"]) for path in paths]
        routes += [
            Route("/v2", _answering(_without_query(self._server_metadata))),
            Route("/v2/health/live", _answering(_without_query(self._live))),
            Route("/v2/health/ready", _answering(_without_query(self._ready))),
            Route("/v2/repository/index", _answering(_without_query(self._index)), methods=["POST"]),
            Route("/v2/repository/models/{model}/load", _answering(_without_query(self._load)), methods=["POST"]),
            Route("/metrics", self._metrics_text),
        ]
        for path in paths:
            routes += [
                Route(path, _answering(_without_query(self._metadata))),
                Route(f"{path}/ready", _answering(_without_query(self._model_ready))),
            ]
        others = Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _other_method})
        others.router.redirect_slashes = False
        app = self._inferring(others)
        self.app = _without_last_slash(app if names is None else _checking_host(app, {*names} | LOCAL_NAMES))

    def _inferring(self, others: ASGIApp) -> ASGIApp:
        """Return an application that answers inference requests itself, without the time that Starlette takes."""

        async def called(scope: Scope, receive: Receive, send: Send) -> None:
            found = _INFER.fullmatch(scope.get("path", "")) if scope.get("method") == "POST" else None
            answer = others
            if found is not None:
                scope["path_params"] = {"model": found[1], "version": found[2] or ""}
                answer = await self._infer(Request(scope, receive))
            await answer(scope, receive, send)

        return called

    async def _server_metadata(self, request: Request) -> Response:
        return _json({"name": "dflow", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._service.check_going_on()
        return _json({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        self._service.check_going_on()
        queue, _, _ = self._service.found(*_called(request))
        return _json({"name": queue.tensors.name, "ready": True})

    async def _metadata(self, request: Request) -> Response:
        return _json(self._service.metadata(*_called(request)))

    async def _index(self, request: Request) -> Response:
        asked = decode_members(await _small_body(request) or b"{}", IndexRequest)
        return _json(self._service.index(ready=asked.ready))

    async def _load(self, request: Request) -> Response:
        """Look for a newer version of a model now; answered when it is served, or refused."""
        _check_no_web_page(request)
        asked = decode_members(await _small_body(request) or b"{}", LoadRequest)
        check_parameters("the request", asked.parameters, {})
        await self._service.load(request.path_params["model"])
        return _json({})

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _infer(self, request: Request) -> Response:
        began_s = time.monotonic()
        response = await _answering(self._inferred)(request)
        if self._service.is_stopping:
            response.headers["Connection"] = "close"
        name = request.scope.get(_NAME, UNKNOWN)
        self._service.metrics.request(name, str(response.status_code), time.monotonic() - began_s)
        return response

    async def _inferred(self, http: Request) -> Response:
        with self._service.in_progress_here():
            name, version = _called(http)
            http.scope[_NAME] = self._service.found(name, version)[0].tensors.name
            self._service.check_going_on()
            _check_no_web_page(http)
            _check_no_query(http)
            began_s = time.monotonic()
            async with self._service.arriving():
                encoding = encoding_of(http.headers.get("Content-Encoding"))
                body = await self._body(http)
                if encoding is not None:
                    body = await asyncio.to_thread(decompressed, body, self._service.settings.max_bytes)
                    self._service.count_bytes(len(body))
            request, arrays = await run_sized(len(body), decode_request, body, http.headers.get(BINARY_HEADER))
            answer = await self._service.answer(name, version, request, arrays, began_s)
            return await _encoded(answer, request, http.headers.get("Accept-Encoding"))

    async def _body(self, request: Request) -> bytes:
        """Return the body. Raises RefusedRequest as soon as it is too large."""
        parts, size = [], 0
        declared = request.headers.get("Content-Length", "0")
        if declared.isdigit():
            self._service.check_size(int(declared))
        async for part in request.stream():
            size += len(part)
            self._service.count_bytes(size)
            parts.append(part)
        return b"".join(parts)


def _called(request: Request) -> tuple[str, str]:
    """Return the function and the version that a path names; an empty version is any."""
    return request.path_params["model"], request.path_params.get("version", "")


async def _encoded(answer: InferenceAnswer, request: InferenceRequest, accepted: str | None) -> Response:
    """Return the response with the outputs that a request wants; `accepted` is its `Accept-Encoding`."""
    head = {"model_name": answer.model_name, "model_version": answer.model_version}
    head |= {"id": request.id} if request.id else {}
    parts, json_bytes = await run_sized(answer.nbytes, encode_response, head, answer.outputs, request)
    headers = {BINARY_HEADER: str(json_bytes)} if json_bytes is not None else {}
    kind = "application/json" if json_bytes is None else "application/octet-stream"
    body = b"".join(parts)
    if len(body) >= LEAST_COMPRESSED and takes_gzip(accepted):
        body = await asyncio.to_thread(compressed, body)
        headers |= {"Content-Encoding": "gzip"}
    return Response(body, headers=headers | {"Vary": "Accept-Encoding"}, media_type=kind)


def _answering(handler: Handler) -> Handler:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedRequest as refusal:
            return _refused(refusal)
        except ClientDisconnect:
            return _refused(RefusedRequest(400, "the client left"))
        except Exception:  # the answer does not show it
            LOGGER.exception("%s %s failed", request.method, request.url.path)
            return _refused(RefusedRequest(500, "the server failed; its log has the reason"))

    return answer


def _without_query(handler: Handler) -> Handler:
    async def checked(request: Request) -> Response:
        _check_no_query(request)
        return await handler(request)

    return checked


def _without_last_slash(app: ASGIApp) -> ASGIApp:
    """Return the application with `/v2/` served as `/v2`: many clients do not repeat a POST after a redirect."""

    async def called(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        await app({**scope, "path": path.rstrip("/")} if path.endswith("/") else scope, receive, send)

    return called


def _checking_host(app: ASGIApp, names: Collection[str]) -> ASGIApp:
    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer, headers = app, Headers(scope=scope)
        # Probes of HTTP/1.0 name no host; a browser always does.
        has_none = "host" not in headers and scope["http_version"] == "1.0"
        if not has_none and not is_own_host(host := headers.get("host", ""), names):
            expected = ", ".join(sorted(names))
            text = f"Host: expected an IP address or one of {expected}, got {host[:100]!r}"
            answer = _refused(RefusedRequest(421, f"{text}; give --host-name for another"))
        await answer(scope, receive, send)

    return checked


def _check_no_web_page(request: Request) -> None:
    """Raise RefusedRequest for a request by a web page, which a browser on this machine sends to any address."""
    if "Origin" in request.headers:
        raise RefusedRequest(403, f"requests by web pages are refused, and this is by {request.headers['Origin']}")


def _check_no_query(request: Request) -> None:
    if query := request.url.query:
        raise RefusedRequest(400, f"the query: expected none, got {query[:100]!r}; parameters belong into the JSON")


async def _small_body(request: Request) -> bytes:
    """Return a body of few bytes; its connection has a deadline for it. Raises RefusedRequest for a larger one."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > _MOST_SMALL:
            raise RefusedRequest(413, f"the request: expected at most {_MOST_SMALL} bytes, got more")
    return bytes(body)


async def _no_such_path(request: Request, error: Exception) -> Response:
    text = (
        f"there is no {request.method} {request.url.path or '/'}; there is POST /v2/models/NAME/infer, and GET {_READ}"
    )
    return _refused(RefusedRequest(404, text))


async def _other_method(request: Request, error: Exception) -> Response:
    headers = getattr(error, "headers", None) or {}
    allowed = " or ".join(sorted(headers.get("Allow", "").split(", ")))
    text = f"{request.url.path}: expected {allowed}, got {request.method}"
    return _refused(RefusedRequest(405, text, headers))


def _refused(refusal: RefusedRequest) -> Response:
    return _json({"error": str(refusal)}, refusal.status, refusal.headers)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
