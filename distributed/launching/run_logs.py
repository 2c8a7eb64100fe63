"""The output of a run: a file for each task, whose size is bounded.

Invariants:
- when `write` returns, the complete line is in its file, or it was left out and counted: a file that cannot be written,
  as on a full disk, raises nothing and loses no line of another task;
- a file that would outgrow `max_bytes` is renamed to `<name>.1`, replacing the one before, so a task takes at most
  twice that size;
- a run that is started again in the same folder appends to the files.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO

MAX_BYTES = 64 << 20


class RunLogs:
    """The logs in `folder`, which is created if it is missing; raises OSError if that fails."""

    def __init__(self, folder: Path, max_bytes: int = MAX_BYTES) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._files: dict[str, IO[bytes]] = {}
        #: Number of lines left out since a file was last written, by task.
        self._left_out: dict[str, int] = {}

    def path(self, task: str) -> Path:
        """Return the file of the task with this short name: `worker:0` writes `worker-0.log`."""
        return self.folder / f"{task.replace(':', '-')}.log"

    def write(self, task: str, line: str) -> str:
        """Add a line, given without its end; any thread may call this.

        Return a message for the user when the file stops being written, and when it is written again; else "".
        """
        with self._lock:
            left_out = self._left_out.get(task, 0)
            try:
                gap = f"... {left_out} lines are missing here: the file could not be written\n" if left_out else ""
                self._append(task, gap + line)
                self._left_out.pop(task, None)
            except OSError as error:
                self._left_out[task] = left_out + 1
                text = f"{self.path(task)} cannot be written: {error.strerror}; its lines are only shown here"
                return "" if left_out else text
        return f"{self.path(task)} is written again; {left_out} lines are missing in it" if left_out else ""

    def close(self) -> None:
        """Close the files; a later line opens its file again."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    def _append(self, task: str, line: str) -> None:
        encoded = line.encode("utf-8", "backslashreplace") + b"\n"
        file = self._file(task)
        size = file.seek(0, os.SEEK_END)
        if size and size + len(encoded) > self._max_bytes:
            file, size = self._begin_file(task), 0
        written = file.write(encoded)
        try:
            while written < len(encoded):
                written += file.write(encoded[written:])
        except OSError:
            file.truncate(size)
            raise

    def _file(self, task: str) -> IO[bytes]:
        if task not in self._files:
            self._files[task] = self.path(task).open("ab", buffering=0)
        return self._files[task]

    def _begin_file(self, task: str) -> IO[bytes]:
        self._files.pop(task).close()
        path = self.path(task)
        path.replace(path.with_name(path.name + ".1"))
        return self._file(task)
