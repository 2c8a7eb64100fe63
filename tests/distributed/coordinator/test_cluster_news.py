"""The coordinator's newest events, for tools."""

from __future__ import annotations

from collections.abc import Mapping

from dflow.distributed.coordinator.cluster_news import LONGEST_TEXT, MOST_EVENTS
from dflow.distributed.coordinator.coordinator_events import (
    Asked,
    Command,
    Event,
    Persist,
    SendReply,
    Started,
    Ticked,
    Told,
)
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.durable_records import apply_changes
from dflow.distributed.coordinator.membership import MOST_LEFT
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.wire.messages.roster import Heartbeat, Join, Leave
from dflow.distributed.wire.messages.status import ClusterEvents, GetEvents

W0, W1 = "/job:worker/task:0", "/job:worker/task:1"


class NewsOfTwo:
    """A coordinator of two workers, driven by hand; `rows` is what it has written."""

    def __init__(self, rows: Mapping[str, bytes] | None = None, at_s: float = 0.0) -> None:
        self.rows, self.at_s = dict(rows or {}), at_s
        self.state = make_coordinator_state({"worker": 2}, CoordinatorSettings(stall_timeout_s=5.0), self.rows)
        self.do(Started(at_s, "cluster"))

    def do(self, event: Event) -> list[Command]:
        self.at_s = event.at_s
        commands = self.state.handle(event)
        for command in commands:
            if isinstance(command, Persist):
                apply_changes(self.rows, command.changes)
        return commands

    def join(self, at_s: float, peer: int, task: str, incarnation: str) -> None:
        self.do(Asked(at_s, peer, peer, Join(task, f"h:{peer}", incarnation)))

    def news(self, since: int = 0, start: str = "") -> ClusterEvents:
        (reply,) = self.do(Asked(self.at_s, 99, 99, GetEvents(since, start)))
        assert isinstance(reply, SendReply)
        assert isinstance(reply.message, ClusterEvents)
        return reply.message

    def told(self, since: int = 0) -> list[tuple[float, str, str, str]]:
        return [(event.at_s, event.kind, event.task, event.text) for event in self.news(since).events]


def test_joins_ends_and_stalls_are_events() -> None:
    two = NewsOfTwo()
    assert two.news() == ClusterEvents("cluster/1", 0, ())
    two.join(1.0, 1, W0, "a")
    two.join(2.0, 2, W1, "b")
    two.do(Told(3.0, 2, Leave(W1, "finished")))
    two.join(4.0, 3, W1, "c")
    assert two.told() == [
        (1.0, "joined", W0, "worker:0 joined"),
        (2.0, "joined", W1, "worker:1 joined"),
        (3.0, "finished", W1, "worker:1 left: finished"),
        (4.0, "restarted", W1, "worker:1 joined again, after it had left"),
    ]
    for at_s in (5.0, 8.0, 11.0):
        two.do(Told(at_s, 1, Heartbeat(W0, steps=1, doing="step 2")))
        two.do(Told(at_s, 3, Heartbeat(W1)))
    two.do(Ticked(11.5))
    stall = "worker:0 is alive and has ended no step for 6.5 s; it is at: step 2"
    assert two.told()[4:] == [(11.5, "stalled", "", stall)]
    newest = two.news()
    assert [event.number for event in newest.events] == [1, 2, 3, 4, 5]
    assert two.news(4, newest.start).events == newest.events[4:]
    assert two.news(5, newest.start) == ClusterEvents("cluster/1", 5, ())
    assert two.news(4, "cluster/0") == newest, "numbers of another start do not count"


def test_after_a_restart_the_listed_tasks_are_told_again() -> None:
    two = NewsOfTwo()
    two.join(1.0, 1, W0, "a")
    two.join(2.0, 2, W1, "b")
    two.do(Told(3.0, 2, Leave(W1, "finished")))
    again = NewsOfTwo(two.rows, at_s=10.0)
    assert again.news().start == "cluster/2"
    assert again.told() == [
        (1.0, "joined", W0, "worker:0 joined"),
        (2.0, "joined", W1, "worker:1 joined"),
        (3.0, "finished", W1, "worker:1 left: finished"),
    ]


def test_the_events_are_bounded() -> None:
    two = NewsOfTwo()
    for number in range(MOST_LEFT + 10):
        two.join(number + 1.0, number, W0, f"{number}")
        two.do(Told(number + 1.5, number, Leave(W0, "x" * 2 * LONGEST_TEXT)))
    told = two.news()
    assert len(told.events) == MOST_EVENTS
    assert told.newest == told.events[-1].number == 2 * (MOST_LEFT + 10)
    assert max(len(event.text) for event in told.events) == LONGEST_TEXT
    assert len(two.state.core.news._known) <= MOST_LEFT, "no more lives than the roster lists"
