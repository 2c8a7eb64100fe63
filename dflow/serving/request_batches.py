"""Requests of one function, gathered into batches on a thread: the queue between the HTTP server and the device.

The thread takes the requests that wait; if their rows are fewer than a batch, it waits for more, at most the delay that
was configured since the first came. Rows are padded with zeros to one of a few sizes, so the number of compiled
programs is bounded. While a batch is computed, the next one gathers in the queue.

The queue is the one that `dflow.FIFOQueue` has. Its elements here are the requests themselves: an eager op of a
`dflow.FIFOQueue` binds a primitive of JAX, which takes ten times as long as the queue itself.

Invariant: each submitted request ends once, with its outputs or an error. A request is claimed either by the thread,
which then answers it, or by the server at the request's deadline, and is then not computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflow.lowering.queues.pending_operations import wait
from dflow.lowering.queues.queues import HeldQueue
from dflow.serving.request_members import RefusedRequest
from dflow.serving.signature_tensors import SignatureTensors
from dflow.serving.tensors import zeros
from dflow.tracing.errors import DeadlineExceeded, DflowError, InputError, QueueClosed, SignatureError, TaskLost
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import QueueType

LOGGER = logging.getLogger("dflow")

#: Most programs of one function for inputs of different shapes; at more, all are freed and compiled again when needed.
MOST_SHAPES = 64

#: Errors of calls whose tables are at tasks that do not answer.
OF_TASKS = (TaskLost, DeadlineExceeded)

#: Called for each batch with the function, the rows, the time it took in s, and each request's wait before it in s.
BatchObserver = Callable[[str, int, float, Sequence[float]], None]


@dataclass(eq=False)
class PendingRequest:
    """A request that waits for its outputs. `answer` is called once, on the loop's thread, with them or an error."""

    arrays: Mapping[str, np.ndarray[Any, Any]]
    deadline_s: float
    future: asyncio.Future[list[np.ndarray[Any, Any]]]
    came_s: float = field(default_factory=time.monotonic)
    #: Acquired by the thread that answers, and never released.
    claim: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, outcome: list[np.ndarray[Any, Any]] | Exception) -> None:
        """Answer the waiting handler, unless its client has left."""
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


def batch_sizes(most: int) -> list[int]:
    """Return the sizes of padded batches of at most `most` rows: powers of two, and `most`."""
    return sorted({most, *(1 << power for power in range(max(most, 1).bit_length()) if 1 << power <= most)})


class RequestQueue:
    """The requests of one function, and the thread that computes them.

    most       rows of a batch; 0 computes each request alone, at its own size
    delay_s    longest wait of a batch's first request for others
    capacity   most requests that wait
    exclusive  held during each call, for a function that writes variables
    on_update  called after each call, in `exclusive`
    threads    that compute; more than one only without batches, which one thread gathers
    """

    def __init__(
        self,
        tensors: SignatureTensors,
        fn: Any,
        *,
        most: int,
        delay_s: float,
        capacity: int,
        observe: BatchObserver,
        exclusive: Any,
        on_update: Callable[[], None] | None = None,
        threads: int = 1,
    ) -> None:
        self.tensors, self.most, self.delay_s = tensors, most, delay_s
        self._fn, self._observe, self._exclusive, self._on_update = fn, observe, exclusive, on_update
        self._sizes = batch_sizes(most)
        self._shapes: set[tuple[tuple[int, ...], ...]] = set()
        self._held = HeldQueue(tensors.name, QueueSettings(QueueKind.FIFO, capacity), QueueType(()))
        #: Taken from the queue, and for the next batch.
        self._carried: list[PendingRequest] = []
        self._threads = [
            threading.Thread(target=self._run, name=f"dflow serve {tensors.name}", daemon=True) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return self._held.depth()[0]

    def submit(self, request: PendingRequest) -> None:
        """Add a request whose arrays passed the check. Raises RefusedRequest if there are too many rows, or no room."""
        rows = self._rows(request)
        if self.most and rows > self.most:
            raise RefusedRequest(
                400,
                f"{self.tensors.name}: expected at most {self.most} rows, got {rows}; send them in several requests",
            )
        refused: list[Any] = []
        self._held.enqueue([(request,)], refused.append, 0)
        if isinstance(refused[0], QueueClosed):
            raise refused[0]
        if isinstance(refused[0], BaseException):
            raise RefusedRequest(
                503,
                f"{self.tensors.name}: {self.waiting} requests wait, the most that may; try again",
                {"Retry-After": "1"},
            )

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse later requests, and wait until the pending ones are answered; return whether they were in time."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        self._held.close()
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _rows(self, request: PendingRequest) -> int:
        return len(next(iter(request.arrays.values()))) if self.most else 1

    def _run(self) -> None:
        while (group := self._gathered()) is not None:
            taken = time.monotonic()
            live: list[PendingRequest] = []
            for request in group:
                if request.claim.acquire(blocking=False):
                    if taken < request.deadline_s:
                        live.append(request)
                    else:
                        _deliver([request], [RefusedRequest(504, _LATE)])
            if live:
                self._compute(live, taken)

    def _gathered(self) -> list[PendingRequest] | None:
        """Return the requests of the next batch; None at the end."""
        taken, self._carried = self._carried or self._take(1, math.inf), []
        group: list[PendingRequest] = []
        rows = 0
        while taken:
            for number, request in enumerate(taken):
                if group and rows + self._rows(request) > self.most:
                    self._carried = taken[number:]
                    return group
                group.append(request)
                rows += self._rows(request)
            if rows >= self.most:
                break
            # The thread sleeps until a batch is full: it would be woken for each request, and wait for Python's lock.
            missing = max(1, (self.most - rows) // max(1, self._rows(group[-1])))
            taken = self._take(missing, group[0].came_s + self.delay_s - time.monotonic())
        return group or None

    def _take(self, most: int, timeout_s: float) -> list[PendingRequest]:
        """Return `most` requests; at the deadline, and when the queue is closed, as many of them as wait."""
        try:
            elements = wait(lambda on_done: self._held.dequeue(most, on_done, max(timeout_s, 0.0), or_fewer=True))
        except DeadlineExceeded:
            if not (waiting := min(self.waiting, most)):
                return []
            elements = wait(lambda on_done: self._held.dequeue(waiting, on_done, 0.0))
        except QueueClosed:
            return []
        return [request for (request,) in elements]

    def _compute(self, live: list[PendingRequest], taken: float) -> None:
        """Answer requests by one call; if it fails, by one call each, since their rows do not depend on each other."""
        rows = [self._rows(request) for request in live]
        outcomes: Sequence[list[np.ndarray[Any, Any]] | Exception]
        try:
            outputs = self._called([request.arrays for request in live], rows)
            outcomes = _split(outputs, rows) if self.most else [outputs]
        except Exception as error:
            if len(live) > 1 and not isinstance(error, OF_TASKS):
                for request in live:
                    self._compute([request], taken)
                return
            outcomes = [self._refusal(error, request.arrays) for request in live]
        ended = time.monotonic()
        self._observe(self.tensors.name, sum(rows), ended - taken, [taken - request.came_s for request in live])
        _deliver(live, outcomes)

    def _called(self, given: list[Mapping[str, np.ndarray[Any, Any]]], rows: list[int]) -> list[np.ndarray[Any, Any]]:
        arrays = self._batch(given, rows)
        self._bound_shapes(arrays)
        with self._exclusive:
            outputs = self.tensors.call(self._fn, arrays)
            if self._on_update is not None:
                self._on_update()
        return outputs

    def _refusal(self, error: Exception, arrays: Mapping[str, np.ndarray[Any, Any]]) -> RefusedRequest:
        """Return the answer to a request whose call failed, by its values or by a fault."""
        if isinstance(error, InputError):
            return RefusedRequest(400, self.tensors.refusal_of(error, arrays))
        text = str(error) if isinstance(error, DflowError) else f"{type(error).__name__}: {error}"
        if isinstance(error, SignatureError):
            return RefusedRequest(400, f"{self.tensors.name}: {text.splitlines()[0]}")
        if isinstance(error, OF_TASKS):
            return RefusedRequest(503, f"{self.tensors.name}: {text.splitlines()[0]}", {"Retry-After": "1"})
        LOGGER.error("a call of %s failed", self.tensors.name, exc_info=error)
        return RefusedRequest(500, f"{self.tensors.name} failed: {text.splitlines()[0]}")

    def _batch(self, given: list[Mapping[str, np.ndarray[Any, Any]]], rows: list[int]) -> dict[str, Any]:
        """Return the rows of all requests, padded with zeros to the next size."""
        if not self.most:
            return dict(given[0])
        total = sum(rows)
        size = next(size for size in self._sizes if size >= total)
        if len(given) == 1 and total == size:
            return dict(given[0])
        batch = {}
        for spec in self.tensors.inputs:
            arrays = [one[spec.name] for one in given]
            padding = [zeros((size - total, *arrays[0].shape[1:]), arrays[0].dtype)]
            batch[spec.name] = np.concatenate(arrays + padding)
        return batch

    def _bound_shapes(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Free the compiled programs when there would be too many, for inputs of ever new shapes."""
        self._shapes.add(tuple(array.shape for array in arrays.values()))
        if len(self._shapes) > MOST_SHAPES:
            self._fn.clear_cache()
            self._shapes.clear()


_LATE = "the request's deadline passed while it waited; it was not computed"


def _split(outputs: Sequence[np.ndarray[Any, Any]], rows: Sequence[int]) -> list[list[np.ndarray[Any, Any]]]:
    ends = np.cumsum(rows)
    return [[output[end - count : end] for output in outputs] for end, count in zip(ends, rows, strict=True)]


def _deliver(requests: Sequence[PendingRequest], outcomes: Sequence[list[np.ndarray[Any, Any]] | Exception]) -> None:
    """Answer the requests on their loop, by one wake-up of it."""

    def answer() -> None:
        for request, outcome in zip(requests, outcomes, strict=True):
            request.answer(outcome)

    with suppress(RuntimeError):  # the server has ended, and no handler waits
        requests[0].future.get_loop().call_soon_threadsafe(answer)


async def outputs_of(
    queue: RequestQueue, arrays: Mapping[str, np.ndarray[Any, Any]], timeout_s: float
) -> list[np.ndarray[Any, Any]]:
    """Submit a request and return its outputs. Raises RefusedRequest, 504 if its computation has not begun in time."""
    loop = asyncio.get_running_loop()
    request = PendingRequest(arrays, time.monotonic() + timeout_s, loop.create_future())
    queue.submit(request)
    try:
        done, _ = await asyncio.wait([request.future], timeout=timeout_s)
    except asyncio.CancelledError:
        request.claim.acquire(blocking=False)  # nothing waits for the outputs, so they are not computed
        raise
    if not done and request.claim.acquire(blocking=False):
        raise RefusedRequest(504, _LATE)
    return await request.future
