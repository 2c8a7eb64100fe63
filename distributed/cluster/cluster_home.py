"""Variables, queues and accumulators that live on the tasks of a cluster, as code outside of steps uses them.

The coordinator chooses the task that holds a name, the same for every worker; the first worker to ask creates it. A
read or a write is one message and its answer; another op on a variable is a step of its own. Tasks save and restore the
variables that they hold themselves.
"""

from __future__ import annotations

import functools
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp

from dflow.distributed.cluster.cluster_resources import (
    TaskQueueProducer,
    end_queue,
    refuse_unnamed,
    size_bytes_of,
    task_in_scope,
    task_of_resource,
)
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.cluster.shared_values import CAPTURE_NUMBERS, SharedValues
from dflow.distributed.cluster.variable_batch import (
    HostArray,
    PendingVariable,
    create,
    created_together,
    on_host,
    settle,
)
from dflow.distributed.task.checkpoint_messages import (
    CaptureVariables,
    DividedVariable,
    EndCapture,
    EndRestore,
    ReadCheckpoint,
    SavedVariable,
    SaveVariables,
    VariablePart,
)
from dflow.distributed.task.task_resources import described
from dflow.distributed.task.variable_layout import layout_of
from dflow.distributed.transport.base import Reply
from dflow.distributed.wire.codec import KEYS, decode_arrays, dtype_name, encode_array, encode_arrays
from dflow.distributed.wire.messages.message import Answer, Request
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.resources import CallResource, CreateResource
from dflow.distributed.wire.messages.variables import ForgetState, ReadVariables, WriteVariable
from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.programs.initial_ops import InitialOps
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state_backend import NONE, Runner, SavedVariables, WriteCaptured, indices_of
from dflow.tracing.devices.task_name import split_task_name
from dflow.tracing.errors import DeviceError, DflowError, TaskLost, VariableError
from dflow.tracing.ir import ops
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.ir.updates import KINDS
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.moments import reach
from dflow.tracing.primitives.state_primitives import record_update
from dflow.tracing.source import at, caller
from dflow.tracing.state.context import ValueLocation
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.initial_value import Initial, TypedInitial
from dflow.tracing.state.queues import Queue
from dflow.tracing.state.resources import Variable

#: Longest wait for a snapshot with restored values, in s.
RESTORE_WAIT_S = 60.0


class ClusterHome:
    """The home of variables, queues and accumulators on the tasks of one job; `steps` are those of this task.

    Homes with the same connection to a cluster are equal, whatever their job: functions run the same on each.
    """

    shares_names = True
    is_local = False

    def __init__(self, requests: OutgoingRequests, steps: ClusterSteps, job: str) -> None:
        self._requests, self.steps, self._job = requests, steps, job
        self.lower, self.runner = steps.lower, steps.runner
        self._ops: dict[tuple[Any, ...], Runner] = {}
        _, index = split_task_name(requests.task)
        self.is_saver = index == 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterHome) and other._requests is self._requests

    def __hash__(self) -> int:
        return hash(id(self._requests))

    @property
    def spread(self) -> int:
        """Number of tasks of the job, including tasks that left: so workers that ask at different times agree."""
        roster = self._requests.coordinator.session.roster
        tasks = {*(info.task for info in roster.tasks), *roster.expected}
        return max(1, sum(split_task_name(task)[0] == self._job for task in tasks))

    def create(self, variable: Variable, initial: Initial, near: Variable | None) -> None:
        refuse_unnamed(variable, f"a variable of {variable.type}", VariableError)
        if jnp.issubdtype(variable.dtype, jax.dtypes.extended) and dtype_name(variable.dtype) not in KEYS:
            raise VariableError(
                f"variable {variable.name!r} holds {variable.type}, whose keys no other task knows",
                f"use keys of one of the algorithms {', '.join(algorithm for algorithm, _ in KEYS.values())}",
                at=variable.loc,
            )
        layout = layout_of(variable)
        on = task_in_scope(f"variable {variable.name!r}", variable.loc) if near is None else ""
        create(self._requests, PendingVariable(variable, self._job, near, _first_value(variable, initial), on, layout))
        variable.sharding = None  # what is read is on one device

    def prepared(self, initial: Initial, name: str | None) -> Initial:
        is_ready = isinstance(initial, TypedInitial) or not callable(initial)
        return initial if is_ready else InitialOps(initial, name)

    def settle(self, variable: Variable) -> None:
        settle(variable)

    def together(self) -> AbstractContextManager[None]:
        return created_together(self._requests)

    def read(self, variable: Variable) -> jax.Array:
        (value,) = self.read_together([variable])
        return value

    def read_together(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """Return the values, asked of all tasks concurrently; those of one task are of one moment."""
        by_task = _by_task({variable.key: [variable] for variable in variables})
        answers = self._ask({task: ReadVariables(tuple(held)) for task, held in by_task.items()})
        values: dict[str, jax.Array] = {}
        for held, (answer, payload) in zip(by_task.values(), answers, strict=True):
            arrays = decode_arrays(answer.arrays, payload)
            values.update(zip(held, map(jax.device_put, arrays), strict=True))
        return [values[variable.key] for variable in variables]

    @contextmanager
    def at_one_moment(self, variables: Sequence[Variable]) -> Iterator[list[jax.Array]]:
        """Return a context with the values at one moment of all tasks. Steps wait for the capture, not the transfer."""
        shared = SharedValues(self._requests, self.steps, variables)

        def captured() -> list[jax.Array]:
            shared.capture()
            found = shared.read()
            if found is None:
                raise TaskLost("a task has lost the values that it captured", "try it again", at=caller())
            return found[1]

        try:
            yield self.steps.retried(captured)
        finally:
            shared.end()

    @contextmanager
    def capturing(
        self, variables: SavedVariables, narrowings: Mapping[str, Narrowing] = NONE
    ) -> Iterator[WriteCaptured]:
        """Return a context: on entry, all tasks capture the values of one moment between two steps.

        It gives a function that has the tasks write these values. Raises StrategyError within a step of a run.
        """
        capture, by_task = (self._requests.task, next(CAPTURE_NUMBERS)), _by_task(variables)

        def write(folder: Location, paths: Mapping[str, str]) -> None:
            divided = {
                name: DividedVariable(name, paths[name], first.part.whole, tuple(map(_part_on_task, held)))
                for name, held in variables.items()
                if (first := held[0]).part is not None and len(held) > 1
            }
            messages = {}
            for task, held in by_task.items():
                saved = (
                    SavedVariable(one.key, name, paths[name], narrowings.get(name))
                    for name, [one, *_] in held.items()
                    if name not in divided
                )
                parts = (divided[name] for name in held if name in divided)
                messages[task] = SaveVariables(*capture, str(folder), tuple(saved), tuple(parts))
            self._ask(messages)

        def release() -> None:
            with suppress(DflowError):  # a task that is gone has released the values too
                self._ask(dict.fromkeys(by_task, EndCapture(*capture)))

        with ExitStack() as releasing:
            releasing.callback(release)
            captures = {
                task: CaptureVariables(
                    *capture, tuple(dict.fromkeys(one.key for each in held.values() for one in each))
                )
                for task, held in by_task.items()
            }
            self.steps.while_paused(lambda: self._ask(captures), "a save")
            yield write

    @contextmanager
    def restoring(self, files: SavedArrays, variables: SavedVariables) -> Iterator[Callable[[], None]]:
        """Have each task read its arrays on entry; the context gives a function that has all tasks set their variables.

        The function does that between two steps, and waits up to `RESTORE_WAIT_S` for a snapshot with the values. It
        raises StrategyError within a step of a run.
        """
        restore, messages = (self._requests.task, next(CAPTURE_NUMBERS)), {}
        for task, held in _by_task(variables).items():
            whole = {name for name in held if len(variables[name]) == 1}
            keys = {name: held[name][0].key for name in whole}
            parts = {name: tuple(map(_part_on_task, held[name])) for name in held if name not in whole}
            axes = {name: order for name, order in files.axes.items() if name in held}
            messages[task] = ReadCheckpoint(*restore, str(files.path), files.id, keys, parts, axes)

        def release() -> None:
            with suppress(DflowError):  # a task that is gone has released the values too
                self._ask(dict.fromkeys(messages, EndRestore(*restore, is_set=False)))

        def set_all() -> None:
            releasing.pop_all()
            ends = dict.fromkeys(messages, EndRestore(*restore, is_set=True))
            try:
                self.steps.while_paused(lambda: self._ask(ends), "a restore")
            except BaseException:
                with suppress(DflowError):
                    self.steps.save_changes("", 0.0)  # some tasks may have set their variables
                raise
            self.steps.save_changes(f"what was restored from {files.path}", RESTORE_WAIT_S)

        with ExitStack() as releasing:
            releasing.callback(release)
            self._ask(messages)
            yield set_all

    def _ask(self, messages: Mapping[str, Request[Answer]]) -> list[Reply[Answer]]:
        """Return the answers of tasks, asked concurrently. Raises their first error, with the user's line."""
        try:
            return self._requests.ask_each(messages)
        except DflowError as error:
            named = _with_line(error)
            if named is error:
                raise
            raise named from None

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        rows: jax.Array = self._run_op(variable, "gather", variable.gather, indices)[0]
        return rows

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        if KINDS[kind].reads:
            self._run_op(variable, kind, functools.partial(record_update, variable, kind), *operands)
            return
        message = WriteVariable(variable.key, dtype_name(variable.dtype), variable.shape)
        try:
            self._requests.ask(task_of_resource(variable), message, encode_array(jnp.asarray(operands[0])))
        finally:
            self.steps.state_changed()

    def _run_op(self, variable: Variable, name: str, op: Callable[..., Any], *operands: Any) -> Sequence[Any]:
        """Run one op on the variable as a separate step; the plan is kept for later operands of the same types."""
        key = (variable.key, name, *map(array_type_of, operands))
        step = self._ops.get(key)
        if step is None:
            traced = trace(op, operands, {})
            step = self._ops[key] = self.runner(traced, check=False, observe=None)
        return step(operands)

    def forget(self, variable: Variable, reason: str, remedy: str) -> None:
        """Free the value on its task, and its name. Later use of the variable raises VariableError with both texts."""
        self.forget_state(task_of_resource(variable), variable.key, True, reason, remedy)

    # Queues and accumulators. An op outside of traced code is one request; when its caller stops waiting, so does it.

    def create_resource(self, resource: HostResource) -> ValueLocation:
        """Create the resource on its task, or find it there; return its location.

        raises  the resource's error without a name, and when another one has the name; DeviceError when the scope
                names no task, or another task than the one that holds it
        """
        refuse_unnamed(resource, resource.title, resource.error)
        try:
            return self.steps.retried(lambda: self._create_on(resource, task_in_scope(resource.title, resource.loc)))
        except (DeviceError, TaskLost) as error:
            raise error.__class__(f"{error}{at(resource.loc)}") from None
        except (VariableError, resource.error) as error:
            raise resource.error(str(error), at=resource.loc) from None

    def _create_on(self, resource: HostResource, on: str) -> ValueLocation:
        said, epoch = described(resource.type, resource.settings), self._requests.unsaved.epoch
        size_bytes = size_bytes_of(resource)
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
            self._requests.unsaved.note(resource.name, epoch, (self, resource, placed.task), _create_again)
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

        return end_queue(self.steps, resource.key, use) if op.name == ops.queue_close.name else use()

    def producer(self, queue: Queue, where: str, name: str | None) -> TaskQueueProducer:
        """Return the producing side of a queue; see `StateBackend.producer`."""
        known = f"feed {secrets.token_hex(8)}" if name is None else f"{name} of {self._requests.task}"
        location = task_of_resource(queue), queue.key
        return TaskQueueProducer(self.steps, self._requests, *location, where, known, is_named=name is not None)

    def forget_resource(self, resource: HostResource, reason: str, remedy: str) -> None:
        """Free the contents of a queue or an accumulator, and its name; see `Home.forget_resource`."""
        self.forget_state(task_of_resource(resource), resource.key, False, reason, remedy)

    def forget_state(self, task: str, key: str, is_variable: bool, reason: str, remedy: str) -> None:
        """Free the state that a task holds under a key, and the key as a name of the cluster.

        The name is free also if the task has lost the state, which raises TaskLost.
        """
        try:
            self._requests.ask(task, ForgetState(key, is_variable, reason, remedy))
        except TaskLost:
            self._requests.unplace(key)
            raise
        self._requests.unplace(key)


def _create_again(freed: Sequence[tuple[ClusterHome, HostResource, str]]) -> None:
    """Create resources that a return to a snapshot has freed, on the same tasks."""
    for home, resource, task in freed:
        home._create_on(resource, task)


def _with_line(error: DflowError) -> DflowError:
    """Return an error of a task with the user's line between its fact and its remedy."""
    line, (fact, newline, remedy) = at(caller()), str(error).partition("\n")
    return error if line in str(error) else type(error)(f"{fact}{line}{newline}{remedy}")


def _by_task(variables: SavedVariables) -> dict[str, dict[str, list[Variable]]]:
    found: dict[str, dict[str, list[Variable]]] = defaultdict(lambda: defaultdict(list))
    for name, held in variables.items():
        for variable in held:
            found[task_of_resource(variable)][name].append(variable)
    return found


def _part_on_task(variable: Variable) -> VariablePart:
    return VariablePart(task_of_resource(variable), variable.key, indices_of(variable))


def _first_value(variable: Variable, initial: Initial) -> TypedInitial | HostArray:
    """Return a typed initialiser that reads no variables, to run later; else the initial value, computed now."""
    if isinstance(initial, TypedInitial) and not (isinstance(initial, InitialOps) and initial.reads_state):
        return initial
    return on_host(jnp.array(initial() if callable(initial) else initial, variable.dtype))
