"""This machine as a place of a launch, where processes and their connections to the coordinator have faults.

A fault reaches the newest process of its task, or the next one while none runs. Invariant: a signal reaches that
process or none, as it goes through a pid file descriptor.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.task_programs import TaskProgram, ThisMachine
from dflow.distributed.process.child_process import ChildProcess
from dflow.tracing.devices.task_name import short_task_name
from tests.chaos.connections import break_connections
from tests.chaos.schedule import Fault
from tests.distributed.proxy import Proxy

#: Time between two looks for a process to be started again, in s.
POLL_S = 0.05
#: Time between two breaks of all connections of a process, in s.
BREAK_S = 0.25
NEVER = 1 << 62
#: Folder of the module that Python imports at the start of a process that kills another at a moment.
_MOMENT_PYTHON = Path(__file__).parent / "moment_python"


@dataclass
class Life:
    """A process of a task, and the kinds of its faults."""

    task: str
    child: ChildProcess
    pidfd: int
    faults: list[str]

    def signal(self, number: int) -> bool:
        """Send the process a signal, or none for 0; return whether it had not ended."""
        try:
            signal.pidfd_send_signal(self.pidfd, number)
        except ProcessLookupError:
            return False
        return True


class FaultyPlace(ThisMachine):
    """See the module.

    before_restart  called before the coordinator is started again, while none runs
    at_moment       the fault at a named moment, which the processes carry out themselves; None for none
    """

    def __init__(self, before_restart: Callable[[], None], at_moment: Fault | None = None) -> None:
        super().__init__()
        #: Whether a process was killed at the moment; known when this is closed.
        self.has_killed = False
        #: The moments that processes have reached, with a fault at one; known when this is closed.
        self.reached: set[str] = set()
        self._at_moment = at_moment
        self._folder = Path(tempfile.mkdtemp(prefix="dflow-chaos-moment-"))
        self.lives: list[Life] = []
        #: Set to end all faults that last.
        self.is_over = threading.Event()
        self._before_restart = before_restart
        self._proxies: dict[str, Proxy] = {}
        #: Number of faults by kind and process that are under way.
        self._under_way: defaultdict[tuple[str, int], int] = defaultdict(int)
        self._lock = threading.Lock()

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> ChildProcess:
        """Start a child process whose connection to the coordinator goes through a proxy."""
        task, environment = short_task_name(program.task), program.environment
        if program.task == COORDINATOR:
            if self._newest(task) is not None:
                self._before_restart()
        else:
            address = environment["DFLOW_COORDINATOR"]
            if task not in self._proxies:
                self._proxies[task] = Proxy(address, random.Random(0), most_bytes=NEVER)
            environment = {**environment, "DFLOW_COORDINATOR": self._proxies[task].address}
        environment = {**environment, **self._moment_of(task)}
        child = super().start(replace(program, environment=environment), on_line)
        self.lives.append(Life(task, child, os.pidfd_open(child.pid), []))
        return child

    def _moment_of(self, task: str) -> dict[str, str]:
        """Return the environment of a process that takes part in the fault at a moment."""
        if (fault := self._at_moment) is None:
            return {}
        path = os.pathsep.join([str(_MOMENT_PYTHON), *filter(None, [os.environ.get("PYTHONPATH")])])
        which = {"CHAOS_MOMENT": fault.moment, "CHAOS_COUNT": str(fault.count), "CHAOS_VICTIM": fault.task}
        return {"PYTHONPATH": path, "CHAOS_FOLDER": str(self._folder), "CHAOS_WHO": task, **which}

    def _note_moments(self) -> None:
        self.reached = {file.name.removeprefix("reached ") for file in self._folder.glob("reached *")}
        with suppress(FileNotFoundError):
            pid = int((self._folder / "killed").read_text())
            next(life for life in self.lives if life.child.pid == pid).faults.append("kill")
            self.has_killed = True

    def inject(self, fault: Fault) -> bool:
        """Carry out a fault to its end; return whether it began before `is_over`."""
        while (life := self._newest(fault.task)) is None or not life.signal(0):
            if self.is_over.wait(POLL_S):
                return False
        life.faults.append(fault.kind)
        match fault.kind:
            case "kill":
                life.signal(signal.SIGKILL)
            case "terminate":
                life.signal(signal.SIGTERM)
            case "pause":
                self._last(fault, life, lambda: life.signal(signal.SIGSTOP), lambda: life.signal(signal.SIGCONT))
            case "full":
                self._last(fault, life, lambda: _limit_files(life, 0), lambda: _limit_files(life, None))
            case "break":
                ends_s = time.monotonic() + fault.for_s
                while life.signal(0):
                    break_connections(life.child.pid, life.pidfd)
                    if time.monotonic() > ends_s or self.is_over.wait(BREAK_S):
                        break
            case "cut" | "hold":
                every = fault.task == COORDINATOR
                for proxy in [each for task, each in self._proxies.items() if every or task == fault.task]:
                    _begin(proxy, fault.kind)
                self.is_over.wait(fault.for_s)
                for proxy in [each for task, each in self._proxies.items() if every or task == fault.task]:
                    _end(proxy, fault.kind)
        return True

    def _last(self, fault: Fault, life: Life, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Begin a fault, and end it after its time unless another of the same kind is under way."""
        key = fault.kind, life.pidfd
        with self._lock:
            self._under_way[key] += 1
            begin()
        self.is_over.wait(fault.for_s)
        with self._lock:
            self._under_way[key] -= 1
            if not self._under_way[key]:
                end()

    def _newest(self, task: str) -> Life | None:
        return next((life for life in reversed(self.lives) if life.task == task), None)

    def print_stacks(self, limit_s: float) -> None:
        """End all processes by SIGABRT, at which Python prints the stacks of its threads."""
        self.is_over.set()
        deadline = time.monotonic() + limit_s
        running = [life for life in self.lives if life.signal(signal.SIGCONT) and life.signal(signal.SIGABRT)]
        while any(life.signal(signal.SIGCONT) for life in running) and time.monotonic() < deadline:
            threading.Event().wait(POLL_S)

    def close(self) -> None:
        """Close the proxies too."""
        self.is_over.set()
        for proxy in self._proxies.values():
            proxy.close()
        for life in self.lives:
            os.close(life.pidfd)
        self._note_moments()
        shutil.rmtree(self._folder, ignore_errors=True)
        super().close()


def _begin(proxy: Proxy, kind: str) -> None:
    if kind == "hold":
        proxy.passes.clear()
    else:
        proxy.cuts_at_once = True
        proxy.cut()


def _end(proxy: Proxy, kind: str) -> None:
    if kind == "hold":
        proxy.passes.set()
    else:
        proxy.cuts_at_once = False


def _limit_files(life: Life, size_bytes: int | None) -> None:
    """Set the limit of the size of files that the process writes; None for its highest."""
    with suppress(ProcessLookupError):
        _, most = resource.prlimit(life.child.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(life.child.pid, resource.RLIMIT_FSIZE, (most if size_bytes is None else size_bytes, most))
