"""Queues and accumulators on other tasks, as a worker uses them.

The coordinator decides which task holds each name, the same for every worker; the first worker to ask creates the
resource there. An op outside of traced code is one request and its answer; when the caller stops waiting, so does the
op on the task.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dflow.distributed.client.coordinator_client import ANSWER_S
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.snapshots.snapshot_messages import SaveChanges
from dflow.distributed.task.task_resources import described
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import decode_arrays, encode_arrays
from dflow.distributed.wire.failures import MAX_TEXT
from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.resources import CallResource, CreateResource, FailQueue, GetFed
from dflow.distributed.wire.messages.variables import ForgetState
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.queues.queue_producer import close_op, enqueue_op, failure_text
from dflow.lowering.values.index_set import IndexSet
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.device import scope_here
from dflow.tracing.devices.device_name import short_device_name, split_device_name
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import DeadlineExceeded, DeviceError, DflowError, StepCancelled, TaskLost, VariableError
from dflow.tracing.ir import ops
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.resource_op import FedElement, ResourceOp
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.moments import reach
from dflow.tracing.source import Loc, at
from dflow.tracing.state.context import ValueLocation
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.queues import Queue
from dflow.tracing.state.resources import Variable

LOGGER = logging.getLogger("dflow")

Result = TypeVar("Result")

#: Longest wait for a snapshot with the end of a queue's data, in s. A step may wait for the script, and hold up the
#: snapshot.
CLOSE_WAIT_S = 5.0


class ClusterResources:
    """The queues and accumulators on the tasks of one job; `steps` are those of this task."""

    def __init__(self, requests: OutgoingRequests, steps: ClusterSteps, job: str) -> None:
        self._requests, self.steps, self._job = requests, steps, job

    @property
    def spread(self) -> int:
        """The number of tasks of the job, also of tasks that left: workers that ask at different times agree."""
        roster = self._requests.coordinator.session.roster
        tasks = {*(info.task for info in roster.tasks), *roster.expected}
        return max(1, sum(split_task_name(task)[0] == self._job for task in tasks))

    def create_resource(self, resource: HostResource) -> ValueLocation:
        """Create the resource on its task, or find it there; return its location.

        raises  the resource's error without a name, and when another one has the name; DeviceError when the scope
                names no task, or another task than the one that holds it
        """
        refuse_unnamed(resource, resource.title, resource.error)
        try:
            return self.steps.retried(partial(self._created, resource))
        except (DeviceError, TaskLost) as error:
            raise error.__class__(f"{error}{at(resource.loc)}") from None
        except (VariableError, resource.error) as error:
            raise resource.error(str(error), at=resource.loc) from None

    def _created(self, resource: HostResource) -> ValueLocation:
        return self._created_on(resource, task_in_scope(resource.title, resource.loc))

    def _created_on(self, resource: HostResource, on: str) -> ValueLocation:
        said, epoch = described(resource.type, resource.settings), self._requests.unsaved.epoch
        size_bytes = _size_bytes(resource)
        placed = self._requests.place(
            PlaceVariable(
                resource.name, said, (), size_bytes, self._job, kind=resource.kind, on=on, is_saved=resource.is_saved
            )
        )
        reach("creation", self._requests.task)
        self._requests.ask(
            placed.task,
            CreateResource(resource.name, str(resource.type), resource.settings, placed.process, resource.is_saved),
        )
        if placed.is_saved:
            self._requests.unsaved.note(resource.name, epoch, (self, resource, placed.task), _make_again)
        return ValueLocation(placed.task, resource.name)

    def use_resource(self, resource: HostResource, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        """Run an op now and wait for it; see `Home.use_resource`."""
        task = task_of_resource(resource)
        infos, payload = encode_arrays([jnp.asarray(operand) for operand in operands])

        def message(step: StepId) -> CallResource:
            return CallResource(resource.key, op, step.origin, step.number, infos)

        def use() -> Sequence[jax.Array]:
            try:
                answer, data = self._requests.ask_step(task, message, payload, op.timeout_s)
            finally:
                self.steps.state_changed()
            return [jax.device_put(array) for array in decode_arrays(answer.arrays, data)]

        return self.ended(resource.key, use) if op.name == ops.queue_close.name else use()

    def ended(self, queue: str, end: Callable[[], Result]) -> Result:
        """Return `end()`, which ends a queue's data; do it again if it is lost with a task before a snapshot has it."""

        def end_and_save() -> Result:
            found = end()
            self.save_changes(f"the end of queue {queue!r}", CLOSE_WAIT_S)
            return found

        return self.steps.retried(end_and_save, (TaskLost, StepCancelled))

    def producer(self, queue: Queue, where: str, name: str | None) -> TaskQueueProducer:
        """Return the producing side of a queue; see `StateBackend.producer`."""
        known = f"feed {secrets.token_hex(8)}" if name is None else f"{name} of {self._requests.task}"
        location = task_of_resource(queue), queue.key
        return TaskQueueProducer(self, self._requests, *location, where, known, is_named=name is not None)

    def save_changes(self, what: str, wait_s: float) -> None:
        """Wait until a snapshot has a change of state that no step makes again, at most `wait_s`; `what` names it.

        Returns immediately if no snapshots are made. Raises TaskLost if all tasks return to an earlier snapshot.
        """
        self.steps.state_changed()
        try:
            message = SaveChanges(self._requests.task, wait_s)
            is_saved = self._requests.coordinator.ask(message, wait_s + ANSWER_S).is_saved
        except DeadlineExceeded:  # the coordinator is away: the change is made, and its next process may save it
            is_saved = False
        if not is_saved and wait_s:
            LOGGER.warning("no snapshot has %s after %g s: it is undone if a parameter task is lost now", what, wait_s)

    def forget_resource(self, resource: HostResource, reason: str, remedy: str) -> None:
        """Free the contents of a queue or an accumulator, and its name; see `Home.forget_resource`."""
        self.forget_state(task_of_resource(resource), resource.key, False, reason, remedy)

    def forget_state(self, task: str, key: str, is_variable: bool, reason: str, remedy: str) -> None:
        """Free the state that a task holds under a key, and its name."""
        self._requests.ask(task, ForgetState(key, is_variable, reason, remedy))
        self._requests.unplace(key)


@dataclass(frozen=True)
class TaskQueueProducer:
    """The producer of the queue `key` on another task; `where` is the user's line that feeds it.

    The queue records under `name` which elements were put in; without a name of the user's, until the producer ends.
    """

    resources: ClusterResources
    requests: OutgoingRequests
    task: str
    key: str
    where: str
    name: str
    is_named: bool

    def enqueue(self, number: int, element: Sequence[Any], on_results: OnResults) -> Cancel:
        """Put an element into the queue; see `QueueProducer`. Raises TaskLost when the task has left."""
        infos, payload = encode_arrays([jnp.asarray(array) for array in element])

        def on_reply(reply: Outcome[Reply[Arrays]]) -> None:
            on_results(reply if isinstance(reply, BaseException) else ())

        call = partial(self._call, enqueue_op(self.where, FedElement(self.name, number)), infos)
        return self.requests.start_step(self.task, call, payload, on_reply)

    def fed(self) -> IndexSet:
        """Return the numbers of elements that were put in; see `QueueProducer`."""
        answer = self.resources.steps.retried(lambda: self.requests.ask(self.task, GetFed(self.key, self.name)))
        return IndexSet(range(*pair) for pair in answer.message.ranges)

    def forget(self) -> None:
        """Forget which elements were put in; see `QueueProducer`."""
        if not self.is_named:
            self.requests.ask(self.task, GetFed(self.key, self.name, forget=True))

    def close(self) -> None:
        """Refuse later enqueues; see `QueueProducer`."""
        closing = partial(self._call, close_op(self.where), ())
        self.resources.ended(self.key, lambda: self.requests.ask_step(self.task, closing, b"", 0.0))

    def fail(self, failure: BaseException) -> None:
        """Close the queue with the text of `failure`; see `QueueProducer`."""
        message = FailQueue(self.key, failure_text(failure)[:MAX_TEXT], self.where)
        self.resources.ended(self.key, lambda: self.requests.ask(self.task, message))

    def is_recovered(self, error: BaseException, failures: int) -> bool:
        """See `QueueProducer`."""
        if isinstance(error, StepCancelled):
            failures = 1  # a return to a snapshot has cancelled it, whose number is not limited
        return isinstance(error, TaskLost | StepCancelled) and self.resources.steps.is_recovered(error, failures)

    def _call(self, op: ResourceOp, operands: tuple[ArrayInfo, ...], step: StepId) -> CallResource:
        return CallResource(self.key, op, step.origin, step.number, operands)


def _make_again(freed: Sequence[tuple[ClusterResources, HostResource, str]]) -> None:
    """Create resources that a return to a snapshot has freed, on the same tasks."""
    for resources, resource, task in freed:
        resources._created_on(resource, task)


def refuse_unnamed(resource: HostResource | Variable, what: str, error: type[DflowError]) -> None:
    """Raise the error for a resource that the user gave no name; `what` describes it."""
    if not resource.is_named:
        raise error(
            f"{what} is created among the parameter servers without a name, and other processes find it by its name",
            "give it one, name='...', the same in each process",
            at=resource.loc,
        )


def task_of_resource(resource: HostResource | Variable) -> str:
    """Return the task that holds the resource."""
    assert resource.device is not None
    return resource.device


def task_in_scope(title: str, loc: Loc | None) -> str:
    """Return the task that the scope names for the resource `title`; empty without a scope. Raises DeviceError."""
    scope = scope_here()
    if scope is None:
        return ""
    try:
        task, device = split_device_name(scope)
    except DeviceError:
        task, device = "", scope
    if not task or device:
        raise DeviceError(
            f"{title} is created among the parameter servers under dflow.device({short_device_name(scope)!r})",
            "name a task, such as ps:0, or leave it out, and the coordinator says which",
            at=loc,
        )
    return task


def _size_bytes(resource: HostResource) -> int:
    """Estimate of the bytes it may hold; unknown dimensions count as 1."""
    count = resource.settings.capacity if isinstance(resource.settings, QueueSettings) else 1
    arrays: Sequence[ArrayType] = resource.type.arrays
    return count * sum(int(math.prod(dim or 1 for dim in array.shape) * array.dtype.itemsize) for array in arrays)
