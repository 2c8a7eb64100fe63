"""Files of CSV as blocks of rows.

A first pass over the bytes finds the ends of the records, which are the ends of lines outside of quotes, and cuts the
file there. So blocks are parsed separately, in any order.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from dflow.input.arrow_blocks import arrow_columns, type_name, type_of
from dflow.input.file_blocks import Block, FileBlocks, ReadError

#: Most bytes of a block, unless one record has more, and bytes of a read in the search for the ends of the records.
_BLOCK, _CHUNK = 1 << 22, 1 << 25


class CsvBlocks(FileBlocks):
    """A file of CSV whose first record has the names of the columns; in a file `.tsv` they are separated by tabs."""

    name = "CSV"

    @cached_property
    def _header_end(self) -> int:
        with open(self.path, "rb") as file:
            if not (line := file.readline()).strip():
                raise self.error("expected a first line with the names of the columns, got none")
            end = len(line)
            while (line := file.readline(3)) in (b"\n", b"\r\n"):
                end += len(line)
        return end

    @cached_property
    def _names(self) -> list[str]:
        try:
            text = self._bytes(0, self._header_end).decode("utf-8-sig").rstrip("\r\n")
            names = next(csv.reader([text], delimiter=self._delimiter))
        except (UnicodeDecodeError, csv.Error) as error:
            raise self.error(f"expected a line with names of columns in UTF-8: {error}") from error
        if twice := [name for name in names if names.count(name) > 1]:
            raise self.error(f"column {twice[0]!r}: expected one column of this name, got {len(twice)}")
        return names

    @property
    def _delimiter(self) -> str:
        return "\t" if self.path.endswith(".tsv") else ","

    def types(self) -> dict[str, str]:
        given = {name: pa.from_numpy_dtype(np.dtype(kind)) for name, kind in self.options.types.items()}
        if (first := next(iter(self.blocks()), None)) is None:  # the next file with records tells the types
            return {name: type_name(given.get(name, pa.null())) for name in self._names}
        data = self._bytes(first.first, first.stop)
        try:
            schema = self._parsed(data, self._names, given, skips=True).schema
        except pa.ArrowInvalid:  # a value that is not of a given type: `columns` names it
            schema = self._parsed(data, self._names, {}, skips=True).schema
        kinds = {name: given.get(name, schema.field(name).type) for name in self._names}
        return {name: "string" if pa.types.is_null(kind) else type_name(kind) for name, kind in kinds.items()}

    def fault(self, types: Mapping[str, str]) -> str:
        """Return which of the columns is missing; values of another type are errors of their records."""
        lacking = [name for name in types if name not in self._names]
        return f"expected a column {lacking[0]!r}, got {self._names}" if lacking else ""

    @cached_property
    def _blocks(self) -> list[Block]:
        blocks, records, at, rest = list[Block](), 0, self._header_end, b""
        size = os.path.getsize(self.path)
        with open(self.path, "rb") as file:
            file.seek(at)
            while data := file.read(_CHUNK):
                rest += data
                ends = _ends(rest, is_last=file.tell() >= size)
                first = 0
                while first < len(ends):
                    start = int(ends[first - 1]) if first else 0
                    stop = max(first + 1, int(np.searchsorted(ends, start + _BLOCK, "right")))
                    blocks.append(Block(stop - first, at + start, at + int(ends[stop - 1]), records))
                    records, first = records + stop - first, stop
                used = int(ends[-1]) if len(ends) else 0
                at, rest = at + used, rest[used:]
        return blocks

    def blocks(self) -> list[Block]:
        return self._blocks

    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        data = self._bytes(block.first, block.stop)
        if block.left_out:
            ends, out = [0, *_ends(data, is_last=True)], {*block.left_out}
            kept = (number for number in range(len(ends) - 1) if number not in out)
            data = b"".join(data[ends[number] : ends[number + 1]] for number in kept)
        kinds = {name: type_of(kind) for name, kind in types.items()}
        try:
            table = self._parsed(data, [*types], kinds)
        except pa.ArrowInvalid as error:
            raise self._bad_row(error, block) from error
        if table.num_rows != block.rows:
            raise self.error(f"expected {block.rows} records, got {table.num_rows}", block)
        return arrow_columns(table, self, block, types)

    def place(self, block: Block) -> str:
        return f"{block.rows} records from record {block.start} on, from byte {block.first} on"

    def _bad_row(self, error: pa.ArrowInvalid, block: Block) -> ReadError:
        text = str(error).partition("\n")[0]
        found = re.search(r"Row #(\d+): ", text)
        if found is None:
            return self.error(text, block)
        row = int(found[1]) - 1
        number = [one for one in range(block.rows + len(block.left_out)) if one not in block.left_out][row]
        at = [0, *_ends(self._bytes(block.first, block.stop), is_last=True)][number]
        place = f"record {block.start + number}, from byte {block.first + at} on"
        return self.error(text.replace(found[0], ""), place=place, row=row)

    def _bytes(self, start: int, stop: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def _parsed(self, data: bytes, columns: list[str], types: Mapping[str, Any], *, skips: bool = False) -> Any:
        """Return these columns of records as a table of Arrow; with `skips` leave out records of other lengths."""
        return pa.csv.read_csv(
            io.BytesIO(data),
            pa.csv.ReadOptions(column_names=self._names, use_threads=False, block_size=len(data) + 1),
            pa.csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=True,
                invalid_row_handler=(lambda row: "skip") if skips else None,
            ),
            pa.csv.ConvertOptions(column_types=dict(types), include_columns=columns),
        )


def _ends(data: bytes, *, is_last: bool) -> Any:
    """Return the bytes after each record of data that begins with one, i64; empty lines belong to the record before.

    is_last  whether the data end with the file, and with them the last record
    """
    found = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(found == b"\n"[0]) + 1
    if b'"' in data:
        ends = ends[~np.bitwise_xor.accumulate(found == b'"'[0])[ends - 1]]
    if is_last and len(data) and not (len(ends) and ends[-1] == len(data)):
        ends = np.append(ends, len(data))
    inner = ends[:-1]
    is_followed = (found[inner] != b"\n"[0]) & (found[inner] != b"\r"[0])
    # Of the last line of a part of a file, the next part tells whether an empty line follows.
    return np.append(inner[is_followed], ends[-1:]) if is_last else inner[is_followed]
