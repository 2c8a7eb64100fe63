"""Files of Parquet and Arrow as blocks of rows, and columns of Arrow as arrays of NumPy.

Why strings are kept as codes of their distinct values: Python makes an object of each value, and a hash of it where ids
are wanted, once for each distinct value of a block in place of once for each row.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflow.input.column_options import checked_fill
from dflow.input.column_values import whole_column
from dflow.input.file_blocks import Block, Codes, FileBlocks, ReadError, filled_lists
from dflow.tracing.errors import InputError
from dflow.tracing.wide_ids import wide_ids

#: Most rows of a block of a record batch.
_MOST_ROWS = 1 << 17
#: Arrow's names of the types of numbers, and the dtypes.
_DTYPES = {
    str(kind): np.dtype(kind.to_pandas_dtype())
    for kind in (
        *(pa.bool_(), pa.float16(), pa.float32(), pa.float64()),
        *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    )
}


class ParquetBlocks(FileBlocks):
    """A file of Parquet; a block is a row group."""

    name = "Parquet"

    @cached_property
    def _metadata(self) -> Any:
        try:
            return pq.read_metadata(self.path)
        except (pa.ArrowException, OSError) as error:
            raise self.error(f"expected a file of Parquet: {_text(error)}") from error

    def types(self) -> dict[str, str]:
        return schema_types(self._metadata.schema.to_arrow_schema(), self)

    def blocks(self) -> list[Block]:
        groups = (
            (self._metadata.row_group(number).num_rows, number) for number in range(self._metadata.num_row_groups)
        )
        return [Block(rows, number) for rows, number in groups if rows]

    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        texts = [name for name, kind in types.items() if kind == "string"]
        try:
            file = pq.ParquetFile(self.path, metadata=self._metadata, read_dictionary=texts, memory_map=True)
            table = file.read_row_group(block.first, [*types], use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise self.error(_text(error), block) from error
        return arrow_columns(table, self, block, types)

    def place(self, block: Block) -> str:
        return f"row group {block.first}"


class ArrowBlocks(FileBlocks):
    """A file of Arrow's IPC format, with a footer (also of Feather) or a stream; a block is rows of a record batch."""

    name = "Arrow"

    @cached_property
    def _is_stream(self) -> bool:
        with open(self.path, "rb") as file:
            return file.read(6) != b"ARROW1"

    def _opened(self) -> Any:
        mapped = pa.memory_map(self.path)
        return pa.ipc.open_stream(mapped) if self._is_stream else pa.ipc.open_file(mapped)

    @cached_property
    def _batches(self) -> Any:
        """The record batches of a stream, whose values stay in the file."""
        return list(self._opened())

    @cached_property
    def _rows(self) -> list[int]:
        """The number of rows of each record batch."""
        try:
            if self._is_stream:
                return [batch.num_rows for batch in self._batches]
            opened = self._opened()
            return [opened.get_batch(number).num_rows for number in range(opened.num_record_batches)]
        except (pa.ArrowException, OSError, EOFError) as error:
            raise self.error(f"expected a file of Arrow: {_text(error)}") from error

    def types(self) -> dict[str, str]:
        try:
            schema = self._opened().schema
        except (pa.ArrowException, OSError) as error:
            raise self.error(f"expected a file of Arrow: {_text(error)}") from error
        return schema_types(schema, self)

    def blocks(self) -> list[Block]:
        return [
            Block(min(_MOST_ROWS, rows - start), number, min(start + _MOST_ROWS, rows), start)
            for number, rows in enumerate(self._rows)
            for start in range(0, rows, _MOST_ROWS)
        ]

    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        try:
            batch = self._batches[block.first] if self._is_stream else self._opened().get_batch(block.first)
            table = pa.Table.from_batches([batch.slice(block.start, block.rows)]).select([*types])
        except (pa.ArrowException, OSError) as error:
            raise self.error(_text(error), block) from error
        return arrow_columns(table, self, block, types)

    def place(self, block: Block) -> str:
        return f"record batch {block.first}"


def type_name(kind: Any) -> str:
    """Return the name of a type: one for all types of strings, and for a dictionary that of its values."""
    if pa.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return "string"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "binary"
    if is_list(kind):
        return f"list of {type_name(kind.value_type)}"
    return str(kind)


def type_of(name: str) -> Any:
    """Return the type of this name."""
    zoned = re.fullmatch(r"timestamp\[(\w+), tz=(.*)\]", name)
    return pa.timestamp(*zoned.groups()) if zoned else pa.type_for_alias(name)


def schema_types(schema: Any, file: FileBlocks) -> dict[str, str]:
    """Return the types of the columns of a schema by name. Raises `ReadError` for two columns of one name."""
    if len(set(schema.names)) < len(schema.names):
        twice = next(name for name in schema.names if schema.names.count(name) > 1)
        raise file.error(f"column {twice!r}: expected one column of this name, got {schema.names.count(twice)}")
    return {field.name: type_name(field.type) for field in schema}


def is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def arrow_columns(table: Any, file: FileBlocks, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
    """Return the columns of a table as arrays of NumPy or `Codes` by name; strings of `ids` as hashes of 64 bits."""
    return {name: _Column(file, block, name, kind).of(table.column(name)) for name, kind in types.items()}


class _Column:
    """Converts one column of a block."""

    def __init__(self, file: FileBlocks, block: Block, name: str, kind: str) -> None:
        self._file, self._block, self._name, self._kind = file, block, name, kind
        self._missing = file.options.missing.get(name)
        self._length = file.options.lengths.get(name)

    def of(self, column: Any) -> Any:
        column = _whole(column)
        if is_list(column.type):
            return self._lists(column)
        if self._length is not None:
            raise self._error(f"expected lists for lengths={{{self._name!r}: {self._length}}}, got {column.type}")
        return self._values(column)

    def _values(self, column: Any) -> Any:
        """Return the values of an array without lists."""
        if pa.types.is_null(column.type):
            kind = self._kind.removeprefix("list of ")
            column = column.cast(pa.string() if kind == "null" else type_of(kind))
        kind, fill = type_name(column.type), self._fill(column) if column.null_count else None
        if kind == "string":
            return self._texts(column, fill)
        if kind == "binary":
            values = _objects(column, fill)
            return _hashed(values) if self._name in self._file.options.ids else values
        if kind == "bool":
            return _numbers(column.cast(pa.uint8()), fill).view(np.bool_)
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
            return _numbers(column, fill)
        try:
            whole = column if fill is None else pc.fill_null(column, pa.scalar(fill, column.type))
            return whole_column(whole, f"column {self._name!r}")
        except (InputError, pa.ArrowException, TypeError) as error:
            fact = str(error).partition("\n")[0].removeprefix(f"batches: column {self._name!r}: ")
            raise self._error(fact) from error

    def _texts(self, column: Any, fill: Any) -> Codes:
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        values = _objects(column.dictionary, fill)
        codes = _numbers(column.indices, len(values))
        if fill is not None:
            values = np.append(values, fill)
        return Codes(codes, _hashed(values) if self._name in self._file.options.ids else values)

    def _fill(self, column: Any) -> Any:
        """Return the value in place of missing ones. Raises `MissingValue` if the options state none of this type."""
        missing, kind = self._missing, type_name(column.type)
        if missing is None and pa.types.is_floating(column.type):
            return np.nan
        if missing is None:
            valid = _numbers(column.is_valid().cast(pa.uint8()))
            raise self._file.error(
                f"column {self._name!r}: expected a value, and {column.null_count} of the block are missing",
                place=f"{self._file.place(self._block)}, row {int(np.argmin(valid))}",
                remedy=f"state a value in their place, missing={{{self._name!r}: ...}}, or leave the column out",
                is_missing=True,
            )
        return self._stated(kind)

    def _stated(self, kind: str) -> Any:
        """Return the stated value for values of this type. Raises `MissingValue` if it does not fit."""
        try:
            if kind in _DTYPES:
                return checked_fill(self._missing, _DTYPES[kind])
            if not isinstance(self._missing, {"string": str, "binary": bytes}.get(kind, object)):
                raise TypeError(f"expected a value of {kind}, got {self._missing!r}")
        except TypeError as error:
            raise self._file.error(
                f"missing: column {self._name!r}: {error}",
                remedy="give another value, or convert the column",
                is_missing=True,
            ) from None
        return self._missing

    def _lists(self, column: Any) -> Any:
        flat = _whole(column.flatten())
        kind = self._kind.removeprefix("list of ") if pa.types.is_null(flat.type) else type_name(flat.type)
        stated = None if self._missing is None else self._stated(kind)
        values = self._values(flat) if not is_list(flat.type) else whole_column(flat, f"column {self._name!r}")
        counts = _numbers(pc.list_value_length(column))
        length, sizes = self._length, np.unique(counts)
        if length is None:
            if len(sizes) != 1:
                raise self._error(
                    f"expected lists of one length, got {sizes[0]} to {sizes[-1]} values",
                    f"state the number of values, to cut or fill them: read(..., lengths={{{self._name!r}: ...}})",
                )
            length = int(sizes[0])
        if not isinstance(values, Codes):
            fill = stated if stated is not None else b"" if values.dtype == object else 0
            if len(sizes) == 1 and sizes[0] == length:
                return values.reshape(len(counts), length, *values.shape[1:])
            return filled_lists(values, counts, length, fill)
        # The last value fills shorter lists.
        blank: Any = stated if stated is not None else ""
        blank = _hashed(np.array([blank], object)) if self._name in self._file.options.ids else [blank]
        all_values = np.concatenate([values.values, np.asarray(blank, values.values.dtype)])
        return Codes(filled_lists(values.codes, counts, length, len(all_values) - 1), all_values)

    def _error(self, fact: str, remedy: str = "") -> ReadError:
        return self._file.error(f"column {self._name!r}: {fact}", self._block, remedy=remedy)


def _whole(column: Any) -> Any:
    """Return a column as one array, and that of an extension type as its storage."""
    if isinstance(column, pa.ChunkedArray):
        column = column.unify_dictionaries() if pa.types.is_dictionary(column.type) else column
        column = column.combine_chunks()
        if isinstance(column, pa.ChunkedArray):  # older releases keep an empty one
            column = column.chunk(0) if column.num_chunks else pa.array([], column.type)
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _numbers(column: Any, fill: Any = 0) -> Any:
    """Return integers or floats as an array, with `fill` for missing ones; `to_numpy` takes 1 s to import pandas."""
    if not column.null_count:
        return np.from_dlpack(column)
    plain = pa.Array.from_buffers(column.type, len(column), [None, column.buffers()[1]], offset=column.offset)
    valid = np.from_dlpack(column.is_valid().cast(pa.uint8())).view(np.bool_)
    values = np.from_dlpack(plain)
    return np.where(valid, values, np.asarray(fill, values.dtype))


def _objects(column: Any, fill: Any = None) -> Any:
    """Return strings or bytes as an array of objects, with `fill` for missing ones."""
    values = np.empty(len(column), object)
    values[:] = column.to_pylist()
    if column.null_count:
        values[values == None] = fill  # noqa: E711
    return values


def _hashed(values: Any) -> Any:
    """Return the ids of strings, u64 of the same shape."""
    ids = wide_ids(values)
    return (np.asarray(ids.high, np.uint64) << np.uint64(32)) | np.asarray(ids.low, np.uint64)


def _text(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
