"""The arithmetic and the memory traffic of an op, from the types of its operands: a first estimate without XLA.

By it small nodes are joined into units; the costs of units are measured, or taken from XLA. The body of a loop counts
once per iteration if their number is known, unlike in XLA's own analysis, else once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Operand
from dflow.tracing.ir.types import HANDLES, ArrayType
from dflow.tracing.jax_frontend import is_jaxpr
from dflow.tracing.jaxprs.attributes import Body, body_of
from dflow.tracing.jaxprs.callbacks import calls_python


class Work(NamedTuple):
    """Operations on numbers, and bytes read and written."""

    flops: float = 0.0
    moved_bytes: float = 0.0

    def plus(self, other: Work) -> Work:
        """Return the sum of both."""
        return Work(self.flops + other.flops, self.moved_bytes + other.moved_bytes)

    def times(self, count: float) -> Work:
        """Return `count` times this work."""
        return Work(self.flops * count, self.moved_bytes * count)


#: Ops whose result is their operand's memory.
_VIEWS = {"reshape", "squeeze", "stop_gradient"}
#: Ops without arithmetic, which only write their results.
_COPIES = {"broadcast_in_dim", "convert_element_type", "copy", "iota", "transpose"}

#: About 0.1 ms on one core. The limit is far below 1 ms, since sums of estimates may be wrong by a small factor.
QUICK = Work(1e6, 1e6)

#: Ops that run code unknown to us.
_UNKNOWN = frozenset({"ffi_call", "pallas_call", "custom_call"})

#: Ops that touch some elements of their first operand: the number in their results, or in the operand of this index.
_ROWS: dict[str, int | None] = {
    "gather": None,
    "slice": None,
    "dynamic_slice": None,
    "dynamic_update_slice": 1,
    **dict.fromkeys(("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), 2),
}

#: Ops that take about 25 n operations for each element of a matrix of n rows.
_CUBIC = frozenset(
    {"cholesky", "eig", "eigh", "geqrf", "householder_product", "lu", "qr", "schur", "svd", "triangular_solve"}
)


def work_of(node: Node) -> Work:
    """Return the work of one node, including its bodies."""
    if node.op is ops.var_read:
        return Work()
    bodies = [*node.bodies, *(graph for value in node.attributes.values() for graph in _graphs_in(value))]
    if bodies:
        return _of_bodies(node, bodies)
    moved = sum(map(_bytes, node.inputs)) + sum(map(_bytes, node.outputs))
    name = node.op.primitive.name if node.op.primitive is not None else ""
    if name == "dot_general":
        return Work(_dot_flops(node), moved)
    if name == "conv_general_dilated":
        return Work(_convolution_flops(node), moved)
    given = sum(_count(value) for value in node.outputs)
    if name in _ROWS:
        place = _ROWS[name]
        rows = given if place is None else _count(node.inputs[place])
        return Work(rows, 3.0 * rows * _itemsize(node.inputs[0]))
    if name in _CUBIC:
        side = max((extent for operand in node.inputs for extent in _shape(operand)), default=1)
        return Work(25.0 * side * max(map(_count, node.inputs), default=0), moved)
    if name in _VIEWS:
        return Work()
    if name in _COPIES:
        return Work(0.0, sum(map(_bytes, node.outputs)))
    taken = max((_count(operand) for operand in node.inputs), default=0)
    return Work(max(given, taken) if name.startswith(("reduce", "cum", "sort", "arg")) else given, moved)


def _of_bodies(node: Node, bodies: Iterable[Graph]) -> Work:
    works = []
    for body in bodies:
        total = Work()
        for inner in body.nodes:
            total = total.plus(work_of(inner))
        works.append(total)
    name = node.op.name.rpartition(".")[2]
    if name == "cond":
        return max(works)
    total = Work()
    for work in works:
        total = total.plus(work)
    return total.times(node.attributes.get("length", 1) if name == "scan" else 1)


def is_quick(call: Node) -> bool:
    """Whether an XLA call is surely short enough to run on a thread that must not be blocked."""
    (body,) = call.bodies
    if calls_python(body):
        return False
    total = Work(0.0, sum(map(_bytes, call.outputs)))
    for node in body.nodes:
        if runs_how_long(node) or (node.op.primitive is not None and node.op.primitive.name in _UNKNOWN):
            return False
        total = total.plus(work_of(node))
        if total.flops > QUICK.flops or total.moved_bytes > QUICK.moved_bytes:
            return False
    return True


def runs_how_long(node: Node) -> bool:
    """Whether the node has a loop with an unknown number of iterations."""
    if node.op.name.rpartition(".")[2] == "while":
        return True
    bodies = [*node.bodies, *(graph for value in node.attributes.values() for graph in _graphs_in(value))]
    return any(runs_how_long(inner) for body in bodies for inner in body.nodes)


def _graphs_in(value: Any) -> Iterator[Graph]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _graphs_in(item)
    elif isinstance(value, Body):
        yield value.graph
    elif is_jaxpr(value):
        body = body_of(value)
        if isinstance(body, Body):
            yield body.graph


def _dot_flops(node: Node) -> float:
    (contracted, _), _ = node.attributes["dimension_numbers"]
    shape = _shape(node.inputs[0])
    sums: int = prod(shape[axis] for axis in contracted)
    return 2.0 * sum(_count(value) for value in node.outputs) * sums


def _convolution_flops(node: Node) -> float:
    """Return the operations: each result is a sum of kernel elements / output features products."""
    out, kernel = sum(_count(value) for value in node.outputs), _count(node.inputs[1])
    numbers = node.attributes["dimension_numbers"]
    spec = getattr(numbers, "rhs_spec", None)
    features = _shape(node.inputs[1])[spec[0]] if spec is not None else 1
    return 2.0 * out * kernel / max(1, features)


def _shape(operand: Operand) -> tuple[int, ...]:
    return operand.type.shape if isinstance(operand.type, ArrayType) else ()


def _count(operand: Operand) -> int:
    return prod(_shape(operand)) if isinstance(operand.type, ArrayType) else 0


def _itemsize(operand: Operand) -> int:
    return operand.type.dtype.itemsize if isinstance(operand.type, ArrayType) else 0


def _bytes(operand: Operand) -> int:
    if isinstance(operand.type, HANDLES) or not isinstance(operand.type, ArrayType):
        return 0
    return operand.type.size_bytes
