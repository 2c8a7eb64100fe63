"""Hypothesis generator of straight-line graphs with state: variables on several tasks, updates, unknown effects.

Beside `tests.graphs_`, whose programs are traced, these graphs have what a trace rarely gives: nodes of an update that
feed anything, unknown effects at any place, one operand twice. All numbers are int32, which wraps the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from dflow.tracing import ops
from dflow.tracing.device import WITH_STATE
from dflow.tracing.graph import FreshNames, Graph, Literal, Node, Operand, Value
from dflow.tracing.jax_frontend import primitive_named
from dflow.tracing.op import numeric
from dflow.tracing.types import ArrayType, RefType, TokenType
from dflow.tracing.updates import ASSIGNS
from tests.lowering.meaning import TASKS

INT = ArrayType(np.dtype("int32"), ())
_ARITY = {"neg": 1, "add": 2, "sub": 2, "mul": 2}


@st.composite
def stateful_graphs(draw: st.DrawFn, tasks: Sequence[str] = TASKS, max_nodes: int = 12, unknown: bool = True) -> Graph:
    """Valid graphs before placement, whose variables and stated devices are of `tasks`."""
    fresh = FreshNames()
    devices = st.sampled_from([None, *tasks])
    refs = [Value(fresh(name), RefType(INT), draw(devices)) for name in "wvu"[: draw(st.integers(1, 3))]]
    arrays = [Value(fresh(name), INT) for name in "xy"[: draw(st.integers(1, 2))]]
    inputs, nodes = (*refs, *arrays), []
    for _ in range(draw(st.integers(3, max_nodes))):
        node = draw(_nodes(fresh, refs, arrays, tasks, unknown))
        nodes.append(node)
        arrays += node.array_outputs
    outputs = draw(st.lists(_operands(arrays), max_size=3))
    return Graph(inputs, tuple(nodes), tuple(outputs))


def _operands(arrays: Sequence[Value]) -> st.SearchStrategy[Operand]:
    # Values made last come first to mind, so that graphs grow deep.
    literals = st.builds(Literal, st.integers(-3, 3).map(np.int32), st.just(INT))
    return st.one_of(st.sampled_from(arrays[::-1]), st.sampled_from(arrays[-3:]), literals)


@st.composite
def _nodes(
    draw: st.DrawFn,
    fresh: FreshNames,
    refs: Sequence[Value],
    arrays: Sequence[Value],
    tasks: Sequence[str],
    unknown: bool,
) -> Node:
    ref, operand = draw(st.sampled_from(refs)), draw(_operands(arrays))
    update = draw(st.sampled_from([None, WITH_STATE]))
    match draw(st.sampled_from(["read", "read", "assign", "update", "numeric", "numeric", "numeric", "unknown"])):
        case "read":
            return Node(ops.var_read, (ref,), (Value(fresh(ref.name), INT),), device=update)
        case "assign":
            return Node(ops.var_assign, (ref, operand), (Value(fresh("done"), TokenType()),), device=update)
        case "update":
            op = ops.UPDATES[draw(st.sampled_from([*ASSIGNS]))]
            return Node(op, (ref, operand), (Value(fresh("done"), TokenType()),), device=update)
        case "unknown" if unknown:
            op, arity = numeric(primitive_named("neg"), unknown_effects=True), 1
        case _:
            name = draw(st.sampled_from(sorted(_ARITY)))
            op, arity = numeric(primitive_named(name)), _ARITY[name]
    device = draw(st.sampled_from([None, WITH_STATE, WITH_STATE, *tasks]))
    operands = tuple(draw(_operands(arrays)) for _ in range(arity))
    return Node(op, operands, (Value(fresh("n"), INT),), device=device)


def some_inputs(graph: Graph) -> list[jax.Array]:
    """A new array for each array that a graph of this file takes."""
    return [jnp.int32(3 + index) for index in range(len(graph.inputs) - len(graph.refs))]


def some_state(graph: Graph) -> dict[str, jax.Array]:
    """A new array for each variable of a graph of this file, by its name."""
    return {ref.name: jnp.int32(100 * (1 + index)) for index, ref in enumerate(graph.refs)}
