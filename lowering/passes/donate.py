"""Mark the variables whose buffers an XLA call may overwrite: its written ones, unless it may fail while it runs.

A call with Python callbacks fails when one of them raises; then its variables must keep their values.
"""

from __future__ import annotations

import dataclasses

from dflow.tracing.ir import ops
from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.graph import Graph, Node
from dflow.tracing.jaxprs.callbacks import calls_python


def donate(graph: Graph) -> Graph:
    """Set `donate` of each `xla.call` to the operands that are written variables, or to none."""
    nodes = tuple(_donating(node) if node.op is ops.xla_call else node for node in graph.nodes)
    return dataclasses.replace(graph, nodes=nodes)


def _donating(node: Node) -> Node:
    written = {ref for effect, ref in node.effects if effect is Effect.WRITE}
    if written and calls_python(node.bodies[0]):
        return node
    donate = tuple(index for index, operand in enumerate(node.inputs) if operand in written)
    return dataclasses.replace(node, attributes={**node.attributes, "donate": donate})
