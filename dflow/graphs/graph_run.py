"""Run part of a graph: feed and fetch any value by name, on the real variables."""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dflow.config import CONFIG
from dflow.state_backends import home_of
from dflow.tracing.errors import GraphNameError, GraphTypeError
from dflow.tracing.ir import ops
from dflow.tracing.ir.graph import Graph, Node, Operand, Value
from dflow.tracing.ir.types import ArrayType, RefType, TokenType, array_type_of
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.part import body_names, is_call, opened, part_of
from dflow.tracing.source import caller
from dflow.tracing.state.context import default_home, home
from dflow.tracing.state.resources import Variable, read


@dataclass(frozen=True)
class BoundGraph:
    """A graph with the variables and arrays bound to its inputs."""

    graph: Graph
    variables: Mapping[Value, Variable]
    arrays: Mapping[Value, Any]


class Part:
    """The ops that compute the fetched values from the fed ones, compiled once."""

    def __init__(self, bound: BoundGraph, fetches: Sequence[str], feeds: Mapping[str, Any]) -> None:
        """Raises GraphNameError for a name that the graph does not have, and GraphTypeError like `__call__`."""
        bound = _with_calls_opened(bound, fetches, "fetched")
        bound = _with_calls_opened(bound, [*feeds], "fed")
        self._fed = {name: _value(bound, name) for name in feeds}
        first = {value: _fitting(value, feeds[name]) for name, value in self._fed.items()}
        bound, self._copies = _on_copies(bound, {value: array for value, array in first.items() if value.is_variable})
        self._lock = threading.Lock() if self._copies else nullcontext()
        self._fetched = [_value(bound, name) for name in fetches]
        fed = [value for value in first if not value.is_variable]
        graph = part_of(bound.graph, list(dict.fromkeys(self._fetched)), fed)
        self._arrays = bound.arrays
        self._inputs = [value for value in graph.inputs if not value.is_variable]
        if absent := [value for value in self._inputs if value not in self._arrays and value not in fed]:
            raise GraphTypeError(f"{absent[0]!r} is needed and has no value", "give it in feeds")
        if unbound := [ref for ref in graph.refs if ref not in bound.variables]:
            raise GraphTypeError(
                f"{unbound[0]!r} is needed, and a graph that was read from text has no variables",
                "give the variable's value in feeds, or run the graph of the function",
            )
        self._outputs = [value for value in graph.outputs if not isinstance(value.type, TokenType)]
        variables = tuple(bound.variables[ref] for ref in graph.refs)
        traced = Traced(_showing(graph, self._outputs), variables, (), None)
        self._runner = home_of(traced).runner(traced, check=CONFIG.check, observe=None)

    def __call__(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the fetched values in order; None for one without a value, such as a write.

        A fetched variable is read after all other ops. A fed variable is not changed: the ops use a copy with the fed
        value. Raises GraphTypeError if a fed value has another type than in the graph.
        """
        fed = {value: _fitting(value, feeds[name]) for name, value in self._fed.items()}
        arrays = {**self._arrays, **fed}
        with self._lock:
            for value, copy in self._copies.items():
                copy.assign(fed[value])
            values = self._runner([arrays[value] for value in self._inputs])
        results = dict(zip(self._outputs, values, strict=True))
        return [results.get(value) for value in self._fetched]


def _showing(part: Graph, outputs: Sequence[Operand]) -> Graph:
    """Return the graph with these outputs; a variable among them is read at the end."""
    fresh = part.fresh_names()
    reads = {
        ref: Node(ops.var_read, (ref,), (Value(fresh(ref.name), ref.type.of),))
        for ref in outputs
        if isinstance(ref, Value) and isinstance(ref.type, RefType)
    }
    shown = (reads[value].outputs[0] if value in reads else value for value in outputs)
    return Graph(part.inputs, (*part.nodes, *reads.values()), tuple(shown))


def _named(bound: BoundGraph) -> dict[str, Value]:
    """Return every value by its name in the text; a variable also by its own name."""
    values = [*bound.graph.inputs, *(value for node in bound.graph.nodes for value in node.outputs)]
    return {variable.name: ref for ref, variable in bound.variables.items()} | {value.name: value for value in values}


def _value(bound: BoundGraph, name: str) -> Value:
    return _named(bound)[name.removeprefix("%")]


def _with_calls_opened(bound: BoundGraph, names: Sequence[str], use: str) -> BoundGraph:
    """Inline the calls whose bodies define these names. Raises GraphNameError for a name that no value has.

    `use` is `fetched` or `fed`, for the error message.
    """
    for name in names:
        while name.removeprefix("%") not in _named(bound):
            holders = [node for node in bound.graph.nodes if name.removeprefix("%") in body_names(node)]
            call = next(filter(is_call, holders), None)
            if call is None:
                raise GraphNameError(*_not_found(bound, name, use, holders))
            graph, constants = opened(bound.graph, call)
            bound = replace(bound, graph=graph, arrays={**bound.arrays, **constants})
    return bound


def _not_found(bound: BoundGraph, name: str, use: str, holders: Sequence[Node]) -> tuple[str, str]:
    """Return the fact and the remedy of the error; the bodies of the nodes `holders` have a value of this name."""
    if holders:
        node = holders[0]
        return (
            f"{name!r} is in the body of %{node.outputs[0].name} ({node.op.name}{_line(node)}), which runs as one",
            "fetch or feed what goes in or comes out, or give the value back from the body",
        )
    known = _named(bound)
    near = difflib.get_close_matches(name.removeprefix("%"), known, cutoff=0.5)
    told = ", ".join(f"%{known[other].name}{_line(bound.graph.producers.get(known[other]))}" for other in near)
    remedy = f"near it are {told}" if near else "print the graph to see its values; dflow.name(x, 'hidden') names one"
    return f"the graph has no value {name!r} to be {use}", remedy


def _line(node: Node | None) -> str:
    return f" at {node.loc.short}" if node is not None and node.loc is not None else ""


def _fitting(value: Value, given: Any) -> jax.Array:
    """Return the fed value as an array of the value's type. Raises GraphTypeError, naming both types."""
    wanted = value.type.of if isinstance(value.type, RefType) else value.type
    if not isinstance(wanted, ArrayType):
        raise GraphTypeError(f"%{value.name} is a token, which has no value to feed", at=caller())
    array = jnp.asarray(read(given))
    type = array_type_of(array)
    if type.weak and type.shape == wanted.shape and jnp.promote_types(type.dtype, wanted.dtype) == wanted.dtype:
        return jnp.asarray(array, wanted.dtype)
    if type.strong != wanted.strong:
        remedy = f"convert it with .astype(jnp.{jnp.dtype(wanted.dtype).name})"
        if wanted.shape != type.shape:
            remedy = f"feed it an array of the shape {wanted.shape}"
        raise GraphTypeError(f"%{value.name} is {wanted.strong} but was fed {type}", remedy)
    return array


def _on_copies(bound: BoundGraph, fed: Mapping[Value, jax.Array]) -> tuple[BoundGraph, dict[Value, Variable]]:
    """Return the graph on private copies of the fed variables, and the copies by the inputs that they replace."""
    if not fed:
        return bound, {}
    new = {ref: Value(ref.name, ref.type) for ref in fed}
    with home(default_home()):
        copies = {ref: Variable(array) for ref, array in fed.items()}
    graph = Graph(
        tuple(new.get(value, value) for value in bound.graph.inputs),
        tuple(node.with_operands(new) for node in bound.graph.nodes),
        bound.graph.outputs,
    )
    return BoundGraph(graph, {**bound.variables, **{new[ref]: copies[ref] for ref in fed}}, bound.arrays), copies
