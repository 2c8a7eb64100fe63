"""Ask for copies from device to device as late as they can be without any call having to wait for them.

What is copied takes memory where it goes from the moment the copy is asked for, so a function that brings many values
to one device (layers of weights, say, that live on another) would hold all of them from its start. Each copy gets an
order edge to a call of the device it goes to: the last one that is over, by the `timeline`, when the copy must begin
for what takes it to start when it did. So it is on its way while the calls before its user run. M. Abadi et al.:
TensorFlow: Large-scale machine learning on heterogeneous distributed systems (2015), section 5.2.

No call is made later, so a step takes as long as before, and no device holds more at any time:

- A copy begins between when it did and when it must; those from one device to another, one after the other.
- A value that is not there anyway where it comes from (an argument, a variable not yet written, a result, or what
  another use comes for later) is not held longer there.
- The call that a copy comes after waits for nothing from outside (queues, other tasks) that the copy's users do not
  wait for as well; so nothing can wait for itself, and a queue that is slow delays nobody else's values.

What is left alone: copies of less than `least_bytes`, which are not worth an edge; copies of what is given back; and
transfers from task to task. A receive holds nothing before its value comes, and a send begins with its value there.
To delay it, its task would have to learn how far the other task is; for this it has only what it receives itself.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import ClassVar

from dflow.lowering.timeline import Timeline, timeline
from dflow.tracing import ops
from dflow.tracing.graph import Graph, Node, Value
from dflow.tracing.types import ArrayType

#: What is smaller is copied at once.
LEAST_BYTES = 1 << 20
#: So many calls are looked at for one that waits for no more than a copy's users do.
_TRIES = 8
_WAITING = frozenset({*ops.HOST_OPS, ops.net_recv})


@dataclass(frozen=True)
class Schedule:
    """Give the copies of a clustered graph order edges to the calls that they need not come before."""

    least_bytes: int = LEAST_BYTES
    name: ClassVar[str] = "schedule"

    def __call__(self, graph: Graph) -> Graph:
        if not any(map(self._is_large, graph.nodes)):
            return graph
        run = timeline(graph)
        may_wait = [self._is_large(node) and self._is_taken(node, run) for node in graph.nodes]
        latest = _latest(run, may_wait)
        edges = _edges(run, latest, may_wait)
        if not edges:
            return graph
        nodes = [
            dataclasses.replace(node, after=(*node.after, edges[number])) if number in edges else node
            for number, node in enumerate(graph.nodes)
        ]
        # By time, each still comes after all it needs; a receive is over when its send is.
        times = [run.end[n] if node.op is ops.net_recv else latest[n] for n, node in enumerate(nodes)]
        order = sorted(range(len(nodes)), key=lambda number: (times[number], number))
        return dataclasses.replace(graph, nodes=tuple(nodes[number] for number in order))

    def _is_large(self, node: Node) -> bool:
        if node.op is not ops.dev_copy:
            return False
        type = node.inputs[0].type
        return isinstance(type, ArrayType) and type.size_bytes >= self.least_bytes

    @staticmethod
    def _is_taken(node: Node, run: Timeline) -> bool:
        """Whether calls take what is copied, and nobody else."""
        (copied,) = node.outputs
        return copied in run.users and copied not in run.kept


def _latest(run: Timeline, may_wait: Sequence[bool]) -> list[int]:
    """When each node is to start at the latest; all but copies when they do. Copies of one way follow one another."""
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
    """Until when what a copy takes is there for other reasons than the copy."""
    (value,) = run.graph.nodes[number].values
    if value in run.kept:
        return float("inf")
    return max([run.free_until.get(value, 0), *(run.end[user] for user in run.users[value] if user != number)])


def _edges(run: Timeline, latest: Sequence[int], may_wait: Sequence[bool]) -> dict[int, Value]:
    """By the number of a copy, what the call gives that it is to come after."""
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
    """By node, what it comes after of all that waits for others (a bit for each): queues, tasks, loops on these."""
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
