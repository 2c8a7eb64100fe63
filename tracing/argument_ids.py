"""Ids among the arguments of a call: strings, and integers beyond 32 bits, become `WideIds` before JAX sees them.

Strings, in arrays of NumPy, columns of other libraries and lists, always do. An array of NumPy's int64 or uint64 does
if one of its values does not fit into 32 bits; else JAX makes int32 or uint32 of it, which a table finds in the same
rows. Where a function uses such ids as numbers, the error names the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import numpy as np

from dflow.tracing.column_tables import library_of
from dflow.tracing.element_arrays import refuse_missing_integers
from dflow.tracing.errors import InputError
from dflow.tracing.jax_frontend import keeps_64_bits
from dflow.tracing.number_range import check_number, check_numbers, is_lost, is_wide
from dflow.tracing.wide_ids import IdsAreNoNumbers, IntegerIds, StringIds, WideIds, are_strings, wide_ids_of

#: Classes of columns of other libraries, which NumPy converts.
_COLUMNS = {
    "pandas": ("Series", "Index", "ExtensionArray"),
    "pyarrow": ("Array", "ChunkedArray"),
    "polars": ("Series",),
}
#: Codes of NumPy's dtypes of strings and objects, and kinds of these.
_TEXTS, _KINDS_OF_TEXT = frozenset("USTO"), "USTO"
#: Codes of NumPy's dtypes of numbers of 64 bits or more.
_WIDE = frozenset("lqLQpPdgDG")
_KINDS = (StringIds, IntegerIds)
_NUMPY = np.ndarray | np.generic
#: Texts of JAX's errors about ids that its functions were given.
_MARKS = (*(kind.__name__ for kind in _KINDS), "__jax_array__")

#: Whether objects of a class are columns, by class.
_are_columns: WeakKeyDictionary[type[Any], bool] = WeakKeyDictionary()

#: Positions of leaves that were ids in an earlier call, with the structure of its arguments.
KnownIds = set[tuple[Any, int]]


class GivenIds(NamedTuple):
    """An argument that became ids: a function that returns its name, the argument, the ids, and where it is."""

    name: Callable[[], str]
    given: Any
    ids: WideIds
    place: tuple[Any, int]


def is_taken(leaf: Any) -> bool:
    """Whether JAX takes a leaf of arguments as it is: it is no string or column, nor has numbers that JAX changes."""
    if isinstance(leaf, _NUMPY):
        code = leaf.dtype.char
        return code not in _TEXTS and (code not in _WIDE or not is_lost(leaf))
    kind = type(leaf)
    if kind is jax.ShapeDtypeStruct:
        return _code(leaf) not in _TEXTS
    return not (kind is str or kind is bytes or is_wide(leaf) or _is_column(leaf))


def _may_be_ids(leaf: Any) -> bool:
    if isinstance(leaf, _NUMPY | jax.ShapeDtypeStruct):
        return _code(leaf) in _WIDE or _code(leaf) in _TEXTS
    return is_list_of_strings(leaf) or not is_taken(leaf)


def _code(leaf: Any) -> str:
    return getattr(leaf.dtype, "char", "")  # keys have a dtype of JAX


def _is_column(value: Any) -> bool:
    kind = type(value)
    if kind not in _are_columns:
        _are_columns[kind] = any(one.__name__ in _COLUMNS.get(library_of(one), ()) for one in kind.__mro__)
    return _are_columns[kind]


def is_list_of_strings(value: Any) -> bool:
    """Whether a list is a column of strings, or of rows of them, or a tuple has only strings.

    A list may also have other scalars beside strings: they are errors of the ids.
    """
    if type(value) not in (list, tuple) or not value:
        return False
    kinds = set(map(type, value))
    if kinds <= {str, bytes}:
        return True
    if type(value) is list and (str in kinds or bytes in kinds):
        return kinds <= {str, bytes, int, float, bool, type(None)}
    return kinds == {list} and all(map(is_list_of_strings, value))


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a pytree of arguments. A list of strings is a leaf."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    if {str, bytes}.isdisjoint(map(type, leaves)):  # most calls: `is_leaf` is a call of Python for each part
        return leaves, structure
    return jax.tree_util.tree_flatten(tree, is_leaf=is_list_of_strings)


def types_of(tree: Any) -> Any:
    """Return a hashable key of a pytree of arguments: the types of arrays and ids, and other leaves themselves."""
    leaves, structure = flattened(tree)
    return structure, tuple(map(_type_of, leaves))


def _type_of(leaf: Any) -> Any:
    if hasattr(leaf, "dtype") and not _is_column(leaf):
        return leaf.shape, leaf.dtype
    return np.shape(leaf) if is_list_of_strings(leaf) or _is_column(leaf) else leaf


def with_ids(
    tree: Any,
    names: Callable[[], Sequence[str]],
    known: Set[tuple[Any, int]] = frozenset(),
    *,
    is_declared: bool = False,
) -> tuple[Any, list[GivenIds] | None]:
    """Return the pytree with ids in place of strings and of integers beyond 32 bits, and these; None if none changed.

    A column of another library becomes an array of NumPy, whatever it has.

    names        returns the names of the leaves, as messages have them; those of `is_list_of_strings` are leaves
    known        leaves that are ids whatever their values
    is_declared  whether `jax.ShapeDtypeStruct`s of 64-bit integers are ids
    raises       InputError for values that are no ids, such as None among strings; NumberRangeError for an integer of
                 Python beyond 32 bits. Warns of floats that become infinities
    """
    leaves, structure = flattened(tree)
    found: list[GivenIds] = []
    has_changed = False
    for index, leaf in enumerate(leaves):
        if not _may_be_ids(leaf):
            continue

        def name(index: int = index) -> str:
            return names()[index]

        made = _converted(leaf, name, is_declared or (structure, index) in known)
        if made is not leaf:
            leaves[index], has_changed = made, True
            if isinstance(made, WideIds):
                found.append(GivenIds(name, leaf, made, (structure, index)))
    return (structure.unflatten(leaves), found) if has_changed else (tree, None)


def remember(found: Sequence[GivenIds], known: KnownIds) -> None:
    """Have integers that are ids be so in later calls, whatever their values."""
    known.update(one.place for one in found if isinstance(one.ids, IntegerIds))


def _converted(leaf: Any, name: Callable[[], str], is_wanted: bool) -> Any:
    """Return a leaf as ids, or as an array of NumPy, or as it is."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _declared(leaf) if is_wanted or leaf.dtype.kind in _KINDS_OF_TEXT else leaf
    if type(leaf) in (str, bytes):
        return leaf  # JAX's own error tells to make it static
    array = leaf
    if _is_column(leaf):
        array = np.asarray(leaf)
        refuse_missing_integers(leaf, array, name)
    if isinstance(array, list | tuple) or getattr(array, "dtype", np.dtype(int)).kind in _KINDS_OF_TEXT:
        return ids_of(array, name())
    if not is_wide(array) or keeps_64_bits():
        return array
    if isinstance(array, _NUMPY) and array.dtype.kind in "iu":
        return ids_of(array, name()) if is_wanted or is_lost(array) else array
    check_numbers([array], lambda: [name()])
    return array


def _declared(leaf: jax.ShapeDtypeStruct) -> Any:
    is_text = leaf.dtype.kind in _KINDS_OF_TEXT
    if not is_text and (leaf.dtype not in (np.int64, np.uint64) or keeps_64_bits()):
        return leaf
    part = jax.ShapeDtypeStruct(leaf.shape, np.uint32)
    return (StringIds if is_text else IntegerIds)(part, part)


def ids_of(values: Any, what: str) -> StringIds | IntegerIds:
    """Return ids as those of an argument; `what` is the noun for them in errors. Raises InputError as `wide_ids`."""
    array = np.asarray(values) if _is_column(values) else values
    made = wide_ids_of(array, what)
    return (StringIds if _are_texts(array) else IntegerIds)(made.high, made.low)


def with_string_ids(tree: Any, names: Callable[[], Sequence[str]]) -> Any:
    """Return the pytree with ids in place of its strings, given or declared: in arrays, lists, and by themselves.

    names   returns the names of the leaves, as messages have them; those of `is_list_of_strings` are leaves
    raises  InputError as `wide_ids`
    """
    leaves, structure = flattened(tree)
    if not any(map(has_texts, leaves)):
        return tree
    return structure.unflatten(
        [_string_ids(leaf, names()[index]) if has_texts(leaf) else leaf for index, leaf in enumerate(leaves)]
    )


def _string_ids(leaf: Any, name: str) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return _declared(leaf)
    return ids_of(np.asarray(leaf, object) if type(leaf) in (str, bytes) else leaf, name)


def has_texts(leaf: Any) -> bool:
    """Whether a leaf is a string or a list of strings, or an array or a declared one of a dtype for them."""
    if type(leaf) in (str, bytes) or is_list_of_strings(leaf):
        return True
    return isinstance(leaf, _NUMPY | jax.ShapeDtypeStruct) and _code(leaf) in _TEXTS


def _are_texts(values: Any) -> bool:
    if isinstance(values, list | tuple):
        return is_list_of_strings(values)
    return values.dtype.kind in "UST" or (values.dtype == object and are_strings(np.asarray(values)))


def refuse_ids(tree: Any) -> None:
    """Raise IdsAreNoNumbers if there are ids of arguments in the result of a function."""
    for one in jax.tree_util.tree_leaves(tree, is_leaf=lambda part: isinstance(part, _KINDS)):
        if isinstance(one, _KINDS):
            raise IdsAreNoNumbers(one, "a result of the function")


def refuse_ids_of(structure: Any) -> None:
    """As `refuse_ids`, for the structure of the result of a trace."""
    node = structure.node_data()
    if node is not None and node[0] in _KINDS:
        raise IdsAreNoNumbers(node[0](None, None), "a result of the function")
    for child in structure.children():
        refuse_ids_of(child)


@contextmanager
def naming_ids(found: Sequence[GivenIds]) -> Iterator[None]:
    """Have errors about a use of these ids as numbers name the argument, and its first number beyond 32 bits."""
    try:
        yield
    except IdsAreNoNumbers as error:
        raise _named(found, error.ids, error.use, error.way_out) or error from None
    except (TypeError, ValueError) as error:
        text = str(error)
        if isinstance(error, InputError) or not any(mark in text for mark in _MARKS):
            raise
        raise _named(found, None, "a use as numbers") or error from None


def _named(found: Sequence[GivenIds], ids: WideIds | None, use: str, way_out: str = "") -> InputError | None:
    """Return the error about the argument of these ids: the one of their kind and shape, or else all that may be."""
    alike = [one for one in found if ids is None or type(one.ids) is type(ids)]
    same = [one for one in alike if ids is not None and ids.low is not None and one.ids.shape == ids.shape]
    these = same or alike
    if not these:
        return None
    first = these[0]
    is_spec = isinstance(first.given, jax.ShapeDtypeStruct)
    if isinstance(first.ids, IntegerIds) and len(these) == 1 and not is_spec:
        try:
            check_number(first.given, first.name())
        except InputError as error:
            return error
    named = " or ".join(one.name() for one in these)
    if isinstance(first.ids, StringIds):
        return InputError(
            f"{named}: expected a lookup of its strings in a table with a vocabulary, got {use}",
            way_out or "look them up, table(ids); or give numbers in place of the strings, or leave them out",
        )
    smaller = "dflow.spec(shape, numpy.int32)" if is_spec else "ids.astype(numpy.int32)"
    return InputError(
        f"{named}: expected a lookup of its 64-bit integers in a table with a vocabulary, got {use}",
        way_out or f"look them up, table(ids); or make them of 32 bits, {smaller}",
    )
