"""Requests to other tasks, and to the coordinator for the tasks that hold this task's variables and resources."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from dflow.distributed.client.coordinator_client import BARRIER_GRACE_S, CoordinatorClient
from dflow.distributed.snapshots.recovery import RECOVERY_S
from dflow.distributed.snapshots.snapshot_messages import AwaitRecovery, Recovered
from dflow.distributed.snapshots.unsaved_state import UnsavedState
from dflow.distributed.snapshots.used_state import UsedState
from dflow.distributed.steps.step_gate import begins_parts, uses_tasks
from dflow.distributed.task.task_server import TaskServer
from dflow.distributed.transport.base import OnReply, PendingReply, Reply
from dflow.distributed.wire.codec import Payload
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.placement import Placed, PlaceVariable, PlaceVariables, Unplace
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import Cancel
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, DflowError

#: The most variables that one message places.
MOST_PLACED = 256


class OutgoingRequests:
    """Sends requests of this task to other tasks and the coordinator; thread-safe.

    `timeout_s`  longest wait for an answer, in s
    `used`       state on other tasks that this task uses; names what was lost in errors
    `unsaved`    state that this process has made; made again before a request if a return has freed it
    """

    def __init__(self, server: TaskServer, coordinator: CoordinatorClient, timeout_s: float) -> None:
        self.task = server.name
        self._server, self.coordinator, self.timeout_s = server, coordinator, timeout_s
        self.used = UsedState(server.name, lambda: coordinator.session.roster)
        self.unsaved = UnsavedState()

    @property
    def tasks(self) -> tuple[str, ...]:
        """The live tasks, including this one."""
        return tuple(info.task for info in self.coordinator.session.roster.tasks if info.left_at_s is None)

    @contextmanager
    def explained(self, task: str) -> Iterator[None]:
        """Return a context for a request to `task`, which replaces its errors.

        An error becomes TaskLost if the task was lost, or state that this task uses there. Another DeadlineExceeded
        gets a description of the task.
        """
        try:
            with self.used.explained([task]):
                yield
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"{error}; {self.coordinator.describe(task)}") from error

    def await_recovery(self, *, is_joining: bool = False) -> Recovered:
        """Wait until no state of tasks is lost; see `AwaitRecovery`. Raises TaskLost if it cannot be restored."""
        return self.coordinator.ask(AwaitRecovery(self.task, is_joining), RECOVERY_S + BARRIER_GRACE_S)

    def ask(self, task: str, message: Request[Answer], payload: Payload = b"") -> Reply[Answer]:
        """Send another task a request, and wait for its answer.

        raises  TaskLost when the task left, or lost state that this one uses on it; DeadlineExceeded, with a
                description of the task; the error that the task answers with
        """
        uses_tasks()
        self.unsaved.make_again()
        with self.explained(task):
            return self._server.peer(task).call(message, payload, timeout_s=self.timeout_s)

    def begin(self, task: str, message: Request[Answer]) -> PendingReply[Answer]:
        """Send another task a request without a payload, and return before its answer.

        raises  TaskLost when the task left; TransportClosed when the connection ended
        """
        return self._server.peer(task).start(message)

    def ask_waiting(self, task: str, message: Request[Answer], wait_s: float) -> Reply[Answer]:
        """Like `ask` without a payload, for a task that may wait `wait_s` before it answers.

        The deadline is `wait_s` + `timeout_s`; DeadlineExceeded does not describe the task.
        """
        uses_tasks()
        self.unsaved.make_again()
        with self.used.explained([task]):
            return self._server.peer(task).call(message, timeout_s=wait_s + self.timeout_s)

    def ask_all(self, requests: Sequence[tuple[str, Request[Answer], Payload]]) -> list[Reply[Answer] | DflowError]:
        """Send requests to tasks concurrently; return the answer or the error of each, in order."""
        uses_tasks()
        try:
            self.unsaved.make_again()
        except DflowError as error:
            return [error for _ in requests]
        started = [self._started(*request) for request in requests]
        return [self._answer(task, wait) for (task, _, _), wait in zip(requests, started, strict=True)]

    def ask_each(self, requests: Mapping[str, Request[Answer]]) -> list[Reply[Answer]]:
        """Send a request to each task, concurrently; return the answers in order. Raises the first error."""
        found = []
        for answer in self.ask_all([(task, message, b"") for task, message in requests.items()]):
            if isinstance(answer, DflowError):
                raise answer
            found.append(answer)
        return found

    def _started(self, task: str, message: Request[Answer], payload: Payload) -> PendingReply[Answer] | DflowError:
        try:
            with self.used.explained([task]):
                return self._server.peer(task).start(message, payload)
        except DflowError as error:
            return error

    def _answer(self, task: str, started: PendingReply[Answer] | DflowError) -> Reply[Answer] | DflowError:
        if isinstance(started, DflowError):
            return started
        try:
            with self.explained(task):
                return started.wait(self.timeout_s)
        except DflowError as error:
            return error

    def place_all(self, requests: Sequence[PlaceVariable]) -> list[Placed | Failure]:
        """Return the task of each variable, where it is or must be created, or the failure, in order."""
        answers: list[Placed | Failure] = []
        for first in range(0, len(requests), MOST_PLACED):
            part = tuple(requests[first : first + MOST_PLACED])
            answers += self.coordinator.ask(PlaceVariables(part)).answers
        for request, answer in zip(requests, answers, strict=True):
            if isinstance(answer, Placed):
                self.used.note(request.name, answer)
        return answers

    def place(self, request: PlaceVariable) -> Placed:
        """Return the task where a queue or an accumulator is or must be created.

        raises  VariableError when the name has another type; DeviceError without such a job, or when it is on another
                task than `request.on`; TaskLost when the process that held it has left
        """
        placed = self.coordinator.ask(request)
        self.used.note(request.name, placed)
        return placed

    def unplace(self, name: str) -> None:
        """Have the coordinator free a name whose state no longer exists, and forget it here."""
        self.coordinator.ask(Unplace(name))
        self.used.forget(name)
        self.unsaved.forget(name)

    def ask_step(
        self, task: str, message: Callable[[StepId], Request[Answer]], payload: Payload, timeout_s: float
    ) -> Reply[Answer]:
        """Send another task a request that runs as a step there, and wait; cancel that step when this wait fails.

        timeout_s  deadline of the step on that task, in s; this waits longer by the `timeout_s` of this object
        raises  the error that the step ended with; TaskLost when the task left
        """
        self.unsaved.make_again()
        with self.used.explained([task]):
            started, cancel = self._begun(task, message, payload)
            try:
                # The step's own deadline on that task ends it first.
                return started.wait(min(timeout_s + self.timeout_s, threading.TIMEOUT_MAX))
            except BaseException as error:
                cancel(error)
                raise

    def start_step(
        self, task: str, message: Callable[[StepId], Request[Answer]], payload: Payload, on_reply: OnReply[Answer]
    ) -> Cancel:
        """Like `ask_step`, but call `on_reply` in place of waiting; the returned function cancels the step.

        If this raises, `on_reply` may have been called too.
        """

        def explained(reply: Outcome[Reply[Answer]]) -> None:
            try:
                with self.used.explained([task]):
                    if isinstance(reply, BaseException):
                        raise reply
            except BaseException as error:
                reply = error
            on_reply(reply)

        with self.used.explained([task]):
            return self._begun(task, message, payload, explained)[1]

    def _begun(
        self,
        task: str,
        message: Callable[[StepId], Request[Answer]],
        payload: Payload,
        on_reply: OnReply[Answer] | None = None,
    ) -> tuple[PendingReply[Answer], Cancel]:
        """Send a request that runs as a step; return it with the function that cancels the step."""
        begins_parts()
        step = self._server.starter.next_step()
        peer = self._server.peer(task)
        cancel = partial(self._server.starter.cancel, step, [peer])
        try:
            return peer.start(message(step), payload, on_reply), cancel
        except BaseException as error:
            cancel(error)
            raise
