"""The arithmetic and the memory traffic of an op, from the types of its operands: a first estimate without XLA.

By it small nodes are joined into units; the costs of units are measured, or taken from XLA. The body of a loop counts
once per iteration if their number is known, unlike in XLA's own analysis, else once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Operand
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.jax_frontend import is_jaxpr
from dflow.tracing.jaxprs.attributes import Body, body_of
from dflow.tracing.jaxprs.callbacks import calls_python


class Work(NamedTuple):
    """Operations on numbers, and bytes read and written."""

    flops: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device: operations and bytes per second, and the time to start a program, in s."""

    flops_per_s: float
    bytes_per_s: float
    launch_s: float

    def seconds(self, work: Work) -> float:
        """Return the time of the work, without the launch: of its arithmetic or of its bytes, whichever is longer."""
        return max(work.flops / self.flops_per_s, work.moved_bytes / self.bytes_per_s)


#: Ops whose result is their operand's memory.
_VIEWS = {"reshape", "squeeze", "stop_gradient"}
#: Ops without arithmetic, which only write their results.
_COPIES = {"broadcast_in_dim", "convert_element_type", "copy", "iota", "transpose"}

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
    if bodies := _bodies(node):
        return _of_bodies(node, bodies)
    moved = sum(map(_bytes, node.inputs)) + sum(map(_bytes, node.outputs))
    name = _name(node)
    if name == "dot_general":
        return Work(_dot_flops(node), moved)
    if name == "conv_general_dilated":
        return Work(_convolution_flops(node), moved)
    given = sum(_count(value) for value in node.outputs)
    if name in _ROWS:
        position = _ROWS[name]
        rows = given if position is None else _count(node.inputs[position])
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


def work_in(nodes: Iterable[Node]) -> Work:
    """Return the work of all nodes together."""
    return _total(map(work_of, nodes))


def exceeds(nodes: Iterable[Node], limit: Work, moved_bytes: float = 0.0) -> bool:
    """Whether the nodes do more arithmetic than `limit` or, with the `moved_bytes` of others, move more bytes."""
    flops = 0.0
    for node in nodes:
        work = work_of(node)
        flops, moved_bytes = flops + work.flops, moved_bytes + work.moved_bytes
        if flops > limit.flops or moved_bytes > limit.moved_bytes:
            return True
    return False


def is_asynchronous(call: Node) -> bool:
    """Whether an XLA call surely returns without waiting for its results, so that no thread is blocked by it.

    XLA runs short programs on the calling thread, and all others on its pool. A loop with an unknown number
    of iterations may be mistaken for a short program.
    """
    (body,) = call.bodies
    return not calls_python(body) and not any(runs_how_long(node) or _name(node) in _UNKNOWN for node in body.nodes)


def runs_how_long(node: Node) -> bool:
    """Whether the node has a loop with an unknown number of iterations."""
    if node.op.name.rpartition(".")[2] == "while":
        return True
    return any(runs_how_long(inner) for body in _bodies(node) for inner in body.nodes)


def _of_bodies(node: Node, bodies: Iterable[Graph]) -> Work:
    works = [work_in(body.nodes) for body in bodies]
    name = node.op.name.rpartition(".")[2]
    if name == "cond":
        return max(works)
    once, count = _total(works), node.attributes.get("length", 1) if name == "scan" else 1
    return Work(once.flops * count, once.moved_bytes * count)


def _total(works: Iterable[Work]) -> Work:
    flops, moved_bytes = 0.0, 0.0
    for work in works:
        flops, moved_bytes = flops + work.flops, moved_bytes + work.moved_bytes
    return Work(flops, moved_bytes)


def _name(node: Node) -> str:
    return node.op.primitive.name if node.op.primitive is not None else ""


def _bodies(node: Node) -> list[Graph]:
    return [*node.bodies, *(graph for value in node.attributes.values() for graph in _graphs_in(value))]


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
    return operand.type.size_bytes if isinstance(operand.type, ArrayType) else 0
