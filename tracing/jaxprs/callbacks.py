"""Parts of a graph that call the user's Python functions at run time, and so may fail with those functions' errors."""

from __future__ import annotations

from dflow.tracing.ir.graph import Graph
from dflow.tracing.jax_frontend import equations_within, inner_parts
from dflow.tracing.jaxprs.attributes import Body
from dflow.tracing.primitives.id_checks import check_ids_p

#: Not those of `jax.debug`: what it prints is not worth a copy of the state.
_PRIMITIVES = frozenset({"pure_callback", "io_callback", check_ids_p.name})


def calls_python(graph: Graph) -> bool:
    """Whether a node, or one within the body of another, calls a function of the user's, or checks row numbers."""
    return not _primitives(graph).isdisjoint(_PRIMITIVES)


def checks_ids(graph: Graph) -> bool:
    """Whether a node, or one within the body of another, checks row numbers, and so may fail after it was called."""
    return check_ids_p.name in _primitives(graph)


def _primitives(graph: Graph) -> set[str]:
    """The names of the primitives of a graph and of the bodies within it."""
    found = {node.op.primitive.name for node in graph.nodes if node.op.primitive is not None}
    for node in graph.nodes:
        own = [value.graph for value in node.attributes.values() if isinstance(value, Body)]
        found.update(*map(_primitives, (*node.bodies, *own)))
        of_jax = [equation for part, _ in inner_parts(node.attributes) for equation in equations_within(part)]
        found.update(equation.primitive.name for equation in of_jax)
    return found
