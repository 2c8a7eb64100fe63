"""Repeat nodes made of literals alone on each task that uses them, instead of sending their results.

Zeros with the shape of a table cost a task almost nothing to make, but as much to send as the table. Equal nodes were
merged before, so the zeros of several updates are one node, which may be on none of their tasks. Only ops that give the
same bits on every device are repeated: those without arithmetic, and `square`, which rounds once. (optax's norm of
gradients squares the imaginary part of each, which is zeros.) Inputs of branches and loops are still sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflow.lowering.passes.base import Pass
from dflow.lowering.passes.prune import Prune
from dflow.tracing.devices.device_name import task_of
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.primitives.first_rows import first_rows_p
from dflow.tracing.primitives.state_primitives import wire_p

_CHEAP = frozenset(f"jax.{name}" for name in ["broadcast_in_dim", "convert_element_type", "iota", "reshape", "square"])


@dataclass(frozen=True)
class Repeat(Pass):
    """Repeat these nodes of a placed graph, once for each device of another task that uses them."""

    def __call__(self, graph: Graph) -> Graph:
        if len({node.device for node in graph.nodes}) < 2:
            return graph
        made = _made_of_literals(graph)
        return Prune()(_Repeating(made, graph).graph()) if made else graph


def _made_of_literals(graph: Graph) -> dict[Value, Node]:
    """Return the nodes made of literals by cheap ops alone, by each of their results."""
    found: dict[Value, Node] = {}
    for node in graph.nodes:
        if node.op.name in _CHEAP and not node.after and all(value in found for value in node.values):
            found.update(dict.fromkeys(node.outputs, node))
    return found


class _Repeating:
    def __init__(self, made: dict[Value, Node], graph: Graph) -> None:
        self._made, self._old, self._fresh = made, graph, graph.fresh_names()
        self._nodes: list[Node] = []
        self._on: dict[tuple[Value, str], Value] = {}

    def graph(self) -> Graph:
        for node in self._old.nodes:
            stays = node.op in CONTROL_OPS or node.op.primitive in (wire_p, first_rows_p) or node.device is None
            self._nodes.append(node if stays else self._taking(node, node.device or ""))
        return Graph(self._old.inputs, tuple(self._nodes), self._old.outputs)

    def _taking(self, node: Node, device: str) -> Node:
        """Return the node with the operands that are repeated on `device`."""
        return node.with_operands({value: self._there(value, device) for value in node.values if value in self._made})

    def _there(self, value: Value, device: str) -> Value:
        node = self._made[value]
        if task_of(node.device or "") == task_of(device):
            return value
        if (value, device) not in self._on:
            copy = self._taking(node, device)
            outputs = tuple(replace(output, name=self._fresh(output.name)) for output in node.outputs)
            self._nodes.append(replace(copy, outputs=outputs, device=device))
            self._on.update({(old, device): new for old, new in zip(node.outputs, outputs, strict=True)})
        return self._on[value, device]
