"""The table of a role: the function that handles each message, by the message's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dflow.distributed.wire.messages.message import Message
from dflow.tracing.errors import InternalError

Role = TypeVar("Role")
#: How a message arrived: its connection, its payload, how to answer.
Arrival = TypeVar("Arrival")
Result = TypeVar("Result")
Taken = TypeVar("Taken", bound=Message)


class HandlerTable(Generic[Role, Arrival, Result]):
    """Functions `handle(role, message, arrival)`, by the class of `message`."""

    def __init__(self) -> None:
        self.handlers: dict[type[Message], Callable[[Role, Any, Arrival], Result]] = {}
        #: Return the handler of a class of messages; None without one.
        self.get = self.handlers.get

    def handles(
        self, kind: type[Taken]
    ) -> Callable[[Callable[[Role, Taken, Arrival], Result]], Callable[[Role, Taken, Arrival], Result]]:
        """Return a decorator for the handler of messages of the class `kind`; raises InternalError for a second one."""

        def add(handle: Callable[[Role, Taken, Arrival], Result]) -> Callable[[Role, Taken, Arrival], Result]:
            if kind in self.handlers:
                raise InternalError(f"{kind.__name__} has two handlers in one table: expected one")
            self.handlers[kind] = handle
            return handle

        return add
