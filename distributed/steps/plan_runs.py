"""The parts of steps that a task runs now: each a plan, begun once and ended once.

Invariants:

- A plan that was begun ends exactly once: by its last item, its first error, or `cancel`.
- The thread that makes items of an asynchronous plan ready (`Executable.is_asynchronous`) runs them, since waking
  another thread takes longer, unless it would have to wait for a variable. All other items, and those of a plan's first
  run, which may compile a program again, have a thread each. A reader thread that waits for computed values hands over
  its other connections first.
- A run that begins after another one can be cancelled from the beginning, and starts when the other has ended.
- A run of this task's own step that begins ahead starts on the calling thread.
- An item that makes others ready on its thread returns before they run, so that chains of steps which feed each other
  use no more stack than one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflow.distributed.observe.step_counts import StepCounts
from dflow.distributed.steps.plan_checks import check_step_of_run
from dflow.distributed.steps.rendezvous import describe
from dflow.distributed.steps.task_channel import TaskChannel
from dflow.distributed.wire.messages.plans import Ahead
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE, StepId
from dflow.lowering.state.applied_steps import StepAttempt, StepOfRun
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Begins, Execution, Fetches
from dflow.lowering.steps.recorder import Recorder, described_end
from dflow.lowering.steps.step_events import PART_BEGAN, PART_ENDED
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DflowError, InternalError, StepCancelled, TaskLost


def owner_of(step: StepId) -> str:
    """Return the identity of the process that started a step."""
    return f"{step.origin} {step.number // STEPS_OF_A_LIFE}"


@dataclass(eq=False)
class _Part:
    """The part of a step that this task runs, from its begin to its end.

    start     starts the run
    ahead     how it began before the call of its step; None if it did not
    began_ns  when it began
    updates   number of plans that had changed variables here when it started to read
    follower  the run that starts when this one has ended
    """

    run: Execution
    start: Callable[[], None]
    ahead: Ahead | None
    began_ns: int
    updates: int
    follower: _Part | None = None


class PlanRuns:
    """The plans that the task `task` runs; thread-safe.

    threads  runs each submitted function immediately, on a thread that may wait
    counts   number of ended plans by outcome
    updates  number of ended plans of asynchronous steps that changed variables
    missed   sum, over these plans, of the updates by any other step that ended while the plan ran
    """

    def __init__(self, task: str, store: Store, channel: TaskChannel, recorder: Recorder, threads: Executor) -> None:
        self._task, self._store, self._channel, self._recorder = task, store, channel, recorder
        self._threads = threads
        self.counts = StepCounts()
        self.updates = self.missed = 0
        #: Number of ended plans of any step that changed variables.
        self._all_updates = 0
        self._lock = threading.Lock()
        self._parts: dict[StepId, _Part] = {}

    def running(self) -> list[StepId]:
        """The steps that have a part running here, oldest first; without parts that have only begun ahead."""
        with self._lock:
            return [step for step, part in self._parts.items() if not part.run.is_ahead]

    def steps(self) -> list[StepId]:
        """The steps that have a part here, also those begun ahead."""
        with self._lock:
            return list(self._parts)

    def run(
        self,
        executable: Executable,
        step: StepId,
        feeds: Sequence[Any],
        on_done: Callable[[Outcome[Fetches]], None],
        *,
        ahead: Ahead | None = None,
        of: StepOfRun | None = None,
    ) -> None:
        """Start a plan as the task's only part of `step`, now or when the part of step `ahead.after` has ended.

        See `RunPlan` for `ahead` and `of`. The plan may go on after the return.
        on_done  called once, from any thread, with the fetches or the error that ended the plan
        raises   InternalError if the task runs a plan in this step, or another run begins after the same one;
                 StepCancelled if the step has ended here; StepEnded if `of` has ended on all tasks; TaskLost if the
                 task that started it has left, or `of` began before this task returned to a snapshot; WireError for a
                 wrong `of`
        """
        runs_here = executable.is_asynchronous and executable.has_run
        submit = partial(self._do, executable) if runs_here else self._threads.submit
        ended = partial(self._ended, executable, step, on_done)
        # The task that calls the step has a deadline for it, from the call on.
        channel = self._channel.of_parts if ahead is None else self._channel.of_parts_ahead
        attempt = self._attempt(step, of) if of is not None else None
        begins = self._begins(step, ahead)
        run = run_of(executable, self._store, channel, step, feeds, ended, submit, self._recorder, begins, attempt)
        # Row numbers for a later step should be computed before the device is given the work of the present one.
        start = run.start if begins is Begins.OWN else partial(self._start, submit, run)
        with self._lock:
            if step in self._parts:
                raise InternalError(f"{self._task} already runs a plan in {describe(step)}")
            before = self._parts.get(StepId(step.origin, ahead.after)) if ahead is not None else None
            if before is not None and before.follower is not None:
                raise InternalError(f"two runs of {self._task} begin after {describe(before.run.step)}")
            self._channel.begin(step)
            part = self._parts[step] = _Part(run, start, ahead, self._recorder.clock(), self._all_updates)
            self._recorder.append((part.began_ns, PART_BEGAN, step, "", ""))
            if before is not None:
                before.follower = part
                return
        start()

    def _begins(self, step: StepId, ahead: Ahead | None) -> Begins:
        if ahead is None:
            return Begins.CALLED
        if step.origin == self._task:
            return Begins.OWN
        return Begins.AHEAD if ahead.is_numbered else Begins.UNNUMBERED

    def release(self, step: StepId, of: StepOfRun | None = None) -> None:
        """Let a part that began ahead change state; see `ReleaseStep`. Does nothing if there is no such part.

        Cancels the part if its attempt `of` is refused, as `run` would raise.
        """
        run = self._run_of(step)
        if run is not None:
            try:
                attempt = self._attempt(step, of) if of is not None else None
            except DflowError as error:
                run.cancel(error)
            else:
                run.release(attempt)

    def _attempt(self, step: StepId, of: StepOfRun) -> StepAttempt:
        check_step_of_run(of)
        return self._store.applied.attempt(of, owner_of(step))

    def _run_of(self, step: StepId) -> Execution | None:
        with self._lock:
            part = self._parts.get(step)
        return None if part is None else part.run

    def _start(self, submit: Callable[..., object], run: Execution) -> None:
        try:
            submit(run.start)
        except RuntimeError:
            run.cancel(StepCancelled(f"{self._task} is closed"))

    def cancel(self, step: StepId, error: BaseException) -> None:
        """End the task's part of `step`, and the waits of the step, with `error`.

        If the part has not begun, `run` raises StepCancelled for it.
        """
        # Cancel the run first, so that it ends with `error` and not with the channel's later refusal. Cancel again for
        # a run that began in between; none begins after `abort`.
        self._cancel_run(step, error)
        self._channel.abort(step, error)
        self._cancel_run(step, error)

    def end_blocked(self, why: str) -> None:
        """Cancel the parts of shared runs' steps that may wait for a queue, since the steps that fill it are held back.

        The steps fail with TaskLost, and are done again after the return to a snapshot. `why` ends the error's text.
        """
        with self._lock:
            runs = [part.run for part in self._parts.values()]
        blocked = [run.step for run in runs if run.attempt is not None and run.is_blocked]
        where = f"was ended on {short_task_name(self._task)}, where it may wait for a queue"
        for step in blocked:
            self.cancel(step, TaskLost(f"{describe(step)} {where}, while {why}"))

    def _cancel_run(self, step: StepId, error: BaseException) -> None:
        run = self._run_of(step)
        if run is not None:
            run.cancel(error)

    def _do(self, executable: Executable, work: Callable[[], None]) -> None:
        """Run work on this thread, or on another one if it would have to wait for a variable."""
        if executable.compiled.is_busy():
            self._threads.submit(work)
        else:
            run_soon(work)

    def _ended(
        self,
        executable: Executable,
        step: StepId,
        on_done: Callable[[Outcome[Fetches]], None],
        outcome: Outcome[Fetches],
    ) -> None:
        with self._lock:
            part = self._parts.pop(step)
            if isinstance(outcome, BaseException):
                text = described_end(outcome)
            else:
                text = ""
                if part.run.attempt is not None:
                    part.run.attempt.ended()
                executable.has_run = True
                if executable.updates:
                    self._count_update(part)
            if (follower := part.follower) is not None:
                follower.updates = self._all_updates
        self._channel.finish(step)
        ended_ns = self._recorder.clock()
        self._recorder.append((ended_ns, PART_ENDED, step, "", text))
        self.counts.ended((ended_ns - part.began_ns) / 1e9, outcome)
        if follower is None:
            on_done(outcome)
            return
        if follower.ahead is not None and follower.ahead.is_next:
            # The values of the next step and the report of this one leave together.
            follower.start()
            run_soon(partial(on_done, outcome))
        else:
            # The report must not wait for values that the task uses later.
            on_done(outcome)
            follower.start()

    def _count_update(self, part: _Part) -> None:
        """Count a plan that has changed variables; the lock is held."""
        if part.run.attempt is None or not part.run.attempt.is_synchronous:
            self.missed += self._all_updates - part.updates
            self.updates += 1
        self._all_updates += 1


class _Queue(threading.local):
    work: deque[Callable[[], None]] | None = None


_QUEUE = _Queue()


def run_soon(work: Callable[[], None]) -> None:
    """Run `work` on this thread: now, or within other work of `run_soon`, when that has returned.

    Faster than a `Mailbox`. Raises what `work` raises, or work that was added meanwhile.
    """
    if _QUEUE.work is not None:
        _QUEUE.work.append(work)
        return
    queue = _QUEUE.work = deque()
    try:
        work()
    finally:
        try:
            if queue:
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
