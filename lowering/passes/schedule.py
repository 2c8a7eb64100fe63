"""Start copies from device to device as late as possible without delaying any call.

A copy takes memory on its destination from its dispatch on. So a function that copies many values to one device (such
as layers of weights that another device holds) would hold all of them from its start. This pass adds to each copy an
order edge from a call on its destination: the last call that has ended, by the `timeline`, when the copy must begin so
that its user starts on time. Thus the copy runs while the calls before its user run. M. Abadi et al.: TensorFlow:
Large-scale machine learning on heterogeneous distributed systems (2015), section 5.2.

No call runs later, so a step takes as long as before, and no device holds more at any time:

- A copy begins between its old start and its latest one; copies from one device to another run one after the other.
- A value is not held longer on its source device, unless it is held there anyway: as an argument, a variable not yet
  written or a result, or for a later use.
- The call before a copy depends on no host node or receive (queues, other tasks) on which the copy's users do not all
  depend. So there is no deadlock, and a slow queue delays no values that do not depend on it.

Left alone are copies of less than `least_bytes`, which are not worth an edge, copies of results, and transfers between
tasks. A receive holds no memory before its value arrives, and a send starts when its value is ready. To delay a send,
its task would need to know the progress of the other task, which it knows only by the values that it receives.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from functools import reduce
from operator import and_, or_

from dflow.lowering.placement.timeline import Timeline, timeline
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import ArrayType

#: Smaller values are copied as soon as they are ready.
LEAST_BYTES = 1 << 20
#: Number of calls that are tried in search of one that depends on nothing beyond what a copy's users depend on.
_TRIES = 8
_WAITING = frozenset({*ops.HOST_OPS, ops.net_recv})


def schedule(graph: Graph, least_bytes: int = LEAST_BYTES) -> Graph:
    """Add order edges to the copies of a clustered graph, from calls that may run before them."""
    large = [_copied_bytes(node) >= least_bytes for node in graph.nodes]
    if not any(large):
        return graph
    run = timeline(graph)
    taken = run.users.keys() - run.kept
    may_wait = [is_large and node.outputs[0] in taken for is_large, node in zip(large, graph.nodes, strict=True)]
    latest = _latest(run, may_wait)
    edges = _edges(run, latest, may_wait)
    if not edges:
        return graph
    nodes = [
        dataclasses.replace(node, after=(*node.after, edges[number])) if number in edges else node
        for number, node in enumerate(graph.nodes)
    ]
    # Sorted by time, each node still follows its inputs; a receive ends when its send does.
    times = [run.end[n] if node.op is ops.net_recv else latest[n] for n, node in enumerate(nodes)]
    order = sorted(range(len(nodes)), key=lambda number: (times[number], number))
    return dataclasses.replace(graph, nodes=tuple(nodes[number] for number in order))


def _copied_bytes(node: Node) -> int:
    """Return the size of the value that a copy copies; -1 for other nodes."""
    type = node.inputs[0].type if node.op is ops.dev_copy else None
    return type.size_bytes if isinstance(type, ArrayType) else -1


def _latest(run: Timeline, may_wait: Sequence[bool]) -> list[int]:
    """Return the latest start of each copy, and the start of each other node.

    Copies with the same source and destination run one after the other.
    """
    nodes, latest = run.graph.nodes, list(run.start)
    needed = {
        number: min(run.start[user] for user in run.users[node.outputs[0]])
        for number, node in enumerate(nodes)
        if may_wait[number]
    }
    next_on: dict[object, int] = {}
    for number in sorted(needed, key=lambda number: (needed[number], number), reverse=True):
        way, cost = (nodes[number].attributes["source"], nodes[number].device), run.end[number] - run.start[number]
        end = min(needed[number], next_on.get(way, needed[number]), _held_until(run, number))
        latest[number] = max(int(end) - cost, run.start[number])
        next_on[way] = latest[number]
    return latest


def _held_until(run: Timeline, number: int) -> float:
    """Return the time until which the source of a copy is held for reasons other than the copy."""
    (value,) = run.graph.nodes[number].values
    if value in run.kept:
        return float("inf")
    return max([run.free_until.get(value, 0), *(run.end[user] for user in run.users[value] if user != number)])


def _edges(run: Timeline, latest: Sequence[int], may_wait: Sequence[bool]) -> dict[int, Value]:
    """Return, by the index of a copy, a result of the call that it is to run after."""
    nodes = run.graph.nodes
    calls: dict[str | None, list[int]] = {}
    for number, node in enumerate(nodes):
        if node.op is ops.xla_call and node.array_outputs:
            calls.setdefault(node.device, []).append(number)
    ends = {device: [run.end[call] for call in own] for device, own in calls.items()}
    awaited = _awaited(run.graph)
    found: dict[int, Value] = {}
    for number, node in enumerate(nodes):
        if not may_wait[number] or node.device not in calls:
            continue
        own = calls[node.device]
        common = reduce(and_, (awaited[user] for user in run.users[node.outputs[0]]))
        first, last = (bisect_right(ends[node.device], time) for time in (run.start[number], latest[number]))
        for call in reversed(own[max(first, last - _TRIES) : last]):
            if awaited[call] | common == common:
                found[number] = nodes[call].array_outputs[0]
                break
    return found


def _awaited(graph: Graph) -> list[int]:
    """Return, for each node, the host nodes and receives that it depends on, as bits."""
    found: list[int] = []
    after: dict[Value, int] = {}
    bit = 1
    for node in graph.nodes:
        before = reduce(or_, (after.get(value, 0) for value in (*node.values, *node.after)), 0)
        found.append(before)
        if node.op in _WAITING:
            before, bit = before | bit, bit << 1
        after.update(dict.fromkeys(node.outputs, before))
    return found
