"""The gate of a task, for any order of rosters, introductions and messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.task.member_gate import MOST_HELD, MemberGate
from dflow.distributed.wire.messages.basic import Introduce
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.tracing.errors import TaskLost
from tests.effort import examples

WORKER = "/job:worker/task:0"
REFUSED = "ps:0 serves only members of its cluster: "


class Connection:
    """A connection of the worker to the gate of a ps, with the outcome of each of its messages, by number."""

    name = WORKER

    def __init__(self, gate: MemberGate, life: int | None = None, incarnation: str = "") -> None:
        self.gate, self.sent = gate, 0
        self.delivered: list[int] = []
        self.refused: list[str] = []
        if life is not None:
            self.introduced(life, incarnation)

    def introduced(self, *introduction: Any) -> None:
        self.gate.introduced(self, Introduce(*introduction))  # type: ignore[arg-type]

    def send(self) -> None:
        """Deliver the next message to the gate, as a task does."""
        self.sent += 1
        deliver = partial(self.delivered.append, self.sent)
        peer: Any = self
        if peer in self.gate.members:
            deliver()
        else:
            self.gate.take(peer, deliver, lambda error: self.refused.append(str(error)))


@pytest.fixture
def gate() -> MemberGate:
    return MemberGate("/job:ps/task:0")


def roster(live: int | None, last: int) -> Roster:
    """A roster with the worker's lives up to `last`; at most one is live."""
    lives = range(max(0, last - 2), last + 1)
    infos = (TaskInfo(WORKER, "", 0.0, None if life == live else 1.0, "killed", life=life) for life in lives)
    return Roster(tuple(infos), ())


def show(gate: MemberGate, newest: Roster) -> None:
    gate.roster_changed(newest)
    gate.admit()


EVENTS = st.lists(st.sampled_from(["send 0", "send 1", "send 2", "join", "leave"]), max_size=40)


@settings(max_examples=examples(200))
@given(EVENTS)
def test_each_message_is_delivered_in_order_exactly_while_its_life_is_live(events: list[str]) -> None:
    gate = MemberGate("/job:ps/task:0")
    connections = [Connection(gate, life) for life in range(3)]
    newest, live = -1, None
    expected: list[list[int]] = [[], [], []]
    waiting: list[list[int]] = [[], [], []]
    for event in events:
        if event == "join":
            newest, live = newest + 1, newest + 1
            show(gate, roster(live, newest))
            for life in range(min(newest + 1, 3)):
                expected[life] += waiting[life] if life == live else []
                waiting[life] = []
        elif event == "leave" and newest >= 0:
            live = None
            show(gate, roster(live, newest))
        elif event.startswith("send"):
            life = int(event[-1])
            connections[life].send()
            if life == live:
                expected[life].append(connections[life].sent)
            elif life > newest:
                waiting[life].append(connections[life].sent)
    for connection, numbers, held in zip(connections, expected, waiting, strict=True):
        assert connection.delivered == numbers
        assert len(connection.refused) == connection.sent - len(numbers) - len(held)


@settings(max_examples=examples(200))
@given(st.lists(st.sampled_from(["send", "know", "roster"]), max_size=40))
def test_a_message_waits_for_the_roster_that_its_sender_had(events: list[str]) -> None:
    gate = MemberGate("/job:ps/task:0")
    show(gate, roster(0, 0))
    connection = Connection(gate, 0)
    sender_has = task_has = 0
    needs: list[int] = []
    for event in events:
        if event == "send":
            needs.append(sender_has)
            connection.send()
        elif event == "know":
            sender_has += 1
            connection.introduced(0, "", sender_has)
        else:
            task_has += 1
            show(gate, msgspec.structs.replace(roster(0, 0), version=task_has))
        assert len(connection.delivered) <= sum(need <= task_has for need in needs)
        if sender_has <= task_has:
            assert len(connection.delivered) == len(needs)
    assert connection.delivered == sorted(connection.delivered)
    assert connection.refused == []


def test_messages_held_before_the_news_of_a_join_are_bounded(gate: MemberGate) -> None:
    connection = Connection(gate, 7)
    for _ in range(MOST_HELD + 1):
        connection.send()
    assert connection.refused == [REFUSED + "too many messages came before the news that it has joined"]


def test_messages_of_a_connection_that_ends_before_the_news_are_dropped(gate: MemberGate) -> None:
    connection: Any = Connection(gate, 0)
    connection.send()
    gate.closed(connection)
    show(gate, roster(0, 0))
    assert (connection.delivered, connection.refused) == ([], [])


def test_a_message_that_fails_does_not_stop_those_behind_it(gate: MemberGate, caplog: pytest.LogCaptureFixture) -> None:
    connection: Any = Connection(gate, 0)

    def fail() -> None:
        raise ValueError("of this message")

    def refuse(error: TaskLost) -> None:
        raise error

    gate.take(connection, fail, refuse)
    connection.send()
    show(gate, roster(0, 0))
    assert connection.delivered == [1]
    assert "a message of /job:worker/task:0 failed" in caplog.text


def test_another_process_with_the_life_of_a_member_is_refused(gate: MemberGate) -> None:
    """The coordinator was restarted from an older file and gave a number of a life again."""
    show(gate, Roster((TaskInfo(WORKER, "", 0.0, incarnation="one", life=3),), ()))
    connection = Connection(gate, 3, "other")
    connection.send()
    assert connection.delivered == []
    assert connection.refused == [REFUSED + "worker:0 is another process than the one that joined; end it"]


def test_a_life_that_has_ended_is_refused_with_what_to_do(gate: MemberGate) -> None:
    earlier, gone = Connection(gate, 0), Connection(gate, 1)
    show(gate, Roster((TaskInfo(WORKER, "", 0.0, life=1, left_at_s=2.0, left="died"),), ()))
    earlier.send()
    gone.send()
    assert earlier.refused == [REFUSED + "worker:0 has started again, and this is its earlier process; end it"]
    assert gone.refused == [REFUSED + "worker:0 left at 2.0 s: died; join again by dflow.connect()"]


def test_only_the_newest_life_of_a_task_may_come_back(gate: MemberGate) -> None:
    stranger, *known = (Connection(gate, life) for life in (None, 0, 1))
    show(gate, roster(None, 1))
    assert [gate.may_come_back(one) for one in (stranger, *known)] == [False, False, True]  # type: ignore[arg-type]


def test_a_task_introduces_itself_by_the_roster_with_the_newest_death(gate: MemberGate) -> None:
    own = TaskInfo("/job:ps/task:0", "", 0.0, incarnation="p", life=9)
    one, two = TaskInfo(WORKER, "", 0.0, life=0), TaskInfo("/job:worker/task:1", "", 0.0, life=1)
    rosters = {
        4: (one,),
        5: (one, two),
        6: (one, msgspec.structs.replace(two, left_at_s=1.0, left="finished")),
        7: (msgspec.structs.replace(one, left_at_s=1.0, left="no heartbeat"),),
        8: (msgspec.structs.replace(one, life=2),),
        9: (msgspec.structs.replace(one, life=3),),
    }
    found = []
    for version, tasks in rosters.items():
        show(gate, Roster((own, *tasks), (), version))
        assert gate.introduction(own) == Introduce(9, "p", gate.death_known_at)
        found.append(gate.introduction(own).roster)
    assert found == [4, 4, 4, 7, 7, 9]
