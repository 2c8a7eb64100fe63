"""Arrays in one file of the safetensors format: a header in JSON with each array's dtype, shape and bytes, then these.

A file may come from anywhere: the format's own library checks its header. The format has no checksums, so a changed bit
within an array is not noticed. Arrays are read and written here, since the library reads no 8-bit floats into NumPy,
and writes files that only their owner may read and that a crash of the machine may lose.
"""

from __future__ import annotations

import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from dflow.lowering.files.atomic_directory import refused_by_the_disk
from dflow.lowering.files.regular_file import LinkError, regular_size
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import placed
from dflow.tracing.errors import CheckpointError, CheckpointExists, DamagedCheckpoint, NoCheckpoint
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice

SUFFIX = ".safetensors"

#: The format's names of dtypes.
_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA = "__metadata__"


@dataclass(frozen=True)
class SafetensorsFile(SavedArrays):
    """An opened file; `_starts` has the position of each array in it."""

    path: Path
    _starts: Mapping[str, int]

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """See `SavedArrays`. Raises DamagedCheckpoint if the file is shorter than before."""
        with open(self.path, "rb") as file:
            for name, sharding in shardings.items():
                type = self.types[name]
                data = np.empty(type.size_bytes, np.uint8)
                file.seek(self._starts[name])
                if file.readinto(data.data) != data.size:
                    raise damaged(self.path, f"array {name!r} is cut off")
                value = data.view(type.dtype).reshape(type.shape)
                yield name, value if sharding is None else placed(jnp.array(value), sharding)

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        """Yield parts of arrays in order, as NumPy arrays; no more is read than their pages. Raises as `each` does."""
        for name, part in wanted:
            type = self.types[name]
            if not type.size_bytes:
                yield np.empty(part.shape(type.shape), type.dtype)
                continue
            try:
                data = np.memmap(self.path, np.uint8, "r", self._starts[name], type.size_bytes)
            except ValueError as error:
                raise damaged(self.path, f"array {name!r} is cut off") from error
            yield np.array(part.of(data.view(type.dtype).reshape(type.shape)))

    def is_replaced(self) -> bool:
        try:
            return read_safetensors(self.path).id != self.id
        except CheckpointError:
            return True


def damaged(path: Path, what: str) -> DamagedCheckpoint:
    """Return the error for a file that is no intact safetensors file."""
    return DamagedCheckpoint(f"{path}: expected a safetensors file, got another one: {what[:300]}", "take another copy")


def read_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile:
    """Open a file. Raises NoCheckpoint if there is none, DamagedCheckpoint if it is malformed or a link."""
    location = Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    try:
        size = regular_size(location)
        with open(location, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            first = file.read(min(start, 1 << 20))
            changed_ns = os.fstat(file.fileno()).st_mtime_ns
        with safe_open(location, "np") as content:
            entries = {name: content.get_slice(name) for name in content.offset_keys()}
            own = (content.metadata() or {}).get("dflow", "{}")
        metadata = msgspec.json.decode(own, type=dict[str, Any])
    except FileNotFoundError:
        raise NoCheckpoint(f"{location}: expected a safetensors file, got none", "correct the path") from None
    except LinkError as error:
        raise DamagedCheckpoint(
            str(error), "if you trust it, give the path that it leads to, or a copy of the file"
        ) from error
    except OSError as error:
        raise damaged(location, f"the system says: {error.strerror or error}") from error
    except (SafetensorError, msgspec.MsgspecError) as error:
        raise damaged(location, str(error)) from error
    types = {name: _type(location, name, array) for name, array in entries.items()}
    starts = dict[str, int]()
    for name, type in types.items():  # which follow each other without gaps, as the library has checked
        starts[name], start = start, start + type.size_bytes
    return SafetensorsFile(location, f"{size}-{changed_ns}-{zlib.crc32(first)}", types, metadata, starts)


def _type(path: Path, name: str, array: Any) -> ArrayType:
    if array.get_dtype() not in _DTYPES:
        raise CheckpointError(
            f"{path}: array {name!r}: expected one of the dtypes {sorted(_DTYPES)}, got {array.get_dtype()}",
            "convert the file to one of these",
        )
    return ArrayType(jnp.dtype(_DTYPES[array.get_dtype()]), tuple(array.get_shape()))


def write_safetensors(
    path: str | os.PathLike[str],
    arrays: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write arrays to a file, which appears complete, and on the disk, or not at all.

    `metadata` is dflow's own; `texts` are further entries of the format's metadata, for other programs.

    Raises CheckpointExists if `path` exists and `overwrite` is False, CheckpointError for a dtype that the format does
    not have, or when the disk refuses the file.
    """
    location = Path(os.path.realpath(path))
    if location.is_dir() or (location.exists() and not overwrite):
        raise CheckpointExists(f"{location} exists", "save to another path, or give overwrite=True for a file")
    header = _header(arrays, metadata, texts or {})
    with refused_by_the_disk(location):
        location.parent.mkdir(parents=True, exist_ok=True)
        staging = location.with_name(f".{location.name}.{secrets.token_hex(8)}.writing")
        try:
            with open(staging, "xb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                for value in arrays.values():
                    file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, location)
        finally:
            with suppress(OSError):
                os.unlink(staging)


def _header(arrays: Mapping[str, Any], metadata: Mapping[str, Any], texts: Mapping[str, str]) -> bytes:
    own = {"dflow": json.dumps(metadata, sort_keys=True)} if metadata else {}
    entries: dict[str, Any] = {_METADATA: {**texts, **own}} if texts or own else {}
    start = 0
    for name, value in arrays.items():
        if name == _METADATA or str(value.dtype) not in _NAMES:
            raise CheckpointError(
                f"array {name!r}: expected one of the dtypes {sorted(_NAMES)} and another name than {_METADATA!r}, got "
                f"{value.dtype}",
                "save it to a folder, which has all dtypes",
            )
        end = start + value.nbytes
        entries[name] = {"dtype": _NAMES[str(value.dtype)], "shape": [*value.shape], "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
