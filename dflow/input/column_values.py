"""One column of data as a NumPy array: an array, tensor, Series, Arrow array, dataset of HDF5, or a list of values.

No library is imported here: an object is recognised by the modules and names of its classes.

Invariants: an array has a value for each row. A missing value becomes NaN in a column of floats; in other columns it is
an error, which names the row. A column that NumPy would keep as Python objects is an error too, except strings and
bytes.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflow.tracing.column_tables import is_of, library_of
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: Lists and the like, which are columns of their entries.
_LISTS = (list, range, array.array)
#: The classes of pandas' marks of missing values.
_MISSING = ("NAType", "NaTType")


class StoredColumn:
    """A column that stays where it is, such as a dataset of HDF5: only the rows of a batch are read."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self.shape: tuple[int, ...] = tuple(stored.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """Return the rows of these numbers; HDF5 reads them by increasing numbers only."""
        order = np.argsort(rows)
        read = np.asarray(self._stored[rows[order]])
        placed = np.empty_like(read)
        placed[order] = read
        return placed


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor, of any library, which has a shape and a dtype."""
    if isinstance(value, np.ndarray | jax.Array) or is_of(value, "torch", "Tensor"):
        return True
    is_typed = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)
    return is_typed and (hasattr(value, "__getitem__") or library_of(type(value)) == "scipy")


def is_typed_column(value: Any) -> bool:
    """Return whether a value is a column of a library of tables, or of HDF5: never an element of a data set."""
    return any(is_of(value, library, *names) for library, names, _ in _LIBRARIES)


def is_column(value: Any) -> bool:
    return isinstance(value, _LISTS) or is_typed_column(value) or is_array(value)


def column_values(column: Any, name: str) -> Any:
    """Return a column as a NumPy array or a `StoredColumn`. Raises InputError with its name for other values."""
    try:
        own = (convert for library, names, convert in _LIBRARIES if is_of(column, library, *names))
        values = next(own, _of_list if isinstance(column, _LISTS) else _of_array)(column, name)
        if len(values.shape) == 0:
            raise refusal(name, "expected rows, got one value, without an axis", "give it as often as there are rows")
        return values if isinstance(values, StoredColumn) else _numbers_or_texts(values, name)
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise refusal(name, f"expected rows of numbers or strings: {error}", _CONVERT) from error


def refusal(name: str, fact: str, remedy: str) -> InputError:
    return InputError(f"batches: {name}: {fact}", remedy, at=caller())


_CONVERT = "convert it first, or leave it out: frame.drop(columns=[...])"
_DENSE = "make it dense first: tensor.to_dense()"
_FILL = "fill them or drop their rows first: frame.fillna({...}), frame.dropna()"


def _of_array(column: Any, name: str) -> Any:
    if isinstance(column, np.ma.MaskedArray):
        if np.ma.is_masked(column):
            raise _missing(name, int(np.argmax(np.ma.getmaskarray(column).reshape(len(column), -1).any(axis=1))))
        column = column.data
    if library_of(type(column)) == "scipy":
        raise refusal(
            name,
            f"expected dense rows, got a {_kind(column)}",
            "make it dense, matrix.toarray(), or only the rows of a batch: (matrix[rows].toarray() for rows in "
            "dflow.data.batches(range(matrix.shape[0]), size, shuffle=True))",
        )
    if getattr(column.dtype, "names", None):
        raise refusal(name, f"expected numbers or strings, got a {_kind(column)} of records", "read it: dataset[:]")
    is_here = isinstance(column, np.ndarray | jax.Array) or library_of(type(column)) in ("torch", "tensorflow")
    if not is_here and column.shape:
        return StoredColumn(column)
    try:
        return as_array(column)
    except InputError:
        raise refusal(name, f"expected dense rows, got a sparse {_kind(column)}", _DENSE) from None


def _of_pandas(column: Any, name: str) -> Any:
    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        return column.to_numpy()
    missing = np.asarray(column.isna())
    if (categories := getattr(dtype, "categories", None)) is not None:  # those of a column without are the same
        _refuse_missing(missing, name)
        codes = column.cat.codes if hasattr(column, "cat") else column.codes
        return _of_pandas(categories, name)[np.asarray(codes)]
    kept = getattr(dtype, "numpy_dtype", None)
    if getattr(kept, "kind", "O") == "f":
        return column.to_numpy(dtype=kept, na_value=np.nan)
    if getattr(kept, "kind", "O") in "biu":
        _refuse_missing(missing, name)
        return column.to_numpy(dtype=kept)
    values = np.asarray(column)
    if values.dtype.kind not in "fcMm":
        _refuse_missing(missing, name)
    return values


def _of_arrow(column: Any, name: str) -> Any:
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if hasattr(column, "storage"):  # of a type of an extension
        return _of_arrow(column.storage, name)
    if hasattr(column, "dictionary") or hasattr(column.type, "index_type"):
        column = column.cast(column.type.value_type)
    kind = str(column.type)
    if column.null_count and kind not in ("float", "double", "halffloat"):
        _refuse_missing(np.asarray(column.is_null()), name)
    if "list" in kind.partition("<")[0]:
        return _of_arrow_lists(column, name)
    return column.to_numpy(zero_copy_only=False)


def _of_arrow_lists(column: Any, name: str) -> Any:
    flat = _numbers_or_texts(_of_arrow(column.flatten(), name), name)
    size = getattr(column.type, "list_size", None)
    if size is None:
        sizes = np.unique(column.value_lengths())
        if len(sizes) > 1:
            raise _ragged(name, f"{sizes[0]} to {sizes[-1]}")
        size = int(sizes[0]) if len(sizes) else 0
    return flat.reshape(len(column), size, *flat.shape[1:])


def _of_polars(column: Any, name: str) -> Any:
    kind = str(column.dtype)
    if column.null_count() and not kind.startswith("Float"):
        _refuse_missing(column.is_null().to_numpy(), name)
    if kind.startswith(("List", "Array")):
        return _of_list(column.to_list(), name)
    return column.to_numpy()


def _of_list(column: Sequence[Any], name: str) -> Any:
    cells = np.empty(len(column), object)
    for position, cell in enumerate(column):
        cells[position] = cell
    return cells if len(cells) else np.asarray(column)


#: The columns of libraries: its module, the names of their classes, and how they become NumPy arrays.
_LIBRARIES: tuple[tuple[str, tuple[str, ...], Callable[[Any, str], Any]], ...] = (
    ("pandas", ("Series", "Index", "ExtensionArray"), _of_pandas),
    ("pyarrow", ("Array", "ChunkedArray"), _of_arrow),
    ("polars", ("Series",), _of_polars),
    ("datasets", ("Column",), _of_list),
    ("h5py", ("Dataset",), _of_array),
)


def _of_objects(cells: Any, name: str) -> Any:
    """Return the values of a column of Python objects: strings and bytes as they are, numbers and arrays stacked."""
    kinds = set(map(type, cells.tolist()))
    if all(issubclass(kind, str) for kind in kinds) or all(issubclass(kind, bytes) for kind in kinds):
        return cells
    is_text = any(issubclass(kind, str | bytes) for kind in kinds)
    for row, cell in enumerate(cells):
        if cell is None or type(cell).__name__ in _MISSING or (is_text and isinstance(cell, float) and cell != cell):
            raise _missing(name, row)
    if is_text or not all(map(_is_stacked, kinds)):
        shown = sorted(kind.__name__ for kind in kinds)
        raise refusal(name, f"expected numbers, or only strings, or only bytes, got {', '.join(shown)}", _CONVERT)
    return _stacked(cells, kinds, name)


def _stacked(cells: Any, kinds: set[type], name: str) -> Any:
    if all(issubclass(kind, bool | int | np.integer | np.bool_) for kind in kinds):
        values = np.asarray(cells.tolist())
        if values.dtype.kind not in "biu":
            raise refusal(name, "expected integers of at most 64 bits, got larger ones", _CONVERT)
        return values
    rows = [_row(cell, name) for cell in cells]
    shapes = sorted({row.shape for row in rows})
    if len(shapes) > 1:
        raise _ragged(name, " and ".join(map(str, shapes[:3])))
    return np.stack(rows)


def _row(cell: Any, name: str) -> Any:
    return _numbers_or_texts(_of_list(cell, name) if isinstance(cell, (*_LISTS, tuple)) else as_array(cell), name)


def _is_stacked(kind: type) -> bool:
    numbers = (bool, int, float, complex, np.number, np.bool_, np.ndarray, jax.Array, tuple, *_LISTS)
    return issubclass(kind, numbers) or (library_of(kind) == "torch" and hasattr(kind, "layout"))


def _numbers_or_texts(values: Any, name: str) -> Any:
    """Return the values without Python objects other than strings and bytes."""
    if values.dtype.kind == "V" and values.dtype.names:
        raise refusal(name, f"expected numbers or strings, got records of {values.dtype.names}", _CONVERT)
    if values.dtype != object:
        return values
    flat = _of_objects(values.reshape(-1), name)
    return flat.reshape(*values.shape, *flat.shape[1:])


def _refuse_missing(missing: Any, name: str) -> None:
    if missing.any():
        raise _missing(name, int(np.argmax(missing)), int(missing.sum()))


def _missing(name: str, row: int, count: int | None = None) -> InputError:
    many = (
        "a value is missing" if count is None else f"{count} values are missing" if count > 1 else "1 value is missing"
    )
    return refusal(name, f"expected a value in each row; {many}, the first in row {row}", _FILL)


def _ragged(name: str, sizes: str) -> InputError:
    return refusal(
        name,
        f"expected rows of one shape, got {sizes}",
        "pad them to one shape, or feed them one by one to a PaddingFIFOQueue",
    )


def _kind(value: Any) -> str:
    return type(value).__name__
