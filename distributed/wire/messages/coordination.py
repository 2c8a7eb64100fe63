"""Elections of one task for an action that must happen once, decisions for all tasks, and barriers."""

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


class Decided(Marked, frozen=True):
    """The value that was decided; None if none was yet, and the request gave none."""

    value: str | None


class DecideOnce(Request[Decided], frozen=True):
    """Decide `what` by `value`, unless it is decided; None only asks for it."""

    speaker = "task"

    what: str
    task: str
    value: str | None


class BarrierPassed(Marked, frozen=True):
    """The barrier was passed by `members`: those of its members at roster `version` that stayed.

    `generation`  number of this pass, greater than the one before; it counts from 1 while the barrier is in use
    """

    generation: int
    version: int
    members: tuple[str, ...]


class AwaitBarrier(Request[BarrierPassed], frozen=True):
    """The task has arrived at a barrier; answered by `BarrierPassed` when all its members have arrived or left.

    `number`          number of this arrival, greater than the task's earlier ones; a repeated one is the same arrival.
                      The client sets it
    `timeout_s`       longest wait, in s
    `fails_on_leave`  whether the barrier fails when a member leaves; otherwise it goes on without that member
    """

    speaker, is_numbered = "task", True

    name: str
    task: str
    number: int = 0
    timeout_s: float = 600.0
    fails_on_leave: bool = False
