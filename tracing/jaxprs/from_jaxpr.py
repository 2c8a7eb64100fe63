"""From a jaxpr to a `Graph`.

Inner functions that touch state, or that have ops with a device scope, are inlined so that placement sees their ops;
all others stay one node. Control flow that touches variables becomes a pure node, with reads before it and assigns
after it; if it changes state on one other task only, all of these run there. Control flow becomes a node with bodies
if it touches queues or accumulators, since it may wait, if it runs on several devices or tasks, or if it changes state
on one task and uses state of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.derivatives.border import Border
from dflow.tracing.derivatives.discharge import State, apply
from dflow.tracing.derivatives.recorded_checks import id_checks
from dflow.tracing.devices.device import is_within_task
from dflow.tracing.devices.device_name import is_on_task
from dflow.tracing.errors import DeviceError, DflowError
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.op import OpDef, numeric
from dflow.tracing.ir.types import HOST_HANDLES, ArrayType, RefType, TokenType, Type, array_type_of, type_of_aval
from dflow.tracing.ir.updates import KINDS
from dflow.tracing.jax_frontend import (
    Equation,
    EquationOrigin,
    Jaxpr,
    accesses,
    closed_parts,
    equations_within,
    has_other_effects,
    host_resources,
    inner_parts,
    is_literal,
    make_jaxpr,
    origin_of,
    scan_counts,
    touches_state,
)
from dflow.tracing.jaxprs.captured import closed_over, is_large
from dflow.tracing.primitives.first_rows import first_rows_p
from dflow.tracing.primitives.host_primitives import host_p
from dflow.tracing.primitives.id_checks import IDS, check_ids_p
from dflow.tracing.primitives.kernel_choice import is_kernel
from dflow.tracing.primitives.state_primitives import gather_p, name_p, read_p, split_p, update_p, wire_p
from dflow.tracing.rows.keep_rows import keep_rows
from dflow.tracing.rows.lookups import CALLS, RULED

_INLINED = {**CALLS, "core_call": "call_jaxpr"}
#: Inlined where they have ops that wait in them; calls with a derivative rule also around a kernel.
_HOLDING = {"remat2": "jaxpr", "checkpoint": "jaxpr", **RULED}


def graph_of(
    jaxpr: Jaxpr, consts: Sequence[Any], argument_names: Sequence[str]
) -> tuple[Graph, tuple[Any, ...], tuple[Any, ...]]:
    """Return the graph of a traced function, its variables, queues and accumulators, and its closed-over arrays.

    Its inputs are, in order: a handle for each variable, queue and accumulator, the closed-over arrays, the arguments.
    """
    jaxpr, consts = keep_rows(jaxpr, consts)
    variables = _touched(jaxpr.effects)
    builder = _Builder(variables)
    wanted = _wanted_names(jaxpr)
    named = zip(jaxpr.invars, argument_names, strict=True)
    arguments = [builder.argument(wanted.get(var, name), type_of_aval(var.aval)) for var, name in named]
    captured = [builder.captured(const) for const in consts]
    outputs = builder.inline(jaxpr, [*captured, *arguments])
    inputs = (*builder.refs.values(), *builder.constants, *arguments)
    return Graph(inputs, tuple(builder.nodes), tuple(outputs)), variables, tuple(builder.constants.values())


def _touched(effects: Any) -> tuple[Any, ...]:
    """The variables that effects are on, the marks of written variables, the queues and the accumulators."""
    reads, writes = accesses(effects)
    marks = [variable.marks for variable in writes if variable.marks is not None]
    variables = sorted({*reads, *writes, *marks}, key=lambda variable: variable.serial)
    return *variables, *host_resources(effects)


def clean_name(name: str) -> str:
    """The name, with characters that the text form does not allow in a value's name replaced by `_`."""
    return re.sub(r"[^\w./]+", "_", name).strip("_") or "value"


def _wanted_names(jaxpr: Jaxpr) -> dict[Any, str]:
    named = (equation for equation in jaxpr.eqns if equation.primitive is name_p)
    return {equation.invars[0]: equation.params["name"] for equation in named if not is_literal(equation.invars[0])}


def holds_device(jaxpr: Jaxpr) -> bool:
    """Whether an op of the jaxpr, or of one within it, was traced under a device scope."""
    return any(True for _ in _scopes([jaxpr]))


def _holds_wire(jaxpr: Jaxpr) -> bool:
    """Whether the jaxpr, or one called within it, has an op that says how a value is sent."""
    inner = (
        closed_parts(one.params[CALLS[one.primitive.name]])[0] for one in jaxpr.eqns if one.primitive.name in CALLS
    )
    return any(equation.primitive in (wire_p, first_rows_p) for equation in jaxpr.eqns) or any(map(_holds_wire, inner))


def _scopes(jaxprs: Iterable[Jaxpr]) -> Iterator[str]:
    """The device scope of each op of these jaxprs that has one, and of each op within it."""
    for equation in (equation for jaxpr in jaxprs for equation in equations_within(jaxpr)):
        if (device := origin_of(equation).device) is not None:
            yield device


def _border(equation: Equation) -> Border:
    return Border(equation.effects, lambda variable: is_on_task(variable.device))


def _tasks_of_changes(border: Border) -> set[str | None]:
    """The tasks of the variables whose values enter a region, with None for the caller.

    Empty unless the region writes a variable of another task, other than by adding to it.
    """
    bound = [variable for variable in border.touched if variable not in border.added]
    is_changed = any(is_on_task(variable.device) and variable not in border.added for variable in border.writes)
    return {variable.device if is_on_task(variable.device) else None for variable in bound if is_changed}


def _is_over_tasks(equation: Equation, scopes: Iterable[str]) -> bool:
    """Whether an equation spans several tasks: a scope in it names another task, or it changes state there.

    A check of ids calls back into the process, which a program of another task cannot do: so a branch or loop with one
    spans this process and the task whose state it changes.
    """
    own = origin_of(equation).device
    if any(scope != own and is_on_task(scope) for scope in scopes):
        return True
    if is_on_task(own) or not touches_state(equation.effects):
        return False
    tasks = _tasks_of_changes(_border(equation))
    return len(tasks) > 1 or (bool(tasks) and bool(id_checks([equation])))


def handle_type(resource: Any) -> Type:
    """The type of the graph input that stands for a variable, a queue or an accumulator."""
    return resource.type if isinstance(resource.type, HOST_HANDLES) else RefType(resource.type)


class _Builder:
    """Builds the nodes of a graph from jaxprs. All traced nodes are created here."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._fresh = FreshNames()
        self._count = 0
        self.refs = {
            variable: Value(self._fresh(clean_name(variable.name)), handle_type(variable), variable.device)
            for variable in variables
        }
        self.constants: dict[Value, Any] = {}
        self.nodes: list[Node] = []

    def argument(self, name: str, type: Type) -> Value:
        return Value(self._fresh(clean_name(name)), type)

    def captured(self, constant: Any) -> Operand:
        """A closed-over array becomes an input of the graph, a scalar a literal."""
        type = array_type_of(constant)
        if type.shape == () and isinstance(constant, (bool, int, float, complex, np.generic, np.ndarray)):
            return Literal(constant, type)
        value = Value(self._fresh(f"const_{len(self.constants)}"), type)
        self.constants[value] = constant
        return value

    def inline(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Operand],
        origin: EquationOrigin | None = None,
        names: Sequence[str | None] = (),
        within: str = "",
    ) -> list[Operand]:
        """Add the nodes of `jaxpr` applied to `operands`; its outputs.

        `origin` stands in for the nodes' own; `names` are what the first outputs shall be called; `within` are the
        name scopes around the jaxpr.
        """
        env: dict[Any, Operand] = dict(zip((*jaxpr.constvars, *jaxpr.invars), operands, strict=True))
        wanted = _wanted_names(jaxpr) | {
            atom: name
            for atom, name in zip(jaxpr.outvars, names, strict=False)
            if name is not None and not is_literal(atom)
        }

        def operand(atom: Any) -> Operand:
            return Literal(atom.val, type_of_aval(atom.aval)) if is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            inputs = [operand(atom) for atom in equation.invars]
            names = [wanted.get(var) for var in equation.outvars]
            outputs = self._add(equation, inputs, names, origin or origin_of(equation, within))
            env.update(zip(equation.outvars, outputs, strict=True))
        return [operand(atom) for atom in jaxpr.outvars]

    def _add(
        self, equation: Equation, inputs: list[Operand], names: Sequence[str | None], origin: EquationOrigin
    ) -> Sequence[Operand]:
        primitive, params = equation.primitive, equation.params
        if primitive in (name_p, split_p):
            return inputs
        if primitive in (read_p, gather_p, update_p):
            ref = self.refs[params["handle"].variable]
            op = {read_p: ops.var_read, gather_p: ops.var_gather}.get(primitive) or ops.UPDATES[params["kind"]]
            outputs = self._results(names, equation, ref.name)
            self._node(op, (ref, *inputs), outputs, {}, origin, origin_of(equation).device)
            if primitive is update_p:
                self._mark(params["handle"].variable, inputs[: KINDS[params["kind"]].by_rows], origin)
            return outputs
        if primitive is check_ids_p:
            outputs = self._results(names, equation, "ids")
            attributes = {
                name: value for name, value in params.items() if name != "line" and (name, value) != ("noun", IDS)
            }
            return self._node(ops.ids_check, inputs, outputs, attributes, origin, origin_of(equation).device)
        if primitive is host_p:
            attributes = dict(params)
            ref, op = self.refs[attributes.pop("handle").variable], attributes.pop("op")
            outputs = self._results(names, equation, ref.name)
            return self._node(op, (ref, *inputs), outputs, attributes, origin, origin_of(equation).device)
        if primitive.name in RULED:
            jaxpr, consts = closed_parts(params[RULED[primitive.name]])
            # A function without ops returns operands, such as rows of a lookup; an op would move them to the caller.
            if is_kernel(jaxpr) or not jaxpr.eqns:
                return self.inline(jaxpr, [*map(self.captured, consts), *inputs], origin, names)
        said = dict.fromkeys(_scopes(inner for inner, _ in inner_parts(params)))
        scopes = [scope for scope in said if is_within_task(scope)]
        is_divided = len(scopes) > 1 or _is_over_tasks(equation, said)
        if primitive.name in _INLINED or (
            primitive.name in _HOLDING and (is_divided or host_resources(equation.effects))
        ):
            jaxpr, consts = closed_parts(params[(_INLINED | _HOLDING)[primitive.name]])
            is_called = primitive.name in CALLS
            if (
                touches_state(equation.effects)
                or holds_device(jaxpr)
                or _holds_wire(jaxpr)
                or (is_called and any(map(is_large, closed_over(jaxpr, consts))))
            ):
                return self.inline(jaxpr, [*map(self.captured, consts), *inputs], None, names, origin.scope)
        if host_resources(equation.effects) or is_divided:
            return self._control(equation, inputs, names, origin)
        if touches_state(equation.effects):
            return self._discharged(equation, inputs, names, origin)
        op = numeric(primitive, unknown_effects=has_other_effects(equation.effects))
        outputs = self._results(names, equation)
        # What is not taken apart runs where the one device in it says.
        return self._node(op, inputs, outputs, params, origin, next(iter(scopes), origin_of(equation).device))

    def _control(
        self, equation: Equation, inputs: list[Operand], names: Sequence[str | None], origin: EquationOrigin
    ) -> list[Value]:
        """Control flow that may wait or run on several tasks: a node whose bodies are graphs over the same state."""
        kind = equation.primitive.name
        if kind not in _CONTROL:
            shown = ", ".join(resource.title for resource in host_resources(equation.effects))
            if not shown:
                raise DeviceError(
                    f"{kind} holds ops for several devices, and cannot be cut",
                    f"name one device inside it, or divide it by a loop or branch: {', '.join(_CONTROL)}",
                    at=origin_of(equation).loc,
                )
            raise DflowError(
                f"{shown}: used inside {kind}, which cannot hold ops that wait",
                f"use them before it or after it, or inside {', '.join(_CONTROL)}",
                at=origin_of(equation).loc,
            )
        op, attributes, types, parts = _CONTROL[kind](equation.params, inputs)
        if op in ops.LOOPS and (parallel := origin_of(equation).parallel) is not None:
            attributes["parallel"] = parallel
        touched = _touched(equation.effects)
        bodies, constants = _bodies_of(types, parts, touched)
        own, handed = inputs[: op.own_operands], inputs[op.own_operands :]
        operands = (*own, *(self.refs[resource] for resource in touched), *map(self.captured, constants), *handed)
        outputs = self._results(names, equation)
        return self._node(op, operands, outputs, attributes, origin, None, bodies)

    def _discharged(
        self, equation: Equation, inputs: list[Operand], names: Sequence[str | None], origin: EquationOrigin
    ) -> list[Operand]:
        """Control flow with state: its variables read before it, a pure node, and updates after it."""
        border = _border(equation)
        writes, added = border.writes, border.added
        carried = [variable for variable in border.touched if variable not in added]
        marks = [variable.marks for variable in writes if variable not in added and variable.marks is not None]
        carried += marks

        def pure(values: list[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
            zeros = {variable: jnp.zeros(variable.shape, variable.dtype) for variable in added}
            state = State({**dict(zip(carried, values, strict=True)), **zeros})
            return apply(equation, operands, state), state.of([*writes, *marks])

        structs = [variable.type.struct for variable in carried]
        jaxpr, consts, _ = make_jaxpr(pure, structs, *(_array(operand).struct for operand in inputs))
        values = [self._read(variable, origin) for variable in carried]
        first = len(self.nodes)
        results = self.inline(jaxpr, [*map(self.captured, consts), *values, *inputs], origin, names)
        if len(tasks := _tasks_of_changes(border)) == 1:
            # There it is one call with the reads and the assigns, and no other step comes between.
            [task] = tasks
            self.nodes[first:] = [replace(node, device=node.device or task) for node in self.nodes[first:]]
        count = len(equation.outvars)
        for variable, value in zip([*writes, *marks], results[count:], strict=True):
            update = ops.var_assign_add if variable in added else ops.var_assign
            self._node(update, (self.refs[variable], value), [], {}, origin, None)
            if variable in added:
                self._mark(variable, (), origin)
        return results[:count]

    def _mark(self, variable: Any, indices: Sequence[Operand], origin: EquationOrigin) -> None:
        """Mark the rows at `indices`, or all of them, as changed, if the variable's changes are tracked."""
        if variable.marks is not None:
            operands = (self.refs[variable.marks], self.refs[variable], *indices)
            self._node(ops.var_mark, operands, [], {}, origin, None)

    def _read(self, variable: Any, origin: EquationOrigin) -> Value:
        ref = self.refs[variable]
        value = Value(self._fresh(ref.name), variable.type)
        self._node(ops.var_read, (ref,), [value], {}, origin, None)
        return value

    def _node(
        self,
        op: Any,
        inputs: Sequence[Operand],
        outputs: list[Value],
        attributes: Mapping[str, Any],
        origin: EquationOrigin,
        device: str | None,
        bodies: tuple[Graph, ...] = (),
    ) -> list[Value]:
        named = outputs or [Value(self._name(None), TokenType())]
        self.nodes.append(Node(op, tuple(inputs), tuple(named), attributes, bodies, device, (), origin))
        return outputs

    def _results(self, names: Sequence[str | None], equation: Equation, otherwise: str | None = None) -> list[Value]:
        outvars = zip(names, equation.outvars, strict=True)
        return [Value(self._name(name, otherwise), type_of_aval(var.aval)) for name, var in outvars]

    def _name(self, wanted: str | None, otherwise: str | None = None) -> str:
        if wanted is not None:
            return self._fresh(clean_name(wanted))
        if otherwise is not None:
            return self._fresh(otherwise)
        self._count += 1
        return self._fresh(str(self._count))


#: Control flow as an op: its attributes, the types of the operands handed to the bodies, and the bodies: jaxprs, each
#: with the indices of those operands that it takes.
_Control = tuple[OpDef, dict[str, Any], Sequence[ArrayType], Sequence[tuple[Any, Sequence[int]]]]


def _cond(params: Mapping[str, Any], inputs: Sequence[Operand]) -> _Control:
    types = [_array(operand) for operand in inputs[1:]]
    return ops.ctrl_cond, {}, types, [(branch, range(len(types))) for branch in params["branches"]]


def _while(params: Mapping[str, Any], inputs: Sequence[Operand]) -> _Control:
    test_end = params["cond_nconsts"]
    body_end, end = test_end + params["body_nconsts"], len(inputs)
    test = (params["cond_jaxpr"], [*range(test_end), *range(body_end, end)])
    body = (params["body_jaxpr"], range(test_end, end))
    return ops.ctrl_while, {"carry": end - body_end}, [_array(operand) for operand in inputs], [test, body]


def _scan(params: Mapping[str, Any], inputs: Sequence[Operand]) -> _Control:
    consts, carry = scan_counts(params)
    attributes = {
        "carry": carry,
        "rows": len(inputs) - consts - carry,
        "length": params["length"],
        "reverse": params["reverse"],
    }
    types = [_array(operand) for operand in inputs]
    rows = [type_of_aval(taken.aval) for taken in closed_parts(params["jaxpr"])[0].invars[consts + carry :]]
    return ops.ctrl_scan, attributes, [*types[: consts + carry], *rows], [(params["jaxpr"], range(len(inputs)))]


#: Control flow that may hold ops that wait.
_CONTROL: Mapping[str, Callable[[Mapping[str, Any], Sequence[Operand]], _Control]] = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
}


def _bodies_of(
    types: Sequence[ArrayType], parts: Sequence[tuple[Any, Sequence[int]]], touched: Sequence[Any]
) -> tuple[tuple[Graph, ...], list[Any]]:
    """Return the bodies of a `_Control` as graphs, and the constants of all bodies.

    Every body has the same inputs: the resources touched, the constants of all bodies, and the operands handed on.
    """
    builders = [_Builder(touched) for _ in parts]
    arguments = [[builder.argument("arg", type) for type in types] for builder in builders]
    outputs = [
        builder.inline(jaxpr, [*map(builder.captured, consts), *(taken[position] for position in positions)])
        for builder, taken, (closed, positions) in zip(builders, arguments, parts, strict=True)
        for jaxpr, consts in [closed_parts(closed)]
    ]
    bodies = tuple(
        Graph((*builder.refs.values(), *_constants(builder, builders), *taken), tuple(builder.nodes), tuple(given))
        for builder, taken, given in zip(builders, arguments, outputs, strict=True)
    )
    return bodies, [constant for builder in builders for constant in builder.constants.values()]


def _constants(builder: _Builder, builders: Sequence[_Builder]) -> Iterator[Value]:
    """The inputs of one body for the constants of all bodies; it has unused inputs for those of the others."""
    for other in builders:
        yield from (value if other is builder else builder.argument("arg", value.type) for value in other.constants)


def _array(operand: Operand) -> ArrayType:
    assert isinstance(operand.type, ArrayType)
    return operand.type
