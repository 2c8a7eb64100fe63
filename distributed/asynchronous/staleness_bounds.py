"""The runs of asynchronous training whose staleness a task bounds: it answers the workers as `staleness` decides.

One task does so for all steps of a run. It may be any task that outlives the workers: their steps need not use it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial

from dflow.distributed.asynchronous.staleness import AdmitStep, BoundedSteps, StalenessCommand
from dflow.distributed.asynchronous.staleness_messages import BeginStep, EndStep, StepAdmitted
from dflow.distributed.steps.step_starter import first_of_a_life
from dflow.distributed.transport.base import Responder
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.messages.connection import Failure
from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.tracing.errors import DflowError, RemoteError, TaskLost


class StalenessBounds:
    """The runs that one task bounds; thread-safe, and it may be called on reader threads.

    has_left     whether a task has left the cluster; `task_left` reports tasks that leave later
    known_death  returns the version of the roster with the newest death that this task knows of
    """

    def __init__(self, has_left: Callable[[str], bool], known_death: Callable[[], int]) -> None:
        self._has_left, self._known_death = has_left, known_death
        self._lock = threading.Lock()
        self._runs: dict[str, BoundedSteps] = {}
        self._asks: dict[int, tuple[Responder, Stoppable | None]] = {}
        self._numbers = itertools.count()

    def begin(self, message: BeginStep, responder: Responder) -> None:
        """Answer as soon as the worker's step may begin.

        raises  TaskLost for a worker that has left the cluster; RemoteError if the run has another limit
        """
        with self._lock:
            if self._has_left(message.worker):
                raise TaskLost(f"{message.worker} has left the cluster, and cannot take part in a run")
            run = self._runs.get(message.run)
            if run is None:
                run = self._runs[message.run] = BoundedSteps(message.run, message.limit, first_of_a_life())
            elif run.limit != message.limit:
                raise RemoteError(
                    f"run {message.run!r}: expected max_staleness={run.limit}, as its other workers have, got "
                    f"{message.limit}",
                    "give all workers the same, or name another run",
                )
            number = next(self._numbers)
            self._asks[number] = responder, None
            answers = self._answers(run.begin(number, message.worker, message.number, message.held))
            if number in self._asks:
                wait_s = message.timeout_s if math.isfinite(message.timeout_s) else math.inf
                self._asks[number] = responder, start_timer(wait_s, partial(self._timed_out, message.run, number))
        _give(answers)

    def end(self, message: EndStep) -> None:
        """Handle the end of a worker's step."""
        with self._lock:
            run = self._runs.get(message.run)
            if run is None:
                return
            answers = self._answers(run.end(message.worker, message.number, is_last=message.is_last))
            if run.is_idle:
                del self._runs[message.run]
        _give(answers)

    def task_left(self, task: str) -> None:
        """Handle a task that left the cluster: no task takes messages of its step any more."""
        with self._lock:
            answers = [answer for run in self._runs.values() for answer in self._answers(run.leave(task))]
            self._runs = {name: run for name, run in self._runs.items() if not run.is_idle}
        _give(answers)

    def close(self, error: DflowError) -> None:
        """Answer all waiting requests with `error`."""
        with self._lock:
            self._runs.clear()
            asks, self._asks = self._asks, {}
        for responder, timer in asks.values():
            if timer is not None:
                timer.stop()
            responder.fail(error)

    def _timed_out(self, name: str, number: int) -> None:
        with self._lock:
            run = self._runs.get(name)
            answers = [] if run is None else self._answers(run.timed_out(number))
        _give(answers)

    def _answers(self, commands: Sequence[StalenessCommand]) -> list[Callable[[], None]]:
        """Return the calls that send the answers; made without the lock."""
        answers: list[Callable[[], None]] = []
        for command in commands:
            responder, timer = self._asks.pop(command.request)
            if timer is not None:
                timer.stop()
            if isinstance(command, AdmitStep):
                admitted = StepAdmitted(command.version, command.uses_held, command.workers, self._known_death())
                answers.append(partial(responder.reply, admitted))
            else:
                answers.append(partial(responder.fail, error_of(Failure(command.kind, command.text))))
        return answers


def _give(answers: Sequence[Callable[[], None]]) -> None:
    for answer in answers:
        answer()
