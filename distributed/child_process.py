"""A child process with its own session: its output line by line, its end, and the end of all it started.

Invariants:
- stdout and stderr of the child and its descendants are one stream, handed on line by line in order;
- when the child has ended, what is left of its process group is killed before the child is reaped, so that the
  number of the group cannot yet belong to anyone else;
- a child that has ended is reaped by the `poll` that says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

LOGGER = logging.getLogger("dflow")

TAIL_LINES = 20
#: A descendant that made a session of its own may hold the output open; its lines are not waited for longer.
LAST_LINES_S = 2.0


class ChildProcess:
    """Start `command` as `name` with `environment`.

    `lifeline`  the read end of the launcher's pipe, which the child inherits under the same number
    `on_line`   called with each line of output, without its end, from a thread of its own
    `cores`     the cores that it and all that it starts are kept on; none given, those of this process
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        lifeline: int,
        on_line: Callable[[str], None],
        *,
        cores: Collection[int] = (),
    ) -> None:
        self.name = name
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        if cores:
            # Its interpreter has no thread but the first yet, whose cores later ones take over.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, cores)
        self._reader = threading.Thread(target=self._read, name=f"dflow output {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process, which leads a group and a session of the same number."""
        return self._process.pid

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines of output."""
        return tuple(self._tail)

    def poll(self) -> int | None:
        """None while it runs, else its exit status, negative for the signal that killed it."""
        if self._process.returncode is None and self._has_ended():
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._reader.join(LAST_LINES_S)
        return self._process.returncode

    def terminate(self) -> None:
        """Ask it and all that it started to end; without effect when it has ended."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all that it started, and wait until it is gone."""
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
            self._reader.join(LAST_LINES_S)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._tail.append(line.rstrip("\n"))
                try:
                    self._on_line(line.rstrip("\n"))
                except Exception:  # such as a full disk; unread, the child's output would soon make it wait
                    LOGGER.exception("a line of %s was not handed on", self.name)


def describe_end(status: int) -> str:
    """An exit status as a person would say it: "finished", "exit status 1", "killed by SIGKILL"."""
    if status == 0:
        return "finished"
    if status > 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
