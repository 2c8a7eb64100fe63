"""Queues and accumulators on other tasks: the producing side of a queue, and checks before one is made."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax.numpy as jnp

from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import encode_arrays
from dflow.distributed.wire.failures import MAX_TEXT
from dflow.distributed.wire.messages.basic import ArrayInfo, Arrays
from dflow.distributed.wire.messages.resources import CallResource, FailQueue, GetFed
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.queues.queue_producer import close_op, enqueue_op, failure_text
from dflow.lowering.values.index_set import IndexSet
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.device import scope_here
from dflow.tracing.devices.device_name import short_device_name, split_device_name
from dflow.tracing.errors import DeviceError, DflowError, StepCancelled, TaskLost
from dflow.tracing.ir.queue_settings import QueueSettings
from dflow.tracing.ir.resource_op import FedElement, ResourceOp
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.source import Loc
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.resources import Variable

LOGGER = logging.getLogger("dflow")

Result = TypeVar("Result")

#: Longest wait for a snapshot with the end of a queue's data, in s. A step may wait for the script, and hold up the
#: snapshot.
CLOSE_WAIT_S = 5.0


@dataclass(frozen=True)
class TaskQueueProducer:
    """The producer of the queue `key` on another task; `where` is the user's line that feeds it.

    The queue records under `name` which elements were put in; without a name of the user's, until the producer ends.
    """

    steps: ClusterSteps
    requests: OutgoingRequests
    task: str
    key: str
    where: str
    name: str
    is_named: bool

    def enqueue(self, number: int, element: Sequence[Any], on_results: OnResults) -> Cancel:
        """Start to put an element into the queue; see `QueueProducer`. Raises TaskLost when the task has left."""
        infos, payload = encode_arrays([jnp.asarray(array) for array in element])

        def on_reply(reply: Outcome[Reply[Arrays]]) -> None:
            on_results(reply if isinstance(reply, BaseException) else ())

        call = partial(self._call, enqueue_op(self.where, FedElement(self.name, number)), infos)
        return self.requests.start_step(self.task, call, payload, on_reply)

    def fed(self) -> IndexSet:
        """Return the numbers of elements that were put in; see `QueueProducer`."""
        answer = self.steps.retried(lambda: self.requests.ask(self.task, GetFed(self.key, self.name)))
        return IndexSet.of(answer.message.ranges)

    def forget(self) -> None:
        """Have the task forget which elements were put in, unless the user named the producer; see `QueueProducer`."""
        if not self.is_named:
            self.requests.ask(self.task, GetFed(self.key, self.name, forget=True))

    def close(self) -> None:
        """Refuse later enqueues, and wait for a snapshot with that; see `QueueProducer` and `ended`."""
        closing = partial(self._call, close_op(self.where), ())
        end_queue(self.steps, self.key, lambda: self.requests.ask_step(self.task, closing, b"", 0.0))

    def fail(self, failure: BaseException) -> None:
        """Close the queue with the text of `failure`, and wait like `close`; see `QueueProducer`."""
        message = FailQueue(self.key, failure_text(failure)[:MAX_TEXT], self.where)
        end_queue(self.steps, self.key, lambda: self.requests.ask(self.task, message))

    def is_recovered(self, error: BaseException, failures: int) -> bool:
        """See `QueueProducer`."""
        if isinstance(error, StepCancelled):
            failures = 1  # a return to a snapshot has cancelled it, whose number is not limited
        return isinstance(error, TaskLost | StepCancelled) and self.steps.is_recovered(error, failures)

    def _call(self, op: ResourceOp, operands: tuple[ArrayInfo, ...], step: StepId) -> CallResource:
        return CallResource(self.key, op, step.origin, step.number, operands)


def end_queue(steps: ClusterSteps, queue: str, end: Callable[[], Result]) -> Result:
    """Return `end()`, which ends a queue's data, after a wait for a snapshot with that, at most `CLOSE_WAIT_S`.

    Calls `end` again if a return to a snapshot has undone it.
    """

    def end_and_save() -> Result:
        found = end()
        steps.save_changes(f"the end of queue {queue!r}", CLOSE_WAIT_S)
        return found

    return steps.retried(end_and_save, (TaskLost, StepCancelled))


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
    """Return the task that the `dflow.device` scope names for the resource `title`; empty without a scope.

    Raises DeviceError if the scope names no task, or a device of one.
    """
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


def size_bytes_of(resource: HostResource) -> int:
    """Return an estimate of the bytes that the resource may hold; unknown dimensions count as 1."""
    count = resource.settings.capacity if isinstance(resource.settings, QueueSettings) else 1
    arrays: Sequence[ArrayType] = resource.type.arrays
    return count * sum(int(math.prod(dim or 1 for dim in array.shape) * array.dtype.itemsize) for array in arrays)
