"""Repeat nodes made of literals alone on each task that uses them, instead of sending their results.

Zeros with the shape of a table cost a task almost nothing to make, but as much to send as the table. Equal nodes were
merged before, so the zeros of several updates are one node, which may be on none of their tasks. Only ops that give the
same bits on every device are repeated: those without arithmetic, and `square`, which rounds once. (optax's norm of
gradients squares the imaginary part of each, which is zeros.) Inputs of branches and loops are still sent.
"""

from __future__ import annotations

from dataclasses import replace

from dflow.lowering.passes.prune import prune
from dflow.tracing.devices.device_name import task_of
from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.primitives.first_rows import first_rows_p
from dflow.tracing.primitives.state_primitives import wire_p

_CHEAP = frozenset(f"jax.{name}" for name in ["broadcast_in_dim", "convert_element_type", "iota", "reshape", "square"])


def repeat(graph: Graph) -> Graph:
    """Repeat these nodes of a placed graph, once for each device of another task that uses them."""
    made = _made_of_literals(graph) if len({node.device for node in graph.nodes}) > 1 else {}
    if not made:
        return graph
    fresh, nodes = graph.fresh_names(), list[Node]()
    repeated: dict[tuple[Value, str], Value] = {}

    def taking(node: Node, device: str) -> Node:
        """Return the node with the operands that are repeated on `device`."""
        return node.with_operands({value: there(value, device) for value in node.values if value in made})

    def there(value: Value, device: str) -> Value:
        node = made[value]
        if task_of(node.device or "") == task_of(device):
            return value
        if (value, device) not in repeated:
            copy = taking(node, device)
            outputs = tuple(replace(output, name=fresh(output.name)) for output in node.outputs)
            nodes.append(replace(copy, outputs=outputs, device=device))
            repeated.update({(old, device): new for old, new in zip(node.outputs, outputs, strict=True)})
        return repeated[value, device]

    for node in graph.nodes:
        stays = node.op in CONTROL_OPS or node.op.primitive in (wire_p, first_rows_p) or node.device is None
        nodes.append(node if stays else taking(node, node.device or ""))
    return prune(Graph(graph.inputs, tuple(nodes), graph.outputs))


def _made_of_literals(graph: Graph) -> dict[Value, Node]:
    """Return the nodes made of literals by cheap ops alone, by each of their results."""
    found: dict[Value, Node] = {}
    for node in graph.nodes:
        if node.op.name in _CHEAP and not node.after and all(value in found for value in node.values):
            found.update(dict.fromkeys(node.outputs, node))
    return found
