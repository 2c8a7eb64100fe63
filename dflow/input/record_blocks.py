"""Files of TFRecord with records of `tf.Example`, as blocks of rows, read without TensorFlow.

A record is the number of its bytes, u64, a checksum of that, u32, the bytes, and a checksum of those, u32: CRC-32C,
rotated by 15 bits and with a constant added. A first pass over the file reads the numbers of bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import google_crc32c
import numpy as np

from dflow.input.example_columns import ExampleError, example_columns, feature_kinds
from dflow.input.file_blocks import Block, FileBlocks, ReadError

Parsed = TypeVar("Parsed")

#: Most bytes of a block, unless one record has more, and most of its records.
_BLOCK, _MOST = 1 << 22, 1 << 14
#: Bytes around a record's own.
_HEAD, _FOOT = 12, 4
_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")


class RecordBlocks(FileBlocks):
    """A file of TFRecord; a block is a range of records."""

    name = "TFRecord"

    @cached_property
    def _found(self) -> tuple[list[Block], ReadError | None]:
        """The blocks up to the end of the file, or to the first record whose end is not known, and its error."""
        blocks, start, records, first = list[Block](), 0, 0, 0
        error: ReadError | None = None
        size, position = os.path.getsize(self.path), 0
        with open(self.path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            while position < size:
                try:
                    after = position + _HEAD + self._length(data, position, records) + _FOOT
                except ReadError as found:
                    error = found
                    break
                if records > first and (after - start > _BLOCK or records - first == _MOST):
                    blocks.append(Block(records - first, start, position, first))
                    start, first = position, records
                position, records = after, records + 1
        if records > first:
            blocks.append(Block(records - first, start, position, first))
        if size:
            data.close()  # type: ignore[union-attr]
        return blocks, error

    def _length(self, data: Any, position: int, number: int) -> int:
        """Return the number of bytes of the record at a position of the file."""
        left = len(data) - position
        if left < _HEAD:
            fact = f"expected {_HEAD} bytes before a record, got {left} to the end: the file is cut off"
            raise self.error(fact, place=self._at(number, position))
        length, checksum = _LENGTH.unpack_from(data, position)
        if checksum != _masked(bytes(data[position : position + 8])):
            hint = "; the file is compressed: uncompress it" if not position and data[:2] == b"\x1f\x8b" else ""
            fact = f"the checksum of its number of bytes does not fit{hint}"
            raise self.error(fact, place=self._at(number, position))
        if left < _HEAD + length + _FOOT:
            fact = f"expected {length + _FOOT} bytes, got {left - _HEAD} to the end: the file is cut off"
            raise self.error(fact, place=self._at(number, position))
        return int(length)

    def types(self) -> dict[str, str]:
        blocks, error = self._found
        if not blocks:
            if error is not None:
                raise error
            return {}
        found = dict[str, str]()

        def read(block: Block) -> None:
            nonlocal found
            found = self._parsed(block, feature_kinds)

        # Of files whose first block has bad records: that they are bad is known when they are read.
        if self.without_bad(blocks[0], read, []) is None:
            read(blocks[0])
        return found

    def fault(self, types: Mapping[str, str]) -> str:
        """Return an empty string: a missing feature or one of another kind is an error of its record."""
        return ""

    def blocks(self) -> list[Block]:
        return self._found[0]

    def end_error(self) -> ReadError | None:
        return self._found[1]

    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        return self._parsed(block, lambda data, records: example_columns(data, records, types, self.options))

    def _parsed(self, block: Block, parse: Callable[[bytes, Any], Parsed]) -> Parsed:
        """Return `parse(data, records)` of a block. Raises ReadError with the place of a bad record."""
        data, records, numbers = self._records(block)
        try:
            return parse(data, records)
        except ExampleError as error:
            row = error.row
            place = self._at(block.start + numbers[row], block.first + int(records[row, 0]) - _HEAD)
            raise self.error(
                error.fact, place=place, remedy=error.remedy, row=row, is_missing=error.is_missing
            ) from error

    def _records(self, block: Block) -> tuple[bytes, Any, list[int]]:
        """Return the bytes of a block, where each record begins and ends in them, and its number in the block."""
        with open(self.path, "rb") as file:
            file.seek(block.first)
            data = file.read(block.stop - block.first)
        found, numbers, view = list[tuple[int, int]](), list[int](), memoryview(data)
        position, number, left_out = 0, 0, {*block.left_out}
        while position < len(data):
            first = position + _HEAD
            last = first + _LENGTH.unpack_from(data, position)[0]
            if number not in left_out:
                if _CHECKSUM.unpack_from(data, last)[0] != _masked(bytes(view[first:last])):
                    place = self._at(block.start + number, block.first + position)
                    raise self.error("the checksum of its bytes does not fit", place=place, row=len(found))
                found.append((first, last))
                numbers.append(number)
            position, number = last + _FOOT, number + 1
        return data, np.array(found, np.int64).reshape(-1, 2), numbers

    @staticmethod
    def _at(number: int, position: int) -> str:
        return f"record {number}, from byte {position} on"

    def place(self, block: Block) -> str:
        return f"{block.rows} records from record {block.start} on, from byte {block.first} on"


def _masked(data: bytes) -> int:
    """Return the checksum of bytes as TFRecord stores it."""
    checksum: int = google_crc32c.value(data)
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF
