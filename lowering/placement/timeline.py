"""A rough prediction of when each node of a lowered graph runs, and of the memory that its devices need.

The calls of a device run one after the other, in the order of the graph; transfers and host nodes run as soon as they
can. The costs are those of an assumed machine (`RATES`, `LINK`), so that a graph becomes the same plan wherever it is
lowered: only the ratios of costs matter. Times are whole ns, so sums are exact.

A value takes memory from the start of the node that makes it, or of its transfer, to the end of its last use. A
read that is only moved takes none until the variable is written. Arguments, variables and results stay until the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dflow.lowering.placement.problem import DeviceLink
from dflow.lowering.placement.simulate import most_held
from dflow.lowering.placement.work import Rates, work_in, work_of
from dflow.lowering.values.moved_reads import moved_reads, variables_read
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import ArrayType, RefType

#: A device that starts a program in 10 us, and a link that is slow in comparison, so that transfers start early.
RATES, LINK = Rates(1e12, 1e11, 1e-5), DeviceLink(2e-5, 1e10)

_TRANSFERS = (ops.dev_copy, ops.net_send)
_NS = 1e9


@dataclass(frozen=True)
class Timeline:
    """A run of `graph`: the start and the end of each node, in ns."""

    graph: Graph
    start: Sequence[int]
    end: Sequence[int]

    @cached_property
    def users(self) -> Mapping[Value, tuple[int, ...]]:
        """The indices of the nodes that take each value, in order."""
        found: dict[Value, list[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            for value in dict.fromkeys(node.values):
                found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    @cached_property
    def free_until(self) -> Mapping[Value, float]:
        """The inputs and the moved reads, with the time until which they take no additional memory."""
        found: dict[Value, float] = dict.fromkeys(self.graph.inputs, _FOR_EVER)
        writes: dict[Value, list[int]] = {}
        for number, node in enumerate(self.graph.nodes):
            for effect, ref in node.effects if node.must_run else ():
                if effect is Effect.WRITE and ref is not None:
                    writes.setdefault(ref, []).append(self.start[number])
        taken = moved_reads(self.graph)
        for number, node in enumerate(self.graph.nodes):
            for value, ref in zip(node.outputs, variables_read(node), strict=True) if node in taken else ():
                times = writes.get(ref, [])
                position = bisect_left(times, self.end[number])
                found[value] = times[position] if position < len(times) else _FOR_EVER
        return found

    @cached_property
    def kept(self) -> frozenset[Value]:
        """The values that the graph returns."""
        return frozenset(output for output in self.graph.outputs if isinstance(output, Value))

    def last_use(self, value: Value) -> float:
        """Return the time at which a value is freed, if its node has ended by then."""
        ends = [self.end[number] for number in self.users.get(value, ())]
        return _FOR_EVER if value in self.kept else max(ends, default=0)

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        """The largest number of bytes held at one time, by device, or by task for nodes without a device."""
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
        return {device: most_held(sorted(found)) for device, found in changes.items()}


_FOR_EVER = float("inf")


def timeline(graph: Graph) -> Timeline:
    """Return the run of a lowered graph, at the costs of `RATES` and `LINK`."""
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
    """Return the time of a node, in ns; 0 for a receive, which ends with its send."""
    if node.op is ops.net_recv:
        return 0
    if node.op in _TRANSFERS:
        return int(_NS * LINK.seconds(sum(map(_size, node.inputs))))
    work = work_in(inner for body in node.bodies for inner in body.nodes) if node.bodies else work_of(node)
    return int(_NS * (RATES.launch_s + RATES.seconds(work)))


def _size(operand: object) -> int:
    type = getattr(operand, "type", None)
    held = type.of if isinstance(type, RefType) else type
    return held.size_bytes if isinstance(held, ArrayType) else 0
