"""The end of a job, as a task of another job sees it: an evaluator ends with the training that it follows."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator

from dflow.distributed.client.session_driver import SessionDriver
from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.wire.messages.roster import Roster
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.environment import read
from dflow.tracing.errors import ConfigError
from dflow.tracing.source import caller

#: A task that was lost, or did not join, has ended if no task of the job runs for this time, in s. If all have joined
#: and the launcher starts none of them again, they have ended immediately.
AGAIN_S = 120.0
LOGGER = logging.getLogger("dflow")


class JobEnd:
    """Waits for the end of all tasks of `job`: none is live, or may be started again.

    Raises ConfigError if the cluster has no such job, or this task is one of it.
    """

    def __init__(self, session: SessionDriver, job: str, own_job: str) -> None:
        self._session, self._job = session, job
        #: The newest value of `_newest_loss`, and when it was seen.
        self._newest, self._seen_s = -1.0, 0.0
        roster = session.roster
        names = {*roster.expected, *(info.task for info in roster.tasks)}
        jobs = sorted({split_task_name(task)[0] for task in names} - {own_job})
        if job not in jobs:
            raise ConfigError(
                f"while_running: expected a job other than {own_job!r}, got {job!r}; the jobs are {', '.join(jobs)}",
                at=caller(),
            )

    def wait(self, timeout_s: float) -> bool:
        """Wait until the job has ended, at most `timeout_s`; return whether it has.

        raises  TransportClosed when the coordinator is lost for good
        """
        deadline = time.monotonic() + timeout_s
        while True:
            now_s, newest = time.monotonic(), self._newest_loss(self._session.roster)
            if newest != self._newest:
                self._newest, self._seen_s = newest, now_s
            again_s = self._seen_s + self._absence_s() if newest > 0.0 else math.inf
            if newest == 0.0 or now_s >= again_s:
                self._announce_losses()
                return True
            if now_s >= deadline:
                return False
            self._session.wait_for_roster(
                lambda roster: self._newest_loss(roster) != self._newest, min(deadline, again_s) - now_s
            )

    def iterate(self, every_s: float) -> Iterator[bool]:
        """Yield False until the job has ended, at intervals of at least `every_s`, and then True once."""
        is_over = self.wait(0.0)
        while not is_over:
            began_s = time.monotonic()
            yield False
            is_over = self.wait(began_s + every_s - time.monotonic())
        yield True

    def _absence_s(self) -> float:
        """Return the time without a live task after which the tasks that were lost have ended, in s."""
        is_missing = any(split_task_name(task)[0] == self._job for task in self._session.roster.expected)
        restarted = read("DFLOW_RESTARTED")
        return 0.0 if restarted and self._job not in restarted.split(",") and not is_missing else AGAIN_S

    def _announce_losses(self) -> None:
        last = {info.task: info for info in self._session.roster.tasks if split_task_name(info.task)[0] == self._job}
        lost = [f"{short_task_name(info.task)}: {info.left}" for info in last.values() if info.left not in NORMAL_ENDS]
        if lost:
            LOGGER.warning("while_running: the job %r has ended; lost tasks: %s", self._job, ", ".join(lost))

    def _newest_loss(self, roster: Roster) -> float:
        """Return when the last task left, if one was lost or has not joined; 0 if all have finished; -1 if one runs."""
        last = {info.task: info for info in roster.tasks if split_task_name(info.task)[0] == self._job}
        is_missing = any(split_task_name(task)[0] == self._job for task in roster.expected)
        ends = [info.left_at_s for info in last.values()]
        if None in ends or (is_missing and not ends):
            return -1.0
        lost = [info.left_at_s or 0.0 for info in last.values() if is_missing or info.left not in NORMAL_ENDS]
        return max(lost, default=0.0)
