"""One attempt at a snapshot: each task that holds state captures its part in one pause of the steps, and writes it.

A pure function of events.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from dflow.distributed.snapshots.resumption import Snapshot
from dflow.distributed.snapshots.snapshot_messages import StateCaptured, StateWritten
from dflow.distributed.wire.messages.status import SnapshotSize
from dflow.tracing.devices.task_name import short_task_name

#: Limit of the time until all tasks have captured their state, while the steps are paused, and of the time until all
#: have written their parts, in s.
CAPTURE_S, WRITE_S = 60.0, 600.0


class SnapshotAttempt:
    """The attempt that makes `snapshot`, from `at_s` on; `changes` is the number of changes of state in it."""

    def __init__(self, snapshot: Snapshot, at_s: float, changes: int) -> None:
        self.snapshot, self.changes = snapshot, changes
        self._phase_s = at_s
        #: Tasks that have yet to capture, and to write, their parts.
        self._uncaptured, self._unwritten = {*snapshot.tasks}, {*snapshot.tasks}
        #: Names of the captured state.
        self._names: set[str] = set()
        self._reports: list[StateWritten] = []
        #: Whether the pause has ended, as all have captured.
        self.is_writing = False

    @property
    def is_captured(self) -> bool:
        """Whether all tasks have captured their parts."""
        return not self._uncaptured

    @property
    def is_written(self) -> bool:
        """Whether all tasks have written what they captured."""
        return self.is_writing and not self._unwritten

    @property
    def missing(self) -> list[str]:
        """Names of the snapshot that no task has captured: variables that are placed and not created yet."""
        return [name for name in self.snapshot.names if name not in self._names]

    @property
    def size(self) -> SnapshotSize:
        """Number of bytes that the tasks have written."""
        written = sum(report.written_bytes for report in self._reports)
        return SnapshotSize(self.snapshot.number, written, sum(report.full_bytes for report in self._reports))

    def captured(self, report: StateCaptured) -> None:
        """Handle the report of a task that has captured its part."""
        if report.number == self.snapshot.number:
            self._uncaptured.discard(report.task)
            self._names.update(report.keys)

    def begin_writing(self, at_s: float) -> None:
        """Note that the pause has ended."""
        self.is_writing, self._phase_s = True, at_s

    def written(self, report: StateWritten) -> None:
        """Handle the report of a task that has written its part."""
        self._unwritten.discard(report.task)
        self._reports.append(report)

    def late(self, at_s: float) -> str:
        """Why the attempt takes too long; empty if it does not."""
        if self.is_writing:
            tasks, limit_s, what = self._unwritten, WRITE_S, "did not write its part within"
        else:
            tasks, limit_s, what = self._uncaptured, CAPTURE_S, "did not capture its state within"
        return overdue(tasks, what, limit_s) if at_s - self._phase_s > limit_s else ""


def overdue(tasks: Collection[str], what: str, limit_s: float, doing: Callable[[str], str] = lambda task: "") -> str:
    """Say what the tasks did not do within the limit; a worker, if none is known.

    doing  returns what a task works on, or an empty text
    """
    works = "; ".join(f"{short_task_name(task)}: {text}" for task in sorted(tasks) if (text := doing(task)))
    names = ", ".join(map(short_task_name, sorted(tasks))) or "a worker"
    return f"{names} {what} {limit_s:g} s" + (f" ({works})" if works else "")
