"""Hypothesis generator of straight-line graphs with state: variables on several tasks, updates, unknown effects.

The programs of `tests.graphs_` are traced. These graphs have what a trace rarely gives: update nodes with any operands,
unknown effects at any position, one operand twice. All numbers are int32, which wraps equally everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dflow.tracing.devices.device import WITH_STATE
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.op import numeric
from dflow.tracing.ir.types import ArrayType, RefType, TokenType
from dflow.tracing.ir.updates import KINDS
from dflow.tracing.jax_frontend import primitives_by_name
from tests.choice import choice
from tests.lowering.meaning import TASKS

INT = ArrayType(np.dtype("int32"), ())
_ARITY = {"neg": 1, "add": 2, "sub": 2, "mul": 2}


@st.composite
def stateful_graphs(draw: st.DrawFn, tasks: Sequence[str] = TASKS, max_nodes: int = 12, unknown: bool = True) -> Graph:
    """Valid graphs before placement, whose variables and scopes are on `tasks`."""
    fresh = FreshNames()
    devices = (None, *tasks)
    refs = [Value(fresh(name), RefType(INT), choice(draw, devices)) for name in "wvu"[: draw(st.integers(1, 3))]]
    arrays = [Value(fresh(name), INT) for name in "xy"[: draw(st.integers(1, 2))]]
    inputs, nodes = (*refs, *arrays), []
    for _ in range(draw(st.integers(3, max_nodes))):
        node = draw(_node(fresh, refs, arrays, tasks, unknown))
        nodes.append(node)
        arrays += node.array_outputs
    outputs = tuple(_operand(draw, arrays) for _ in range(draw(st.integers(0, 3))))
    return Graph(inputs, tuple(nodes), outputs)


def _operand(draw: st.DrawFn, arrays: Sequence[Value]) -> Operand:
    # The newest values come first, so that graphs become deep.
    match choice(draw, ("any", "of the last", "literal")):
        case "any":
            return choice(draw, arrays[::-1])
        case "of the last":
            return choice(draw, arrays[-3:])
    return Literal(np.int32(draw(st.integers(-3, 3))), INT)


_KINDS = ("read", "read", "assign", "update", "numeric", "numeric", "numeric", "unknown")


@st.composite
def _node(
    draw: st.DrawFn,
    fresh: FreshNames,
    refs: Sequence[Value],
    arrays: Sequence[Value],
    tasks: Sequence[str],
    unknown: bool,
) -> Node:
    ref, operand = choice(draw, refs), _operand(draw, arrays)
    update = choice(draw, (None, WITH_STATE))
    match choice(draw, _KINDS):
        case "read":
            return Node(ops.var_read, (ref,), (Value(fresh(ref.name), INT),), device=update)
        case "assign":
            return Node(ops.var_assign, (ref, operand), (Value(fresh("done"), TokenType()),), device=update)
        case "update":
            op = ops.UPDATES[choice(draw, sorted(kind for kind in KINDS if not KINDS[kind].by_rows))]
            return Node(op, (ref, operand), (Value(fresh("done"), TokenType()),), device=update)
        case "unknown" if unknown:
            op, arity = numeric(primitives_by_name()["neg"], unknown_effects=True), 1
        case _:
            name = choice(draw, sorted(_ARITY))
            op, arity = numeric(primitives_by_name()[name]), _ARITY[name]
    device = choice(draw, (None, WITH_STATE, WITH_STATE, *tasks))
    operands = tuple(_operand(draw, arrays) for _ in range(arity))
    return Node(op, operands, (Value(fresh("n"), INT),), device=device)


def some_inputs(graph: Graph) -> list[jax.Array]:
    """A new array for each array argument of a graph of this file."""
    return [jnp.int32(3 + index) for index in range(len(graph.inputs) - len(graph.refs))]


def some_state(graph: Graph) -> dict[str, jax.Array]:
    """A new array for each variable of a graph of this file, by its name."""
    return {ref.name: jnp.int32(100 * (1 + index)) for index, ref in enumerate(graph.refs)}
