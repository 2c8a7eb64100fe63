"""A checkpoint of TensorFlow: `PREFIX.index`, a sorted table of the tensors, and `PREFIX.data-00000-of-00001`, ...

The names are the variables' names in TensorFlow 1, and in TensorFlow 2 the paths of objects, such as `dense/kernel`,
without their end `/.ATTRIBUTES/VARIABLE_VALUE`. A variable that was partitioned is one array. Strings, and what is no
tensor, are left out. Each tensor's checksum is compared when it is first read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.foreign.foreign_arrays import ForeignArrays, damaged, id_of_file, missing
from dflow.lowering.files.foreign.sorted_table import fields, read_table, unmasked
from dflow.lowering.files.regular_file import read_regular, regular_size
from dflow.tracing.errors import CheckpointError, NoCheckpoint
from dflow.tracing.ir.types import ArrayType

_KIND = "a checkpoint of TensorFlow"
_INDEX = ".index"
_OF_OBJECTS = "/.ATTRIBUTES/VARIABLE_VALUE"
#: Most bytes of an index.
_MOST_BYTES = 1 << 30
#: Bytes that a checksum takes at a time.
_PIECE = 1 << 24
#: TensorFlow's numbers of dtypes.
_DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 8: "complex64", 9: "int64", 10: "bool",
    14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64", 24: "float8_e5m2",
    25: "float8_e4m3fn",
}  # fmt: skip
#: Those of strings, resources and variants.
_NO_NUMBERS = frozenset((7, 20, 21))
_NEWEST = re.compile(r'^model_checkpoint_path: "(.*)"$', re.MULTILINE)


class _TensorBytes(NamedTuple):
    """The bytes of a tensor, or of a part of one: where they are, and the slices of the tensor that they fill."""

    file: Path
    start: int
    size: int
    checksum: int
    shape: tuple[int, ...]
    slices: tuple[slice, ...] = ()


@dataclass(frozen=True)
class TensorBundle(ForeignArrays):
    """An opened checkpoint; `_stored` has the bytes of each array, in one part or several."""

    _stored: Mapping[str, list[_TensorBytes]]
    _checked: set[str] = field(default_factory=set, compare=False)

    def value(self, name: str) -> npt.NDArray[Any]:
        type, stored = self.types[name], self._stored[name]
        try:
            parts = [self._part(name, one, type.dtype) for one in stored]
        except (OSError, ValueError) as error:
            raise damaged(self.path, f"the bytes of tensor {name!r}", error) from error
        self._checked.add(name)
        if not stored[0].slices and len(stored) == 1:
            return parts[0]
        whole = np.empty(type.shape, type.dtype)
        for one, part in zip(stored, parts, strict=True):
            whole[one.slices] = part
        return whole

    def _part(self, name: str, one: _TensorBytes, dtype: Any) -> npt.NDArray[Any]:
        if not one.size:
            return np.empty(one.shape, dtype)
        if one.start + one.size > regular_size(one.file):
            raise ValueError(f"{one.file.name} is cut off")
        data = np.memmap(one.file, np.uint8, "r", one.start, one.size)
        if name not in self._checked and _crc32c(data) != one.checksum:
            raise ValueError(f"{one.file.name}: the checksum is another one")
        value: npt.NDArray[Any] = data.view(dtype).reshape(one.shape)
        return value


def prefix_of(location: Path) -> Path | None:
    """Return the prefix of the checkpoint of TensorFlow that a path names; None if it names none.

    The path is the prefix, its index, a folder with a file `checkpoint`, whose newest one it is, or a SavedModel.
    """
    if location.name.endswith(_INDEX) and location.is_file():
        return location.with_name(location.name.removesuffix(_INDEX))
    if location.with_name(location.name + _INDEX).is_file():
        return location
    if (location / "saved_model.pb").is_file():
        return location / "variables" / "variables"
    try:
        newest = _NEWEST.search(read_regular(location / "checkpoint", 1 << 20).decode(errors="replace"))
    except OSError:
        return None
    # The file may have the path where it was written.
    return None if newest is None else location / newest[1].rpartition("/")[2]


def read_bundle(prefix: Path) -> TensorBundle:
    """Open a checkpoint.

    Raises NoCheckpoint if there is none; DamagedCheckpoint if its index is malformed or a link; CheckpointError for a
    dtype that JAX does not have, and without the package google-crc32c.
    """
    path = prefix.with_name(prefix.name + _INDEX)
    try:
        import google_crc32c
    except ImportError as error:
        raise missing(path, _KIND, "google-crc32c", error, "pip install 'dflow[checkpoints]'") from error
    try:
        id = id_of_file(path)
        entries = read_table(read_regular(path, _MOST_BYTES), google_crc32c.value)
        header = fields(entries.get(b"", b""))
        if header.get(2, [0]) != [0]:
            raise ValueError("big-endian numbers")
        file = partial(_file, prefix, header.get(1, [1])[0])
        named = dict(_tensors(path, entries, file))
    except FileNotFoundError:
        raise NoCheckpoint(f"{path}: expected {_KIND}, got none", "correct the path") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(path, _KIND, error) from error
    types = {name: type for name, (type, _) in named.items()}
    return TensorBundle(path, id, types, {}, {name: stored for name, (_, stored) in named.items()})


def _file(prefix: Path, count: int, number: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{number:05d}-of-{count:05d}")


def _tensors(path: Path, entries: Mapping[bytes, bytes], file: Any) -> Iterator[tuple[str, Any]]:
    for key, entry in entries.items():
        if not key or key.startswith(b"\0"):  # the header, and parts of tensors
            continue
        found = fields(entry)
        number, shape = found.get(1, [0])[0], _shape(found.get(2, [b""])[0])
        name = key.decode().removesuffix(_OF_OBJECTS)
        if number in _NO_NUMBERS:
            continue
        if number not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name!r}: expected a dtype that JAX has, got number {number} of TensorFlow's",
                "write the checkpoint without it",
            )
        type = ArrayType(jnp.dtype(_DTYPES[number]), shape)
        extents = [_extents(one, shape) for one in found.get(7, [])]
        if not extents:
            yield name, (type, [_stored(found, type, (), file)])
            continue
        parts = [fields(entries[_part_key(key, extent)]) for extent in extents]
        stored = [_stored(part, type, _slices(one, shape), file) for part, one in zip(parts, extents, strict=True)]
        if sum(one.size for one in stored) != type.size_bytes:
            raise ValueError(f"parts of tensor {name!r} that do not fill it")
        yield name, (type, stored)


def _stored(found: Mapping[int, list[Any]], type: ArrayType, slices: tuple[slice, ...], file: Any) -> _TensorBytes:
    shape = tuple(one.stop - one.start for one in slices) if slices else type.shape
    size = found.get(5, [0])[0]
    if size != ArrayType(type.dtype, shape).size_bytes:
        raise ValueError(f"{size} bytes of {ArrayType(type.dtype, shape)}")
    return _TensorBytes(file(found.get(3, [0])[0]), found.get(4, [0])[0], size, unmasked(found[6][0]), shape, slices)


def _shape(message: bytes) -> tuple[int, ...]:
    return tuple(fields(dim).get(1, [0])[0] for dim in fields(message).get(2, []))


def _extents(message: bytes, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the start and size of a part along each dimension; the size -1 is the whole dimension."""
    found = [fields(extent) for extent in fields(message).get(1, [])]
    if len(found) != len(shape):
        raise ValueError("a part of other dimensions than its tensor")
    return [(one.get(1, [0])[0], one.get(2, [-1])[0]) for one in found]


def _slices(extents: list[tuple[int, int]], shape: tuple[int, ...]) -> tuple[slice, ...]:
    pairs = zip(extents, shape, strict=True)
    return tuple(slice(start, start + (dim if size < 0 else size)) for (start, size), dim in pairs)


def _part_key(name: bytes, extents: list[tuple[int, int]]) -> bytes:
    """Return the key of a part of a tensor, in TensorFlow's encoding, whose order is that of the numbers."""
    return b"\0" + name + b"\0\1" + bytes([1, len(extents)]) + b"".join(_signed(n) for one in extents for n in one)


def _signed(number: int) -> bytes:
    """Return an integer in bytes whose first bits, as many ones as bytes, are inverted for a negative number."""
    length = (number if number >= 0 else ~number).bit_length() // 7 + 1
    ones = ((1 << length) - 1) << 7 * length
    return ((number & ((1 << 8 * length) - 1)) ^ ones).to_bytes(length, "big")


def _crc32c(data: npt.NDArray[np.uint8]) -> int:
    import google_crc32c

    found = 0
    for start in range(0, data.size, _PIECE):
        found = google_crc32c.extend(found, data[start : start + _PIECE].tobytes())
    return found
