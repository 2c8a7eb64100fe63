"""A column as the options ask for it: a value in each row, and categories as codes or names.

Invariant: a column in a file is not read here, unless its library says that it has missing values and none is stated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dflow.input.column_forms import CategoryCodes, LazyColumn, RaggedColumn, masked
from dflow.input.column_options import CODES, NO_VALUE, ColumnOptions, Path, checked_fill, filled
from dflow.input.column_values import missing_values, numbers_or_texts, ragged, refusal

#: Rows that are converted together where a whole column is looked at.
_PIECE = 1 << 16


def completed(column: Any, name: str, path: Path, options: ColumnOptions) -> tuple[Any, Any]:
    """Return a column of `column_values` without missing values, and the names that its codes stand for, or None.

    Raises InputError for missing values without a stated one, for a stated one that does not fit, and for lists of
    several lengths unless the options keep them.
    """
    if isinstance(column, RaggedColumn) and not options.keeps_ragged:
        raise ragged(name, f"lengths from {column.lengths.min()} to {column.lengths.max()}")
    wanted, fill, names = options.names(path), options.fill(path), None
    if not isinstance(wanted, str):
        column, names = _coded(column, wanted, name)
        fill = _code_of(fill, names, name)
    elif isinstance(column, CategoryCodes) and wanted == CODES:
        names = column.names
        if fill is not NO_VALUE and fill not in names.tolist():
            names = np.concatenate([names, np.array([fill, None], object)[:1]])
        column = mapped(column.codes, lambda codes: codes.astype(np.int32, copy=False))
        fill = _code_of(fill, names, name)
    elif isinstance(column, CategoryCodes):
        column = _looked_up(column.names, column.codes)
    return _complete(column, name, fill, options), names


def mapped(column: Any, function: Callable[[Any], Any]) -> Any:
    """Return a column whose values are those of a function of arrays of NumPy."""
    if not isinstance(column, LazyColumn):
        return function(column)
    return LazyColumn(lambda rows: function(column[rows]), column.shape, column.may_miss)


def pieces(column: Any) -> Any:
    """Yield the first row and the values of parts of a column."""
    for start in range(0, len(column), _PIECE):
        yield start, column[np.arange(start, min(start + _PIECE, len(column)))]


def _complete(column: Any, name: str, fill: Any, options: ColumnOptions) -> Any:
    if fill is NO_VALUE:
        if options.keeps_missing or isinstance(column, RaggedColumn):
            return column
        return _refused_if_missing(column, name)
    if isinstance(column, RaggedColumn):
        raise refusal(name, "expected no stated value for lists, got one", "fill their values before")
    empty = column[np.arange(0)]
    try:
        value = checked_fill(fill, np.ma.getdata(empty).dtype)
    except (TypeError, ValueError) as error:
        raise refusal(name, f"missing: {error}", "state one of the column's type, missing={name: value}") from None
    if isinstance(column, np.ndarray) and not np.ma.is_masked(column) and column.dtype.kind in "OSUbiu":
        return column
    if np.ma.is_masked(column):
        return numbers_or_texts(filled(column, value), name)
    return LazyColumn(lambda rows: filled(column[rows], value), column.shape)


def _refused_if_missing(column: Any, name: str) -> Any:
    """Return the column. Raises InputError for a masked value; in a column of floats it becomes NaN."""
    if isinstance(column, LazyColumn):
        if column.may_miss:
            rows = [start + np.flatnonzero(np.ma.getmaskarray(values)) for start, values in pieces(column)]
            _refuse(np.concatenate([*rows, np.zeros(0, int)]), name)
        return column
    if np.ma.is_masked(column):
        if column.dtype.kind in "fc":
            return column.filled(np.nan)
        _refuse(np.flatnonzero(np.ma.getmaskarray(column).reshape(len(column), -1).any(axis=1)), name)
    return np.ma.getdata(column)


def _refuse(rows: Any, name: str) -> None:
    if len(rows):
        raise missing_values(name, int(rows[0]), len(rows))


def _coded(column: Any, names: Any, name: str) -> tuple[Any, Any]:
    """Return the positions of a column's values in `names`, masked for others, and the names."""
    listed = np.asarray(names).tolist()
    places = {value: position for position, value in enumerate(listed)}
    if len(places) < len(listed):
        twice = next(value for position, value in enumerate(listed) if places[value] != position)
        raise refusal(name, f"categories: expected each name once, got {twice!r} twice", "leave one of them out")

    def coded(values: Any) -> Any:
        given = np.ma.getdata(values).tolist()
        codes = np.fromiter((places.get(value, -1) for value in given), np.int32, len(given))
        return masked(codes, (codes < 0) | np.ma.getmaskarray(values))

    if isinstance(column, CategoryCodes):
        column = _looked_up(coded(column.names), column.codes)
    else:
        column = mapped(column, coded)
    if isinstance(column, LazyColumn):
        column.may_miss = True
    return column, np.array([*listed, None], object)[:-1] if any(
        isinstance(one, str | bytes) for one in listed
    ) else np.asarray(listed)


def _code_of(fill: Any, names: Any, name: str) -> Any:
    """Return the code of a stated name."""
    if fill is NO_VALUE:
        return fill
    found = [position for position, value in enumerate(names.tolist()) if value == fill]
    if not found:
        raise refusal(
            name, f"missing: expected one of its {len(names)} categories, got {fill!r}", "add it to the categories"
        )
    return found[0]


def _looked_up(table: Any, codes: Any) -> Any:
    """Return the entries of a table for codes, masked where the code or the entry is."""
    last = np.zeros(1, table.dtype)
    missing_entry = np.append(np.ma.getmaskarray(table), True)
    entries = np.concatenate([np.ma.getdata(table), last])

    def looked_up(codes: Any) -> Any:
        places = np.where(np.ma.getmaskarray(codes), len(table), np.ma.getdata(codes))
        return masked(entries[places], missing_entry[places])

    return mapped(codes, looked_up)
