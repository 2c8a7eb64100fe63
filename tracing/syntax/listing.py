"""A traced program as a list of items, to compare it with the program that another process traced.

Two programs are equal if the texts of their items are equal. The user's lines are shown in messages but not compared:
the same program may be on other lines in another copy of the script.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.graph import Graph, Node, Value
from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.syntax.text import text

#: JAX's settings that change what a program computes, and that its text does not show.
_SETTINGS = ("jax_default_matmul_precision", "jax_threefry_partitionable", "jax_numpy_dtype_promotion")
#: Arrays of at most this many elements are shown with their values.
LARGEST_SHOWN = 8


class ListedItem(NamedTuple):
    """A part of a program.

    kind   noun for it in an error, such as `argument` or `operation`
    text   equal in two processes if the part is
    shown  what an error shows of it: with the values of a small array, and the user's line
    """

    kind: str
    text: str
    shown: str


def listing(traced: Traced, more: Sequence[ListedItem] = ()) -> list[ListedItem]:
    """Return the items of a program, in an order that lets the first one that differs be the cause of the others.

    more  further items, which come after the variables
    """
    graph, held = traced.graph, len(traced.variables)
    first_argument = held + len(traced.constants)
    variables = [
        _item("variable", f"{value.name} {value.type}{_spread(variable)}")
        for value, variable in zip(graph.inputs, traced.variables, strict=False)
    ]
    arguments = [_item("argument", f"{value.name} {value.type}") for value in graph.inputs[first_argument:]]
    constants = [
        _constant(graph, value, constant)
        for value, constant in zip(graph.inputs[held:first_argument], traced.constants, strict=True)
    ]
    options = [_item("compiler option", repr(item)) for item in sorted((traced.compiler_options or {}).items())]
    settings = [_item("setting of JAX", f"{name}={getattr(jax.config, name)}") for name in _SETTINGS]
    return [*variables, *more, *arguments, *_operations(graph), *constants, *options, *settings]


def array_item(kind: str, name: str, value: Any, where: str = "") -> ListedItem:
    """Return the item of an array and its value; `where` is a text to end its description with."""
    type, data = array_type_of(value).strong, _data(value)
    if data is None:
        return ListedItem(kind, f"{name} {type}", f"{name} {type}{where}")
    digest = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()
    shown = (
        f"of checksum {digest[:8]}"
        if data.size > LARGEST_SHOWN
        else np.array2string(data, max_line_width=10**6, separator=", ")
    )
    return ListedItem(kind, f"{name} {type} {digest}", f"{name} {type} {shown}{where}")


def _item(kind: str, text: str) -> ListedItem:
    return ListedItem(kind, text, text)


def _operations(graph: Graph) -> Iterator[ListedItem]:
    """Yield an item for each line of the graph's text, without the head, whose values have items of their own."""
    pairs = zip(text(graph, locs=False).split("\n"), text(graph).split("\n"), strict=True)
    for compared, shown in [*pairs][1:-1]:
        line, _, loc = shown.strip().rpartition("  # ")
        yield ListedItem("operation", compared.strip(), f"{line}, at {loc}" if line else loc)


def _constant(graph: Graph, value: Value, constant: Any) -> ListedItem:
    user = _user(graph.nodes, value)
    where = "" if user is None or user.loc is None else f", used at {user.loc.short}"
    return array_item("closed-over array", value.name, constant, where)


def _user(nodes: Sequence[Node], value: Value) -> Node | None:
    """Return the first node that uses a value."""
    return next((node for node in nodes if value in node.inputs), None)


def _spread(variable: Any) -> str:
    """Return a text for the sharding over devices of a variable; empty for one device."""
    sharding = getattr(variable, "sharding", None)  # a queue has none
    return "" if sharding is None else f" over {getattr(sharding, 'spec', sharding)}"


def _data(value: Any) -> np.ndarray[Any, Any] | None:
    """Return the numbers of an array as this process has them; None if it has a part alone."""
    if jnp.issubdtype(value.dtype, jax.dtypes.extended):
        value = jax.random.key_data(value)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return np.asarray(value.addressable_data(0)) if value.is_fully_replicated else None
    return np.asarray(value)
