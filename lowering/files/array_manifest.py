"""The manifest of a folder of arrays: the path and the type of each array.

A manifest may come from anywhere. Invariant: what `read_manifest` returns has the declared form, and every array lies
inside the folder.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dflow.lowering.files.object_path import Location
from dflow.lowering.files.regular_file import read_regular, reading_remedy, remedy_of
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint, ParseError
from dflow.tracing.ir.types import ArrayType, parse_type

#: The file that marks a folder of arrays.
MANIFEST = "dflow.json"
VERSION = 1

#: Largest size of a manifest, enough for about a million arrays.
_MOST_BYTES = 256 << 20
_REMEDY = "take an older checkpoint; the arrays that are whole can be read one by one, with zarr or TensorStore"


class _ArrayEntry(msgspec.Struct, frozen=True):
    """An array: its folder, relative to that of the manifest, and the text of its type."""

    path: str
    type: str


class _Content(msgspec.Struct, frozen=True):
    id: str
    arrays: dict[str, _ArrayEntry]
    metadata: dict[str, Any]


@dataclass(frozen=True)
class ArrayManifest:
    """The content of a manifest: the type and the path of each array, by name, and the user's metadata."""

    #: Differs between any two folders that were ever written.
    id: str
    types: Mapping[str, ArrayType]
    paths: Mapping[str, str]
    metadata: Mapping[str, Any]


def manifest_text(
    id: str, types: Mapping[str, ArrayType], paths: Mapping[str, str], metadata: Mapping[str, Any]
) -> str:
    """Return the text of a manifest, with a checksum."""
    content = {
        "format": "dflow arrays",
        "version": VERSION,
        "id": id,
        "arrays": {name: {"path": paths[name], "type": str(type)} for name, type in types.items()},
        "metadata": dict(metadata),
    }
    return json.dumps({"crc32": _checksum(content), "content": content}, sort_keys=True)


def read_manifest(folder: Location) -> ArrayManifest:
    """Return the manifest of the folder.

    Raises CheckpointError if it is malformed, was written by a newer dflow, or cannot be opened; FileNotFoundError or
    NotADirectoryError if there is none.
    """
    try:
        whole = json.loads(read_regular(folder / MANIFEST, _MOST_BYTES))
        content = _content(folder, whole)
        types = {name: _array_type(name, entry) for name, entry in content.arrays.items()}
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        if remedy := reading_remedy(error):
            raise CheckpointError(f"{folder} cannot be read: {error}", remedy) from error
        raise damaged(folder, str(error), remedy_of(error, _REMEDY)) from error
    paths = {name: entry.path for name, entry in content.arrays.items()}
    return ArrayManifest(content.id, types, paths, content.metadata)


def damaged(folder: Location, what: str, remedy: str = _REMEDY) -> DamagedCheckpoint:
    """Return the error for a manifest that is damaged as `what` says."""
    return DamagedCheckpoint(f"the manifest {folder / MANIFEST} is damaged: {what[:300]}", remedy)


def _checksum(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _content(folder: Location, whole: Any) -> _Content:
    """Check and return the content. Raises ValueError for another form, CheckpointError for a newer version."""
    if not isinstance(whole, dict) or not {"content", "crc32"} <= whole.keys():
        raise ValueError("it has no content and checksum")
    if _checksum(whole["content"]) != whole["crc32"]:
        raise ValueError("its checksum is that of another content")
    # Every version of the format has its number.
    version = msgspec.convert(whole["content"], dict[str, Any]).get("version")
    if not isinstance(version, int):
        raise ValueError(f"version: expected int, got {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{folder} has version {version} of the format, and this dflow reads up to {VERSION}",
            "install the dflow that wrote it, or a newer one",
        )
    return msgspec.convert(whole["content"], _Content)


def is_inside(path: str) -> bool:
    """Whether a relative path stays inside its folder."""
    return {"", ".", ".."}.isdisjoint(path.split("/")) and path.isprintable()


def _array_type(name: str, entry: _ArrayEntry) -> ArrayType:
    """Return the type of an array. Raises ValueError if it is no array type, or the path leads out of the folder."""
    if not is_inside(entry.path):
        raise ValueError(f"array {name!r} lies at {entry.path!r}, which is no path inside the folder")
    type = parse_type(entry.type)
    if not isinstance(type, ArrayType) or None in type.shape:
        raise ParseError(f"array {name!r} is of type {entry.type!r}, which is not that of an array")
    return type
