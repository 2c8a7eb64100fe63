"""A round: the launcher runs a program on a cluster, faults come by a schedule, and the invariants are checked."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from dflow.distributed.detection.cluster_spec import COORDINATOR
from dflow.distributed.launching.launch_plan import LaunchPlan
from dflow.distributed.launching.launcher import TaskRow, launch
from dflow.distributed.process.stop_signal import StopSignal
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.wire.messages.status import Status
from tests.chaos.checks import check_committed, check_ends, check_group, check_lines, silent_workers
from tests.chaos.faulty_place import FaultyPlace
from tests.chaos.programs import Program
from tests.chaos.schedule import LAST, Fault, Schedule

SNAPSHOT_EVERY_S = 0.5
#: Time for the stacks of all processes to be printed, in s.
STACKS_S = 10.0
TAIL_LINES = 40


@dataclass
class Outcome:
    """The end of a round: violations of invariants, the program's results, the faults that began, and the output."""

    violations: list[str] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    #: The named moments that processes have reached, in a round with a fault at one.
    moments: set[str] = field(default_factory=set)
    #: The time in s since the start, the task or "launcher", and the text.
    lines: list[tuple[float, str, str]] = field(default_factory=list)

    def tails(self) -> str:
        """Return the last lines of each task and of the launcher."""
        tasks = dict.fromkeys(task for _, task, _ in self.lines)
        kept = {task: [line for line in self.lines if line[1] == task][-TAIL_LINES:] for task in tasks}
        return "\n".join(f"{at:7.2f} [{task}] {text}" for task in tasks for at, _, text in kept[task])


def run_round(schedule: Schedule, program: Program, steps: int, folder: Path, limit_s: float) -> Outcome:
    """Run a round in an empty folder; it ends within `limit_s`."""
    return _FaultyRun(schedule, program, steps, folder, limit_s).run()


class _FaultyRun(StopSignal):
    """A view of a launch, and its stop signal, which comes when the round has taken too long."""

    def __init__(self, schedule: Schedule, program: Program, steps: int, folder: Path, limit_s: float) -> None:
        self._schedule, self._program, self._steps, self._folder = schedule, program, steps, folder
        self._began_s, self._limit_s = time.monotonic(), limit_s
        self._outcome = Outcome()
        at_moment = next((fault for fault in schedule.faults if fault.moment), None)
        self._place = FaultyPlace(self._check_snapshot, at_moment)
        self._changed = threading.Condition()
        #: Number of steps done, None while the first snapshots are not complete; and the newest state of the tasks.
        self._done: int | None = None
        self._first_number: int | None = None
        self._rows: Sequence[TaskRow] = ()

    def run(self) -> Outcome:
        """Run the round."""
        schedule, snapshots = self._schedule, self._folder / "snapshots"
        plan = LaunchPlan(
            str(self._program.script),
            self._program.arguments(self._steps, self._folder),
            stock={"ps": self._program.servers} if self._program.servers else {},
            jobs={"worker": schedule.workers},
            restarts=dict.fromkeys(self._program.hazards.kinds, 100),
            state=str(self._folder / "state"),
            snapshots=str(snapshots) if self._program.servers else "",
            snapshot_every_s=SNAPSHOT_EVERY_S,
        )
        outcome = self._outcome
        with ThreadPoolExecutor(len(schedule.faults) + 1) as pool:
            running = [pool.submit(self._inject, fault) for fault in schedule.faults if not fault.moment]
            try:
                status = launch(self, plan, self._place, self, SocketTransport())
            finally:
                self._place.is_over.set()
                with self._changed:
                    self._changed.notify_all()
            for each in running:
                each.result()
        for fault in schedule.faults:
            if fault.moment and self._place.has_killed:
                outcome.faults.append(str(fault))
        outcome.moments = self._place.reached
        if status != 0:
            outcome.violations.append(f"the launcher's exit status is {status}")
        self._check_snapshot()
        lives, lines = self._place.lives, [(task, text) for _, task, text in outcome.lines]
        silent = silent_workers(lives, lines)
        outcome.violations += check_ends(lives, silent, self._program.is_group)
        if self._program.is_group:
            outcome.violations += check_group(lives, lines)
            silent |= {life.task for life in lives if life.task.startswith("worker")}
        full = {life.task for life in lives if life.task == COORDINATOR and "full" in life.faults}
        outcome.violations += check_lines(lines, silent | full)
        outcome.violations += self._program.check(self._steps, outcome.results, self._folder)
        return outcome

    def _check_snapshot(self) -> None:
        if self._program.is_group:
            return
        self._outcome.violations += check_committed(self._folder / "snapshots", self._folder / "state")

    # Faults.

    def _inject(self, fault: Fault) -> None:
        at = fault.at * self._steps
        with self._changed:
            self._changed.wait_for(
                lambda: self._place.is_over.is_set() or fault.at < 0 or (self._done is not None and self._done >= at)
            )
        if self._place.is_over.wait(fault.after_s):
            return
        if fault.at >= 0 and self._done is not None and self._done > (1 + LAST) / 2 * self._steps:
            self._note("chaos", f"too late for: {fault}")
            return
        at_s = time.monotonic() - self._began_s
        self._note("chaos", f"begins: {fault}")
        self._outcome.faults.append(f"{at_s:7.2f} s: {fault}")
        self._place.inject(fault)
        self._note("chaos", f"ended: {fault}")

    def _is_committed(self) -> bool:
        """Whether a snapshot of all variables is committed, after the first steps."""
        if not self._program.servers:
            return True
        parts = [int(part.name) for part in self._folder.glob("snapshots/ps-?/*") if part.name.isdigit()]
        if self._first_number is None:
            self._first_number = max(parts, default=0)
        # The next snapshot may have been begun before. An older part is removed when a newer one is committed.
        return bool(parts) and min(parts) >= self._first_number + 2

    # The view.

    def show_line(self, task: str, line: str) -> None:
        """Keep a line of a process."""
        self._note(task, line)

    log_line = show_line

    def show_event(self, text: str) -> None:
        """Keep a line of the launcher."""
        self._note("launcher", text)

    def show_status(self, status: Status | None, rows: Sequence[TaskRow]) -> None:
        """Note the number of steps done; faults wait for it."""
        self._rows = rows
        if status is None or not status.steps_done or (self._done is None and not self._is_committed()):
            return
        with self._changed:
            self._done = status.steps_done
            self._changed.notify_all()

    def show_end(self, status: Status | None, ends: Mapping[str, str]) -> None:
        """Keep the results."""
        if status is not None:
            self._outcome.results = dict(status.results)

    def _note(self, task: str, text: str) -> None:
        self._outcome.lines.append((time.monotonic() - self._began_s, task, text))

    # The stop signal.

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait `timeout_s`; after the limit of the round, name the tasks that have not ended, and stop the launch."""
        if time.monotonic() - self._began_s < self._limit_s:
            self._place.is_over.wait(timeout_s)
            return None
        if not self._place.is_over.is_set():
            rows = "; ".join(f"{row.task} {row.state}: {row.last_line}" for row in self._rows)
            self._outcome.violations.append(f"not over after {self._limit_s:g} s, {self._done} steps done: {rows}")
            self._place.print_stacks(STACKS_S)
        return signal.SIGTERM


def describe(schedule: Schedule, outcome: Outcome, file: Path) -> str:
    """Describe a round that failed; all output is written into `file`."""
    file.write_text("".join(f"{at:7.2f} [{task}] {text}\n" for at, task, text in outcome.lines))
    return "\n".join(
        [
            f"{schedule.program}, {schedule.workers} workers, on Python {sys.version.split()[0]}",
            "violations:",
            *(f"  {text}" for text in outcome.violations),
            "faults that began:",
            *(f"  {text}" for text in outcome.faults),
            "last lines:",
            outcome.tails(),
            f"all output: {file}",
        ]
    )
