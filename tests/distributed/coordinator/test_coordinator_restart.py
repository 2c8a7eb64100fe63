"""A coordinator that restarts from its state gives the answers of one that never ended."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Event,
    PeerClosed,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.durable_records import apply_changes
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.training.work_messages import Claimed, ClaimSteps
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.coordination import ElectOnce
from dflow.distributed.wire.messages.message import Mark, Marked, Message
from dflow.distributed.wire.messages.placement import PlaceVariable
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave, Roster, TaskInfo
from dflow.distributed.wire.messages.status import Report, Status
from tests.effort import examples

#: With these settings a dead task leaves in the same tick, with and without a restart of the coordinator.
SETTINGS = CoordinatorSettings(heartbeat_timeout_s=10.0, rejoin_s=10.0)
JOBS = {"ps": 2, "worker": 3}
TASKS = ("/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1", "/job:worker/task:2", "/job:worker/task:3")
#: The coordinator's death: never, between two events, or at an event before or after the write.
STAYS, QUIET, BEFORE_WRITE, AFTER_WRITE = "stays", "quiet", "before the write", "after the write"


@dataclass
class Client:
    """One life of a task; it repeats unanswered requests."""

    task: str
    incarnation: str
    peer: int
    claim: ClaimSteps
    open: dict[int, Message] = field(default_factory=dict)
    held: int = 0


class World:
    """A coordinator and its clients; messages are lost only when the coordinator dies."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.now_s = 0.0
        self.numbers = 0
        self.clients: dict[str, Client] = {}
        self.answers: dict[int, Message] = {}
        self.connections = self.starts = 0
        self.start()

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def start(self) -> None:
        self.state = make_coordinator_state(JOBS, SETTINGS, self.rows)
        self.starts += 1
        self.carry_out(Started(self.now_s, "blue" if self.starts == 1 else f"start {self.starts}"))

    def carry_out(self, event: Event, death: str = STAYS) -> None:
        commands = self.state.handle(event)
        for command in commands:
            if isinstance(command, Persist):
                assert command is commands[0]
                if death != BEFORE_WRITE:
                    apply_changes(self.rows, command.changes)
            elif isinstance(command, SendReply) and death not in (BEFORE_WRITE, AFTER_WRITE):
                self.answered(command)
        if death != STAYS:
            self.restart()

    def answered(self, reply: SendReply) -> None:
        for client in self.clients.values():
            if reply.ask in client.open:
                asked = client.open.pop(reply.ask)
                self.answers[reply.ask] = reply.message
                if isinstance(asked, ClaimSteps):
                    assert isinstance(reply.message, Claimed), reply.message
                    client.claim, client.held = asked, reply.message.count

    def restart(self) -> None:
        """End the process and start another; all clients return and repeat their requests, in the order of before."""
        self.start()
        for client in list(self.clients.values()):
            client.peer = self.number_of_connection()
            join = Join(client.task, "h:1", client.incarnation, "blue")
            commands = self.state.handle(Asked(self.now_s, client.peer, -1, join))
            for command in commands:
                if isinstance(command, Persist):
                    apply_changes(self.rows, command.changes)
        unanswered = {ask: client for client in self.clients.values() for ask in client.open}
        for ask in sorted(unanswered):
            self.carry_out(Asked(self.now_s, unanswered[ask].peer, ask, unanswered[ask].open[ask]))

    def number_of_connection(self) -> int:
        self.connections += 1
        return self.connections

    def ask(self, client: Client, message: Message, death: str) -> None:
        ask = self.number()
        client.open[ask] = message
        self.carry_out(Asked(self.now_s, client.peer, ask, message), death)

    def heartbeats(self) -> None:
        for client in self.clients.values():
            self.carry_out(Told(self.now_s, client.peer, Heartbeat(client.task)))
        self.carry_out(Ticked(self.now_s))

    def act(self, what: str, task: str, part: float, death: str) -> None:
        """Do one random action; the possible actions do not depend on the coordinator's death."""
        self.heartbeats()
        self.now_s += 1.0
        client = self.clients.get(task)
        if death == QUIET:
            self.restart()
            death = STAYS
        if client is None:
            if what == "join":
                self.clients[task] = client = Client(
                    task, f"{self.number()}", self.number_of_connection(), ClaimSteps("run", task, 30, 0)
                )
                self.ask(client, Join(task, "h:1", client.incarnation, "blue"), death)
            return
        match what:
            case "claim" if not any(isinstance(message, ClaimSteps) for message in client.open.values()):
                last = client.claim.number
                claim = ClaimSteps("run", task, 30, self.number(), last, round(part * client.held), more=part != 0.5)
                self.ask(client, claim, death)
            case "elect":
                self.ask(client, ElectOnce("init" if part < 0.5 else "summary", task), death)
            case "place":
                self.ask(client, PlaceVariable(f"v{int(part * 5)}", "f32", (), 4, "ps"), death)
            case "report":
                self.ask(client, Report("loss", part), death)
            case "finish":
                # After that is written the client has left, whether it gets the answer or not.
                self.ask(client, Leave(task, "finished"), STAYS if death == AFTER_WRITE else death)
                del self.clients[task]
            case "die":
                self.carry_out(PeerClosed(self.now_s, self.clients.pop(task).peer, "reset"), death)
                for _ in range(10):
                    self.now_s += 2.0
                    self.heartbeats()

    def outcome(self) -> tuple[dict[int, Message], Status]:
        """All answers and the final state of the coordinator, without parts that depend on the number of restarts."""
        status = self.state.status(self.now_s)
        tasks = tuple(_without_reason(info) for info in status.tasks)
        answers = {
            ask: Roster(tuple(map(_without_reason, answer.tasks)), answer.expected, answer.version)
            if isinstance(answer, Roster)
            else _without_left(answer)
            if isinstance(answer, Failure)
            else _without_mark(answer)
            for ask, answer in self.answers.items()
        }
        return answers, msgspec.structs.replace(status, tasks=tasks, health=())


def _without_left(failure: Failure) -> Failure:
    return Failure(failure.kind, re.sub(r"(left at [\d.]+ s): .*?(, and |\n|$)", r"\1\2", failure.text))


def _without_mark(answer: Message) -> Message:
    return msgspec.structs.replace(answer, mark=Mark()) if isinstance(answer, Marked) else answer


def _without_reason(info: TaskInfo) -> TaskInfo:
    return msgspec.structs.replace(info, left="finished" if info.left == "finished" else "failed" if info.left else "")


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "join", "claim", "claim", "claim", "elect", "place", "report", "finish", "die"]),
        st.sampled_from(TASKS),
        st.sampled_from([0.0, 0.3, 0.5, 0.7, 1.0]),
        st.sampled_from([STAYS, STAYS, QUIET, BEFORE_WRITE, AFTER_WRITE]),
    ),
    max_size=40,
)


@settings(max_examples=examples(300), deadline=None)
@given(ACTS)
def test_restarts_at_any_moment_give_the_answers_that_no_restart_gives(
    acts: list[tuple[str, str, float, str]],
) -> None:
    steady, mortal = World(), World()
    for what, task, part, death in acts:
        steady.act(what, task, part, STAYS)
        mortal.act(what, task, part, death)
    assert mortal.outcome() == steady.outcome()
