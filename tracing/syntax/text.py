"""A graph as text, and a graph from its text.

The text is the same in every process: values have their names and types, what has no text is an `Opaque`, and no
address is printed. `text(parse(text(graph))) == text(graph)` for every graph.

    graph(%w: ref<f32[3]> @/job:ps/task:0, %x: f32[3]) {
     !%w_1: f32[3] = var.read(%w)  # train.py:14
      %1: f32[3] = jax.mul(%w_1, 2.0:f32[])
     !%2: token = var.assign_add(%w, %1)  @with-state  after(%w_1)
      return %1
    }

`!` stands before a node with effects. A comment that ends a node and reads `file:line` is the user's line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import indent
from typing import Any

import numpy as np

from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.types import AccumulatorType, ArrayType, QueueType, RefType, TokenType, dtype_name
from dflow.tracing.jaxprs.attributes import Body, Opaque, Record, Symbol, attributes_of, normal
from dflow.tracing.syntax.parse import parse

__all__ = ["marked", "node_text", "parse", "text"]

_STANDARD_FLOATS = (np.float16, np.float32, np.float64)

#: Number of nodes that `marked` prints on either side of the one it marks.
MARKED_NODES = 10


def text(graph: Graph, locs: bool = True) -> str:
    """The graph's text; without the comments that name the user's lines when `locs` is false."""
    nodes = [node_text(node, locs) for node in graph.nodes]
    return "\n".join([_head(graph), *nodes, _return(graph), "}"])


def marked(graph: Graph, node: Node) -> str:
    """The text around a node, with an arrow before it; of other nodes at most ten either side are shown."""
    where = next(index for index, other in enumerate(graph.nodes) if other is node)
    start, end = max(0, where - MARKED_NODES), where + MARKED_NODES + 1
    return "\n".join(_around(graph, node, start, end))


def _around(graph: Graph, node: Node, start: int, end: int) -> Iterator[str]:
    yield "    " + _head(graph)
    if start > 0:
        yield f"      ... {start} nodes before"
    for other in graph.nodes[start:end]:
        first, *rest = node_text(other).split("\n")
        yield ("--> " if other is node else "    ") + first
        yield from (f"    {line}" for line in rest)
    if end < len(graph.nodes):
        yield f"      ... {len(graph.nodes) - end} nodes after"
    yield "    " + _return(graph)
    yield "    }"


def _head(graph: Graph, constants: tuple[Any, ...] = ()) -> str:
    defaults = [f" = {_value(normal(constant))}" for constant in constants]
    defaults += [""] * (len(graph.inputs) - len(constants))
    inputs = (f"{_definition(value)}{default}" for value, default in zip(graph.inputs, defaults, strict=True))
    return f"graph({', '.join(inputs)}) {{"


def _return(graph: Graph) -> str:
    return f"  return {', '.join(map(_operand, graph.outputs))}".rstrip()


def _definition(value: Value) -> str:
    device = f" @{value.device}" if value.device is not None else ""
    return f"%{value.name}: {value.type}{device}"


def _operand(operand: Operand) -> str:
    if isinstance(operand, Value):
        return f"%{operand.name}"
    return _array(np.asarray(operand.value, operand.type.dtype), operand.type)


def node_text(node: Node, locs: bool = True) -> str:
    """A node's text, of more than one line when it has bodies."""
    results = ", ".join(map(_definition, node.outputs))
    line = f"{results} = {node.op.name}({', '.join(map(_operand, node.inputs))})"
    attributes = sorted(attributes_of(node).items(), key=lambda item: (_holds_body(item[1]), item[0]))
    if attributes:
        line += f" {{{', '.join(f'{key}={_value(value, locs)}' for key, value in attributes)}}}"
    if node.bodies:
        line += " {\n" + "\n".join(indent(text(body, locs), "  ") for body in node.bodies) + "\n}"
    if node.device is not None:
        line += f"  @{node.device}"
    if node.after:
        line += f"  after({', '.join(map(_operand, node.after))})"
    if locs and node.loc is not None:
        line += f"  # {node.loc.short}"
    return f" {'!' if node.has_effects else ' '}{line}".replace("\n", "\n  ")


def _holds_body(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_body, value))
    return isinstance(value, Body)


def _value(value: Any, locs: bool = True) -> str:
    """The text of plain data, as `attributes.normal` gives it."""
    match value:
        case Symbol(name):
            return name
        case Opaque(opaque):
            return opaque
        case Record(name, fields):
            return f"{name}({', '.join(f'{key}={_value(item, locs)}' for key, item in fields)})"
        case Body():
            return _body(value, locs)
        case tuple():
            return f"({', '.join(_value(item, locs) for item in value)}{',' if len(value) == 1 else ''})"
        case list():
            return f"[{', '.join(_value(item, locs) for item in value)}]"
        case dict():
            return f"{{{', '.join(f'{_value(key)}: {_value(item, locs)}' for key, item in value.items())}}}"
        case np.ndarray() | np.generic():
            return _array(np.asarray(value), ArrayType(value.dtype, value.shape))
        case str():
            return json.dumps(value)
        case complex():
            return _complex(value)
        case bool() | int() | float() | None | ArrayType() | RefType() | QueueType() | AccumulatorType() | TokenType():
            return str(value)
    raise AssertionError(f"{type(value).__name__} is not plain data")


def _body(body: Body, locs: bool) -> str:
    _, *rest = text(body.graph, locs).split("\n")
    opening = "open " if body.is_open else ""
    return "\n".join([opening + _head(body.graph, body.constants), *rest])


def _array(array: np.ndarray[Any, Any], type: ArrayType) -> str:
    if type.shape == ():
        return f"{_scalar(array[()])}:{type}"
    return f"[{', '.join(map(_scalar, array.ravel()))}]:{type}"


def _scalar(scalar: Any) -> str:
    """The shortest text that reads back as the same number of the same dtype."""
    kind = dtype_name(scalar.dtype)
    if kind == "bool" or kind.startswith(("i", "u")):
        return str(scalar.item())
    if isinstance(scalar, _STANDARD_FLOATS):
        return str(scalar)
    if isinstance(scalar, np.complexfloating):
        return _complex(complex(scalar))
    return "0" if kind == "f0" else repr(float(scalar))


def _complex(value: complex) -> str:
    return f"{value.real!r}{'' if str(value.imag).startswith('-') else '+'}{value.imag!r}j"
