"""The coordinator as a state machine: events in, commands out, no clock, no sockets, no threads.

It takes members in, and routes messages to the parts of the subjects (`coordinator_part`), which decide. All parts hear
of members that join and leave.

Invariants:
- every Asked is answered by exactly one Reply, immediately, or after a later event for a claim of steps or a barrier;
- what must outlive the coordinator is in a Persist, before the commands that depend on it; a state made from the
  Persists of another one answers, after Started, as that one would;
- a message that names a task counts only from the connection over which that task joined;
- with snapshots, a coordinator that starts again takes in no new process before one of the cluster is back. If none
  comes within the timeout of heartbeats, all have ended: it begins another cluster, which resumes the newest snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

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
from dflow.distributed.coordinator.coordinator_part import (
    CoordinatorCore,
    CoordinatorPart,
    CoordinatorSettings,
    Received,
)
from dflow.distributed.coordinator.durable_records import SHELL, DurableRecords, apply_changes, replacing
from dflow.distributed.coordinator.membership import MembershipCommand, ReleaseTask
from dflow.distributed.coordinator.state_marks import REVISION, StateMarks
from dflow.distributed.wire.handler_table import HandlerTable
from dflow.distributed.wire.messages.basic import Failure, Ok
from dflow.distributed.wire.messages.message import Marked, Message
from dflow.distributed.wire.messages.placement import PlacedAll, PlaceVariable, PlaceVariables, Unplace
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave
from dflow.distributed.wire.messages.status import GetEvents, GetStatus, Status
from dflow.tracing.devices.task_name import short_task_name, split_task_name
from dflow.tracing.errors import DeviceError, InternalError

#: The handlers of the messages about members and placement, called after the checks of membership and speaker.
REQUESTS: HandlerTable[CoordinatorState, Received, Message | Sequence[Command]] = HandlerTable()
NOTICES: HandlerTable[CoordinatorState, Received, Sequence[Command]] = HandlerTable()


class CoordinatorState:
    """The whole state of a cluster's coordinator.

    `jobs`      number of expected tasks by job
    `settings`  its timeouts
    `rows`      the rows that the Persists of this cluster's earlier coordinator wrote
    `parts`     the classes of its parts, in their order
    `core`      objects that the parts share; replaced when another cluster begins
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        settings: CoordinatorSettings | None = None,
        rows: Mapping[str, bytes] | None = None,
        *,
        parts: Sequence[type[CoordinatorPart]],
    ) -> None:
        self._jobs, self._settings, self._kinds = dict(jobs), settings or CoordinatorSettings(), tuple(parts)
        self._may_be_lost = (SHELL, REVISION, *(key for kind in parts for key in kind.may_be_lost))
        self._tells = {message: key for kind in parts for message, key in kind.tells.items()}
        self._begin(rows or {})
        #: The records, and the joins of new processes, while it is open whether the processes of before have all ended.
        self._rows = dict(rows or {})
        self._joining: list[tuple[Join, Received]] = []
        self._is_open = self._settings.snapshot_every_s > 0 and bool(self.core.members.connections())
        self._started = Started(0.0, "")

    def _begin(self, rows: Mapping[str, bytes]) -> None:
        self._records = records = DurableRecords(rows)
        self._marks = StateMarks(records)
        self.core = core = CoordinatorCore(self._settings, self._jobs, records)
        self._members, self._directory = core.members, core.directory
        for kind in self._kinds:
            core.parts.append(kind(core))
        self._requests = _bound((REQUESTS, self), *((part.requests, part) for part in core.parts))
        self._notices = _bound((NOTICES, self), *((part.notices, part) for part in core.parts))
        self._has_lost_state = False

    def waits(self, command: Command, unwritten: Collection[str]) -> bool:
        """Whether a command must wait until the disk takes writes; `unwritten` are the keys of the records that wait.

        A record is lost if the coordinator's process ends before it is written, and tasks may know of it by then. A
        record of finished steps may be lost: the steps are claimed again, and tasks apply none twice. A record of the
        task of a variable, a member, an election or a number may not, since the coordinator's next process would decide
        otherwise. While such a record is not written, tasks get no message, as if the coordinator were away; later they
        get all messages, in order.
        """
        if not isinstance(command, Broadcast | SendReply):
            return False
        if self._tells.get(type(command.message)) in unwritten:
            return True
        return any(not key.startswith(self._may_be_lost) for key in unwritten)

    def handle(self, event: Event) -> list[Command]:
        """Apply the event and return the commands for the shell, in order."""
        commands = self._decide(event)
        for part in self.core.parts:
            commands += part.after_event(event.at_s)
        self.core.news.note(event.at_s, commands)
        if self._records.changed:
            self._marks.written()  # before `take_changes`, since the revision is a record too
        changes = self._records.take_changes()
        if self._is_open:
            apply_changes(self._rows, changes)
        marked = [self._marked(command) for command in commands]
        return [Persist(changes), *marked] if changes else marked

    def _marked(self, command: Command) -> Command:
        if isinstance(command, (SendReply, Broadcast)) and isinstance(command.message, Marked):
            return replace(command, message=msgspec.structs.replace(command.message, mark=self._marks.newest))
        return command

    def _decide(self, event: Event) -> list[Command]:
        match event:
            case Started():
                self._started = event
                return self._start(event)
            case Asked(at_s, peer, ask, message):
                return self._asked(message, Received(at_s, peer, ask, self._life(message)))
            case Told(at_s, peer, message):
                handle = self._notices.get(type(message))
                if handle is None or self._refusal(peer, message):
                    return []
                return [*handle(message, Received(at_s, peer, 0, self._life(message)))]
            case PeerClosed(at_s, peer, reason):
                self._joining = [one for one in self._joining if one[1].peer != peer]
                self._members.lose(at_s, peer, reason)
                return []
            case Ticked(at_s):
                if self._joining and at_s - self._started.at_s >= self._settings.heartbeat_timeout_s:
                    return self._begin_another(at_s)
                commands = self._follow(at_s, self._members.tick(at_s, self._directory.holds_state))
                for part in self.core.parts:
                    commands += part.on_tick(at_s)
                return commands

    def _life(self, message: Message) -> int:
        """The life of the task that speaks; 0 if the message names none, or one that is not live."""
        task = getattr(message, message.speaker) if message.speaker else ""
        return self._members.life(task) if self._members.is_there(task) else 0

    def _start(self, started: Started) -> list[Command]:
        self._marks.started(started.cluster)
        self._members.start(started.at_s, started.cluster)
        return [command for part in self.core.parts for command in part.on_start(started.at_s)]

    def _begin_another(self, at_s: float) -> list[Command]:
        """Begin another cluster, with the records that the parts inherit of the ended one; handle joins that waited."""
        rows = {key: row for kind in self._kinds for key, row in kind.inherited(self._rows, self._kinds).items()}
        changes, joining = replacing(self._rows, rows), self._take_joining()
        self._begin(rows)
        self._records.changed.update(changes)
        text = "no process of the cluster has come back, and other processes come: this is another cluster"
        commands = [Log(text), *self._start(Started(at_s, self._started.cluster))]
        return [*commands, *self._join_again(joining)]

    def _take_joining(self) -> list[tuple[Join, Received]]:
        self._is_open, self._rows = False, {}
        joining, self._joining = self._joining, []
        return joining

    def _join_again(self, joining: Sequence[tuple[Join, Received]]) -> list[Command]:
        return [command for join, received in joining for command in self._asked(join, received)]

    def _asked(self, message: Message, received: Received) -> list[Command]:
        what = type(message).__name__
        handle = self._requests.get(type(message))
        if handle is None:
            return [SendReply(received.ask, Failure("RemoteError", f"the coordinator answers no {what}; ask a task"))]
        refusal = self._refusal(received.peer, message)
        if refusal:
            return [SendReply(received.ask, Failure("TaskLost", f"{what} {refusal}; join first"))]
        decided = handle(message, received)
        return [SendReply(received.ask, decided)] if isinstance(decided, Message) else [*decided]

    def _refusal(self, peer: int, message: Message) -> str:
        """Return why the message does not count over this connection; empty when it does."""
        if message.is_open:
            return ""
        if not message.speaker:
            is_of_a_task = self._members.is_of_a_task(peer)
            return "" if is_of_a_task else "is taken from tasks alone, and this connection is of none"
        task = getattr(message, message.speaker)
        if self._members.is_live(task, peer):
            return ""
        why = self._members.absence(task)
        return f"came in the name of {short_task_name(task)} over a connection that is not its own ({why})"

    def status(self, at_s: float) -> Status:
        """Return the status for people and tools."""
        roster = self._members.roster()
        fields: dict[str, Any] = {}
        for part in self.core.parts:
            fields |= part.status()
        return Status(
            now_s=at_s,
            tasks=roster.tasks,
            expected=roster.expected,
            variables=tuple(one for one in self._directory.variables() if one.kind != "run"),
            away=self._members.away(),
            left=self._members.left_in_all,
            **fields,
        )

    # Requests.

    @REQUESTS.handles(PlaceVariables)
    def _place_all(self, request: PlaceVariables, received: Received) -> PlacedAll:
        return PlacedAll(tuple(map(self._directory.place, request.requests)))

    @REQUESTS.handles(Unplace)
    def _unplace(self, request: Unplace, received: Received) -> Ok:
        self._directory.give_up(request.name)
        return Ok()

    @REQUESTS.handles(Leave)
    def _leave(self, request: Leave, received: Received) -> list[Command]:
        return [*self._leave_by_notice(request, received), SendReply(received.ask, Ok())]

    @REQUESTS.handles(Join)
    def _join(self, join: Join, received: Received) -> Failure | list[Command]:
        try:
            split_task_name(join.task)
        except DeviceError as error:
            return Failure("DeviceError", str(error))
        is_known = bool(join.cluster) and join.cluster == self._members.identity.cluster
        if is_known and (missing := self._marks.missing(join.mark)):
            return self._refuse_newer(received, join, missing)
        if self._is_open and not is_known:
            self._joining.append((join, received))
            return []
        return [*self._take_in(join, received, is_known), *self._join_again(self._take_joining())]

    def _take_in(self, join: Join, received: Received, is_known: bool) -> list[Command]:
        decided = self._members.join(received.at_s, received.peer, join)
        if isinstance(decided, Failure):
            return [SendReply(received.ask, decided)]
        self._directory.joined(join.task)
        change = self._members.changes_since(join.since) if is_known and join.since else None
        commands = [SendReply(received.ask, change or self._members.roster()), *self._follow(received.at_s, decided)]
        for part in self.core.parts:
            commands += part.on_join(join.task, received.peer, is_known, received.at_s)
        return commands

    def _refuse_newer(self, received: Received, join: Join, missing: str) -> list[Command]:
        """Refuse a task that has seen newer state than this coordinator has; log it once."""
        text = (
            f"the coordinator's state is older than what {short_task_name(join.task)} has seen of it: {missing}; the "
            "file of its state was damaged or replaced, so end the run and start it again with a new one"
        )
        commands: list[Command] = [] if self._has_lost_state else [Log(text)]
        self._has_lost_state = True
        return [*commands, SendReply(received.ask, Failure("RemoteError", text))]

    # Notices.

    @NOTICES.handles(Heartbeat)
    def _hear(self, heartbeat: Heartbeat, received: Received) -> list[Command]:
        commands: list[Command] = [*self._members.hear(received.at_s, heartbeat.task)]
        for part in self.core.parts:
            commands += part.on_heartbeat(heartbeat, received)
        return commands

    @NOTICES.handles(Leave)
    def _leave_by_notice(self, leave: Leave, received: Received) -> list[Command]:
        return self._follow(received.at_s, self._members.leave(received.at_s, leave.task, leave.reason))

    def _follow(self, at_s: float, decided: Sequence[MembershipCommand]) -> list[Command]:
        """Have the parts react to the tasks that left; return their commands, after those of the membership.

        So the news of a death comes before the answers that depend on it; see `MemberGate`.
        """
        left = [command for command in decided if isinstance(command, ReleaseTask)]
        commands: list[Command] = [command for command in decided if not isinstance(command, ReleaseTask)]
        for part in self.core.parts if left else ():
            commands += part.on_leave(left, at_s)
        return commands


REQUESTS.handles(PlaceVariable)(lambda state, request, received: state._directory.place(request))
REQUESTS.handles(GetStatus)(lambda state, request, received: state.status(received.at_s))
REQUESTS.handles(GetEvents)(lambda state, request, received: state.core.news.since(request))


def _bound(*tables: tuple[HandlerTable[Any, Received, Any], object]) -> dict[type[Message], Callable[..., Any]]:
    """Return the handlers of all tables by class of message, bound to their objects. Raises InternalError for two."""
    found: dict[type[Message], Callable[..., Any]] = {}
    for table, role in tables:
        for kind, handle in table.handlers.items():
            if kind in found:
                raise InternalError(f"{kind.__name__} has two handlers in one coordinator: expected one")
            found[kind] = partial(handle, role)
    return found
