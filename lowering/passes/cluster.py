"""Group the nodes between transfers and host nodes into XLA calls. A host node is run by the host, such as a queue op.

A node's stage is the number of transfers and host nodes on the longest path to it (its level), with the set of host
nodes that it depends on. An order edge from a node of another device counts as a transfer.

The nodes of one device and one stage form one cluster. So a cluster's inputs are all ready before it starts, none of
them depends on the cluster, and it does not wait for a queue that none of its nodes depends on. If another device of
the task waits for some of its results and the rest is long, the rest forms a second cluster after it. Values for other
tasks form a cluster of their own if the rest of the stage changes state and has nothing to do with them, or if the rest
needs values of other tasks and they do not: the row numbers of a lookup do not wait for the weights of a layer.

Reads, lookups, and nodes that depend on reads alone move to the stage of their first user. Thus an update reads its
variables in the call that writes them, and no other step runs between. If the users depend on different queues, the
reads move to the stage that depends on the queues common to all. Nodes made of reads that only return results to the
caller stay in the stage of the reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

from dflow.lowering.placement.work import Work, exceeds
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import FreshNames, Graph, Node, Value
from dflow.tracing.ir.types import HANDLES, TokenType


def form_clusters(graph: Graph) -> Graph:
    """Make an `xla.call` of the nodes of each device and stage; transfers and host nodes stay as they are."""
    is_whole = len({node.device for node in graph.nodes}) == 1 and not any(map(_stands_alone, graph.nodes))
    stages = dict.fromkeys(graph.nodes, _NO_STAGE) if is_whole else _stages(graph)
    groups: dict[tuple[_ClusterStage, str | None], list[Node]] = {}
    ranked: list[tuple[tuple[int, int, int], Node]] = []
    for node in graph.nodes:
        if _stands_alone(node):
            ranked.append((_rank(stages[node], _PLACES.get(node.op, _LAST)), node))
        else:
            groups.setdefault((stages[node], node.device), []).append(node)
    fresh = graph.fresh_names()
    moved: dict[Value, Value] = {}
    received = set[Node]() if is_whole else _received(graph)
    for (stage, _), group in groups.items():
        for nodes in _sent_and_rest(graph, group, received):
            first, rest = early_and_rest(graph, nodes)
            for position, part, earlier in ((_FIRST, first, ()), (_REST, rest, first)):
                if part:
                    call, inside = _call(graph, part, earlier, fresh)
                    moved.update(dict.fromkeys(inside, call.outputs[0]))
                    ranked.append((_rank(stage, position), call))
    ranked.sort(key=lambda entry: entry[0])
    return Graph(graph.inputs, tuple(_reordered(node, moved) for _, node in ranked), graph.outputs)


def _received(graph: Graph) -> set[Node]:
    """Return the nodes that need values of other tasks."""
    found: set[Node] = set()
    for node in graph.nodes:
        needed = (graph.producers.get(value) for value in (*node.values, *node.after))
        if node.op is ops.net_recv or any(producer in found for producer in needed):
            found.add(node)
    return found


def _sent_and_rest(graph: Graph, nodes: Sequence[Node], received: Set[Node]) -> Sequence[Sequence[Node]]:
    """Return the nodes of a stage and device as one group, or as several: values for other tasks come before the rest.

    They do not wait for values of other tasks, nodes that are in `received`, if they do not need them. Those that touch
    state stay with the rest, so that no other step runs between them.
    """
    early = _with_needed(graph, nodes, {node for node in nodes if node not in received and _is_sent(graph, node)})
    if not early or received.isdisjoint(nodes) or any(node.effects for node in early):
        return _sent_and_changes(graph, nodes)
    rest = [node for node in nodes if node not in early]
    return [node for node in nodes if node in early], *_sent_and_changes(graph, rest)


def _sent_and_changes(graph: Graph, nodes: Sequence[Node]) -> Sequence[Sequence[Node]]:
    """Return the nodes of a stage and device as one group, or as two: values for other tasks, and changes of state.

    Variables that are only read and sent are not copied by a call, and they can be sent before the step changes state.
    The values come from nodes that no node with an effect needs, and that need no such node.
    """
    effects = {node for node in nodes if node.must_run}
    if not effects:
        return (nodes,)
    rest = _with_needed(graph, nodes, effects)
    for node in nodes:
        rest.update([node] if any(graph.producers.get(value) in rest for value in (*node.values, *node.after)) else ())
    apart = [node for node in nodes if node not in rest]
    if not any(_is_sent(graph, node) for node in apart):
        return (nodes,)
    return apart, [node for node in nodes if node in rest]


def early_and_rest(graph: Graph, nodes: Sequence[Node]) -> tuple[Sequence[Node], Sequence[Node]]:
    """Return the nodes of a stage and device as one call, or as two: nodes that other devices wait for, and the rest.

    The results of a call exist when the whole call has run. So the first call has the nodes whose results are copied to
    another device, with all that they depend on. Nodes that touch state stay in one call, so that no other step runs
    between them.
    """
    copied = {node for node in nodes if _is_copied(graph, node)}
    if not copied:
        return nodes, ()
    first = _with_needed(graph, nodes, copied)
    stateful = {node for node in nodes if node.effects}
    if stateful & first:
        first = _with_needed(graph, nodes, first | stateful)
    rest = [node for node in nodes if node not in first]
    return ([node for node in nodes if node in first], rest) if exceeds(rest, LEAST_REST) else (nodes, ())


def _is_sent(graph: Graph, node: Node) -> bool:
    return any(user.op is ops.net_send for value in node.outputs for user in graph.uses.get(value, ()))


def _is_copied(graph: Graph, node: Node) -> bool:
    return any(user.op is ops.dev_copy for value in node.outputs for user in graph.uses.get(value, ()))


def _with_needed(graph: Graph, nodes: Sequence[Node], wanted: Set[Node]) -> set[Node]:
    """Return the wanted nodes and the nodes that they depend on, among `nodes`, which are in program order."""
    needed = set(wanted)
    for node in reversed(nodes):
        if node in needed:
            values = (value for value in (*node.values, *node.after) if value in graph.producers)
            needed.update(graph.producers[value] for value in values)
    return needed.intersection(nodes)


class _ClusterStage(NamedTuple):
    """`hosts` are the host nodes before it, one bit each. Within a level, stages with more of them come later."""

    level: int
    hosts: int


#: The rest of a stage becomes a separate call if it does more work than this, which takes about 0.1 ms.
LEAST_REST = Work(1e7, 1e6)
#: The order within a stage.
_FIRST, _REST, _LAST = 1, 3, 4
_PLACES = {ops.net_recv: 0, ops.dev_copy: 2}
_NO_STAGE = _ClusterStage(0, 0)
_HOST_OPS = frozenset(ops.HOST_OPS)
_ALONE = _HOST_OPS | {ops.net_send, ops.net_recv, ops.dev_copy, ops.ids_check}


def _rank(stage: _ClusterStage, position: int) -> tuple[int, int, int]:
    return stage.level, stage.hosts.bit_count(), position


def _stands_alone(node: Node) -> bool:
    return node.op in _ALONE


def _stages(graph: Graph) -> dict[Node, _ClusterStage]:
    bits = {node: 1 << index for index, node in enumerate(node for node in graph.nodes if node.op in _HOST_OPS)}
    earliest = _earliest_stages(graph, bits)
    return _sink_reads(graph, earliest, bits)


def _earliest_stages(graph: Graph, bits: Mapping[Node, int]) -> dict[Node, _ClusterStage]:
    stages: dict[Node, _ClusterStage] = {}
    #: For each node, the stage of a user that depends on this node alone.
    following: dict[Node, _ClusterStage] = {}
    sent: dict[tuple[object, object], _ClusterStage] = {}
    producers = graph.producers
    for node in graph.nodes:
        stage = _NO_STAGE
        for value in (*node.values, *node.after):
            producer = producers.get(value)
            if producer is not None:
                after = following[producer]
                crossed = _ClusterStage(after.level + 1, after.hosts) if _crosses(producer, node) else after
                stage = _later(stage, crossed)
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = stage
        if node.op is ops.net_recv:
            source = sent[node.attributes["edge"], node.device]
            stage = _ClusterStage(source.level + 1, source.hosts)
        stages[node] = stage
        bit = bits.get(node, 0)
        ends_stage = bit or node.op in (ops.dev_copy, ops.ids_check)
        following[node] = _ClusterStage(stage.level + 1, stage.hosts | bit) if ends_stage else stage
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


def _sink_reads(graph: Graph, stages: dict[Node, _ClusterStage], bits: Mapping[Node, int]) -> dict[Node, _ClusterStage]:
    """Move reads, lookups, and nodes that depend on reads alone, to the stage of the first node after them.

    A node made of reads whose results only go to the caller does not count as a user: it stays in the reads' stage.
    """
    floating, stateful = _made_of_reads(graph)
    followers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for value in (*node.values, *node.after):
            producer = graph.producers.get(value)
            if producer is not None and (producer in floating or producer in stateful):
                followers.setdefault(producer, []).append(node)
    ends = {bit: stages[host].level + 1 for host, bit in bits.items()}
    last: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in floating or node in stateful:
            limits = [
                _ClusterStage(stages[n].level - 1, stages[n].hosts) if _crosses(node, n) else stages[n]
                for n in followers.get(node, ())
                if n not in last
            ]
            if not limits:
                last.add(node)
            elif node in floating or (node.effects and not node.must_run and not node.bodies):
                stages[node] = _first(limits, stages[node], ends)
    for node in graph.nodes:
        if node in last:
            made_from = [graph.producers[value] for value in node.values if value in graph.producers]
            stages[node] = reduce(_later, (stages[n] for n in made_from if not _stands_alone(n)), stages[node])
    return stages


def _made_of_reads(graph: Graph) -> tuple[set[Node], set[Node]]:
    """Return the ids of nodes without visible effects that depend on reads alone, and of nodes that depend on any."""
    floating: set[Node] = set()
    stateful: set[Node] = set()
    for node in graph.nodes:
        if not node.must_run and not _stands_alone(node):
            made_from = [graph.producers.get(v) for v in node.values if not isinstance(v.type, HANDLES)]
            if all(producer is not None and producer in floating for producer in made_from):
                floating.add(node)
            if node.effects or any(producer is not None and producer in stateful for producer in made_from):
                stateful.add(node)
    return floating, stateful


def _first(later: Sequence[_ClusterStage], own: _ClusterStage, ends: Mapping[int, int]) -> _ClusterStage:
    """Return the latest stage that is not after any of `later`; `ends` has the level after each host node, by bit."""
    hosts = reduce(and_, (stage.hosts for stage in later))
    if any(stage.hosts == hosts for stage in later):
        return _ClusterStage(min(stage.level for stage in later), hosts)
    return _ClusterStage(max([own.level, *(level for bit, level in ends.items() if bit & hosts)]), hosts)


def _call(graph: Graph, nodes: Sequence[Node], earlier: Sequence[Node], fresh: FreshNames) -> tuple[Node, list[Value]]:
    """Return the call of some nodes, to run after the call of the `earlier` ones, and the values that stay in it."""
    part = graph.part(nodes)
    made = dict.fromkeys(value for node in nodes for value in node.outputs)
    # The body gets new values, so that each value is defined once.
    inner: dict[Any, Any] = {value: Value(value.name, value.type) for value in (*part.inputs, *made)}
    body = Graph(
        tuple(inner[value] for value in part.inputs),
        tuple(_inside(node, inner) for node in nodes),
        tuple(inner[value] for value in part.outputs),
    )
    outputs: tuple[Any, ...] = part.outputs or (Value(fresh("done"), TokenType()),)
    after = dict.fromkeys(value for node in nodes for value in node.after if value not in made)
    after.update((node.outputs[0], None) for node in earlier[-1:])
    device, origin = nodes[0].device, nodes[0].origin
    call = Node(ops.xla_call, part.inputs, outputs, {"donate": ()}, (body,), device, tuple(after), origin)
    return call, list(made.keys() - set(outputs))


def _inside(node: Node, inner: Mapping[Any, Any]) -> Node:
    inputs = tuple(inner.get(operand, operand) for operand in node.inputs)
    after = tuple(inner[value] for value in node.after if value in inner)
    outputs = tuple(inner[value] for value in node.outputs)
    # `dataclasses.replace` takes twice as long as the class, here and in `_reordered`.
    return Node(node.op, inputs, outputs, node.attributes, node.bodies, None, after, node.origin)


def _reordered(node: Node, moved: Mapping[Value, Value]) -> Node:
    """Return the node with order edges to values inside a cluster replaced by edges to the cluster."""
    after = dict.fromkeys(moved.get(value, value) for value in node.after)
    kept = tuple(value for value in after if value not in node.inputs and value not in node.outputs)
    return Node(node.op, node.inputs, node.outputs, node.attributes, node.bodies, node.device, kept, node.origin)
