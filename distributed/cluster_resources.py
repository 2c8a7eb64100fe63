"""Queues and accumulators on other tasks, as a worker asks for them.

The coordinator says which task holds one of a name, and says the same to every worker; whoever asks first creates it.
An op outside of traced code is one message and its answer, and its wait is given up on the task too when it is given up
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dflow.distributed.answers import expect
from dflow.distributed.array_lists import decode_arrays, encode_arrays
from dflow.distributed.messages import (
    AccumulatorInfo,
    AnyMessage,
    Arrays,
    CallResource,
    CreateResource,
    ForgetState,
    Placed,
    QueueInfo,
)
from dflow.distributed.task_resources import described
from dflow.distributed.transport.base import Reply
from dflow.lowering.channel import StepId
from dflow.tracing.context import Slot
from dflow.tracing.device import scope_here
from dflow.tracing.device_name import short_device_name, split_device_name
from dflow.tracing.errors import DeviceError, TaskLost, VariableError
from dflow.tracing.host_resource import HostResource
from dflow.tracing.queue_settings import DEFAULT_TIMEOUT_S
from dflow.tracing.resources import Variable
from dflow.tracing.source import at, caller
from dflow.tracing.task_name import short_task_name
from dflow.tracing.types import AccumulatorType, HostType, RowsType


class Tasks(Protocol):
    """What is needed of a cluster."""

    def place_resource(self, name: str, kind: str, said: str, size_bytes: int, *, job: str, on: str) -> Placed:
        """The task that holds, or shall hold, the resource `name`, which is what is `said`."""
        ...

    def unplace(self, name: str) -> None:
        """Free a name whose state is gone."""
        ...

    def request(self, task: str, message: AnyMessage, payload: Any = b"") -> Reply:
        """Ask another task, and wait for its answer."""
        ...

    def request_step(self, task: str, message: Callable[[StepId], AnyMessage], payload: Any, timeout_s: float) -> Reply:
        """Ask another task for what is a step there, and wait for its answer."""
        ...


class ClusterResources:
    """The queues and accumulators on the tasks of one job."""

    def __init__(self, tasks: Tasks, job: str) -> None:
        self._tasks, self._job = tasks, job

    def create(self, resource: HostResource) -> Slot:
        """Create it on its task, or find it there; where it is.

        raises  the resource's error without a name, and when another is there under the name; DeviceError when the
                scope names no task, or another than where it is
        """
        if not resource.is_named:
            raise resource.error(
                f"{resource.title} is created among the parameter servers without a name, by which the other processes "
                f"would find it{at(resource.loc)}\n  give it one, name='...', the same in each process"
            )
        type: HostType = resource.type
        settings = _settings(resource)
        said = described(type, settings)
        try:
            placed = self._tasks.place_resource(
                resource.name, resource.kind, said, _size_bytes(type, settings), job=self._job, on=_stated(resource)
            )
            self._tasks.request(placed.task, CreateResource(resource.name, str(type), settings, placed.process))
        except DeviceError as error:
            raise DeviceError(f"{error}{at(resource.loc)}") from None
        except TaskLost as error:
            raise TaskLost(f"{error}{at(resource.loc)}") from None
        except (VariableError, resource.error) as error:
            raise resource.error(f"{error}{at(resource.loc)}") from None
        return Slot(placed.task, resource.name)

    def use(
        self, resource: HostResource, op: str, operands: Sequence[Any], attributes: Mapping[str, Any]
    ) -> Sequence[jax.Array]:
        """Do an op now, waiting for it; see `Home.use_resource`."""
        task = task_of_resource(resource)
        infos, payload = encode_arrays([jnp.asarray(operand) for operand in operands])
        where, key = at(caller()), resource.key

        def message(step: StepId) -> CallResource:
            return CallResource(key, op, step.origin, step.number, infos, line=where, **attributes)

        waits_s = attributes.get("timeout_s", DEFAULT_TIMEOUT_S)
        answer, data = self._tasks.request_step(task, message, payload, waits_s)
        arrays = expect(answer, Arrays, short_task_name(task)).arrays
        return [jax.device_put(array) for array in decode_arrays(arrays, data)]

    def forget(self, resource: HostResource, reason: str, remedy: str) -> None:
        """Let go of what it holds; the name is free."""
        self.forget_state(task_of_resource(resource), resource.key, False, reason, remedy)

    def forget_state(self, task: str, key: str, is_variable: bool, reason: str, remedy: str) -> None:
        """Let go of what a task holds under a key; the name is free."""
        self._tasks.request(task, ForgetState(key, is_variable, reason, remedy))
        self._tasks.unplace(key)


def task_of_resource(resource: HostResource | Variable) -> str:
    """The task that holds it."""
    assert resource.device is not None
    return resource.device


def _stated(resource: HostResource) -> str:
    """The task that the scope names; empty without a scope."""
    scope = scope_here()
    if scope is None:
        return ""
    try:
        task, device = split_device_name(scope)
    except DeviceError:
        task, device = "", scope
    if not task or device:
        raise DeviceError(
            f"{resource.title} is created among the parameter servers under dflow.device({short_device_name(scope)!r})"
            f"{at(resource.loc)}\n  name a task, such as ps:0, or leave it out, and the coordinator says which"
        )
    return task


def _settings(resource: HostResource) -> QueueInfo | AccumulatorInfo:
    settings = resource.settings
    if isinstance(resource.type, AccumulatorType):
        return AccumulatorInfo(settings.reduction.value, settings.limit or 0)
    return QueueInfo(settings.kind.value, int(settings.capacity), settings.min_after_dequeue, str(settings.seed))


def _size_bytes(type: HostType, settings: QueueInfo | AccumulatorInfo) -> int:
    """About how much it may come to hold."""
    arrays = [array for part in type.components for array in (part.arrays() if isinstance(part, RowsType) else (part,))]
    count: int = settings.capacity if isinstance(settings, QueueInfo) else 1
    return count * sum(int(math.prod(dim or 1 for dim in array.shape) * array.dtype.itemsize) for array in arrays)
