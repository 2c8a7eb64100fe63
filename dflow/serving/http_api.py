"""The Open Inference Protocol v2 as an ASGI application over served models.

`NAME` is a model with one function; `NAME.FUNCTION` is a function of a model with several. Every refusal is a JSON
object with the field `error`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

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
from dflow.serving.request_batches import RequestQueue, outputs_of
from dflow.serving.request_members import (
    IndexRequest,
    InferenceRequest,
    LoadRequest,
    RefusedRequest,
    check_parameters,
    decode_members,
)
from dflow.serving.served_model import ServedModel
from dflow.serving.served_version import ServedVersion, ServingSettings
from dflow.serving.serving_metrics import UNKNOWN, ServingMetrics
from dflow.serving.tensors import BINARY_HEADER, check_outputs, decode_request, encode_response
from dflow.tracing.errors import QueueClosed

LOGGER = logging.getLogger("dflow")

#: Most bytes of all requests in progress, in bodies of the largest size.
_MOST_BODIES = 4
#: Bytes of a request or answer that are decoded or encoded on the loop's thread; more would delay other requests.
_MOST_ON_LOOP = 1 << 20
#: Most bytes of a request about the repository.
_MOST_SMALL = 1 << 16
_AGAIN = {"Retry-After": "1"}
#: The addresses in the answer to a request for an unknown path.
_READ = "/v2/models/NAME, /v2/health/ready and /metrics"
#: In the scope of an inference request: the name of the function that it calls, for the metrics.
_NAME = "dflow.function"
Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]


class HttpApi:
    """Answers requests. All methods run on the event loop's thread.

    names        host names of this server besides localhost and IP addresses, in lower case; None takes any `Host`
    is_stopping  whether new inference requests are refused
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        settings: ServingSettings,
        metrics: ServingMetrics,
        renew: Callable[[ServedModel], str | None],
        names: Collection[str] | None = None,
    ) -> None:
        self._models, self._settings, self._metrics, self._renew = models, settings, metrics, renew
        self.is_stopping = False
        #: Bytes received by each inference request being read, waiting or computed.
        self._bytes: dict[asyncio.Task[Any] | None, int] = {}
        #: Those that have arrived whole, which alone count for the limit: clients that stall shut out no others.
        self._arrived: set[asyncio.Task[Any] | None] = set()
        paths = "/v2/models/{model}", "/v2/models/{model}/versions/{version}"
        # The first that matches is called, so those of most requests stand first.
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
        app = Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _other_method})
        app.router.redirect_slashes = False
        self.app = _without_last_slash(app if names is None else _checking_host(app, {*names} | LOCAL_NAMES))

    @property
    def in_progress(self) -> int:
        """The number of inference requests being read, waiting or computed."""
        return len(self._bytes)

    def abandon(self) -> None:
        """Answer the requests in progress by 503."""
        for task in self._bytes:
            if task is not None:
                task.cancel()

    async def _server_metadata(self, request: Request) -> Response:
        return _json({"name": "dflow", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        self._check_going_on()
        return _json({"ready": True})

    async def _model_ready(self, request: Request) -> Response:
        self._check_going_on()
        queue, _, _ = self._found(request)
        return _json({"name": queue.tensors.name, "ready": True})

    async def _metadata(self, request: Request) -> Response:
        queue, version, _ = self._found(request)
        tensors = queue.tensors
        return _json(
            {
                "name": tensors.name,
                "versions": [str(version.number)],
                "platform": "dflow",
                "inputs": [spec.metadata for spec in tensors.inputs],
                "outputs": [spec.metadata for spec in tensors.outputs],
            }
        )

    async def _index(self, request: Request) -> Response:
        asked = decode_members(await _small_body(request) or b"{}", IndexRequest)
        entries: list[dict[str, str]] = []
        for model in self._models.values():
            ready = {"state": "READY"} | ({"reason": "its folder is gone"} if model.is_gone else {})
            if (version := model.current) is not None:
                names = [queue.tensors.name for queue in version.queues.values()]
                entries += [{"name": name, "version": str(version.number), **ready} for name in names]
            entries += [
                {"name": model.name, "version": str(number), "state": "UNAVAILABLE", "reason": reason}
                for number, reason in model.refused.items()
            ]
        return _json([entry for entry in entries if entry["state"] == "READY" or not asked.ready])

    async def _load(self, request: Request) -> Response:
        """Look for a newer version of a model now; answered when it is served, or refused."""
        _check_no_web_page(request)
        asked = decode_members(await _small_body(request) or b"{}", LoadRequest)
        check_parameters("the request", asked.parameters, {})
        name = request.path_params["model"]
        if name not in self._models:
            raise RefusedRequest(404, f"there is no model {name!r}; there is {', '.join(self._models)}")
        if refusal := await asyncio.to_thread(self._renew, self._models[name]):
            raise RefusedRequest(400, refusal)
        return _json({})

    async def _metrics_text(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _infer(self, request: Request) -> Response:
        began, task = time.monotonic(), asyncio.current_task()
        self._bytes[task] = 0
        try:
            response = await _answering(self._inferred)(request)
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            response = _refused(RefusedRequest(503, "the server stopped before the computation ended"))
        finally:
            del self._bytes[task]
            self._arrived.discard(task)
        if self.is_stopping:
            response.headers["Connection"] = "close"
        self._metrics.request(request.scope.get(_NAME, UNKNOWN), response.status_code, time.monotonic() - began)
        return response

    async def _inferred(self, http: Request) -> Response:
        http.scope[_NAME] = self._found(http)[0].tensors.name
        self._check_going_on()
        _check_no_web_page(http)
        _check_no_query(http)
        self._check_room()
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                encoding = encoding_of(http.headers.get("Content-Encoding"))
                body = await self._body(http)
                if encoding is not None:
                    body = await asyncio.to_thread(decompressed, body, self._settings.max_bytes)
                    self._count(len(body))
        except TimeoutError:
            raise RefusedRequest(408, f"the request did not arrive within {self._settings.timeout_s:g} s") from None
        self._check_room()  # again: others may have arrived meanwhile
        self._arrived.add(asyncio.current_task())
        request, arrays = await _run(len(body), decode_request, body, http.headers.get(BINARY_HEADER))
        timeout_s = self._timeout_s(request.parameters) - (time.monotonic() - began)
        outputs, version = await self._outputs(http, request, arrays, timeout_s)
        queue, number = version
        named = {spec.name: array for spec, array in zip(queue.tensors.outputs, outputs, strict=True)}
        head = {"model_name": queue.tensors.name, "model_version": str(number)}
        head |= {"id": request.id} if request.id else {}
        size = sum(array.nbytes for array in named.values())
        parts, json_bytes = await _run(size, encode_response, head, named, request)
        headers = {BINARY_HEADER: str(json_bytes)} if json_bytes is not None else {}
        kind = "application/json" if json_bytes is None else "application/octet-stream"
        body = b"".join(parts)
        if len(body) >= LEAST_COMPRESSED and takes_gzip(http.headers.get("Accept-Encoding")):
            body = await asyncio.to_thread(compressed, body)
            headers |= {"Content-Encoding": "gzip"}
        return Response(body, headers=headers | {"Vary": "Accept-Encoding"}, media_type=kind)

    async def _outputs(
        self, http: Request, request: InferenceRequest, arrays: Mapping[str, Any], timeout_s: float
    ) -> tuple[list[Any], tuple[RequestQueue, int]]:
        """Return the outputs, and the queue and the version that computed them."""
        while True:
            queue, version, model = self._found(http)
            number = version.number
            queue.tensors.check(arrays)
            check_outputs(request, [spec.name for spec in queue.tensors.outputs])
            if (none := queue.tensors.of_no_rows(arrays)) is not None:
                return none, (queue, number)
            try:
                return await outputs_of(queue, arrays, timeout_s), (queue, number)
            except QueueClosed:
                # A version is closed after another took over. A queue that closed otherwise ends the request.
                if model.current is version:
                    raise RefusedRequest(503, "the server is stopping", _AGAIN) from None

    def _timeout_s(self, parameters: Mapping[str, Any]) -> float:
        """Return the time until the computation must begin: the server's, or less by the parameter `timeout` in us."""
        given = parameters.get("timeout", 0)
        return min(self._settings.timeout_s, given / 1e6) if given else self._settings.timeout_s

    async def _body(self, request: Request) -> bytes:
        """Return the body. Raises RefusedRequest as soon as it is too large."""
        most, parts, size = self._settings.max_bytes, [], 0
        declared = request.headers.get("Content-Length", "0")
        size_refusal = RefusedRequest(413, f"the request: expected at most {most} bytes, as --max-bytes says")
        if declared.isdigit() and int(declared) > most:
            raise size_refusal
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise size_refusal
            self._count(size)
            parts.append(part)
        return b"".join(parts)

    def _count(self, size: int) -> None:
        """Count the bytes of this task's request. Raises RefusedRequest if all requests have too many."""
        self._bytes[asyncio.current_task()] = size
        most = _MOST_BODIES * self._settings.max_bytes
        if sum(self._bytes.values()) > most:
            raise RefusedRequest(503, f"the server has {most} bytes of requests in progress, the most", _AGAIN)

    def _check_room(self) -> None:
        if len(self._arrived) >= self._settings.max_queue:
            raise RefusedRequest(
                503, f"the server has {self._settings.max_queue} requests in progress, the most", _AGAIN
            )

    def _check_going_on(self) -> None:
        if self.is_stopping:
            raise RefusedRequest(503, "the server is stopping", {**_AGAIN, "Connection": "close"})

    def _found(self, request: Request) -> tuple[RequestQueue, ServedVersion, ServedModel]:
        """Return the queue of the function that a path names, with its version and model. Raises RefusedRequest."""
        path = request.path_params["model"]
        queue, version, model = self._function(path)
        asked = request.path_params.get("version", str(version.number))
        if asked != str(version.number):
            raise RefusedRequest(
                404, f"model {path!r}: expected version {version.number}, which is served, got {asked}"
            )
        return queue, version, model

    def _function(self, path: str) -> tuple[RequestQueue, ServedVersion, ServedModel]:
        if path in self._models:
            model, version = self._models[path], _current(self._models[path])
            queues = version.queues
            if len(queues) + len(version.refused) == 1:
                return next(iter(queues.values())), version, model
            raise RefusedRequest(404, f"model {path!r} has several functions; name one: {_names(model)}")
        name, _, function = path.rpartition(".")
        model_or_none = self._models.get(name)
        if model_or_none is None:
            every = ", ".join(_names(model) for model in self._models.values())
            raise RefusedRequest(404, f"there is no model {path!r}; there is {every}")
        version = _current(model_or_none)
        if function in version.refused:
            raise RefusedRequest(403, f"{path} is not served: {version.refused[function]}")
        if function not in version.queues:
            raise RefusedRequest(404, f"model {name!r} has no function {function!r}; it has {_names(model_or_none)}")
        return version.queues[function], version, model_or_none


def _names(model: ServedModel) -> str:
    return ", ".join(queue.tensors.name for queue in model.queues) or model.name


def _current(model: ServedModel) -> ServedVersion:
    if model.current is None:
        raise RefusedRequest(503, f"model {model.name!r} is unavailable: {model.unavailable}")
    return model.current


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


async def _run(size: int, fn: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function that takes or makes `size` bytes: on this thread, or on another one above `_MOST_ON_LOOP`."""
    return fn(*arguments) if size <= _MOST_ON_LOOP else await asyncio.to_thread(fn, *arguments)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
