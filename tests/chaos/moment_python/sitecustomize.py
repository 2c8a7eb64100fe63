"""Kill a process of a round of `make chaos` at a named moment; Python imports this module at its start.

The environment has the name of this process, the moment, and the process to kill. The process that reaches the moment
kills that process before it goes on, so that the moment is exact.
"""

import atexit
import contextlib
import gc
import os
import signal
import time
from pathlib import Path

# As `tests/quick_python`, which this file hides.
gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)

#: Longest wait for the end of a process that was killed, in s.
END_S = 10.0


def _begin(folder: Path, who: str, moment: str, count: int, victim: str) -> None:
    from dflow.tracing import moments

    (folder / who).write_text(str(os.getpid()))
    left = [count]
    seen: set[str] = set()

    def reached(name: str, task: str) -> None:
        if name not in seen:
            seen.add(name)
            (folder / f"reached {name}").touch()
        left[0] -= name == moment
        if name == moment and left[0] == 0:
            with contextlib.suppress(FileExistsError, FileNotFoundError, ProcessLookupError):
                pid = int((folder / victim).read_text())
                os.kill(pid, 0)
                (folder / "fired").open("x").close()
                (folder / "killed").write_text(str(pid))
                os.kill(pid, signal.SIGKILL)
                _await_end(pid)

    moments.hook = reached


def _await_end(pid: int) -> None:
    until_s = time.monotonic() + END_S
    while time.monotonic() < until_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return


if "CHAOS_MOMENT" in os.environ and "CHAOS_WHO" in os.environ:
    _begin(
        Path(os.environ["CHAOS_FOLDER"]),
        os.environ.pop("CHAOS_WHO"),  # not in processes that this one starts
        os.environ["CHAOS_MOMENT"],
        int(os.environ["CHAOS_COUNT"]),
        os.environ["CHAOS_VICTIM"],
    )
