"""The return of all tasks to the newest snapshot when a task has lost its state.

Why: a parameter task that is started again is empty. All tasks that hold state then return together to one moment, with
the ledger of the runs' steps, and training goes on from there: steps done since are done again. A pure function of
events; the tasks read and set their parts.

Invariants:
- tasks return to a snapshot in a pause of the steps, which ends when all of them have set its state, so that no step
  sees a mixture; none sets it before each has read and checked its part;
- before the first snapshot is complete, tasks return to the beginning: no state, and no step done;
- state that the snapshot does not have was made later. It is freed on all tasks, and the workers make it again;
- a return to the snapshot of a task that has announced its leave undoes no step: none has begun since the capture;
- a cluster that resumes the snapshot of an earlier one (`resumption.py`) loads it as if all tasks had lost their state;
- a request that waits for recovery is answered: when no state is lost, or with the reason why that cannot be, or when
  the return has waited `RETURN_S` for one thing, such as a task's process, with the names of the tasks it waits for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import ClassVar

from dflow.distributed.coordinator.coordinator_events import Broadcast, Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorPart, Notices, Received, Requests
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator.variable_directory import MOST_NAMED
from dflow.distributed.snapshots.cluster_snapshots import (
    BUSY,
    NO_SNAPSHOTS,
    TO_RETURN,
    ClusterSnapshots,
    SnapshotPhase,
    overdue,
)
from dflow.distributed.snapshots.resumption import BEGINNING, EPOCH
from dflow.distributed.snapshots.snapshot_messages import (
    AnnounceLeave,
    AwaitRecovery,
    LoadState,
    Recovered,
    StateLoaded,
    StateRestored,
)
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.tracing.devices.task_name import short_task_name, task_name

#: Limit of the time until all tasks have read their parts, and until all have set their state, in s.
LOAD_S = 600.0
#: Longest wait for the process of a task that held state to be started again, and for the steps that run, in s.
RETURN_S = 300.0
#: Wait for steps that run after which the log names their tasks, in s.
NOTICE_S = 10.0
#: Longest time until a request is answered, in s: tasks are started again, the steps end, and the tasks read and set.
RECOVERY_S = 2 * RETURN_S + 2 * LOAD_S

AWAY, PAUSING = "did not come back within", "has paused the steps for"
UNWRITTEN = "could not write its state, with the number of the return, for"


class ReturnPhase(Enum):
    """Phase of the return to a snapshot.

    NONE      there is no return: no state is lost, or its loss is not known yet
    HOPELESS  lost state cannot be restored
    WAITING   the return waits for a pause of the steps, and for the next processes of tasks
    READING   all tasks read and check their parts
    SETTING   all tasks set the state that they have read
    """

    NONE, HOPELESS, WAITING, READING, SETTING = auto(), auto(), auto(), auto(), auto()


class Recovery(CoordinatorPart):
    """Returns all tasks of one cluster to its newest snapshot when one has lost its state."""

    requests: ClassVar[Requests[Recovery]] = HandlerTable()
    notices: ClassVar[Notices[Recovery]] = HandlerTable()
    tells: ClassVar = {LoadState: EPOCH}
    moments: ClassVar = {LoadState: "restore"}

    def __init__(self, core: CoordinatorCore) -> None:
        super().__init__(core)
        self._members, self._directory = core.members, core.directory
        self._pauses, self._snapshots = core.part(StepPauses), core.part(ClusterSnapshots)
        self.phase = ReturnPhase.NONE
        #: Why lost state cannot be restored, if it is hopeless.
        self.why = ""
        #: The tasks that return; the tasks that have yet to read or set their parts; and the beginning of this phase.
        self._tasks: tuple[str, ...] = ()
        self._left, self._since_s = set[str](), 0.0
        #: Tasks with parts of a resumed snapshot that are not expected in this cluster.
        self._unexpected: tuple[str, ...] = ()
        #: Requests that wait for recovery.
        self._asks: list[int] = []
        #: The thing that the return waits for, since when, and whether the log has it; empty while it waits for none.
        self._blocked_by, self._blocked_s, self._is_noted = "", 0.0, False

    @property
    def is_returning(self) -> bool:
        """Whether a return waits or is being carried out."""
        return self.phase not in (ReturnPhase.NONE, ReturnPhase.HOPELESS)

    @property
    def _is_loading(self) -> bool:
        return self.phase in (ReturnPhase.READING, ReturnPhase.SETTING)

    @property
    def _is_held(self) -> bool:
        """Whether the steps are paused for a task that leaves, and the snapshot for it is complete."""
        return self._snapshots.phase is SnapshotPhase.HOLDING

    # Events.

    def on_start(self, at_s: float) -> list[Command]:
        """Log the snapshot that the cluster resumes, if any, and find tasks in it that are not expected here."""
        committed = self._snapshots.committed
        if not self._snapshots.counted.is_resuming:
            return []
        if self._core.jobs:
            expected = {task_name(job, index) for job, count in self._core.jobs.items() for index in range(count)}
            self._unexpected = tuple(task for task in committed.tasks if task not in expected)
        return [Log(f"resuming {committed.described(at_s)} load it when all have joined")]

    def on_tick(self, at_s: float) -> list[Command]:
        """Abandon a return whose tasks take longer than LOAD_S to read or set their parts.

        End the pause for a task that announced to leave and did not come back within RETURN_S.
        """
        if self._is_loading:
            late = self._left and at_s - self._since_s > LOAD_S
            return self._give_up(overdue(self._left, "did not return to the snapshot within", LOAD_S)) if late else []
        if self._is_held and at_s - self._snapshots.since_s > RETURN_S:
            text = overdue(self._snapshots.leaving, "announced to leave, and did not come back within", RETURN_S)
            return [Log(text), *self._release(ReturnPhase.NONE)]
        return []

    @notices.handles(StateLoaded)
    def _loaded(self, report: StateLoaded, received: Received) -> Sequence[Command]:
        is_set = self.phase is ReturnPhase.SETTING
        if not self._is_loading or (report.epoch, report.is_set) != (self._snapshots.counted.epoch, is_set):
            return []
        if report.failure:
            return self._give_up(f"{short_task_name(report.task)} could not return to the snapshot: {report.failure}")
        self._left.discard(report.task)
        return []

    def _give_up(self, why: str) -> list[Command]:
        self.why = why
        return [Log(why), *self._release(ReturnPhase.HOPELESS)]

    def on_join(self, task: str, peer: int, is_known: bool, at_s: float) -> list[Command]:
        """Have a task that joins read its part for the present return, if it takes part in it.

        A new process in the phase SETTING begins the return again. Any join lets a return that has failed be tried
        again, if lost state can be restored at all.
        """
        if self.phase is ReturnPhase.HOPELESS and not self._why_not():
            self.phase = ReturnPhase.NONE
        if not self._repeat(task):
            return []
        if self.phase is ReturnPhase.SETTING and not is_known:
            # Workers may have used tasks that had set their state, and made there and here what is lost here now.
            self.phase = ReturnPhase.WAITING
            return []
        return self._load([task])

    def on_leave(self, left: Sequence[ReleaseTask], at_s: float) -> list[Command]:
        """If a task that has left is in the present return, wait for its next process."""
        for one in left:
            self._repeat(one.task)
        return []

    def _repeat(self, task: str) -> bool:
        """If the task is in the present return, expect it to read or set its part again; return whether it is."""
        is_in = self._is_loading and task in self._tasks
        if is_in:
            self._left.add(task)
        return is_in

    @requests.handles(AwaitRecovery)
    def _await(self, request: AwaitRecovery, received: Received) -> Sequence[Command]:
        """Answer when no state is lost, or why it is not restored. A task that joins waits only if a return is due."""
        is_restored = self.is_returning or (self._directory.lost() and not self._why_not())
        if request.is_joining and not is_restored and not self._snapshots.counted.is_resuming:
            return [SendReply(received.ask, self._recovered())]
        self._asks.append(received.ask)
        return []

    @requests.handles(AnnounceLeave)
    def _announce_leave(self, request: AnnounceLeave, received: Received) -> Sequence[Command]:
        """Answer when a snapshot has all state of a task that is going to leave.

        The answer is immediate if the task holds no state or tasks return, and TaskLost if lost state is not restored.
        """
        if not self._is_held:
            if request.task not in self._directory.holders() or self.is_returning:
                return [SendReply(received.ask, Ok())]  # it holds no state, or the return undoes what has changed
            if self.phase is ReturnPhase.HOPELESS:
                return [SendReply(received.ask, Failure("TaskLost", self.why))]
        return self._snapshots.announce_leave(request.task, received)

    # Decisions.

    def after_event(self, at_s: float) -> list[Command]:
        """Begin a return when state is lost, or go on with it; answer requests for recovery; go on with the pauses."""
        commands = [*self._go_on(at_s), *self._answered(at_s)]
        # This part and `ClusterSnapshots` have asked for pauses and ended some in this event.
        return [*commands, *self._pauses.after_event(at_s)]

    def _go_on(self, at_s: float) -> list[Command]:
        commands: list[Command] = []
        lost = self._directory.lost()
        if lost and self.phase is ReturnPhase.NONE:
            commands += self._lost(lost, at_s)
        elif not lost and self.phase is ReturnPhase.HOPELESS:
            self.phase = ReturnPhase.NONE
        is_paused = self._pauses.reached == TO_RETURN or self._is_held
        if self.phase is ReturnPhase.WAITING and is_paused and self._core.is_durable:
            # Those that have a part of the snapshot, or state that was made after it.
            made = (info.task for info in self._directory.saved() if info.process)
            self._tasks = tuple(dict.fromkeys([*self._snapshots.committed.tasks, *made]))
            live = self._members.connections()
            if any(live.get(task) is None for task in self._tasks):
                return commands  # it is started again, or declared dead and replaced
            self._snapshots.count(epoch=self._snapshots.counted.epoch + 1)
            commands += self._all_are_to(ReturnPhase.READING, at_s)
        if self.phase is ReturnPhase.READING and not self._left:
            return [*commands, *self._all_are_to(ReturnPhase.SETTING, at_s)]
        return [*commands, *self._returned()] if self.phase is ReturnPhase.SETTING and not self._left else commands

    def _lost(self, lost: Sequence[str], at_s: float) -> list[Command]:
        """Ask for the pause of a return, as these names are lost, and abandon a snapshot that is being made.

        If they cannot be restored, set HOPELESS, log why, and refuse requests to save changes.
        """
        if why := self._why_not():
            self.phase, self.why = ReturnPhase.HOPELESS, why
            if why == NO_SNAPSHOTS:
                return []
            text = f"{', '.join(lost[:MOST_NAMED])} cannot be restored: {why}"
            commands = [Log(text), *self._snapshots.refuse_changes(text)]
            return [*commands, *(self._release(ReturnPhase.HOPELESS) if self._is_held else [])]
        # The pause for a task that has left becomes that of the return.
        commands = [] if self._is_held else self._snapshots.abandon(at_s)
        self.phase = ReturnPhase.WAITING
        self._pauses.ask(TO_RETURN, is_urgent=True)
        return commands

    def _all_are_to(self, what: ReturnPhase, at_s: float) -> list[Command]:
        """Enter the phase `what`: have all tasks that return read their parts, or set what they have read."""
        self.phase, self._left, self._since_s = what, {*self._tasks}, at_s
        return self._load(self._tasks)

    def _load(self, tasks: Collection[str]) -> list[Command]:
        snapshot, counted, known = self._snapshots.committed, self._snapshots.counted, {*self._directory.names()}
        message = LoadState(
            snapshot.number,
            counted.epoch,
            self.phase is ReturnPhase.SETTING,
            snapshot.cluster,
            forgotten=tuple(name for name in snapshot.names if name not in known),
            reopens=counted.is_resuming,
            unsaved=self._made_since(),
            without=tuple(task for task in tasks if task not in snapshot.tasks),
        )
        peers = self._members.connections()
        return [Broadcast(tuple(peer for task in tasks if (peer := peers.get(task)) is not None), message)]

    def _made_since(self) -> tuple[str, ...]:
        return tuple(name for name in self._directory.names() if name not in self._snapshots.committed.names)

    def _returned(self) -> list[Command]:
        committed, counted = self._snapshots.committed, self._snapshots.counted
        redone, undone = 0, counted.undone
        if not self._is_held or self._snapshots.is_broken:
            redone = self._core.return_to(committed.copies)
            undone += 1
        self._snapshots.count(undone=undone, is_resuming=False)
        unsaved = self._made_since()
        for name in unsaved:
            self._directory.give_up(name)
        self._directory.restored(committed.names)
        self._snapshots.schedule.returned(self._directory.names())
        where = ", ".join(map(short_task_name, self._tasks))
        which = "the beginning" if committed is BEGINNING else f"snapshot {committed.number}"
        what = f"{where} returned to {which}"
        made = f"; {len(unsaved)} variables and queues made since are made again" if unsaved else ""
        return [
            Log(f"{what}; {max(0, redone)} steps are done again{made}", "returned"),
            *self._snapshots.refuse_changes(f"{what}, which was made before it"),
            Broadcast(self._members.live_peers(), StateRestored(counted.epoch, undone)),
            *self._release(ReturnPhase.NONE),
        ]

    def _release(self, phase: ReturnPhase) -> list[Command]:
        """End the return with this phase, and the pauses for it and for a snapshot."""
        self.phase = phase
        return [*self._pauses.withdraw(TO_RETURN), *self._snapshots.release()]

    def _why_not(self) -> str:
        """Return why lost state cannot be restored; empty if it can."""
        if not self._core.settings.snapshot_every_s:
            return NO_SNAPSHOTS
        if self._unexpected:
            names, number = ", ".join(map(short_task_name, self._unexpected)), self._snapshots.committed.number
            return f"snapshot {number} has state of {names}: expect as many tasks as it was made with"
        return ""

    # Requests that wait for recovery.

    def _answered(self, at_s: float) -> list[Command]:
        """Answer the requests for recovery if the answer is known; else record, and perhaps log, why they wait."""
        is_held = self._is_held
        if not (self._asks or self._blocked_by or is_held or self.is_returning):
            return []
        if self.phase is ReturnPhase.HOPELESS or not self._core.settings.snapshot_every_s:
            self._blocked_by = ""
            is_lost = self.phase is ReturnPhase.HOPELESS
            why = self.why if is_lost else f"no task is known to have lost its state, and {NO_SNAPSHOTS}"
            return self._settle(Failure("TaskLost", f"the lost state is not restored: {why}"))
        if away := [task for task in self._directory.holders() if self._members.connections().get(task) is None]:
            # From the time of a leave on, also if the steps that wait fail later.
            return self._blocked(at_s, self._snapshots.since_s if is_held else at_s, AWAY, away)
        if self.phase is ReturnPhase.WAITING:
            first = self._pauses.first
            if first and not is_held and self._pauses.reached != TO_RETURN:
                if first != TO_RETURN:
                    return self._blocked(at_s, at_s, PAUSING, [first])
                commands = self._blocked(at_s, at_s, BUSY, self._pauses.waits_for)
                return [*commands, *self._pauses.remind()] if commands else []
            if not self._core.is_durable:
                return self._blocked(at_s, at_s, UNWRITTEN, ["the coordinator"])
        self._blocked_by = ""
        return [] if is_held or self.is_returning or self._directory.lost() else self._settle(self._recovered())

    def _blocked(self, at_s: float, since_s: float, what: str, tasks: Collection[str]) -> list[Command]:
        """Record that the return waits for tasks: log it after NOTICE_S, refuse requests for recovery after RETURN_S.

        since_s  beginning of the wait, if it is a new one
        what     verb and its object, as in `overdue`; a wait for tasks that are AWAY is not logged
        """
        if what != self._blocked_by:
            self._blocked_by, self._blocked_s, self._is_noted = what, since_s, False
        commands: list[Command] = []
        waited_s = at_s - self._blocked_s
        if what != AWAY and waited_s >= NOTICE_S and not self._is_noted:
            self._is_noted = True
            commands = [Log(f"the return to a snapshot waits: {overdue(tasks, what, NOTICE_S)}")]
        if waited_s >= RETURN_S:
            commands += self._settle(Failure("TaskLost", overdue(tasks, what, RETURN_S)))
        return commands

    def _settle(self, answer: Recovered | Failure) -> list[Command]:
        asks, self._asks = self._asks, []
        return [SendReply(ask, answer) for ask in asks]

    def _recovered(self) -> Recovered:
        return Recovered(self._snapshots.counted.epoch, self._snapshots.counted.undone)
