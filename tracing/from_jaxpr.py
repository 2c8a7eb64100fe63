"""From a jaxpr to a `Graph`.

Inner functions that touch state, or that hold ops with a device of their own, are taken apart so that placement
sees their ops; all others stay one node. Control flow that touches state becomes a pure node between reads before
it and assigns after it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflow.tracing import ops
from dflow.tracing.discharge import State, apply
from dflow.tracing.graph import FreshNames, Graph, Literal, Node, Operand, Value
from dflow.tracing.jax_frontend import (
    Equation,
    Jaxpr,
    Origin,
    accesses,
    closed_parts,
    has_other_effects,
    is_literal,
    make_jaxpr,
    origin_of,
    touches_state,
)
from dflow.tracing.op import numeric
from dflow.tracing.state_primitives import gather_p, name_p, read_p, update_p
from dflow.tracing.types import ArrayType, RefType, TokenType, array_type_of

_INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def graph_of(
    jaxpr: Jaxpr, consts: Sequence[Any], argument_names: Sequence[str]
) -> tuple[Graph, tuple[Any, ...], tuple[Any, ...]]:
    """The graph of a traced function, the variables and the closed-over arrays that its first inputs stand for.

    The graph's inputs are one `ref` for each variable touched, then the closed-over arrays, then the arguments.
    """
    reads, writes = accesses(jaxpr.effects)
    variables = tuple(sorted({*reads, *writes}, key=lambda variable: variable.serial))
    builder = _Builder(variables)
    wanted = _wanted_names(jaxpr)
    arguments = [
        builder.argument(wanted.get(var, name), var) for var, name in zip(jaxpr.invars, argument_names, strict=True)
    ]
    captured = [builder.captured(const) for const in consts]
    outputs = builder.inline(jaxpr, [*captured, *arguments])
    inputs = (*builder.refs.values(), *builder.constants, *arguments)
    return Graph(inputs, tuple(builder.nodes), tuple(outputs)), variables, tuple(builder.constants.values())


def clean_name(name: str) -> str:
    """The name with only what a value's name may hold in the text form."""
    return re.sub(r"[^\w./]+", "_", name).strip("_") or "value"


def _wanted_names(jaxpr: Jaxpr) -> dict[Any, str]:
    named = (equation for equation in jaxpr.eqns if equation.primitive is name_p)
    return {equation.invars[0]: equation.params["name"] for equation in named if not is_literal(equation.invars[0])}


def holds_device(jaxpr: Jaxpr) -> bool:
    """Whether an op of the jaxpr, or of a function that it calls, was traced under a device scope."""
    for equation in jaxpr.eqns:
        if origin_of(equation).device is not None:
            return True
        key = _INLINED.get(equation.primitive.name)
        if key is not None and holds_device(closed_parts(equation.params[key])[0]):
            return True
    return False


class _Builder:
    """Appends nodes; the one place where a traced node is made."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._fresh = FreshNames()
        self._count = 0
        self.refs = {
            variable: Value(self._fresh(clean_name(variable.name)), RefType(variable.type), variable.device)
            for variable in variables
        }
        self.constants: dict[Value, Any] = {}
        self.nodes: list[Node] = []

    def argument(self, name: str, var: Any) -> Value:
        return Value(self._fresh(clean_name(name)), _type(var.aval))

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
        origin: Origin | None = None,
        names: Sequence[str | None] = (),
    ) -> list[Operand]:
        """Add the nodes of `jaxpr` applied to `operands`; its outputs.

        `origin` stands in for the nodes' own; `names` are what the first outputs shall be called.
        """
        env: dict[Any, Operand] = dict(zip((*jaxpr.constvars, *jaxpr.invars), operands, strict=True))
        wanted = _wanted_names(jaxpr) | {
            atom: name
            for atom, name in zip(jaxpr.outvars, names, strict=False)
            if name is not None and not is_literal(atom)
        }

        def operand(atom: Any) -> Operand:
            return Literal(atom.val, _type(atom.aval)) if is_literal(atom) else env[atom]

        for equation in jaxpr.eqns:
            inputs = [operand(atom) for atom in equation.invars]
            names = [wanted.get(var) for var in equation.outvars]
            outputs = self._add(equation, inputs, names, origin or origin_of(equation))
            env.update(zip(equation.outvars, outputs, strict=True))
        return [operand(atom) for atom in jaxpr.outvars]

    def _add(
        self, equation: Equation, inputs: list[Operand], names: Sequence[str | None], origin: Origin
    ) -> Sequence[Operand]:
        primitive, params = equation.primitive, equation.params
        if primitive is name_p:
            return inputs
        if primitive in (read_p, gather_p, update_p):
            ref = self.refs[params["handle"].variable]
            op = {read_p: ops.var_read, gather_p: ops.var_gather}.get(primitive) or ops.UPDATES[params["kind"]]
            outputs = [Value(self._name(names[0], ref.name), _type(var.aval)) for var in equation.outvars]
            return self._node(op, (ref, *inputs), outputs, {}, origin, origin_of(equation).device)
        if primitive.name in _INLINED:
            jaxpr, consts = closed_parts(params[_INLINED[primitive.name]])
            if touches_state(equation.effects) or holds_device(jaxpr):
                return self.inline(jaxpr, [*map(self.captured, consts), *inputs], None, names)
        if touches_state(equation.effects):
            return self._discharged(equation, inputs, names, origin)
        op = numeric(primitive, unknown_effects=has_other_effects(equation.effects))
        outputs = [Value(self._name(name), _type(var.aval)) for name, var in zip(names, equation.outvars, strict=True)]
        return self._node(op, inputs, outputs, params, origin, origin_of(equation).device)

    def _discharged(
        self, equation: Equation, inputs: list[Operand], names: Sequence[str | None], origin: Origin
    ) -> list[Operand]:
        """Control flow with state: its variables read before it, a pure node, and assigns after it."""
        reads, writes = accesses(equation.effects)
        touched = sorted({*reads, *writes}, key=lambda variable: variable.serial)

        def pure(values: list[Any], *operands: Any) -> tuple[list[Any], list[Any]]:
            state = State(dict(zip(touched, values, strict=True)))
            return apply(equation, operands, state), state.of(writes)

        structs = [variable.type.struct for variable in touched]
        jaxpr, consts, _ = make_jaxpr(pure, structs, *(_struct(operand) for operand in inputs))
        values = [self._read(variable, origin) for variable in touched]
        results = self.inline(jaxpr, [*map(self.captured, consts), *values, *inputs], origin, names)
        count = len(equation.outvars)
        for variable, value in zip(writes, results[count:], strict=True):
            self._node(ops.var_assign, (self.refs[variable], value), [], {}, origin, None)
        return results[:count]

    def _read(self, variable: Any, origin: Origin) -> Value:
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
        origin: Origin,
        device: str | None,
    ) -> list[Value]:
        named = outputs or [Value(self._name(None), TokenType())]
        self.nodes.append(Node(op, tuple(inputs), tuple(named), attributes, None, device, (), origin))
        return outputs

    def _name(self, wanted: str | None, otherwise: str | None = None) -> str:
        if wanted is not None:
            return self._fresh(clean_name(wanted))
        if otherwise is not None:
            return self._fresh(otherwise)
        self._count += 1
        return self._fresh(str(self._count))


def _type(aval: Any) -> ArrayType:
    return ArrayType(aval.dtype, tuple(aval.shape), bool(getattr(aval, "weak_type", False)))


def _struct(operand: Operand) -> jax.ShapeDtypeStruct:
    assert isinstance(operand.type, ArrayType)
    return operand.type.struct
