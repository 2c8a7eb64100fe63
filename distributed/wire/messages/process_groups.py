"""Groups of processes that run one program together, and the texts that they exchange at points of the program."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Message, Request


class GroupFormed(Message, frozen=True):
    """The members of the group, in the order of their ranks, and the life of each."""

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
