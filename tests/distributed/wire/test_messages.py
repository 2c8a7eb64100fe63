from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflow.distributed.wire.codec import MESSAGES
from dflow.distributed.wire.messages.basic import Failure, Hello
from dflow.distributed.wire.messages.message import Marked, Message, Notice, Request
from dflow.distributed.wire.messages.roster import Join, Packed, Roster, RosterChange

#: The messages of a transport itself, and an answer that any request may get.
OF_TRANSPORTS = {Hello, Packed, Failure}


def test_every_message_is_gathered() -> None:
    here = {kind for kind in kinds_of(Message) if kind.__module__.startswith("dflow.distributed.")}
    assert here - set(MESSAGES) == {Message, Request, Notice, Marked}


def test_every_message_is_a_request_a_notice_or_a_reply() -> None:
    replies = {reply for message in MESSAGES for reply in message.replies}
    sent = {message for message in MESSAGES if issubclass(message, Request | Notice)}
    assert set(MESSAGES) - sent - replies == OF_TRANSPORTS
    assert not replies & OF_TRANSPORTS


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_a_message_declares_what_it_has(message: type[Message]) -> None:
    assert bool(message.replies) == issubclass(message, Request)
    assert not message.speaker or message.speaker in message.__struct_fields__


def test_the_replies_are_read_from_the_base() -> None:
    assert Join.replies == (Roster, RosterChange)


def kinds_of(kind: type[Message]) -> Iterator[type[Message]]:
    yield kind
    for each in kind.__subclasses__():
        yield from kinds_of(each)
