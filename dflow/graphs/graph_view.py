"""`dflow.graph`: the graph of a function, to read, to draw, and to run in parts."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Callable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import msgspec

from dflow.calls.function import Function
from dflow.graphs.graph_drawing import drawing_of
from dflow.graphs.graph_json import graph_json
from dflow.graphs.graph_run import BoundGraph, Part
from dflow.graphs.graph_svg import svg
from dflow.tracing.ir.graph import Graph, Value
from dflow.tracing.jaxprs.trace import trace
from dflow.tracing.source import at, caller
from dflow.tracing.state.resources import Variable
from dflow.tracing.state.variable_trees import handles
from dflow.tracing.syntax.text import parse, text

#: The page of a graph, with its data and its script, which `make dashboard` builds from `dflow/dashboard/web`.
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1"></head>
<body><div id="graph"></div><script type="text/plain" id="data">{data}</script><script>{script}</script></body></html>
"""


class GraphView:
    """A function's graph before any pass; its `str` is the graph's text. Made by `dflow.graph` or `GraphView.parse`."""

    def __init__(
        self,
        graph: Graph,
        variables: Mapping[Value, Variable] | None = None,
        arrays: Mapping[Value, Any] | None = None,
        name: str = "",
    ) -> None:
        self.graph = graph
        self._name = name
        self._bound = BoundGraph(graph, variables or {}, arrays or {})
        self._parts: dict[tuple[tuple[str, ...], tuple[str, ...]], Part] = {}

    @staticmethod
    def parse(text: str) -> GraphView:
        """Return the graph that a text describes, without variables. Raises ParseError with line and column."""
        return GraphView(parse(text))

    def run(self, fetches: Any, feeds: Mapping[str, Any] | None = None) -> Any:
        """Run the part of the graph that `fetches` needs, on the real variables.

        fetches  names of values as in the text, with or without `%`: a name, or a pytree of names
        feeds    values by name, used instead of computing them; arguments default to those passed to `dflow.graph`
        returns  the values, in the structure of `fetches`; None for a write
        raises   GraphNameError, with similar names; GraphTypeError for a feed of another type, or a missing value

        Each value is what the whole graph would compute. Only writes that a fetched value depends on are done. A
        fetched variable is read at the end; a fed variable is not changed. Each set of fetches and feeds is compiled
        once.
        """
        names, structure = jax.tree_util.tree_flatten(fetches)
        given = feeds or {}
        key = tuple(names), tuple(given)
        if key not in self._parts:
            self._parts[key] = Part(self._bound, names, given)
        return jax.tree_util.tree_unflatten(structure, self._parts[key](given))

    def svg(self) -> str:
        """Return the graph as SVG text, a picture that does not change.

        Name scopes and nested functions are one box each, variables are named in the boxes that use them, colours
        are devices, and `!` marks effects. A very large graph is shown in less detail, with a note.
        """
        return svg(drawing_of(self.graph))

    def html(self) -> str:
        """Return the graph as an HTML page with groups that open and close; notebooks show it by themselves.

        Groups are name scopes, nested functions and source lines. The page has its script and data in it, and works
        without a network.
        """
        data = msgspec.json.encode(graph_json(self.graph, self._name))
        packed = base64.b64encode(gzip.compress(data, mtime=0)).decode()
        script = files("dflow").joinpath("dashboard/static/graph.js").read_text(encoding="utf-8")
        return _PAGE.format(title=escape(self._name or "graph"), data=packed, script=script)

    def save(self, path: str | Path) -> None:
        """Write `html()` or `svg()` to a file, by its ending. Raises ValueError if that is not .html or .svg."""
        makers = {".html": self.html, ".svg": self.svg}
        make = makers.get(Path(path).suffix)
        if make is None:
            raise ValueError(f"path: expected an ending .html or .svg, got {str(path)!r}{at(caller())}")
        Path(path).write_text(make(), encoding="utf-8")

    _repr_svg_ = svg

    def _repr_html_(self) -> str:
        # A frame is a separate document: two graphs share no styles, names or scripts, and a script reaches nothing
        # outside. Viewers remove it from the output of notebooks that they do not trust; the other two parts stay.
        style = "width:100%;height:34em;border:1px solid #8886;border-radius:6px;resize:vertical"
        frame = f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.html())}"></iframe>'
        picture = f'<img alt="graph" src="data:image/svg+xml;base64,{base64.b64encode(self.svg().encode()).decode()}">'
        folded = {"picture": picture, "text": f"<pre>{escape(str(self))}</pre>"}
        parts = (f"<details><summary>{name}</summary>{part}</details>" for name, part in folded.items())
        return frame + "".join(parts)

    def __str__(self) -> str:
        return text(self.graph)

    def __repr__(self) -> str:
        return repr(self.graph)


def graph(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GraphView:
    """Return the graph of `fn` for these types of arguments (arrays or `jax.ShapeDtypeStruct`s), without running it.

    fn  a function, decorated by `dflow.jit` or not
    """
    plain = fn.fn if isinstance(fn, Function) else fn
    traced = trace(plain, args, kwargs)
    graph = traced.graph
    leaves = [*traced.constants, *jax.tree_util.tree_leaves(handles((args, kwargs)))]
    inputs = zip(graph.inputs[len(graph.refs) :], leaves, strict=True)
    arrays = {value: leaf for value, leaf in inputs if not isinstance(leaf, jax.ShapeDtypeStruct)}
    variables = dict(zip(graph.refs, traced.variables, strict=True))
    return GraphView(graph, variables, arrays, getattr(plain, "__name__", ""))
