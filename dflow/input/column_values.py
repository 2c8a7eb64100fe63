"""One column of data as a NumPy array: an array, tensor, Series, Arrow array, dataset of HDF5, or a list of values.

No library is imported here before its columns are given: an object is recognised by the modules and names of its
classes.

Invariants: a column has a value for each row. A missing value is NaN in a column of floats, NaT in one of times, and
masked in others. A column that NumPy would keep as Python objects is an error, which names it, except strings and
bytes. A column that its library maps from a file, or keeps in another form, is converted batch by batch.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dflow.input.column_forms import CategoryCodes, LazyColumn, RaggedColumn, masked
from dflow.tracing.column_tables import is_of, library_of
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: Lists and the like, which are columns of their entries.
_LISTS = (list, range, array.array)
#: The classes of pandas' marks of missing values.
_MISSING = ("NAType", "NaTType")


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
    """Return a column as a NumPy array, masked where values are missing, or in one of the forms of `column_forms`.

    Raises InputError with its name for other values.
    """
    try:
        own = (convert for library, names, convert in _LIBRARIES if is_of(column, library, *names))
        values = next(own, _of_list if isinstance(column, _LISTS) else _of_array)(column, name)
        if len(values.shape) == 0:
            raise refusal(name, "expected rows, got one value, without an axis", "give it as often as there are rows")
        return numbers_or_texts(values, name) if isinstance(values, np.ndarray) else values
    except InputError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise refusal(name, f"expected rows of numbers or strings: {error}", _CONVERT) from error


def whole_column(column: Any, name: str) -> Any:
    """Return a column as a NumPy array, categories as their names. Raises InputError where a value is missing."""
    return _present(column_values(column, name), name)


def refusal(name: str, fact: str, remedy: str) -> InputError:
    return InputError(f"batches: {name}: {fact}", remedy, at=caller())


def ragged(name: str, sizes: str) -> InputError:
    """Return the error for rows of several shapes."""
    return refusal(
        name,
        f"expected rows of one shape, got {sizes}",
        "pad them to a few lengths by dflow.data.bucket_by_sequence_length, or feed them one by one to a "
        "PaddingFIFOQueue",
    )


_CONVERT = "convert it first, or leave it out: frame.drop(columns=[...])"
_DENSE = "make it dense first: tensor.to_dense()"


def _of_array(column: Any, name: str) -> Any:
    if library_of(type(column)) == "scipy":
        raise refusal(
            name,
            f"expected dense rows, got a {_kind(column)}",
            "make it dense, matrix.toarray(), or only the rows of a batch: (matrix[rows].toarray() for rows in "
            "dflow.data.batches(range(matrix.shape[0]), size, shuffle=True))",
        )
    if getattr(column.dtype, "names", None):
        raise refusal(name, f"expected numbers or strings, got a {_kind(column)} of records", "read it: dataset[:]")
    if isinstance(column, np.ma.MaskedArray):
        return column if np.ma.is_masked(column) else column.data
    is_here = isinstance(column, np.ndarray | jax.Array) or library_of(type(column)) in ("torch", "tensorflow")
    if not is_here and column.shape:
        return LazyColumn(lambda rows: _read_in_order(column, rows), tuple(column.shape))
    try:
        return as_array(column)
    except InputError:
        raise refusal(name, f"expected dense rows, got a sparse {_kind(column)}", _DENSE) from None


def _read_in_order(stored: Any, rows: Any) -> Any:
    """Return the rows of these numbers; HDF5 reads them by increasing numbers only."""
    order = np.argsort(rows)
    read = np.asarray(stored[rows[order]])
    return read[np.argsort(order)]


def _of_pandas(column: Any, name: str) -> Any:
    dtype = column.dtype
    if isinstance(dtype, np.dtype):
        return column.to_numpy()
    if (categories := getattr(dtype, "categories", None)) is not None:  # those of a column without are the same
        codes = np.asarray(column.cat.codes if hasattr(column, "cat") else column.codes)
        return CategoryCodes(masked(codes, codes < 0), _names(categories, name))
    if type(dtype).__name__ == "ArrowDtype" or getattr(dtype, "storage", None) == "pyarrow":
        return _of_arrow(getattr(column, "array", column).__arrow_array__(), name)
    if getattr(dtype, "tz", None) is not None:
        return column.to_numpy(dtype=f"M8[{dtype.unit}]")
    kept, missing = np.dtype(getattr(dtype, "numpy_dtype", object)), np.asarray(column.isna())
    if kept.kind == "f":
        return column.to_numpy(dtype=kept, na_value=np.nan)
    if kept.kind in "biu":
        return masked(column.to_numpy(dtype=kept, na_value=kept.type(0)), missing)
    values = np.asarray(column)
    return values if values.dtype.kind in "fcMm" else masked(values, missing)


def _of_arrow(column: Any, name: str) -> Any:
    import pyarrow as pa  # it is there: this is one of its columns

    if not hasattr(column, "chunks"):
        column = pa.chunked_array([column])
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _of_arrow(column.cast(kind.storage_type), name)
    if pa.types.is_dictionary(kind):
        return _of_arrow_dictionary(column, name)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _of_arrow_lists(column.combine_chunks(), name)
    if not _is_plain_arrow(kind):
        return column.combine_chunks().to_numpy(zero_copy_only=False)
    if column.num_chunks == 1:
        try:
            return column.chunk(0).to_numpy()  # of the same memory
        except pa.ArrowInvalid:
            pass
    is_nan = pa.types.is_floating(kind) or pa.types.is_temporal(kind)
    may_miss = bool(column.null_count) and not is_nan
    return LazyColumn(lambda rows: _of_plain_arrow(_arrow_rows(column, rows)), (len(column),), may_miss)


def _is_plain_arrow(kind: Any) -> bool:
    """Return whether values are numbers, times, strings or bytes, which are converted batch by batch."""
    import pyarrow as pa

    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary_view)
    others = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_boolean)
    numbers = (pa.types.is_integer, pa.types.is_floating, pa.types.is_timestamp, pa.types.is_date, pa.types.is_duration)
    return any(test(kind) for test in (*texts, *others, *numbers))


def _arrow_rows(column: Any, rows: Any) -> Any:
    """Return the rows of these numbers of a column in chunks as one array of Arrow."""
    import pyarrow as pa

    if not len(rows) or (rows[-1] - rows[0] == len(rows) - 1 and bool(np.all(np.diff(rows) == 1))):
        parts = column.slice(int(rows[0]) if len(rows) else 0, len(rows)).chunks
        return pa.concat_arrays(parts) if parts else pa.array([], column.type)
    starts = np.cumsum([0, *map(len, column.chunks)])
    chunk_of = np.searchsorted(starts, rows, "right") - 1
    parts = [column.chunk(int(one)).take(pa.array(rows[chunk_of == one] - starts[one])) for one in np.unique(chunk_of)]
    return pa.concat_arrays(parts).take(pa.array(np.argsort(np.argsort(chunk_of, kind="stable"))))


def _of_plain_arrow(piece: Any) -> Any:
    import pyarrow as pa

    missing = np.asarray(piece.is_null()) if piece.null_count else np.zeros(len(piece), bool)
    if piece.null_count and (pa.types.is_integer(piece.type) or pa.types.is_boolean(piece.type)):
        piece = piece.fill_null(False if pa.types.is_boolean(piece.type) else 0)
    values = piece.to_numpy(zero_copy_only=False)
    return values if values.dtype.kind in "fcMm" else masked(values, missing)


def _of_arrow_dictionary(column: Any, name: str) -> Any:
    import pyarrow as pa

    if any(chunk.dictionary.null_count for chunk in column.chunks) or column.num_chunks == 0:
        column = column.cast(column.type.value_type).dictionary_encode()
    if column.num_chunks == 0:
        return CategoryCodes(np.zeros(0, np.int32), np.zeros(0, object))
    chunks = column.unify_dictionaries().chunks
    codes = _of_arrow(pa.chunked_array([chunk.indices for chunk in chunks]), name)
    return CategoryCodes(codes, _names(chunks[0].dictionary, name))


def _of_arrow_lists(column: Any, name: str) -> Any:
    if column.null_count:
        raise missing_values(name, int(np.argmax(np.asarray(column.is_null()))), column.null_count)
    flat = whole_column(column.flatten(), name)
    size = getattr(column.type, "list_size", None)
    lengths = None if size is not None else np.asarray(column.value_lengths())
    if lengths is not None and len(np.unique(lengths)) > 1:
        return RaggedColumn(flat, lengths)
    size = size if size is not None else int(lengths[0]) if lengths is not None and len(lengths) else 0
    return flat.reshape(len(column), size, *flat.shape[1:])


def _names(categories: Any, name: str) -> Any:
    return whole_column(categories, f"{name}: its categories")


def _present(values: Any, name: str) -> Any:
    """Return values as an array of NumPy. Raises InputError where one is missing, or lists within are ragged."""
    if isinstance(values, CategoryCodes):
        values = values.names[_present(values.codes, name)]
    values = values[np.arange(len(values))] if isinstance(values, LazyColumn) else values
    if isinstance(values, RaggedColumn):
        raise ragged(name, "lists within lists, of several lengths")
    if np.ma.is_masked(values):
        raise missing_values(name, int(np.argmax(np.ma.getmaskarray(values).reshape(len(values), -1).any(axis=1))))
    return np.ma.getdata(values)


def _of_polars(column: Any, name: str) -> Any:
    kind = str(column.dtype)
    if kind.startswith(("Categorical", "Enum")):
        return _of_polars_categories(column, name)
    if kind.startswith(("List", "Array")):
        if column.null_count():
            raise missing_values(name, int(np.argmax(column.is_null().to_numpy())), column.null_count())
        return _of_list(column.to_list(), name)
    plain = ("Int", "UInt", "Float", "Boolean", "Date", "Duration", "String", "Binary")
    if not kind.startswith(plain) or kind.endswith("128"):
        return np.array([*column.to_list(), None], object)[:-1]
    if column.n_chunks() == 1 and not column.null_count() and not kind.startswith(("String", "Binary")):
        return column.to_numpy()
    may_miss = bool(column.null_count()) and kind.startswith(("Int", "UInt", "Boolean", "String", "Binary"))
    return LazyColumn(lambda rows: _of_plain_polars(column.gather(rows)), (len(column),), may_miss)


def _of_plain_polars(piece: Any) -> Any:
    missing = piece.is_null().to_numpy()
    if str(piece.dtype).startswith(("String", "Binary")):
        return masked(np.array([*piece.to_list(), None], object)[:-1], missing)
    if str(piece.dtype).startswith(("Int", "UInt", "Boolean")):
        return masked(piece.fill_null(False if str(piece.dtype) == "Boolean" else 0).to_numpy(), missing)
    return piece.to_numpy()


def _of_polars_categories(column: Any, name: str) -> Any:
    """Return the codes of categories; those of `Categorical` depend on the process, so the names are the used ones."""
    missing = column.is_null().to_numpy()
    physical = column.to_physical().fill_null(0).to_numpy()
    if str(column.dtype).startswith("Enum"):
        return CategoryCodes(
            masked(physical, missing), np.array([*column.dtype.categories.to_list(), None], object)[:-1]
        )
    used = column.drop_nulls().unique()
    names, numbers = np.array([*used.to_list(), None], object)[:-1], used.to_physical().to_numpy()
    order = np.argsort(names)
    places = np.zeros(int(numbers.max(initial=0)) + 1, np.int32)
    places[numbers[order]] = np.arange(len(order), dtype=np.int32)
    return CategoryCodes(masked(places[np.where(missing, 0, physical)], missing), names[order])


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
    if kinds and (all(issubclass(kind, str) for kind in kinds) or all(issubclass(kind, bytes) for kind in kinds)):
        return cells
    is_text = any(issubclass(kind, str | bytes) for kind in kinds)
    missing = np.array([_is_missing(cell, is_text=is_text) for cell in cells], bool)
    present = cells[~missing]
    kinds = set(map(type, present.tolist()))
    if is_text and not any(all(issubclass(kind, text) for kind in kinds) for text in (str, bytes)):
        raise _mixed(kinds, name)
    values = present if is_text or not len(present) else _stacked(present, kinds, name)
    if not missing.any() or isinstance(values, RaggedColumn):
        if missing.any():
            raise missing_values(name, int(np.argmax(missing)), int(missing.sum()))
        return values
    placed = np.zeros((len(cells), *values.shape[1:]), values.dtype)
    placed[~missing] = values
    return masked(placed, missing)


def _is_missing(cell: Any, *, is_text: bool) -> bool:
    is_nan = is_text and isinstance(cell, float) and cell != cell
    return cell is None or is_nan or type(cell).__name__ in _MISSING


def _mixed(kinds: set[type], name: str) -> InputError:
    shown = sorted(kind.__name__ for kind in kinds)
    return refusal(name, f"expected numbers, or only strings, or only bytes, got {', '.join(shown)}", _CONVERT)


def _stacked(cells: Any, kinds: set[type], name: str) -> Any:
    if not all(map(_is_stacked, kinds)):
        raise _mixed(kinds, name)
    if all(issubclass(kind, bool | int | np.integer | np.bool_) for kind in kinds):
        values = np.asarray(cells.tolist())
        if values.dtype.kind not in "biu":
            raise refusal(name, "expected integers of at most 64 bits, got larger ones", _CONVERT)
        return values
    rows = [_row(cell, name) for cell in cells]
    shapes = sorted({row.shape for row in rows})
    if len(shapes) == 1:
        return np.stack(rows)
    if any(not shape for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:
        raise ragged(name, " and ".join(map(str, shapes[:3])))
    filled = [row for row in rows if row.size] or rows[:1]
    flat = np.concatenate([row.astype(filled[0].dtype) if not row.size else row for row in rows])
    return RaggedColumn(flat, np.array([len(row) for row in rows]))


def _row(cell: Any, name: str) -> Any:
    is_list = isinstance(cell, (*_LISTS, tuple))
    return _present(numbers_or_texts(_of_list(cell, name) if is_list else as_array(cell), name), name)


def _is_stacked(kind: type) -> bool:
    numbers = (bool, int, float, complex, np.number, np.bool_, np.ndarray, jax.Array, tuple, *_LISTS)
    return issubclass(kind, numbers) or (library_of(kind) == "torch" and hasattr(kind, "layout"))


def numbers_or_texts(values: Any, name: str) -> Any:
    """Return the values of an array without Python objects other than strings and bytes."""
    if values.dtype.kind == "V" and values.dtype.names:
        raise refusal(name, f"expected numbers or strings, got records of {values.dtype.names}", _CONVERT)
    if values.dtype != object:
        return values
    cells = np.ma.getdata(values)
    if np.ma.is_masked(values):
        cells = cells.copy()
        cells[np.ma.getmaskarray(values)] = None
    flat = _of_objects(cells.reshape(-1), name)
    return flat if isinstance(flat, RaggedColumn) else flat.reshape(*values.shape, *flat.shape[1:])


def missing_values(name: str, row: int, count: int | None = None) -> InputError:
    """Return the error for missing values without a value to put in their place."""
    many = (
        "a value is missing" if count is None else f"{count} values are missing" if count > 1 else "1 value is missing"
    )
    key = name.removeprefix("column ")
    if key.endswith("]"):  # of nested data
        key = f"({key[:-1].replace('][', ', ').replace('[', ', ', 1)})"
    stated = "missing=value" if name == "the data" else f"missing={{{key}: value}}"
    return refusal(
        name,
        f"expected a value in each row; {many}, the first in row {row}",
        f"state a value for them, {stated}, or drop their rows first: frame.dropna()",
    )


def _kind(value: Any) -> str:
    return type(value).__name__
