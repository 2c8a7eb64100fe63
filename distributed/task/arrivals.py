"""Messages that have arrived at a task, and the threads on which their handlers run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

import msgspec

from dflow.distributed.transport.base import Peer, Responder
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.connection import Ok
from dflow.distributed.wire.messages.message import Message


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """The connection of a message, and its payload."""

    peer: Peer
    payload: memoryview


class RequestArrival(Arrival, frozen=True, gc=False):
    """The connection of a request, its payload, and the responder that answers it."""

    responder: Responder


class HasPool(Protocol):
    """A task with a thread pool for its work."""

    pool: Executor


#: The reply of a handler, with or without a payload. None is Ok where the message declares that reply; otherwise the
#: handler answers later, by the responder.
Handled = Message | tuple[Message, Payload] | None
Task = TypeVar("Task", bound=HasPool)
Taken = TypeVar("Taken", bound=Message)
Method = Callable[[Task, Taken, RequestArrival], Handled]
Add = Callable[[Method[Task, Taken]], Method[Task, Taken]]


class RequestTable(HandlerTable[Task, RequestArrival, None]):
    """The handlers of a task's requests; a reader thread calls those of `handles`, which answer by themselves."""

    def in_pool(self, kind: type[Taken]) -> Add[Task, Taken]:
        """Return a decorator for a handler that runs in the task's pool; its result or error is the answer."""
        return self._adder(kind, lambda task: task.pool.submit)

    def on_own_thread(self, kind: type[Taken]) -> Add[Task, Taken]:
        """Like `in_pool`, on a new thread: the pool may be stuck, and these requests are made to find out."""
        return self._adder(kind, lambda task: _start_thread)

    def _adder(self, kind: type[Taken], submit: Callable[[Task], Callable[..., object]]) -> Add[Task, Taken]:
        def add(method: Method[Task, Taken]) -> Method[Task, Taken]:
            def handle(task: Task, message: Taken, arrival: RequestArrival) -> None:
                submit(task)(answer, method, task, message, arrival)

            self.handles(kind)(handle)
            return method

        return add


def _start_thread(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, name="dflow look", daemon=True).start()


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
    elif message.replies == (Ok,):
        arrival.responder.reply(Ok())
