"""A graph as JSON data for the browser: a tree of groups with the ops in them, and the edges between ops.

Groups are name scopes, nested functions with their bodies, ops of one source line, and runs of the other ops; ops of
gradients and of updates that are in no scope have a group each. Besides a graph's arguments and results, no group has
more than `MOST_CHILDREN` children, so a page that lays out only the groups that are open is quick for any graph.

    {"title": "step", "ops": 812, "notes": [],
     "lines": [{"at": "/home/me/train.py:10", "short": "train.py:10", "text": "hidden = x @ w"}],
     "variables": [{"name": "w", "kind": "variable", "type": "f32[64,10]", "size_bytes": 2560, "device": "ps:0"}],
     "values": [{"name": "%1", "type": "f32[8,10]", "size_bytes": 320}],
     "nodes": [{"kind": "scope", "title": "lookup users", "folded": true},
               {"kind": "op", "title": "dot_general", "op": "jax.dot_general", "within": 0, "line": 0, "gives": [0]}],
     "edges": [[1, 2, 0]]}

A group that is `folded` is one of ops that dflow makes itself, and closed at first. Numbers in `within`, `line`,
`gives`, `reads`, `writes` and in edges are indices of the lists; a key without a value is left out. An edge has its
source, its target, and its value, or null where only the order matters. It may begin or end at a function; then it is
of the function as a whole.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflow.graphs.graph_drawing import are_own, device_of, orders, scope_path, title_of
from dflow.tracing.devices.device import WITH_STATE
from dflow.tracing.devices.device_name import short_device_name
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.types import HOST_HANDLES, ArrayType, RefType, Type
from dflow.tracing.jax_frontend import is_jaxpr
from dflow.tracing.jaxprs.attributes import Body, body_of, normal
from dflow.tracing.source import Loc

MOST_CHILDREN = 40
#: Bodies of functions are left out where there are more ops, and further ops of the graph itself too.
MOST_OPS = 20_000
_LONGEST_TEXT = 160
#: Ops whose bodies combine two numbers, and are no functions of the user's.
_COMBINING = ("jax.reduce", "jax.scatter", "jax.select_and", "jax.cum")

#: The nodes that a value comes from (several for a branch), each with the index of the value there.
_Sources = tuple[tuple[int, int], ...]


def graph_json(graph: Graph, title: str = "") -> dict[str, Any]:
    """Return the graph as JSON data; `title` is shown above it, such as the function's name."""
    return _GraphData().of(graph, title)


class _GraphData:
    def __init__(self) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._values: list[dict[str, Any]] = []
        self._edges: dict[tuple[int, int, int | None], None] = {}
        self._joined: set[tuple[int, int]] = set()
        self._lines: dict[Loc, int] = {}
        self._variables: dict[Value, int] = {}
        self._spare = MOST_OPS
        self._without_body = 0

    def of(self, graph: Graph, title: str) -> dict[str, Any]:
        self._variables = {ref: index for index, ref in enumerate(graph.refs)}
        made: dict[Value, _Sources] = {}
        for value in graph.inputs:
            if value not in self._variables:
                node = self._add("input", f"%{value.name}", None)
                made[value] = ((node, self._give(node, value)),)
        shown = graph.nodes[:MOST_OPS]
        self._spare = MOST_OPS - len(shown)
        self._body(shown, None, made, {ref: ref for ref in graph.refs})
        for number, output in enumerate(graph.outputs):
            if isinstance(output, Value) and output in made:
                self._take([output], self._add("output", f"return {number}", None), made)
        _divide(self._nodes)
        notes = []
        if len(shown) < len(graph.nodes):
            notes.append(f"the first {len(shown)} of {len(graph.nodes)} ops; print the graph to see all")
        if self._without_body:
            notes.append(f"{self._without_body} calls are shown without their bodies, since the graph is large")
        return {
            "title": title,
            "ops": sum(node["kind"] in ("op", "function") for node in self._nodes),
            "notes": notes,
            "lines": [_line(loc) for loc in self._lines],
            "variables": [_variable(ref) for ref in self._variables],
            "values": self._values,
            "nodes": self._nodes,
            "edges": [list(edge) for edge in self._edges],
        }

    def _body(
        self, nodes: Sequence[Node], within: int | None, made: dict[Value, _Sources], refs: Mapping[Value, Value]
    ) -> None:
        """Add nodes to a group. `made` has the sources of values, `refs` the variables that handles stand for."""
        scopes: dict[tuple[str, ...], int | None] = {(): within}
        devices = _devices(nodes)
        own = []
        for node, device in zip(nodes, devices, strict=True):
            path = _path(node) if within is None else scope_path(node)
            own_of = dict(enumerate(are_own(node)))
            for depth in range(1, len(path) + 1):
                if path[:depth] not in scopes:
                    folded = own_of.get(depth - 1) or None
                    scopes[path[:depth]] = self._add("scope", path[depth - 1], scopes[path[: depth - 1]], folded=folded)
            own.append(self._op(node, device, scopes[path], made, refs))
        for before, after in orders([(node,) for node in nodes]):
            if (own[before], own[after]) not in self._joined:
                self._edges[own[before], own[after], None] = None

    def _op(
        self,
        node: Node,
        device: str | None,
        within: int | None,
        made: dict[Value, _Sources],
        refs: Mapping[Value, Value],
    ) -> int:
        bodies = [*_bodies(node)]
        size = sum(len(body.nodes) for body, _, _ in bodies)
        if size > self._spare:
            self._without_body += 1
            bodies = []
        about = self._about(node, refs)
        index = self._add("function" if bodies else "op", title_of(node), within, device=device, **about)
        given = {value: ((index, self._give(index, value)),) for value in node.array_outputs}
        if not bodies:
            self._take(node.values, index, made)
        self._spare -= size if bodies else 0
        found: dict[Value, _Sources] = {}
        for body, operands, gives in bodies:
            inside, inner_refs = _entering(body, operands, made, refs)
            self._body(body.nodes, index, inside, inner_refs)
            for value, output in zip(node.array_outputs, body.outputs if gives else (), strict=False):
                if isinstance(output, Value) and output in inside:
                    found[value] = found.get(value, ()) + inside[output]
        made.update(given | found)
        return index

    def _add(self, kind: str, title: str, within: int | None, **about: Any) -> int:
        parts = {"kind": kind, "title": title, "within": within, **about}
        self._nodes.append({key: value for key, value in parts.items() if value not in (None, "", [])})
        return len(self._nodes) - 1

    def _about(self, node: Node, refs: Mapping[Value, Value]) -> dict[str, Any]:
        on = [(effect, self._variables[refs[ref]]) for effect, ref in node.effects if ref is not None and ref in refs]
        return {
            "op": node.op.name,
            "line": None if node.loc is None else self._lines.setdefault(node.loc, len(self._lines)),
            "about": _attributes(node),
            "reads": [*dict.fromkeys(index for effect, index in on if effect is Effect.READ)],
            "writes": [*dict.fromkeys(index for effect, index in on if effect is not Effect.READ)],
            "acts": node.must_run or None,
        }

    def _give(self, node: int, value: Value) -> int:
        """Add a value that a node gives; return the value's index."""
        told = {"name": f"%{value.name}", "type": str(value.type), "size_bytes": _size_bytes(value.type)}
        self._values.append(told)
        self._nodes[node].setdefault("gives", []).append(len(self._values) - 1)
        return len(self._values) - 1

    def _take(self, values: Sequence[Value], node: int, made: Mapping[Value, _Sources]) -> None:
        for source, number in (source for value in values for source in made.get(value, ())):
            self._edges[source, node, number] = None
            self._joined.add((source, node))


def _entering(
    body: Graph, operands: Sequence[Operand], made: Mapping[Value, _Sources], refs: Mapping[Value, Value]
) -> tuple[dict[Value, _Sources], dict[Value, Value]]:
    """Return the sources of the body's last inputs, and the variables that handles among them stand for."""
    pairs = [*zip(reversed(body.inputs), reversed(operands), strict=False)]
    taken = [(value, operand) for value, operand in pairs if isinstance(operand, Value)]
    sources = {value: made[operand] for value, operand in taken if operand in made}
    return sources, {value: refs[operand] for value, operand in taken if operand in refs}


def _bodies(node: Node) -> Iterator[tuple[Graph, Sequence[Operand], bool]]:
    """Yield the bodies of a nested function, loop or branch: the operands that its last inputs take, and whether it
    gives the node's results, as the test of a loop does not.
    """
    for number, graph in enumerate(node.bodies):
        yield graph, node.handed, not (node.op.name == "ctrl.while" and number == 0)
    if node.op.name.startswith(_COMBINING):
        return
    constants = [node.attributes.get(f"{part}_nconsts", 0) for part in ("cond", "body")]
    operands = {
        "branches": node.inputs[1:],
        "cond_jaxpr": (*node.inputs[: constants[0]], *node.inputs[sum(constants) :]),
        "body_jaxpr": node.inputs[constants[0] :],
    }
    for key, given in node.attributes.items():
        if key == "branches" or key.endswith("jaxpr"):
            for one in given if isinstance(given, (tuple, list)) else (given,):
                body = body_of(one) if is_jaxpr(one) else one
                if isinstance(body, Body):
                    yield body.graph, operands.get(key, node.inputs), key != "cond_jaxpr"


def _path(node: Node) -> tuple[str, ...]:
    """Return the name scopes; of an op without one, whether it is of a gradient or of an update of state."""
    if path := scope_path(node):
        return path
    if "transpose(" in node.scope:
        return ("backward",)
    return ("updates",) if node.device == WITH_STATE else ()


def _devices(nodes: Sequence[Node]) -> list[str | None]:
    """Return the devices of nodes by their short names; of an op beside state, that of the state that it feeds."""
    found: list[str | None] = []
    fed: dict[Value, str | None] = {}
    for node in reversed(nodes):
        device = device_of(node)
        if node.device == WITH_STATE:
            own = [value.device for value in node.values if value.is_variable]
            ahead = [fed[value] for value in node.outputs if value in fed]
            device = short_device_name(own[0]) if own and own[0] else next(iter(ahead), None)
            fed.update((value, device) for value in node.values)
        found.append(device)
    return found[::-1]


def _attributes(node: Node) -> str:
    """Return the short attributes of a node as text, none of a nested function, whose name is in its title."""
    if "jaxpr" in node.attributes and "name" in node.attributes:
        return ""
    told = []
    for key, value in node.attributes.items():
        plain = None if is_jaxpr(value) or key == "branches" else normal(value)
        if isinstance(plain, (bool, int, float, str, tuple)) and plain != () and len(f"{plain}") <= 50:
            told.append(f"{key}={plain}")
    return ", ".join(told)[:_LONGEST_TEXT]


def _line(loc: Loc) -> dict[str, str]:
    text = linecache.getline(loc.file, loc.line).strip()
    return {"at": str(loc), "short": loc.short, "text": text[:_LONGEST_TEXT]}


def _variable(ref: Value) -> dict[str, Any]:
    kind = "variable" if ref.is_variable else str(ref.type).partition("<")[0]
    of = ref.type.of if isinstance(ref.type, RefType) else ref.type
    found = {"name": ref.name, "kind": kind, "type": str(of), "size_bytes": _size_bytes(of)}
    return found if ref.device is None else {**found, "device": short_device_name(ref.device)}


def _size_bytes(type: Type) -> int:
    """Return the size of an array, or of the arrays of one element of a queue or accumulator."""
    if isinstance(type, ArrayType):
        return type.size_bytes
    return sum(array.size_bytes for array in type.arrays) if isinstance(type, HOST_HANDLES) else 0


def _divide(nodes: list[dict[str, Any]]) -> None:
    """Divide groups with too many children: first by source line, then into runs of consecutive children."""
    children: dict[int | None, list[int]] = {}
    for index, node in enumerate(nodes):
        children.setdefault(node.get("within"), []).append(index)
    waiting = [(group, own) for group, own in children.items() if len(own) > MOST_CHILDREN]
    while waiting:
        group, own = waiting.pop()
        own = _without(nodes, own, ("input", "output", "scope") if group is None else ("scope",))
        runs = _runs_of_lines(nodes, own) if group is None or nodes[group]["kind"] != "line" else [[one] for one in own]
        size = 1
        if len(runs) > MOST_CHILDREN:
            size = math.ceil(len(runs) / min(MOST_CHILDREN, math.isqrt(len(runs))))
        for start in range(0, len(runs), size):
            joined = [one for run in runs[start : start + size] for one in run]
            if len(joined) > 1:
                waiting += _group(nodes, group, joined, is_line=size == 1)


def _without(nodes: Sequence[Mapping[str, Any]], own: Sequence[int], kinds: Sequence[str]) -> list[int]:
    """Return the children that may be in a run: those of these kinds may not, unless they are many."""
    for kind in kinds:
        if sum(nodes[one]["kind"] == kind for one in own) <= MOST_CHILDREN // 4:
            own = [one for one in own if nodes[one]["kind"] != kind]
    return [*own]


def _runs_of_lines(nodes: Sequence[Mapping[str, Any]], own: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for one in own:
        line = nodes[one].get("line")
        if runs and line is not None and nodes[runs[-1][-1]].get("line") == line:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _group(
    nodes: list[dict[str, Any]], within: int | None, own: list[int], *, is_line: bool
) -> list[tuple[int, list[int]]]:
    """Add a group of these children of `within`; return it if it is to be divided itself."""
    first, last = (nodes[one] for one in (own[0], own[-1]))
    title = "" if is_line else f"{first['title']} … {last['title']}"
    about = {"kind": "line" if is_line else "run", "title": title, "within": within}
    if is_line:
        about["line"] = first["line"]
    nodes.append({key: value for key, value in about.items() if value is not None})
    for one in own:
        nodes[one]["within"] = len(nodes) - 1
    return [(len(nodes) - 1, own)] if len(own) > MOST_CHILDREN else []
