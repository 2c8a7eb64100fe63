"""The structure of arguments and results as data: a file keeps it to rebuild a pytree without the user's code.

Supported are dicts, lists, tuples, named tuples and None, with arrays as leaves. A named tuple is rebuilt from its name
and its fields, and any named tuple with these fields is accepted for it. Other pytree nodes have a class in the user's
program, and are refused.

JAX's own files hold trees of dicts with strings as keys, lists, tuples and None. `plain` converts a tree to that form:
a named tuple becomes a tuple, an ordered dict a dict, a variable None, and a key that is no string its text.
"""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

#: The supported types of a dict's keys.
Key = str | int | bool


class Leaf(msgspec.Struct, frozen=True, tag_field="kind", tag="array"):
    """An array; `type` is its type as graphs print it, such as `f32[b,784]`."""

    type: str


class Nothing(msgspec.Struct, frozen=True, tag_field="kind", tag="none"):
    """None."""


class Held(msgspec.Struct, frozen=True, tag_field="kind", tag="variable"):
    """The variable of this name."""

    name: str


class Tuple(msgspec.Struct, frozen=True, tag_field="kind", tag="tuple"):
    """A tuple."""

    of: list[Tree]


class List(msgspec.Struct, frozen=True, tag_field="kind", tag="list"):
    """A list."""

    of: list[Tree]


class Dict(msgspec.Struct, frozen=True, tag_field="kind", tag="dict"):
    """A dict, or an ordered dict; its pairs in the order of JAX."""

    of: list[tuple[Key, Tree]]
    ordered: bool = False


class NamedTuple(msgspec.Struct, frozen=True, tag_field="kind", tag="namedtuple"):
    """A named tuple."""

    name: str
    of: list[tuple[str, Tree]]


Tree = Leaf | Nothing | Held | Tuple | List | Dict | NamedTuple


class UnknownNodeError(Exception):
    """A pytree has a node of a class `kind` of the user's code, at `path`, such as `x['a'][0]`."""

    def __init__(self, kind: type, path: str) -> None:
        self.kind, self.path = kind, path


class MismatchError(Exception):
    """A value does not have the expected structure."""


def tree_of(treedef: Any, leaves: Sequence[str], path: str) -> Tree:
    """Return the structure of a JAX treedef; `leaves` are the types of its leaves. Raises UnknownNodeError."""
    return _tree_of(treedef, iter(leaves), path)


def _tree_of(treedef: Any, leaves: Iterator[str], path: str) -> Tree:
    node = treedef.node_data()
    if node is None:
        return Leaf(next(leaves))
    kind, data = node
    children = treedef.children()
    if kind is type(None):
        return Nothing()
    if kind is tuple or kind is list:
        items = [_tree_of(child, leaves, f"{path}[{index}]") for index, child in enumerate(children)]
        return Tuple(items) if kind is tuple else List(items)
    if kind is dict or kind is OrderedDict:
        if not all(isinstance(key, Key) for key in data) or len({str(key) for key in data}) != len(data):
            raise UnknownNodeError(next((type(key) for key in data if not isinstance(key, Key)), dict), path)
        pairs = [(key, _tree_of(child, leaves, f"{path}[{key!r}]")) for key, child in zip(data, children, strict=True)]
        return Dict(pairs, ordered=kind is OrderedDict)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = zip(kind._fields, children, strict=True)
        return NamedTuple(
            kind.__name__, [(field, _tree_of(child, leaves, f"{path}.{field}")) for field, child in fields]
        )
    if _is_handle(data):
        return Held(data.name)
    raise UnknownNodeError(kind, path)


def _is_handle(data: Any) -> bool:
    """Whether a node is a variable. The class is not imported, so that trees can be read without JAX."""
    return all(hasattr(data, name) for name in ("name", "serial", "variable"))


def leaves_of(tree: Tree, path: str) -> list[tuple[str, str]]:
    """Return the path and the type of each array of a tree."""
    if isinstance(tree, Leaf):
        return [(path, tree.type)]
    return [found for suffix, child in parts_of(tree) for found in leaves_of(child, path + suffix)]


def parts_of(tree: Tree) -> list[tuple[str, Tree]]:
    """Return the children of a node, each with the expression that selects it, such as `[0]` or `.x`."""
    match tree:
        case Tuple(of) | List(of):
            return [(f"[{index}]", child) for index, child in enumerate(of)]
        case Dict(of):
            return [(f"[{key!r}]", child) for key, child in of]
        case NamedTuple(_, of):
            return [(f".{field}", child) for field, child in of]
        case _:
            return []


def flatten(tree: Tree, value: Any, path: str) -> list[Any]:
    """Return the leaves of a value, which must have this structure. Raises MismatchError."""
    if isinstance(tree, Leaf):
        _expect(value is not None and not isinstance(value, Mapping | tuple | list), tree, value, path)
        return [value]
    if isinstance(tree, Nothing):
        _expect(value is None, tree, value, path)
        return []
    if isinstance(tree, Held):
        _expect(value is None or _is_handle(getattr(value, "handle", None)), tree, value, path)
        return []
    if isinstance(tree, Dict):
        keys = [key for key, _ in tree.of]
        _expect(isinstance(value, Mapping) and set(value) == set(keys), tree, value, path)
        parts = [value[key] for key in keys]
    elif isinstance(tree, NamedTuple):
        _expect(getattr(value, "_fields", None) == tuple(field for field, _ in tree.of), tree, value, path)
        parts = list(value)
    else:
        wanted = tuple if isinstance(tree, Tuple) else list
        _expect(type(value) is wanted and len(value) == len(tree.of), tree, value, path)
        parts = list(value)
    inner = zip(parts_of(tree), parts, strict=True)
    return [leaf for (suffix, child), part in inner for leaf in flatten(child, part, path + suffix)]


def _expect(holds: bool, tree: Tree, value: Any, path: str) -> None:
    if not holds:
        raise MismatchError(f"{path}: expected {text(tree)}, got {_described(value)}")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def build(tree: Tree, leaves: Iterator[Any], variable: Callable[[str], Any]) -> Any:
    """Return the value of this structure with these leaves; `variable` returns the variable of a name."""
    match tree:
        case Leaf():
            return next(leaves)
        case Nothing():
            return None
        case Held(name):
            return variable(name)
        case Dict(of, ordered):
            pairs = [(key, build(child, leaves, variable)) for key, child in of]
            return OrderedDict(pairs) if ordered else dict(pairs)
        case NamedTuple(name, of):
            made = _named_tuple(name, tuple(field for field, _ in of))
            return made(*(build(child, leaves, variable) for _, child in of))
        case Tuple(of):
            return tuple(build(child, leaves, variable) for child in of)
        case List(of):
            return [build(child, leaves, variable) for child in of]


def plain(tree: Tree, leaves: Iterator[Any]) -> Any:
    """Return the value with these leaves in the form that JAX's files hold."""
    match tree:
        case Leaf():
            return next(leaves)
        case Nothing() | Held():
            return None
        case Dict(of):
            return {str(key): plain(child, leaves) for key, child in of}
        case NamedTuple(_, of):
            return tuple(plain(child, leaves) for _, child in of)
        case Tuple(of):
            return tuple(plain(child, leaves) for child in of)
        case List(of):
            return [plain(child, leaves) for child in of]


def unplain(tree: Tree, value: Any) -> list[Any]:
    """Return the leaves of a value returned by `plain`, in the order of the tree."""
    match tree:
        case Leaf():
            return [value]
        case Nothing() | Held():
            return []
        case Dict(of):
            return [leaf for key, child in of for leaf in unplain(child, value[str(key)])]
        case _:
            inner = zip(parts_of(tree), value, strict=True)
            return [leaf for (_, child), part in inner for leaf in unplain(child, part)]


def text(tree: Tree) -> str:
    """Return the structure as text, such as `{'a': f32[3], 'b': (i32[], None)}`."""
    match tree:
        case Leaf(type):
            return type
        case Nothing():
            return "None"
        case Held(name):
            return f"<{name}>"
        case Tuple(of):
            return f"({', '.join(map(text, of))}{',' if len(of) == 1 else ''})"
        case List(of):
            return f"[{', '.join(map(text, of))}]"
        case Dict(of):
            return f"{{{', '.join(f'{key!r}: {text(child)}' for key, child in of)}}}"
        case NamedTuple(name, of):
            return f"{name}({', '.join(f'{field}={text(child)}' for field, child in of)})"


def parts_of_type(type: str) -> tuple[str, list[str]]:
    """Split a type, as graphs print it, into dtype and dimensions; a symbolic one may hold commas: `max(a, b)`."""
    dtype, _, rest = type.removesuffix("]").partition("[")
    return dtype, [dim.strip() for dim in re.split(r",(?![^(]*\))", rest)] if rest else []


@cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def is_bound(treedef: Any) -> bool:
    """Whether a structure has no arrays, but nodes of classes other than those supported, such as variables."""
    return treedef.num_leaves == 0 and _holds_strange(treedef)


def _holds_strange(treedef: Any) -> bool:
    node = treedef.node_data()
    known = node is None or node[0] in (tuple, list, dict, OrderedDict, type(None)) or hasattr(node[0], "_fields")
    return not known or any(map(_holds_strange, treedef.children()))
