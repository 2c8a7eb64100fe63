"""`dflow.data.read`: the rows of files, which `dflow.data.batches` takes, and which need not fit into memory.

Invariant: the rows and their numbers depend on the files alone, so that a batch has the same rows in every process.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from dflow.input.block_cache import BlockCache
from dflow.input.block_order import BlockOrder
from dflow.input.file_blocks import BadRecord, Block, FileBlocks, ReadError, ReadOptions
from dflow.tracing.column_tables import is_of
from dflow.tracing.errors import InputError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller
from dflow.tracing.wide_ids import StringIds

LOGGER = logging.getLogger("dflow")

#: By format: the ends of the names of its files, the package that reads them, and the class that uses it.
_FORMATS = {
    "parquet": ((".parquet",), "pyarrow", "arrow_blocks:ParquetBlocks"),
    "arrow": ((".arrow", ".feather", ".ipc"), "pyarrow", "arrow_blocks:ArrowBlocks"),
    "csv": ((".csv", ".tsv"), "pyarrow", "csv_blocks:CsvBlocks"),
    "tfrecord": ((".tfrecord", ".tfrecords"), "google_crc32c", "record_blocks:RecordBlocks"),
}
#: Threads that open files.
_OPENING = 4
#: Most bad records that a line of the log names.
_NAMED = 3


@suggests_keywords
def read(
    paths: Any,
    *,
    format: Literal["parquet", "arrow", "csv", "tfrecord"] | None = None,
    columns: Sequence[str] | None = None,
    missing: Mapping[str, Any] | None = None,
    lengths: Mapping[str, int] | None = None,
    ids: Collection[str] = (),
    types: Mapping[str, Any] | None = None,
    parts: int = 1,
    bad_records: Literal["raise", "skip"] = "raise",
) -> FileRows:
    """Return the rows of files of Parquet, Arrow, CSV or TFRecord, for `dflow.data.batches`; they are read in pieces.

    paths    a file, a folder, a pattern such as `clicks/*.parquet`, or a list of these; the files of a folder or a
             pattern are sorted by name. Or a `datasets.Dataset` of Hugging Face, whose columns are read as they are in
             its files
    format   of all files, for names without a known end: .parquet, .arrow, .feather, .ipc, .csv, .tsv, .tfrecord
    columns  names of the columns to read; None reads those of the first file
    missing  by column, the value in place of a missing one. Without it, a missing float is NaN, and another missing
             value an error
    lengths  by column of lists, the number of values that each row gets: longer lists are cut, shorter ones end with
             the value of `missing`, or 0 or an empty string
    ids      columns whose strings are given as their ids, which a step would make of them. So each distinct string of
             a block is hashed once
    types    by column of CSV, the dtype; others are found in the first block of the first file
    parts    number of readers among which the rows are divided: batch `number` is of part `number % parts`, and each
             block is of one part, except for those at the ends of parts. The order depends on it
    bad_records  "raise": an error names file and place when a batch has such a record. "skip": all data are read once
             before the first batch, and bad records are left out, counted and named in `bad_records` of the result

    Numbers keep their dtypes, strings are objects, `bytes` in TFRecord; lists of one length make an array of more axes.
    In `batches`, `shuffle=100_000` draws a new order of the blocks (row groups of Parquet, record batches of Arrow,
    about 4 MiB of others) for each epoch, and of the rows within windows of 100,000. In memory are the blocks of at
    most `parts` + 2 windows, each with its next one. Batch `number` is the same in all processes, so the position is
    the number of the step, as for arrays: a run that is killed and resumed uses each row once per epoch.

    Threads read the next blocks while a batch is used. A file must not change while it is read.

    Raises InputError for paths without a file, an unknown format, and a package that is not installed; when batches are
    made, with file and place, for a file without rows or a column, or with a column of another type than in the first
    file, and for missing values and bad records, as above.
    """
    if bad_records not in ("raise", "skip"):
        raise InputError(f'read: bad_records: expected "raise" or "skip", got {bad_records!r}', "give one of these")
    for option, value in (("columns", columns), ("ids", ids)):
        if isinstance(value, str):
            raise InputError(f"read: {option}: expected names, got {value!r}", f"give a list: {option}=[{value!r}]")
    for option, by_name in (("missing", missing), ("lengths", lengths), ("types", types)):
        if by_name is not None and not isinstance(by_name, Mapping):
            raise InputError(
                f"read: {option}: expected a dict by column, got {by_name!r}", f"give {option}={{name: ...}}"
            )
    counts: list[tuple[str, Any]] = [
        ("parts", parts),
        *((f"lengths: {name!r}", n) for name, n in (lengths or {}).items()),
    ]
    for option, count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"read: {option}: expected an integer of at least 1, got {count!r}", "give 1 or more")
    options = ReadOptions(
        list(columns) if columns is not None else None,
        missing or {},
        lengths or {},
        frozenset(ids),
        types or {},
        caller(),
    )
    if is_of(paths, "datasets", "Dataset"):
        files = [_made("dataset_blocks:DatasetBlocks", paths, options)]
    else:
        files = [_file(path, format, options) for path in _files(paths)]
    if types and (typed := next((file for file in files if file.name != "CSV"), None)) is not None:
        raise InputError(
            f"read: types: expected files of CSV, got {typed.path} of {typed.name}, which declares its types",
            "leave it out, and convert the column in the step",
        )
    return FileRows(files, options, parts, bad_records == "skip")


class FileRows:
    """The result of `read`. Its length is the number of rows."""

    def __init__(self, files: Sequence[FileBlocks], options: ReadOptions, parts: int, skips: bool) -> None:
        self._files, self._options, self._parts, self._skips = files, options, parts, skips
        # A process may read all parts, and workers may ask for batches of two further windows.
        self._cache = BlockCache(self._read, parts + 2)

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"<FileRows of {len(self._files)} files, from {self._files[0].path} on>"

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self._first[-1])

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return [*self._types]

    @property
    def bad_records(self) -> list[BadRecord]:
        """The records that were left out, in the order of the files."""
        return self._opened[2]

    def rows(self, numbers: Any) -> dict[str, Any]:
        """Return the rows of these numbers: arrays of NumPy by the names of their columns."""
        numbers = np.asarray(numbers, np.int64)
        blocks = np.searchsorted(self._first, numbers, "right") - 1
        used = np.unique(blocks)
        found = [(blocks == block, self._cache.get(int(block))) for block in used]
        inside = numbers - self._first[blocks]
        return {name: self._column(name, found, inside) for name in self._types}

    def order(self, size: int, window: int, seed: Sequence[int]) -> BlockOrder:
        """Return the order of the rows in an epoch, for batches of `size` rows; see `BlockOrder`."""
        rows = [block.rows for _, block in self._blocks]
        return BlockOrder(rows, size, window, self._parts, seed, self._cache.expect)

    def _column(self, name: str, found: Sequence[tuple[Any, Mapping[str, Any]]], inside: Any) -> Any:
        values: Any = None
        for members, columns in found:
            part = columns[name][inside[members]]
            if len(found) == 1:
                values = part
                break
            if values is None:
                values = np.empty((len(inside), *part.shape[1:]), part.dtype)
            if values.shape[1:] != part.shape[1:]:
                raise InputError(
                    f"read: column {name!r}: expected lists of one length, got {values.shape[1:]} and {part.shape[1:]}",
                    f"state a length: read(..., lengths={{{name!r}: ...}})",
                    at=self._options.loc,
                )
            values[members] = part
        if name not in self._options.ids:
            return values
        return StringIds((values >> np.uint64(32)).astype(np.uint32), values.astype(np.uint32))

    def _read(self, number: int) -> dict[str, Any]:
        file, block = self._blocks[number]
        return file.columns(block, self._types)

    @property
    def _types(self) -> dict[str, str]:
        return self._opened[0]

    @property
    def _blocks(self) -> list[tuple[FileBlocks, Block]]:
        return self._opened[1]

    @cached_property
    def _first(self) -> Any:
        """The number of the first row of each block, and after them the number of rows."""
        return np.concatenate([[0], np.cumsum([block.rows for _, block in self._blocks], dtype=np.int64)])

    @cached_property
    def _opened(self) -> tuple[dict[str, str], list[tuple[FileBlocks, Block]], list[BadRecord]]:
        """The types of the columns, the blocks of all files, and the bad records."""
        types = self._types_of_first()
        with ThreadPoolExecutor(_OPENING) as threads:
            found = list(threads.map(partial(self._blocks_of, types=types), self._files))
        bad = [one for _, records in found for one in records]
        if bad:
            _log(bad)
        blocks = [(file, block) for file, (known, _) in zip(self._files, found, strict=True) for block in known]
        if not blocks:
            raise InputError(
                f"read: {self._files[0].path} and {len(self._files) - 1} others: expected rows, got none",
                "give files with rows",
                at=self._options.loc,
            )
        return types, blocks, bad

    def _types_of_first(self) -> dict[str, str]:
        """Return the types of the columns to read, from the first file that has any.

        A column whose values are all missing there may have no type: then from the next file with a type for it.
        """
        found: dict[str, str] = {}
        for file in self._files:
            try:
                types = file.types()
            except ReadError:
                if self._skips:
                    continue
                raise
            found = found or self._chosen(types, file) if types else found
            found |= {name: types[name] for name in found if found[name].endswith("null") and name in types}
            if found and not any(kind.endswith("null") for kind in found.values()):
                break
        if found:
            self._check_ids(found)
            return found
        raise InputError(
            f"read: expected a file with columns, got {self._files[0].path} and {len(self._files) - 1} others without",
            "give files with rows",
            at=self._options.loc,
        )

    def _chosen(self, types: Mapping[str, str], file: FileBlocks) -> dict[str, str]:
        wanted = self._options.columns if self._options.columns is not None else [*types]
        named = {"columns": wanted, "missing": self._options.missing, "lengths": self._options.lengths}
        for option, names in {**named, "ids": self._options.ids, "types": self._options.types}.items():
            for name in names:
                if name not in types or name not in wanted:
                    raise InputError(
                        f"read: {option}: expected columns of {file.path}, {[*types]}, got {name!r}",
                        "give names of columns that are read",
                        at=self._options.loc,
                    )
        return {name: types[name] for name in wanted}

    def _check_ids(self, types: Mapping[str, str]) -> None:
        for name in self._options.ids:
            if not types[name].endswith(("string", "binary", "bytes", "bytes[]", "null")):
                raise InputError(
                    f"read: ids: expected columns of strings, got {name!r} of {types[name]}",
                    "leave it out: integers are ids as they are",
                    at=self._options.loc,
                )

    def _blocks_of(self, file: FileBlocks, types: Mapping[str, str]) -> tuple[list[Block], list[BadRecord]]:
        try:
            if fault := file.fault(types):
                raise file.error(f"{fault}; {self._files[0].path} has it" if file is not self._files[0] else fault)
            if self._skips:
                return file.checked(types)
            if (ended := file.end_error()) is not None:
                raise ended
            return file.blocks(), []
        except ReadError as error:
            if not self._skips or type(error) is not ReadError:
                raise
            return [], [BadRecord(file.path, error.place, error.fact, None)]


def _log(bad: Sequence[BadRecord]) -> None:
    named = "; ".join(f"{one.path}, {one.place}: {one.reason}" for one in bad[:_NAMED])
    more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    LOGGER.warning("read: %d bad records are left out: %s%s", len(bad), named, more)


def _files(paths: Any) -> Iterator[str]:
    """Yield the paths of files. Raises InputError for a path without a file."""
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    if not isinstance(listed, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in listed):
        raise InputError(
            f"read: expected paths or a dataset of Hugging Face, got a {type(paths).__name__}",
            "give dflow.data.batches(data, size) for data in memory, or numpy_batches(loader) for a stream",
        )
    for path in listed:
        given = os.fspath(path)
        if os.path.isdir(given):
            found = [os.path.join(given, name) for name in sorted(os.listdir(given)) if not name.startswith((".", "_"))]
            found = [one for one in found if os.path.isfile(one)]
        else:
            found = (
                [given] if os.path.isfile(given) else sorted(filter(os.path.isfile, glob.glob(given, recursive=True)))
            )
        if not found:
            raise InputError(
                f"read: expected a file or folder with files, got {given!r}, which matches none", "give another path"
            )
        yield from found


def _file(path: str, format: str | None, options: ReadOptions) -> FileBlocks:
    found = (known for known, (ends, _, _) in _FORMATS.items() if path.endswith(ends))
    if (of := format or next(found, None)) not in _FORMATS:
        raise InputError(
            f"read: {path}: expected a file of one of {[*_FORMATS]}, got {format or 'a name without their ends'!r}",
            f"give format= one of {[*_FORMATS]}",
        )
    _, package, place = _FORMATS[of]
    if importlib.util.find_spec(package) is None:
        raise InputError(f"read: {path}: expected the package {package}, got none", "pip install 'dflow[data]'")
    return _made(place, path, options)


def _made(place: str, data: Any, options: ReadOptions) -> FileBlocks:
    """Return an object of the class at a place of `dflow.input`, whose packages are imported here."""
    module, _, kind = place.partition(":")
    made: FileBlocks = getattr(importlib.import_module(f"dflow.input.{module}"), kind)(data, options)
    return made
