"""A cluster on this machine: a coordinator, ps tasks, and a script once per worker, each a process of its own.

Invariants:
- whatever happens, each process that was started has ended and is reaped before `launch` returns;
- when the launcher is killed instead, every child that watches its lifeline ends;
- a worker that dies does not end the run; the coordinator or a ps task that dies ends it;
- ps tasks and the coordinator are told to end only after all workers have.

The exit status is 0 when at least one worker finished and none failed by itself, 130 after SIGINT or SIGTERM, else 1.
A worker killed by a signal has not failed by itself: others do its steps. One that never joined the cluster has failed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dflow.distributed.child_process import ChildProcess, describe_end
from dflow.distributed.coordinator import LISTENING
from dflow.distributed.coordinator_client import CoordinatorClient
from dflow.distributed.lifeline import LIFELINE_VARIABLE
from dflow.distributed.messages import Status
from dflow.distributed.stop_signal import StopSignal
from dflow.distributed.transport.base import Transport
from dflow.tracing.errors import DeadlineExceeded, TransportClosed
from dflow.tracing.task_name import short_task_name, task_name

START_S = 60.0
POLL_S = 0.2
STATUS_S = 2.0
#: How long a process that was asked to end may take before it is killed.
GRACE_S = 5.0
_COORDINATOR = "coordinator"


@dataclass(frozen=True)
class LaunchPlan:
    """What to start: `ps` stock tasks, and `script` with `arguments` once for each of `workers`."""

    ps: int
    workers: int
    script: str
    arguments: tuple[str, ...] = ()
    python: str = sys.executable


class LaunchView(Protocol):
    """Where the launcher shows what happens; `show_line` is called from any thread, the rest from one."""

    def show_line(self, task: str, line: str) -> None:
        """A process printed a line; `task` is its short name."""
        ...

    def show_status(self, status: Status) -> None:
        """How far the run is, about five times a second."""
        ...

    def show_event(self, text: str) -> None:
        """Something happened that is not a line of any process."""
        ...

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        """The run is over; how each task that has ended did so."""
        ...


def launch(stop: StopSignal, plan: LaunchPlan, view: LaunchView, transport: Transport) -> int:
    """Run the plan to its end, or until `stop`, and return the exit status."""
    launched = _Launch(stop, plan, view, transport)
    try:
        return launched.run()
    except _Interrupted as interrupted:
        view.show_event(f"{interrupted}: ending all processes")
        return 130
    except _Fault as fault:
        view.show_event(str(fault))
        return 1
    finally:
        launched.end()


class _Interrupted(Exception):
    """SIGINT or SIGTERM came."""


class _Fault(Exception):
    """The run cannot go on; the text says why."""


class _Launch:
    def __init__(self, stop: StopSignal, plan: LaunchPlan, view: LaunchView, transport: Transport) -> None:
        self._plan = plan
        self._view = view
        self._transport = transport
        self._stop = stop
        self._lifeline, self._held = os.pipe()
        self._children: dict[str, ChildProcess] = {}
        self._ends: dict[str, str] = {}
        self._address = ""
        self._client: CoordinatorClient | None = None
        self._status: Status | None = None

    def run(self) -> int:
        """Start everything, wait for the workers, end the rest, and show what came of it."""
        self._start_coordinator()
        servers = [task_name("ps", index) for index in range(self._plan.ps)]
        workers = [task_name("worker", index) for index in range(self._plan.workers)]
        for index, task in enumerate(servers):
            self._start_server(task, index)
        for index, task in enumerate(workers):
            self._start_worker(task, index)
        statuses = self._wait_for_workers(workers, (*servers, _COORDINATOR))
        self._poll_status()
        self._end(self._children[task] for task in servers)
        self._poll_status()
        self._view.show_end(self._status, self._ends)
        return self._verdict(statuses)

    def end(self) -> None:
        """End every process that is left."""
        if self._client is not None:
            self._client.close()
        self._end(self._children.values())
        os.close(self._held)
        os.close(self._lifeline)

    def _start_coordinator(self) -> None:
        jobs = {"ps": self._plan.ps, "worker": self._plan.workers}
        counts = [word for job, count in jobs.items() for word in ("--job", f"{job}={count}")]
        self._start(_COORDINATOR, self._own_command("coordinator", *counts), _server_environment())
        deadline = time.monotonic() + START_S
        while not self._address:
            self._check([_COORDINATOR])
            if time.monotonic() > deadline:
                raise _Fault(f"the coordinator did not say within {START_S:g} s where it listens; see its output above")
        self._client = CoordinatorClient(self._transport, self._address, name="launcher", timeout_s=START_S)

    def _start_server(self, task: str, index: int) -> None:
        command = self._own_command("task", "--job", "ps", "--index", str(index), "--coordinator", self._address)
        self._start(task, command, _server_environment())

    def _start_worker(self, task: str, index: int) -> None:
        role = {"DFLOW_COORDINATOR": self._address, "DFLOW_JOB": "worker", "DFLOW_INDEX": str(index)}
        command = [self._plan.python, self._plan.script, *self._plan.arguments]
        self._start(task, command, {**os.environ, **role})

    def _own_command(self, *words: str) -> list[str]:
        return [self._plan.python, "-P", "-m", "dflow", *words]

    def _start(self, task: str, command: list[str], environment: Mapping[str, str]) -> None:
        ours = {LIFELINE_VARIABLE: str(self._lifeline), "PYTHONUNBUFFERED": "1"}
        name = short_task_name(task)

        def on_line(line: str) -> None:
            if task == _COORDINATOR and not self._address and line.startswith(LISTENING):
                self._address = line.removeprefix(LISTENING)
            else:
                self._view.show_line(name, line)

        self._children[task] = ChildProcess(name, command, {**environment, **ours}, self._lifeline, on_line)

    def _wait_for_workers(self, workers: Iterable[str], servers: Iterable[str]) -> list[int]:
        """The exit status of each worker, in order of ending; raises when one of `servers` ends first."""
        running, statuses = set(workers), []
        while running:
            self._check(servers)
            for task in sorted(running):
                status = self._children[task].poll()
                if status is None:
                    continue
                running.discard(task)
                statuses.append(status)
                self._ends[task] = describe_end(status)
                if status == 0 and not self._has_joined(task):
                    statuses[-1] = 1
                    self._ends[task] = "it never joined the cluster"
                    self._view.show_event(
                        f"{short_task_name(task)} finished and had never joined the cluster, so it worked alone: "
                        "its script has to call dflow.connect()"
                    )
                if status != 0:
                    rest = f"; {len(running)} of {self._plan.workers} workers go on" if running else ""
                    self._view.show_event(f"{short_task_name(task)} ended: {self._ends[task]}{rest}")
            self._poll_status()
        return statuses

    def _has_joined(self, task: str) -> bool:
        """Whether the task was ever in the cluster, as far as the coordinator can be asked."""
        self._poll_status()
        return self._status is None or any(info.task == task for info in self._status.tasks)

    def _check(self, servers: Iterable[str]) -> None:
        """Wait a moment; raises when a signal came or one of `servers` has ended."""
        which = self._stop.wait(POLL_S)
        if which is not None:
            raise _Interrupted(signal.Signals(which).name if which else "a fault")
        for task in servers:
            child = self._children[task]
            status = child.poll()
            if status is not None:
                last = "".join(f"\n  {line}" for line in child.tail) or " none"
                raise _Fault(
                    f"{child.name} ended ({describe_end(status)}) while workers needed it, so the run ends; "
                    f"its last lines:{last}"
                )

    def _poll_status(self) -> None:
        if self._client is None:
            return
        try:
            self._status = self._client.status(timeout_s=STATUS_S)
        except (DeadlineExceeded, TransportClosed):
            return  # busy, or dead, which `_check` finds
        self._view.show_status(self._status)

    def _end(self, children: Iterable[ChildProcess]) -> None:
        """End the processes: by SIGTERM, and by SIGKILL those that take too long or when a second signal comes."""
        ending = list(children)
        for child in ending:
            child.terminate()
        deadline = time.monotonic() + GRACE_S
        running = ending
        while running := [child for child in running if child.poll() is None]:
            if time.monotonic() > deadline or self._stop.wait(POLL_S / 8) is not None:
                break
        for child in running:
            child.kill()

    def _verdict(self, statuses: list[int]) -> int:
        if 0 not in statuses:
            self._view.show_event(f"none of {len(statuses)} workers finished")
            return 1
        return 1 if any(status > 0 for status in statuses) else 0


def _server_environment() -> dict[str, str]:
    """Servers compute little, and must not take an accelerator from the workers, unless the user says so."""
    return {"JAX_PLATFORMS": "cpu", **os.environ}
