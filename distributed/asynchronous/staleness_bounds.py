"""The runs of asynchronous training whose staleness a task bounds: it answers the workers as `staleness` decides.

One task does so for all steps of a run. It may be any task that outlives the workers: their steps need not use it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from msgspec.structs import replace

from dflow.distributed.asynchronous.staleness import BoundedSteps
from dflow.distributed.asynchronous.staleness_messages import BeginStep, EndStep, StepAdmitted
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.steps.step_starter import first_of_a_life
from dflow.distributed.task.arrivals import Arrival, RequestArrival, RequestTable
from dflow.distributed.task.task_part import TaskPart
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.transport.base import Responder
from dflow.distributed.wire.failures import error_of
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure
from dflow.lowering.queues.timers import Stoppable, start_timer
from dflow.tracing.errors import DflowError, RemoteError, TaskLost


class StalenessBounds(TaskPart):
    """Admits the steps of the runs that this task bounds; thread-safe, and it may be called on reader threads."""

    requests: ClassVar[RequestTable[StalenessBounds]] = RequestTable()
    notices: ClassVar[HandlerTable[StalenessBounds, Arrival, None]] = HandlerTable()

    def __init__(self, task: TaskServer) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._runs: dict[str, BoundedSteps] = {}
        self._asks: dict[int, tuple[Responder, Stoppable | None]] = {}
        self._numbers = itertools.count()

    @requests.handles(BeginStep)
    def begin(self, message: BeginStep, arrival: RequestArrival) -> None:
        """Answer as soon as the worker's step may begin; after `timeout_s`, with DeadlineExceeded.

        raises  TaskLost for a worker that has left the cluster; RemoteError if the run has another limit
        """
        responder = arrival.responder
        with self._lock:
            if self._task.channel.has_left(message.worker):
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

    @notices.handles(EndStep)
    def end(self, message: EndStep, arrival: Arrival) -> None:
        """End a worker's step or its part in the run, and answer the requests of steps that may begin then."""
        with self._lock:
            run = self._runs.get(message.run)
            if run is None:
                return
            answers = self._answers(run.end(message.worker, message.number, is_last=message.is_last))
            if run.is_idle:
                del self._runs[message.run]
        _give(answers)

    def left(self, task: str) -> None:
        """Remove a task that left the cluster from all runs: its step ends, as no task takes its messages any more."""
        with self._lock:
            answers = [answer for run in self._runs.values() for answer in self._answers(run.leave(task))]
            self._runs = {name: run for name, run in self._runs.items() if not run.is_idle}
        _give(answers)

    def close(self, error: DflowError) -> None:
        """Forget all runs, and answer all waiting requests with `error`."""
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

    def _answers(self, replies: Sequence[SendReply]) -> list[Callable[[], None]]:
        """Remove the answered requests; return the calls that send the answers, to be made without the lock."""
        answers: list[Callable[[], None]] = []
        for reply in replies:
            responder, timer = self._asks.pop(reply.ask)
            if timer is not None:
                timer.stop()
            if isinstance(reply.message, StepAdmitted):
                death = self._task.member_gate.death_known_at
                answers.append(partial(responder.reply, replace(reply.message, roster=death)))
            elif isinstance(reply.message, Failure):
                answers.append(partial(responder.fail, error_of(reply.message)))
        return answers


def _give(answers: Sequence[Callable[[], None]]) -> None:
    for answer in answers:
        answer()
