"""Variables, queues and accumulators that live on the tasks of a cluster, as code outside of steps uses them.

The coordinator says which task holds a name, and says the same to every worker; whoever asks first creates it there. A
read or a write is one message and its answer; another op on a variable is a step of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dflow.distributed.answers import expect
from dflow.distributed.cluster_resources import ClusterResources, Tasks, task_of_resource
from dflow.distributed.codec import decode_array, encode_array
from dflow.distributed.messages import CreateVariable, Placed, ReadVariable, Value, VariableCreated, WriteVariable
from dflow.lowering.local import Runner
from dflow.lowering.passes.base import Observer
from dflow.lowering.program import export_program
from dflow.tracing.context import Slot
from dflow.tracing.device import scope_here
from dflow.tracing.errors import DeviceError, TaskLost, VariableError
from dflow.tracing.given_value import Initial
from dflow.tracing.host_resource import HostResource
from dflow.tracing.jax_frontend import make_jaxpr, touches_state
from dflow.tracing.resources import Variable
from dflow.tracing.source import at
from dflow.tracing.task_name import short_task_name
from dflow.tracing.trace import Traced, trace
from dflow.tracing.types import array_type_of


class HomeTasks(Tasks, Protocol):
    """What is needed of a cluster."""

    def place(self, variable: Variable, job: str, near: Variable | None) -> Placed:
        """The task that holds, or shall hold, the variable."""
        ...

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Place, cut and register a traced function; the result runs one step of it."""
        ...


class ClusterHome:
    """The home of variables spread over the tasks of one job; equal for one cluster, where functions run alike."""

    def __init__(self, cluster: HomeTasks, job: str) -> None:
        self._cluster = cluster
        self._job = job
        self._resources = ClusterResources(cluster, job)
        self._ops: dict[tuple[Any, ...], Runner] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterHome) and other._cluster is self._cluster

    def __hash__(self) -> int:
        return hash(id(self._cluster))

    def create(self, variable: Variable, initial: Initial, near: Variable | None) -> Slot:
        if not variable.is_named:
            raise VariableError(
                f"a variable of {variable.type} is created among the parameter servers without a name, by which the "
                f"other processes would find it{at(variable.loc)}\n  give it one, name='...', the same in each process"
            )
        if variable.sharding is not None or (scope_here() is not None and near is None):
            said = "a sharding" if variable.sharding is not None else "a device scope"
            raise DeviceError(
                f"variable {variable.name!r} is created among the parameter servers with {said}, but there the "
                f"coordinator says where a variable lives{at(variable.loc)}\n  leave one of the two out"
            )
        if jnp.issubdtype(variable.dtype, jax.dtypes.extended):
            raise VariableError(
                f"variable {variable.name!r} holds {variable.type}, and keys do not travel between tasks yet"
                f"{at(variable.loc)}\n  hold jax.random.key_data(key), and wrap what you read with wrap_key_data"
            )
        try:
            placed = self._cluster.place(variable, self._job, near)
            self._create_on(placed, variable, initial)
        except (VariableError, DeviceError, TaskLost) as error:
            raise type(error)(f"{error}{at(variable.loc)}") from None
        return Slot(placed.task, variable.name)

    def _create_on(self, placed: Placed, variable: Variable, initial: Initial) -> None:
        dtype, shape = jnp.dtype(variable.dtype).name, variable.shape
        program = callable(initial) and not _reads_state(initial)
        if program:
            payload: Any = export_program(lambda: [initial()], ())
        else:
            value = jnp.asarray(initial() if callable(initial) else initial, variable.dtype)
            payload = encode_array(value)
        message = CreateVariable(variable.name, dtype, shape, program, placed.process)
        answer, _ = self._cluster.request(placed.task, message, payload)
        expect(answer, VariableCreated, short_task_name(placed.task))

    def read(self, variable: Variable) -> jax.Array:
        task = task_of_resource(variable)
        answer, payload = self._cluster.request(task, ReadVariable(variable.key))
        value = expect(answer, Value, short_task_name(task))
        array: jax.Array = jax.device_put(decode_array(value.dtype, value.shape, payload))
        return array

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        rows: jax.Array = self._run_op(variable, "gather", indices)[0]
        return rows

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        if kind != "assign":
            self._run_op(variable, kind, *operands)
            return
        dtype = jnp.dtype(variable.dtype).name
        message = WriteVariable(variable.key, dtype, variable.shape)
        self._cluster.request(task_of_resource(variable), message, encode_array(jnp.asarray(operands[0])))

    def _run_op(self, variable: Variable, method: str, *operands: Any) -> Sequence[Any]:
        """Run one op on the variable as a step of its own; its plan is kept for operands of the same types."""
        key = (variable.key, method, *map(array_type_of, operands))
        step = self._ops.get(key)
        if step is None:
            traced = trace(getattr(variable, method), operands, {})
            step = self._ops[key] = self.runner(traced, check=False, observe=None)
        return step(operands)

    def create_resource(self, resource: HostResource) -> Slot:
        return self._resources.create(resource)

    def use_resource(
        self, resource: HostResource, op: str, operands: Sequence[Any], attributes: Mapping[str, Any]
    ) -> Sequence[jax.Array]:
        return self._resources.use(resource, op, operands, attributes)

    def forget(self, variable: Variable, reason: str, remedy: str) -> None:
        """Let go of the value on its task; whoever uses it afterwards gets a VariableError that says these two."""
        self._resources.forget_state(task_of_resource(variable), variable.key, True, reason, remedy)

    def forget_resource(self, resource: HostResource, reason: str, remedy: str) -> None:
        """Let go of the contents; whoever uses the resource from now on, or waits, gets an error that says these."""
        self._resources.forget(resource, reason, remedy)

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        return self._cluster.runner(traced, check=check, observe=observe)


def _reads_state(initial: Any) -> bool:
    """Whether an initialiser reads variables, so that it cannot run on its own elsewhere."""
    jaxpr, _, _ = make_jaxpr(initial)
    return touches_state(jaxpr.effects)
