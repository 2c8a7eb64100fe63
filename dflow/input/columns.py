"""Columns: data as arrays with a value for each row, in any container that people have them in.

A container is a table (a DataFrame, a table of Arrow, a file of HDF5 or of NumPy arrays, an array of records), or a
dict or tuple of columns and of further containers. A list is a list of elements, not of columns, as in PyTorch.

Invariant: an element of data with columns is a row, never a column or the name of one. Data that cannot be divided into
rows is an error that names the column.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflow.input.column_options import ColumnOptions, key_of
from dflow.input.column_values import column_values, is_array, is_column, is_typed_column, refusal
from dflow.input.complete_columns import completed
from dflow.input.reading import FileRows
from dflow.tracing.column_tables import is_of, is_table
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller
from dflow.tracing.wide_ids import WideIds

_REMEDY = "give a dict or a tuple of arrays with a value for each row, or a list of elements"


@dataclass(frozen=True)
class Columns:
    """Columns of `count` rows in the containers of the data; a table's are a dict by name.

    `categories` has the names of the categories of each column of codes, by the column's key of `ColumnOptions`.
    """

    tree: Any
    values: Sequence[Any]
    count: int
    categories: Mapping[Any, Any]

    def rows(self, numbers: Any) -> Any:
        """Return the rows of these numbers, in the containers of the data."""
        return self.tree.unflatten([column[numbers] for column in self.values])


def columns_of(
    data: Any, path: tuple[Any, ...] = (), options: ColumnOptions | None = None
) -> Columns | FileRows | None:
    """Return the columns of data, or None if these are elements, one after another; `path` leads to it in messages.

    Raises InputError for columns of different lengths, for a container that has columns and other values, for a column
    without a NumPy array for its values, and for options of columns that the data does not have.
    """
    options = options or ColumnOptions()
    if isinstance(data, FileRows):
        options.check_absent("none for files", "give it to dflow.data.read, which fills and finds the values")
        return data
    if not _has_columns(data):
        _refuse_listed(data)
        options.check_absent(
            "data with columns, got elements one after another", "give a frame, a dict or a tuple of columns"
        )
        return None
    made = _Arrangement(lists_are_columns=False)
    arranged = made.of(data, path)
    if made.has_lists and len({column.shape[0] for _, column in made.columns}) > 1:
        made = _Arrangement(lists_are_columns=True)
        arranged = made.of(data, path)
    counts = {_name(path): column.shape[0] for path, column in made.columns}
    if not counts:
        raise InputError(f"batches: expected columns, got a {type(data).__name__} without any", _REMEDY, at=caller())
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise InputError(
            f"batches: expected columns of one number of rows, got {shown}",
            "cut them to one length, or leave out the values that are not columns",
            at=caller(),
        )
    options.check_names(path for path, _ in made.columns)
    positions, tree = jax.tree_util.tree_flatten(arranged)
    values, categories = [], {}
    for path, column in (made.columns[position] for position in positions):
        value, names = completed(column, _name(path), path, options)
        values.append(value)
        if names is not None:
            categories[key_of(path)] = names
    return Columns(tree, values, next(iter(counts.values())), categories)


def _has_columns(data: Any) -> bool:
    """Return whether data is to be taken by its columns."""
    if is_table(data) or _is_records(data) or (is_column(data) and not isinstance(data, list)):
        return True
    if (parts := _parts_of_node(data)) is not None:
        return all(map(_is_of_columns, parts))
    if not isinstance(data, tuple) or not data:
        return False
    if all(map(_is_of_columns, data)):
        return True
    if any(map(is_column, data)):
        position = next(position for position, entry in enumerate(data) if not _is_of_columns(entry))
        raise _no_column(data[position], (position,))
    return False


def _is_of_columns(entry: Any) -> bool:
    """Return whether an entry of a tuple is a column, or has columns alone."""
    if isinstance(entry, dict | tuple):
        return bool(entry) and all(map(_is_of_columns, entry.values() if isinstance(entry, dict) else entry))
    parts = _parts_of_node(entry)
    return is_table(entry) or is_column(entry) or (parts is not None and all(map(_is_of_columns, parts)))


def _parts_of_node(value: Any) -> list[Any] | None:
    """Return the parts of a container of JAX's other than Python's, such as `WideIds`; None if it is none."""
    if value is None or (hasattr(value, "__iter__") and not isinstance(value, WideIds)):  # JAX warns of iterators
        return None
    parts: list[Any] = jax.tree_util.tree_leaves(value, is_leaf=lambda one: one is not value)
    return None if len(parts) == 1 and parts[0] is value else parts


class _Arrangement:
    """The containers of data with their columns converted.

    A list of arrays within a container is itself one, unless `lists_are_columns`: then each is a row.

    `columns`    the path of each column, and the column; the containers have its position in this list
    `has_lists`  whether a list could be one of columns, or of rows
    """

    def __init__(self, *, lists_are_columns: bool) -> None:
        self._lists_are_columns = lists_are_columns
        self.columns: list[tuple[tuple[Any, ...], Any]] = []
        self.has_lists = False

    def of(self, data: Any, path: tuple[Any, ...]) -> Any:
        if is_table(data) or _is_records(data):
            made = {key: self.of(value, (*path, key)) for key, value in _named_entries(data, path).items()}
            return OrderedDict(made) if isinstance(data, OrderedDict) else made
        is_list = isinstance(data, list) and bool(path) and all(map(is_array, data)) and _is_listed(data)
        self.has_lists = self.has_lists or is_list
        if isinstance(data, tuple) or (is_list and not self._lists_are_columns):
            parts = [self.of(entry, (*path, position)) for position, entry in enumerate(data)]
            return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)
        if is_column(data):
            self.columns.append((path, column_values(data, _name(path))))
            return len(self.columns) - 1
        if _parts_of_node(data) is None:
            raise _no_column(data, path)
        return jax.tree_util.tree_map_with_path(
            lambda key, part: self.of(part, (*path, jax.tree_util.keystr(key, simple=True))),
            data,
            is_leaf=lambda one: one is not data,
        )


def _named_entries(table: Any, path: tuple[Any, ...]) -> dict[Any, Any]:
    entries = dict(_entries(table, path))
    if len({type(key) for key in entries}) > 1:
        raise InputError(
            f"batches: {_name(path)}: expected names of columns of one type, got {list(entries)}",
            "rename them: frame.rename(columns=str)",
            at=caller(),
        )
    return entries


def _entries(table: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, Any]]:
    """Yield the columns of a table with their names. Raises InputError for two of one name."""
    if isinstance(table, Mapping):
        yield from table.items()
    elif isinstance(table, np.ndarray):
        yield from ((name, table[name]) for name in table.dtype.names or ())
    elif is_of(table, "pandas", "DataFrame"):
        yield from _each_once(table.columns, [table.iloc[:, position] for position in range(table.shape[1])])
    elif is_of(table, "polars", "DataFrame"):
        yield from _each_once(table.columns, table.get_columns())
    elif is_of(table, "pyarrow", "Table", "RecordBatch"):
        yield from _each_once(table.schema.names, table.columns)
    elif is_of(table, "pyarrow", "Dataset"):
        yield from _entries(table.to_table(), path)
    else:
        is_lazy = hasattr(table, "collect")
        raise InputError(
            f"batches: {_name(path)}: expected a DataFrame of pandas or polars or a table of Arrow, got a "
            f"{type(table).__module__}.{type(table).__name__}",
            f"read it into memory first: {'frame.collect()' if is_lazy else 'frame.to_pandas()'}",
            at=caller(),
        )


def _each_once(names: Any, columns: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    seen: set[Any] = set()
    for name, column in zip(names, columns, strict=True):
        if name in seen:
            raise refusal(f"column {name!r}", "expected one column of this name, got two", "rename one of them")
        seen.add(name)
        yield name, column


def _is_records(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.names is not None


def _is_listed(entries: Any) -> bool:
    """Return whether a list is one of columns, as far as its lengths say: fewer entries than each has rows."""
    lengths = {*map(_length, entries)}
    return len(lengths) == 1 and len(entries) < max(lengths)


def _length(entry: Any) -> int:
    """Return the length of a list or an array; -1 for other values."""
    if not (is_array(entry) or is_typed_column(entry) or isinstance(entry, list)):
        return -1
    shape = getattr(entry, "shape", None)
    return len(entry) if shape is None else int(shape[0]) if shape else -1


def _refuse_listed(data: Any) -> None:
    """Raise InputError for a list of tables or columns, which would be stacked as elements."""
    if not isinstance(data, list) or not data:
        return
    is_of_tables = is_typed_column(data[0]) or (is_table(data[0]) and not isinstance(data[0], Mapping))
    if not is_of_tables and not _is_listed(data):
        return
    raise InputError(
        f"batches: expected a list of elements, got {len(data)} of type {type(data[0]).__name__}, each with "
        f"{len(data[0])} rows, as columns have",
        "give columns in a tuple, tuple(columns), elements in one array, numpy.stack(elements), and tables as one",
        at=caller(),
    )


def _no_column(value: Any, path: tuple[Any, ...]) -> InputError:
    return refusal(_name(path), f"expected a column, got a {type(value).__name__}", _REMEDY)


def _name(path: tuple[Any, ...]) -> str:
    if not path:
        return "the data"
    return f"column {path[0]!r}" + "".join(f"[{key!r}]" for key in path[1:])
