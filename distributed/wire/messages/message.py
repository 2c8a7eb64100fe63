"""What every message is: a request with its replies, a notice, or a reply.

A message is a frozen struct, distinguished by its tag. The transport pairs a reply with its request, so no message
carries a request number. Arrays and programs travel as raw bytes after the message (its payload), never inside it.
A task is named `/job:<job>/task:<index>`.

A request names its replies where it is defined, `class ElectOnce(Request[Elected])`; `Peer` checks each reply
against them. A request may also be answered with a `Failure`. A message that is neither `Request` nor `Notice` is a
reply, or is of the transport.
"""

from __future__ import annotations

from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

Answer = TypeVar("Answer", bound="Message", covariant=True)


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every message."""

    #: Classes of the replies, as a `Request` declares them; any reply is taken where there are none.
    replies: ClassVar[tuple[type[Message], ...]] = ()
    #: The field with the name of the task that may send the message; empty if any member may.
    speaker: ClassVar[str] = ""
    #: Whether processes may send it that are no members of the cluster, such as tools.
    is_open: ClassVar[bool] = False
    #: Whether the client sets its `number`, greater than those of all earlier requests of the task.
    is_numbered: ClassVar[bool] = False
    #: The field whose value names a series of numbered requests; the client sets `last`, the number of the newest that
    #: was answered in the series. Empty for none.
    series: ClassVar[str] = ""


class Request(Message, Generic[Answer], frozen=True):
    """Base of messages that are answered, with an `Answer` or a `Failure`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (answer,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        cls.replies = get_args(answer) or (answer,)


class Notice(Message, frozen=True):
    """Base of messages that are sent as notifications, which are not answered."""


class Mark(msgspec.Struct, frozen=True):
    """A point in the history of the coordinator's state; see `state_marks`."""

    start: str = ""
    revision: int = 0


class Marked(Message, frozen=True, kw_only=True):
    """Base of answers and notifications that carry the mark of the newest write of the coordinator's state."""

    mark: Mark = Mark()
