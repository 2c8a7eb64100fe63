"""Boxes and edges of a graph drawing, before layout.

Consecutive ops of a name scope become one box; so does a nested function or a loop, which is one node. Variables, their
initial values, and values with many consumers are not drawn as boxes: their consumers list them by name instead.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dflow.tracing.devices.device_name import short_device_name
from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import TokenType
from dflow.tracing.own_scopes import PREFIX

#: A value with more consuming boxes than this is listed instead of drawn.
MOST_TAKERS = 6
#: Most boxes in a drawing.
MOST_BOXES = 1000
#: Most lines of text in a box's tooltip.
_MOST_TOLD = 20


@dataclass(frozen=True)
class Box:
    """A box. `kind` is input, op, group or output; `takes` has the names of its inputs that have no edge."""

    kind: str
    title: str
    detail: str
    told: tuple[str, ...]
    device: str | None = None
    has_effects: bool = False
    takes: tuple[str, ...] = ()


class Edge(NamedTuple):
    """An edge to a later box, with the name of the value that it carries; None if only the order matters."""

    source: int
    target: int
    value: str | None


@dataclass(frozen=True)
class Drawing:
    """Boxes and edges; every edge goes from a box to a later one.

    `aside`  texts of the variables and values that are listed instead of drawn
    `note`   what the drawing omits, or empty
    """

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    aside: tuple[str, ...]
    note: str = ""

    def without(self, left_out: Collection[Edge]) -> Drawing:
        """Return the drawing without these edges; the boxes that they lead to list the values by name."""
        names: dict[int, dict[str, None]] = {}
        for edge in left_out:
            if edge.value is not None:
                names.setdefault(edge.target, {})[edge.value] = None
        boxes = (replace(box, takes=(*box.takes, *names.get(index, ()))) for index, box in enumerate(self.boxes))
        return replace(self, boxes=tuple(boxes), edges=tuple(edge for edge in self.edges if edge not in left_out))


def drawing_of(graph: Graph) -> Drawing:
    """Return the drawing of a graph.

    If it is too large, consecutive ops of one source line share a box, and boxes beyond `MOST_BOXES` are left out.
    """
    first_reads = _first_reads(graph)
    nodes = [node for node in graph.nodes if node.outputs[0] not in first_reads]
    runs = _runs(nodes, _scope)
    note = ""
    if len(runs) + len(graph.inputs) > MOST_BOXES:
        runs = _runs(nodes, lambda node: str(node.loc.short) if node.loc else _scope(node))
        note = f"{len(graph.nodes)} ops: those of one line that follow each other are one box"
    if len(runs) > MOST_BOXES:
        note = f"the first {MOST_BOXES} of {len(runs)} boxes, for {len(graph.nodes)} ops; print the graph to see all"
        runs = runs[:MOST_BOXES]
    return _drawing(graph, runs, first_reads, note)


def _first_reads(graph: Graph) -> dict[Value, Value]:
    """Return the values read from variables before any write, each with its variable."""
    found: dict[Value, Value] = {}
    written: set[Value | None] = set()
    for node in graph.nodes:
        if node.op is ops.var_read and node.effects[0][1] not in written:
            found.update((value, ref) for value in node.outputs for ref in node.values)
        written.update(ref for effect, ref in node.effects if effect is Effect.WRITE)
    return found


class OpGroup(NamedTuple):
    """Consecutive ops that share a box titled `name`; empty for a single op."""

    name: str
    nodes: tuple[Node, ...]


def _runs(nodes: Sequence[Node], key: Callable[[Node], str]) -> list[OpGroup]:
    runs = []
    for name, group in itertools.groupby(nodes, key):
        members = tuple(group)
        runs += [OpGroup(name, members)] if name and len(members) > 1 else [OpGroup("", (node,)) for node in members]
    return runs


def scope_path(node: Node) -> tuple[str, ...]:
    """Return the name scopes, outermost first; the first is `dense, backward` for ops of the gradient of `dense`."""
    names = [name.removeprefix(PREFIX) for name in scopes_of(node)]
    if names and "transpose(" in node.scope.partition("/")[0]:
        names[0] += ", backward"
    return tuple(names)


def are_own(node: Node) -> list[bool]:
    """Return, for each name scope of `scope_path`, whether it is of ops that dflow makes itself."""
    return [name.startswith(PREFIX) for name in scopes_of(node)]


def scopes_of(node: Node) -> list[str]:
    """Return the names of the scopes, outermost first, without what `jvp(...)` and the like put around them."""
    return [name for part in node.scope.split("/") if (name := re.sub(r"^(?:\w+\()+|\)+$", "", part))]


def _scope(node: Node) -> str:
    return next(iter(scope_path(node)), "")


def _drawing(graph: Graph, runs: Sequence[OpGroup], first_reads: Mapping[Value, Value], note: str) -> Drawing:
    counts = Counter(value for run in runs for value in _taken(run))
    aside = {value for value, count in counts.items() if count > MOST_TAKERS} | {*graph.refs}
    inputs = [value for value in graph.inputs if not value.is_variable and value not in aside]
    boxes = [Box("input", f"%{value.name}", str(value.type), (repr(value),)) for value in inputs]
    made = dict(zip(inputs, itertools.count(), strict=False))
    edges: list[Edge] = []

    def join(taken: Sequence[Value]) -> tuple[str, ...]:
        """Add the edges to the next box, which takes these values; return the names of those without an edge."""
        drawn = (value for value in taken if value in made and value not in aside)
        edges.extend(Edge(made[value], len(boxes), f"%{value.name}") for value in drawn)
        named = (first_reads.get(value, value) for value in taken)
        return tuple(dict.fromkeys(f"%{value.name}" for value in named if value in aside))

    for run in runs:
        takes = join(_taken(run))
        made.update((value, len(boxes)) for node in run.nodes for value in node.outputs)
        boxes.append(_box(run, takes))
    first = len(inputs)
    edges += (Edge(first + before, first + after, None) for before, after in orders([run.nodes for run in runs]))
    for index, value in enumerate(value for value in graph.outputs if isinstance(value, Value)):
        boxes.append(Box("output", f"return {index}", str(value.type), (repr(value),), takes=join([value])))
    listed = [_where(value) for value in (*graph.inputs, *made) if value in aside]
    return Drawing(tuple(boxes), tuple(edges), tuple(listed), note)


def _box(run: OpGroup, takes: tuple[str, ...]) -> Box:
    told = [_told(node) for node in run.nodes[:_MOST_TOLD]]
    more = len(run.nodes) - len(told)
    devices = {device_of(node) for node in run.nodes}
    return Box(
        "group" if run.name or _holds_body(run.nodes[0]) else "op",
        run.name or title_of(run.nodes[0]),
        f"{len(run.nodes)} ops" if run.name else _results(run.nodes[0]),
        (*told, *([f"and {more} more"] if more else [])),
        devices.pop() if len(devices) == 1 else "several devices",
        any(node.must_run for node in run.nodes),
        takes,
    )


def _taken(run: OpGroup) -> list[Value]:
    """Return the distinct values that a box takes from outside, in order."""
    own = {value for node in run.nodes for value in node.outputs}
    return list(dict.fromkeys(value for node in run.nodes for value in node.values if value not in own))


def orders(groups: Sequence[Sequence[Node]]) -> list[tuple[int, int]]:
    """Return pairs of groups by number: each write of a variable and its next reads, and those and the next write."""
    found: dict[tuple[int, int], None] = {}
    written: dict[Value, int] = {}
    read: dict[Value, list[int]] = {}
    for position, nodes in enumerate(groups):
        effects = [(effect, ref) for node in nodes for effect, ref in node.effects if ref is not None]
        for effect, ref in effects:
            earlier = [written[ref]] if ref in written else []
            earlier += read.get(ref, []) if effect is Effect.WRITE else []
            found.update(((before, position), None) for before in earlier if before != position)
        for effect, ref in effects:
            if effect is Effect.WRITE:
                written[ref], read[ref] = position, []
            else:
                read.setdefault(ref, []).append(position)
    return list(found)


def title_of(node: Node) -> str:
    name = node.op.name.removeprefix("jax.")
    called = node.attributes.get("name")
    return f"{name} {called}" if isinstance(called, str) else name


def _holds_body(node: Node) -> bool:
    """Whether the node is a nested function, a loop or a branch."""
    return any(key.endswith("jaxpr") or key == "branches" for key in node.attributes)


def _results(node: Node) -> str:
    values = [value for value in node.outputs if not isinstance(value.type, TokenType)]
    return ", ".join(f"%{value.name}: {value.type}" for value in values)


def _told(node: Node) -> str:
    operands = ", ".join(f"%{one.name}" if isinstance(one, Value) else repr(one) for one in node.inputs)
    line = f"  {node.loc.short}" if node.loc is not None else ""
    return f"{', '.join(map(repr, node.outputs))} = {node.op.name}({operands}){line}"


def device_of(node: Node) -> str | None:
    where = [value.device for value in node.values if value.is_variable]
    device = node.device if node.device is not None or not where else where[0]
    return None if device is None else short_device_name(device)


def _where(value: Value) -> str:
    return repr(value) if value.device is None else f"{value!r} on {short_device_name(value.device)}"
