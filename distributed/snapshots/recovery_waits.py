"""The requests that wait until lost state is recovered, and the deadlines of a return to a snapshot.

A pure function of events. Invariant: when the return has waited `RETURN_S` for one thing, such as a task's process or
the steps that run, all requests fail with the names of the tasks that it waits for.
"""

from __future__ import annotations

from collections.abc import Collection

from dflow.distributed.coordinator.coordinator_events import Command, Log, SendReply
from dflow.distributed.snapshots.return_attempt import LOAD_S
from dflow.distributed.snapshots.snapshot_attempt import overdue
from dflow.distributed.snapshots.snapshot_messages import Recovered, Saved
from dflow.distributed.wire.messages.basic import Failure

#: Longest wait for the process of a task that held state to be started again, and for the steps that run, in s.
RETURN_S = 300.0
#: Wait for steps that run after which the log names their tasks, in s.
NOTICE_S = 10.0
#: Longest time until a request is answered, in s: tasks are started again, the steps end, and the tasks read and set.
RECOVERY_S = 2 * RETURN_S + 2 * LOAD_S

AWAY, BUSY, PAUSING = "did not come back within", "still runs a step after", "has paused the steps for"
UNWRITTEN = "could not write its state, with the number of the return, for"


class RecoveryWaits:
    """The requests that wait for recovery."""

    def __init__(self) -> None:
        self._asks: list[int] = []
        #: The thing that the return waits for, and since when; empty while it waits for nothing.
        self._what, self._since_s = "", 0.0
        self._is_noted = False

    @property
    def is_idle(self) -> bool:
        """Whether no request waits, and no wait is timed."""
        return not self._asks and not self._what

    def add(self, ask: int) -> None:
        """Keep a request until it is answered."""
        self._asks.append(ask)

    def settle(self, answer: Recovered | Failure) -> list[Command]:
        """Answer all requests."""
        asks, self._asks = self._asks, []
        return [SendReply(ask, answer) for ask in asks]

    def go_on(self) -> None:
        """Note that the return waits for nothing of the constants above."""
        self._what = ""

    def blocked(self, at_s: float, since_s: float, what: str, tasks: Collection[str]) -> list[Command]:
        """Note at `at_s` that the return waits for tasks, at first since `since_s`; end the requests that wait long."""
        if what != self._what:
            self._what, self._since_s, self._is_noted = what, since_s, False
        commands: list[Command] = []
        waited_s = at_s - self._since_s
        if what != AWAY and waited_s >= NOTICE_S and not self._is_noted:
            self._is_noted = True
            commands = [Log(f"the return to a snapshot waits: {overdue(tasks, what, NOTICE_S)}")]
        if waited_s >= RETURN_S:
            commands += self.settle(Failure("TaskLost", overdue(tasks, what, RETURN_S)))
        return commands


class UnsavedChanges:
    """The requests that wait for a snapshot with a change of state, which no step makes again."""

    def __init__(self) -> None:
        #: By request, the number of the change, and the end of the wait.
        self._asks: dict[int, tuple[int, float]] = {}

    def add(self, ask: int, number: int, until_s: float) -> None:
        """Keep a request until the change is saved, or until `until_s`."""
        self._asks[ask] = number, until_s

    def settle(self, at_s: float, saved: int) -> list[Command]:
        """Answer the requests whose changes are saved, those up to number `saved`, or whose time is over."""
        over = {
            ask: number <= saved for ask, (number, until_s) in self._asks.items() if number <= saved or at_s >= until_s
        }
        self._asks = {ask: one for ask, one in self._asks.items() if ask not in over}
        return [SendReply(ask, Saved(is_saved)) for ask, is_saved in over.items()]

    def refuse(self, why: str) -> list[Command]:
        """Answer all requests: their changes are lost."""
        asks, self._asks = self._asks, {}
        return [SendReply(ask, Failure("TaskLost", f"the change of state is lost: {why}")) for ask in asks]
