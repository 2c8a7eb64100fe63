"""Start and supervise a cluster of processes: a coordinator, task servers, and a script once per worker.

Invariants:
- whatever happens, each process that was started has ended and is reaped before `launch` returns;
- when the launcher is killed instead, every child with a parent watch (`lifeline`) ends;
- a task that fails is restarted by its job's policy, and has ended only when that does not restart it; a worker that
  has ended does not end the run, while the coordinator or a task server that has ended does;
- a restarted coordinator has the address and the state of the one before it;
- task servers are stopped only after all workers have ended, the coordinator after them; the dashboard is the last;
- what to do after a run that was ended is the last line, below the output of the processes and the table.

The exit status is 0 when at least one worker finished, no worker failed, and all steps of all runs were done; it is
130 after SIGINT or SIGTERM, else 1. A worker killed by a signal has not failed: others do its steps. A worker that
never joined the cluster has failed.
"""

from __future__ import annotations

import builtins
import math
import re
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator import LISTENING
from dflow.distributed.coordinator.membership import NORMAL_ENDS
from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.dashboard_address import SERVING
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.restarts import Restarts
from dflow.distributed.launching.task_programs import LaunchTarget, TaskProgram, ThisMachine
from dflow.distributed.process.child_process import Running, describe_end
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.process.termination import STATUS as TERMINATED
from dflow.distributed.transport.base import Transport
from dflow.distributed.wire.messages.roster import TaskInfo
from dflow.distributed.wire.messages.status import GetStatus, Status
from dflow.tracing import errors
from dflow.tracing.accepted_faults import NOT_FINITE, SHORT
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DeadlineExceeded, TransportClosed

START_S = 60.0
POLL_S = 0.2
STATUS_S = 2.0
#: Time after which the launcher says that it waits for the tasks of another job, such as an evaluator, in s.
LINGER_S = 30.0
#: Time between the signal that ends a process and SIGKILL, in s.
GRACE_S = 5.0
DASHBOARD = "dashboard"
#: Longest cause of an end, in characters.
LONGEST_CAUSE = 100
#: The line of an exception in the report of Python: its class, perhaps with the module, and the first line of its text.
_RAISED = re.compile(r"(?:\w+\.)*([A-Z]\w*)(?:: (.*))?")


@dataclass(frozen=True)
class TaskRow:
    """A task as its launcher sees it: `task` is its short name, `restarts` the number of its restarts."""

    task: str
    state: str
    restarts: int
    last_line: str


class LaunchView(Protocol):
    """The launcher's output; `show_line` and `log_line` are called from any thread, the rest from one.

    A view without logs inherits `log_line`.
    """

    def show_line(self, task: str, line: str) -> None:
        """Show a line that a process printed; `task` is its short name."""

    def log_line(self, task: str, line: str) -> None:
        """Keep a line that a process printed in the logs, if there are any, without showing it."""
        return

    def show_status(self, status: Status | None, rows: Sequence[TaskRow]) -> None:
        """Show the run's progress, about five times a second; no status while the coordinator does not answer."""

    def show_event(self, text: str) -> None:
        """Show an event of the launcher, which is not a line of any process."""

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        """Show that the run is over, with the end of each task that has ended."""


def launch(stop: StopSignal, plan: LaunchPlan, target: LaunchTarget, view: LaunchView, transport: Transport) -> int:
    """Run the plan to its end, or until `stop`; end all processes, close the target, and return the exit status."""
    launched = _Launch(stop, plan, target, view, transport)
    try:
        return launched.run()
    except _EarlyEnd as end:
        view.show_event(str(end))
        launched.end_early(end.remedy)
        return end.status
    finally:
        launched.end()


class _EarlyEnd(Exception):
    """The run cannot continue; the text says why, `remedy` what to do, and `status` is the exit status."""

    def __init__(self, why: str, remedy: str = "", status: int = 1) -> None:
        super().__init__(why)
        self.remedy, self.status = remedy, status


class _Task:
    """One task: its newest process, or the time `due_s` of its next start, or its end with the exit `status`."""

    def __init__(self, task: str, restarts: Mapping[str, int]) -> None:
        self.task = task
        self.restarts = Restarts(restarts.get(task if task == COORDINATOR else split_task_name(task)[0], 0))
        self.name = short_task_name(task)
        self.running: Running | None = None
        self.started_s = 0.0
        self.due_s = 0.0
        self.was_live = False
        self.status: int | None = None
        self.end = ""

    @property
    def is_over(self) -> bool:
        return self.status is not None


def _job_of(task: _Task) -> str:
    return split_task_name(task.task)[0]


class _Launch:
    def __init__(
        self, stop: StopSignal, plan: LaunchPlan, target: LaunchTarget, view: LaunchView, transport: Transport
    ) -> None:
        self._plan = plan
        self._target = target
        self._view = view
        self._transport = transport
        self._stop = stop
        self._coordinator = _Task(COORDINATOR, plan.restarts)
        self._servers = [_Task(task, plan.restarts) for task in plan.servers]
        self._workers = [_Task(task, plan.restarts) for task in plan.workers]
        self._everyone = [self._coordinator, *self._servers, *self._workers]
        self._address = ""
        #: The dashboard until its end, which is reported once, and the machine that it runs on.
        self._dashboard: Running | None = None
        self._here: ThisMachine | None = None
        self._client: CoordinatorClient | None = None
        self._status: Status | None = None
        #: By life of a task that was started again, how its process ended.
        self._ended: dict[int, str] = {}
        #: When one job had ended and another had not, inf before that; None after this is shown.
        self._lingers_since_s: float | None = math.inf
        #: Whether the launcher ends all tasks, so that the coordinator's lines tell what follows from that.
        self._is_ending = False

    def run(self) -> int:
        """Start everything, wait for the workers, end the task servers, and show the result; return the exit status.

        Raises _EarlyEnd when the run cannot continue.
        """
        self._start_coordinator()
        if self._plan.dashboard:
            where = ("--coordinator", self._address, "--address", self._plan.dashboard)
            words = ("-P", "-m", "dflow", "dashboard", *where)
            program = TaskProgram(DASHBOARD, words, self._plan.everywhere, {"JAX_PLATFORMS": "cpu"})
            self._here = ThisMachine()
            self._dashboard = self._here.start(program, self._take_dashboards_line)
        for task in (*self._servers, *self._workers):
            self._start(task)
        while not all(task.is_over for task in self._workers):
            self._wait()
            for task in self._everyone:
                self._handle_end(task)
            if self._dashboard is not None and (status := self._dashboard.poll()) is not None:
                self._view.show_event(f"the dashboard ended: {describe_end(status)}; the run goes on without it")
                self._dashboard = None
            self._show_whom_it_waits_for()
            self._poll_status()
        self._poll_status()
        self._end(self._servers)
        self._poll_status()
        self._view.show_end(_with_ends(self._status, self._ended), self._ends(self._workers))
        return self._verdict([task.status for task in self._workers if task.status is not None]) or self._faults()

    def _show_whom_it_waits_for(self) -> None:
        """Show once which tasks run for `LINGER_S` after the end of a job: an evaluator may not know of that."""
        left = [task for task in self._workers if not task.is_over]
        ended = {_job_of(task) for task in self._workers} - {_job_of(task) for task in left}
        if self._lingers_since_s is None or not left or not ended:
            return
        self._lingers_since_s = min(self._lingers_since_s, time.monotonic())
        if time.monotonic() - self._lingers_since_s >= LINGER_S:
            self._lingers_since_s, jobs, names = None, ", ".join(sorted(ended)), ", ".join(task.name for task in left)
            self._view.show_event(
                f"all tasks of {jobs} have ended, and the launch waits for {names}; a loop over "
                f"cluster.while_running({min(ended)!r}) ends with that job"
            )

    def end_early(self, remedy: str) -> None:
        """End the workers, then the task servers, and not yet the coordinator; show all ends, and last the remedy."""
        # The lines of a coordinator that has ended itself tell why.
        self._is_ending = self._coordinator.running is not None and self._coordinator.running.poll() is None
        for tasks in (self._workers, self._servers):
            self._end(tasks)
            for task in tasks:
                if task.running is not None and (status := task.running.poll()) is not None and not task.end:
                    task.end = describe_end(status)
        if self._coordinator.running is not None and self._coordinator.running.poll() is None and self._address:
            self._poll_status()
        self._view.show_end(_with_ends(self._status, self._ended), self._ends(self._everyone))
        if remedy:
            self._view.show_event(remedy)

    @staticmethod
    def _ends(tasks: Iterable[_Task]) -> dict[str, str]:
        return {task.task: task.end for task in tasks if task.end and task.task != COORDINATOR}

    def end(self) -> None:
        """End every process that still runs, the dashboard last, and close the target."""
        if self._client is not None:
            self._client.close()
        self._end(self._everyone)
        if self._here is not None:
            self._end_all([self._dashboard])
            self._here.close()
        self._target.close()

    def _start_coordinator(self) -> None:
        self._start(self._coordinator)
        deadline = time.monotonic() + START_S
        while not self._address:
            self._wait()
            self._handle_end(self._coordinator)
            if time.monotonic() > deadline:
                raise _EarlyEnd(
                    f"the coordinator did not say within {START_S:g} s where it listens; see its output above"
                )
        self._view.show_event(f"to watch: dflow status --watch --coordinator {self._address}")

    def _start(self, task: _Task) -> None:
        program = self._plan.program(task.task, self._address)
        on_line = (
            self._take_coordinators_line if task is self._coordinator else partial(self._view.show_line, task.name)
        )
        task.running = self._target.start(program, on_line)
        task.started_s, task.was_live = time.monotonic(), False

    def _take_coordinators_line(self, line: str) -> None:
        if line.startswith(LISTENING):
            self._address = line.removeprefix(LISTENING)
        else:
            take = self._view.log_line if self._is_ending else self._view.show_line
            take(COORDINATOR, line)

    def _take_dashboards_line(self, line: str) -> None:
        if line.startswith(SERVING):
            self._view.show_event(f"dashboard: {line.removeprefix(SERVING)}")
        else:
            self._view.show_line(DASHBOARD, line)

    def _wait(self) -> None:
        """Wait `POLL_S`; raises _EarlyEnd when a signal arrived."""
        which = self._stop.wait(POLL_S)
        if which is not None:
            what = signal.Signals(which).name if which else "a fault"
            raise _EarlyEnd(f"{what}: ending all processes", _how_to_go_on(self._plan), status=130)

    def _handle_end(self, task: _Task) -> None:
        """Handle the end of the task's process, and start the next one if its restart delay is over.

        Raises _EarlyEnd if a task server or the coordinator ended and is not restarted.
        """
        if task.is_over:
            return
        if task.running is not None and (status := task.running.poll()) is not None:
            if status == TERMINATED:  # a training loop ended between two steps
                status = -signal.SIGTERM
            if task in self._workers:
                self._worker_ended(task, status, task.running.tail)
            else:
                self._server_ended(task, status, task.running.tail)
        if task.running is None and time.monotonic() >= task.due_s:
            self._start(task)
            if task in self._servers:
                rest = (
                    "; when it has joined, all task servers return to the newest snapshot"
                    if self._plan.snapshots
                    else " and is empty: the variables that it held are lost, and a worker whose steps use them fails, "
                    "until it is started again and creates them"
                )
                self._view.show_event(f"{task.name} runs again{rest}")

    def _worker_ended(self, task: _Task, status: int, tail: Sequence[str]) -> None:
        if status == 0 and not self._has_joined(task):
            task.status, task.end = 1, "it never joined the cluster"
            self._view.show_event(
                f"{task.name} finished and had never joined the cluster, so it worked alone: "
                "its script has to call dflow.connect()"
            )
        elif not self._is_started_again(task, status):
            task.status, task.end = status, _end_with_cause(status, tail)
            running = sum(not worker.is_over for worker in self._workers)
            if status != 0:
                rest = f"; {running} of {len(self._workers)} workers go on" if running else ""
                self._view.show_event(f"{task.name} ended: {describe_end(status)}{rest}")

    def _server_ended(self, task: _Task, status: int, tail: Sequence[str]) -> None:
        # The launcher did not stop it, so an end with status 0 is a failure too.
        if not self._is_started_again(task, status or 1):
            last = "".join(f"\n  {line}" for line in tail) or " none"
            task.end = _end_with_cause(status, tail)
            raise _EarlyEnd(
                f"{task.name} ended ({describe_end(status)}) while workers needed it, so the run ends; "
                f"its last lines:{last}",
                self._how_to_survive(task),
            )

    def _how_to_survive(self, task: _Task) -> str:
        """Return how a run goes on after the end of a task server or of the coordinator."""
        if task is self._coordinator:
            return "to go on after such an end, launch with --restart coordinator=on-failure"
        job = split_task_name(task.task)[0]
        again = f"to go on after such an end, launch with --restart {job}=on-failure"
        return f"{_how_to_go_on(self._plan)}; {again}" if self._plan.snapshots else f"{again} and --snapshots FOLDER"

    def _is_started_again(self, task: _Task, status: int) -> bool:
        now_s = time.monotonic()
        pause_s = task.restarts.pause_s(status, now_s - task.started_s)
        if pause_s is None:
            return False
        task.running, task.due_s = None, now_s + pause_s
        self._record_end(task, describe_end(status))
        when = f"in {pause_s:g} s" if pause_s else "immediately"
        self._view.show_event(
            f"{task.name} ended: {describe_end(status)}; it is started again {when} "
            f"(restart {task.restarts.in_a_row} of {task.restarts.limit})"
        )
        return True

    def _record_end(self, task: _Task, end: str) -> None:
        """Record for the table how the newest process of a task ended, unless that is known, or none has joined."""
        lives = [info.life for info in self._status.tasks if info.task == task.task] if self._status else []
        if lives:
            self._ended.setdefault(max(lives), end)

    def _has_joined(self, task: _Task) -> bool:
        """Ask the coordinator whether the task was ever in the cluster; true when it has never answered."""
        self._poll_status()
        return self._status is None or any(info.task == task.task for info in self._status.tasks)

    def _poll_status(self) -> None:
        answered = False
        try:
            if self._client is None:
                # Each try is short: a coordinator that died after it printed its address is started again meanwhile.
                self._client = CoordinatorClient(self._transport, self._address, name="launcher", timeout_s=STATUS_S)
            self._status = self._client.ask(GetStatus(), STATUS_S)
            answered = True
        except (DeadlineExceeded, TransportClosed):
            pass  # busy, or dead, which `_handle_end` finds
        self._view.show_status(self._status if answered else None, self._rows())

    def _rows(self) -> list[TaskRow]:
        live = {info.task for info in self._status.tasks if info.left_at_s is None} if self._status else set()
        live.add(COORDINATOR)
        for task in self._everyone:
            task.was_live |= task.running is not None and task.task in live
        return [
            TaskRow(task.name, _state(task, task.task in live), task.restarts.count, _last_line(task))
            for task in self._everyone
        ]

    def _end(self, tasks: Iterable[_Task]) -> None:
        self._end_all(task.running for task in tasks)

    def _end_all(self, programs: Iterable[Running | None]) -> None:
        """End the programs by their signals; by SIGKILL after `GRACE_S`, or when a second signal arrives."""
        running = [each for each in programs if each is not None]
        for each in running:
            each.terminate()
        deadline = time.monotonic() + GRACE_S
        while running := [each for each in running if each.poll() is None]:
            if time.monotonic() > deadline or self._stop.wait(POLL_S / 8) is not None:
                break
        if running:
            # Concurrently: a program whose host has gone takes seconds, and there may be many.
            with ThreadPoolExecutor(len(running), "dflow kill") as pool:
                list(pool.map(lambda each: each.kill(), running))

    def _verdict(self, statuses: list[int]) -> int:
        if 0 not in statuses:
            self._view.show_event(f"none of {len(statuses)} workers finished")
            return 1
        return 1 if any(status > 0 for status in statuses) else 0

    def _faults(self) -> int:
        """Return 1, and show why, if steps of a run were not done or a loss was not finite, unless accepted; else 0."""
        status, found = self._status, False
        if status is not None and status.steps_done < status.steps_total and SHORT not in self._plan.accept:
            found = True
            self._view.show_event(
                f"the run ended short of its steps: {status.steps_done} of {status.steps_total} are done; give the "
                f"workers more batches, or ask for fewer steps; --accept {SHORT} makes it a success"
            )
        if status is not None and status.not_finite and NOT_FINITE not in self._plan.accept:
            found, first = True, status.not_finite[0]
            self._view.show_event(
                f"{first.metric} was {first.value} at step {first.step} of run {first.run!r}; look for NaN in the "
                f"data and in the restored checkpoint, lower the learning rate or clip the gradients; --accept "
                f"{NOT_FINITE} makes it a success"
            )
        return int(found)


def _how_to_go_on(plan: LaunchPlan) -> str:
    """Return how to go on with a job that was ended."""
    if plan.snapshots:
        return f"start the same command again to go on from the newest snapshot in {plan.snapshots}"
    return (
        "the next launch goes on from the checkpoints that its script restores, as a dflow.CheckpointManager does; "
        "--snapshots FOLDER keeps the state of task servers too"
    )


def _with_ends(status: Status | None, ended: Mapping[int, str]) -> Status | None:
    """Return the status with the ends of failed processes, by life, in place of the coordinator's reasons."""
    if status is None:
        return None

    def known(info: TaskInfo) -> TaskInfo:
        is_failed = info.left_at_s is not None and info.left not in NORMAL_ENDS
        return replace(info, left=ended[info.life]) if is_failed and info.life in ended else info

    return replace(status, tasks=tuple(map(known, status.tasks)))


def cause_of(lines: Sequence[str]) -> str:
    """Return the class and the text of the exception that ended a program of Python; empty if it printed none."""
    for line in reversed(lines):
        found = _RAISED.fullmatch(line)
        if found is not None and _is_exception(found[1]):
            cause = found[1] if not found[2] else f"{found[1]}: {found[2]}"
            return cause if len(cause) <= LONGEST_CAUSE else f"{cause[: LONGEST_CAUSE - 3]}..."
    return ""


def _is_exception(name: str) -> bool:
    known = getattr(builtins, name, None) or getattr(errors, name, None)
    return name.endswith(("Error", "Exception")) or (isinstance(known, type) and issubclass(known, BaseException))


def _end_with_cause(status: int, tail: Sequence[str]) -> str:
    cause = cause_of(tail) if status else ""
    return f"{describe_end(status)}: {cause}" if cause else describe_end(status)


def _state(task: _Task, is_live: bool) -> str:
    if task.is_over:
        return task.end
    if task.running is None:
        return f"again in {max(task.due_s - time.monotonic(), 0):.0f} s"
    if is_live:
        return "running"
    return "ending" if task.was_live else "starting"


def _last_line(task: _Task) -> str:
    tail = task.running.tail if task.running is not None else ()
    return tail[-1] if tail else ""
