"""Read a file that may come from anywhere: no pipe, device or link, and no more bytes than expected.

A link inside a checkpoint or an export is not followed, since it may lead to any other file of this machine. One kind
is: Hugging Face's cache has `snapshots/<revision>/...` of links to files in `blobs` beside it, which its own library
made.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

from dflow.lowering.files.object_path import Location, ObjectPath

#: Remedies of errors that do not concern a file's content but the process, its rights or the file system.
_REMEDIES = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n), or close files"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this process the right to read it"),
    **dict.fromkeys((errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT), "try again"),
    errno.ENOMEM: "free memory, and try again",
}
#: In an error of TensorStore.
_OS_ERROR = re.compile(r"OS error (\d+)")


def reading_remedy(error: BaseException) -> str | None:
    """Return how this process can come to read a file that it could not open; None if the file itself is at fault."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (found := _OS_ERROR.search(str(error))):
        number = int(found[1])
    return None if number is None else _REMEDIES.get(number)


#: What to do about a link that is meant.
_REMEDY = "if you trust it, copy it by cp -rL, which replaces links by the files that they lead to"


class LinkError(OSError):
    """Error for a link where a file or folder is expected."""

    def __init__(self, path: Path) -> None:
        target = os.path.realpath(path)
        super().__init__(errno.ELOOP, f"{path}: expected a file or folder itself, got a link to {target}")

    def __str__(self) -> str:
        return str(self.strerror)


def remedy_of(error: BaseException, usual: str) -> str:
    """Return the remedy for an error on reading a file: that for a link, or the usual one."""
    return _REMEDY if isinstance(error, LinkError) else usual


def refuse_links(folder: Path, path: str) -> None:
    """Raise LinkError if a part of a relative path, from `folder` on, is a link."""
    location = folder
    for part in path.split("/"):
        location = location / part
        _refuse_link(location)


def refuse_links_within(folder: Path) -> None:
    """Raise LinkError if anything in a folder, at any depth, is a link."""
    for inner, folders, files in os.walk(folder):
        for name in (*folders, *files):
            _refuse_link(Path(inner, name))


def regular_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises OSError if it is missing, a link, a pipe or a device."""
    _refuse_link(path)
    return _regular(path, os.stat(path))


def read_regular(path: Location, most_bytes: int) -> bytes:
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


def _refuse_link(path: Path) -> None:
    if path.is_symlink() and not _is_cached(path):
        raise LinkError(path)


def _is_cached(path: Path) -> bool:
    """Whether a link is one of Hugging Face's cache: `X/snapshots/...` that leads to a file `X/blobs/...`."""
    blobs, _ = os.path.split(os.path.realpath(path))
    model, name = os.path.split(blobs)
    location = os.path.join(os.path.realpath(path.parent), "")
    return name == "blobs" and os.path.isfile(path) and location.startswith(os.path.join(model, "snapshots", ""))
