"""Where checkpoints are: the locations that paths and URLs name, and how what is there is opened."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import tensorstore

from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.files.array_manifest import is_inside
from dflow.lowering.files.foreign.hdf5_file import KERAS_WEIGHTS, read_hdf5
from dflow.lowering.files.foreign.tensor_bundle import prefix_of, read_bundle
from dflow.lowering.files.foreign.torch_file import read_torch
from dflow.lowering.files.object_path import DRIVERS, Location, ObjectPath
from dflow.lowering.files.orbax_checkpoint import is_orbax, read_orbax
from dflow.lowering.files.safetensors_file import SUFFIX, read_safetensors
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.tracing.errors import CheckpointError, NoCheckpoint

_SHORTENED = re.compile(rf"({'|'.join(('file', *DRIVERS))}):/(?!/)")


def location_of(text: str) -> Location:
    """Return the location of a path or URL; that of a URL `file:///path` is the local path.

    Raises CheckpointError for a URL of another scheme than `gs`, `s3`, `memory` and `file`, and for one without a
    bucket or path.
    """
    if found := _SHORTENED.match(text):
        raise CheckpointError(
            f"{text}: expected a URL with two slashes, got one, as pathlib writes it", f"give a str, '{found[1]}://...'"
        )
    scheme, mark, rest = text.partition("://")
    if not mark:
        return Path(text)
    if scheme == "file":
        return _local(text)
    if scheme not in DRIVERS:
        raise CheckpointError(
            f"{text}: expected a path of this machine, or a URL of file, {', '.join(sorted(DRIVERS))}, got {scheme!r}",
            "give one of these, such as the path of a mounted folder",
        )
    bucket, _, key = rest.rstrip("/").partition("/")
    parts = rest.rstrip("/") if scheme == "memory" else key
    if not (bucket and is_inside(parts) and "?" not in rest and "#" not in rest):
        form = "path" if scheme == "memory" else "bucket/path"
        raise CheckpointError(f"{text}: expected {scheme}://{form}, got another form", "correct the URL")
    location = ObjectPath(text.rstrip("/"))
    try:
        tensorstore.KvStore.Spec(location.kvstore())
    except ValueError as error:
        raise CheckpointError(f"{text}: expected the name of a bucket, got: {error}", "correct the URL") from error
    return location


def _local(text: str) -> Path:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise CheckpointError(f"{text}: expected file:///path, got another form", "correct the URL")
    return Path(unquote(parts.path))


def open_arrays(path: Location | str) -> SavedArrays:
    """Open the folder, or the file of arrays, of whatever library its content is; a str may be a URL.

    Raises as `location_of` and the functions that open each kind do.
    """
    location = location_of(path) if isinstance(path, str) else path
    if isinstance(location, ObjectPath):
        return read_arrays(location)
    if location.name.endswith(SUFFIX) and not location.is_dir():
        return read_safetensors(location)
    try:
        return read_arrays(location)
    except NoCheckpoint:
        if (found := _foreign(location)) is None:
            raise
    return found


def _foreign(location: Path) -> SavedArrays | None:
    """Open what another library wrote; None if there is nothing of a known kind."""
    file = Path(os.path.realpath(location.parent), location.name)  # a link to a file itself is refused
    if file.is_file() and (read := _reader_of(file)) is not None:
        return read(file)
    location = Path(os.path.realpath(location))
    if (prefix := prefix_of(location)) is not None:
        return read_bundle(prefix)
    return read_orbax(location) if is_orbax(location) else None


def _reader_of(file: Path) -> Callable[[Path], SavedArrays] | None:
    """Return what reads a file of this content; None if nothing does."""
    with open(file, "rb") as opened:
        first = opened.read(8)
    if first == b"\x89HDF\r\n\x1a\n":
        return read_hdf5
    if first.startswith(b"PK") and zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            return read_hdf5 if KERAS_WEIGHTS in archive.namelist() else read_torch
    return read_torch if first.startswith(b"\x80") else None
