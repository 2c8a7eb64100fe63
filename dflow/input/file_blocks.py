"""What all formats of files share: blocks of rows, the options of a reader, and errors that name a file and place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.source import Loc

#: Most bad records of a block that are left out one by one; with more, the whole block is.
_MOST_BAD = 256


class Block(NamedTuple):
    """Rows of a file that are read together.

    rows      number of rows, without the bad records that are left out
    first     row group of Parquet, record batch of Arrow, or the first byte in a file of CSV or TFRecord
    stop      the row after the last one of a record batch, or the byte after the last one of a file
    start     first row of a record batch, or number of records of the file before the block
    left_out  positions of bad records in the block, which are left out
    """

    rows: int
    first: int
    stop: int = 0
    start: int = 0
    left_out: tuple[int, ...] = ()


class BadRecord(NamedTuple):
    """Records of a file that `read` has left out.

    path    of the file
    place   row group, record batch or record in it, with the byte where a record begins; empty for the whole file
    reason  what is wrong
    rows    number of rows that are left out; None if that cannot be known
    """

    path: str
    place: str
    reason: str
    rows: int | None


@dataclass(frozen=True)
class ReadOptions:
    """The options of `dflow.data.read` about columns.

    columns  names of the columns to read, None for all of the first file
    missing  by name, the value in place of a missing one
    lengths  by name of a column of lists, the number of values that each row gets
    ids      names of the columns whose strings are read as ids
    types    by name of a column of CSV, the dtype
    loc      the user's line that reads, for errors
    """

    columns: Sequence[str] | None
    missing: Mapping[str, Any]
    lengths: Mapping[str, int]
    ids: frozenset[str]
    types: Mapping[str, Any]
    loc: Loc | None = None


class FileBlocks(ABC):
    """One file as blocks of rows: the base of the formats. Thread-safe.

    `name` is that of the format, for messages.
    """

    name = ""

    def __init__(self, path: str, options: ReadOptions) -> None:
        self.path, self.options = path, options

    @abstractmethod
    def types(self) -> dict[str, str]:
        """Return the types of all columns by name. Raises `ReadError` for a file that is not of this format."""

    def fault(self, types: Mapping[str, str]) -> str:
        """Return which of these columns the file does not have, or has with another type; empty for none."""
        own = self.types()
        for name, kind in types.items():
            if name not in own:
                return f"expected a column {name!r}, got {list(own)}"
            # A file whose values of a column are all missing may have no type for it.
            if own[name] != kind and not own[name].endswith("null"):
                return f"column {name!r}: expected {kind}, got {own[name]}"
        return ""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """Return the blocks in the order of the file, none of them empty, up to `end_error`. Raises `ReadError`."""

    @abstractmethod
    def columns(self, block: Block, types: Mapping[str, str]) -> dict[str, Any]:
        """Return the columns of a block by name, for `types` of the columns to read. Raises `ReadError`."""

    @abstractmethod
    def place(self, block: Block) -> str:
        """Return the place of a block in the file, for messages."""

    def end_error(self) -> ReadError | None:
        """Return the error of the record after which the file cannot be read any more, if there is one."""
        return None

    def checked(self, types: Mapping[str, str]) -> tuple[list[Block], list[BadRecord]]:
        """Return the blocks without bad records, and these. Reads the whole file. Raises `MissingValue`."""
        good, bad = list[Block](), list[BadRecord]()
        for block in self.blocks():
            known = self.without_bad(block, lambda trial: self.columns(trial, types), bad)
            good += [known] if known is not None else []
        if (ended := self.end_error()) is not None:
            bad.append(BadRecord(self.path, ended.place, ended.fact, None))
        return good, bad

    def without_bad(self, block: Block, read: Callable[[Block], Any], bad: list[BadRecord]) -> Block | None:
        """Return the block without the records that `read` raises for; None if no record is left.

        The bad records are added to `bad`. Raises `MissingValue`.
        """
        left = [*range(block.rows)]
        while left:
            trial = block._replace(rows=len(left), left_out=tuple(sorted({*range(block.rows)} - {*left})))
            try:
                read(trial)
            except ReadError as error:
                if isinstance(error, MissingValue):
                    raise
                is_one = error.row is not None and len(trial.left_out) < _MOST_BAD
                bad.append(BadRecord(self.path, error.place, error.fact, 1 if is_one else len(left)))
                left = left[: error.row] + left[error.row + 1 :] if is_one and error.row is not None else []
            else:
                return trial
        return None

    def error(
        self,
        fact: str,
        block: Block | None = None,
        *,
        remedy: str = "",
        place: str = "",
        row: int | None = None,
        is_missing: bool = False,
    ) -> ReadError:
        """Return the error for a fact about the file, or a block or another place of it."""
        kind = MissingValue if is_missing else ReadError
        place = place or (self.place(block) if block is not None else "")
        return kind(self.path, place, fact, remedy, row, self.options.loc)


class ReadError(InputError):
    """A file has no right values at a place.

    `place`  as in `BadRecord`
    `fact`   what is wrong
    `row`    number of the bad record among the rows of its block; None for the whole block, or file
    """

    def __init__(
        self, path: str, place: str, fact: str, remedy: str = "", row: int | None = None, loc: Loc | None = None
    ) -> None:
        self.place, self.fact, self.row = place, fact, row
        super().__init__(
            f"read: {path}" + (f", {place}" if place else "") + f": {fact}",
            remedy or 'mend the file, or leave such records out: read(..., bad_records="skip")',
            at=loc,
        )


class MissingValue(ReadError):
    """A value is missing, and the options state none in its place: no bad record, since `missing=` decides."""


class Codes:
    """A column of few distinct values, such as strings: for each row the number of its value.

    codes   i32[rows, ...]
    values  array of the distinct values
    """

    def __init__(self, codes: Any, values: Any) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> Any:
        """Return the values of rows."""
        return self.values[self.codes[rows]]


def filled_lists(flat: Any, counts: Any, length: int, fill: Any) -> Any:
    """Return lists as rows of `length` values: longer ones are cut, shorter ones end with `fill`.

    flat    the values of all lists, one after another
    counts  number of values of each list, i64[rows]
    """
    counts = np.asarray(counts, np.int64)
    first = np.cumsum(counts) - counts
    positions = first[:, None] + np.arange(length)
    is_in = np.arange(length) < counts[:, None]
    rows = np.full((len(counts), length, *flat.shape[1:]), fill, flat.dtype)
    rows[is_in] = flat[positions[is_in]]
    return rows
