"""Snapshots of the state of all tasks, and the return of all tasks to the newest one when a task has lost its state.

Why: a parameter task that is started again is empty. All tasks that hold state then return together to one moment, with
the ledger of the runs' steps, and training goes on from there: steps done since are done again. A pure function of
events; the tasks capture, write and load.

Invariants:
- a snapshot is committed when each task that holds state has written its part, captured in one pause of the steps; the
  record of it has the ledger of that pause. An uncommitted snapshot is never loaded;
- tasks return to a snapshot in a pause of the steps, which ends when all of them have set its state, so that no step
  sees a mixture; none sets it before each has read and checked its part;
- a task returns only to a snapshot that has all of the state that was lost. Other lost state stays lost;
- a task that announces its leave is answered when a snapshot with its state is committed. The steps stay paused from
  its capture until all tasks have returned to it, so no step is lost or done again;
- a cluster that resumes the snapshot of an earlier one (`resumption.py`) loads it as if all tasks had lost their state;
- a request that waits for recovery is answered: when no state is lost, or with the reason why that cannot be.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from enum import Enum

import msgspec

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, Log, SendReply
from dflow.distributed.coordinator.durable_records import DurableRecords
from dflow.distributed.coordinator.membership import Membership
from dflow.distributed.coordinator.resumption import EPOCH, SNAPSHOT, Epoch, Snapshot
from dflow.distributed.coordinator.step_ledger import StepLedger
from dflow.distributed.coordinator.step_pauses import StepPauses
from dflow.distributed.coordinator.variable_directory import MOST_NAMED, VariableDirectory
from dflow.distributed.wire.messages.connection import Failure, Ok
from dflow.distributed.wire.messages.snapshots import (
    AwaitRecovery,
    CaptureState,
    LoadState,
    Recovered,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateRestored,
    StateWritten,
)
from dflow.distributed.wire.messages.status import SnapshotSize
from dflow.tracing.devices.task_name import short_task_name, task_name

#: Limit of the time until all tasks have captured their state, and until they have read or set it, in s, while the
#: steps are paused.
CAPTURE_S, LOAD_S = 60.0, 600.0
#: Limit of the time until a pause for a snapshot is reached, and until the parts of a snapshot are written, in s.
PAUSE_S, WRITE_S = 10.0, 600.0
#: Time to the next attempt at a snapshot after one that failed, in s: it doubles with each failure in a row, up to the
#: interval between snapshots. After a pause that was not reached, at least the second time, since other workers waited.
RETRY_S, AFTER_PAUSE_S = 1.0, 2 * PAUSE_S
#: Failures in a row after which the log says what is missing.
QUIET_FAILURES = 4
#: Longest wait for the process of a task that held state to be started again, in s.
RETURN_S = 300.0
NO_SNAPSHOTS = "no snapshots are made: start the cluster with --snapshots DIR"
#: In place of a task's name: the requests of this file for a pause.
_SNAPSHOT, _RETURN = "a snapshot", "the return to a snapshot"


class _Phase(Enum):
    IDLE = "no snapshot is made"
    PAUSING = "the steps are being paused"
    CAPTURING = "the tasks capture their state"
    WRITING = "the tasks write their parts"
    HOLDING = "the steps stay paused until tasks that leave are back"


class Recovery:
    """The snapshots of one cluster, kept in `records`; the newest committed one is the last.

    every_s  time between two snapshots; 0 for none
    """

    def __init__(
        self,
        records: DurableRecords,
        members: Membership,
        directory: VariableDirectory,
        ledger: StepLedger,
        pauses: StepPauses,
        every_s: float,
    ) -> None:
        self._records, self._members, self._directory = records, members, directory
        self._ledger, self._pauses, self._every_s = ledger, pauses, every_s
        self._counted = records.load_one(EPOCH, Epoch())
        self._committed = next((found for _, found in records.load(SNAPSHOT, Snapshot)), None)
        self._phase = _Phase.IDLE
        #: Tasks that have yet to capture, and to write, their parts of the snapshot that is being made.
        self._uncaptured: set[str] = set()
        self._unwritten: set[str] = set()
        #: Names of the captured state.
        self._captured: set[str] = set()
        #: Reports of the tasks that have written their parts; their total for the last committed snapshot.
        self._reports: list[StateWritten] = []
        self.size: SnapshotSize | None = None
        #: Time when the newest snapshot was begun, and when its present phase began.
        self._began_s = self._phase_s = -math.inf
        #: Names at the moment of the last committed snapshot.
        self._saved: Collection[str] = ()
        #: Number of reports of changed state: in all, at the newest capture, and at the last committed one.
        self._changes = self._captured_changes = self._saved_changes = 0
        #: Time before which no other snapshot is begun; the number of attempts that failed since the last snapshot; the
        #: time to the next attempt, if the newest one has just failed.
        self._not_before_s, self._failures = -math.inf, 0
        self._retry_s: float | None = None
        #: Tasks that have yet to read, or with `_is_setting` to set, the state of the snapshot; None while none does.
        self._loading: set[str] | None = None
        self._is_setting, self._loading_s = False, math.inf
        #: Why lost state cannot be restored; empty if it can, or if none is lost.
        self._hopeless = ""
        self._missing_since_s: float | None = None
        #: Requests that wait for recovery.
        self._asks: list[int] = []
        #: Tasks with parts of a resumed snapshot that are not expected in this cluster.
        self._unexpected: tuple[str, ...] = ()
        #: The snapshot that the tasks capture or write.
        self._making: Snapshot | None = None
        #: Tasks that have announced their leave, and their requests; None for one that is answered.
        self._leaving: dict[str, int | None] = {}
        #: Whether a step may have begun since the capture for a leave: a task has joined again, and was not held back.
        self._is_broken = False

    @property
    def _is_returning(self) -> bool:
        return self._loading is not None or self._pauses.has_request(_RETURN)

    @property
    def resumed(self) -> int:
        """Number of the snapshot of an earlier cluster that this one resumes; 0 if there is none."""
        return self._counted.resumed

    @property
    def undone(self) -> int:
        """Number of returns to a snapshot that have undone steps."""
        return self._counted.undone

    # Events.

    def start(self, at_s: float, jobs: Mapping[str, int]) -> list[Command]:
        """The coordinator has started, and expects this many tasks of each job, or any if there is none."""
        if not self._counted.is_resuming or self._committed is None:
            return []
        number, age_s = self._committed.number, at_s - self._committed.at_s
        if jobs:
            expected = {task_name(job, index) for job, count in jobs.items() for index in range(count)}
            self._unexpected = tuple(task for task in self._committed.tasks if task not in expected)
        done, where = self._committed.ledger.steps_done, ", ".join(map(short_task_name, self._committed.tasks))
        made = f"made {age_s:.0f} s before the last record of that cluster, with {done} steps done"
        return [Log(f"resuming snapshot {number}, {made}; {where} load it when all have joined")]

    def tick(self, at_s: float) -> list[Command]:
        """Begin a snapshot if it is time; end one, or a return, that takes too long. `go_on` must follow."""
        if self._loading and at_s - self._loading_s > LOAD_S:
            late_tasks = ", ".join(map(short_task_name, sorted(self._loading)))
            return self._give_up(f"{late_tasks} did not return to the snapshot within {LOAD_S:g} s")
        if (late := self._late(at_s)) is not None:
            if self._phase is _Phase.HOLDING:
                return [Log(late), *self._release()]
            return self._abandon(late, least_s=AFTER_PAUSE_S if self._phase is _Phase.PAUSING else 0.0)
        if not self._may_begin():
            return []
        names = self._directory.names()
        # New state is saved immediately: a task could not return to a snapshot without it.
        is_new = names != self._saved or self._changes > self._saved_changes
        if at_s >= self._not_before_s and (is_new or at_s - self._began_s >= self._every_s):
            self._begin(at_s)
        return []

    def _may_begin(self) -> bool:
        """Whether a snapshot can begin now."""
        is_ready = self._every_s and self._phase is _Phase.IDLE and not self._is_returning
        if not is_ready or self._counted.is_resuming or not self._directory.names():
            return False
        return not self._directory.lost() and not self._members.away()

    def _begin(self, at_s: float) -> None:
        self._phase, self._began_s, self._phase_s = _Phase.PAUSING, at_s, at_s
        self._pauses.ask(_SNAPSHOT)

    def _late(self, at_s: float) -> str | None:
        """Why the snapshot that is being made takes too long; None if it does not."""
        # A task that leaves waits as long as it can: it ends the attempt itself, as it leaves.
        pause_s = math.inf if self._leaving else PAUSE_S
        tasks, limit_s, what = {
            _Phase.PAUSING: (self._pauses.waits_for, pause_s, "still runs a step after"),
            _Phase.CAPTURING: (self._uncaptured, CAPTURE_S, "did not capture its state within"),
            _Phase.WRITING: (self._unwritten, WRITE_S, "did not write its part within"),
            _Phase.HOLDING: (self._leaving, RETURN_S, "announced to leave, and did not come back within"),
        }.get(self._phase, ((), math.inf, ""))
        if at_s - self._phase_s <= limit_s:
            return None
        return f"{', '.join(map(short_task_name, sorted(tasks))) or 'a worker'} {what} {limit_s:g} s"

    def changed(self) -> None:
        """State was changed that no step changes again, by `dflow.restore` or the end of a queue's data."""
        self._changes += 1

    def captured(self, report: StateCaptured) -> None:
        """A task has captured its part. `go_on` must follow."""
        if self._phase is _Phase.CAPTURING and self._making is not None and report.number == self._making.number:
            self._uncaptured.discard(report.task)
            self._captured.update(report.keys)

    def written(self, report: StateWritten) -> list[Command]:
        """A task has written its part, or failed. `go_on` must follow."""
        if self._making is None or report.number != self._making.number:
            return []
        if report.failure:
            return self._abandon(f"{short_task_name(report.task)}: {report.failure}")
        self._unwritten.discard(report.task)
        self._reports.append(report)
        return []

    def loaded(self, report: StateLoaded) -> list[Command]:
        """A task has loaded the snapshot, or failed. `go_on` must follow."""
        if self._loading is None or (report.epoch, report.is_set) != (self._counted.epoch, self._is_setting):
            return []
        if not report.failure:
            self._loading.discard(report.task)
            return []
        return self._give_up(f"{short_task_name(report.task)} could not return to the snapshot: {report.failure}")

    def _give_up(self, why: str) -> list[Command]:
        """End a return to a snapshot that failed."""
        self._loading, self._is_setting, self._hopeless = None, False, why
        return [Log(why), *self._release()]

    def joined(self, task: str, *, is_known: bool) -> list[Command]:
        """A task has joined, as the process `is_known` from before or as another one. `go_on` must follow."""
        self._hopeless = ""
        self._is_broken = self._is_broken or is_known
        if self._loading is not None and self._committed is not None and task in self._committed.tasks:
            self._loading.add(task)
            return self._load([task])
        return self._left_or_replaced(task, is_known=is_known)

    def left(self, task: str) -> list[Command]:
        """A task has left. `go_on` must follow."""
        if self._phase is not _Phase.HOLDING:
            self._leaving.pop(task, None)
        if self._loading is not None and self._committed is not None and task in self._committed.tasks:
            self._loading.add(task)  # its next process has to load
        return self._left_or_replaced(task)

    def _left_or_replaced(self, task: str, *, is_known: bool = False) -> list[Command]:
        is_part = self._making is not None and task in self._making.tasks
        is_part = is_part or (is_known and self._phase is _Phase.CAPTURING)  # it may have begun a step
        return self._abandon(f"{short_task_name(task)} has left or joined again") if is_part else []

    def await_recovery(self, ask: int, request: AwaitRecovery) -> list[Command]:
        """Answer when no state is lost. `go_on` must follow."""
        is_restored = self._is_returning or (self._directory.lost() and not self._why_not())
        if request.is_joining and not is_restored and not self._counted.is_resuming:
            return [SendReply(ask, self._recovered())]
        self._asks.append(ask)
        return []

    def announce_leave(self, task: str, ask: int) -> list[Command]:
        """Answer when a snapshot has all state of a task that is going to leave. `go_on` must follow."""
        if task not in self._directory.holders() or self._is_returning or self._phase is _Phase.HOLDING:
            # Nothing has changed since the last snapshot, or what has is undone by the return.
            if self._phase is _Phase.HOLDING:
                self._leaving[task] = None
            return [SendReply(ask, Ok())]
        if why := self._hopeless or self._why_not_saved():
            return [SendReply(ask, Failure("TaskLost", why))]
        is_too_late = self._phase is _Phase.WRITING and not self._leaving  # steps run again
        commands = self._abandon("") if is_too_late else []
        self._leaving[task], self._not_before_s, self._retry_s = ask, -math.inf, None
        return commands

    def _why_not_saved(self) -> str:
        return "" if self._every_s else NO_SNAPSHOTS

    # Decisions.

    def go_on(self, at_s: float) -> list[Command]:
        """Carry out the decisions that follow from an event."""
        commands = [*self._snapshot_on(at_s), *self._return_on(at_s), *self._answered(at_s)]
        if self._retry_s is not None:
            self._not_before_s, self._retry_s = at_s + self._retry_s, None
        return commands

    def _snapshot_on(self, at_s: float) -> list[Command]:
        commands: list[Command] = []
        live = self._members.connections()
        if self._leaving and at_s >= self._not_before_s and self._may_begin():
            self._begin(at_s)
        if self._phase is _Phase.PAUSING and self._pauses.reached == _SNAPSHOT:
            tasks = self._directory.holders()
            if self._directory.lost() or any(live.get(task) is None for task in tasks):
                return self._abandon("")
            self._counted = msgspec.structs.replace(self._counted, number=self._counted.number + 1)
            self._records.put(EPOCH, self._counted)
            self._making = Snapshot(
                self._counted.number,
                tasks,
                self._directory.names(),
                self._ledger.copy(),
                at_s,
                self._directory.saved(),
                self._members.identity.cluster,
            )
            self._is_broken = False
            self._uncaptured, self._unwritten, self._captured = {*tasks}, {*tasks}, set()
            self._reports = []
            self._captured_changes = self._changes
            self._phase, self._phase_s = _Phase.CAPTURING, at_s
            committed = 0 if self._committed is None else self._committed.number
            commands.append(self._to(tasks, CaptureState(self._making.number, committed, self._making.cluster)))
        if self._phase is _Phase.CAPTURING and not self._uncaptured and self._making is not None:
            if missing := [name for name in self._making.names if name not in self._captured]:
                commands += self._abandon("")  # a placed variable is not created yet
                if self._failures == QUIET_FAILURES:
                    names = ", ".join(missing[:MOST_NAMED])
                    commands.append(Log(f"no snapshot can be made: {names} was placed, and is not created"))
                return commands
            self._phase, self._phase_s = _Phase.WRITING, at_s
            if not self._leaving:
                commands += self._pauses.withdraw(_SNAPSHOT, live)
        if self._phase is _Phase.WRITING and not self._unwritten and self._making is not None:
            if self._committed is None:
                commands.append(Log(f"the first snapshot, of {len(self._making.names)} variables, is complete"))
            self._phase, self._committed, self._making, self._failures = _Phase.IDLE, self._making, None, 0
            self._saved = self._committed.names
            self._saved_changes = self._captured_changes
            self._records.put(SNAPSHOT, self._committed)
            self.size = _size(self._committed.number, self._reports)
            commands.append(self._to(self._committed.tasks, SnapshotCommitted(self._committed.number)))
            if self._leaving:
                self._phase, self._phase_s = _Phase.HOLDING, at_s
                names = ", ".join(map(short_task_name, sorted(self._leaving)))
                commands.append(Log(f"{names} leaves: snapshot {self._committed.number} has all state; steps wait"))
                commands += self._answer_leaving(Ok())
        return commands

    def _answer_leaving(self, answer: Ok | Failure) -> list[Command]:
        commands: list[Command] = [SendReply(ask, answer) for ask in self._leaving.values() if ask is not None]
        self._leaving = dict.fromkeys(self._leaving)
        return commands

    def _release(self) -> list[Command]:
        """End the pauses of this file. Tasks whose announced leave is not answered wait for the next snapshot."""
        self._phase, self._making = _Phase.IDLE, None
        self._leaving = {task: ask for task, ask in self._leaving.items() if ask is not None}
        live = self._members.connections()
        return [*self._pauses.withdraw(_RETURN, live), *self._pauses.withdraw(_SNAPSHOT, live)]

    def _abandon(self, why: str, least_s: float = 0.0) -> list[Command]:
        """End the snapshot that is being made; the last committed one stays. `go_on` must follow.

        why      empty if nothing is wrong
        least_s  least time to the next attempt, in s
        """
        commands: list[Command] = [*self._pauses.withdraw(_SNAPSHOT, self._members.connections())]
        if self._phase is not _Phase.IDLE:
            self._retry_s = max(least_s, min(self._every_s, RETRY_S * 2**self._failures))
            self._failures += 1
        if why:
            commands = [Log(f"a snapshot is abandoned, and no other begins for {self._retry_s:g} s: {why}"), *commands]
            commands += self._answer_leaving(Failure("TaskLost", f"no snapshot could be made: {why}"))
            self._leaving = {}
        self._phase, self._making = _Phase.IDLE, None
        return commands

    def _return_on(self, at_s: float) -> list[Command]:
        commands: list[Command] = []
        lost = self._directory.lost()
        if lost and not self._is_returning and not self._hopeless:
            self._hopeless = self._why_not()
            if not self._hopeless:
                # The pause for a task that has left becomes that of the return.
                commands = [] if self._phase is _Phase.HOLDING else self._abandon("")
                self._pauses.ask(_RETURN, is_urgent=True)
            elif self._every_s:
                commands = [Log(f"{', '.join(lost[:MOST_NAMED])} cannot be restored: {self._hopeless}")]
                commands += self._release() if self._phase is _Phase.HOLDING else []
        if not lost and not self._is_returning:
            self._hopeless = ""
        is_paused = self._pauses.reached == _RETURN or (self._phase is _Phase.HOLDING and self._is_returning)
        if self._loading is None and is_paused and self._committed is not None:
            live = self._members.connections()
            if any(live.get(task) is None for task in self._committed.tasks):
                return commands  # it is started again, or declared dead and replaced
            self._counted = msgspec.structs.replace(self._counted, epoch=self._counted.epoch + 1)
            self._records.put(EPOCH, self._counted)
            self._loading, self._is_setting, self._loading_s = {*self._committed.tasks}, False, at_s
            commands += self._load(self._committed.tasks)
        if self._loading is not None and not self._loading and self._committed is not None:
            if self._is_setting:
                return [*commands, *self._returned()]
            self._loading, self._is_setting, self._loading_s = {*self._committed.tasks}, True, at_s
            commands += self._load(self._committed.tasks)
        return commands

    def _returned(self) -> list[Command]:
        assert self._committed is not None
        self._loading, self._is_setting = None, False
        redone = 0
        if self._phase is not _Phase.HOLDING or self._is_broken:
            redone = self._ledger.steps_done - self._committed.ledger.steps_done
            self._ledger.return_to(self._committed.ledger)
            self._counted = msgspec.structs.replace(self._counted, undone=self._counted.undone + 1)
        self._counted = msgspec.structs.replace(self._counted, is_resuming=False)
        self._records.put(EPOCH, self._counted)
        self._directory.restored(self._committed.names)
        self._saved = self._directory.names()
        where = ", ".join(map(short_task_name, self._committed.tasks))
        live = self._members.connections()
        return [
            Log(f"{where} returned to snapshot {self._committed.number}; {max(0, redone)} steps are done again"),
            *map(Log, self._ledger.take_news()),
            Broadcast(_peers(live.values()), StateRestored(self._counted.epoch, self._counted.undone)),
            *self._release(),
        ]

    def _load(self, tasks: Collection[str]) -> list[Command]:
        assert self._committed is not None
        snapshot, known = self._committed, {*self._directory.names()}
        forgotten = tuple(name for name in snapshot.names if name not in known)
        numbers, reopens = (snapshot.number, self._counted.epoch), self._counted.is_resuming
        message = LoadState(*numbers, self._is_setting, snapshot.cluster, forgotten, reopens)
        return [self._to(tasks, message)]

    def _why_not(self) -> str:
        """Why lost state cannot be restored; empty if it can."""
        if not self._every_s:
            return NO_SNAPSHOTS
        if self._committed is None:
            return "it was lost before the first snapshot was complete"
        if self._unexpected:
            names = ", ".join(map(short_task_name, self._unexpected))
            return f"snapshot {self._committed.number} has state of {names}: expect as many tasks as it was made with"
        # Also state that is not lost: steps done again would change it twice.
        missing = sorted({*self._directory.names()} - {*self._committed.names})
        return f"snapshot {self._committed.number} has no {', '.join(missing[:MOST_NAMED])}" if missing else ""

    def _answered(self, at_s: float) -> list[Command]:
        """Answer the requests that wait, if their answer is known."""
        is_held = self._phase is _Phase.HOLDING
        if not self._asks and not is_held and self._missing_since_s is None:
            return []
        away = [task for task in self._directory.holders() if self._members.connections().get(task) is None]
        if self._hopeless or not self._every_s:
            why, self._missing_since_s = self._hopeless or self._why_not(), None
            return self._settle(Failure("TaskLost", f"the lost state is not restored: {why}"))
        if away or is_held or self._is_returning or self._directory.lost():
            # From the time of a leave on, also if the steps that wait fail later.
            since_s = self._phase_s if is_held else at_s
            self._missing_since_s = since_s if self._missing_since_s is None else self._missing_since_s
            if at_s - self._missing_since_s < RETURN_S or not away:
                return []
            names = ", ".join(map(short_task_name, away))
            return self._settle(Failure("TaskLost", f"{names} did not come back within {RETURN_S:g} s"))
        self._missing_since_s = None
        return self._settle(self._recovered())

    def _recovered(self) -> Recovered:
        return Recovered(self._counted.epoch, self._counted.undone)

    def _settle(self, answer: Recovered | Failure) -> list[Command]:
        asks, self._asks = self._asks, []
        return [SendReply(ask, answer) for ask in asks]

    def _to(self, tasks: Collection[str], message: CaptureState | LoadState | SnapshotCommitted) -> Broadcast:
        live = self._members.connections()
        return Broadcast(_peers(live.get(task) for task in tasks), message)


def _size(number: int, reports: Collection[StateWritten]) -> SnapshotSize:
    written = sum(report.written_bytes for report in reports)
    return SnapshotSize(number, written, sum(report.full_bytes for report in reports))


def _peers(found: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(peer for peer in found if peer is not None)
