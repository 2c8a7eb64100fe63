"""Messages that have arrived at a task, and the tables of the functions that handle them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from dflow.distributed.transport.base import Peer, Responder
from dflow.distributed.wire.codec import Payload, encode_arrays
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Arrays, Ok
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


#: The reply of a handler, with or without a payload. None is Ok where the message declares that reply; otherwise the
#: handler answers later, by the responder.
Handled = Message | tuple[Message, Payload] | None
#: A handler of requests, bound to its part.
Answering = Callable[[Any, RequestArrival], Handled]
Part = TypeVar("Part")
Taken = TypeVar("Taken", bound=Message)
Method = Callable[[Part, Taken, RequestArrival], Handled]


class RequestTable(HandlerTable[Part, RequestArrival, Handled]):
    """The handlers of a part's requests; a reader thread calls those of `handles`, which answer by the responder."""

    def __init__(self) -> None:
        super().__init__()
        #: The requests that are handled on a thread, and whether they wait while many of the same sender run.
        self.threaded: dict[type[Message], bool] = {}

    def queued(self, kind: type[Taken]) -> Callable[[Method[Part, Taken]], Method[Part, Taken]]:
        """Return a decorator for a handler that runs on a thread; its result or error is the answer.

        It waits while many requests of the same sender run; see `RequestQueues`.
        """
        self.threaded[kind] = True
        return self.handles(kind)

    def on_own_thread(self, kind: type[Taken]) -> Callable[[Method[Part, Taken]], Method[Part, Taken]]:
        """Like `queued`, but without waiting: these requests are made to find out why others are stuck."""
        self.threaded[kind] = False
        return self.handles(kind)


def answer(handle: Answering, message: Message, arrival: RequestArrival, check: Callable[[Peer], None]) -> None:
    """Call the handler `handle` and answer the request with its result or its error; see `Handled` for the result.

    check  raises if the sender has left since the request came; its error is the answer then
    """
    try:
        check(arrival.peer)
        found = handle(message, arrival)
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
    """Answer a request to run a plan with Ok, or with the error that ended the plan."""
    if isinstance(outcome, BaseException):
        responder.fail(outcome)
    else:
        responder.reply(Ok())


def answer_arrays(responder: Responder, outcome: Outcome[Fetches]) -> None:
    """Answer a request with the arrays that a plan returned, or with the error that ended the plan."""
    try:
        infos, payload = encode_arrays(fetched(outcome))
    except BaseException as error:
        responder.fail(error)
    else:
        responder.reply(Arrays(infos), payload)
