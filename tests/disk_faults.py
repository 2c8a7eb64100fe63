"""A disk that refuses chosen file operations of this process.

Python reports each file operation before it happens (`sys.addaudithook`), here with the number of the operation.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.link"}


class DiskFaults:
    """Fails operation number `first` of those in `folder`, and the next `count - 1`."""

    def __init__(self) -> None:
        self.folder, self.seen, self.first, self.count = "", 0, 0, 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder and event in OPERATIONS and str(args[0]).startswith(self.folder):
            self.seen += 1
            if self.first <= self.seen < self.first + self.count:
                raise OSError(errno.EIO, "the disk refuses it", str(args[0]))

    @contextmanager
    def within(self, folder: Path, first: int, count: int) -> Iterator[None]:
        """Fail these operations within `folder` until the block ends."""
        self.folder, self.seen, self.first, self.count = str(folder), 0, first, count
        try:
            yield
        finally:
            self.folder = ""


#: Audit hooks stay until the process ends, so there is one.
FAULTS = DiskFaults()
