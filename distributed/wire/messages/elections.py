"""Election of one task for an action that must happen once."""

from __future__ import annotations

from dflow.distributed.wire.messages.message import Marked, Request


class Elected(Marked, frozen=True):
    """Whether the requester was elected."""

    elected: bool


class ElectOnce(Request[Elected], frozen=True):
    """Ask whether this task is the one that does `what`; answered by `Elected`. The first live task that asks is."""

    speaker = "task"

    what: str
    task: str
