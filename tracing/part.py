"""Subgraphs: the nodes that some values of a graph need, and inlining of calls in it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.ir.types import RefType
from dflow.tracing.jaxprs.attributes import Body, attributes_of

#: Nodes that do nothing but apply their body once, and the attribute that holds it.
_CALLS = {
    "jax.jit": "jaxpr",
    "jax.pjit": "jaxpr",
    "jax.closed_call": "call_jaxpr",
    "jax.custom_jvp_call": "call_jaxpr",
    "jax.custom_vjp_call": "call_jaxpr",
    "jax.checkpoint": "jaxpr",
    "jax.remat2": "jaxpr",
}


def part_of(graph: Graph, wanted: Sequence[Value], given: Collection[Value]) -> Graph:
    """The part of `graph` that computes `wanted` from its inputs and the values `given`.

    Its inputs are the variables it touches, then its other inputs, then those of `given` it needs. A write is kept if
    it is wanted, or if a kept node reads the variable after it. So all values are those of the whole graph.
    """
    needed, read_later = {*wanted} - {*given}, set[Value]()
    used = {*wanted}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if not needed.intersection(node.outputs) and not _writes(node).intersection(read_later):
            continue
        nodes.append(node)
        used.update(node.values)
        needed.update({*node.values, *node.after}.difference(given))
        if node.op is ops.var_assign:
            read_later -= _writes(node)
        read_later |= {ref for effect, ref in node.effects if effect is Effect.READ and ref is not None}
    fresh = graph.fresh_names()
    kept = [_without(node, given, fresh) for node in reversed(nodes)]
    refs = [ref for ref in graph.refs if ref in used]
    others = [value for value in graph.inputs if not isinstance(value.type, RefType) and value in needed]
    return Graph((*refs, *others, *(value for value in given if value in used)), tuple(kept), tuple(wanted))


def _writes(node: Node) -> set[Value]:
    return {ref for effect, ref in node.effects if effect is Effect.WRITE and ref is not None}


def _without(node: Node, given: Collection[Value], fresh: FreshNames) -> Node:
    """The node with fresh names for those of its results that are `given`, and without order edges from `given`."""
    outputs = tuple(
        Value(fresh(value.name), value.type, value.device) if value in given else value for value in node.outputs
    )
    return replace(node, outputs=outputs, after=tuple(value for value in node.after if value not in given))


def body_names(node: Node) -> set[str]:
    """The names of the values in the bodies of a node, at any depth."""
    return {name for body in _bodies([*attributes_of(node).values()]) for name in _names(body.graph)}


def _bodies(values: Any) -> list[Body]:
    if isinstance(values, (tuple, list)):
        return [body for value in values for body in _bodies(value)]
    return [values] if isinstance(values, Body) else []


def _names(graph: Graph) -> set[str]:
    own = {value.name for value in graph.inputs}.union(value.name for node in graph.nodes for value in node.outputs)
    return own.union(*map(body_names, graph.nodes))


def is_call(node: Node) -> bool:
    """Whether the node does nothing but apply a body, which `opened` can put in its place."""
    return isinstance(attributes_of(node).get(_CALLS.get(node.op.name, "")), Body)


def opened(graph: Graph, call: Node) -> tuple[Graph, dict[Value, Any]]:
    """Replace the node `call` by its body; return the graph, and its new inputs with the body's constants.

    Values of the body keep their names, unless the graph has the same name.
    """
    body: Body = attributes_of(call)[_CALLS[call.op.name]]
    fresh = graph.fresh_names()
    count = len(body.constants)
    held = zip(body.graph.inputs[:count], body.constants, strict=True)
    constants = {Value(fresh(value.name), value.type): constant for value, constant in held}
    new: dict[Value, Operand] = dict(zip(body.graph.inputs, [*constants, *call.inputs], strict=True))
    inner = [_renamed(node, new, fresh) for node in body.graph.nodes]
    results = [new[output] if isinstance(output, Value) else output for output in body.graph.outputs]
    outer: Mapping[Value, Operand] = dict(zip(call.outputs, results, strict=True))
    position = next(index for index, node in enumerate(graph.nodes) if node is call)
    after = [node.with_operands(outer) for node in graph.nodes[position + 1 :]]
    outputs = tuple(outer.get(output, output) if isinstance(output, Value) else output for output in graph.outputs)
    return Graph((*graph.inputs, *constants), (*graph.nodes[:position], *inner, *after), outputs), constants


def _renamed(node: Node, new: dict[Value, Operand], fresh: FreshNames) -> Node:
    outputs = tuple(Value(fresh(value.name), value.type, value.device) for value in node.outputs)
    moved = replace(node.with_operands(new), outputs=outputs)
    new.update(zip(node.outputs, outputs, strict=True))
    return moved
