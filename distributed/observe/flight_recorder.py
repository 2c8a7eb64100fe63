"""Dumps of a task's newest events to files when something is stuck, to find the cause afterwards.

Invariants:
- a file's name has the task's name and a number, and nothing that a peer sent;
- at most `MOST_DUMPS` dumps of a task are kept, and the oldest is overwritten; each has at most a recorder's events;
- a request within `PAUSE_S` of a dump gets that dump, since many tasks notice a stall at the same time;
- an error while writing is logged, and has no other effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from dflow.distributed.observe.spans import spans
from dflow.distributed.process.run_folder import RUN_FOLDER_VARIABLE, write_whole_file
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import ITEM_BEGAN, PART_BEGAN, Event
from dflow.tracing.devices.task_name import short_task_name

LOGGER = logging.getLogger("dflow")
MOST_DUMPS = 8
PAUSE_S = 5.0
#: At most this many steps in progress are listed, and this many items of each.
MOST_STEPS, MOST_ITEMS = 20, 20


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

        A second file, with suffix .jsonl, has the same events as JSON, one per line. Within `PAUSE_S` of the last dump
        this writes nothing, and returns the path of that dump.
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
        """Call `dump` on a new thread, and log the path; does nothing if none can start, as when the program exits."""
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self._dump_and_say, args=(why,), name="dflow dump", daemon=True).start()

    def _dump_and_say(self, why: str) -> None:
        path = self.dump(why)
        if path:
            LOGGER.warning("%s: its last events are in %s", self._task, path)

    def _write(self, why: str) -> Path:
        _make_private(self._folder)
        events, now_ns = self.recorder.events(), self.recorder.clock()
        text = self._next_path()
        when = datetime.now().isoformat(timespec="milliseconds")
        head = f"{self._task} at {when}, process {os.getpid()}\n{_plain(why)}\n\n"
        write_whole_file(text, (head + flight_text(events, now_ns)).encode("utf-8", "backslashreplace"))
        about = {"task": self._task, "when": when, "process": os.getpid(), "why": why, "now_ns": now_ns}
        lines = [msgspec.json.encode(line) for line in (about, *events)]
        write_whole_file(text.with_suffix(".jsonl"), b"\n".join(lines) + b"\n")
        return text

    def _next_path(self) -> Path:
        """Return the first path without a file, or that of the oldest file."""
        name = self._task.replace(":", "-")
        paths = [self._folder / f"{name}.events-{number}.txt" for number in range(1, MOST_DUMPS + 1)]
        free = (path for path in paths if not path.exists())
        return next(free, None) or min(paths, key=lambda path: path.stat().st_mtime_ns)


def _make_private(folder: Path) -> None:
    """Create the folder unless it exists; directly in the temporary folder, with mode 0700.

    There, raises PermissionError if it is another user's, or a link.
    """
    if folder.parent == Path(tempfile.gettempdir()):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
            raise PermissionError(f"{folder} is not a folder of user {os.geteuid()}; set {RUN_FOLDER_VARIABLE}")
        return
    folder.mkdir(parents=True, exist_ok=True)


def flight_text(events: Sequence[Event], now_ns: int) -> str:
    """List what is in progress, since when, and then the events, oldest first; times are in s before `now_ns`.

    Texts from other tasks are escaped, so that they cannot imitate lines of this text.
    """
    lines = ["under way:", *(_under_way(events, now_ns) or ["  nothing"]), "", "events:"]
    lines += [f"{(event.at_ns - now_ns) / 1e9:12.6f}  {_said(event)}" for event in events]
    return "\n".join(lines) + "\n"


def _under_way(events: Sequence[Event], now_ns: int) -> list[str]:
    found = [span.began for span in spans(events) if span.ended is None]
    parts = [began for began in found if began.what == PART_BEGAN]
    lines = []
    for part in parts[:MOST_STEPS]:
        items = [began for began in found if began.what == ITEM_BEGAN and _step(began) == _step(part)]
        lines.append(f"  {_step(part)}, for {_seconds(part.at_ns, now_ns)}")
        lines += [f"    {_item(item)}, for {_seconds(item.at_ns, now_ns)}" for item in items[:MOST_ITEMS]]
        lines += [f"    and {len(items) - MOST_ITEMS} more"] if len(items) > MOST_ITEMS else []
    return lines + ([f"  and {len(parts) - MOST_STEPS} more steps"] if len(parts) > MOST_STEPS else [])


def _said(event: Event) -> str:
    step = _step(event)
    match event.what:
        case "step began" | "step ended" | "part began" | "part ended":
            return f"{step}: {event.what.replace('step ', '').replace('part', 'its part here')}{_after(event.text)}"
        case "item began" | "item ended" | "item failed":
            return f"{step}: {event.what.removeprefix('item ')} {_item(event)}{_after(event.text)}"
        case "sent":
            took = f", {(event.at_ns - event.began_ns) / 1e6:.3f} ms" if event.began_ns else ""
            return f"{step}: sent {_plain(event.name)} to {_task(event.peer)}, {event.size_bytes} B{took}"
        case "received":
            return f"{step}: received {_plain(event.name)} from {_task(event.peer)}, {event.size_bytes} B"
        case "wait expired":
            return f"{step}: gave up waiting for {_plain(event.name)} from {_task(event.peer)}"
    who = f" {_task(event.peer)}" if event.peer else ""
    return f"{event.what}{who}{_after(event.text)}"


def _step(event: Event) -> str:
    return f"step {event.step % STEPS_OF_A_LIFE} of {_task(event.origin)}" if event.origin else ""


def _item(event: Event) -> str:
    what = {"Recv": f"wait for {_task(event.peer)}", "Send": f"send to {_task(event.peer)}"}.get(event.kind, event.kind)
    line = f" at {_plain(event.line)}" if event.line else ""
    return f"{what}: {_plain(event.name) or f'item {event.number}'}{line}"


def _task(name: str) -> str:
    return _plain(short_task_name(name))


def _after(text: str) -> str:
    return f": {_plain(text)}" if text else ""


def _plain(text: str) -> str:
    """Return the text, escaped if it is not printable, so that it stays on one line."""
    return text.encode("unicode_escape").decode() if not text.isprintable() else text


def _seconds(since_ns: int, now_ns: int) -> str:
    return f"{(now_ns - since_ns) / 1e9:.3f} s"
