"""Merge equal nodes: pure ones, and reads of one variable with no write between them.

Two nodes are equal when their ops, operands, attributes, devices and trace contexts are. Ops of an update
(`with-state`) are never merged with other ops, so that an update reads its variables when it is applied.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable

import numpy as np

from dflow.tracing.ir.effects import Effect
from dflow.tracing.ir.exact_attributes import exact_attributes
from dflow.tracing.ir.graph import Graph, Literal, Node, Operand, Value


def merge(graph: Graph) -> Graph:
    """Replace each node that repeats an earlier one by the earlier one's results."""
    seen: dict[Hashable, Node] = {}
    same: dict[Value, Operand] = {}
    versions: Counter[Value | None] = Counter()
    kept = []
    for old in graph.nodes:
        node = old.with_operands(same) if same else old
        for effect, ref in node.effects:
            if effect is not Effect.READ:
                versions[ref] += 1
        key = _key(node, versions)
        earlier = seen.setdefault(key, node) if key is not None else node
        if earlier is node:
            kept.append(node)
        else:
            same.update(zip(node.outputs, earlier.outputs, strict=True))
    outputs = tuple(same.get(output, output) if isinstance(output, Value) else output for output in graph.outputs)
    return dataclasses.replace(graph, nodes=tuple(kept), outputs=outputs)


def _key(node: Node, versions: Counter[Value | None]) -> Hashable | None:
    """Return a key that equal nodes have in common; None for a node that is never merged."""
    if node.must_run or node.bodies:
        return None
    reads = tuple(versions[ref] for _, ref in node.effects)
    # An op whose effects are unknown may have written any variable.
    unknown = versions[None] if reads else 0
    attributes = exact_attributes(node.attributes)
    context = id(getattr(node.origin, "context", None))
    key = (node.op, tuple(map(_operand, node.inputs)), attributes, node.device, node.after, context, reads, unknown)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _operand(operand: Operand) -> Hashable:
    if isinstance(operand, Literal):
        return np.asarray(operand.value).tobytes(), operand.type
    return operand
