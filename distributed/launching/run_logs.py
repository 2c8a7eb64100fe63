"""The output of a run: a file for each task, whose size is bounded.

Invariants:
- a line is in its file, whole, when `write` returns;
- a file that would outgrow `max_bytes` becomes `<name>.1`, in the place of the one before it, so a task takes at most
  twice that;
- a run started again in the same folder goes on where the files end.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import IO

MAX_BYTES = 64 << 20


class RunLogs:
    """The logs in `folder`, which is made when it is not there; raises OSError when it cannot be."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, IO[bytes]] = {}

    def path(self, task: str) -> Path:
        """The file of the task of that short name: `worker:0` writes `worker-0.log`."""
        return self.folder / f"{task.replace(':', '-')}.log"

    def write(self, task: str, line: str) -> None:
        """Add a line, given without its end; any thread may call this."""
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            file = self._file(task)
            if file.tell() and file.tell() + len(encoded) > self._max_bytes:
                file = self._begin_anew(task)
            file.write(encoded)

    def close(self) -> None:
        """Close the files; a later line opens its file again."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _file(self, task: str) -> IO[bytes]:
        if task not in self._files:
            self._files[task] = self.path(task).open("ab", buffering=0)
        return self._files[task]

    def _begin_anew(self, task: str) -> IO[bytes]:
        self._files.pop(task).close()
        path = self.path(task)
        path.replace(path.with_name(path.name + ".1"))
        return self._file(task)
