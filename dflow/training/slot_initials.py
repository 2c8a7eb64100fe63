"""Initial values of an optimizer's slots, as ops where they do not depend on the parameters.

Why: a zero momentum is best created where its variable lives, rather than computed here and sent. Slots with the same
initial value, as most have, share one initialiser, which is traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.lowering.programs.discharge import discharge
from dflow.lowering.programs.initial_ops import InitialOps
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.state.initial_value import TypedInitial


class _Computed(TypedInitial):
    """An initial value that depends on the parameters, computed from their values on demand."""

    def __init__(self, type: ArrayType, value: Callable[[], Any]) -> None:
        self.type, self._value = type, value

    def __call__(self) -> Any:
        return self._value()


def initials_of(graph: Graph, values: Callable[[], Sequence[Any]]) -> list[TypedInitial]:
    """Return the initialiser of each output of a graph. `values` computes all outputs, if one is needed by value."""
    made_by = {value: (place, node) for place, node in enumerate(graph.nodes) for value in node.outputs}
    shared: dict[Any, InitialOps] = {}
    once = functools.cache(values)

    def initial(place: int, output: Operand) -> TypedInitial:
        assert isinstance(output.type, ArrayType)
        return _initial(output, made_by, shared) or _Computed(output.type.strong, lambda: once()[place])

    return [initial(place, output) for place, output in enumerate(graph.outputs)]


_MadeBy = Mapping[Value, tuple[int, Node]]


def _initial(output: Operand, made_by: _MadeBy, shared: dict[Any, InitialOps]) -> InitialOps | None:
    nodes = _behind(output, made_by)
    if nodes is None:
        return None
    key = _signature(nodes, output)
    if key not in shared:
        shared[key] = _ops(nodes, output)
    return shared[key]


def _behind(output: Operand, made_by: _MadeBy) -> Sequence[Node] | None:
    """Return the nodes that compute an output, in order; None if one of them depends on an input of the graph."""
    found: dict[int, Node] = {}
    wanted = [output]
    while wanted:
        value = wanted.pop()
        if isinstance(value, Literal):
            continue
        if value not in made_by:
            return None
        place, node = made_by[value]
        if place not in found:
            found[place] = node
            wanted += [*node.inputs, *node.values]
    return [found[place] for place in sorted(found)]


def _signature(nodes: Sequence[Node], output: Operand) -> Any:
    """Return a key that is equal for outputs computed alike."""
    if any(node.bodies for node in nodes):
        return output
    numbers = {value: number for number, value in enumerate(value for node in nodes for value in node.outputs)}

    def operand(each: Operand) -> Any:
        return (str(each.type), np.asarray(each.value).tobytes()) if isinstance(each, Literal) else numbers[each]

    done = tuple((node.op, *sorted(node.attributes.items()), *map(operand, node.inputs)) for node in nodes)
    signature = done, str(output.type), operand(output)
    try:
        hash(signature)
    except TypeError:
        return output
    return signature


def _ops(nodes: Sequence[Node], output: Operand) -> InitialOps:
    if isinstance(output, Literal):
        return InitialOps(lambda: jnp.asarray(output.value, output.type.dtype))
    pure = discharge(Graph((), tuple(nodes), (output,)))
    return InitialOps(lambda: pure.fn()[0])
