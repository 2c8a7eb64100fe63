"""Where checkpoints are: the locations that paths and URLs name, and how what is there is opened."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import tensorstore

from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.files.array_manifest import is_inside
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
    """Open the folder, or the file whose name ends in `.safetensors`; a str may be a URL.

    Raises as `location_of`, `read_arrays` and `read_orbax` do.
    """
    location = location_of(path) if isinstance(path, str) else path
    if isinstance(location, ObjectPath):
        return read_arrays(location)
    if location.name.endswith(SUFFIX) and not location.is_dir():
        return read_safetensors(location)
    try:
        return read_arrays(location)
    except NoCheckpoint:
        location = Path(os.path.realpath(location))
        if not is_orbax(location):
            raise
    return read_orbax(location)
