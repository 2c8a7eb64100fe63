"""Hypothesis generators: stateful programs, their graphs, and graphs with every op of ours.

A `Program` is data, so that Hypothesis can shrink it. It works on int32 arrays, whose arithmetic wraps the same way
everywhere, so results compare bit by bit. `run` with `TRACED` is the program as a user writes it, with JAX's control
flow; with `EAGER` it is the same program with Python's, each op acting at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dflow.tracing import ops
from dflow.tracing.context import Slot, home
from dflow.tracing.device import device
from dflow.tracing.graph import Graph, Literal, Node, Value, Written
from dflow.tracing.host_resource import HostResource
from dflow.tracing.jax_frontend import primitive_named
from dflow.tracing.op import numeric
from dflow.tracing.resources import Variable
from dflow.tracing.source import Loc
from dflow.tracing.task_name import full_task_name
from dflow.tracing.trace import Traced, trace
from dflow.tracing.types import DTYPES, ArrayType, RefType, TokenType, dtype_name
from dflow.tracing.updates import ASSIGNS, KINDS, looked_up, updated

#: The shape of every array in a program.
SHAPE = (3,)


class DictHome:
    """Keeps the values of variables in a dict; puts the variables on `devices` in turn."""

    def __init__(self, devices: Sequence[str | None] = (None,)) -> None:
        self.values: dict[Variable, Any] = {}
        self._devices = [None if device is None else full_task_name(device) for device in devices]

    def create(self, variable: Variable, initial: Any, near: Variable | None) -> Slot:
        self.values[variable] = jnp.asarray(initial() if callable(initial) else initial)
        return Slot(self._devices[(len(self.values) - 1) % len(self._devices)], variable.name)

    def create_resource(self, resource: HostResource) -> Slot:
        return Slot(None, resource.name)

    def read(self, variable: Variable) -> jax.Array:
        value: jax.Array = self.values[variable]
        return value

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        rows: jax.Array = looked_up(self.values[variable], indices)
        return rows

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        self.values[variable] = updated(kind, self.values[variable], *operands)


@dataclass(frozen=True)
class Op:
    """Push `kind` of two values. Here and below, indices count modulo what there is."""

    kind: str
    left: int
    right: int


@dataclass(frozen=True)
class Read:
    """Push the value of a variable."""

    variable: int


@dataclass(frozen=True)
class Gather:
    """Push the elements of a variable at a value's numbers, most of which are past an end."""

    variable: int
    value: int


@dataclass(frozen=True)
class Write:
    """Update a variable by a value; an update of rows takes it for indices too."""

    variable: int
    value: int
    kind: str


@dataclass(frozen=True)
class Scan:
    """Run `body` for each of `length` rows, with a carry; push the last carry and the sum of what each turn gave."""

    carry: int
    length: int
    reverse: bool
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class While:
    """Run `body` `turns` times by a while loop; push its last value."""

    carry: int
    turns: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class Cond:
    """Run one of the branches, as the parity of a value says; push its last value."""

    test: int
    branches: tuple[tuple[Statement, ...], ...]


@dataclass(frozen=True)
class Call:
    """Run `body` as a nested jit; push its last value."""

    argument: int
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class On:
    """Run `body` in place, under a device scope."""

    device: str
    body: tuple[Statement, ...]


Statement = Op | Read | Gather | Write | Scan | While | Cond | Call | On

_KINDS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(x > y, x, -y),
}


@dataclass(frozen=True)
class Control:
    """How control flow is done: the signatures are JAX's."""

    scan: Callable[..., Any]
    while_loop: Callable[..., Any]
    switch: Callable[..., Any]
    jit: Callable[..., Any]


def _python_scan(step: Callable[..., Any], carry: Any, xs: Any, *, reverse: bool) -> Any:
    ys: list[Any] = []
    for x in xs[::-1] if reverse else xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, jnp.stack(ys)


def _python_while(test: Callable[..., Any], step: Callable[..., Any], carry: Any) -> Any:
    while test(carry):
        carry = step(carry)
    return carry


TRACED = Control(jax.lax.scan, jax.lax.while_loop, jax.lax.switch, jax.jit)
EAGER = Control(_python_scan, _python_while, lambda index, branches: branches[int(index)](), lambda fn: fn)


def run(
    statements: Sequence[Statement], values: Sequence[Any], variables: Sequence[Variable], control: Control
) -> list[Any]:
    """Run the statements on a stack of values; the stack after them."""
    stack = list(values)
    for statement in statements:
        match statement:
            case Op(kind, left, right):
                stack.append(_KINDS[kind](stack[left % len(stack)], stack[right % len(stack)]))
            case Read(variable):
                stack.append(variables[variable % len(variables)].read())
            case Gather(variable, value):
                stack.append(variables[variable % len(variables)].gather(stack[value % len(stack)]))
            case Write(variable, value, kind):
                _write(variables[variable % len(variables)], kind, stack[value % len(stack)])
            case On(name, body):
                with device(name):
                    stack = run(body, stack, variables, control)
            case _:
                stack += _run_control(statement, stack, variables, control)
    return stack


def _write(variable: Variable, kind: str, value: Any) -> None:
    if kind in ASSIGNS:
        getattr(variable, kind)(value)
    else:
        # Of unequal rows for one index any may stay, so an update has equal ones.
        rows = jnp.broadcast_to(value[0], SHAPE) if kind == "scatter_update" else value + 1
        getattr(variable, kind)(value, rows)


def _run_control(
    statement: Scan | While | Cond | Call, stack: list[Any], variables: Sequence[Variable], control: Control
) -> list[Any]:
    def inner(body: Sequence[Statement], *more: Any) -> list[Any]:
        return run(body, [*stack, *more], variables, control)

    match statement:
        case Scan(carry, length, reverse, body):
            xs = stack[-1] + jnp.arange(length, dtype=jnp.int32)[:, None]
            last, ys = control.scan(
                lambda c, x: tuple(inner(body, c, x)[-2:]), stack[carry % len(stack)], xs, reverse=reverse
            )
            return [last, ys.sum(0, dtype=jnp.int32)]
        case While(carry, turns, body):
            start = (jnp.int32(0), stack[carry % len(stack)])
            return [control.while_loop(lambda c: c[0] < turns, lambda c: (c[0] + 1, inner(body, c[1])[-1]), start)[1]]
        case Cond(test, branches):
            index = stack[test % len(stack)].sum(dtype=jnp.int32) % len(branches)
            return [control.switch(index, [lambda body=body: inner(body)[-1] for body in branches])]
        case Call(argument, body):
            return [control.jit(lambda x: inner(body, x)[-1])(stack[argument % len(stack)])]


@dataclass(frozen=True)
class Program:
    """A function of two arrays over `variables` variables."""

    variables: int
    statements: tuple[Statement, ...]

    def __call__(self, variables: Sequence[Variable], x: Any, y: Any, control: Control = TRACED) -> tuple[Any, ...]:
        """The last four values: enough to see most mistakes, few enough to leave dead ops."""
        return tuple(run(self.statements, [x, y], variables, control)[-4:])


_index = st.integers(0, 7)
_simple: st.SearchStrategy[Statement] = st.one_of(
    st.builds(Op, st.sampled_from(sorted(_KINDS)), _index, _index),
    st.builds(Read, _index),
    st.builds(Gather, _index, _index),
    st.builds(Write, _index, _index, st.sampled_from([*KINDS])),
)


def _nested(inner: st.SearchStrategy[Statement], devices: Sequence[str]) -> st.SearchStrategy[Statement]:
    body = st.lists(inner, min_size=1, max_size=3).map(tuple)
    kinds: list[st.SearchStrategy[Statement]] = [
        st.builds(Scan, _index, st.integers(1, 3), st.booleans(), body),
        st.builds(While, _index, st.integers(0, 3), body),
        st.builds(Cond, _index, st.tuples(body, body)),
        st.builds(Call, _index, body),
    ]
    if devices:
        kinds.append(st.builds(On, st.sampled_from(devices), body))
    return st.one_of(inner, *kinds)


def programs(devices: Sequence[str] = (), max_statements: int = 5) -> st.SearchStrategy[Program]:
    """Programs over one to three variables; some parts under a scope of one of `devices`."""
    statement = _nested(_nested(_simple, devices), devices)
    return st.builds(Program, st.integers(1, 3), st.lists(statement, min_size=1, max_size=max_statements).map(tuple))


#: The arguments that programs are run on.
ARGUMENTS = (np.array([1, -2, 3], np.int32), np.array([0, 5, -7], np.int32))


def variables_of(program: Program, devices: Sequence[str | None] = (None,)) -> list[Variable]:
    """New variables for a program, with values that differ, put on `devices` in turn."""
    with home(DictHome(devices)):
        return [
            Variable(jnp.arange(3, dtype=jnp.int32) * (index + 1), name=f"v{index}")
            for index in range(program.variables)
        ]


@dataclass(frozen=True, eq=False)
class Case:
    """A traced program with what to run it on: `state` by the names of the graph's refs."""

    program: Program
    traced: Traced
    inputs: tuple[Any, ...]
    state: dict[str, Any]

    @property
    def graph(self) -> Graph:
        """The program's graph."""
        return self.traced.graph


def case_of(program: Program, devices: Sequence[str | None] = (None,)) -> Case:
    """Trace a program over new variables."""
    made = variables_of(program, devices)
    traced = trace(lambda x, y: program(made, x, y), ARGUMENTS, {})
    refs = zip(traced.graph.refs, traced.variables, strict=True)
    state = {ref.name: variable.read() for ref, variable in refs}
    return Case(program, traced, (*traced.constants, *ARGUMENTS), state)


def cases(devices: Sequence[str] = ()) -> st.SearchStrategy[Case]:
    """Traced programs. With `devices`, the variables are spread over them and parts of the program are scoped."""
    return programs(devices).map(lambda program: case_of(program, devices or (None,)))


@contextmanager
def a_home() -> Iterator[DictHome]:
    """A new home for the variables made inside."""
    new = DictHome()
    with home(new):
        yield new


_NAMES = st.from_regex(r"[a-z0-9_]{1,3}(/[a-z]{1,2})?(\.[a-z])?", fullmatch=True)
_DTYPES = st.sampled_from([DTYPES[name] for name in sorted(DTYPES)])
_DEVICES = st.one_of(st.none(), st.sampled_from(["/job:ps/task:0", "/job:worker/task:12", "with-state"]))
_LOCS = st.one_of(st.none(), st.builds(Loc, st.sampled_from(["train.py", "my model.py"]), st.integers(1, 999)))
_TYPES = st.builds(ArrayType, _DTYPES, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.booleans())


@st.composite
def literals(draw: st.DrawFn) -> Literal:
    """A literal of any dtype, its value one that the dtype has."""
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


@st.composite
def graphs(draw: st.DrawFn, depth: int = 1) -> Graph:
    """Graphs of any nodes, most of them of ours: devices, order edges, lines, bodies. They need not run."""
    fresh = Graph((), (), ()).fresh_names()
    refs = [
        Value(fresh(draw(_NAMES)), RefType(type.strong), draw(_DEVICES))
        for type in draw(st.lists(_TYPES, min_size=1, max_size=3))
    ]
    arrays = [Value(fresh(draw(_NAMES)), type) for type in draw(st.lists(_TYPES, min_size=1, max_size=3))]
    inputs, nodes = (*refs, *arrays), []
    defined: list[Value] = [*inputs]
    for _ in range(draw(st.integers(0, 6))):
        node = draw(_nodes(fresh, refs, arrays, defined, depth))
        nodes.append(node)
        arrays += node.array_outputs
        defined += node.outputs
    outputs = draw(st.lists(st.one_of(st.sampled_from(arrays), literals()), max_size=3))
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

    ref, array = draw(st.sampled_from(refs)), draw(st.sampled_from(arrays))
    operand = draw(st.one_of(st.just(array), literals()))
    held: Any = ref.type
    kind = draw(st.sampled_from(["read", "gather", "update", "send", "recv", "neg", "add"] + ["call"] * (depth > 0)))
    inputs: tuple[Any, ...] = {"read": (ref,), "recv": (), "add": (operand, array)}.get(kind, (array,))
    attributes: dict[str, Any] = {}
    bodies: tuple[Graph, ...] = ()
    match kind:
        case "read":
            op, outputs = ops.var_read, (result(held.of),)
        case "gather":
            op, outputs, inputs = ops.var_gather, (result(held.of),), (ref, array)
        case "update":
            update = draw(st.sampled_from([*ops.UPDATES]))
            op, outputs = ops.UPDATES[update], (result(TokenType()),)
            inputs = (ref, array) if update in ASSIGNS else (ref, array, operand)
        case "send":
            op, outputs = ops.net_send, (result(TokenType()),)
            attributes = {"edge": draw(st.text(max_size=4)), "destination": "/job:ps/task:0"}
        case "recv":
            type = draw(_TYPES)
            op, outputs = ops.net_recv, (result(type),)
            attributes = {"edge": "e/1", "source": "/job:worker/task:0", "type": type}
        case "call":
            body = draw(graphs(depth=depth - 1))
            op, attributes = ops.xla_call, {"donate": draw(st.sampled_from([(), (0,), (0, 2)]))}
            outputs = tuple(result(output.type) for output in body.outputs) or (result(TokenType()),)
            inputs = tuple(ref if isinstance(value.type, RefType) else array for value in body.inputs)
            bodies = (body,)
        case _:
            op, outputs = numeric(primitive_named(kind)), (result(array.type),)
    after = tuple(draw(st.lists(st.sampled_from(defined), max_size=2)))
    return Node(op, inputs, outputs, attributes, bodies, draw(_DEVICES), after, Written(draw(_LOCS)))
