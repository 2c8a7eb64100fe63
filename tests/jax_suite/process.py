"""Run one test file in one way to its end; a test that kills its process or hangs is a result, and the others follow.

A process records its tests (`child.py`). If it ends during a test, that test crashed. If a test exceeds its time, its
process prints its stacks on a signal and is ended. In both cases a new process runs the remaining tests.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("child.py")
#: Time for a process to print its stacks before it is ended.
GRACE = 20.0


@dataclass(frozen=True)
class Outcome:
    """The end of a test (passed, failed, skipped, xfailed, xpassed, crashed, hung), and its message."""

    outcome: str
    error: str = ""
    #: Number of traces of functions of dflow in the test.
    traces: int = 0


@dataclass
class FileRun:
    """A test file run one way: its tests in their order, and the reason if it did not run completely."""

    tests: dict[str, Outcome] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: of one test; of the file, one way; of the start of a process, with the file's import."""

    test: float = 300.0
    file: float = 3600.0
    start: float = 300.0


class Stopped(BaseException):
    """The whole run ends: another thread was interrupted."""


def run_file(
    file: str,
    way: str,
    root: Path,
    limits: Limits,
    arguments: Sequence[str] = (),
    python: str = sys.executable,
    stop: threading.Event | None = None,
) -> FileRun:
    """Run `file` (a path below `root`) in separate processes with `jax.jit` (way "jax") or `dflow.jit` ("dflow").

    arguments  further arguments for pytest
    stop       ends the process that runs, once it is set; Stopped is raised then
    returns    every test that ended or was ended; `trouble` is set when the file cannot be imported, when a process
               died outside of a test, and when the file's time was up
    """
    run, until = FileRun(), time.monotonic() + limits.file
    with tempfile.TemporaryDirectory() as folder:
        while True:
            records, done = Path(folder, "records"), Path(folder, "done")
            records.write_text("")
            done.write_text("\n".join(run.tests))
            command = [python, str(CHILD), way, str(root), str(records), str(done)]
            command += [str(root / file), "-p", "no:cacheprovider", "-p", "no:timeout", "-q", *arguments]
            printed = Path(folder, "printed")
            with printed.open("w") as output:
                process = subprocess.Popen(
                    command, cwd=root, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
                try:
                    late = _watch(process, records, limits, until, stop or threading.Event())
                except BaseException:  # an interrupt from the keyboard leaves no process behind
                    os.killpg(process.pid, signal.SIGKILL)
                    raise
            unfinished = _read(records, run)
            status = _said(process.returncode)
            if late == "file":
                run.trouble = f"the {limits.file:g} s of the file were up" + (f" in {unfinished}" if unfinished else "")
                return run
            if unfinished is None:
                if not run.trouble and (late or process.returncode not in (0, 1, 5)):
                    run.trouble = f"import took longer than {limits.start:g} s" if late else f"the process {status}"
                    run.trouble += f": {_last(printed)}"
                return run
            if late:
                run.tests[unfinished] = Outcome("hung", f"took longer than {limits.test:g} s: {_where(printed)}")
            else:
                run.tests[unfinished] = Outcome("crashed", f"the process {status}: {_where(printed)}")


def _watch(process: subprocess.Popen[bytes], records: Path, limits: Limits, until: float, stop: threading.Event) -> str:
    """Wait for the end of a process, or end it; return the limit that it exceeded."""
    size, since = -1, time.monotonic()
    while True:
        try:
            process.wait(timeout=0.2)
            return ""
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if stop.is_set():
            raise Stopped
        if (written := records.stat().st_size) != size:
            size, since = written, now
        late = "file" if now > until else "test" if now - since > (limits.test if size else limits.start) else ""
        if late:
            _end(process)
            return late


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, after it has printed its stacks: pytest enables the fault handler."""
    process.send_signal(signal.SIGABRT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(records: Path, run: FileRun) -> str | None:
    """Add the records of a process; return the test that it had begun and not ended."""
    begun = None
    for line in records.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        if "file" in record:
            run.trouble = record["file"]
        elif "begun" in record:
            begun = record["begun"]
        else:
            run.tests[record["ended"]] = Outcome(record["outcome"], record["error"], record["traces"])
            begun = None
    return begun


def _said(status: int) -> str:
    return f"died by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def _last(printed: Path) -> str:
    lines = [line for line in printed.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it printed nothing"


def _where(printed: Path) -> str:
    """Return the innermost line of the main thread's stack, as printed by the fault handler, else the last line."""
    lines = printed.read_text(errors="replace").splitlines()
    stacks = [index for index, line in enumerate(lines) if "(most recent call first)" in line]
    current = [index for index in stacks if lines[index].startswith("Current thread")]
    if not stacks or (current or stacks)[-1] + 1 >= len(lines):
        return _last(printed)
    return lines[(current or stacks)[-1] + 1].strip()[:300]
