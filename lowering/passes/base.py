"""Passes: maps from graph to graph, run in order. Each result is shown to an observer, and errors name the pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from dflow.tracing.errors import DflowError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.syntax.verify import verify


class Pass(NamedTuple):
    """A map from a valid graph to a valid graph that computes the same.

    `name`         that of its file
    `made_of`      returns the new graph; the old one is unchanged
    `is_of_whole`  whether it treats the bodies of branches and loops itself; otherwise it is called for each body too
    """

    name: str
    made_of: Callable[[Graph], Graph]
    is_of_whole: bool = False


Observer = Callable[[str, Graph], None]


def run_passes(graph: Graph, passes: Sequence[Pass], *, check: bool = False, observe: Observer | None = None) -> Graph:
    """Run the passes in order, on the bodies of branches and loops too.

    With `check` the graph is verified before and after each; `observe` sees each result.
    """
    if check:
        verify(graph)
    if observe is not None:
        observe("traced", graph)
    for one in passes:
        graph = _applied(one, graph)
        if observe is not None:
            observe(one.name, graph)
        if check:
            try:
                verify(graph)
            except DflowError as error:
                error.add_note(f"after the pass {one.name!r}; the graph was valid before it")
                raise
    return graph


def _applied(one: Pass, graph: Graph) -> Graph:
    """Apply the pass to the bodies of branches and loops, unless it does so itself, then to the graph."""
    if not one.is_of_whole and any(node.op in CONTROL_OPS for node in graph.nodes):
        nodes = (
            replace(node, bodies=tuple(_applied(one, body) for body in node.bodies)) if node.op in CONTROL_OPS else node
            for node in graph.nodes
        )
        graph = replace(graph, nodes=tuple(nodes))
    return one.made_of(graph)
