"""Waits for processes in tests, until one ends or none of a set is left; a deadline fails the test.

A pid file descriptor becomes readable when its process has ended, so no test sleeps or polls.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

DEADLINE_S = 60.0

#: Start of a script that joins the cluster of its launch by the coordinator alone, as `client`.
CONNECT = """
import os, signal, subprocess, sys, threading
from pathlib import Path
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.process.parent_watch import watch
from dflow.distributed.transport.security.configuration import choose_security
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.training.work_messages import ClaimSteps
from dflow.distributed.wire.messages.status import Report
watch()
index = int(os.environ["DFLOW_INDEX"])
task = f"/job:{os.environ['DFLOW_JOB']}/task:{index}"
transport = SocketTransport(security=choose_security(os.environ))
client = CoordinatorClient(transport, os.environ["DFLOW_COORDINATOR"], name=task)
client.join(task, f"nowhere:{index}")
"""


class Spawned:
    """A process of a test whose output is read line by line; killed at the end of the `with` block.

    When the block raises, the rest of the output is printed: a script that failed immediately is then not
    taken for a slow one.
    """

    def __init__(self, *words: str, cwd: Path, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DFLOW_")}
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env={**inherited, **environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def __enter__(self) -> Spawned:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        if error is not None:
            print(f"output of {self.process.args}:", *self.lines, *self.process.stdout, sep="\n")
        self.process.stdout.close()

    def read_until(self, text: str, times: int = 1) -> list[str]:
        """Read lines until `times` of them contain `text`; return those lines."""
        assert self.process.stdout is not None
        found = [line for line in self.lines if text in line]
        while len(found) < times:
            line = self.process.stdout.readline()
            assert line, f"the output ended before {text!r} came {times} times:\n" + "".join(self.lines)
            self.lines.append(line)
            found = [line for line in self.lines if text in line]
        return found

    def finish(self) -> tuple[int, str]:
        """Read all output and wait for the end; return the exit status and the output."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.readlines()
        return self.process.wait(DEADLINE_S), "".join(self.lines)


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until none of the processes runs; a process may have ended before, or never have existed."""
    deadline = time.monotonic() + DEADLINE_S
    for pid in pids:
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        with os.fdopen(watched):
            ready, _, _ = select.select([watched], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"process {pid} still runs after {DEADLINE_S:g} s"


def children(parent: int) -> dict[int, list[str]]:
    """Return the command lines of the processes that `parent` has started, by process id."""
    return {pid: words for pid, (words, other, _) in processes().items() if other == parent}


def processes() -> dict[int, tuple[list[str], int, str]]:
    """Return the command line, the parent and the working folder of each process of this user."""
    found = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found[pid] = words, parent, os.readlink(f"/proc/{pid}/cwd")
        except OSError:  # it has ended
            continue
    return found


def exists(pid: int) -> bool:
    """Whether the process exists; a zombie does."""
    return Path(f"/proc/{pid}").exists()
