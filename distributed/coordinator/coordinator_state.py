"""The coordinator as a state machine: events in, commands out, no clock, no sockets, no threads.

It routes messages to the parts that decide (membership, directory, step ledger, barriers, elections, traffic) and
applies the consequences in the others: when a task fails, its steps return to the pool and its elections are void.

Invariants:
- every Asked is answered by exactly one Reply, immediately, or after a later event for a claim of steps or a barrier;
- what must outlive the coordinator is in a Persist, before the commands that depend on it; a state made from the
  Persists of another one answers, after Started, as that one would;
- a message that names a task counts only from the connection over which that task joined;
- with snapshots, a coordinator that starts again takes in no new process before one of the cluster is back. If none
  comes within the timeout of heartbeats, all have ended: it begins another cluster, which resumes the newest snapshot;
- replaying the events gives the same commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from dflow.distributed.collectives.group_messages import AwaitLeaderWork, Exchange, JoinGroup, LeaderWorks
from dflow.distributed.collectives.process_groups import RETURN_S, ProcessGroups
from dflow.distributed.coordinator.barriers import Barriers
from dflow.distributed.coordinator.cluster_news import ClusterNews
from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Event,
    Log,
    PeerClosed,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes, replacing
from dflow.distributed.coordinator.elections import Elections
from dflow.distributed.coordinator.membership import Membership, MembershipCommand, ReleaseTask
from dflow.distributed.coordinator.part_costs import CostTotals
from dflow.distributed.coordinator.progress_watch import ProgressWatch, describe_task
from dflow.distributed.coordinator.state_marks import StateMarks
from dflow.distributed.coordinator.traffic_totals import TrafficTotals, largest
from dflow.distributed.coordinator.variable_directory import VariableDirectory
from dflow.distributed.snapshots.recovery import Recovery
from dflow.distributed.snapshots.resumption import newest_snapshot, resumed
from dflow.distributed.snapshots.step_pauses import StepPauses
from dflow.distributed.training.comparison_messages import CompareStep
from dflow.distributed.training.plan_messages import TrainingEvent, TrainingPlan
from dflow.distributed.training.step_comparisons import StepComparisons
from dflow.distributed.training.step_ledger import StepLedger
from dflow.distributed.training.training_plans import TrainingPlans
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.connection import Failure, Ok
from dflow.distributed.wire.messages.coordination import AwaitBarrier, Decided, DecideOnce, Elected, ElectOnce
from dflow.distributed.wire.messages.message import Marked, Message
from dflow.distributed.wire.messages.observing import DumpEvents
from dflow.distributed.wire.messages.pauses import PauseSteps, ResumeSteps, StepsHeld, StepsResumed
from dflow.distributed.wire.messages.placement import Placed, PlacedAll, PlaceVariable, PlaceVariables, Unplace
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave
from dflow.distributed.wire.messages.rounds import ClaimSteps, RoundsDone, StepsDone
from dflow.distributed.wire.messages.snapshots import (
    AnnounceLeave,
    AwaitRecovery,
    SaveChanges,
    StateCaptured,
    StateLoaded,
    StateWritten,
)
from dflow.distributed.wire.messages.status import (
    GetEvents,
    GetHealth,
    GetStatus,
    Health,
    Report,
    Status,
    TaskHealth,
)
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DeviceError

#: Least time between two requests that all tasks dump their events, in s.
DUMP_PAUSE_S = 5.0
_RESULT = "result/"


@dataclass(frozen=True)
class CoordinatorSettings:
    """Timeouts of a coordinator, in s.

    `heartbeat_timeout_s`  a task without a heartbeat for this time has left; after a restart, the time to rejoin
    `rejoin_s`             a task without a connection for this time has left
    `holder_timeout_s`     a task that holds variables, queues or accumulators has left after this time without a
                           heartbeat; before, it is away, and steps wait for it
    `snapshot_every_s`     time between two snapshots of the state of all tasks; 0 for none
    `stall_timeout_s`      a busy task that has ended no step for this time is stalled, despite its heartbeats
    """

    heartbeat_timeout_s: float = 10.0
    rejoin_s: float = 1.0
    holder_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    snapshot_every_s: float = 0.0


class _Result(msgspec.Struct, frozen=True):
    value: float
    steps: int | None = None


#: The handlers of the coordinator's messages, called after the checks of membership and speaker. A handler of requests
#: returns its reply, or commands with the `SendReply` now or later.
REQUESTS: HandlerTable[CoordinatorState, Asked, Message | list[Command]] = HandlerTable()
NOTICES: HandlerTable[CoordinatorState, Told, list[Command]] = HandlerTable()


class CoordinatorState:
    """The whole state of a cluster's coordinator.

    `jobs`      number of expected tasks by job
    `settings`  its timeouts
    `rows`      the rows that the Persists of this cluster's earlier coordinator wrote
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        settings: CoordinatorSettings = CoordinatorSettings(),
        rows: Mapping[str, bytes] | None = None,
    ) -> None:
        self._jobs, self._settings = dict(jobs), settings
        self._begin(rows or {})
        #: The records, and the joins of new processes, while it is open whether the processes of before have all ended.
        self._rows = dict(rows or {})
        self._joining: list[Asked] = []
        self._is_open = settings.snapshot_every_s > 0 and bool(self._membership.connections())
        self._started = Started(0.0, "")

    @property
    def is_durable(self) -> bool:
        """Whether all changes are written; no snapshot is committed while some are not."""
        return self._recovery.is_durable

    @is_durable.setter
    def is_durable(self, is_durable: bool) -> None:
        self._recovery.is_durable = is_durable

    def _begin(self, rows: Mapping[str, bytes]) -> None:
        jobs, settings = self._jobs, self._settings
        self._records = records = DurableRecords(rows)
        self._marks = StateMarks(records)
        self._membership = Membership(
            records, jobs, settings.heartbeat_timeout_s, settings.rejoin_s, settings.holder_timeout_s
        )
        self._directory = VariableDirectory(self._membership, records)
        self._plans = TrainingPlans(records)
        self._ledger = StepLedger(records, self._plans)
        self._comparisons = StepComparisons()
        self._elections, self._decisions = Elections(records), Decisions(records)
        self._traffic, self._costs = TrafficTotals(), CostTotals()
        self._watch = ProgressWatch(settings.stall_timeout_s)
        self._pauses = StepPauses()
        every_s = settings.snapshot_every_s
        self._recovery = Recovery(
            records, self._membership, self._directory, self._ledger, self._pauses, every_s, self._doing
        )
        self._barriers = Barriers(self._present, self._describe, records)
        coming = partial(self._membership.coming, within_s=RETURN_S)
        self._groups = ProcessGroups(coming, self._describe, self._barriers.waiting_at)
        self._news = ClusterNews(self._membership)
        self._results = dict(records.load(_RESULT, _Result))
        self._dumped_at_s: float | None = None
        self._has_lost_state = False

    def handle(self, event: Event) -> list[Command]:
        """Apply the event and return the commands for the shell, in order."""
        commands = [*self._decide(event), *self._go_on(event.at_s), *map(Log, self._ledger.take_news())]
        self._news.note(event.at_s, commands)
        if self._records.changed:
            self._marks.written()  # before `take_changes`, since the revision is a record too
        changes = self._records.take_changes()
        if self._is_open:
            apply_changes(self._rows, changes)
        marked = [self._marked(command) for command in commands]
        return [Persist(changes), *marked] if changes else marked

    def _go_on(self, at_s: float) -> list[Command]:
        """Begin, reach and use the pauses that are due, and hold back claims while one is on."""
        live = self._membership.connections()
        commands: list[Command] = [*self._pauses.go_on(live, self._ledger.is_clear(self._pauses.first))]
        commands += self._recovery.go_on(at_s)
        commands += self._pauses.go_on(live, self._ledger.is_clear(self._pauses.first))
        if self._ledger.is_held != self._pauses.is_on:
            commands += self._ledger.hold(self._pauses.is_on)
        return commands

    def _marked(self, command: Command) -> Command:
        if isinstance(command, (SendReply, Broadcast)) and isinstance(command.message, Marked):
            return replace(command, message=msgspec.structs.replace(command.message, mark=self._marks.newest))
        return command

    def _decide(self, event: Event) -> list[Command]:
        match event:
            case Started():
                self._started = event
                return self._start(event)
            case Asked():
                return self._asked(event)
            case Told():
                handle = NOTICES.get(type(event.message))
                is_taken = handle is not None and not self._refusal(event.peer, event.message)
                return handle(self, event.message, event) if handle is not None and is_taken else []
            case PeerClosed(at_s, peer, reason):
                self._joining = [one for one in self._joining if one.peer != peer]
                self._membership.lose(at_s, peer, reason)
                return []
            case Ticked(at_s):
                if self._joining and at_s - self._started.at_s >= self._settings.heartbeat_timeout_s:
                    return self._begin_anew(at_s)
                self._ledger.tick(at_s)
                followed = self._follow(at_s, self._membership.tick(at_s, self._directory.holds_state))
                return [
                    *followed,
                    *self._barriers.tick(at_s),
                    *self._groups.tick(at_s),
                    *self._tell_stalls(at_s),
                    *self._recovery.tick(at_s),
                ]

    def _start(self, started: Started) -> list[Command]:
        self._marks.started(started.cluster)
        self._membership.start(started.at_s, started.cluster)
        return self._recovery.start(started.at_s, self._jobs)

    def _begin_anew(self, at_s: float) -> list[Command]:
        """Begin another cluster, with the newest snapshot of the one whose processes have all ended."""
        rows = resumed(self._rows, newest_snapshot(self._rows))
        changes, joining = replacing(self._rows, rows), self._take_joining()
        self._begin(rows)
        self._records.changed.update(changes)
        text = "no process of the cluster has come back, and other processes come: this is another cluster"
        commands = [Log(text), *self._start(Started(at_s, self._started.cluster))]
        return [*commands, *(command for event in joining for command in self._asked(event))]

    def _take_joining(self) -> list[Asked]:
        self._is_open, self._rows = False, {}
        joining, self._joining = self._joining, []
        return joining

    def _asked(self, event: Asked) -> list[Command]:
        what = type(event.message).__name__
        handle = REQUESTS.get(type(event.message))
        if handle is None:
            return [SendReply(event.ask, Failure("RemoteError", f"the coordinator answers no {what}; ask a task"))]
        refusal = self._refusal(event.peer, event.message)
        if refusal:
            return [SendReply(event.ask, Failure("TaskLost", f"{what} {refusal}; join first"))]
        decided = handle(self, event.message, event)
        return [SendReply(event.ask, decided)] if isinstance(decided, Message) else decided

    def _refusal(self, peer: int, message: Message) -> str:
        """Why the message is not taken over this connection; empty when it is."""
        if message.is_open:
            return ""
        if not message.speaker:
            is_of_a_task = self._membership.is_of_a_task(peer)
            return "" if is_of_a_task else "is taken from tasks alone, and this connection is of none"
        task = getattr(message, message.speaker)
        if self._membership.is_live(task, peer):
            return ""
        why = self._membership.absence(task)
        return f"came in the name of {short_task_name(task)} over a connection that is not its own ({why})"

    def status(self, at_s: float) -> Status:
        """Return a snapshot for people and tools."""
        roster, (steps_done, steps_total) = self._membership.roster(), self._plans.steps(self._ledger.counts())
        return Status(
            now_s=at_s,
            tasks=roster.tasks,
            expected=roster.expected,
            workers=self._ledger.workers(),
            steps_done=steps_done,
            steps_total=steps_total,
            variables=tuple(one for one in self._directory.variables() if one.kind != "run"),
            traffic=largest(self._traffic.totals()),
            results={name: result.value for name, result in self._results.items()},
            result_steps={name: result.steps for name, result in self._results.items() if result.steps is not None},
            health=tuple(health for _, health in sorted(self._watch.health.items())),
            away=self._membership.away(),
            left=self._membership.left_in_all,
            not_finite=self._ledger.not_finite,
            costs=self._costs.totals(),
            snapshot=self._recovery.size,
        )

    def _present(self, job: str) -> tuple[tuple[str, ...], int]:
        return self._membership.by_job().get(job, ()), self._membership.version

    def _describe(self, task: str, at_s: float) -> str:
        return describe_task(task, self._health(at_s, task))

    def _tell_stalls(self, at_s: float) -> list[Command]:
        texts = [
            f"{short_task_name(stalled.task)} is alive and has ended no step for {stall_s:.1f} s; "
            f"it is at: {self._describe_work(stalled)}"
            for stalled, stall_s in self._watch.tick(at_s)
        ]
        return [*(Log(text, "stalled") for text in texts), *(self._ask_for_dumps(at_s, texts[0]) if texts else [])]

    def _doing(self, task: str) -> str:
        known = self._watch.health.get(self._membership.life(task)) if self._membership.is_there(task) else None
        return known.doing if known is not None else ""

    def _describe_work(self, stalled: TaskHealth) -> str:
        claims = self._ledger.describe_claims(stalled.task)
        if not stalled.doing:
            return claims
        return f"{stalled.doing}; it holds {claims}" if claims else stalled.doing

    def _ask_for_dumps(self, at_s: float, why: str, asker: int | None = None) -> list[Command]:
        """Make all live tasks dump their newest events, once for a stall that many tasks report at the same time."""
        if self._dumped_at_s is not None and at_s - self._dumped_at_s < DUMP_PAUSE_S:
            return []
        self._dumped_at_s = at_s
        others = tuple(peer for peer in self._membership.live_peers() if peer != asker)
        return [Broadcast(others, DumpEvents(why))]

    def _health(self, at_s: float, task: str) -> Health:
        if not self._membership.is_there(task):
            return Health(at_s, None, self._membership.absence(task))
        return Health(at_s, self._watch.health.get(self._membership.life(task)), "")

    # Requests.

    @REQUESTS.handles(ClaimSteps)
    def _claim(self, claim: ClaimSteps, event: Asked) -> list[Command]:
        return [*self._ledger.claim(event.ask, claim)]

    @REQUESTS.handles(ElectOnce)
    def _elect(self, request: ElectOnce, event: Asked) -> Elected:
        return Elected(self._elections.elect(request.what, request.task, self._membership.life(request.task)))

    @REQUESTS.handles(AwaitBarrier)
    def _arrive(self, request: AwaitBarrier, event: Asked) -> list[Command]:
        job, _ = split_task_name(request.task)
        return [*self._barriers.arrive(event.at_s, event.ask, self._membership.life(request.task), request, job)]

    @REQUESTS.handles(JoinGroup)
    def _join_group(self, request: JoinGroup, event: Asked) -> list[Command]:
        return [*self._groups.join(event.at_s, event.ask, self._membership.life(request.task), request)]

    @REQUESTS.handles(Exchange)
    def _exchange(self, request: Exchange, event: Asked) -> list[Command]:
        return [*self._groups.exchange(event.at_s, event.ask, self._membership.life(request.task), request)]

    @REQUESTS.handles(AwaitLeaderWork)
    def _await_leader_work(self, request: AwaitLeaderWork, event: Asked) -> list[Command]:
        return [*self._groups.await_work(event.at_s, event.ask, self._membership.life(request.task), request)]

    @REQUESTS.handles(LeaderWorks)
    def _note_leader_work(self, told: LeaderWorks, event: Asked) -> list[Command]:
        return [*self._groups.note_work(self._membership.life(told.task), told), SendReply(event.ask, Ok())]

    @REQUESTS.handles(PlaceVariable)
    def _place(self, request: PlaceVariable, event: Asked) -> Placed | Failure:
        return self._placed(request)

    def _placed(self, request: PlaceVariable) -> Placed | Failure:
        answer = self._directory.place(request)
        if isinstance(answer, Failure) and answer.kind == "VariableError" and (number := self._recovery.resumed):
            text = f"{answer.text}\n  the job goes on from snapshot {number}, which has the first: give the program of "
            return Failure(answer.kind, f"{text}that snapshot, or another folder for --snapshots")
        if isinstance(answer, Placed) and request.is_saved and self._settings.snapshot_every_s:
            return msgspec.structs.replace(answer, is_saved=True)
        return answer

    @REQUESTS.handles(PlaceVariables)
    def _place_all(self, request: PlaceVariables, event: Asked) -> PlacedAll:
        return PlacedAll(tuple(map(self._placed, request.requests)))

    @REQUESTS.handles(Unplace)
    def _unplace(self, request: Unplace, event: Asked) -> Ok:
        self._directory.give_up(request.name)
        return Ok()

    @REQUESTS.handles(Report)
    def _report(self, report: Report, event: Asked) -> Ok:
        self._put_result(report.name, _Result(report.value))
        return Ok()

    def _put_result(self, name: str, result: _Result) -> None:
        self._results[name] = result
        self._records.put(_RESULT + name, result)

    @REQUESTS.handles(SaveChanges)
    def _save_changes(self, request: SaveChanges, event: Asked) -> list[Command]:
        self._recovery.changed(event.ask, event.at_s + request.wait_s)
        return []

    @REQUESTS.handles(ResumeSteps)
    def _resume(self, request: ResumeSteps, event: Asked) -> list[Command]:
        live = self._membership.connections()
        were_paused, commands = self._pauses.resume(request.task, request.number, live)
        return [*commands, SendReply(event.ask, StepsResumed(were_paused))]

    @REQUESTS.handles(Leave)
    def _leave(self, request: Leave, event: Asked) -> list[Command]:
        return [*self._release(event.at_s, request), SendReply(event.ask, Ok())]

    @REQUESTS.handles(Join)
    def _join(self, join: Join, event: Asked) -> Failure | list[Command]:
        try:
            split_task_name(join.task)
        except DeviceError as error:
            return Failure("DeviceError", str(error))
        is_known = bool(join.cluster) and join.cluster == self._membership.identity.cluster
        if is_known and (missing := self._marks.missing(join.mark)):
            return self._refuse_newer(event, join, missing)
        if self._is_open and not is_known:
            self._joining.append(event)
            return []
        joined = self._take_in(join, event, is_known)
        return [*joined, *(command for other in self._take_joining() for command in self._asked(other))]

    def _take_in(self, join: Join, event: Asked, is_known: bool) -> list[Command]:
        decided = self._membership.join(event.at_s, event.peer, join)
        if isinstance(decided, Failure):
            return [SendReply(event.ask, decided)]
        self._directory.joined(join.task)
        change = self._membership.changes_since(join.since) if is_known and join.since else None
        taken = [SendReply(event.ask, change or self._membership.roster()), *self._follow(event.at_s, decided)]
        paused = self._pauses.joined(join.task, event.peer)
        return [*taken, *paused, *self._recovery.joined(join.task, is_known=is_known)]

    def _refuse_newer(self, event: Asked, join: Join, missing: str) -> list[Command]:
        """Refuse a task that has seen newer state than this coordinator has; log it once."""
        text = (
            f"the coordinator's state is older than what {short_task_name(join.task)} has seen of it: {missing}; the "
            "file of its state was damaged or replaced, so end the run and start it again with a new one"
        )
        commands: list[Command] = [] if self._has_lost_state else [Log(text)]
        self._has_lost_state = True
        return [*commands, SendReply(event.ask, Failure("RemoteError", text))]

    # Notices.

    @NOTICES.handles(Heartbeat)
    def _hear(self, heartbeat: Heartbeat, event: Told) -> list[Command]:
        task, life = heartbeat.task, self._membership.life(heartbeat.task)
        back = self._membership.hear(event.at_s, task)
        self._traffic.report(life, heartbeat.traffic)
        self._costs.report(life, heartbeat)
        is_busy = bool(heartbeat.doing) or self._ledger.holds(task)
        stall_s = self._watch.hear(life, event.at_s, heartbeat, is_busy)
        goes_on = [] if stall_s is None else [Log(f"{short_task_name(task)} goes on after {stall_s:.1f} s")]
        return [*back, *goes_on]

    @NOTICES.handles(StateCaptured)
    def _state_captured(self, report: StateCaptured, event: Told) -> list[Command]:
        self._recovery.captured(report)
        return []

    @NOTICES.handles(StateWritten)
    def _state_written(self, report: StateWritten, event: Told) -> list[Command]:
        return self._recovery.written(report)

    @NOTICES.handles(StateLoaded)
    def _state_loaded(self, report: StateLoaded, event: Told) -> list[Command]:
        return self._recovery.loaded(report)

    @NOTICES.handles(StepsHeld)
    def _steps_held(self, report: StepsHeld, event: Told) -> list[Command]:
        self._pauses.held(report.task, report.number)
        return []

    @NOTICES.handles(StepsDone)
    def _note_done(self, report: StepsDone, event: Told) -> list[Command]:
        return [*self._ledger.note_done(report)]

    @NOTICES.handles(RoundsDone)
    def _note_rounds(self, report: RoundsDone, event: Told) -> list[Command]:
        self._ledger.note_rounds(report, self._recovery.undone)
        return []

    @NOTICES.handles(TrainingPlan)
    def _note_plan(self, plan: TrainingPlan, event: Told) -> list[Command]:
        self._plans.note(plan)
        return []

    @NOTICES.handles(TrainingEvent)
    def _note_event(self, told: TrainingEvent, event: Told) -> list[Command]:
        for name, value in told.metrics.items():
            self._put_result(f"{told.kind}/{name}", _Result(value, told.steps))
        self._news.add(event.at_s, told.kind, told.task, told.text)
        return []

    @NOTICES.handles(Leave)
    def _note_leave(self, leave: Leave, event: Told) -> list[Command]:
        return self._release(event.at_s, leave)

    @NOTICES.handles(DumpEvents)
    def _pass_on_dump(self, message: DumpEvents, event: Told) -> list[Command]:
        # Tools may send it to tasks; here it is taken from the task that it names.
        is_its_own = self._membership.is_live(message.task, event.peer)
        return self._ask_for_dumps(event.at_s, message.why, event.peer) if is_its_own else []

    def _release(self, at_s: float, leave: Leave) -> list[Command]:
        return self._follow(at_s, self._membership.leave(at_s, leave.task, leave.reason))

    def _follow(self, at_s: float, decided: list[MembershipCommand]) -> list[Command]:
        """Apply a change of the membership to the other parts, and return the commands.

        The news of a death comes before the answers that depend on it; see `MemberGate`.
        """
        released = [command for command in decided if isinstance(command, ReleaseTask)]
        commands: list[Command] = [command for command in decided if not isinstance(command, ReleaseTask)]
        if released:
            commands += self._ledger.leave({one.task: one.reason for one in released})
        for one in released:
            self._traffic.leave(one.life)
            self._watch.leave(one.life)
            self._elections.leave(one.life, one.reason)
            self._comparisons.leave(one.task, one.reason)
            commands += self._pauses.leave(one.task, self._membership.connections())
            commands += self._recovery.left(one.task)
            why = f"{short_task_name(one.task)} has left: {one.reason}"
            commands += [*self._barriers.leave(one.task, why), *self._groups.leave(at_s, one.task, one.life, why)]
        return commands


# The handlers that only call one part of the state.
REQUESTS.handles(GetHealth)(lambda state, request, event: state._health(event.at_s, request.task))
REQUESTS.handles(GetStatus)(lambda state, request, event: state.status(event.at_s))
REQUESTS.handles(GetEvents)(lambda state, request, event: state._news.since(request))
REQUESTS.handles(AwaitRecovery)(lambda state, request, event: state._recovery.await_recovery(event.ask, request))
REQUESTS.handles(AnnounceLeave)(lambda state, request, event: state._recovery.announce_leave(request.task, event.ask))
REQUESTS.handles(CompareStep)(
    lambda state, request, event: [*state._comparisons.compare(event.ask, request, state._membership.live_peers())]
)
REQUESTS.handles(DecideOnce)(
    lambda state, request, event: Decided(state._decisions.decide(request.what, request.value))
)
REQUESTS.handles(PauseSteps)(lambda state, request, event: [*state._pauses.ask(request.task, event.ask)])
