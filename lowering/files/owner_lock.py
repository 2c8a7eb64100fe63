"""A lock file that shows whether the process that made it still runs.

The owner holds the system's lock on the open file (`flock`). It ends with the process, however that ends, and every
container on the machine sees it. A file system shared by several machines may keep locks for each machine alone, and
some have none. So whatever is done because a lock is free must do no harm if the owner runs after all.

Not `filelock`, which locks a file whether it made it or found it: here a file that is there belongs to another process,
and only its owner's end lets it be taken over.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path


class OwnerLock:
    """A lock file that this process has locked, until `release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @staticmethod
    def make(path: Path) -> OwnerLock | None:
        """Make and lock the file `path`; None, and no file, where the file system has no locks.

        Raises FileExistsError when `path` exists, or another process locked it first; OSError when the disk refuses the
        file.
        """
        descriptor = _opened(path, os.O_CREAT | os.O_EXCL)
        try:
            if _is_locked(path, descriptor):
                return OwnerLock(path, descriptor)
        except OSError:
            OwnerLock(path, descriptor).release(remove=True)
            return None
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

    @staticmethod
    def take_over(path: Path) -> OwnerLock | None:
        """Lock the file `path` whose owner has ended; None where the owner runs, or the system cannot tell."""
        with suppress(OSError):
            descriptor = _opened(path, 0)
            with suppress(OSError):
                if _is_locked(path, descriptor):
                    return OwnerLock(path, descriptor)
            os.close(descriptor)
        return None

    def release(self, *, remove: bool) -> None:
        """Release the lock, and remove its file; a file that stays tells other processes that its owner has ended."""
        if remove:
            with suppress(OSError):
                os.unlink(self._path)
        os.close(self._descriptor)


def _opened(path: Path, flags: int) -> int:
    # For writing, as network file systems require for locks; without waiting for a pipe or following a link.
    return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | flags, 0o666)


def _is_locked(path: Path, descriptor: int) -> bool:
    """Lock the open file; False if another process has locked it, or if `path` is another file by now.

    Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False
