"""A graph as JSON data for the browser: its ops, and the edges between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dflow.tracing.ir.graph import Graph, Value
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.source import Loc


def graph_json(graph: Graph, title: str = "") -> dict[str, Any]:
    """Return the graph as JSON data; `title` is shown above it, such as the function's name."""
    values = {value: number for number, value in enumerate(v for node in graph.nodes for v in node.outputs)}
    lines: dict[Loc, int] = {}
    nodes: list[dict[str, Any]] = []
    edges: list[list[int]] = []
    made: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        shown: dict[str, Any] = {"kind": "op", "title": node.op.name.rpartition(".")[2], "op": node.op.name}
        if node.loc is not None:
            shown["line"] = lines.setdefault(node.loc, len(lines))
        nodes.append(shown | {"gives": [values[value] for value in node.outputs]})
        edges += [[made[each], index, values[each]] for each in node.inputs if isinstance(each, Value) and each in made]
        made |= dict.fromkeys(node.outputs, index)
    return {
        "title": title,
        "ops": len(nodes),
        "notes": [],
        "lines": [{"at": str(loc), "short": loc.short} for loc in lines],
        "variables": [{"name": ref.name, "type": str(ref.type)} for ref in graph.refs],
        "values": [{"name": f"%{v.name}", "type": str(v.type), "size_bytes": _size_bytes(v)} for v in values],
        "nodes": nodes,
        "edges": edges,
    }


def _size_bytes(value: Value) -> int:
    kind = value.type
    if not isinstance(kind, ArrayType):
        return 0
    try:
        return int(math.prod(kind.shape) * np.dtype(kind.dtype).itemsize)
    except TypeError:  # a type of JAX's own, such as a key
        return 0
