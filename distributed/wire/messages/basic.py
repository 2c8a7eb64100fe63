"""Messages of every connection: how it begins, and the answers of any request."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.message import Message, Request

PROTOCOL_VERSION = 7


class Hello(Message, frozen=True):
    """First message on each connection, in both directions: the sender's name and protocol version.

    `session`   id of the session that this connection starts or resumes; empty in a reply if that is unknown
    `received`  number of the session's frames that the sender has received
    `process`   identity of the sender's process; see `transport.process_identity`
    `resumes`   whether the session was started over an earlier connection
    `shares`    whether the sender accepts large payloads in shared memory; used when both sides do
    """

    name: str
    version: int = PROTOCOL_VERSION
    session: str = ""
    received: int = 0
    process: str = ""
    resumes: bool = False
    shares: bool = False


class Ok(Message, frozen=True):
    """The request succeeded; the answer carries no data."""


class Failure(Message, frozen=True):
    """A request was refused or failed. `kind` is the name of a class in `dflow.tracing.errors`."""

    kind: str
    text: str


class ArrayInfo(msgspec.Struct, frozen=True):
    """Dtype and shape of one array in a payload, which holds its arrays one after the other."""

    dtype: str
    shape: tuple[int, ...]


class Arrays(Message, frozen=True):
    """Arrays, one after the other in the payload."""

    arrays: tuple[ArrayInfo, ...]


class Introduce(Request[Ok], frozen=True):
    """The sender's life in the roster: the first message over a connection to a task, and again after a change.

    `life`         number of its life
    `incarnation`  id of that life, which no coordinator gives again
    `roster`       version of the roster that the receiver must have before it handles the sender's later messages: the
                   sender knows by it that another task has died
    """

    is_open = True

    life: int
    incarnation: str = ""
    roster: int = 0
