"""Group the nodes between transfers into XLA calls.

A node's level is how many transfers its operands have come through. The nodes of one device and one level make one
cluster, so a cluster waits for all it needs before it starts and never for what it helps to make. Reads, and what is
made from reads alone, move to the level of their first user: an update reads its variables in the very call that
writes them, so that no other step comes between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from dflow.tracing import ops
from dflow.tracing.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.types import RefType, TokenType


@dataclass(frozen=True)
class Cluster:
    """Make an `xla.call` of each device's nodes of each level; sends and receives stay as they are."""

    name: ClassVar[str] = "cluster"

    def __call__(self, graph: Graph) -> Graph:
        levels = _levels(graph)
        groups: dict[tuple[int, str | None], list[Node]] = {}
        for node in graph.nodes:
            if not _is_transfer(node):
                groups.setdefault((levels[id(node)], node.device), []).append(node)
        used = _used_outside(graph, groups.values())
        fresh = graph.fresh_names()
        moved: dict[Value, Value] = {}
        ranked: list[tuple[int, int, Node]] = []
        for (level, device), nodes in groups.items():
            call = _call(nodes, device, used, fresh)
            moved.update((value, call.outputs[0]) for node in nodes for value in node.outputs if value not in used)
            ranked.append((level, 1, call))
        ranked += [(levels[id(n)], 0 if n.op is ops.net_recv else 2, n) for n in graph.nodes if _is_transfer(n)]
        ranked.sort(key=lambda entry: entry[:2])
        ordered = tuple(_reordered(node, moved) for _, _, node in ranked)
        return Graph(graph.inputs, ordered, graph.outputs)


def _is_transfer(node: Node) -> bool:
    return node.op in (ops.net_send, ops.net_recv)


def _levels(graph: Graph) -> dict[int, int]:
    earliest = _earliest_levels(graph)
    return _sink_reads(graph, earliest)


def _earliest_levels(graph: Graph) -> dict[int, int]:
    levels: dict[int, int] = {}
    sent: dict[tuple[object, object], int] = {}
    for node in graph.nodes:
        before = [levels[id(graph.producers[v])] for v in (*node.values, *node.after) if v in graph.producers]
        level = max(before, default=0)
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = level
        if node.op is ops.net_recv:
            level = sent[node.attributes["edge"], node.device] + 1
        levels[id(node)] = level
    return levels


def _sink_reads(graph: Graph, levels: dict[int, int]) -> dict[int, int]:
    """Move what depends on reads alone to the level of its first user, or of what must come after it."""
    floating: set[int] = set()
    for node in graph.nodes:
        if not node.must_run and not _is_transfer(node):
            made_from = [graph.producers.get(v) for v in node.values if not isinstance(v.type, RefType)]
            if all(producer is not None and id(producer) in floating for producer in made_from):
                floating.add(id(node))
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    followers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.after:
            followers.setdefault(value, []).append(node)
    for node in reversed(graph.nodes):
        if id(node) in floating and not outputs.intersection(node.outputs):
            later = [n for v in node.outputs for n in (*graph.uses.get(v, ()), *followers.get(v, ()))]
            levels[id(node)] = min((levels[id(n)] for n in later), default=levels[id(node)])
    return levels


def _used_outside(graph: Graph, groups: Iterable[list[Node]]) -> set[Value]:
    """The values that leave the cluster they are made in, as operands or as outputs of the graph."""
    group_of = {id(node): index for index, nodes in enumerate(groups) for node in nodes}
    used = {output for output in graph.outputs if isinstance(output, Value)}
    for node in graph.nodes:
        here = group_of.get(id(node))
        for value in node.values:
            producer = graph.producers.get(value)
            if producer is not None and group_of.get(id(producer)) != here:
                used.add(value)
    return used


def _call(nodes: list[Node], device: str | None, used: set[Value], fresh: FreshNames) -> Node:
    made = {value for node in nodes for value in node.outputs}
    taken = dict.fromkeys(value for node in nodes for value in node.values if value not in made)
    refs: list[Operand] = [value for value in taken if isinstance(value.type, RefType)]
    arrays: list[Operand] = [value for value in taken if not isinstance(value.type, RefType)]
    given = tuple(value for node in nodes for value in node.outputs if value in used)
    # Values are made anew outside the body, so that each is defined once.
    outputs = given or (Value(fresh("done"), TokenType()),)
    inner = {value: Value(value.name, value.type) for value in (*taken, *made)}
    body = Graph(
        tuple(inner[value] for value in taken if isinstance(value.type, RefType))
        + tuple(inner[value] for value in taken if not isinstance(value.type, RefType)),
        tuple(_inside(node, inner) for node in nodes),
        tuple(inner[value] for value in given),
    )
    after = dict.fromkeys(value for node in nodes for value in node.after if value not in made)
    return Node(ops.xla_call, (*refs, *arrays), outputs, {"donate": ()}, body, device, tuple(after), nodes[0].origin)


def _inside(node: Node, inner: dict[Value, Value]) -> Node:
    inputs = tuple(inner[operand] if isinstance(operand, Value) else operand for operand in node.inputs)
    outputs = tuple(inner[value] for value in node.outputs)
    after = tuple(inner[value] for value in node.after if value in inner)
    return Node(node.op, inputs, outputs, node.attributes, node.graph, None, after, node.origin)


def _reordered(node: Node, moved: dict[Value, Value]) -> Node:
    """Order edges to values that stay inside a cluster become edges to the cluster."""
    after = dict.fromkeys(moved.get(value, value) for value in node.after)
    kept = tuple(value for value in after if value not in node.inputs and value not in node.outputs)
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.graph, node.device, kept, node.origin)
