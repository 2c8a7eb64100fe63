"""Group the nodes between transfers, and between what a host does itself, into XLA calls.

A node's stage is how many transfers and host nodes its operands have come through, and which host nodes it comes after.
The nodes of one device and one stage make one cluster, so a cluster waits for all it needs before it starts, never for
what it helps to make, and never for a queue that none of its nodes waits for. Reads, and what is made from reads alone,
move to the stage of their first user: an update reads its variables in the very call that writes them, so that no other
step comes between. Where the users wait for different queues, they move to what these have in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from dflow.tracing import ops
from dflow.tracing.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.types import HANDLES, TokenType


@dataclass(frozen=True)
class Cluster:
    """Make an `xla.call` of each device's nodes of each level; transfers and host nodes stay as they are."""

    name: ClassVar[str] = "cluster"

    def __call__(self, graph: Graph) -> Graph:
        stages = _stages(graph)
        groups: dict[tuple[_Stage, str | None], list[Node]] = {}
        for node in graph.nodes:
            if not _stands_alone(node):
                groups.setdefault((stages[id(node)], node.device), []).append(node)
        used = _used_outside(graph, groups.values())
        fresh = graph.fresh_names()
        moved: dict[Value, Value] = {}
        ranked: list[tuple[tuple[int, int, int], Node]] = []
        for (stage, device), nodes in groups.items():
            call = _call(nodes, device, used, fresh)
            moved.update((value, call.outputs[0]) for node in nodes for value in node.outputs if value not in used)
            ranked.append(((stage.level, 1, len(stage.hosts)), call))
        alone = [node for node in graph.nodes if _stands_alone(node)]
        ranked += [((stages[id(n)].level, 0 if n.op is ops.net_recv else 2, 0), n) for n in alone]
        ranked.sort(key=lambda entry: entry[0])
        ordered = tuple(_reordered(node, moved) for _, node in ranked)
        return Graph(graph.inputs, ordered, graph.outputs)


class _Stage(NamedTuple):
    """`hosts` are the host nodes that come before, by identity. Of one level, more hosts come later."""

    level: int
    hosts: frozenset[int]


def _stands_alone(node: Node) -> bool:
    return node.op in (ops.net_send, ops.net_recv) or node.op in ops.HOST_OPS


def _stages(graph: Graph) -> dict[int, _Stage]:
    earliest = _earliest_stages(graph)
    return _sink_reads(graph, earliest)


def _earliest_stages(graph: Graph) -> dict[int, _Stage]:
    stages: dict[int, _Stage] = {}
    sent: dict[tuple[object, object], _Stage] = {}
    for node in graph.nodes:
        producers = [graph.producers[v] for v in (*node.values, *node.after) if v in graph.producers]
        before = [_after(producer, stages) for producer in producers]
        level = max((stage.level for stage in before), default=0)
        hosts = frozenset[int]().union(*(stage.hosts for stage in before))
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = _Stage(level, hosts)
        if node.op is ops.net_recv:
            source = sent[node.attributes["edge"], node.device]
            level, hosts = source.level + 1, source.hosts
        stages[id(node)] = _Stage(level, hosts)
    return stages


def _after(node: Node, stages: Mapping[int, _Stage]) -> _Stage:
    """The stage of what needs the node and nothing else."""
    level, hosts = stages[id(node)]
    return _Stage(level + 1, hosts | {id(node)}) if node.op in ops.HOST_OPS else _Stage(level, hosts)


def _sink_reads(graph: Graph, stages: dict[int, _Stage]) -> dict[int, _Stage]:
    """Move what depends on reads alone to the stage of its first user, or of what must come after it."""
    floating: set[int] = set()
    for node in graph.nodes:
        if not node.must_run and not _stands_alone(node):
            made_from = [graph.producers.get(v) for v in node.values if not isinstance(v.type, HANDLES)]
            if all(producer is not None and id(producer) in floating for producer in made_from):
                floating.add(id(node))
    outputs = {output for output in graph.outputs if isinstance(output, Value)}
    followers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in node.after:
            followers.setdefault(value, []).append(node)
    host_levels = {id(node): stages[id(node)].level for node in graph.nodes if node.op in ops.HOST_OPS}
    for node in reversed(graph.nodes):
        if id(node) in floating and not outputs.intersection(node.outputs):
            later = [n for v in node.outputs for n in (*graph.uses.get(v, ()), *followers.get(v, ()))]
            if later:
                stages[id(node)] = _first([stages[id(n)] for n in later], stages[id(node)], host_levels)
    return stages


def _first(later: Sequence[_Stage], own: _Stage, host_levels: Mapping[int, int]) -> _Stage:
    """The latest stage that is not after any of `later`."""
    hosts = frozenset.intersection(*(stage.hosts for stage in later))
    levels = [stage.level for stage in later if stage.hosts == hosts]
    if levels:
        return _Stage(min(stage.level for stage in later), hosts)
    return _Stage(max([own.level, *(host_levels[host] + 1 for host in hosts)]), hosts)


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
    refs: list[Operand] = [value for value in taken if isinstance(value.type, HANDLES)]
    arrays: list[Operand] = [value for value in taken if not isinstance(value.type, HANDLES)]
    given = tuple(value for node in nodes for value in node.outputs if value in used)
    # Values are made anew outside the body, so that each is defined once.
    outputs = given or (Value(fresh("done"), TokenType()),)
    inner = {value: Value(value.name, value.type) for value in (*taken, *made)}
    body = Graph(
        tuple(inner[value] for value in taken if isinstance(value.type, HANDLES))
        + tuple(inner[value] for value in taken if not isinstance(value.type, HANDLES)),
        tuple(_inside(node, inner) for node in nodes),
        tuple(inner[value] for value in given),
    )
    after = dict.fromkeys(value for node in nodes for value in node.after if value not in made)
    return Node(ops.xla_call, (*refs, *arrays), outputs, {"donate": ()}, (body,), device, tuple(after), nodes[0].origin)


def _inside(node: Node, inner: dict[Value, Value]) -> Node:
    inputs = tuple(inner[operand] if isinstance(operand, Value) else operand for operand in node.inputs)
    outputs = tuple(inner[value] for value in node.outputs)
    after = tuple(inner[value] for value in node.after if value in inner)
    return Node(node.op, inputs, outputs, node.attributes, node.bodies, None, after, node.origin)


def _reordered(node: Node, moved: dict[Value, Value]) -> Node:
    """Order edges to values that stay inside a cluster become edges to the cluster."""
    after = dict.fromkeys(moved.get(value, value) for value in node.after)
    kept = tuple(value for value in after if value not in node.inputs and value not in node.outputs)
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, node.device, kept, node.origin)
