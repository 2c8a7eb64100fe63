"""Snapshots of the state of all tasks: the coordinator begins them, and records the complete ones.

The tasks capture and write (`task_snapshots.py`), and `recovery.py` returns to the newest. A pure function of events.

Invariants:
- a snapshot is committed when each task that holds state has written its part, captured in one pause of the steps; the
  record of it has the ledger of that pause. An uncommitted snapshot is never loaded;
- a task that announces its leave is answered when a snapshot with its state is committed. The steps stay paused from
  its capture until all tasks have returned to it, so no step is lost or done again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.membership import NORMAL_ENDS, ReleaseTask
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.snapshots.resumption import BEGINNING, EPOCH, SNAPSHOT, Epoch, Snapshot, newest_snapshot, resumed
from dflow.distributed.snapshots.snapshot_messages import (
    CaptureState,
    SaveChanges,
    Saved,
    SnapshotCommitted,
    StateCaptured,
    StateWritten,
)
from dflow.distributed.snapshots.snapshot_schedule import AFTER_PAUSE_S, PAUSE_S, SnapshotSchedule
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.status import SnapshotSize
from dflow.tracing.devices.task_name import short_task_name

NO_SNAPSHOTS = "no snapshots are made: start the cluster with --snapshots DIR"
#: Limit of the time until all tasks have captured their state, while the steps are paused, and of the time until all
#: have written their parts, in s.
CAPTURE_S, WRITE_S = 60.0, 600.0
BUSY = "still runs a step after"
#: In place of a task's name: the coordinator's own requests for a pause.
TO_CAPTURE, TO_RETURN = "a snapshot", "the return to a snapshot"


class SnapshotPhase(Enum):
    """Phase of the snapshot that is being made.

    IDLE       none is being made
    PAUSING    it waits for a pause of the steps
    CAPTURING  all tasks capture their state, in the pause
    WRITING    they write it, and steps run again, unless a task leaves
    HOLDING    the snapshot for a task that leaves is complete, and the pause goes on until all have returned to it
    """

    IDLE, PAUSING, CAPTURING, WRITING, HOLDING = auto(), auto(), auto(), auto(), auto()


@dataclass
class SnapshotAttempt:
    """The newest attempt at a snapshot, with the reports of its tasks.

    changes  number of the newest change of state (`SaveChanges`) that is in it
    names    names of the state that tasks have captured
    reports  reports of the tasks that have written their parts; a task may do so before another has captured its own
    """

    snapshot: Snapshot = BEGINNING
    changes: int = 0
    names: set[str] = field(default_factory=set)
    reports: list[StateWritten] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.uncaptured, self.unwritten = {*self.snapshot.tasks}, {*self.snapshot.tasks}

    def captured(self, report: StateCaptured) -> None:
        """Record that a task has captured its state, and the names of that state."""
        self.uncaptured.discard(report.task)
        self.names.update(report.keys)


class ClusterSnapshots(CoordinatorPart):
    """Makes the snapshots of one cluster, and records the newest committed one."""

    requests: ClassVar[Requests[ClusterSnapshots]] = HandlerTable()
    notices: ClassVar[Notices[ClusterSnapshots]] = HandlerTable()
    may_be_lost = (EPOCH, SNAPSHOT)
    tells: ClassVar = {CaptureState: EPOCH, SnapshotCommitted: SNAPSHOT, Saved: SNAPSHOT}
    moments: ClassVar = {CaptureState: "capture", SNAPSHOT: "commit"}

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._members, self._directory = core.members, core.directory
        self._pauses, self._watch = core.part(StepPauses), core.part(ProgressWatch)
        self.schedule = SnapshotSchedule(core.settings.snapshot_every_s)
        self.counted = core.records.load_one(EPOCH, Epoch())
        self.committed = core.records.load_one(SNAPSHOT, BEGINNING)
        self._directory.resumed = self.counted.resumed
        #: Bytes of the newest committed snapshot.
        self._size: SnapshotSize | None = None
        self.phase, self.since_s = SnapshotPhase.IDLE, 0.0
        self._attempt = SnapshotAttempt()
        #: Tasks that have announced their leave, and their requests; None for one that is answered.
        self.leaving: dict[str, int | None] = {}
        #: Whether a step may have begun since the capture for a leave: a task has joined again, and was not held back.
        self.is_broken = False
        #: Requests that wait for a snapshot with a change of state, each with the change's number and the wait's end.
        self._unsaved: dict[int, tuple[int, float]] = {}

    @classmethod
    def inherited(cls, rows: Mapping[str, bytes], parts: Sequence[type[CoordinatorPart]]) -> Mapping[str, bytes]:
        """Return the records of a cluster that resumes the newest snapshot in `rows`, or begins without state."""
        return resumed(rows, newest_snapshot(rows), parts)

    def status(self) -> Mapping[str, SnapshotSize | None]:
        """Return the size of the newest snapshot; None until this process of the coordinator has committed one."""
        return {"snapshot": self._size}

    def count(self, **changes: int | bool) -> None:
        """Set these fields of `counted`, also in the records."""
        self.counted = msgspec.structs.replace(self.counted, **changes)
        self._core.records.put(EPOCH, self.counted)

    def _enter(self, phase: SnapshotPhase, at_s: float) -> None:
        self.phase, self.since_s = phase, at_s

    def on_tick(self, at_s: float) -> Sequence[Command]:
        """Ask for a pause when it is time for the next snapshot; abandon a snapshot that takes too long."""
        if late := self._late(at_s):
            return self.abandon(at_s, late, least_s=AFTER_PAUSE_S if self.phase is SnapshotPhase.PAUSING else 0.0)
        if self._may_begin() and self.schedule.is_due(at_s, self._directory.names()):
            self._begin(at_s)
        return []

    def _late(self, at_s: float) -> str:
        """Return why the snapshot that is being made takes too long; empty if it does not."""
        waited_s, attempt = at_s - self.since_s, self._attempt
        match self.phase:
            # A task that leaves waits as long as it can: it ends the attempt itself, as it leaves.
            case SnapshotPhase.PAUSING if waited_s > PAUSE_S and not self.leaving:
                return overdue(self._pauses.waits_for, BUSY, PAUSE_S, self._watch.doing)
            case SnapshotPhase.CAPTURING if waited_s > CAPTURE_S:
                return overdue(attempt.uncaptured, "did not capture its state within", CAPTURE_S)
            case SnapshotPhase.WRITING if waited_s > WRITE_S:
                return overdue(attempt.unwritten, "did not write its part within", WRITE_S)
        return ""

    def _may_begin(self) -> bool:
        is_ready = self.schedule.every_s and self._core.is_durable and not self.counted.is_resuming
        is_free = self.phase is SnapshotPhase.IDLE and not self._pauses.has_request(TO_RETURN)
        if not is_ready or not is_free or not self._directory.names():
            return False
        return not self._directory.lost() and not self._members.away()

    def _begin(self, at_s: float) -> None:
        self.schedule.began_s = at_s
        self._enter(SnapshotPhase.PAUSING, at_s)
        self._pauses.ask(TO_CAPTURE)

    @notices.handles(StateCaptured)
    def _captured(self, report: StateCaptured, received: Received) -> Sequence[Command]:
        if report.number == self._attempt.snapshot.number:
            self._attempt.captured(report)
        return []

    @notices.handles(StateWritten)
    def _written(self, report: StateWritten, received: Received) -> Sequence[Command]:
        return self._take_written(report, received.at_s)

    def _take_written(self, report: StateWritten, at_s: float) -> Sequence[Command]:
        is_made = self.phase in (SnapshotPhase.CAPTURING, SnapshotPhase.WRITING)
        if not is_made or report.number != self._attempt.snapshot.number:
            return []
        if report.failure:
            return self.abandon(at_s, f"{short_task_name(report.task)}: {report.failure}")
        self._attempt.unwritten.discard(report.task)
        self._attempt.reports.append(report)
        return []

    def on_join(self, task: str, peer: int, is_known: bool, at_s: float) -> Sequence[Command]:
        """Abandon the snapshot that is being made if its capture may not be of one moment any more.

        That is so if an earlier process of the task has captured a part, or if the process joins again (`is_known`)
        during the capture: it may have begun a step, since the pause did not reach it. Therefore such a join also sets
        `is_broken`.
        """
        self.is_broken = self.is_broken or is_known
        return self._left_or_replaced(
            task, at_s, may_have_begun_a_step=is_known and self.phase is SnapshotPhase.CAPTURING
        )

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> list[Command]:
        """Abandon the snapshot that is being made if a task that has left has a part of it.

        Also forget that these tasks announced their leave, unless the pause goes on for them (HOLDING).
        """
        if self.phase is not SnapshotPhase.HOLDING:
            for one in left:
                self.leaving.pop(one.task, None)
        commands: list[Command] = []
        for one in left:
            # At the end of a job task servers stop, perhaps while a snapshot is made. The job needs that no more.
            commands += self._left_or_replaced(one.task, at_s, is_logged=one.reason not in NORMAL_ENDS)
        return commands

    def _left_or_replaced(
        self, task: str, at_s: float, *, may_have_begun_a_step: bool = False, is_logged: bool = True
    ) -> list[Command]:
        is_made = self.phase in (SnapshotPhase.CAPTURING, SnapshotPhase.WRITING)
        if is_made and (task in self._attempt.snapshot.tasks or may_have_begun_a_step):
            return self.abandon(at_s, f"{short_task_name(task)} has left or joined again", is_logged=is_logged)
        return []

    # Requests that wait for a snapshot.

    @requests.handles(SaveChanges)
    def _save_changes(self, request: SaveChanges, received: Received) -> Sequence[Command]:
        """Answer when a snapshot has the task's change, or after `wait_s`; immediately if no snapshots are made.

        The next snapshot becomes due now.
        """
        self.schedule.changes += 1
        self._unsaved[received.ask] = self.schedule.changes, received.at_s + request.wait_s
        return []

    def _answer_saved(self, at_s: float) -> list[Command]:
        saved = self.schedule.saved_changes if self.schedule.every_s else self.schedule.changes
        asks = [ask for ask, (number, until_s) in self._unsaved.items() if number <= saved or at_s >= until_s]
        return [SendReply(ask, Saved(self._unsaved.pop(ask)[0] <= saved)) for ask in asks]

    def refuse_changes(self, why: str) -> list[Command]:
        """Refuse with TaskLost all requests whose change no snapshot has yet; `why` is the text."""
        asks, self._unsaved = self._unsaved, {}
        return [SendReply(ask, Failure("TaskLost", f"the change of state is lost: {why}")) for ask in asks]

    def announce_leave(self, task: str, received: Received) -> list[Command]:
        """Answer the request of a task that is going to leave when a snapshot with its state is committed.

        The answer is immediate in a pause for such a snapshot, and TaskLost if no snapshots are made. A snapshot that
        is being written while steps run is too old for the task: it is abandoned.
        """
        ask = received.ask
        if self.phase is SnapshotPhase.HOLDING:
            self.leaving[task] = None
            return [SendReply(ask, Ok())]  # nothing has changed since the snapshot
        if not self.schedule.every_s:
            return [SendReply(ask, Failure("TaskLost", NO_SNAPSHOTS))]
        # Steps run again while a snapshot is written, unless it is for a leave: it is too old for this task.
        is_too_old = self.phase is SnapshotPhase.WRITING and not self.leaving
        commands = self.abandon(received.at_s) if is_too_old else []
        self.leaving[task] = ask
        self.schedule.allow()
        return commands

    def _answer_leaving(self, answer: Ok | Failure) -> list[Command]:
        commands: list[Command] = [SendReply(ask, answer) for ask in self.leaving.values() if ask is not None]
        self.leaving = dict.fromkeys(self.leaving)
        return commands

    # Decisions.

    def after_event(self, at_s: float) -> list[Command]:
        """Go on with the present snapshot, or begin one for a leave; answer requests whose change is saved."""
        return [*self._go_on(at_s), *self._answer_saved(at_s)]

    def _go_on(self, at_s: float) -> list[Command]:
        if not self._core.is_durable and self.phase not in (SnapshotPhase.IDLE, SnapshotPhase.HOLDING):
            return self.abandon(at_s, "the coordinator's state cannot be written")
        commands: list[Command] = []
        if self.leaving and self.schedule.is_allowed(at_s) and self._may_begin():
            self._begin(at_s)
        if self.phase is SnapshotPhase.PAUSING and self._pauses.reached == TO_CAPTURE:
            commands += self._capture(at_s)
        if self.phase is SnapshotPhase.CAPTURING and not self._attempt.uncaptured:
            commands += self._end_capture(at_s)
        if self.phase is SnapshotPhase.WRITING and not self._attempt.unwritten:
            commands += self._commit(at_s)
        return commands

    def _capture(self, at_s: float) -> list[Command]:
        tasks, live = self._directory.holders(), self._members.connections()
        if self._directory.lost() or any(live.get(task) is None for task in tasks):
            return self.abandon(at_s)
        number, cluster = self.counted.number + 1, self._members.identity.cluster
        self.count(number=number)
        placed = self._directory.saved()
        names, copies, done = self._directory.names(), self._core.copies(), self._core.steps_done()
        snapshot = Snapshot(number, tasks, names, at_s, placed, cluster, copies, done)
        self._enter(SnapshotPhase.CAPTURING, at_s)
        self._attempt, self.is_broken = SnapshotAttempt(snapshot, self.schedule.changes), False
        peers = tuple(peer for task in tasks if (peer := live[task]) is not None)
        return [Broadcast(peers, CaptureState(number, self.committed.number, cluster))]

    def _end_capture(self, at_s: float) -> list[Command]:
        # Variables that are placed and not created yet.
        if missing := [name for name in self._attempt.snapshot.names if name not in self._attempt.names]:
            why = self.schedule.lacking(missing, at_s)
            return [*self.abandon(at_s), *([Log(f"no snapshot can be made: {why}")] if why else [])]
        self._enter(SnapshotPhase.WRITING, at_s)
        return [] if self.leaving else self._pauses.withdraw(TO_CAPTURE)

    def _commit(self, at_s: float) -> list[Command]:
        commands: list[Command] = []
        snapshot, reports = self._attempt.snapshot, self._attempt.reports
        if self.committed is BEGINNING:
            commands.append(Log(f"the first snapshot, of {len(snapshot.names)} variables, is complete"))
        written, full = sum(one.written_bytes for one in reports), sum(one.full_bytes for one in reports)
        self.committed, self._size = snapshot, SnapshotSize(snapshot.number, written, full)
        self.schedule.complete(snapshot.names, self._attempt.changes)
        self._core.records.put(SNAPSHOT, snapshot)
        # Also to workers: they need not make it again.
        commands.append(Broadcast(self._members.live_peers(), SnapshotCommitted(snapshot.number)))
        self._enter(SnapshotPhase.HOLDING if self.leaving else SnapshotPhase.IDLE, at_s)
        if self.leaving:
            names = ", ".join(map(short_task_name, sorted(self.leaving)))
            commands.append(Log(f"{names} leaves: snapshot {snapshot.number} has all state; steps wait"))
            commands += self._answer_leaving(Ok())
        return commands

    def release(self) -> list[Command]:
        """End the snapshot and its pause, after a return or a leave.

        Tasks whose announced leave was answered are forgotten; the others wait for the next snapshot.
        """
        self.phase = SnapshotPhase.IDLE
        self.leaving = {task: ask for task, ask in self.leaving.items() if ask is not None}
        return self._pauses.withdraw(TO_CAPTURE)

    def abandon(self, at_s: float, why: str = "", least_s: float = 0.0, *, is_logged: bool = True) -> list[Command]:
        """End the snapshot that is being made, and its pause; the last committed one stays. The next one is delayed.

        why        refuses the announced leaves with TaskLost; if empty, they wait for the next snapshot
        least_s    least time to the next attempt, in s
        is_logged  whether `why` is logged
        """
        commands: list[Command] = self._pauses.withdraw(TO_CAPTURE)
        retry_s = 0.0 if self.phase is SnapshotPhase.IDLE else self.schedule.failed(at_s, least_s)
        if why:
            text = f"a snapshot is abandoned, and no other begins for {retry_s:g} s: {why}"
            commands = [*([Log(text)] if is_logged else []), *commands]
            commands += self._answer_leaving(Failure("TaskLost", f"no snapshot could be made: {why}"))
            self.leaving = {}
        self.phase = SnapshotPhase.IDLE
        return commands


def overdue(tasks: Collection[str], what: str, limit_s: float, doing: Callable[[str], str] = lambda task: "") -> str:
    """Return the text that these tasks `what` for `limit_s`, with the work of each. Without tasks it says "a worker".

    what   verb and its object, such as "did not write its part within"
    doing  returns the work of a task, or an empty text
    """
    works = "; ".join(f"{short_task_name(task)}: {text}" for task in sorted(tasks) if (text := doing(task)))
    names = ", ".join(map(short_task_name, sorted(tasks))) or "a worker"
    return f"{names} {what} {limit_s:g} s" + (f" ({works})" if works else "")
