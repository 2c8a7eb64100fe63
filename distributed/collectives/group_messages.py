"""Groups of processes that run one program together, and the texts that they exchange at points of the program."""

from __future__ import annotations

import msgspec

from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message, Request

#: The channel of the main thread of the program.
MAIN = "program"
#: The name of its last exchange.
END = "the end of the program"


class GroupFormed(Message, frozen=True):
    """The group has formed: its members, in the order of their ranks, and the life of each."""

    members: tuple[str, ...]
    lives: tuple[int, ...]


class JoinGroup(Request[GroupFormed], frozen=True):
    """Join the next group of the task's job; answered by `GroupFormed` when all tasks of the job have asked.

    `timeout_s`  longest wait, in s
    """

    speaker = "task"

    task: str
    timeout_s: float


class Exchanged(Message, frozen=True):
    """The words of all members, in the order of their ranks."""

    words: tuple[str, ...]


class Exchange(Request[Exchanged], frozen=True):
    """Give a word at a point of the program; answered by `Exchanged` when every member of the group has come there.

    `channel`    each thread of the program that exchanges words has its own
    `number`     number of this exchange in the channel, counted from 1
    `name`       of the point of the program, for errors; the same on every member
    `timeout_s`  longest wait, in s
    """

    speaker = "task"

    task: str
    channel: str
    number: int
    name: str
    word: str
    timeout_s: float


class LeaderWork(msgspec.Struct, frozen=True):
    """A piece of work that the member of rank 0 does for the whole group, such as a file that it writes.

    `name`   of the work, for errors; the same on every member
    `point`  number of exchanges of the program's main thread before it
    `count`  number of works of this name since that exchange, counted from 1
    """

    name: str
    point: int
    count: int


class LeaderWorks(Request[Ok], frozen=True):
    """The member of rank 0 has begun a work, or with `has_ended` has ended it.

    `kind`, `error`  class name and text of the error that ended the work; empty if it did not fail
    """

    speaker = "task"

    task: str
    work: LeaderWork
    has_ended: bool = False
    kind: str = ""
    error: str = ""


class LeaderWorkEnded(Message, frozen=True):
    """A work of the member of rank 0 has ended; `kind` and `error` are as in `LeaderWorks`."""

    kind: str
    error: str


class AwaitLeaderWork(Request[LeaderWorkEnded], frozen=True):
    """Wait, at most `timeout_s`, for the end of a work of rank 0; refused if rank 0 went on without the work."""

    speaker = "task"

    task: str
    work: LeaderWork
    timeout_s: float
