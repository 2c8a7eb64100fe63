"""Drop every node without used results and visible effects."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dflow.lowering.passes.base import Pass
from dflow.tracing.ir.graph import Graph, Value


@dataclass(frozen=True)
class Prune(Pass):
    """Keep the nodes that must run or that the outputs need; unused reads are dropped."""

    def __call__(self, graph: Graph) -> Graph:
        live = {output for output in graph.outputs if isinstance(output, Value)}
        kept = []
        for node in reversed(graph.nodes):
            if node.must_run or any(output in live for output in node.outputs):
                live.update(node.values)
                live.update(node.after)
                kept.append(node)
        return dataclasses.replace(graph, nodes=tuple(reversed(kept)))
