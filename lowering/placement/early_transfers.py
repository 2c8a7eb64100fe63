"""Early transfers: split the nodes of one device and stage into two XLA calls, if that is worth it.

The results of an XLA call exist when the whole call has run. To let another device start earlier, the nodes whose
results are copied to it, with all that they depend on, form a first call, and the rest a second. Nodes that touch state
stay in one call, so that no other step runs between them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dflow.lowering.placement.work import Work, work_of
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node

#: The rest becomes a separate call if it does at least this work, which takes about 0.1 ms.
LEAST = Work(1e7, 1e6)


def rest_of(graph: Graph, nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes of one call that should form a second call, since no other device needs them; none for one."""
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
    """Return the ids of those of `nodes` that the `wanted` ones depend on, and theirs; `nodes` are in program order."""
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
