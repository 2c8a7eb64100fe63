"""Messages that have arrived at a task, and the threads on which their handlers run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar

import msgspec

from dflow.distributed.transport.base import Peer, Responder
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.message import Message


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """The connection of a message, and its payload."""

    peer: Peer
    payload: memoryview


class RequestArrival(Arrival, frozen=True, gc=False):
    """The same of a request, and how to answer it."""

    responder: Responder


#: The reply of a handler, with or without a payload; None from one that answers later by the responder.
Handled = Message | tuple[Message, Payload] | None


class HasPool(Protocol):
    """A task with a pool for its work."""

    pool: Executor


Task = TypeVar("Task", bound=HasPool)
Taken = TypeVar("Taken", bound=Message)
Method = Callable[[Task, Taken, RequestArrival], Handled]
Handle = Callable[[Task, Taken, RequestArrival], None]


def in_pool(method: Method[Task, Taken]) -> Handle[Task, Taken]:
    """Return a handler that runs `method` in the task's pool, and answers with its result or its error."""

    def handle(task: Task, message: Taken, arrival: RequestArrival) -> None:
        task.pool.submit(answer, method, task, message, arrival)

    return handle


def on_own_thread(method: Method[Task, Taken]) -> Handle[Task, Taken]:
    """Like `in_pool`, on a new thread: the pool may be stuck, and these requests are made to find out."""

    def handle(task: Task, message: Taken, arrival: RequestArrival) -> None:
        threading.Thread(target=answer, args=(method, task, message, arrival), name="dflow look", daemon=True).start()

    return handle


def answer(method: Method[Task, Taken], task: Task, message: Taken, arrival: RequestArrival) -> None:
    """Answer a request with the result or the error of `method`."""
    try:
        found = method(task, message, arrival)
    except Exception as error:
        arrival.responder.fail(error)
        return
    if isinstance(found, tuple):
        arrival.responder.reply(*found)
    elif found is not None:
        arrival.responder.reply(found)
