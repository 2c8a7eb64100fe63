"""Initial values of an optimizer's state: the ops of those arrays that do not depend on the parameters.

Why: a zero momentum is best made where its variable lives, and not read from there and sent back. Slots that begin
alike, as most do, share one initialiser, which is traced once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.lowering.discharge import discharge
from dflow.lowering.initial_ops import InitialOps
from dflow.tracing.graph import Graph, Literal, Node, Operand, Value
from dflow.tracing.initial_value import TypedInitial
from dflow.tracing.types import ArrayType


class _Computed(TypedInitial):
    """An output that depends on the parameters, taken from their values when it is asked for."""

    def __init__(self, type: ArrayType, value: Callable[[], Any]) -> None:
        self.type, self._value = type, value

    def __call__(self) -> Any:
        return self._value()


def initials_of(graph: Graph, values: Callable[[], Sequence[Any]]) -> list[TypedInitial]:
    """The initialiser of each output of a graph; `values` computes all outputs, once, if one is not made by ops."""
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
    """The nodes that compute an output, in order; None where one of them takes what the graph is given."""
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
    """What two outputs have in common that are computed alike."""
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
