"""A child process with its own session: its output line by line, its end, and the end of all that it started.

Invariants:
- stdout and stderr of the child and its descendants are one stream, passed on line by line in order;
- when the child has ended, the rest of its process group is killed before the child is reaped, while the number of the
  group cannot yet be reused;
- the `poll` that returns a child's exit status has reaped it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

LOGGER = logging.getLogger("dflow")

TAIL_LINES = 20
#: Longest wait for the last lines, in s: a descendant with its own session may hold the output open.
LAST_LINES_S = 2.0


class Running(ABC):
    """A started program; `on_line` is called with each line of its output, without its newline, from any thread."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last `TAIL_LINES` lines of output."""
        return tuple(self._tail)

    def _show(self, line: str) -> None:
        self._tail.append(line)
        self._on_line(line)

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit status, negative for the signal that killed the program; None while it runs."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask the program and the processes that it started to end, without a wait; not if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End the program and the processes that it started, and wait until it is gone."""


class ChildProcess(Running):
    """Start `command` as `name` with `environment`.

    `lifeline`  read end of the launcher's pipe, which the child inherits under the same number
    `on_line`   see `Running`
    `stdin`     descriptor of its input; by default it has none
    `ends_by`   signal that `terminate` sends
    `cores`     CPU cores that the child and its descendants are restricted to; empty: no restriction
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        lifeline: int,
        on_line: Callable[[str], None],
        *,
        stdin: int = subprocess.DEVNULL,
        ends_by: signal.Signals = signal.SIGTERM,
        cores: Collection[int] = (),
    ) -> None:
        super().__init__(on_line)
        self.name, self._ends_by = name, ends_by
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        #: The process id, which is also that of its group and session.
        self.pid = self._process.pid
        if cores:
            # The interpreter has only its first thread yet, and later threads inherit its cores.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self.pid, cores)
        self._reader = threading.Thread(target=self._read, name=f"dflow output {name}", daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        if self._process.returncode is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.kill()
        return self._process.returncode

    def terminate(self) -> None:
        """Send `ends_by` to the child and its process group; does nothing when it has ended."""
        if self._process.returncode is None:
            self._signal_group(self._ends_by)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the child alone; does nothing when it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the child and its process group, wait until it has ended, and reap it."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._reader.join(LAST_LINES_S)

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    self._show(line.rstrip("\n"))
                except Exception:  # such as a full disk; if it were not read, the child's output would soon block it
                    LOGGER.exception("a line of %s was not handed on", self.name)


def describe_end(status: int) -> str:
    """Describe an exit status: "finished", "exit status 1", "killed by SIGKILL"."""
    if status == 0:
        return "finished"
    if status > 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
