"""State and steps of this process alone: no cluster, no threads, and for most functions one XLA call a step."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from dflow.lowering.files.array_files import divided, write_parts
from dflow.lowering.files.narrowed_weights import narrowed
from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import whole_here
from dflow.lowering.passes.base import Observer, run_passes
from dflow.lowering.passes.choose import BUDGET_S
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.placement.measure import Meter
from dflow.lowering.queues.held_resources import make_resource
from dflow.lowering.queues.pending_operations import wait
from dflow.lowering.queues.queue_producer import HeldQueueProducer
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.store import Store
from dflow.lowering.state_backend import NONE, Runner, SavedVariables, WriteCaptured, indices_of
from dflow.lowering.steps.local_step import LocalStep, single_call
from dflow.lowering.steps.lowered import literals, make_plans
from dflow.lowering.steps.program_watch import program_watch
from dflow.lowering.steps.spread_variables import refuse_spread
from dflow.lowering.values.devices import device_named, devices_in_order, local_name
from dflow.lowering.values.host_values import on_device
from dflow.lowering.values.kept_shardings import is_spread
from dflow.lowering.values.variable_key import key_of
from dflow.tracing.devices.device import choices_in, is_within_task, scope_here
from dflow.tracing.devices.device_name import (
    device_name,
    is_on_task,
    no_such_job,
    short_device_name,
    split_device_name,
    task_of,
)
from dflow.tracing.errors import DeviceError, InternalError, VariableError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.row_marks import SUFFIX
from dflow.tracing.jax_frontend import jit_disabled
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.source import at
from dflow.tracing.state.context import ValueLocation, spread_here
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.initial_value import Initial
from dflow.tracing.state.queues import Queue
from dflow.tracing.state.resources import Variable

#: Added in an interactive session: its last error, and `Out` of IPython, hold the values that they show.
_KEPT = "\n  the last error may keep it too: run this line again; so may a notebook's Out: %xdel its name, not del"

#: What the devices of this process cost; they are measured when a function first asks for a choice among them.
METER = Meter()


class LocalHome:
    """The home of variables that live in this process. A new variable takes over an old one's name.

    `placement_s` is the time limit of pricing and search for a function whose devices dflow chooses, in s.
    """

    shares_names = False
    is_local = True
    is_saver = True
    spread = 1

    def __init__(self, placement_s: float = BUDGET_S) -> None:
        self.store = Store()
        self.placement_s = placement_s
        self._named: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()

    def create(self, variable: Variable, initial: Initial, near: Variable | None) -> ValueLocation:
        if (refusal := self._clash(variable)) is not None:
            raise VariableError(refusal)
        is_marks = near is not None and variable.name == near.name + SUFFIX
        key = near.key + SUFFIX if near is not None and is_marks else key_of(variable.name, variable.serial)
        make = initial if callable(initial) else lambda: initial
        limit = None
        if variable.memory_limit is not None:
            owner, most_bytes = variable.memory_limit
            limit = key if owner is variable else owner.key, most_bytes
        memory = self.store.memory_for(key, limit)
        self.store.create(key, variable.type, make, self._sharding(variable, near), memory)
        self._named[variable.name] = variable
        weakref.finalize(variable, self.store.table.drop, key).atexit = False
        sharding = self.store.sharding(key)
        if sharding is None or is_spread(sharding):
            return ValueLocation(None, key, sharding)
        return ValueLocation(device_name("", local_name(next(iter(sharding.device_set)))), key)

    def prepared(self, initial: Initial, name: str | None) -> Initial:
        return initial

    def settle(self, variable: Variable) -> None:
        raise InternalError(f"variable {variable.name!r} could not be created, and is used")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _sharding(self, variable: Variable, near: Variable | None) -> Sharding | None:
        """Return where a new variable is to live: as its sharding says, beside another, or as the scope says."""
        scope, spread = scope_here(), spread_here()
        is_beside = near is not None and self._is_alike(near, variable)
        is_given = near is None or (variable.sharding is None and not is_beside)
        if spread is not None and scope is None and is_given:
            return spread(variable)
        if variable.sharding is not None:
            if near is not None or scope is not None:
                other = "near" if near is not None else "a device scope"
                raise DeviceError(
                    f"variable {variable.name!r} has a sharding and {other}, which both say where it lives",
                    "leave one of the two out",
                    at=variable.loc,
                )
            assert isinstance(variable.sharding, Sharding)
            return variable.sharding
        if near is not None:
            return self.store.sharding(near.key) if is_beside else None
        if scope is None or not is_within_task(scope):
            if choices_in(scope) is not None:
                return None
            if is_on_task(scope) and scope != ALONE:
                if expected := no_such_job(task_of(scope or ""), ()):
                    raise DeviceError(f"variable {variable.name!r}: {expected}", "correct the name", at=variable.loc)
                raise DeviceError(
                    f"variable {variable.name!r} is made under dflow.device({short_device_name(scope or '')!r}), but "
                    f"in this process",
                    "variables on tasks are made within cluster.parameter_servers(), which spreads them",
                    at=variable.loc,
                )
            return None
        _, local = split_device_name(scope)
        return SingleDeviceSharding(device_named(local)) if local else None

    def _is_alike(self, near: Variable, variable: Variable) -> bool:
        """Whether a variable beside another one can have its sharding."""
        return not is_spread(self.store.sharding(near.key)) or near.shape == variable.shape

    def _clash(self, variable: Variable) -> str | None:
        """Return the text of an error if a living variable has the same name and another type.

        A text: the frames of an error, which a notebook keeps, would keep the other variable alive.
        """
        earlier = self._named.get(variable.name)
        if earlier is not None and earlier.type != variable.type:
            # Functions and what they close over are often garbage in a cycle by now.
            del earlier
            gc.collect()
            earlier = self._named.get(variable.name)
        if earlier is None or earlier.type == variable.type:
            return None
        first = f"\n  it was first made{at(earlier.loc)}" if earlier.loc is not None else ""
        return (
            f"variable {variable.name!r} holds {earlier.type}, but is created again with {variable.type}"
            f"{at(variable.loc)}{first}\n"
            "  give one of them another name or `prefix=`, or delete the first, and the functions and optimizers that "
            f"use it{_KEPT if hasattr(sys, 'ps1') else ''}"
        )

    def read(self, variable: Variable) -> jax.Array:
        return _for_eager_ops(self.store.read(variable.key))

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        return _for_eager_ops(self.store.gather(variable.key, indices))

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        if (watch := program_watch()) is not None:
            watch.written(variable, kind, operands)
        self.store.update(variable.key, kind, *operands)

    def read_together(self, variables: Sequence[Variable]) -> list[jax.Array]:
        values = self.store.read_together(variable.key for variable in variables)
        return [values[variable.key] for variable in variables]

    def at_one_moment(self, variables: Sequence[Variable]) -> AbstractContextManager[list[jax.Array]]:
        return nullcontext(self.read_together(variables))

    @contextmanager
    def capturing(
        self, variables: SavedVariables, narrowings: Mapping[str, Narrowing] = NONE
    ) -> Iterator[WriteCaptured]:
        values = self.store.read_together(one.key for each in variables.values() for one in each)

        def array(name: str, held: Sequence[Variable]) -> Any:
            first, parts = held[0], [values[variable.key] for variable in held]
            if name in narrowings:
                return narrowed(name, np.asarray(whole_here(parts[0])), narrowings[name])
            if len(parts) == 1 or first.part is None:
                return parts[0]
            whole = replace(first.type.strong, shape=first.part.whole)
            return divided(whole, [*map(indices_of, held)], [*map(whole_here, parts)])

        def write(folder: Location, paths: Mapping[str, str]) -> None:
            write_parts(folder, {name: array(name, held) for name, held in variables.items()}, paths)

        yield write

    @contextmanager
    def restoring(self, files: SavedArrays, variables: SavedVariables) -> Iterator[Callable[[], None]]:
        keys = {name: held[0].key for name, held in variables.items() if len(held) == 1}
        divided = [(name, one) for name, held in variables.items() if len(held) > 1 for one in held]
        values = self.store.read_saved(files, keys, {one.key: (name, indices_of(one)) for name, one in divided})
        yield lambda: self.store.replace(values)

    def forget(self, variable: Variable, reason: str, remedy: str) -> None:
        self.store.table.forget(variable.key, reason, remedy)
        if self._named.get(variable.name) is variable:
            del self._named[variable.name]  # its name may be used again, with another type

    def create_resource(self, resource: HostResource) -> ValueLocation:
        key = f"{resource.name}#{resource.kind}{resource.serial}"
        self.store.resources[key] = make_resource(resource.name, resource.type, resource.settings)
        weakref.finalize(resource, self.store.resources.pop, key, None).atexit = False
        return ValueLocation(None, key)

    def use_resource(self, resource: HostResource, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        held = self.store.resource(resource.key)
        return on_device(wait(lambda done: held.start(op, operands, done)))

    def producer(self, queue: Queue, where: str, name: str | None) -> HeldQueueProducer:
        held = self.store.resource(queue.key)
        assert isinstance(held, HeldQueue)
        return HeldQueueProducer(held, where, name)

    def forget_resource(self, resource: HostResource, reason: str, remedy: str) -> None:
        self.store.resource(resource.key).forget(reason, remedy)

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        runner, _ = self.lower(traced, check=check, observe=observe).lower().compile(None)
        return runner

    def lower(self, traced: Traced, *, check: bool, observe: Observer | None) -> LocalStep:
        passes = pipeline(devices=devices_in_order(), costs=METER, budget_s=self.placement_s)
        graph = run_passes(traced.graph, passes, check=check, observe=observe)
        refuse_spread(graph, traced, self.store)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        by_task = make_plans(graph, ALONE, keys)
        if len(by_task) > 1:
            raise InternalError(f"a local function was placed on {sorted(by_task)}")
        lowered, kept = by_task[ALONE], replace(traced, graph=Graph((), (), ()), variables=())
        return LocalStep(kept, lowered, literals(graph), self.store, single_call(lowered, traced.variables))


def _for_eager_ops(value: jax.Array) -> jax.Array:
    """Return the value for ops outside of steps; under `jax.disable_jit`, moved to the first device.

    Under `jax.disable_jit` all ops run one by one, and JAX does not combine arrays committed to different devices.
    """
    if not jit_disabled() or not value.committed or len(value.sharding.device_set) > 1:
        return value
    first: jax.Array = jax.device_put(value, jax.local_devices()[0])
    return first
