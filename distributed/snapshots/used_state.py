"""The variables, queues and accumulators that this task uses on other tasks, and the processes that hold them.

Why: a restarted task is empty. Its own error is about a plan or a name that it does not know; this file knows which
variables were lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from dflow.distributed.coordinator.variable_directory import lost_text
from dflow.distributed.wire.messages.placement import Placed
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError, TaskLost, TransportClosed
from dflow.tracing.source import caller


class UsedState:
    """The process that holds each name used by the task `user`; thread-safe.

    `roster`  returns the newest roster
    """

    def __init__(self, user: str, roster: Callable[[], Roster]) -> None:
        self._user, self._roster = user, roster
        self._lock = threading.Lock()
        self._placed: dict[str, Placed] = {}

    def note(self, name: str, placed: Placed) -> None:
        """Record the task and process that hold `name`."""
        with self._lock:
            self._placed[name] = placed

    def forget(self, name: str) -> None:
        """Remove a name that was freed."""
        with self._lock:
            self._placed.pop(name, None)

    def restored(self) -> None:
        """After a return to a snapshot, record the present processes of the tasks as the holders of all names."""
        processes = {info.task: info.process for info in self._roster().tasks if info.left_at_s is None}
        with self._lock:
            self._placed = {
                name: Placed(placed.task, processes.get(placed.task, placed.process))
                for name, placed in self._placed.items()
            }

    def loss(self, tasks: Collection[str]) -> TaskLost | None:
        """Return the error for state that was lost with earlier processes of these tasks; None when none was."""
        live = {info.task: info for info in self._roster().tasks if info.left_at_s is None and info.task in tasks}
        with self._lock:
            placed = list(self._placed.items())
        for task, info in live.items():
            lost = {name: one for name, one in placed if one.task == task and one.process not in ("", info.process)}
            if lost:
                end = self._end_of(task, next(iter(lost.values())).process)
                return TaskLost(lost_text([*map(repr, lost)], task, end, is_replaced=True), at=caller())
        return None

    @contextmanager
    def explained(self, tasks: Collection[str]) -> Iterator[None]:
        """Replace a DflowError in the block by TaskLost if one of `tasks`, or state that it held, was lost."""
        try:
            yield
        except DflowError as error:
            self.explain(error, tasks)
            raise

    def explain(self, error: DflowError, tasks: Collection[str]) -> None:
        """Raise TaskLost from `error` if it is TransportClosed, or if state on one of `tasks` was lost; else return."""
        lost = self.loss(tasks)
        if lost is not None:
            raise lost from error
        if isinstance(error, TransportClosed):
            names = " or ".join(map(short_task_name, tasks))
            raise TaskLost(f"{names} was lost while {short_task_name(self._user)} waited: {error}") from error

    def _end_of(self, task: str, process: str) -> str:
        ended: list[TaskInfo] = [info for info in self._roster().tasks if (info.task, info.process) == (task, process)]
        if not ended or ended[-1].left_at_s is None:
            return ""
        return f"{short_task_name(task)} left at {ended[-1].left_at_s:.1f} s: {ended[-1].left}"
