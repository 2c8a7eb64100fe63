"""When each node of a lowered graph runs, roughly, and what memory its devices need then.

The calls of a device run one after the other, in the order of the graph; transfers, and what a task does itself, as
soon as they can. Costs are those of no machine in particular (`RATES`, `LINK`), so that a graph becomes the same plan
wherever it is lowered: what counts is what is longer than what. Times are whole ns, so that no sum loses what is added.

A value takes memory from the start of what makes it, or of the transfer that brings it, to the end of its last use. A
snapshot of a variable is the variable itself, until that is written. Arguments, variables and what is given back are
there to the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dflow.lowering.placement.costs import Rates
from dflow.lowering.placement.problem import Link
from dflow.lowering.placement.work import Work, work_of
from dflow.lowering.snapshots import snapshots
from dflow.tracing import ops
from dflow.tracing.effects import Effect
from dflow.tracing.graph import Graph, Node, Value
from dflow.tracing.types import ArrayType, RefType

#: A device that a program takes 10 us to start on, and what joins two: slow beside it, so that transfers start early.
RATES, LINK = Rates(1e12, 1e11, 1e-5), Link(2e-5, 1e10)

_TRANSFERS = (ops.dev_copy, ops.net_send)
_NS = 1e9


@dataclass(frozen=True)
class Timeline:
    """A run of `graph`: by node, when it starts and when it ends, in ns."""

    graph: Graph
    start: Sequence[int]
    end: Sequence[int]

    @property
    def step_ns(self) -> int:
        """Until all has run."""
        return max(self.end, default=0)

    @cached_property
    def users(self) -> Mapping[Value, tuple[int, ...]]:
        """By value, the numbers of the nodes that take it, in order."""
        found: dict[Value, list[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            for value in dict.fromkeys(node.values):
                found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    @cached_property
    def free_until(self) -> Mapping[Value, float]:
        """The values that take no memory of their own where they are, until when: arguments, variables, results."""
        found: dict[Value, float] = dict.fromkeys(self.graph.inputs, _FOR_EVER)
        writes: dict[Value, list[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            for effect, ref in node.effects if node.must_run else ():
                if effect is Effect.WRITE and ref is not None:
                    writes.setdefault(ref, []).append(self.start[number])
        taken = snapshots(self.graph)
        for number, node in enumerate(self.graph.nodes):
            for value, ref in _reads(node) if node in taken else ():
                times = writes.get(ref, [])
                place = bisect_left(times, self.end[number])
                found[value] = times[place] if place < len(times) else _FOR_EVER
        return found

    @cached_property
    def kept(self) -> frozenset[Value]:
        """The values that are given back."""
        return frozenset(output for output in self.graph.outputs if isinstance(output, Value))

    def last_use(self, value: Value) -> float:
        """When a value is let go of."""
        ends = [self.end[number] for number in self.users.get(value, ())]
        return _FOR_EVER if value in self.kept else max(ends, default=0)

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        """By device, or task where it is on none, the most bytes that are held there at once."""
        changes: dict[str, list[tuple[float, int]]] = {}
        for value in self.graph.inputs:
            if value.device is not None and (size := _size(value)):
                changes.setdefault(value.device, []).append((0, size))
        for number, node in enumerate(self.graph.nodes):
            for value in node.array_outputs:
                begin = max(self.start[number], self.free_until.get(value, 0))
                end = max(self.last_use(value), self.end[number])
                if begin < end:
                    size = _size(value)
                    changes.setdefault(node.device or "", []).extend([(begin, size), (end, -size)])
        return {device: _most(sorted(found)) for device, found in changes.items()}


_FOR_EVER = float("inf")


def timeline(graph: Graph) -> Timeline:
    """Run a lowered graph, at the costs of `RATES` and `LINK`."""
    start, end = [], []
    there: dict[Value, int] = {}
    free: dict[str | None, int] = {}
    sent: dict[object, tuple[int, int]] = {}
    for node in graph.nodes:
        begin = max((there.get(value, 0) for value in (*node.values, *node.after)), default=0)
        if node.op is ops.xla_call:
            begin = max(begin, free.get(node.device, 0))
        over = begin + cost_of(node)
        if node.op is ops.net_recv:
            begin, over = (max(begin, time) for time in sent.get((node.attributes["edge"], node.device), (0, 0)))
        start.append(begin)
        end.append(over)
        if node.op is ops.xla_call:
            free[node.device] = over
        if node.op is ops.net_send:
            sent[node.attributes["edge"], node.attributes["destination"]] = begin, over
        there.update(dict.fromkeys(node.outputs, over))
    return Timeline(graph, start, end)


def cost_of(node: Node) -> int:
    """How long a node takes, in ns; nothing for a receive, which ends with its send."""
    if node.op is ops.net_recv:
        return 0
    if node.op in _TRANSFERS:
        return int(_NS * LINK.seconds(_size(node.inputs[0])))
    total = Work() if node.bodies else work_of(node)
    for body in node.bodies:
        for inner in body.nodes:
            total = total.plus(work_of(inner))
    return int(_NS * (RATES.launch_s + RATES.seconds(total)))


def _reads(node: Node) -> Iterator[tuple[Value, Value]]:
    """What a snapshot gives, each with its variable."""
    (body,) = node.bodies
    outer = dict(zip(body.inputs, node.inputs, strict=True))
    for value, output in zip(node.outputs, body.outputs, strict=True):
        assert isinstance(output, Value)
        (ref,) = body.producers[output].values
        handed = outer[ref]
        assert isinstance(handed, Value)
        yield value, handed


def _size(operand: object) -> int:
    type = getattr(operand, "type", None)
    held = type.of if isinstance(type, RefType) else type
    return held.size_bytes if isinstance(held, ArrayType) else 0


def _most(changes: Sequence[tuple[float, int]]) -> int:
    """The most at any time; at one time what ends goes before what begins, as sorting has them."""
    most = held = 0
    for _, size in changes:
        held += size
        most = max(most, held)
    return most
