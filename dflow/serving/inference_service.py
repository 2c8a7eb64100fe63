"""Requests to served models, whichever protocol brings them: which function they call, limits, progress and answers.

`NAME` is a model with one function; `NAME.FUNCTION` is a function of a model with several. A refusal is a
`RefusedRequest`, which has a status of HTTP; other protocols translate it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from dflow.serving.request_batches import RequestQueue, outputs_of
from dflow.serving.request_members import InferenceRequest, RefusedRequest
from dflow.serving.served_model import ServedModel
from dflow.serving.served_version import ServedVersion, ServingSettings
from dflow.serving.serving_metrics import ServingMetrics
from dflow.serving.tensors import check_outputs
from dflow.tracing.errors import QueueClosed

#: Most bytes of all requests in progress, in bodies of the largest size.
_MOST_BODIES = 4
#: Bytes of a request or answer that are decoded or encoded on the loop's thread; more would delay other requests.
_MOST_ON_LOOP = 1 << 20
_AGAIN = {"Retry-After": "1"}
Result = TypeVar("Result")


@dataclass(frozen=True)
class InferenceAnswer:
    """The outputs of a request by name, with the function and the version that computed them."""

    model_name: str
    model_version: str
    outputs: Mapping[str, np.ndarray[Any, Any]]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.outputs.values())


class InferenceService:
    """Answers inference requests, and requests about models. All methods run on the event loop's thread.

    renew        looks for a newer version of a model; returns why the newest was refused, or None
    is_stopping  whether new inference requests are refused
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        settings: ServingSettings,
        metrics: ServingMetrics,
        renew: Callable[[ServedModel], str | None],
    ) -> None:
        self.settings, self.metrics = settings, metrics
        self._models, self._renew = models, renew
        self.is_stopping = False
        #: Bytes received by each inference request being read, waiting or computed.
        self._bytes: dict[asyncio.Task[Any] | None, int] = {}
        #: Those that have arrived whole, which alone count for the limit: clients that stall shut out no others.
        self._arrived: set[asyncio.Task[Any] | None] = set()

    @property
    def in_progress(self) -> int:
        """The number of inference requests being read, waiting or computed."""
        return len(self._bytes)

    def abandon(self) -> None:
        """Answer the requests in progress by 503."""
        for task in self._bytes:
            if task is not None:
                task.cancel()

    @contextmanager
    def in_progress_here(self) -> Iterator[None]:
        """Count this task as a request in progress. Raises RefusedRequest if `abandon` ended it."""
        task = asyncio.current_task()
        self._bytes[task] = 0
        try:
            yield
        except asyncio.CancelledError:
            if not self.is_stopping:
                raise
            raise RefusedRequest(503, "the server stopped before the computation ended") from None
        finally:
            del self._bytes[task]
            self._arrived.discard(task)

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Receive a request in the block. Raises RefusedRequest if that takes too long."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                yield
        except TimeoutError:
            text = f"the request did not arrive within {self.settings.timeout_s:g} s"
            raise RefusedRequest(408, text) from None

    @asynccontextmanager
    async def arriving(self) -> AsyncIterator[None]:
        """Receive this task's inference request in the block. Raises RefusedRequest if there is no room or no time."""
        self._check_room()
        async with self.in_time():
            yield
        self._check_room()  # again: others may have arrived meanwhile
        self._arrived.add(asyncio.current_task())

    def check_size(self, size: int) -> None:
        """Raise RefusedRequest for a request of too many bytes."""
        if size > (most := self.settings.max_bytes):
            raise RefusedRequest(413, f"the request: expected at most {most} bytes, as --max-bytes says")

    def count_bytes(self, size: int) -> None:
        """Count the bytes of this task's request. Raises RefusedRequest if it has too many, or all requests have."""
        self.check_size(size)
        self._bytes[asyncio.current_task()] = size
        most = _MOST_BODIES * self.settings.max_bytes
        if sum(self._bytes.values()) > most:
            raise RefusedRequest(503, f"the server has {most} bytes of requests in progress, the most", _AGAIN)

    def check_going_on(self) -> None:
        """Raise RefusedRequest if the server is stopping."""
        if self.is_stopping:
            raise RefusedRequest(503, "the server is stopping", {**_AGAIN, "Connection": "close"})

    async def answer(
        self, model: str, version: str, request: InferenceRequest, arrays: Mapping[str, Any], began_s: float
    ) -> InferenceAnswer:
        """Compute the outputs. Raises RefusedRequest.

        version  the requested one; empty for any
        arrays   the inputs by name
        began_s  the time at which the request came; its deadline counts from it
        """
        timeout_s = self._timeout_s(request.parameters) - (time.monotonic() - began_s)
        while True:
            queue, current, served = self.found(model, version)
            tensors, number = queue.tensors, str(current.number)
            tensors.check(arrays)
            check_outputs(request, [spec.name for spec in tensors.outputs])
            try:
                if (outputs := tensors.of_no_rows(arrays)) is None:
                    outputs = await outputs_of(queue, arrays, timeout_s)
            except QueueClosed:
                # A version is closed after another took over. A queue that closed otherwise ends the request.
                if served.current is current:
                    raise RefusedRequest(503, "the server is stopping", _AGAIN) from None
                continue
            named = {spec.name: array for spec, array in zip(tensors.outputs, outputs, strict=True)}
            return InferenceAnswer(tensors.name, number, named)

    def found(self, name: str, version: str = "") -> tuple[RequestQueue, ServedVersion, ServedModel]:
        """Return the queue of a function, with its version and model. Raises RefusedRequest.

        version  the requested one; empty for any
        """
        queue, current, model = self._function(name)
        if version not in ("", str(current.number)):
            raise RefusedRequest(
                404, f"model {name!r}: expected version {current.number}, which is served, got {version}"
            )
        return queue, current, model

    def is_served(self, name: str, version: str) -> bool:
        """Return whether requests for a function, and this version of it unless it is empty, are answered."""
        try:
            self.found(name, version)
        except RefusedRequest:
            return False
        return True

    def metadata(self, name: str, version: str) -> dict[str, Any]:
        """Return the inputs and outputs of a function, as the protocol names them. Raises RefusedRequest."""
        queue, current, _ = self.found(name, version)
        return {
            "name": queue.tensors.name,
            "versions": [str(current.number)],
            "platform": "dflow",
            "inputs": [spec.metadata for spec in queue.tensors.inputs],
            "outputs": [spec.metadata for spec in queue.tensors.outputs],
        }

    def index(self, *, ready: bool) -> list[dict[str, str]]:
        """Return the functions and versions with their state; with `ready`, only the served ones."""
        entries: list[dict[str, str]] = []
        for model in self._models.values():
            state = {"state": "READY"} | ({"reason": "its folder is gone"} if model.is_gone else {})
            if (version := model.current) is not None:
                names = [queue.tensors.name for queue in version.queues.values()]
                entries += [{"name": name, "version": str(version.number), **state} for name in names]
            entries += [
                {"name": model.name, "version": str(number), "state": "UNAVAILABLE", "reason": reason}
                for number, reason in model.refused.items()
            ]
        return [entry for entry in entries if entry["state"] == "READY" or not ready]

    async def load(self, name: str) -> None:
        """Look for a newer version of a model, and return when it is served. Raises RefusedRequest."""
        if name not in self._models:
            raise RefusedRequest(404, f"there is no model {name!r}; there is {', '.join(self._models)}")
        if refusal := await asyncio.to_thread(self._renew, self._models[name]):
            raise RefusedRequest(400, refusal)

    def _timeout_s(self, parameters: Mapping[str, Any]) -> float:
        """Return the time until the computation must begin: the server's, or less by the parameter `timeout` in us."""
        given = parameters.get("timeout", 0)
        return min(self.settings.timeout_s, given / 1e6) if given else self.settings.timeout_s

    def _check_room(self) -> None:
        most = self.settings.max_queue
        if len(self._arrived) >= most:
            raise RefusedRequest(503, f"the server has {most} requests in progress, the most", _AGAIN)

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


async def run_sized(size: int, fn: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function that takes or makes `size` bytes: on this thread, or on another one above `_MOST_ON_LOOP`."""
    return fn(*arguments) if size <= _MOST_ON_LOOP else await asyncio.to_thread(fn, *arguments)
