"""`dflow.graph`: the graph of a function, to read, to look at, and to run in parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import jax

from dflow.function import Function
from dflow.graph_drawing import drawing_of
from dflow.graph_run import Bound, Part
from dflow.graph_svg import svg
from dflow.tracing.graph import Graph, Value
from dflow.tracing.resources import Variable
from dflow.tracing.text import parse, text
from dflow.tracing.trace import trace
from dflow.tracing.variable_trees import handles


class GraphView:
    """A function's graph, before any pass; `print` gives its text. Made by `dflow.graph`, or from text by `parse`."""

    def __init__(
        self,
        graph: Graph,
        variables: Mapping[Value, Variable] | None = None,
        arrays: Mapping[Value, Any] | None = None,
    ) -> None:
        self.graph = graph
        self._bound = Bound(graph, variables or {}, arrays or {})
        self._parts: dict[tuple[tuple[str, ...], tuple[str, ...]], Part] = {}

    @staticmethod
    def parse(text: str) -> GraphView:
        """The graph that a text describes; it has no variables. Raises ParseError with line and column."""
        return GraphView(parse(text))

    def run(self, fetches: Any, feeds: Mapping[str, Any] | None = None) -> Any:
        """Run the part of the graph that `fetches` needs, on the real variables.

        fetches  names of values as the text has them, with `%` or without: one, or a list, tuple or dict of several
        feeds    values by name, in the place of what the graph would compute; arguments have those of `dflow.graph`
        returns  the values, structured as `fetches`; None for a write
        raises   GraphNameError, which gives near names; GraphTypeError for a feed of another type

        Each value is what the whole graph would give: writes that a fetched value comes after are made, others are
        not. A variable that is fetched is read at the end; one that is fed is not touched. The same fetches and feeds
        are compiled once.
        """
        names, structure = jax.tree_util.tree_flatten(fetches)
        given = feeds or {}
        key = tuple(names), tuple(given)
        if key not in self._parts:
            self._parts[key] = Part(self._bound, names, given)
        return jax.tree_util.tree_unflatten(structure, self._parts[key](given))

    def svg(self) -> str:
        """The graph as a picture, for a file or a page; notebooks show it of themselves.

        Name scopes and nested functions are one box each, variables are named in the boxes that use them, colours
        tell devices, and `!` marks effects. Of a very large graph it shows less, and says so.
        """
        return svg(drawing_of(self.graph))

    def _repr_svg_(self) -> str:
        return self.svg()

    def _repr_html_(self) -> str:
        return (
            f'<div style="overflow:auto;max-height:40em">{self.svg()}</div>'
            f"<details><summary>text</summary><pre>{escape(str(self))}</pre></details>"
        )

    def __str__(self) -> str:
        return text(self.graph)

    def __repr__(self) -> str:
        return repr(self.graph)


def graph(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphView:
    """The graph of `fn` for arguments of these types (arrays or `jax.ShapeDtypeStruct`s); nothing is run.

    fn  a function, decorated by `dflow.jit` or not
    """
    traced = trace(fn.fn if isinstance(fn, Function) else fn, args, kwargs)
    graph = traced.graph
    leaves = [*traced.constants, *jax.tree_util.tree_leaves(handles((args, kwargs)))]
    inputs = zip(graph.inputs[len(graph.refs) :], leaves, strict=True)
    arrays = {value: leaf for value, leaf in inputs if not isinstance(leaf, jax.ShapeDtypeStruct)}
    return GraphView(graph, dict(zip(graph.refs, traced.variables, strict=True)), arrays)
