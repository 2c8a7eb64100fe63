"""Messages that have arrived at a task, and the threads on which their handlers run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from dflow.distributed.task.request_queues import RequestQueues
from dflow.distributed.transport.base import Peer, Responder
from dflow.distributed.wire.codec import Payload, encode_arrays
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.connection import Arrays, Ok
from dflow.distributed.wire.messages.message import Message
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.steps.local_step import fetched
from dflow.lowering.values.outcome import Outcome


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """The connection of a message, and its payload."""

    peer: Peer
    payload: memoryview


class RequestArrival(Arrival, frozen=True, gc=False):
    """The connection of a request, its payload, and the responder that answers it."""

    responder: Responder


class HasThreads(Protocol):
    """A task with threads for its work, and queues of the requests that wait for some."""

    threads: Executor
    requests: RequestQueues

    def refuse_departed(self, peer: Peer) -> None:
        """Raise TaskLost if the sender has left since its request came."""
        ...


#: The reply of a handler, with or without a payload. None is Ok where the message declares that reply; otherwise the
#: handler answers later, by the responder.
Handled = Message | tuple[Message, Payload] | None
Task = TypeVar("Task", bound=HasThreads)
Taken = TypeVar("Taken", bound=Message)
Method = Callable[[Task, Taken, RequestArrival], Handled]
Add = Callable[[Method[Task, Taken]], Method[Task, Taken]]


class RequestTable(HandlerTable[Task, RequestArrival, None]):
    """The handlers of a task's requests; a reader thread calls those of `handles`, which answer by themselves."""

    def queued(self, kind: type[Taken]) -> Add[Task, Taken]:
        """Return a decorator for a handler that runs on a thread; its result or error is the answer.

        It waits while many requests of the same sender run; see `RequestQueues`.
        """
        return self._adder(kind, lambda task, sender: partial(task.requests.submit, sender))

    def on_own_thread(self, kind: type[Taken]) -> Add[Task, Taken]:
        """Like `queued`, but without waiting: these requests are made to find out why others are stuck."""
        return self._adder(kind, lambda task, sender: task.threads.submit)

    def _adder(self, kind: type[Taken], submit: Callable[[Task, str], Callable[..., object]]) -> Add[Task, Taken]:
        def add(method: Method[Task, Taken]) -> Method[Task, Taken]:
            def handle(task: Task, message: Taken, arrival: RequestArrival) -> None:
                submit(task, arrival.peer.name)(answer, method, task, message, arrival)

            self.handles(kind)(handle)
            return method

        return add


def answer(method: Method[Task, Taken], task: Task, message: Taken, arrival: RequestArrival) -> None:
    """Answer a request with the result or the error of `method`."""
    try:
        task.refuse_departed(arrival.peer)
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


def answer_run(responder: Responder, outcome: Outcome[Fetches]) -> None:
    """Answer a request to run a plan, which has ended."""
    if isinstance(outcome, BaseException):
        responder.fail(outcome)
    else:
        responder.reply(Ok())


def answer_arrays(responder: Responder, outcome: Outcome[Fetches]) -> None:
    """Answer a request with the arrays that a plan returned."""
    try:
        infos, payload = encode_arrays(fetched(outcome))
    except BaseException as error:
        responder.fail(error)
    else:
        responder.reply(Arrays(infos), payload)
