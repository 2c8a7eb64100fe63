"""Where a checkpoint is: a local folder or file, or a location in an object store, as the text of its path says."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import tensorstore

from dflow.lowering.files.array_manifest import is_inside
from dflow.lowering.files.object_path import DRIVERS, Location, ObjectPath
from dflow.tracing.errors import CheckpointError

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
