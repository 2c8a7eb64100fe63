"""Reading of files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dflow.tracing.errors import SecurityError

#: Larger files are refused; keys and secrets are smaller.
MAX_BYTES = 1 << 16


def read_private(path: Path) -> bytes:
    """Return the contents of a file of this user or root that no other user may access.

    The file is opened once, so the checks hold for the file that is read.

    raises  SecurityError when other users may access it, another user owns it, it is no regular file or is too large;
            OSError when it cannot be read
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise SecurityError(f"{path} is not a plain file")
        if found.st_uid not in (0, os.geteuid()):
            raise SecurityError(f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if mode & 0o077:
            raise SecurityError(f"{path} may be used by others (its mode is {mode:04o})", f"chmod 600 {path}")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise SecurityError(f"{path} has more than {MAX_BYTES} bytes, so it is no key and no secret")
    return data
