"""Replace the order of effects in the node list by order edges, per resource and task.

Effects on two resources are not ordered, with two exceptions. An op that releases data to other threads or tasks, such
as an enqueue, comes after the earlier writes of variables. An op on a variable comes after the earlier ops that acquire
data from others, such as a dequeue. So the thread that takes an element sees all writes before its enqueue.

After this pass the order of the node list has no meaning: two effects on one variable whose order matters are joined by
an operand or by `after`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from dflow.lowering.passes.task_control_flow import tasks_of
from dflow.tracing.ir.effects import Effect, commute
from dflow.tracing.ir.graph import Graph, Node, Value

_ALONE = (Effect.SEND, Effect.RECV)


def order(graph: Graph) -> Graph:
    """Add order edges to each node from the earlier nodes that it does not commute with."""
    lines: dict[str, _Line] = {}
    nodes = []
    for node in graph.nodes:
        if not node.op.declared and not node.bodies:
            nodes.append(node)
            continue
        # A node on several tasks is ordered on each of them; its part there follows the earlier nodes there.
        before = (value for task in tasks_of(node) for value in lines.setdefault(task, _Line()).enter(node))
        operands = set(node.values)
        after = tuple(value for value in dict.fromkeys(before) if value not in operands)
        nodes.append(dataclasses.replace(node, after=after) if after else node)
    return dataclasses.replace(graph, nodes=tuple(nodes))


@dataclass
class _Line:
    """The effects of the nodes visited on one task: per variable, the effects that a later one may have to follow."""

    recent: dict[Value, list[tuple[Effect, Value]]] = field(default_factory=dict)
    barrier: Value | None = None
    since: list[Value] = field(default_factory=list)
    #: The last write of each variable, and the last op on each queue or accumulator that acquired data.
    written: dict[Value, Value] = field(default_factory=dict)
    acquired: dict[Value, Value] = field(default_factory=dict)

    def enter(self, node: Node) -> tuple[Value, ...]:
        """Record the node; return the values whose nodes it must follow, each once, in order."""
        effects = [(effect, ref) for effect, ref in node.effects if effect not in _ALONE]
        if not effects:
            return ()
        done = node.outputs[0]
        if any(effect is Effect.UNKNOWN for effect, _ in effects):
            before = [*([self.barrier] if self.barrier is not None else []), *self.since]
            self.recent, self.barrier, self.since = {}, done, []
            self.written, self.acquired = {}, {}
            return tuple(dict.fromkeys(before))
        found: list[Value] = [self.barrier] if self.barrier is not None else []
        for ref in dict.fromkeys(ref for _, ref in effects if ref is not None):
            kinds = {effect for effect, on in effects if on is ref}
            kind = next((kind for kind in kinds if kind is not Effect.READ), Effect.READ)
            found += self._follow(ref, kind, done)
        found += self._released_and_acquired(effects, done)
        self.since.append(done)
        return tuple(dict.fromkeys(found))

    def _released_and_acquired(self, effects: Sequence[tuple[Effect, Value | None]], done: Value) -> list[Value]:
        kinds = {effect for effect, _ in effects}
        found = [*self.written.values()] if Effect.RELEASE in kinds else []
        if not kinds.isdisjoint((Effect.READ, Effect.WRITE)):
            found += self.acquired.values()
        for effect, ref in effects:
            if effect is Effect.WRITE and ref is not None:
                self.written[ref] = done
            if effect is Effect.ACQUIRE and ref is not None:
                self.acquired[ref] = done
        return found

    def _follow(self, ref: Value, kind: Effect, done: Value) -> list[Value]:
        line = self.recent.setdefault(ref, [])
        conflicting = [value for effect, value in line if not commute(effect, kind)]
        if kind is not Effect.READ:
            line.clear()
        line.append((kind, done))
        return conflicting
