"""The parts of steps that a task runs now: each a plan, begun once and ended once.

Invariants:

- A plan that was begun ends exactly once: by its last item, its first error, or `cancel`.
- The thread that makes items of an asynchronous plan ready (`Executable.is_asynchronous`) runs them, since waking
  another thread takes longer, unless it would have to wait for a variable. The pool runs all other items. A reader
  thread that waits for computed values hands over its other connections first.
- An item that makes others ready on its thread returns before they run, so that chains of steps which feed each other
  use no more stack than one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from dflow.distributed.observe.step_counts import StepCounts
from dflow.distributed.steps.rendezvous import describe
from dflow.distributed.steps.task_channel import TaskChannel
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution, Fetches
from dflow.lowering.steps.recorder import PART_BEGAN, PART_ENDED, Recorder, described_end
from dflow.lowering.steps.straight_line import StraightRun, run_of
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import InternalError, StepCancelled


class PlanRuns:
    """The plans that the task `task` runs; thread-safe.

    counts  number of ended plans by outcome
    """

    def __init__(self, task: str, store: Store, channel: TaskChannel, recorder: Recorder, pool: Executor) -> None:
        self._task, self._store, self._channel, self._recorder, self._pool = task, store, channel, recorder, pool
        self.counts = StepCounts()
        self._lock = threading.Lock()
        #: The runs, each with the time when it began.
        self._runs: dict[StepId, tuple[Execution | StraightRun, int]] = {}

    def running(self) -> list[StepId]:
        """The steps that have a part running here, oldest first."""
        with self._lock:
            return list(self._runs)

    def run(
        self, executable: Executable, step: StepId, feeds: Sequence[Any], on_done: Callable[[Outcome[Fetches]], None]
    ) -> None:
        """Run a plan as the task's part of `step`; see `TaskServer.run`."""
        submit = partial(self._do, executable) if executable.is_asynchronous else self._pool.submit
        ended = partial(self._ended, step, on_done)
        run = run_of(executable, self._store, self._channel, step, feeds, ended, submit, self._recorder)
        with self._lock:
            if step in self._runs:
                raise InternalError(f"{self._task} already runs a plan in {describe(step)}")
            self._channel.begin(step)
            self._runs[step] = run, self._recorder.note(PART_BEGAN, step)
        try:
            submit(run.start)
        except RuntimeError:
            run.cancel(StepCancelled(f"{self._task} is closed"))

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End the task's part of `step` with `error`, now or as soon as it begins."""
        # Cancel the run first, so that it ends with `error` and not with the channel's later refusal. Cancel again for
        # a run that began in between; none begins after `abort`.
        self._cancel_run(step, error)
        self._channel.abort(step, error)
        self._cancel_run(step, error)

    def _cancel_run(self, step: StepId, error: BaseException) -> None:
        with self._lock:
            run, _ = self._runs.get(step, (None, 0))
        if run is not None:
            run.cancel(error)

    def _do(self, executable: Executable, work: Callable[[], None]) -> None:
        """Run work on this thread, unless it would have to wait for a variable."""
        line = executable.line
        if self._store.table.is_busy(executable.keys) if line is None else line.is_busy():
            self._pool.submit(work)
        else:
            run_soon(work)

    def _ended(self, step: StepId, on_done: Callable[[Outcome[Fetches]], None], outcome: Outcome[Fetches]) -> None:
        with self._lock:
            _, began_ns = self._runs.pop(step)
        self._channel.finish(step)
        ended_ns = self._recorder.note(PART_ENDED, step, "", described_end(outcome))
        self.counts.ended((ended_ns - began_ns) / 1e9, outcome)
        on_done(outcome)


class _Queue(threading.local):
    work: deque[Callable[[], None]] | None = None


_QUEUE = _Queue()


def run_soon(work: Callable[[], None]) -> None:
    """Run `work` now, or when the callback that runs on this thread has returned. Faster than a `Mailbox`."""
    if _QUEUE.work is not None:
        _QUEUE.work.append(work)
        return
    queue = _QUEUE.work = deque([work])
    try:
        _drain(queue)
    finally:
        _QUEUE.work = None


def _drain(queue: deque[Callable[[], None]]) -> None:
    """Run all queued callbacks, even if one raises; then raise its error."""
    while queue:
        try:
            queue.popleft()()
        except BaseException:
            _drain(queue)
            raise
