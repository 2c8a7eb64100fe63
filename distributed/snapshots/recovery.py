"""Snapshots of the state of all tasks, and the return of all tasks to the newest one when a task has lost its state.

Why: a parameter task that is started again is empty. All tasks that hold state then return together to one moment, with
the ledger of the runs' steps, and training goes on from there: steps done since are done again. A pure function of
events; the tasks capture, write and load.

Invariants:
- a snapshot is committed when each task that holds state has written its part, captured in one pause of the steps; the
  record of it has the ledger of that pause. An uncommitted snapshot is never loaded;
- tasks return to a snapshot in a pause of the steps, which ends when all of them have set its state, so that no step
  sees a mixture; none sets it before each has read and checked its part;
- before the first snapshot is complete, tasks return to the beginning: no state, and no step done;
- state that the snapshot does not have was made later. It is freed on all tasks, and the workers make it again;
- a task that announces its leave is answered when a snapshot with its state is committed. The steps stay paused from
  its capture until all tasks have returned to it, so no step is lost or done again;
- a cluster that resumes the snapshot of an earlier one (`resumption.py`) loads it as if all tasks had lost their state;
- a request that waits for recovery is answered: when no state is lost, or with the reason why that cannot be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

import msgspec

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.coordinator.variable_directory import MOST_NAMED
from dflow.distributed.snapshots.recovery_waits import (
    AWAY,
    BUSY,
    PAUSING,
    RETURN_S,
    UNWRITTEN,
    RecoveryWaits,
    UnsavedChanges,
)
from dflow.distributed.snapshots.resumption import BEGINNING, EPOCH, SNAPSHOT, Epoch, Snapshot, newest_snapshot, resumed
from dflow.distributed.snapshots.return_attempt import ReturnAttempt
from dflow.distributed.snapshots.snapshot_attempt import SnapshotAttempt, overdue
from dflow.distributed.snapshots.snapshot_messages import (
    AnnounceLeave,
    AwaitRecovery,
    CaptureState,
    LoadState,
    Recovered,
    SaveChanges,
    Saved,
    SnapshotCommitted,
    StateCaptured,
    StateLoaded,
    StateRestored,
    StateWritten,
)
from dflow.distributed.snapshots.snapshot_schedule import AFTER_PAUSE_S, PAUSE_S, SnapshotSchedule
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.status import SnapshotSize
from dflow.tracing.devices.task_name import short_task_name, task_name

NO_SNAPSHOTS = "no snapshots are made: start the cluster with --snapshots DIR"
#: In place of a task's name: the requests of this file for a pause.
_SNAPSHOT, _RETURN = "a snapshot", "the return to a snapshot"


class Recovery(CoordinatorPart):
    """The snapshots of one cluster; the newest committed one is the last."""

    requests: ClassVar[Requests[Recovery]] = HandlerTable()
    notices: ClassVar[Notices[Recovery]] = HandlerTable()
    may_be_lost = (EPOCH, SNAPSHOT)
    tells: ClassVar = {CaptureState: EPOCH, LoadState: EPOCH, SnapshotCommitted: SNAPSHOT, Saved: SNAPSHOT}
    moments: ClassVar = {CaptureState: "capture", LoadState: "restore", SNAPSHOT: "commit"}

    @classmethod
    def of(cls, core: CoordinatorCore) -> Recovery:
        """Make the part."""
        return cls(core)

    def __init__(self, core: CoordinatorCore) -> None:
        self._core, self._members, self._directory = core, core.members, core.directory
        self._records, self._pauses, self._watch = core.records, core.part(StepPauses), core.part(ProgressWatch)
        self._schedule = SnapshotSchedule(core.settings.snapshot_every_s)
        self._counted = core.records.load_one(EPOCH, Epoch())
        self._committed = core.records.load_one(SNAPSHOT, BEGINNING)
        self._directory.resumed = self._counted.resumed
        #: Bytes of the newest committed snapshot.
        self.size: SnapshotSize | None = None
        #: Time since which a pause for the next snapshot is awaited; the attempt at it, when the pause is reached.
        self._pausing_s: float | None = None
        self._attempt: SnapshotAttempt | None = None
        #: Tasks that have announced their leave, and their requests; None for one that is answered.
        self._leaving: dict[str, int | None] = {}
        #: Time since which the steps stay paused until tasks that leave are back.
        self._holding_s: float | None = None
        #: Whether a step may have begun since the capture for a leave: a task has joined again, and was not held back.
        self._is_broken = False
        #: The return to the committed snapshot, when its pause is reached.
        self._return: ReturnAttempt | None = None
        #: Why lost state cannot be restored; empty if it can, or if none is lost.
        self._hopeless = ""
        #: Tasks with parts of a resumed snapshot that are not expected in this cluster.
        self._unexpected: tuple[str, ...] = ()
        #: Requests that wait for recovery.
        self._waits = RecoveryWaits()
        #: Requests that wait for a snapshot with a change of state.
        self._unsaved = UnsavedChanges()

    @property
    def _is_returning(self) -> bool:
        return self._return is not None or self._pauses.has_request(_RETURN)

    @property
    def is_idle(self) -> bool:
        """Whether no snapshot is being made, and no steps are paused for tasks that leave."""
        return self._pausing_s is None and self._attempt is None and self._holding_s is None

    @property
    def undone(self) -> int:
        """Number of returns to a snapshot that have undone steps."""
        return self._counted.undone

    # Events.

    @classmethod
    def inherited(cls, rows: Mapping[str, bytes], parts: Sequence[type[CoordinatorPart]]) -> Mapping[str, bytes]:
        """Return the records of a cluster that goes on from the newest snapshot."""
        return resumed(rows, newest_snapshot(rows), parts)

    def on_start(self, at_s: float, core: CoordinatorCore) -> list[Command]:
        """Log the snapshot that the cluster goes on from, if there is one."""
        if not self._counted.is_resuming:
            return []
        if core.jobs:
            expected = {task_name(job, index) for job, count in core.jobs.items() for index in range(count)}
            self._unexpected = tuple(task for task in self._committed.tasks if task not in expected)
        return [Log(f"resuming {self._committed.described(at_s)} load it when all have joined")]

    def status(self, core: CoordinatorCore) -> Mapping[str, SnapshotSize | None]:
        """Return the size of the newest snapshot."""
        return {"snapshot": self.size}

    def on_tick(self, at_s: float, core: CoordinatorCore) -> list[Command]:
        """Begin a snapshot if it is time; end one, or a return, that takes too long."""
        if self._return is not None and (late := self._return.late(at_s)):
            return self._give_up(late)
        if late := self._late(at_s):
            if self._holding_s is not None:
                return [Log(late), *self._release()]
            return self._abandon(late, least_s=AFTER_PAUSE_S if self._attempt is None else 0.0)
        if self._may_begin() and self._schedule.is_due(at_s, self._directory.names()):
            self._begin(at_s)
        return []

    def _may_begin(self) -> bool:
        """Whether a snapshot can begin now."""
        is_ready = self._schedule.every_s and self.is_idle and not self._is_returning and self._core.is_durable
        if not is_ready or self._counted.is_resuming or not self._directory.names():
            return False
        return not self._directory.lost() and not self._members.away()

    def _begin(self, at_s: float) -> None:
        self._schedule.begin(at_s)
        self._pausing_s = at_s
        self._pauses.ask(_SNAPSHOT)

    def _late(self, at_s: float) -> str:
        """Why the snapshot that is being made, or a task that leaves, takes too long; empty if it does not."""
        if self._attempt is not None:
            return self._attempt.late(at_s)
        # A task that leaves waits as long as it can: it ends the attempt itself, as it leaves.
        if self._pausing_s is not None and not self._leaving and at_s - self._pausing_s > PAUSE_S:
            return overdue(self._pauses.waits_for, BUSY, PAUSE_S, partial(self._watch.doing, members=self._members))
        if self._holding_s is not None and at_s - self._holding_s > RETURN_S:
            return overdue(self._leaving, "announced to leave, and did not come back within", RETURN_S)
        return ""

    @requests.handles(SaveChanges)
    def _save_changes(self, request: SaveChanges, received: Received) -> Sequence[Command]:
        """Answer when a snapshot has a change that no step makes again, or when the time of the request is over."""
        self._schedule.changes += 1
        self._unsaved.add(received.ask, self._schedule.changes, received.at_s + request.wait_s)
        return []

    @notices.handles(StateCaptured)
    def _captured(self, report: StateCaptured, received: Received) -> Sequence[Command]:
        if self._attempt is not None:
            self._attempt.captured(report)
        return []

    @notices.handles(StateWritten)
    def _written(self, report: StateWritten, received: Received) -> Sequence[Command]:
        return self._take_written(report)

    def _take_written(self, report: StateWritten) -> Sequence[Command]:
        if self._attempt is None or report.number != self._attempt.snapshot.number:
            return []
        if report.failure:
            return self._abandon(f"{short_task_name(report.task)}: {report.failure}")
        self._attempt.written(report)
        return []

    @notices.handles(StateLoaded)
    def _loaded(self, report: StateLoaded, received: Received) -> Sequence[Command]:
        if self._return is None or not self._return.expects(report):
            return []
        if report.failure:
            return self._give_up(f"{short_task_name(report.task)} could not return to the snapshot: {report.failure}")
        self._return.loaded(report.task)
        return []

    def _give_up(self, why: str) -> list[Command]:
        """End a return to a snapshot that failed."""
        self._return, self._hopeless = None, why
        return [Log(why), *self._release()]

    def on_join(self, task: str, peer: int, is_known: bool, core: CoordinatorCore) -> list[Command]:
        """Have a task that joins during a return load the snapshot too."""
        self._hopeless = ""
        self._is_broken = self._is_broken or is_known
        if self._return is not None and self._return.repeat(task):
            if self._return.is_setting and not is_known:
                # Workers may have used tasks that had set their state, and made there and here what is lost here now.
                self._return = None
                return []
            return self._load([task])
        return self._left_or_replaced(task, is_known=is_known)

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float, core: CoordinatorCore) -> list[Command]:
        """End what tasks that have left took part in."""
        return [command for one in left for command in self._left(one.task)]

    def _left(self, task: str) -> list[Command]:
        if self._holding_s is None:
            self._leaving.pop(task, None)
        if self._return is not None:
            self._return.repeat(task)
        return self._left_or_replaced(task)

    def _left_or_replaced(self, task: str, *, is_known: bool = False) -> list[Command]:
        if self._attempt is None:
            return []
        may_have_begun_a_step = is_known and not self._attempt.is_writing
        if task in self._attempt.snapshot.tasks or may_have_begun_a_step:
            return self._abandon(f"{short_task_name(task)} has left or joined again")
        return []

    @requests.handles(AwaitRecovery)
    def _await(self, request: AwaitRecovery, received: Received) -> Sequence[Command]:
        """Answer when no state is lost."""
        is_restored = self._is_returning or (self._directory.lost() and not self._why_not())
        if request.is_joining and not is_restored and not self._counted.is_resuming:
            return [SendReply(received.ask, self._recovered())]
        self._waits.add(received.ask)
        return []

    @requests.handles(AnnounceLeave)
    def _announce_leave(self, request: AnnounceLeave, received: Received) -> Sequence[Command]:
        """Answer when a snapshot has all state of a task that is going to leave."""
        task, ask = request.task, received.ask
        is_held = self._holding_s is not None
        if task not in self._directory.holders() or self._is_returning or is_held:
            # Nothing has changed since the last snapshot, or what has is undone by the return.
            if is_held:
                self._leaving[task] = None
            return [SendReply(ask, Ok())]
        if why := self._hopeless or ("" if self._schedule.every_s else NO_SNAPSHOTS):
            return [SendReply(ask, Failure("TaskLost", why))]
        runs_again = self._attempt is not None and self._attempt.is_writing and not self._leaving
        commands = self._abandon("") if runs_again else []
        self._leaving[task] = ask
        self._schedule.allow()
        return commands

    # Decisions.

    def after_event(self, at_s: float, core: CoordinatorCore) -> list[Command]:
        """Use the pause that is reached, and begin the next one."""
        commands = [*self._snapshot_on(at_s), *self._return_on(at_s), *self._answered(at_s)]
        saved = self._schedule.saved_changes if self._schedule.every_s else self._schedule.changes
        commands += self._unsaved.settle(at_s, saved)
        self._schedule.go_on(at_s)
        return [*commands, *self._pauses.after_event(at_s, core)]

    def _snapshot_on(self, at_s: float) -> list[Command]:
        """Go on with the snapshot that is being made, as far as it goes."""
        commands: list[Command] = []
        if not self._core.is_durable and (self._attempt is not None or self._pausing_s is not None):
            return self._abandon("the coordinator's state cannot be written")
        if self._leaving and self._schedule.is_allowed(at_s) and self._may_begin():
            self._begin(at_s)
        if self._pausing_s is not None and self._pauses.reached == _SNAPSHOT:
            commands += self._capture(at_s)
        if self._attempt is not None and self._attempt.is_captured and not self._attempt.is_writing:
            commands += self._end_capture(self._attempt, at_s)
        if self._attempt is not None and self._attempt.is_written:
            commands += self._commit(self._attempt, at_s)
        return commands

    def _capture(self, at_s: float) -> list[Command]:
        tasks, live = self._directory.holders(), self._members.connections()
        if self._directory.lost() or any(live.get(task) is None for task in tasks):
            return self._abandon("")
        number, cluster = self._counted.number + 1, self._members.identity.cluster
        self._count(number=number)
        placed = self._directory.saved()
        names, copies, done = self._directory.names(), self._core.copies(), self._core.steps_done()
        snapshot = Snapshot(number, tasks, names, at_s, placed, cluster, copies, done)
        self._pausing_s, self._is_broken = None, False
        self._attempt = SnapshotAttempt(snapshot, at_s, self._schedule.changes)
        return [self._to(tasks, CaptureState(number, self._committed.number, cluster))]

    def _end_capture(self, attempt: SnapshotAttempt, at_s: float) -> list[Command]:
        if missing := attempt.missing:
            commands = self._abandon("")
            if why := self._schedule.lacking(missing, at_s):
                commands.append(Log(f"no snapshot can be made: {why}"))
            return commands
        attempt.begin_writing(at_s)
        return [] if self._leaving else [*self._pauses.withdraw(_SNAPSHOT, self._members.connections())]

    def _commit(self, attempt: SnapshotAttempt, at_s: float) -> list[Command]:
        commands: list[Command] = []
        if self._committed is BEGINNING:
            commands.append(Log(f"the first snapshot, of {len(attempt.snapshot.names)} variables, is complete"))
        self._attempt, self._committed, self.size = None, attempt.snapshot, attempt.size
        self._schedule.complete(self._committed.names, attempt.changes)
        self._records.put(SNAPSHOT, self._committed)
        # Also to workers: they need not make it again.
        commands.append(Broadcast(self._members.live_peers(), SnapshotCommitted(self._committed.number)))
        if self._leaving:
            self._holding_s = at_s
            names = ", ".join(map(short_task_name, sorted(self._leaving)))
            commands.append(Log(f"{names} leaves: snapshot {self._committed.number} has all state; steps wait"))
            commands += self._answer_leaving(Ok())
        return commands

    def _count(self, **changes: int | bool) -> None:
        """Change the record of returns and snapshots."""
        self._counted = msgspec.structs.replace(self._counted, **changes)
        self._records.put(EPOCH, self._counted)

    def _answer_leaving(self, answer: Ok | Failure) -> list[Command]:
        commands: list[Command] = [SendReply(ask, answer) for ask in self._leaving.values() if ask is not None]
        self._leaving = dict.fromkeys(self._leaving)
        return commands

    def _release(self) -> list[Command]:
        """End the pauses of this file. Tasks whose announced leave is not answered wait for the next snapshot."""
        self._pausing_s = self._attempt = self._holding_s = None
        self._leaving = {task: ask for task, ask in self._leaving.items() if ask is not None}
        live = self._members.connections()
        return [*self._pauses.withdraw(_RETURN, live), *self._pauses.withdraw(_SNAPSHOT, live)]

    def _abandon(self, why: str, least_s: float = 0.0) -> list[Command]:
        """End the snapshot that is being made; the last committed one stays. `go_on` must follow.

        why      empty if nothing is wrong
        least_s  least time to the next attempt, in s
        """
        commands: list[Command] = [*self._pauses.withdraw(_SNAPSHOT, self._members.connections())]
        retry_s = 0.0 if self.is_idle else self._schedule.failed(least_s)
        if why:
            commands = [Log(f"a snapshot is abandoned, and no other begins for {retry_s:g} s: {why}"), *commands]
            commands += self._answer_leaving(Failure("TaskLost", f"no snapshot could be made: {why}"))
            self._leaving = {}
        self._pausing_s = self._attempt = None
        return commands

    def _return_on(self, at_s: float) -> list[Command]:
        """Begin a return when state is lost, and go on with it, as far as it goes."""
        commands: list[Command] = []
        lost, is_held = self._directory.lost(), self._holding_s is not None
        if lost and not self._is_returning and not self._hopeless:
            self._hopeless = self._why_not()
            if not self._hopeless:
                # The pause for a task that has left becomes that of the return.
                commands = [] if is_held else self._abandon("")
                self._pauses.ask(_RETURN, is_urgent=True)
            elif self._schedule.every_s:
                why = f"{', '.join(lost[:MOST_NAMED])} cannot be restored: {self._hopeless}"
                commands = [Log(why), *self._unsaved.refuse(why)]
                commands += self._release() if is_held else []
        if not lost and not self._is_returning:
            self._hopeless = ""
        is_paused = self._pauses.reached == _RETURN or (is_held and self._is_returning)
        if self._return is None and is_paused and self._core.is_durable:
            tasks, live = self._returning_tasks(), self._members.connections()
            if any(live.get(task) is None for task in tasks):
                return commands  # it is started again, or declared dead and replaced
            self._count(epoch=self._counted.epoch + 1)
            self._return = ReturnAttempt(self._counted.epoch, tasks, at_s)
            commands += self._load(tasks)
        if self._return is not None and self._return.is_phase_over:
            if self._return.is_setting:
                return [*commands, *self._returned()]
            self._return.begin_setting(at_s)
            commands += self._load(self._return.tasks)
        return commands

    def _returning_tasks(self) -> tuple[str, ...]:
        """Return the tasks that have a part of the snapshot, or state that was made after it."""
        made = (info.task for info in self._directory.saved() if info.process)
        return tuple(dict.fromkeys([*self._committed.tasks, *made]))

    def _made_since(self) -> tuple[str, ...]:
        """Return the names of state that was made after the snapshot."""
        return tuple(name for name in self._directory.names() if name not in self._committed.names)

    def _returned(self) -> list[Command]:
        assert self._return is not None
        where = ", ".join(map(short_task_name, self._return.tasks))
        self._return = None
        redone, undone = 0, self._counted.undone
        if self._holding_s is None or self._is_broken:
            redone = self._core.return_to(self._committed.copies)
            undone += 1
        self._count(undone=undone, is_resuming=False)
        unsaved = self._made_since()
        for name in unsaved:
            self._directory.give_up(name)
        self._directory.restored(self._committed.names)
        self._schedule.returned(self._directory.names())
        which = "the beginning" if self._committed is BEGINNING else f"snapshot {self._committed.number}"
        what = f"{where} returned to {which}"
        made = f"; {len(unsaved)} variables and queues made since are made again" if unsaved else ""
        return [
            Log(f"{what}; {max(0, redone)} steps are done again{made}", "returned"),
            *self._unsaved.refuse(f"{what}, which was made before it"),
            Broadcast(self._members.live_peers(), StateRestored(self._counted.epoch, self._counted.undone)),
            *self._release(),
        ]

    def _load(self, tasks: Collection[str]) -> list[Command]:
        assert self._return is not None
        snapshot, known = self._committed, {*self._directory.names()}
        forgotten = tuple(name for name in snapshot.names if name not in known)
        numbers, reopens = (snapshot.number, self._counted.epoch), self._counted.is_resuming
        without = tuple(task for task in tasks if task not in snapshot.tasks)
        message = LoadState(
            *numbers, self._return.is_setting, snapshot.cluster, forgotten, reopens, self._made_since(), without
        )
        return [self._to(tasks, message)]

    def _why_not(self) -> str:
        """Why lost state cannot be restored; empty if it can."""
        if not self._schedule.every_s:
            return NO_SNAPSHOTS
        if self._unexpected:
            names = ", ".join(map(short_task_name, self._unexpected))
            return f"snapshot {self._committed.number} has state of {names}: expect as many tasks as it was made with"
        return ""

    def _answered(self, at_s: float) -> list[Command]:
        """Answer the requests that wait, if their answer is known."""
        if self._waits.is_idle and self._holding_s is None and not self._is_returning:
            return []
        away = [task for task in self._directory.holders() if self._members.connections().get(task) is None]
        if self._hopeless or not self._schedule.every_s:
            self._waits.go_on()
            why = self._hopeless or self._why_not()
            return self._waits.settle(Failure("TaskLost", f"the lost state is not restored: {why}"))
        if away:
            # From the time of a leave on, also if the steps that wait fail later.
            return self._waits.blocked(at_s, at_s if self._holding_s is None else self._holding_s, AWAY, away)
        is_reached = self._pauses.reached == _RETURN or self._holding_s is not None
        if self._is_returning and self._return is None and self._pauses.first and not is_reached:
            is_own = self._pauses.first == _RETURN
            what, tasks = (BUSY, self._pauses.waits_for) if is_own else (PAUSING, {self._pauses.first})
            commands = self._waits.blocked(at_s, at_s, what, tasks)
            return [*commands, *self._pauses.remind(self._members.connections())] if is_own and commands else commands
        if self._is_returning and self._return is None and not self._core.is_durable:
            return self._waits.blocked(at_s, at_s, UNWRITTEN, ["the coordinator"])
        self._waits.go_on()
        if self._holding_s is not None or self._is_returning or self._directory.lost():
            return []
        return self._waits.settle(self._recovered())

    def _recovered(self) -> Recovered:
        return Recovered(self._counted.epoch, self._counted.undone)

    def _to(self, tasks: Collection[str], message: CaptureState | LoadState) -> Broadcast:
        peers = self._members.connections()
        return Broadcast(tuple(peer for task in tasks if (peer := peers.get(task)) is not None), message)
