"""State and steps of this process alone: no cluster, no threads, and for most functions one XLA call a step."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, Sharding, SingleDeviceSharding

from dflow.lowering.files.array_files import ArrayFiles
from dflow.lowering.passes.base import Observer, run_passes
from dflow.lowering.passes.choose import BUDGET_S
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.placement.measure import Meter
from dflow.lowering.programs.program import LoweredProgram, Program, lower_program
from dflow.lowering.queues.channel import Deliver, Sent, StepId
from dflow.lowering.queues.held_resources import make_resource
from dflow.lowering.queues.pending_operations import wait
from dflow.lowering.state.state_files import read_variables, write_variables
from dflow.lowering.state.store import Store
from dflow.lowering.state_backend import Runner
from dflow.lowering.steps.compile import Compiled, TaskPlan, make_plans
from dflow.lowering.steps.dependency_index import Schedule, takes
from dflow.lowering.steps.execute import Execution, Fetches
from dflow.lowering.steps.plan import Call, Plan, calls_in
from dflow.lowering.values.devices import device_named, devices_in_order, local_name
from dflow.lowering.values.host_values import on_device
from dflow.lowering.values.kept_shardings import is_spread, kept_shardings
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.devices.device import WITH_STATE, choices_in, is_within_task, scope_here
from dflow.tracing.devices.device_name import (
    device_name,
    is_on_task,
    no_such_job,
    short_device_name,
    split_device_name,
    task_of,
)
from dflow.tracing.errors import DeviceError, InternalError, VariableError
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.jax_frontend import jit_disabled
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.source import at, caller
from dflow.tracing.state.context import Slot
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.initial_value import Initial
from dflow.tracing.state.resources import Variable

#: What the devices of this process cost; they are measured when a function first asks for a choice among them.
METER = Meter()


class LocalHome:
    """The home of variables that live in this process. A new variable takes over an old one's name.

    `placement_s` is how long pricing and search may take for a function whose devices are chosen.
    """

    shares_names = False

    def __init__(self, placement_s: float = BUDGET_S) -> None:
        self.store = Store()
        self.placement_s = placement_s
        self._named: weakref.WeakValueDictionary[str, Variable] = weakref.WeakValueDictionary()

    def create(self, variable: Variable, initial: Initial, near: Variable | None) -> Slot:
        earlier = self._clashing(variable)
        if earlier is not None:
            raise VariableError(
                f"variable {variable.name!r} holds {earlier.type}, but is created again with {variable.type}"
                f"{at(variable.loc)}\n  it was first made{at(earlier.loc)}\n"
                "  give one of them another name, or delete the first"
            )
        key = f"{variable.name}#{variable.serial}"
        make = initial if callable(initial) else lambda: initial
        self.store.create(key, variable.type, make, self._place(variable, near))
        self._named[variable.name] = variable
        weakref.finalize(variable, self.store.drop, key).atexit = False
        place = self.store.place(key)
        return Slot(self._device(key), key, place if is_spread(place) else None)

    def prepared(self, initial: Initial, name: str | None) -> Initial:
        return initial

    def settle(self, variable: Variable) -> None:
        raise InternalError(f"variable {variable.name!r} could not be created, and is used")

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _place(self, variable: Variable, near: Variable | None) -> Sharding | None:
        """Where a new variable is to live: as its sharding says, beside another, or as the scope says."""
        scope = scope_here()
        if variable.sharding is not None:
            self._check_sharding(variable, scope, near)
            return variable.sharding
        if near is not None:
            place = self.store.place(near.key)
            is_alike = not is_spread(place) or near.shape == variable.shape
            return place if is_alike else None
        if scope is None or not is_within_task(scope):
            if choices_in(scope) is not None:
                return None
            if is_on_task(scope) and scope != ALONE:
                if expected := no_such_job(task_of(scope or ""), ()):
                    raise DeviceError(
                        f"variable {variable.name!r}: {expected}",
                        "correct the name",
                        at=variable.loc,
                    )
                raise DeviceError(
                    f"variable {variable.name!r} is made under dflow.device({short_device_name(scope or '')!r}), but "
                    f"in this process",
                    "variables on tasks are made within cluster.parameter_servers(), which spreads them",
                    at=variable.loc,
                )
            return None
        _, local = split_device_name(scope)
        return SingleDeviceSharding(device_named(local)) if local else None

    def _check_sharding(self, variable: Variable, scope: str | None, near: Variable | None) -> None:
        said = "near" if near is not None else "a device scope" if scope is not None else None
        if said is not None:
            raise DeviceError(
                f"variable {variable.name!r} has a sharding and {said}, which both say where it lives",
                "leave one of the two out",
                at=variable.loc,
            )

    def _device(self, key: str) -> str | None:
        """The name of the one device that a value is to stay on."""
        place = self.store.place(key)
        if place is None or is_spread(place):
            return None
        return device_name("", local_name(next(iter(place.device_set))))

    def _clashing(self, variable: Variable) -> Variable | None:
        """A living variable of the same name and another type."""
        earlier = self._named.get(variable.name)
        if earlier is not None and earlier.type != variable.type:
            # Functions and what they close over are often garbage in a cycle by now.
            del earlier
            gc.collect()
            earlier = self._named.get(variable.name)
        return earlier if earlier is not None and earlier.type != variable.type else None

    def read(self, variable: Variable) -> jax.Array:
        return _for_ops_at_once(self.store.read(variable.key))

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        return _for_ops_at_once(self.store.gather(variable.key, indices))

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        self.store.update(variable.key, kind, *operands)

    def snapshot(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """Return the values at one moment between two steps."""
        values = self.store.snapshot(variable.key for variable in variables)
        return [values[variable.key] for variable in variables]

    def save(self, folder: Path, variables: Mapping[str, Variable], places: Mapping[str, str]) -> None:
        """Write the values at one moment between two steps."""
        write_variables(self.store, folder, _keys(variables), places)

    @contextmanager
    def restoring(self, files: ArrayFiles, variables: Mapping[str, Variable]) -> Iterator[Callable[[], None]]:
        """Read and check the arrays; the function given sets all variables at one moment."""
        values = read_variables(self.store, files, _keys(variables))
        yield lambda: self.store.replace(values)

    def forget(self, variable: Variable, reason: str, remedy: str) -> None:
        """Let go of the value; whoever uses the variable afterwards gets a VariableError that says these two."""
        self.store.forget(variable.key, reason, remedy)

    def create_resource(self, resource: HostResource) -> Slot:
        key = f"{resource.name}#{resource.kind}{resource.serial}"
        self.store.create_resource(key, make_resource(resource.name, resource.type, resource.settings))
        weakref.finalize(resource, self.store.drop_resource, key).atexit = False
        return Slot(None, key)

    def use_resource(self, resource: HostResource, op: ResourceOp, operands: Sequence[Any]) -> Sequence[jax.Array]:
        held = self.store.resource(resource.key)
        return on_device(wait(lambda done: held.start(op, operands, done)))

    def forget_resource(self, resource: HostResource, reason: str, remedy: str) -> None:
        """Let go of the contents; whoever uses the resource from now on, or waits, gets an error that says these."""
        self.store.resource(resource.key).forget(reason, remedy)

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Lower and compile a traced function whose variables all live here."""
        return self.plan(traced, check=check, observe=observe).lower().compile().run

    def plan(self, traced: Traced, *, check: bool, observe: Observer | None) -> PlannedStep:
        """Take a traced function, whose variables all live here, through the passes."""
        passes = pipeline(devices=devices_in_order(), costs=METER, budget_s=self.placement_s)
        graph = run_passes(traced.graph, passes, check=check, observe=observe)
        refuse_spread(graph, traced, self.store)
        keys = {ref: variable.key for ref, variable in zip(graph.refs, traced.variables, strict=True)}
        compiled = make_plans(graph, ALONE, keys)
        if compiled.remote:
            raise InternalError(f"a local function was placed on {sorted(compiled.remote)}")
        return PlannedStep(traced, compiled, self.store)


@dataclass(frozen=True)
class PlannedStep:
    """A function over variables of this process that has been through the passes."""

    traced: Traced
    compiled: Compiled
    store: Store

    @property
    def pure(self) -> PureStep | None:
        """The step as one function of values, where that is all there is to it.

        One on a device is, where a variable of its own is bound to run it there.
        """
        plan, programs = self.compiled.local.plan, self.compiled.local.programs
        if len(plan.items) != 1 or not isinstance(call := plan.items[0], Call):
            return None
        if call.device and not any(
            variable.device == device_name("", call.device) and variable.key in {*call.writes, *call.reads}
            for variable in self.traced.variables
        ):
            return None
        literals = [literal.array for literal in self.compiled.literals]
        store = self.store

        def fn(
            written: Sequence[Any], read: Sequence[Any], constants: Sequence[Any], leaves: Sequence[Any]
        ) -> tuple[list[Any], list[Any]]:
            slots = dict(zip(plan.feeds, [*constants, *leaves, *literals], strict=True))
            # Looked up in each trace, of which there is another when the places of the variables are others.
            kept = kept_shardings(programs[0].fn, store.shardings(call.writes))
            results = kept(*written, *read, *(slots[slot] for slot in call.takes))
            slots.update(zip(call.gives, results[len(written) :], strict=True))
            return results[: len(written)], [slots[slot] for slot in plan.fetches]

        return PureStep(call.writes, call.reads, self.traced.constants, fn, call.device, call.keeps)

    def lower(self, platforms: tuple[str, ...] | None = None) -> LoweredStep:
        """Lower the programs, for other platforms than this process's if they are named."""
        traced, local = self.traced, self.compiled.local
        donated = [len(traced.constants) + leaf for leaf in traced.donated]
        programs = lower_programs(
            local, self.store, donated, traced.name, traced.compiler_options, platforms, traced.meshes
        )
        literals = [literal.array for literal in self.compiled.literals]
        return LoweredStep(local.plan, programs, self.store, traced.constants, literals, donated)


@dataclass(frozen=True)
class PureStep:
    """A step as a function of values: `fn(written, read, constants, leaves)` gives what it writes, and its results.

    `writes` and `reads` name the variables in the store, `device` where it runs: empty for wherever they lie. One that
    `keeps` must not overwrite what it writes before it is known to succeed.
    """

    writes: tuple[str, ...]
    reads: tuple[str, ...]
    constants: tuple[Any, ...]
    fn: Callable[[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]
    device: str = ""
    keeps: bool = False


@dataclass(frozen=True)
class LoweredStep:
    """A function over variables of this process: its plan, and the programs that the plan calls."""

    plan: Plan
    programs: Sequence[LoweredProgram]
    _store: Store
    _constants: Sequence[Any]
    _literals: Sequence[Any]
    #: The feeds that are the caller's to lose.
    _donated: Collection[int]

    def compile(self, compiler_options: dict[str, Any] | None = None) -> CompiledStep:
        """Compile the programs."""
        programs = [program.compile(compiler_options) for program in self.programs]
        return CompiledStep(self._runner(programs), programs)

    def _runner(self, programs: Sequence[Program]) -> Runner:
        plan, store, constants, literals = self.plan, self._store, list(self._constants), self._literals
        if len(plan.items) == 1 and isinstance(plan.items[0], Call) and plan.fetches == plan.items[0].gives:
            return _one_call(plan.items[0], plan.feeds, programs[0], store, constants)
        schedule = Schedule(plan)
        given_back = [index for index, slot in enumerate(plan.feeds) if slot in plan.fetches]
        lost = set(self._donated).intersection(given_back)

        def run(leaves: Sequence[Any]) -> Sequence[Any]:
            feeds = [*constants, *leaves, *literals]
            for index in given_back:
                # A copy, because the caller may write to a NumPy array, and loses an array that was donated.
                is_kept = isinstance(feeds[index], jax.Array) and index not in lost
                feeds[index] = feeds[index] if is_kept else jnp.array(feeds[index])
            results = fetched(_run_here(schedule, programs, store, feeds))
            for index in lost:
                given = leaves[index - len(constants)]
                if isinstance(given, jax.Array):
                    given.delete()
            return results

        return run


@dataclass(frozen=True)
class CompiledStep:
    """What runs a function over variables of this process, and the programs it runs."""

    run: Runner
    programs: Sequence[Program]


def _keys(variables: Mapping[str, Variable]) -> dict[str, str]:
    return {name: variable.key for name, variable in variables.items()}


def _for_ops_at_once(value: jax.Array) -> jax.Array:
    """A value read; where functions run op by op, all are on the first device, for JAX does not bring two together."""
    if not jit_disabled() or not value.committed or len(value.sharding.device_set) > 1:
        return value
    first: jax.Array = jax.device_put(value, jax.local_devices()[0])
    return first


def refuse_spread(graph: Graph, traced: Traced, store: Store) -> None:
    """Raise DeviceError where a placed graph runs ops on one device of a variable that is spread over several."""
    for ref, variable in zip(graph.refs, traced.variables, strict=True):
        _, local = split_device_name(ref.device or "")
        if local and (place := store.place(variable.key)) is not None and len(place.device_set) > 1:
            raise DeviceError(
                f"variable {variable.name!r} is spread over {len(place.device_set)} devices, but is used in a function "
                f"that names devices for parts of it: {_named_device(traced)}",
                "leave dflow.device out of this function, or use the variable in a function of its own, without "
                "scopes,\n  and pass on what it returns (docs/devices.md, 'One array over several devices')",
                at=caller(),
            )


def _named_device(traced: Traced) -> str:
    """The first thing in a function that is on one device."""
    for variable in traced.variables:
        if variable.device is not None:
            return f"variable {variable.name!r} is on {short_device_name(variable.device)}"
    scoped = [node for node in _with_bodies(traced.graph) if node.device is not None]
    node = min(scoped, key=lambda node: node.device == WITH_STATE)
    name = "auto" if choices_in(node.device) is not None else short_device_name(node.device or "")
    return f"%{node.outputs[0].name} has the scope {name}{at(node.loc)}"


def _with_bodies(graph: Graph) -> Iterator[Node]:
    for node in graph.nodes:
        yield node
        for body in node.bodies:
            yield from _with_bodies(body)


def lower_programs(
    task_plan: TaskPlan,
    store: Store,
    given_up: Collection[int] = (),
    name: str = "step",
    compiler_options: dict[str, Any] | None = None,
    platforms: tuple[str, ...] | None = None,
    meshes: Mapping[AbstractMesh, Mesh] = MappingProxyType({}),
) -> list[LoweredProgram]:
    """Lower a plan's programs, under a name that compilation logs and profiles show.

    What they write stays spread as the variables in the `store` are.
    They are for this process, or for other platforms if they are named. Feeds numbered in `given_up` are the caller's
    to lose: they are donated to the one call that takes them. `meshes` are those of the feeds.
    """
    plan = task_plan.plan
    uses = Counter([*plan.fetches, *(slot for item in plan.items for slot in takes(item))])
    slots = {plan.feeds[number] for number in given_up if uses[plan.feeds[number]] == 1}
    donated: list[Sequence[int]] = [()] * len(task_plan.programs)
    for item in plan.items:
        if isinstance(item, Call):
            state = len(item.writes) + len(item.reads)
            donated[item.program] = [state + place for place, slot in enumerate(item.takes) if slot in slots]
    devices = {item.program: device_named(item.device) for item in calls_in(plan) if item.device}
    keeping = {item.program for item in calls_in(plan) if item.keeps}
    variables = {item.program: (*item.writes, *item.reads) for item in calls_in(plan)}
    return [
        lower_program(
            pure.fn,
            pure.types,
            len(pure.written),
            lost,
            name,
            compiler_options,
            devices.get(number),
            platforms,
            number in keeping,
            store.shardings(variables[number]),
            meshes,
        )
        for number, (pure, lost) in enumerate(zip(task_plan.programs, donated, strict=True))
    ]


def _run_here(schedule: Schedule, programs: Sequence[Program], store: Store, feeds: Sequence[Any]) -> Outcome[Fetches]:
    """Run a plan on this thread; what others bring for it is done here too, not on their threads."""
    outcomes: list[Outcome[Fetches]] = []
    work: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def on_done(outcome: Outcome[Fetches]) -> None:
        outcomes.append(outcome)
        work.put(lambda: None)

    execution = Execution(schedule, programs, store, _NO_CHANNEL, StepId(ALONE, 0), feeds, on_done, work.put)
    try:
        execution.start()
        while not outcomes:
            work.get()()
    except BaseException as error:
        execution.cancel(error)
        raise
    return outcomes[0]


def fetched(outcome: Outcome[Fetches]) -> tuple[jax.Array, ...]:
    """The fetches of an execution that has ended; raises what ended it."""
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def _one_call(call: Call, feeds: tuple[int, ...], program: Program, store: Store, constants: list[Any]) -> Runner:
    """The common case: a step is one XLA call, its operands picked from constants and arguments."""
    places = {slot: index for index, slot in enumerate(feeds)}
    picks = tuple(places[slot] for slot in call.takes)
    straight = not constants and picks == tuple(range(len(feeds)))

    def run(leaves: Sequence[Any]) -> Sequence[Any]:
        if straight:
            return store.call(program, call.writes, call.reads, leaves)
        values = [*constants, *leaves]
        return store.call(program, call.writes, call.reads, [values[index] for index in picks])

    return run


class _NoChannel:
    def send(self, step: StepId, edge: str, destination: str, value: Sent) -> None:
        raise InternalError(f"a local step sends {edge!r} to {destination}")

    def receive(self, step: StepId, edge: str, source: str, deliver: Deliver) -> None:
        raise InternalError(f"a local step receives {edge!r} from {source}")


_NO_CHANNEL = _NoChannel()
