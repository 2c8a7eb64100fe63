"""A worker's part in bounded staleness: each of its steps waits until the task that counts the run's steps admits it.

That task is called the host; it decides by `staleness.py`. A step is in one interval from its admission, before its
reads, to the report of its end, when all tasks have applied it. A step that failed has ended when all of its tasks have
confirmed that it is cancelled, since they may still be applying it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dflow.distributed.asynchronous.staleness_messages import BeginStep, EndStep, StepAdmitted
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps.steps_ahead import StepsAhead
from dflow.distributed.training.long_wait import waited_for
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.plans import CancelStep
from dflow.distributed.wire.messages.status import GetHealth
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DflowError, TaskLost, TransportClosed

#: Returns the context of a step of a loop: its number and the known next ones, its batch and the next one.
SharedStep = Callable[[range, tuple[Any, Any] | None], AbstractContextManager[None]]
#: Numbers of the steps of this process, over all runs.
_numbers = itertools.count(1)


class StalenessBound:
    """Has each step of a worker's loop wait until the host of the run admits it, so that `limit` is kept.

    limit  `max_staleness` of the run
    job    job of the host; the coordinator chooses one of its tasks
    """

    def __init__(self, cluster: Cluster, run: str, limit: int, job: str, loop: StepsAhead) -> None:
        self._cluster, self._run, self._limit, self._loop = cluster, run, limit, loop
        request = PlaceVariable(f"{run}/staleness", "staleness", (), 0, job, kind="run", is_saved=False)
        #: Number of the newest step.
        self._number = 0
        #: Version of a roster that this task has.
        self._known = 0
        self._host = cluster.steps.retried(lambda: cluster.coordinator.ask(request)).task

    @contextmanager
    def taking_part(self, step: SharedStep) -> Iterator[SharedStep]:
        """Yield a function like `step`, whose contexts wait until the host admits the step; leave the run at the end.

        A context raises DeadlineExceeded if the step is not admitted in time, or a failed step may still be applied.
        """

        @contextmanager
        def bounded(steps: range, batches: tuple[Any, Any] | None) -> Iterator[None]:
            self._begin()
            try:
                with step(steps, batches):
                    yield
            finally:
                self._end()

        try:
            yield bounded
        finally:
            self._end(is_last=True)

    def _begin(self) -> None:
        if unsettled := self._unsettled():
            raise DeadlineExceeded(
                f"{short_task_name(unsettled)} has not confirmed the end of a step that failed, and may still apply it",
                "see its output, or end it",
            )
        held, self._number = self._loop.held, next(_numbers)
        try:
            admitted = waited_for(self._cluster.task, self._cluster.steps.timeout_s, self._asked)
            self._await_roster(admitted.roster)
        except BaseException:
            self._end()
            raise
        if held is not None and not admitted.uses_held:
            self._loop.cancel("its values would be older than max_staleness allows")
        self._loop.admitted(admitted.version, admitted.workers)

    def _asked(self, wait_s: float) -> StepAdmitted:
        message = BeginStep(self._run, self._cluster.task, self._number, self._limit, self._loop.held, wait_s)
        return self._cluster.requests.ask_waiting(self._host, message, wait_s).message

    def _await_roster(self, version: int) -> None:
        """Wait until this task has the roster of this version: a worker that it lists as dead may have been in a step.

        Other tasks take no message of this task's step before they have the roster too, and then they refuse those of
        the dead worker.
        """
        if version > max(self._known, self._cluster.steps.server.peers.introduced_at):
            # The coordinator sends its rosters before later answers.
            self._cluster.coordinator.ask(GetHealth(self._cluster.task), self._cluster.steps.timeout_s)
            self._known = version

    def _end(self, *, is_last: bool = False) -> None:
        """Cancel the step if it failed; report its end to the host unless a task may still apply it. Ignores errors."""
        with contextlib.suppress(DflowError):
            if not self._unsettled():
                message = EndStep(self._run, self._cluster.task, self._number, is_last)
                self._cluster.steps.server.peer(self._host).notify(message)

    def _unsettled(self) -> str:
        """Cancel the step that failed on its tasks; return the first one that does not confirm, and may still apply it.

        Empty if all confirm or have left, or no step failed.
        """
        if self._loop.failed is None:
            return ""
        step, peers = self._loop.failed
        for task in peers:
            try:
                self._cluster.requests.ask(task, CancelStep(step.origin, step.number, "it failed"))
            except (TaskLost, TransportClosed):
                continue
            except DflowError:
                return task
        self._loop.failed = None
        return ""
