"""Hypothesis generators of graphs: those of random programs, and arbitrary ones with every op of dflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dflow.tracing.devices.device_name import full_device_name
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Literal, Node, Value, Written
from dflow.tracing.ir.op import numeric
from dflow.tracing.ir.types import DTYPES, ArrayType, RefType, TokenType, dtype_name
from dflow.tracing.ir.updates import KINDS, looked_up, updated
from dflow.tracing.jax_frontend import primitives_by_name
from dflow.tracing.jaxprs.trace import Traced, trace
from dflow.tracing.source import Loc
from dflow.tracing.state.context import ValueLocation, home
from dflow.tracing.state.host_resource import HostResource
from dflow.tracing.state.resources import Variable
from tests.choice import choice
from tests.programs import machines
from tests.programs.draw import programs
from tests.programs.made import ARGUMENTS, variables_of
from tests.programs.statements import Program


class DictHome:
    """Keeps the values of variables in a dict; places the variables on `devices`, one after another."""

    shares_names = False
    spread = 1

    def __init__(self, devices: Sequence[str | None] = (None,)) -> None:
        self.values: dict[Variable, Any] = {}
        self._devices = [None if device is None else full_device_name(device) for device in devices]

    def prepared(self, initial: Any, name: str | None) -> Any:
        return initial

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def create(self, variable: Variable, initial: Any, near: Variable | None) -> ValueLocation:
        self.values[variable] = jnp.asarray(initial() if callable(initial) else initial)
        return ValueLocation(self._devices[(len(self.values) - 1) % len(self._devices)], variable.name)

    def create_resource(self, resource: HostResource) -> ValueLocation:
        return ValueLocation(None, resource.name)

    def read(self, variable: Variable) -> jax.Array:
        value: jax.Array = self.values[variable]
        return value

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        rows: jax.Array = looked_up(self.values[variable], indices)
        return rows

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        self.values[variable] = updated(kind, self.values[variable], *operands)


@dataclass(frozen=True, eq=False)
class Case:
    """A traced program with its inputs: `state` by the names of the graph's refs."""

    program: Program
    traced: Traced
    inputs: tuple[Any, ...]
    state: dict[str, Any]

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.traced.graph


def case_of(program: Program, devices: Sequence[str | None] = (None,)) -> Case:
    """Trace a program over new variables, placed on `devices`, one after another."""
    with home(DictHome(devices)):
        machine = machines.Traced(variables_of(program))
    traced = trace(lambda x, y: program(machine, x, y), ARGUMENTS, {})
    refs = zip(traced.graph.refs, traced.variables, strict=True)
    state = {ref.name: variable.read() for ref, variable in refs}
    return Case(program, traced, (*traced.constants, *ARGUMENTS), state)


def cases(devices: Sequence[str] = ()) -> st.SearchStrategy[Case]:
    """Traced programs. With `devices`, their variables are spread over them and parts of the programs have scopes."""
    return programs(devices).map(lambda program: case_of(program, devices or (None,)))


@contextmanager
def a_home() -> Iterator[DictHome]:
    """A new state backend for the variables made in the block."""
    new = DictHome()
    with home(new):
        yield new


_NAMES = st.from_regex(r"[a-z0-9_]{1,3}(/[a-z]{1,2})?(\.[a-z])?", fullmatch=True)
_DTYPES = st.sampled_from([DTYPES[name] for name in sorted(DTYPES)])
_NAMED = ["/job:ps/task:0", "/job:worker/task:12/device:gpu:3", "/device:cpu:1", "with-state", "with-caller"]
_DEVICES = st.one_of(st.none(), st.sampled_from(_NAMED))
_LOCS = st.one_of(st.none(), st.builds(Loc, st.sampled_from(["train.py", "my model.py"]), st.integers(1, 999)))
_TEXTS = st.text(max_size=4)
_TYPES = st.builds(ArrayType, _DTYPES, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.booleans())
_SOME_TYPES = st.lists(_TYPES, min_size=1, max_size=3)


@st.composite
def literals(draw: st.DrawFn) -> Literal:
    """A literal of any dtype, with a value that the dtype can represent."""
    dtype = draw(_DTYPES)
    name = dtype_name(dtype)
    number: st.SearchStrategy[Any]
    if name == "bool":
        number = st.booleans()
    elif name.startswith(("i", "u")):
        info = jnp.iinfo(dtype)
        number = st.integers(int(info.min), int(info.max))
    elif name.startswith("c"):
        number = st.complex_numbers()
    else:
        number = st.floats(width=32)
    with np.errstate(all="ignore"):
        return Literal(np.array(draw(number)).astype(dtype)[()], ArrayType(dtype, ()))


_LITERALS = literals()


@st.composite
def graphs(draw: st.DrawFn, depth: int = 1) -> Graph:
    """Arbitrary graphs, mostly of dflow's ops: devices, order edges, lines, bodies. They need not run."""
    fresh = Graph((), (), ()).fresh_names()
    refs = [Value(fresh(draw(_NAMES)), RefType(type.strong), draw(_DEVICES)) for type in draw(_SOME_TYPES)]
    arrays = [Value(fresh(draw(_NAMES)), type) for type in draw(_SOME_TYPES)]
    inputs, nodes = (*refs, *arrays), []
    defined: list[Value] = [*inputs]
    for _ in range(draw(st.integers(0, 6))):
        node = draw(_nodes(fresh, refs, arrays, defined, depth))
        nodes.append(node)
        arrays += node.array_outputs
        defined += node.outputs
    outputs = [draw(_LITERALS) if draw(st.booleans()) else choice(draw, arrays) for _ in range(draw(st.integers(0, 3)))]
    return Graph(inputs, tuple(nodes), tuple(outputs))


@st.composite
def _nodes(
    draw: st.DrawFn,
    fresh: Callable[[str], str],
    refs: list[Value],
    arrays: list[Value],
    defined: list[Value],
    depth: int,
) -> Node:
    def result(type: Any) -> Value:
        return Value(fresh(draw(_NAMES)), type)

    ref, array = choice(draw, refs), choice(draw, arrays)
    operand = draw(_LITERALS) if draw(st.booleans()) else array
    held: Any = ref.type
    kind = choice(draw, ["read", "gather", "update", "send", "recv", "neg", "add"] + ["call"] * (depth > 0))
    inputs: tuple[Any, ...] = {"read": (ref,), "recv": (), "add": (operand, array)}.get(kind, (array,))
    attributes: dict[str, Any] = {}
    bodies: tuple[Graph, ...] = ()
    match kind:
        case "read":
            op, outputs = ops.var_read, (result(held.of),)
        case "gather":
            op, outputs, inputs = ops.var_gather, (result(held.of),), (ref, array)
        case "update":
            update = choice(draw, [*ops.UPDATES])
            op, outputs = ops.UPDATES[update], (result(TokenType()),)
            inputs = (ref, array) if not KINDS[update].by_rows else (ref, array, operand)
        case "send":
            op, outputs = ops.net_send, (result(TokenType()),)
            attributes = {"edge": draw(_TEXTS), "destination": "/job:ps/task:0"}
        case "recv":
            type = draw(_TYPES)
            op, outputs = ops.net_recv, (result(type),)
            attributes = {"edge": "e/1", "source": "/job:worker/task:0", "types": (type,)}
        case "call":
            body = draw(graphs(depth=depth - 1))
            op, attributes = ops.xla_call, {"donate": choice(draw, ((), (0,), (0, 2)))}
            outputs = tuple(result(output.type) for output in body.outputs) or (result(TokenType()),)
            inputs = tuple(ref if isinstance(value.type, RefType) else array for value in body.inputs)
            bodies = (body,)
        case _:
            op, outputs = numeric(primitives_by_name()[kind]), (result(array.type),)
    after = tuple(choice(draw, defined) for _ in range(draw(st.integers(0, 2))))
    return Node(op, inputs, outputs, attributes, bodies, draw(_DEVICES), after, Written(draw(_LOCS)))
