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
from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import msgspec

from dflow.tracing.argument_ids import ids_of
from dflow.tracing.jax_frontend import Handle, is_resource
from dflow.tracing.wide_ids import IntegerIds, StringIds, WideIds

#: By class of ids: the name of their type in place of a dtype.
_NAMES_OF_IDS: dict[Any, str] = {StringIds: "str", IntegerIds: "id64"}
_KINDS_OF_IDS = {name: kind for kind, name in _NAMES_OF_IDS.items()}
#: The supported types of a dict's keys.
Key = str | int | bool


class Leaf(msgspec.Struct, frozen=True, tag_field="kind", tag="array"):
    """An array; `type` is its type as graphs print it, such as `f32[b,784]`.

    Ids have the types `str[b]`, of strings, and `id64[b]`, of integers; a program takes two arrays of `u32[b]`.
    """

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


def tree_of(treedef: Any, types: Iterator[str], path: str) -> Tree:
    """Return the structure of a JAX treedef; `types` are those of its leaves. Raises UnknownNodeError."""
    node = treedef.node_data()
    if node is None:
        return Leaf(next(types))
    kind, data = node
    children = treedef.children()
    if kind in _NAMES_OF_IDS:
        high, low = next(types), next(types)
        assert high == low
        return Leaf(_NAMES_OF_IDS[kind] + low.removeprefix("u32"))
    if kind is type(None):
        return Nothing()
    if kind is tuple or kind is list:
        items = [tree_of(child, types, f"{path}[{index}]") for index, child in enumerate(children)]
        return Tuple(items) if kind is tuple else List(items)
    if kind is dict or kind is OrderedDict:
        if not all(isinstance(key, Key) for key in data) or len({str(key) for key in data}) != len(data):
            raise UnknownNodeError(next((type(key) for key in data if not isinstance(key, Key)), dict), path)
        pairs = [(key, tree_of(child, types, f"{path}[{key!r}]")) for key, child in zip(data, children, strict=True)]
        return Dict(pairs, ordered=kind is OrderedDict)
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields = zip(kind._fields, children, strict=True)
        return NamedTuple(kind.__name__, [(field, tree_of(child, types, f"{path}.{field}")) for field, child in fields])
    if isinstance(data, Handle):
        return Held(data.name)
    raise UnknownNodeError(kind, path)


def leaves_of(tree: Tree, path: str) -> list[tuple[str, str]]:
    """Return the path and the type of each array of a tree."""
    if isinstance(tree, Leaf):
        return [(path, tree.type)]
    return [found for suffix, child in parts_of(tree) for found in leaves_of(child, path + suffix)]


def program_leaves_of(tree: Tree, path: str) -> list[tuple[str, str]]:
    """As `leaves_of`, of the arrays that a program takes: two for ids."""
    return [
        (where, one)
        for where, type in leaves_of(tree, path)
        for one in ([f"u32[{type.partition('[')[2]}"] * 2 if is_ids(type) else [type])
    ]


def is_ids(type: str) -> bool:
    """Whether the type of a leaf is one of ids."""
    return type.partition("[")[0] in _NAMES_OF_IDS.values()


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
    """Return the leaves of a value, which must have this structure. Raises MismatchError, and InputError for no ids."""
    if not _fits(tree, value):
        raise MismatchError(f"{path}: expected {text(tree)}, got {_described(value)}")
    if isinstance(tree, Leaf):
        return _parts_of_ids(tree, value, path) if is_ids(tree.type) else [value]
    children = parts_of(tree)
    parts = [value[key] for key, _ in tree.of] if isinstance(tree, Dict) else value if children else ()
    inner = zip(children, parts, strict=True)
    return [leaf for (suffix, child), part in inner for leaf in flatten(child, part, path + suffix)]


def _fits(tree: Tree, value: Any) -> bool:
    """Whether the root of a value is as in the structure, with as many children."""
    match tree:
        case Leaf(kind):
            return value is not None and not isinstance(value, Mapping if is_ids(kind) else Mapping | tuple | list)
        case Nothing():
            return value is None
        case Held():
            return value is None or is_resource(value)
        case Dict(of):
            return isinstance(value, Mapping) and set(value) == {key for key, _ in of}
        case NamedTuple(_, of):
            return bool(getattr(value, "_fields", None) == tuple(field for field, _ in of))
        case Tuple(of) | List(of):
            return type(value) is (tuple if isinstance(tree, Tuple) else list) and len(value) == len(of)


def _parts_of_ids(tree: Leaf, value: Any, path: str) -> list[Any]:
    ids = value if isinstance(value, WideIds) else ids_of(value, path)
    other = StringIds if tree.type.startswith(_NAMES_OF_IDS[IntegerIds]) else IntegerIds
    if isinstance(ids, other) and ids.size:
        raise MismatchError(f"{path}: expected {tree.type}, got {'strings' if other is StringIds else 'integers'}")
    return [ids.high, ids.low]


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {', '.join(map(repr, value)) or 'none'}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def build(tree: Tree, leaves: Iterator[Any], variables: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Return the value of this structure with these leaves and these variables."""
    parts = [build(child, leaves, variables) for _, child in parts_of(tree)]
    match tree:
        case Leaf(type) if is_ids(type):
            return _KINDS_OF_IDS[type.partition("[")[0]](next(leaves), next(leaves))
        case Leaf():
            return next(leaves)
        case Nothing():
            return None
        case Held(name):
            return variables[name]
        case Tuple():
            return tuple(parts)
        case List():
            return parts
        case Dict(of, ordered):
            return (OrderedDict if ordered else dict)(zip((key for key, _ in of), parts, strict=True))
        case NamedTuple(name, of):
            return _named_tuple(name, tuple(field for field, _ in of))(*parts)


def plain(tree: Tree) -> Tree:
    """Return the structure in the form that JAX's files hold, with the same leaves in the same order."""
    parts = [plain(child) for _, child in parts_of(tree)]
    match tree:
        case Leaf(type) if is_ids(type):
            return Tuple([Leaf(one) for _, one in program_leaves_of(tree, "")])
        case Held():
            return Nothing()
        case List():
            return List(parts)
        case Tuple() | NamedTuple():
            return Tuple(parts)
        case Dict(of):
            return Dict([(str(key), part) for (key, _), part in zip(of, parts, strict=True)])
    return tree


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


#: The same class each time, so that two results have the same pytree structure.
_named_tuple = cache(namedtuple)


def is_bound(treedef: Any) -> bool:
    """Whether a structure has no leaves and contains a node of an unsupported class, such as a variable."""
    return treedef.num_leaves == 0 and _holds_strange(treedef)


def _holds_strange(treedef: Any) -> bool:
    node = treedef.node_data()
    known = node is None or node[0] in (tuple, list, dict, OrderedDict, type(None)) or hasattr(node[0], "_fields")
    return not known or any(map(_holds_strange, treedef.children()))
