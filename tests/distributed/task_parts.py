"""The parts of tasks: a part of a server, and a part by itself, with what the test gives it in place of a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar, cast

from dflow.distributed.task.arrivals import RequestArrival
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.wire.messages.message import Message

Part = TypeVar("Part", bound=TaskPart)


def part_of(server: TaskServer, kind: type[Part]) -> Part:
    return next(part for part in server.parts if isinstance(part, kind))


def without_server(make: type[Part], has_left: Any = lambda task: False, **attributes: Any) -> Part:
    """Return a part of a task with these attributes."""
    server = SimpleNamespace(channel=SimpleNamespace(has_left=has_left), **attributes)
    return cast(Any, make)(server)  # type: ignore[no-any-return]


def handled(part: TaskPart, message: Message, payload: bytes = b"", responder: Any = None, sender: str = "") -> Any:
    """Handle a request, and return what the handler returns."""
    arrival = RequestArrival(cast(Any, SimpleNamespace(name=sender)), memoryview(payload), responder)
    return part.requests.handlers[type(message)](part, message, arrival)
