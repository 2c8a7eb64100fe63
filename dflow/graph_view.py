"""`dflow.graph`: the graph of a function, for people to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflow.function import Function
from dflow.tracing.graph import Graph
from dflow.tracing.text import text
from dflow.tracing.trace import trace


class GraphView:
    """A traced function's graph, before any pass; `print` gives its text."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __str__(self) -> str:
        return text(self.graph)

    def __repr__(self) -> str:
        return repr(self.graph)


def graph(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphView:
    """The graph of `fn` for arguments of these types (arrays or `jax.ShapeDtypeStruct`s); nothing is run.

    fn  a function, decorated by `dflow.jit` or not
    """
    return GraphView(trace(fn.fn if isinstance(fn, Function) else fn, args, kwargs).graph)
