"""Reading files that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dflow.tracing.errors import SecurityError

#: More than any key or secret takes.
MAX_BYTES = 1 << 16


def read_private(path: Path) -> bytes:
    """The contents of a file that belongs to this user, or to root, and that no one else may read or write.

    What is checked is what is read: the file is opened once.

    raises  SecurityError when others may read it, or it is theirs; OSError when it cannot be read
    """
    # A pipe of that name is not waited for.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode):
            raise SecurityError(f"{path} is not a plain file")
        if found.st_uid not in (0, os.geteuid()):
            raise SecurityError(f"{path} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}")
        if mode & 0o077:
            raise SecurityError(f"{path} may be used by others (its mode is {mode:04o})\n  chmod 600 {path}")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise SecurityError(f"{path} has more than {MAX_BYTES} bytes, so it is no key and no secret")
    return data
