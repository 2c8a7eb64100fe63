"""Drop every node without used results and visible effects."""

from __future__ import annotations

import dataclasses

from dflow.tracing.ir.graph import Graph, Value


def prune(graph: Graph) -> Graph:
    """Keep the nodes that must run or that the outputs need; unused reads are dropped."""
    live = {output for output in graph.outputs if isinstance(output, Value)}
    kept = []
    for node in reversed(graph.nodes):
        if node.must_run or any(output in live for output in node.outputs):
            live.update(node.values)
            live.update(node.after)
            kept.append(node)
    return dataclasses.replace(graph, nodes=tuple(reversed(kept)))
