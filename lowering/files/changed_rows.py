"""A folder of arrays whose large arrays may be an older version and the rows that changed since.

Why: of a large table a step touches few rows. The older version is written once; later folders have hard links to its
files, so each folder is complete in itself and any other may be removed. Rows are found by comparing the bytes of the
array with those of the linked files, so no change is missed, whatever made it. An array is written whole when its
changes are large (`_MOST_CHANGED`), when the changes written since its older version add up to its size, or when the
older version cannot be linked or read.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.array_files import (
    ArrayFiles,
    make_paths,
    read_arrays,
    write_manifest,
    write_parts,
)
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import spread
from dflow.lowering.files.zarr import check_array, open_array, stored_type
from dflow.lowering.paging.paged_memory import prefetched
from dflow.tracing.errors import DamagedCheckpoint
from dflow.tracing.ir.types import ArrayType, array_type_of
from dflow.tracing.rows.axis_slice import AxisSlice

LOGGER = logging.getLogger("dflow")

#: Arrays from this size on may be written as changed rows, in bytes.
LEAST_BYTES = 1 << 20
#: Largest share of an array's bytes that is written as changed rows.
_MOST_CHANGED = 1 / 4
#: Number of bytes of an older version that are compared at a time; they stay in the processor's cache.
_PIECE_BYTES = 1 << 20
#: Key of the table of changes in the metadata of a folder.
_CHANGES = "changed rows"


class _Change(msgspec.Struct, frozen=True):
    """An array as three other arrays of its folder, given by name.

    older    an older version of the array, whole
    indices  int64[k]: the rows that changed since, increasing
    rows     their values, of shape [k, ...]
    written  number of bytes of all changes that were written since the older version, these included
    """

    older: str
    indices: str
    rows: str
    written: int

    @staticmethod
    def of(name: str, written: int = 0) -> _Change:
        return _Change(f"{name}~older", f"{name}~indices", f"{name}~rows", written)

    @property
    def names(self) -> tuple[str, str, str]:
        return self.older, self.indices, self.rows


class WrittenBytes(NamedTuple):
    """Number of bytes of arrays that were written, and of the arrays as a whole."""

    written_bytes: int
    full_bytes: int


@dataclass(frozen=True)
class ChangedArrays(SavedArrays):
    """An opened folder of arrays; each array is read as it was when the folder was written."""

    path: Path
    _files: ArrayFiles
    _changes: Mapping[str, _Change]

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """See `SavedArrays`. Raises DamagedCheckpoint, which names the array, for one that is missing or damaged."""
        yield from self._files.each({name: one for name, one in shardings.items() if name not in self._changes})
        for name, sharding in shardings.items():
            if (change := self._changes.get(name)) is not None:
                value = self._merged(name, change)
                yield name, value if sharding is None else spread(value.shape, sharding, value.__getitem__)

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        """See `ArrayFiles.parts`."""
        names = {name for name, _ in wanted}
        changed = {name: self._changed(name, self._changes[name]) for name in names & self._changes.keys()}
        older = [(self._changes[name].older if name in changed else name, part) for name, part in wanted]
        for (name, part), value in zip(wanted, self._files.parts(older), strict=True):
            if name not in changed:
                yield value
                continue
            indices, rows = changed[name]
            merged = value if value.flags.writeable else value.copy()
            if part.axis == 0:
                positions, offsets = np.divmod(indices - part.start, part.step)
                inside = (offsets == 0) & (positions >= 0) & (positions < part.size)
                merged[positions[inside]] = rows[inside]
            else:
                merged[indices] = rows[part.slices]
            yield merged

    def is_replaced(self) -> bool:
        return self._files.is_replaced()

    def _merged(self, name: str, change: _Change) -> npt.NDArray[Any]:
        [(_, value)] = self._files.each({change.older: None})
        indices, rows = self._changed(name, change)
        merged: npt.NDArray[Any] = value if value.flags.writeable else value.copy()
        merged[indices] = rows
        return merged

    def _changed(self, name: str, change: _Change) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return the indices and values of the rows that changed since the older version."""
        read = dict(self._files.each({change.indices: None, change.rows: None}))
        indices, rows = read[change.indices], read[change.rows]
        is_increasing = bool((np.diff(indices, prepend=-1) > 0).all())
        if not is_increasing or (indices.size and indices[-1] >= self.types[name].shape[0]):
            raise _damaged(self.path, name, f"{change.indices!r} has other indices than rows of it, increasing")
        return indices, rows

    def version_of(self, name: str, type: ArrayType) -> tuple[Path, int] | None:
        """Return the path of the whole array that changes of `name` may refer to, and the bytes of all its changes.

        None if the folder has no array of this name and type.
        """
        if self.types.get(name) != type:
            return None
        change = self._changes.get(name)
        whole, written = (name, 0) if change is None else (change.older, change.written)
        return self.path / self._files.paths[whole], written


def read_changed_arrays(path: str | os.PathLike[str]) -> ChangedArrays:
    """Open a folder of arrays, with changed rows or without. Raises as `read_arrays` does."""
    files = read_arrays(path)
    assert isinstance(files.path, Path)  # an object store has no hard links
    try:
        changes = msgspec.convert(files.metadata.get(_CHANGES, {}), dict[str, _Change])
    except msgspec.ValidationError as error:
        raise DamagedCheckpoint(f"{files.path}: expected a table of changed rows, got another: {error}") from error
    parts = {part for change in changes.values() for part in change.names}
    types = {name: type for name, type in files.types.items() if name not in parts}
    for name, change in changes.items():
        types[name] = _merged_type(files, name, change)
    return ChangedArrays(files.path, files.id, types, files.metadata, files, changes)


def _merged_type(files: ArrayFiles, name: str, change: _Change) -> ArrayType:
    older, indices, rows = map(files.types.get, change.names)
    if older is None or indices is None or rows is None or name in files.types:
        raise _damaged(files.path, name, f"expected the arrays {change.names}, got {sorted(files.types)}")
    count = indices.shape[:1]
    if (indices, rows) != (ArrayType(np.dtype("int64"), count), ArrayType(older.dtype, (*count, *older.shape[1:]))):
        raise _damaged(files.path, name, f"{older} has the changed rows {rows} at {indices}")
    return older


def _damaged(path: Location, name: str, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"array {name!r} in {path} is damaged: {what[:300]}", "take an older checkpoint")


def fill_with_changes(
    folder: Path, arrays: Mapping[str, Any], older: ChangedArrays | None, metadata: Mapping[str, Any]
) -> WrittenBytes:
    """Write arrays into an empty folder, which the caller then puts in place; large ones as changes since `older`.

    older   a complete folder on the same file system; None to write all arrays whole
    raises  CheckpointError if an array cannot be written
    """
    apart = {name: _Change.of(name) for name, value in arrays.items() if older is not None and _is_large(value)}
    # A variable may have the name of a part of another one. Then that one is written whole.
    apart = {name: change for name, change in apart.items() if arrays.keys().isdisjoint(change.names)}
    paths = make_paths(folder, [*arrays, *(part for change in apart.values() for part in change.names)])
    written, linked, changes = dict(arrays), dict[str, ArrayType](), dict[str, _Change]()
    for name, change in apart.items():
        assert older is not None
        type = array_type_of(arrays[name]).strong
        found = _changes_since(older, name, type, folder / paths[change.older], arrays[name])
        if found is not None:
            del written[name]
            indices, rows, bytes_since = found
            written |= {change.indices: indices, change.rows: rows}
            linked[change.older], changes[name] = type, _Change.of(name, bytes_since)
    types = write_parts(folder, written, paths)
    table = {_CHANGES: msgspec.to_builtins(changes)} if changes else {}
    write_manifest(folder, {**types, **linked}, paths, {**metadata, **table})
    written_bytes = sum(type.size_bytes for type in types.values())
    changed_bytes = sum(types[part].size_bytes for change in changes.values() for part in change.names[1:])
    return WrittenBytes(written_bytes, written_bytes - changed_bytes + sum(type.size_bytes for type in linked.values()))


def _is_large(value: Any) -> bool:
    """Return whether an array may be written as changed rows: it has rows of numbers, all of them in this process."""
    is_array = isinstance(value, jax.Array) and value.is_fully_addressable and value.ndim > 0
    return is_array and not jnp.issubdtype(value.dtype, jax.dtypes.extended) and value.nbytes >= LEAST_BYTES


def _changes_since(
    older: ChangedArrays, name: str, type: ArrayType, location: Path, value: Any
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any], int] | None:
    """Link the older version to `location` and return the indices and values of the rows that changed since.

    The third result is the number of bytes of all changes since. None, and nothing at `location`, if the array is to be
    written whole.
    """
    if (version := older.version_of(name, type)) is None:
        return None
    try:
        # First the link: the new folder's own bytes are compared.
        _link(version[0], location)
        found = _changed_rows(location, type, np.asarray(value))
    except (OSError, ValueError) as error:
        LOGGER.warning("%s is written whole: its older version in %s cannot be used: %s", name, older.path, error)
        found = None
    if found is not None:
        indices, rows = found
        bytes_since = version[1] + indices.nbytes + rows.nbytes
        if bytes_since <= type.size_bytes:
            return indices, rows, bytes_since
    shutil.rmtree(location, ignore_errors=True)  # what is left is in no manifest
    return None


def _link(older: Path, location: Path) -> None:
    """Make a folder of hard links to the files of an array."""
    location.mkdir()
    for file in older.iterdir():
        os.link(file, location / file.name)


def _changed_rows(
    folder: Path, type: ArrayType, value: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None:
    """Return the indices and values of the rows of `value` whose bytes differ from those of an array in a folder.

    None if they are too many, or if the chunks of the array are not of whole rows. Raises OSError or ValueError if the
    array is damaged, as far as that is seen without its checksums, which a restore checks.
    """
    store = open_array(folder, *stored_type(type)).result()
    check_array(folder, store)
    if store.chunk_layout.read_chunk.shape[1:] != value.shape[1:]:
        return None
    value = np.ascontiguousarray(value)
    own = value.reshape(len(value), -1).view(np.uint8)
    most = int(value.nbytes * _MOST_CHANGED / (own.shape[1] + np.dtype(np.int64).itemsize))
    found, count = [np.empty(0, np.int64)], 0
    for start, older in _pieces(folder, store, *own.shape):
        changed = np.flatnonzero(_differ(prefetched(own[start : start + len(older)]), older))
        found.append(changed + start)
        count += len(changed)
        if count > most:
            return None
    indices = np.concatenate(found)
    return indices, value[indices]


def _pieces(folder: Path, store: Any, count: int, row_bytes: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the rows of an opened array, in order: the index of the first one, and the bytes of some.

    The bytes are in one buffer, which the next piece overwrites. Raises OSError if a file is cut off.
    """
    buffer = np.empty((max(1, _PIECE_BYTES // row_bytes), row_bytes), np.uint8)
    chunk_rows = store.chunk_layout.read_chunk.shape[0]
    for number, first in enumerate(range(0, count, chunk_rows)):
        # A chunk has its rows, uncompressed, and then a checksum. The last one may have more rows than the array.
        with open(folder / ".".join(["c", str(number), *"0" * (store.rank - 1)]), "rb") as file:
            end = min(first + chunk_rows, count)
            for start in range(first, end, len(buffer)):
                piece = buffer[: end - start]
                if file.readinto(piece.reshape(-1).data) != piece.nbytes:
                    raise OSError(f"{file.name} is cut off")
                yield start, piece


def _differ(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return for each row whether the bytes of the two arrays differ, compared in words as large as fit."""
    word = next(size for size in (8, 4, 2, 1) if one.shape[1] % size == 0)
    differs: npt.NDArray[np.bool_] = (one.view(f"u{word}") != other.view(f"u{word}")).any(axis=1)
    return differs
