"""Read a file that may come from anywhere: not from a pipe or a device, and no more bytes than expected."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from dflow.lowering.files.object_path import ObjectPath, Place


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError if it is missing, a pipe, a device or a socket."""
    return _regular(path, os.stat(path))


def read_regular(path: Place, most_bytes: int) -> bytes:
    """Return the content of a regular file or object.

    Raises OSError for any other file, and for one of more than `most_bytes`; CheckpointError if a store does not
    answer.
    """
    if isinstance(path, ObjectPath):
        return path.read_bytes(most_bytes)
    regular_size(path)
    # O_NONBLOCK: should it have been replaced by a pipe since, opening it does not wait.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if _regular(path, os.fstat(file.fileno())) > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(path))
        return file.read()


def _regular(path: Path, about: os.stat_result) -> int:
    if not stat.S_ISREG(about.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return about.st_size
