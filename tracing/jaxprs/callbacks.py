"""Parts of a graph that call the user's Python functions at run time, and so may fail with those functions' errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflow.tracing.ir.graph import Graph
from dflow.tracing.jax_frontend import equations_within, inner_parts
from dflow.tracing.jaxprs.attributes import Body
from dflow.tracing.primitives.id_checks import check_ids_p

#: Not those of `jax.debug`: what it prints is not worth a copy of the state.
_PRIMITIVES = frozenset({"pure_callback", "io_callback"})


def calls_python(graph: Graph) -> bool:
    """Whether a node, or one within the body of another, calls a function of the user's."""
    return any(
        (node.op.primitive is not None and node.op.primitive.name in _PRIMITIVES)
        or any(map(calls_python, node.bodies))
        or _within(node.attributes)
        for node in graph.nodes
    )


def checks_ids(graph: Graph) -> bool:
    """Whether a node, or one within the body of another, checks row numbers, and so may fail after it was called."""
    return any(
        node.op.primitive is check_ids_p
        or any(map(checks_ids, node.bodies))
        or any(map(checks_ids, _bodies(node.attributes)))
        or check_ids_p.name in _names_within(node.attributes)
        for node in graph.nodes
    )


def _within(params: Mapping[str, Any]) -> bool:
    return any(map(calls_python, _bodies(params))) or not _names_within(params).isdisjoint(
        _PRIMITIVES | {check_ids_p.name}
    )


def _bodies(params: Mapping[str, Any]) -> Iterator[Graph]:
    return (value.graph for value in params.values() if isinstance(value, Body))


def _names_within(params: Mapping[str, Any]) -> set[str]:
    """Return the names of the primitives of JAX's own bodies."""
    inner = (equation for jaxpr, _ in inner_parts(params) for equation in equations_within(jaxpr))
    return {equation.primitive.name for equation in inner}
