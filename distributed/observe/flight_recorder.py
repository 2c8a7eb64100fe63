"""Dumps of a task's newest events to files when something is stuck, to find the cause afterwards.

Invariants:
- a file's name has the task's name and a number, and nothing that a peer sent;
- at most `MOST_DUMPS` dumps of a task are kept, and the oldest is overwritten; each has at most a recorder's events;
- a request within `PAUSE_S` of a dump gets that dump, since many tasks notice a stall at the same time;
- an error while writing is logged, and has no other effect.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from dflow.distributed.observe.flight_text import flight_text
from dflow.distributed.process.atomic_file import write_whole_file
from dflow.distributed.process.run_folder import RUN_FOLDER_VARIABLE
from dflow.lowering.steps.recorder import Recorder
from dflow.tracing.devices.task_name import short_task_name

LOGGER = logging.getLogger("dflow")
MOST_DUMPS = 8
PAUSE_S = 5.0


class FlightRecorder:
    """Dumps the events in `recorder`, of the task `task`, into `folder`.

    `clock`  seconds since an arbitrary moment, to measure pauses
    """

    def __init__(
        self, task: str, recorder: Recorder, folder: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._task = short_task_name(task)
        self.recorder = recorder
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._dumped_at_s: float | None = None
        self._newest = ""

    def dump(self, why: str) -> str:
        """Write the newest events; return the path of the text file, or "" when it cannot be written.

        A second file, with suffix .jsonl, has the same events as JSON, one per line.
        """
        with self._lock:
            now_s = self._clock()
            if self._dumped_at_s is not None and now_s - self._dumped_at_s < PAUSE_S:
                return self._newest
            self._dumped_at_s = now_s
            try:
                self._newest = str(self._write(why))
            except OSError as error:
                LOGGER.warning("%s: its last events could not be written: %s", self._task, error)
                self._newest = ""
            return self._newest

    def dump_soon(self, why: str) -> None:
        """Write the newest events on a new thread, and log the path."""
        threading.Thread(target=self._dump_and_say, args=(why,), name="dflow dump", daemon=True).start()

    def _dump_and_say(self, why: str) -> None:
        path = self.dump(why)
        if path:
            LOGGER.warning("%s: its last events are in %s", self._task, path)

    def _write(self, why: str) -> Path:
        _make_private(self._folder)
        events, now_ns = self.recorder.events(), self.recorder.clock()
        text = self._path(self._next_number())
        when = datetime.now().isoformat(timespec="milliseconds")
        reason = why if why.isprintable() else why.encode("unicode_escape").decode()
        head = f"{self._task} at {when}, process {os.getpid()}\n{reason}\n\n"
        write_whole_file(text, (head + flight_text(events, now_ns)).encode("utf-8", "backslashreplace"))
        about = {"task": self._task, "when": when, "process": os.getpid(), "why": why, "now_ns": now_ns}
        lines = [msgspec.json.encode(line) for line in (about, *events)]
        write_whole_file(text.with_suffix(".jsonl"), b"\n".join(lines) + b"\n")
        return text

    def _next_number(self) -> int:
        """Return the first number without a file, or that of the oldest file."""
        written: list[tuple[float, int]] = []
        for number in range(1, MOST_DUMPS + 1):
            try:
                written.append((self._path(number).stat().st_mtime_ns, number))
            except FileNotFoundError:
                return number
        return min(written)[1]

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._task.replace(':', '-')}.events-{number}.txt"


def _make_private(folder: Path) -> None:
    """Create the folder, private to this user; raise PermissionError for another user's in the temporary folder."""
    if folder.parent == Path(tempfile.gettempdir()):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            raise PermissionError(f"{folder} is not a folder of user {os.geteuid()}; set {RUN_FOLDER_VARIABLE}")
        return
    folder.mkdir(parents=True, exist_ok=True)
