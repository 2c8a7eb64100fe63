"""What other devices wait for goes first: the nodes of one device and stage as two XLA calls, where that is worth it.

The results of a call are there when all of it has run. So that another device need not wait for work that it does not
need, the nodes whose results are copied to it, with all that these are made of, make a call before the rest. Nodes that
touch state stay together, so that no other step comes between them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflow.lowering.placement.work import Work, work_of
from dflow.tracing import ops
from dflow.tracing.graph import Graph, Node

#: The rest is a call of its own if it does as much as this: about a tenth of a millisecond.
LEAST = Work(1e7, 1e6)


def rest_of(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Of nodes that could be one call, those that no other device waits for; none if they should be one call."""
    first = {id(node) for node in nodes if _is_copied(graph, node)}
    if not first:
        return []
    first |= _made_of(graph, nodes, first)
    stateful = {id(node) for node in nodes if node.effects}
    if stateful & first:
        first |= stateful
        first |= _made_of(graph, nodes, first)
    rest = [node for node in nodes if id(node) not in first]
    return rest if _is_worth_it(rest) else []


def _is_copied(graph: Graph, node: Node) -> bool:
    return any(user.op is ops.dev_copy for value in node.outputs for user in graph.uses.get(value, ()))


def _made_of(graph: Graph, nodes: Sequence[Node], wanted: Collection[int]) -> set[int]:
    """Of `nodes`, which are in order, those that any of the wanted ones needs."""
    producers = graph.producers
    needed = set(wanted)
    for node in reversed(nodes):
        if id(node) in needed:
            for value in (*node.values, *node.after):
                if value in producers:
                    needed.add(id(producers[value]))
    return needed.intersection(id(node) for node in nodes)


def _is_worth_it(rest: Sequence[Node]) -> bool:
    total = Work()
    for node in rest:
        total = total.plus(work_of(node))
        if total.flops >= LEAST.flops or total.moved_bytes >= LEAST.moved_bytes:
            return True
    return False
