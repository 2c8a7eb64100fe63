"""The coordinator as a state machine: events in, commands out, no clock, no sockets, no threads.

It routes messages to the parts that decide (membership, directory, step ledger, elections, traffic) and lets
what one decides follow in the others: a task that leaves gives back its steps and its offices.

Invariants:
- every Asked is answered by exactly one Reply, at once or, for a claim of steps, after a later event;
- a message in the name of a task counts only from the connection over which that task joined;
- the last `LOG_EVENTS` events are kept in order, without the traffic that heartbeats tell; as long as they are all
  there are, handling them again from the start gives the same commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from dflow.distributed.coordinator_events import (
    Asked,
    Broadcast,
    Command,
    Disconnect,
    Event,
    PeerClosed,
    Reply,
    Ticked,
    Told,
)
from dflow.distributed.elections import Elections
from dflow.distributed.membership import (
    ConnectionLost,
    HeartbeatArrived,
    Joined,
    LeaveAsked,
    Membership,
    MembershipCommand,
    PublishRoster,
    RefuseJoin,
    ReleaseTask,
)
from dflow.distributed.messages import (
    ClaimSteps,
    Elected,
    ElectOnce,
    Failure,
    GetStatus,
    Heartbeat,
    Join,
    Leave,
    Ok,
    PlaceVariable,
    Report,
    Status,
)
from dflow.distributed.step_ledger import StepLedger, StepsAsked, WorkerLeft
from dflow.distributed.traffic_totals import TrafficTotals, largest
from dflow.distributed.variable_directory import VariableDirectory
from dflow.tracing.errors import DeviceError
from dflow.tracing.task_name import short_task_name, split_task_name

LOG_EVENTS = 10_000


class CoordinatorState:
    """All that the coordinator of one cluster knows.

    `jobs`                 the tasks that are expected, as job -> how many
    `heartbeat_timeout_s`  a task not heard of for so long has left
    """

    def __init__(self, jobs: Mapping[str, int], heartbeat_timeout_s: float = 10.0) -> None:
        self._membership = Membership(jobs, heartbeat_timeout_s)
        self._directory = VariableDirectory()
        self._ledger = StepLedger()
        self._elections = Elections()
        self._traffic = TrafficTotals()
        self._results: dict[str, float] = {}
        self.log: deque[Event] = deque(maxlen=LOG_EVENTS)

    def handle(self, event: Event) -> list[Command]:
        """Take note of the event and say what the shell shall do, in order."""
        self.log.append(_logged(event))
        match event:
            case Asked():
                return self._asked(event)
            case Told(at_s, peer, Heartbeat(task, traffic)):
                if self._membership.is_live(task, peer):
                    self._traffic.report(peer, traffic)
                return self._follow(self._membership.handle(HeartbeatArrived(at_s, peer, task)))
            case Told(_, _, Report(name, value)):
                self._results[name] = value
                return []
            case Told():
                return []
            case PeerClosed(at_s, peer, reason):
                return self._follow(self._membership.handle(ConnectionLost(at_s, peer, reason)))
            case Ticked():
                return self._follow(self._membership.handle(event))

    def status(self, at_s: float) -> Status:
        """Everything a person would ask."""
        roster = self._membership.roster()
        return Status(
            now_s=at_s,
            tasks=roster.tasks,
            expected=roster.expected,
            workers=self._ledger.workers(),
            steps_done=self._ledger.steps_done,
            steps_total=self._ledger.steps_total,
            variables=self._directory.variables(),
            traffic=largest(self._traffic.totals()),
            results=dict(self._results),
        )

    def _asked(self, event: Asked) -> list[Command]:
        match event.message:
            case Join(task, address):
                return self._join(event, task, address)
            case Leave(task, reason):
                return self._from_task(event, task) or self._leave(event, reason)
            case ClaimSteps(_, task) as claim:
                return self._from_task(event, task) or [*self._ledger.handle(StepsAsked(event.ask, claim))]
            case ElectOnce(what, task):
                return self._from_task(event, task) or [
                    Reply(event.ask, Elected(self._elections.elect(what, task, event.peer)))
                ]
            case PlaceVariable(job=job) as request:
                members = self._membership
                return [Reply(event.ask, self._directory.place(request, members.available(job), members.jobs()))]
            case Report(name, value):
                self._results[name] = value
                return [Reply(event.ask, Ok())]
            case GetStatus():
                return [Reply(event.ask, self.status(event.at_s))]
            case other:
                text = f"the coordinator answers no {type(other).__name__}; ask a task"
                return [Reply(event.ask, Failure("RemoteError", text))]

    def _from_task(self, event: Asked, task: str) -> list[Command]:
        """A refusal when the message does not come from the live task in whose name it speaks, else nothing."""
        if self._membership.is_live(task, event.peer):
            return []
        why = self._membership.absence(task)
        text = f"{type(event.message).__name__} came in the name of {short_task_name(task)} over a connection "
        return [Reply(event.ask, Failure("TaskLost", text + f"that is not its own ({why}); join first"))]

    def _join(self, event: Asked, task: str, address: str) -> list[Command]:
        try:
            split_task_name(task)
        except DeviceError as error:
            return [Reply(event.ask, Failure("DeviceError", str(error)))]
        decided = self._membership.handle(Joined(event.at_s, event.peer, task, address))
        for command in decided:
            if isinstance(command, RefuseJoin):
                return [Reply(event.ask, Failure("RemoteError", command.text))]
        return [Reply(event.ask, self._membership.roster()), *self._follow(decided)]

    def _leave(self, event: Asked, reason: str) -> list[Command]:
        decided = self._membership.handle(LeaveAsked(event.at_s, event.peer, reason))
        return [*self._follow(decided), Reply(event.ask, Ok())]

    def _follow(self, decided: list[MembershipCommand]) -> list[Command]:
        """What follows from a change of the membership, here and in the other parts."""
        commands: list[Command] = []
        for command in decided:
            match command:
                case ReleaseTask(task, peer, reason, silent):
                    self._traffic.leave(peer)
                    self._elections.leave(peer, reason)
                    commands += self._ledger.handle(WorkerLeft(task, reason))
                    if silent:
                        commands.append(Disconnect(peer, reason))
                case PublishRoster():
                    commands.append(Broadcast(self._membership.live_peers(), self._membership.roster()))
                case RefuseJoin():
                    pass
        return commands


def _logged(event: Event) -> Event:
    match event:
        case Told(at_s, peer, Heartbeat(task)):
            return Told(at_s, peer, Heartbeat(task))
    return event
