"""Retries of operations that failed because state of other tasks was lost, after all tasks returned to a snapshot.

Invariant: nothing within a shared step waits for a return, which waits for the step. There the error ends the step, and
the loop of the step waits and does it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from dflow.distributed.steps.step_gate import is_in_step
from dflow.tracing.errors import DflowError, TaskLost

Result = TypeVar("Result")

#: Most failures in a row of a step, whose tasks were lost and came back.
MOST_FAILURES = 3
#: Pause before a step that failed is tried again, for each failure in a row, in s.
RETRY_S = 0.5


class RecoveringState:
    """State on other tasks, which return to a snapshot when some of it was lost."""

    #: Number of times that all tasks have returned to a snapshot, after which steps are done again.
    epoch = 0
    #: Number of these returns that have undone steps.
    undone = 0

    def await_recovery(self) -> None:
        """Wait until no state of tasks is lost. Raises TaskLost if lost state cannot be restored."""
        raise NotImplementedError

    def is_recovered(self, error: BaseException, failures: int, since: int | None = None) -> bool:
        """Wait until no state of tasks is lost; return whether the operation that failed can be tried again.

        Returns false without waiting within a step, and after more than `MOST_FAILURES`.

        error     the error of a step or an enqueue, which gets a note if the state cannot be restored
        failures  number of its failures in a row; if no state was lost, sleeps longer each time before it returns,
                  since the coordinator may not know of a loss yet
        since     the epoch before the step or the enqueue began; by default that of now
        """
        if failures > MOST_FAILURES or is_in_step():
            return False
        epoch = self.epoch if since is None else since
        try:
            self.await_recovery()
        except DflowError as refusal:
            error.add_note(str(refusal))
            return False
        if self.epoch == epoch:
            time.sleep(RETRY_S * failures)
        return True

    def retried(self, do: Callable[[], Result], errors: tuple[type[DflowError], ...] = (TaskLost,)) -> Result:
        """Return the result of `do`. After one of `errors`, call it again if `is_recovered`, else raise the error."""
        failures = 0
        while True:
            try:
                return do()
            except errors as error:
                failures += 1
                if not self.is_recovered(error, failures):
                    raise
