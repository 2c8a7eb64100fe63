"""One return of all tasks to a snapshot: each reads and checks its part, and when all have, each sets its state.

A pure function of events. Invariant: no task sets its state before each has read its part.
"""

from __future__ import annotations

from collections.abc import Collection

from dflow.distributed.snapshots.snapshot_attempt import overdue
from dflow.distributed.snapshots.snapshot_messages import StateLoaded

#: Limit of the time until all tasks have read their parts, and until all have set their state, in s.
LOAD_S = 600.0


class ReturnAttempt:
    """The return number `epoch` of the tasks with parts of the snapshot, from `at_s` on."""

    def __init__(self, epoch: int, tasks: Collection[str], at_s: float) -> None:
        self._epoch, self.tasks = epoch, tasks
        self.is_setting = False
        #: Tasks that have yet to read, or to set.
        self._left, self._phase_s = {*tasks}, at_s

    @property
    def is_phase_over(self) -> bool:
        """Whether all tasks have read, or all have set."""
        return not self._left

    def begin_setting(self, at_s: float) -> None:
        """Have all tasks set their state."""
        self.is_setting, self._left, self._phase_s = True, {*self.tasks}, at_s

    def expects(self, report: StateLoaded) -> bool:
        """Whether the report is of this return, and of its present phase."""
        return (report.epoch, report.is_set) == (self._epoch, self.is_setting)

    def loaded(self, task: str) -> None:
        """Note that a task has read, or set."""
        self._left.discard(task)

    def repeat(self, task: str) -> bool:
        """Have a task do it again, or its next process; return whether it has a part of the snapshot."""
        if task in self.tasks:
            self._left.add(task)
        return task in self.tasks

    def late(self, at_s: float) -> str:
        """Why the return takes too long; empty if it does not."""
        is_late = self._left and at_s - self._phase_s > LOAD_S
        return overdue(self._left, "did not return to the snapshot within", LOAD_S) if is_late else ""
