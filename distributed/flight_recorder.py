"""Writes a task's last events to files when something is stuck, so that it can be understood afterwards.

Invariants:
- a file is named by the task's own name and a number, never by what another says;
- at most `MOST_DUMPS` are kept for a task, the oldest giving way, and each holds no more than a recorder keeps;
- one that is asked for within `PAUSE_S` of another is that one, for a stall is seen in many places at once;
- what cannot be written is logged, and hinders nothing else.
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

from dflow.distributed.flight_text import flight_text
from dflow.distributed.run_folder import RUN_FOLDER_VARIABLE
from dflow.distributed.whole_file import write_whole_file
from dflow.lowering.recorder import Recorder
from dflow.tracing.task_name import short_task_name

LOGGER = logging.getLogger("dflow")
MOST_DUMPS = 8
PAUSE_S = 5.0


class FlightRecorder:
    """Dumps what `recorder` has kept of the task `task` into `folder`.

    `clock`  seconds since any moment, by which pauses are measured
    """

    def __init__(
        self, task: str, recorder: Recorder, folder: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._task = short_task_name(task)
        self._recorder = recorder
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._dumped_at_s: float | None = None
        self._newest = ""

    def dump(self, why: str) -> str:
        """Write the events down; the path of the text, or nothing when it cannot be written.

        Beside the text, whose name ends in .txt, the same is written as lines of JSON, one for each event.
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
        """Write the events down on a thread of its own, and log where."""
        threading.Thread(target=self._dump_and_say, args=(why,), name="dflow dump", daemon=True).start()

    def _dump_and_say(self, why: str) -> None:
        path = self.dump(why)
        if path:
            LOGGER.warning("%s: its last events are in %s", self._task, path)

    def _write(self, why: str) -> Path:
        _make_private(self._folder)
        events, now_ns = self._recorder.events(), self._recorder.clock()
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
        """The first number without a file; that of the oldest when there is none."""
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
    """Make the folder, for this user alone; refuse one in the common temporary folder that is another's."""
    if folder.parent == Path(tempfile.gettempdir()):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            raise PermissionError(f"{folder} is not a folder of user {os.geteuid()}; set {RUN_FOLDER_VARIABLE}")
        return
    folder.mkdir(parents=True, exist_ok=True)
