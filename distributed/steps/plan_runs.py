"""The parts of steps that a task runs now: each a plan, begun once and ended once.

Invariants:

- A plan that was begun ends exactly once: by its last item, its first error, or `cancel`.
- The thread that makes items of a quick plan ready (`Executable.is_quick`) runs them, since waking another thread
  takes longer, unless it would have to wait for a variable. The pool runs all other items.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from dflow.distributed.observe.step_counts import StepCounts
from dflow.distributed.steps.rendezvous import describe
from dflow.distributed.steps.task_channel import TaskChannel
from dflow.distributed.steps.trampoline import run_soon
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution, Outcome, Submit
from dflow.lowering.steps.recorder import PART_BEGAN, PART_ENDED, Recorder, described_end
from dflow.tracing.errors import InternalError, StepCancelled


class PlanRuns:
    """The plans that the task `task` runs; thread-safe.

    counts  number of ended plans by outcome
    """

    def __init__(self, task: str, store: Store, channel: TaskChannel, recorder: Recorder, pool: Executor) -> None:
        self._task, self._store, self._channel, self._recorder, self._pool = task, store, channel, recorder, pool
        self.counts = StepCounts()
        self._lock = threading.Lock()
        self._runs: dict[StepId, _Run] = {}
        self._ended_count = 0

    @property
    def ended(self) -> int:
        """Number of plans that have ended, with or without an error."""
        return self._ended_count

    def running(self) -> list[StepId]:
        """The steps that have a part running here, oldest first."""
        with self._lock:
            return list(self._runs)

    def run(
        self, executable: Executable, step: StepId, feeds: Sequence[Any], on_done: Callable[[Outcome], None]
    ) -> None:
        """Run a plan as the task's part of `step`; see `TaskServer.run`."""
        run = _Run(on_done)
        submit = partial(self._do, executable) if executable.is_quick else self._pool.submit
        start = partial(self._start, run, executable, step, feeds, submit)
        with self._lock:
            if step in self._runs:
                raise InternalError(f"{self._task} already runs a plan in {describe(step)}")
            self._channel.begin(step)
            self._runs[step] = run
            run.began_ns = self._recorder.note(PART_BEGAN, step)
        try:
            submit(start)
        except RuntimeError:
            self._cancel_run(step, StepCancelled(f"{self._task} is closed"))

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End the task's part of `step` with `error`, now or as soon as it begins."""
        # Cancel the run first, so that it ends with `error` and not with the channel's later refusal. Cancel again for
        # a run that began in between; none begins after `abort`.
        self._cancel_run(step, error)
        self._channel.abort(step, error)
        self._cancel_run(step, error)

    def _cancel_run(self, step: StepId, error: BaseException) -> None:
        with self._lock:
            run = self._runs.get(step)
        if run is not None and run.cancel(error):
            self._ended(run, step, error)

    def _do(self, executable: Executable, work: Callable[[], None]) -> None:
        """Run quick work on this thread, unless it would have to wait for a variable."""
        if self._store.table.is_busy(executable.keys):
            self._pool.submit(work)
        else:
            run_soon(work)

    def _start(self, run: _Run, executable: Executable, step: StepId, feeds: Sequence[Any], submit: Submit) -> None:
        try:
            execution = Execution(
                executable,
                self._store,
                self._channel,
                step,
                feeds,
                on_done=partial(self._ended, run, step),
                submit=submit,
                recorder=self._recorder,
            )
        except BaseException as error:
            self._cancel_run(step, error)
            return
        if run.begins(execution):
            execution.start()

    def _ended(self, run: _Run, step: StepId, outcome: Outcome) -> None:
        with self._lock:
            self._runs.pop(step, None)
            self._ended_count += 1
        self._channel.finish(step)
        outcome = run.told(outcome)
        ended_ns = self._recorder.note(PART_ENDED, step, "", described_end(outcome))
        self.counts.ended((ended_ns - run.began_ns) / 1e9, outcome)
        run.on_done(outcome)


class _Run:
    """A plan that runs, or will; one that is cancelled before it begins never runs.

    After a cancellation the channel also refuses the plan's next operation. That error may arrive first; the outcome
    is the cancellation, its cause.
    """

    def __init__(self, on_done: Callable[[Outcome], None]) -> None:
        self.on_done = on_done
        self.began_ns = 0
        self._lock = threading.Lock()
        self._execution: Execution | None = None
        self._cause: BaseException | None = None

    def begins(self, execution: Execution) -> bool:
        """Whether to start the execution, which from then on ends the run."""
        with self._lock:
            if self._cause is None:
                self._execution = execution
            return self._cause is None

    def cancel(self, error: BaseException) -> bool:
        """Cancel the run; true if it had not begun and this ends it. A run that has begun ends by its execution."""
        with self._lock:
            is_first, self._cause = self._cause is None, self._cause or error
            execution = self._execution
        if execution is not None:
            execution.cancel(error)
        return is_first and execution is None

    def told(self, outcome: Outcome) -> Outcome:
        return self._cause or outcome if isinstance(outcome, BaseException) else outcome
