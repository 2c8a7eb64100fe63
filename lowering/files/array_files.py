"""Named arrays in a folder: each in zarr's format (version 3), with a manifest that lists them.

The manifest is written last, and the folder appears atomically (`whole_folder`). Each chunk of an array has a checksum,
so damage is found on reading. The folder is a zarr group, and an Orbax checkpoint of a flat dict. The path of an array
is its name, if that is a safe path; the manifest has all paths.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import secrets
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.array_manifest import MANIFEST, manifest_text, read_manifest
from dflow.lowering.files.atomic_directory import is_of_an_attempt, present
from dflow.lowering.files.divided_array import Bounds, DividedArray
from dflow.lowering.files.mapped_chunks import LEAST_BYTES, can_map, mapped_chunks, rows_of_whole_pages
from dflow.lowering.files.object_path import LONGEST_S, Location, ObjectPath, first_line, no_answer, says_nothing
from dflow.lowering.files.orbax_layout import METADATA, RESERVED, orbax_metadata, tree_paths
from dflow.lowering.files.regular_file import reading_remedy, refuse_links, remedy_of
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import bounds_of, each_once, is_whole_here, placed, spread
from dflow.lowering.files.zarr import check_array, create_array, open_array, stored_dtype, stored_type
from dflow.lowering.paging.paged_memory import prefetched
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, ParseError
from dflow.tracing.ir.types import ArrayType, array_type_of, key_implementation, parse_type
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.source import caller

#: Largest size of a chunk, and limit of pending reads or writes, in bytes.
_CHUNK_BYTES = 64 << 20
_IN_FLIGHT_BYTES = 256 << 20

#: The chunks of arrays from this size on are flushed as soon as they are written, while the next ones are copied.
_FLUSHED_BYTES = 1 << 20

_GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
_PART = re.compile(r"[A-Za-z0-9_-](?:[A-Za-z0-9_.-]*[A-Za-z0-9_-])?")
_PART_LENGTH = 200

Transfer = TypeVar("Transfer")


def fill_folder(folder: Location, arrays: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
    """Write arrays and their manifest into an empty folder, which the caller then puts in place."""
    paths = make_paths(folder, arrays)
    write_manifest(folder, write_parts(folder, arrays, paths), paths, metadata or {})


def make_paths(folder: Location, names: Iterable[str], *, is_tree: bool = False) -> dict[str, str]:
    """Prepare an empty folder for arrays of these names; return their paths within it, for `write_parts`.

    `is_tree` is whether the folder has Orbax's tree layout. Raises CheckpointError for names that it cannot have.
    """
    paths = tree_paths(names) if is_tree else _paths(names)
    groups = sorted({parent for path in paths.values() for parent in PurePosixPath(path).parents})
    if isinstance(folder, Path):
        for group in groups:
            (folder / group).mkdir(exist_ok=True)
    for group in groups:
        _write(folder / group / "zarr.json", _GROUP)
    return paths


def write_parts(folder: Location, arrays: Mapping[str, Any], paths: Mapping[str, str]) -> dict[str, ArrayType]:
    """Write some of the arrays of a prepared folder and return their types.

    Several processes may do this concurrently: each writes its chunks of a `DividedArray`, and its parts of an array
    that no process has whole; other arrays are given to one process, which writes them whole. Raises
    CheckpointError when an array has a type that cannot be written, or the disk refuses it.
    """
    parts = {
        name: array if isinstance(array, DividedArray) else _Stored.of(name, array) for name, array in arrays.items()
    }
    _write_pieces(folder, parts, paths)
    return {name: part.type for name, part in parts.items()}


def write_manifest(
    folder: Location, types: Mapping[str, ArrayType], paths: Mapping[str, str], metadata: Mapping[str, Any]
) -> None:
    """Write the manifest of a folder, after all its arrays."""
    _write(folder / METADATA, orbax_metadata(types, paths))
    _write(folder / MANIFEST, manifest_text(secrets.token_hex(16), types, paths, metadata))


def _write(path: Location, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    if isinstance(path, ObjectPath):
        path.write(text.encode())
    else:
        path.write_text(text)


@dataclass(frozen=True)
class ArrayFiles(SavedArrays):
    """A written folder of arrays: its manifest, and methods that read the arrays."""

    paths: Mapping[str, str]

    def read(self, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the named arrays, each as a JAX array of its sharding, or as a NumPy array where that is None.

        Of a sharded array only the parts of this process's devices are read. PRNG keys are JAX arrays in any case.
        Raises DamagedCheckpoint, which names the array, for one that is missing, damaged or not as in the manifest.
        """
        return dict(self.each(shardings))

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arrays of `read` one by one. The next ones are read meanwhile, up to a limit in bytes."""
        opening = {name: self._open(name) for name in shardings}
        started = (
            (self.types[name].size_bytes, (name, self._started(name, opening.pop(name), sharding)))
            for name, sharding in shardings.items()
        )
        for name, reading in _in_flight(started):
            yield name, self._finished(name, reading, shardings[name])

    def mapped(self, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
        """Return those of the named arrays whose files can be mapped: large ones, on the disk of a Linux machine.

        Their checksums are not compared. Raises as `read` does for one that is missing, or of another size.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        for name in names:
            if name in self.types and (isinstance(self.path, ObjectPath) or self.types[name].size_bytes < LEAST_BYTES):
                continue
            opening = self._open(name)
            with self._unless_damaged(name):
                value = self._mapped(name, self._checked(name, opening))
            found |= {} if value is None else {name: value}
        return found

    def _mapped(self, name: str, store: Any) -> npt.NDArray[Any] | None:
        type, dtype, chunk = self.types[name], store.dtype.numpy_dtype, store.chunk_layout.read_chunk.shape
        folder, rest = self.path / self.paths[name], ".0" * (len(store.shape) - 1)
        if jnp.issubdtype(type.dtype, jax.dtypes.extended) or not can_map(store.shape, dtype, chunk):
            return None
        files = [Path(f"{folder}/c.{number}{rest}") for number in range(-(-store.shape[0] // chunk[0]))]
        if not all(file.exists() for file in files):  # of another encoding of names
            return None
        data = mapped_chunks(files, math.prod(chunk) * dtype.itemsize, type.size_bytes)
        value: npt.NDArray[Any] = data.view(type.dtype).reshape(type.shape)
        return value

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        """Yield parts of the named arrays, in order: NumPy arrays, or JAX arrays of PRNG keys.

        Only the chunks that have elements of a part are read. Raises DamagedCheckpoint as `read` does.
        """
        opening = {name: self._open(name) for name, _ in wanted}
        stores: dict[str, Any] = {}

        def started() -> Iterator[tuple[int, tuple[str, Any]]]:
            for name, part in wanted:
                with self._unless_damaged(name):
                    if name not in stores:
                        stores[name] = self._checked(name, opening[name])
                    stored = stores[name][part.slices]
                yield stored.size * stored.dtype.numpy_dtype.itemsize, (name, stored.read())

        for name, reading in _in_flight(started()):
            with self._unless_damaged(name):
                value = _restored(self.types[name], reading.result(timeout=_longest_s(self.path)))
            yield value

    def is_replaced(self) -> bool:
        try:
            return read_arrays(self.path).id != self.id
        except CheckpointError:
            return True

    def _open(self, name: str) -> Any:
        if name not in self.types:
            raise CheckpointError(
                f"there is no array {name!r} in {self.path}; there are {sorted(self.types) or 'none'}", at=caller()
            )
        with self._unless_damaged(name):
            if isinstance(self.path, Path):
                refuse_links(self.path, self.paths[name])
            return open_array(self.path / self.paths[name], *stored_type(self.types[name]))

    def _started(self, name: str, opening: Any, sharding: Any) -> Any:
        """Start to read an array: the whole, or the pieces that the devices need, by their bounds."""
        with self._unless_damaged(name):
            store = self._checked(name, opening)
            if sharding is None or jnp.issubdtype(self.types[name].dtype, jax.dtypes.extended):
                return store.read()
            indices = sharding.addressable_devices_indices_map(self.types[name].shape).values()
            pieces = {bounds_of(index): store[index] for index in indices}
            return {bounds: piece.read() for bounds, piece in pieces.items()}

    def _checked(self, name: str, opening: Any) -> Any:
        store = opening.result(timeout=_longest_s(self.path))
        check_array(self.path / self.paths[name], store)
        return store

    def _finished(self, name: str, started: Any, sharding: Any) -> Any:
        type = self.types[name]
        with self._unless_damaged(name):
            if not isinstance(started, dict):
                value = _restored(type, started.result(timeout=_longest_s(self.path)))
                return value if sharding is None else placed(jnp.copy(value), sharding)
            longest_s = _longest_s(self.path)
            pieces = {bounds: _restored(type, part.result(timeout=longest_s)) for bounds, part in started.items()}
        return spread(type.shape, sharding, lambda index: pieces[bounds_of(index)])

    @contextmanager
    def _unless_damaged(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as error:
            if isinstance(self.path, ObjectPath) and says_nothing(error):
                raise no_answer(self.path, error) from error
            if remedy := reading_remedy(error):
                raise CheckpointError(
                    f"array {name!r} in {self.path} cannot be read: {first_line(error)}", remedy
                ) from error
            raise DamagedCheckpoint(
                f"array {name!r} ({self.types[name]}) in {self.path} is damaged or missing: {first_line(error)}",
                remedy_of(error, "take an older checkpoint, or read the others without this one"),
            ) from error


def read_arrays(path: str | os.PathLike[str] | ObjectPath) -> ArrayFiles:
    """Open a written folder of arrays at `path`, which as a str is a local one.

    Raises NoCheckpoint if there is nothing, or a folder without a manifest; DamagedCheckpoint if the manifest is
    damaged; CheckpointError if it was written by a newer dflow.
    """
    location = path if isinstance(path, ObjectPath) else present(path)
    try:
        manifest = read_manifest(location)
    except (FileNotFoundError, NotADirectoryError):
        if isinstance(location, ObjectPath) or not location.exists():
            raise NoCheckpoint(f"there is no checkpoint {location}", _neighbours(location)) from None
        raise NoCheckpoint(
            f"{location} is no checkpoint of dflow: it holds no {MANIFEST}", _neighbours(location)
        ) from None
    return ArrayFiles(**vars(manifest), path=location)


def _in_flight(started: Iterable[tuple[int, Transfer]]) -> Iterator[Transfer]:
    """Yield reads or writes, each with its size in bytes, after the next ones are started, up to a limit in bytes."""
    waiting: deque[tuple[int, Transfer]] = deque()
    total = 0
    for size_bytes, one in started:
        waiting.append((size_bytes, one))
        total += size_bytes
        while total > _IN_FLIGHT_BYTES:
            total -= waiting[0][0]
            yield waiting.popleft()[1]
    while waiting:
        yield waiting.popleft()[1]


def _longest_s(location: Location) -> float | None:
    """Return the longest wait for a part of an array, in s; a disk may take as long as it likes."""
    return LONGEST_S if isinstance(location, ObjectPath) else None


def _neighbours(location: Location) -> str:
    if below := _folders_in(location):
        return f"in it there are: {', '.join(below[:20])}; give the path of one of them"
    if isinstance(location, ObjectPath):
        return "correct the URL, or save there first"
    return f"in {location.parent} there are: {', '.join(_folders_in(location.parent)[:20]) or 'none'}"


def _folders_in(location: Location) -> list[str]:
    """Return the names of the checkpoints in a folder, sorted."""
    if isinstance(location, ObjectPath):
        return [name.partition("/")[0] for name in location.names() if name.partition("/")[2] == MANIFEST]
    try:
        entries = [entry for entry in location.iterdir() if not is_of_an_attempt(entry.name)]
        marks = (MANIFEST, METADATA)
        return sorted(entry.name for entry in entries if any((entry / mark).is_file() for mark in marks))
    except OSError:
        return []


@dataclass(frozen=True)
class _Stored:
    """An array to write, with its type; the value of PRNG keys is their data."""

    type: ArrayType
    value: Any

    @staticmethod
    def of(name: str, array: Any) -> _Stored:
        value = array if isinstance(array, jax.Array) else np.asarray(array)
        if isinstance(value, np.ndarray) and not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        try:
            type = ArrayType(value.dtype, value.shape) if isinstance(value, np.ndarray) else array_type_of(value).strong
            if parse_type(str(type)) != type:
                raise ParseError(str(type))
        except (ParseError, TypeError) as error:
            raise CheckpointError(
                f"array {name!r} is of dtype {value.dtype}, which cannot be written",
                "convert it to numbers, or leave it out",
            ) from error
        if jnp.issubdtype(type.dtype, jax.dtypes.extended):
            value = jax.random.key_data(value)
        return _Stored(type, value)

    @property
    def is_shared(self) -> bool:
        """Whether other processes write pieces of the array, since this one does not have the whole."""
        return not is_whole_here(self.value)

    @property
    def is_all_elsewhere(self) -> bool:
        """Whether other processes write all pieces."""
        return self.is_shared and all(shard.replica_id for shard in self.value.addressable_shards)

    def pieces(self) -> Iterator[tuple[Any, npt.NDArray[Any]]]:
        """Yield the parts that this process writes, each once, with the stored dtype and their indices."""
        parts: list[tuple[Any, Any]] = [(..., self.value)]
        if isinstance(self.value, jax.Array):
            shards = self.value.addressable_shards
            mine = [one for one in shards if one.replica_id == 0] if self.is_shared else each_once(shards)
            parts = [(shard.index, shard.data) for shard in mine]
        rows = self.chunk_shape()[0] if self.value.ndim else 1
        for index, part in parts:
            data = stored_data(part)
            if data.nbytes <= _CHUNK_BYTES:
                yield index, data
                continue
            # Chunk by chunk: a few at a time are read from the disk, if the array is paged, and written.
            first, rest = (0, ()) if index is ... else (index[0].start or 0, index[1:])
            for start in range(0, len(data), rows):
                piece = prefetched(data[start : start + rows])
                yield (slice(first + start, first + start + len(piece)), *rest), piece

    def chunk_shape(self) -> tuple[int, ...]:
        """Return the shape of a device's part, cut along its first dimensions until it is small enough."""
        whole, itemsize = self.value.shape, self.value.dtype.itemsize
        part = self.value.sharding.shard_shape(whole) if isinstance(self.value, jax.Array) else whole
        chunk = [max(1, size) for size in part]
        for axis, size in enumerate(chunk):
            inner = itemsize * math.prod(chunk[axis + 1 :])
            if inner * size <= _CHUNK_BYTES:
                break
            rows = max(1, _CHUNK_BYTES // inner)
            # A divisor keeps chunks within the devices' parts, so that each is written once. Along an axis that is not
            # divided among devices any number of rows will do, and the last chunk is short.
            divisor = next(count for count in range(rows, 0, -1) if size % count == 0)
            paged = min(size, rows_of_whole_pages(rows, inner, itemsize * math.prod(whole)))
            chunk[axis] = paged if size == whole[axis] else divisor
        return tuple(chunk)


def stored_data(value: Any) -> npt.NDArray[Any]:
    """Return the data of an array as they are on the disk; for an array on the CPU a view, where that is possible."""
    data = np.asarray(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.extended) else value)
    stored = stored_dtype(data.dtype)
    return data if data.dtype == stored else np.asarray(data, order="C").view(stored)


def divided(type: ArrayType, parts: Sequence[AxisSlice], values: Sequence[Any]) -> DividedArray:
    """Return an array of whose parts this process has all values, for `write_parts`."""
    return DividedArray(type, parts, range(len(parts)), lambda number, bounds: piece(values[number], bounds))


def piece(value: Any, bounds: Bounds) -> npt.NDArray[Any]:
    """Return the data of an array within bounds, as `stored_data` does."""
    return prefetched(stored_data(value)[tuple(itertools.starmap(slice, bounds))])


def _restored(type: ArrayType, data: Any) -> Any:
    if jnp.issubdtype(type.dtype, jax.dtypes.extended):
        return jax.random.wrap_key_data(jnp.asarray(data), impl=key_implementation(type.dtype))
    return data if data.dtype == type.dtype else data.view(type.dtype)


def _write_pieces(folder: Location, parts: Mapping[str, _Stored | DividedArray], paths: Mapping[str, str]) -> None:
    opening: dict[str, Any] = {}
    writing: deque[Any] = deque()

    def started() -> Iterator[tuple[int, tuple[str, Any]]]:
        for name, part in parts.items():
            for index, data in part.pieces():
                writing.append(_started(name, opening[name], index, data, folder))
                yield data.nbytes, (name, writing[-1])

    try:
        for name, part in parts.items():
            if isinstance(part, _Stored) and part.is_all_elsewhere:
                continue
            opening[name] = _create(folder, name, paths[name], part)
        for name, written in _in_flight(started()):
            with _unless_refused(name, folder):
                written.result(timeout=_longest_s(folder))
            writing.popleft()
    finally:
        # After a failure no writes must be left running, but a store may never answer: what it still writes is garbage.
        for future in (*opening.values(), *writing):
            if isinstance(folder, ObjectPath):
                future.cancel()
            else:
                future.exception()


def _create(folder: Location, name: str, path: str, part: _Stored | DividedArray) -> Any:
    dtype, shape = stored_type(part.type)
    flushed = dtype.itemsize * math.prod(shape) >= _FLUSHED_BYTES
    with _unless_refused(name, folder):
        return create_array(folder / path, dtype, shape, part.chunk_shape(), flushed=flushed, is_shared=part.is_shared)


def _started(name: str, opening: Any, index: Any, data: Any, folder: Location) -> Any:
    with _unless_refused(name, folder):
        store = opening.result(timeout=_longest_s(folder))
        return store[index].write(data, can_reference_source_data_indefinitely=True)


@contextmanager
def _unless_refused(name: str, folder: Location) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"array {name!r} cannot be written into {folder.parent}: {first_line(error)}",
            "nothing has been changed there; make room, or choose another place",
        ) from error


def _paths(names: Iterable[str]) -> dict[str, str]:
    """Return the path of each array within the folder: its name, if that is safe, else a coded path.

    A name is safe if it is a path of plain parts, is no parent of another name's path, and differs from every other
    name by more than its case. No safe name equals a coded path.
    """
    folded = Counter(name.casefold() for name in names)
    around = {parent.as_posix() for name in folded for parent in PurePosixPath(name).parents}

    def is_safe(name: str) -> bool:
        parts = name.split("/")
        return (
            all(_PART.fullmatch(part) and len(part) <= _PART_LENGTH for part in parts)
            and RESERVED.isdisjoint(parts)
            and name.casefold() not in around
            and folded[name.casefold()] == 1
        )

    return {name: name if is_safe(name) else _coded(name) for name in names}


def _coded(name: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", name)[:80]
    return f"~{readable}.{hashlib.sha256(name.encode(errors='surrogatepass')).hexdigest()[:24]}"
