"""The steps that a task starts: it sends one message to each task that has a part, which is answered at the part's end.

A worker starts the steps of its program and waits for them. A step aggregator starts its updates over plans that
workers have registered, so no worker's loss ends them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from dflow.distributed.steps.peers import Peers
from dflow.distributed.steps.plan_registry import PlanRegistry
from dflow.distributed.steps.plan_runs import PlanRuns
from dflow.distributed.transport.base import Peer, Reply
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.plans import Ahead, CancelStep, RunPlan
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE, StepId
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.steps.execute import Fetches
from dflow.lowering.values.outcome import Outcome, raise_interrupt
from dflow.tracing.errors import DflowError

_lives = itertools.count()


def first_of_a_life() -> int:
    """Return a first step number for a task that starts now, greater than the numbers of its earlier lives."""
    tenths_of_s = time.time_ns() // 100_000_000
    return (tenths_of_s + next(_lives)) * STEPS_OF_A_LIFE


class StepParts:
    """The parts of a step on `tasks`.

    Calls `on_over` once, from any thread: with the first error, or with this task's outcome when all parts have ended.
    Without tasks, it is never called.
    """

    def __init__(self, tasks: Iterable[str], on_over: Callable[[Outcome[Fetches]], None]) -> None:
        self._on_over = on_over
        self._lock = threading.Lock()
        self._running = {*tasks}
        #: Whether all parts have ended, or one has failed.
        self.is_over = not self._running
        self._outcome: Outcome[Fetches] = ()

    @property
    def running(self) -> list[str]:
        """The sorted names of the tasks whose parts have not ended; empty after an error."""
        with self._lock:
            return sorted(self._running)

    def raise_interrupt(self) -> None:
        """Raise an interrupt of this process, if one has ended the parts."""
        with self._lock:
            outcome = self._outcome
        if isinstance(outcome, BaseException):
            raise_interrupt(outcome)

    def ended(self, task: str, outcome: Outcome[Fetches] | Reply[Ok]) -> None:
        """Record the end of the part of `task`; call `on_over` if it ends the step. Does nothing after the end."""
        with self._lock:
            if self.is_over:
                return
            self._running.discard(task)
            if isinstance(outcome, BaseException):
                self._running.clear()
            if not isinstance(outcome, Reply):
                self._outcome = outcome
            if self._running:
                return
            self.is_over = True
        self._on_over(self._outcome)


def cancel_elsewhere(step: StepId, peers: Iterable[Peer], error: BaseException) -> None:
    """Have other tasks cancel their parts of a step, without waiting; ignores tasks that are gone."""
    message = CancelStep(step.origin, step.number, f"{type(error).__name__}: {error}")
    for peer in peers:
        with contextlib.suppress(DflowError):  # the task is gone, and its part with it
            peer.notify(message)


class StepStarter:
    """Starts the steps of the task `name`; thread-safe. Steps before number `first` are those of its earlier lives."""

    def __init__(self, name: str, peers: Peers, plans: PlanRegistry, runs: PlanRuns) -> None:
        self._name, self._peers, self._plans, self._runs = name, peers, plans, runs
        #: Run the rest of this task's part of a step, which `run_own` began ahead.
        self.release_own = runs.release
        self.first = first_of_a_life()
        self._numbers = itertools.count(self.first + 1)

    def next_step(self) -> StepId:
        """Return the identity of a new step."""
        return StepId(self._name, next(self._numbers))

    def peers(self, tasks: Iterable[str]) -> dict[str, Peer]:
        """Return the connections to the other ones of `tasks`; may block while connecting. Raises TaskLost."""
        return {task: self._peers.get(task) for task in tasks if task != self._name}

    def start(
        self,
        step: StepId,
        peers: Mapping[str, Peer],
        handles: Mapping[str, int],
        on_over: Callable[[Outcome[Fetches]], None],
        *,
        ahead: Ahead | None = None,
        of: StepOfRun | None = None,
    ) -> StepParts:
        """Start the plans `handles`, by task, on the other tasks of a step; return its parts. `run_own` completes them.

        on_over  gets the first error, also one in starting, or the outcome of this task's part when all have ended
        ahead    start before the step is called, with the next message to each task; the step changes no state until
                 the call, so `cancel` undoes it; see `RunPlan`, also for `of`
        """
        parts = StepParts(handles, on_over)
        try:
            for task, peer in peers.items():
                message = RunPlan(handles[task], step.origin, step.number, ahead, of)
                peer.start(message, on_reply=partial(parts.ended, task), with_next=ahead is not None)
        except Exception as error:
            parts.ended(self._name, error)
        return parts

    def run_own(
        self,
        step: StepId,
        handles: Mapping[str, int],
        feeds: Sequence[Any],
        parts: StepParts,
        of: StepOfRun | None = None,
        *,
        ahead: Ahead | None = None,
    ) -> None:
        """Start this task's part of a started step, unless that is over. An error ends `parts` and is not raised.

        ahead  before `release_own`, do only what the feeds determine; see `Begins.OWN`
        """
        if parts.is_over:
            return
        try:
            executable = self._plans.get(handles[self._name])
            self._runs.run(executable, step, feeds, partial(parts.ended, self._name), ahead=ahead, of=of)
        except Exception as error:
            parts.ended(self._name, error)

    def cancel(self, step: StepId, peers: Iterable[Peer], error: BaseException) -> None:
        """End this task's part of a step with `error`, and have the tasks of `peers` cancel theirs."""
        self._runs.cancel(step, error)
        cancel_elsewhere(step, peers, error)

    def start_unattended(
        self,
        handles: Mapping[str, int],
        feeds: Sequence[Any],
        on_end: Callable[[BaseException | None], None],
        of: StepOfRun,
    ) -> None:
        """Start the plans `handles` as a new step, which is cancelled when a part fails; may block while connecting.

        `on_end` is called once, from any thread: with None when all parts have ended, or with the first error. `of` is
        as in `RunPlan`.
        raises  TaskLost when a task cannot be reached; `on_end` is then not called
        """
        step, peers = self.next_step(), self.peers(handles)

        def over(outcome: Outcome[Fetches]) -> None:
            error = outcome if isinstance(outcome, BaseException) else None
            if error is not None:
                self.cancel(step, peers.values(), error)
            on_end(error)

        self.run_own(step, handles, feeds, self.start(step, peers, handles, over, of=of), of)
