"""A coordinator that dies right after it has printed its address is started again."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from dflow.distributed.coordinator.coordinator import LISTENING
from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.launcher import LaunchView, launch
from dflow.distributed.launching.task_programs import TaskProgram, ThisMachine
from dflow.distributed.process.child_process import ChildProcess
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import Status

SCRIPT = "import dflow\ncluster = dflow.connect()\ncluster.report('index', cluster.index)\ncluster.close()\n"


class KillingPlace(ThisMachine):
    """Kills the first coordinator when it has printed its address, before another process can connect."""

    def __init__(self) -> None:
        super().__init__()
        self._pids: list[int] = []

    def start(self, program: TaskProgram, on_line: Callable[[str], None]) -> ChildProcess:
        started = threading.Event()

        def line(text: str) -> None:
            started.wait()
            if text.startswith(LISTENING) and len(self._pids) == 1:
                os.kill(self._pids[0], signal.SIGKILL)
                os.waitid(os.P_PID, self._pids[0], os.WEXITED | os.WNOWAIT)
            on_line(text)

        child = super().start(program, line)
        if program.task == COORDINATOR:
            self._pids.append(child.pid)
        started.set()
        return child


class NoStop(StopSignal):
    """Never stops the launch, and leaves the signals of the test's process alone."""

    def __init__(self) -> None:
        self._never = threading.Event()

    def wait(self, timeout_s: float | None = None) -> int | None:
        self._never.wait(timeout_s)
        return None


class Events(LaunchView):
    """A view that keeps the launcher's events and the last status."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.status: Status | None = None

    def show_line(self, task: str, line: str) -> None:
        print(task, line)

    def show_event(self, text: str) -> None:
        self.events.append(text)

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        self.status = status


def test_a_coordinator_that_dies_before_the_launcher_reaches_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    plan = LaunchPlan(str(tmp_path / "script.py"), stock={}, restarts={COORDINATOR: 3}, state=str(tmp_path / "state"))
    view = Events()
    assert launch(NoStop(), plan, KillingPlace(), view, SocketTransport()) == 0, view.events
    assert "coordinator ended: killed by SIGKILL; it is started again immediately (restart 1 of 3)" in view.events
    assert view.status is not None
    assert view.status.results == {"index": 0.0}
