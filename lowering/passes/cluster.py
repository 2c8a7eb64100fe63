"""Group the nodes between transfers and host nodes into XLA calls. A host node is run by the host, such as a queue op.

A node's stage is the number of transfers and host nodes on the longest path to it (its level), with the set of host
nodes that it depends on. An order edge from a node of another device counts as a transfer.

The nodes of one device and one stage form one cluster. So a cluster's inputs are all ready before it starts, none of
them depends on the cluster, and it does not wait for a queue that none of its nodes depends on. If another device of
the task waits for some of its results and the rest is long, the rest forms a second cluster after it.

Reads, and nodes that depend on reads alone, move to the stage of their first user. Thus an update reads its variables
in the call that writes them, and no other step runs between. If the users depend on different queues, the reads move to
the stage that depends on the queues common to all. Nodes made of reads that only return results to the caller stay in
the stage of the reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import ClassVar, NamedTuple

from dflow.lowering.placement.early_transfers import rest_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Operand, Value
from dflow.tracing.ir.types import HANDLES, TokenType


@dataclass(frozen=True)
class FormClusters:
    """Make an `xla.call` of the nodes of each device and stage; transfers and host nodes stay as they are."""

    name: ClassVar[str] = "cluster"

    def __call__(self, graph: Graph) -> Graph:
        is_whole = len({node.device for node in graph.nodes}) == 1 and not any(map(_stands_alone, graph.nodes))
        stages = dict.fromkeys(map(id, graph.nodes), _NO_STAGE) if is_whole else _stages(graph)
        groups: dict[tuple[_ClusterStage, str | None], list[Node]] = {}
        for node in graph.nodes:
            if not _stands_alone(node):
                groups.setdefault((stages[id(node)], node.device), []).append(node)
        is_split = any(node.op is ops.dev_copy for node in graph.nodes)
        parts = [part for group, nodes in groups.items() for part in _parts(graph, *group, nodes, is_split)]
        used = _used_outside(graph, [part.nodes for part in parts])
        fresh = graph.fresh_names()
        moved: dict[Value, Value] = {}
        ranked: list[tuple[tuple[int, int, int], Node]] = []
        for stage, device, nodes, follows in parts:
            call = _call(nodes, device, used, fresh)
            if follows:
                call = replace(call, after=(*call.after, follows[-1].outputs[0]))
            moved.update((value, call.outputs[0]) for node in nodes for value in node.outputs if value not in used)
            ranked.append(((stage.level, stage.hosts.bit_count(), _REST if follows else _FIRST), call))
        for node in graph.nodes:
            if _stands_alone(node):
                stage = stages[id(node)]
                ranked.append(((stage.level, stage.hosts.bit_count(), _PLACES.get(node.op, _LAST)), node))
        ranked.sort(key=lambda entry: entry[0])
        ordered = tuple(_reordered(node, moved) for _, node in ranked)
        return Graph(graph.inputs, ordered, graph.outputs)


class _Part(NamedTuple):
    """The nodes of one call, which runs after the call of the nodes `follows`, of the same stage and device."""

    stage: _ClusterStage
    device: str | None
    nodes: list[Node]
    follows: list[Node]


def _parts(graph: Graph, stage: _ClusterStage, device: str | None, nodes: list[Node], is_split: bool) -> list[_Part]:
    """Return the nodes of a stage and device as one part, or as two: the nodes that other devices need, and the rest.

    Only a graph with copies from device to device (`is_split`) has stages of two parts.
    """
    rest = rest_of(graph, nodes) if is_split else []
    if not rest:
        return [_Part(stage, device, nodes, [])]
    left = {id(node) for node in rest}
    first = [node for node in nodes if id(node) not in left]
    return [_Part(stage, device, first, []), _Part(stage, device, rest, first)]


class _ClusterStage(NamedTuple):
    """`hosts` are the host nodes before it, one bit each. Within a level, stages with more of them come later."""

    level: int
    hosts: int


#: The order within a stage.
_FIRST, _REST, _LAST = 1, 3, 4
_PLACES = {ops.net_recv: 0, ops.dev_copy: 2}
_NO_STAGE = _ClusterStage(0, 0)
_HOST_OPS = frozenset(ops.HOST_OPS)
_ALONE = _HOST_OPS | {ops.net_send, ops.net_recv, ops.dev_copy}


def _stands_alone(node: Node) -> bool:
    return node.op in _ALONE


def _stages(graph: Graph) -> dict[int, _ClusterStage]:
    bits = {id(node): 1 << index for index, node in enumerate(node for node in graph.nodes if node.op in _HOST_OPS)}
    earliest = _earliest_stages(graph, bits)
    return _sink_reads(graph, earliest, bits)


def _earliest_stages(graph: Graph, bits: Mapping[int, int]) -> dict[int, _ClusterStage]:
    stages: dict[int, _ClusterStage] = {}
    #: For each node, the stage of a user that depends on this node alone.
    following: dict[int, _ClusterStage] = {}
    sent: dict[tuple[object, object], _ClusterStage] = {}
    producers = graph.producers
    for node in graph.nodes:
        stage = _NO_STAGE
        for value in (*node.values, *node.after):
            producer = producers.get(value)
            if producer is not None:
                after = following[id(producer)]
                crossed = _ClusterStage(after.level + 1, after.hosts) if _crosses(producer, node) else after
                stage = _later(stage, crossed)
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = stage
        if node.op is ops.net_recv:
            source = sent[node.attributes["edge"], node.device]
            stage = _ClusterStage(source.level + 1, source.hosts)
        stages[id(node)] = stage
        bit = bits.get(id(node), 0)
        ends_stage = bit or node.op is ops.dev_copy
        following[id(node)] = _ClusterStage(stage.level + 1, stage.hosts | bit) if ends_stage else stage
    return stages


def _later(one: _ClusterStage, other: _ClusterStage) -> _ClusterStage:
    """Return the stage of a node that depends on both. It is one of the two, if possible: their bits take memory."""
    if other.level <= one.level and other.hosts | one.hosts == one.hosts:
        return one
    if one.level <= other.level and one.hosts | other.hosts == other.hosts:
        return other
    return _ClusterStage(max(one.level, other.level), one.hosts | other.hosts)


def _crosses(node: Node, next: Node) -> bool:
    """Whether the edge between two nodes, both parts of calls, goes from one device to another."""
    return node.device != next.device and not (_stands_alone(node) or _stands_alone(next))


def _sink_reads(graph: Graph, stages: dict[int, _ClusterStage], bits: Mapping[int, int]) -> dict[int, _ClusterStage]:
    """Move nodes that depend on reads alone to the stage of their first user, or of the first node ordered after them.

    A node made of reads whose results only go to the caller does not count as a user: it stays in the reads' stage.
    """
    floating, stateful = _made_of_reads(graph)
    followers: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for value in (*node.values, *node.after):
            producer = graph.producers.get(value)
            if producer is not None and (id(producer) in floating or id(producer) in stateful):
                followers.setdefault(id(producer), []).append(node)
    ends = _Ends({bit: stages[host].level + 1 for host, bit in bits.items()})
    last: set[int] = set()
    for node in reversed(graph.nodes):
        if id(node) in floating or id(node) in stateful:
            limits = [
                _ClusterStage(stages[id(n)].level - 1, stages[id(n)].hosts) if _crosses(node, n) else stages[id(n)]
                for n in followers.get(id(node), ())
                if id(n) not in last
            ]
            if not limits:
                last.add(id(node))
            elif id(node) in floating:
                stages[id(node)] = _first(limits, stages[id(node)], ends)
    for node in graph.nodes:
        if id(node) in last:
            made_from = [graph.producers[value] for value in node.values if value in graph.producers]
            stages[id(node)] = reduce(
                _later, (stages[id(n)] for n in made_from if not _stands_alone(n)), stages[id(node)]
            )
    return stages


def _made_of_reads(graph: Graph) -> tuple[set[int], set[int]]:
    """Return the ids of nodes without visible effects that depend on reads alone, and of nodes that depend on any."""
    floating: set[int] = set()
    stateful: set[int] = set()
    for node in graph.nodes:
        if not node.must_run and not _stands_alone(node):
            made_from = [graph.producers.get(v) for v in node.values if not isinstance(v.type, HANDLES)]
            if all(producer is not None and id(producer) in floating for producer in made_from):
                floating.add(id(node))
            if node.effects or any(producer is not None and id(producer) in stateful for producer in made_from):
                stateful.add(id(node))
    return floating, stateful


class _Ends(dict[int, int]):
    """The first level after all host nodes of a set, computed once per set."""

    def __missing__(self, hosts: int) -> int:
        level, left = 0, hosts
        while left:
            bit = left & -left
            level, left = max(level, self[bit]), left ^ bit
        self[hosts] = level
        return level


def _first(later: Sequence[_ClusterStage], own: _ClusterStage, ends: _Ends) -> _ClusterStage:
    """Return the latest stage that is not after any of `later`."""
    hosts = reduce(and_, (stage.hosts for stage in later))
    if any(stage.hosts == hosts for stage in later):
        return _ClusterStage(min(stage.level for stage in later), hosts)
    return _ClusterStage(max(own.level, ends[hosts]), hosts)


def _used_outside(graph: Graph, groups: Iterable[list[Node]]) -> set[Value]:
    """Return the values used outside of their cluster, as operands or as outputs of the graph."""
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
    # The body gets new values, so that each value is defined once.
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
    """Return the node with order edges to values inside a cluster replaced by edges to the cluster."""
    after = dict.fromkeys(moved.get(value, value) for value in node.after)
    kept = tuple(value for value in after if value not in node.inputs and value not in node.outputs)
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, node.device, kept, node.origin)
