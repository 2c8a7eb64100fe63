"""Passes: maps from graph to graph, run in order. Each result is shown to an observer, and errors name the pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar

from dflow.tracing.errors import DflowError
from dflow.tracing.ir.graph import Graph
from dflow.tracing.ir.ops import CONTROL_OPS
from dflow.tracing.syntax.verify import verify


class Pass(ABC):
    """A map from a valid graph to a valid graph that computes the same."""

    #: Whether it treats the bodies of branches and loops itself. Otherwise it is called for each body too.
    is_of_whole: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The name of the pass, which is that of its file."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def __call__(self, graph: Graph) -> Graph:
        """Return the new graph; the old one is unchanged."""


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
    return one(graph)
