"""What the status tells: news of tasks, stalls, totals of traffic and costs; decisions outlive the coordinator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster
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
from dflow.distributed.coordinator.coordinator_part import CoordinatorCore, CoordinatorSettings, Received
from dflow.distributed.coordinator.decisions import Decisions
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import MOST_LEFT, ReleaseTask
from dflow.distributed.coordinator.progress_watch import ProgressWatch
from dflow.distributed.coordinator.task_totals import OTHERS, TaskTotals, largest
from dflow.distributed.coordinator_role import make_coordinator_state
from dflow.distributed.wire.messages.coordination import DecideOnce, ElectOnce
from dflow.distributed.wire.messages.roster import EdgeTraffic, Heartbeat, Join, Leave
from dflow.distributed.wire.messages.status import ClusterEvents, GetEvents, GetStatus, PartCosts, TaskHealth
from tests.distributed.waiting import until
from tests.effort import examples

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


TASK = "/job:ps/task:0"


def core_of(records: DurableRecords) -> CoordinatorCore:
    return CoordinatorCore(CoordinatorSettings(stall_timeout_s=60.0), {}, records)


def test_busy_without_progress_for_the_time_is_a_stall_that_is_told_once() -> None:
    watch = ProgressWatch(core_of(DurableRecords()))
    watch.hear(0, 10.0, Heartbeat(TASK, (), 5, "step 6"), True)
    watch.hear(0, 69.0, Heartbeat(TASK, (), 5, "step 6: waits"), True)
    assert watch.tick(69.9) == []
    assert watch.tick(70.0) == [(TaskHealth(TASK, 69.0, 5, "step 6: waits", 10.0), 60.0)]
    assert watch.tick(80.0) == []
    assert watch.health[0] == TaskHealth(TASK, 69.0, 5, "step 6: waits", 10.0)
    assert watch.hear(0, 90.0, Heartbeat(TASK, (), 6, "step 7"), True) == 80.0
    assert watch.hear(0, 91.0, Heartbeat(TASK, (), 6, "step 7"), True) is None
    assert watch.tick(149.9) == []
    assert watch.tick(150.0) == [(TaskHealth(TASK, 91.0, 6, "step 7", 90.0), 60.0)]


def test_a_task_that_has_left_stalls_no_more() -> None:
    watch = ProgressWatch(core_of(DurableRecords()))
    watch.hear(0, 0.0, Heartbeat(TASK, (), 5, "step"), True)
    for _ in range(2):
        watch.on_leave([ReleaseTask(TASK, 0, "killed")], 1.0)
    assert watch.tick(100.0) == []
    assert watch.health == {}


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 80)), max_size=60))
def test_stalls_begin_and_end_in_turn_and_only_without_progress(acts: list[tuple[int, bool, int]]) -> None:
    watch, at_s, steps, since_s, is_stalled = ProgressWatch(core_of(DurableRecords())), 0.0, 0, 0.0, False
    was_busy = False
    for more, is_busy, pause_s in acts:
        at_s += pause_s
        [*began] = watch.tick(at_s)
        assert bool(began) == (was_busy and not is_stalled and at_s - since_s >= 60.0)
        is_stalled = is_stalled or bool(began)
        steps += more
        moves = more > 0 or not is_busy or not was_busy
        stall_s = watch.hear(7, at_s, Heartbeat(TASK, (), steps), is_busy)
        assert stall_s == (at_s - since_s if is_stalled and moves else None)
        if moves:
            since_s, is_stalled = at_s, False
        was_busy = is_busy


PS = "/job:ps/task:0"


class Totals(TaskTotals):
    def __init__(self) -> None:
        super().__init__(core_of(DurableRecords()))

    def hear(self, life: int, *heartbeats: Heartbeat) -> None:
        for heartbeat in heartbeats:
            self.on_heartbeat(heartbeat, Received(0.0, 0, 0, life))

    def told(self, what: str) -> Any:
        return self.status()[what]


def sent(values: int) -> Heartbeat:
    return Heartbeat(PS, (edge(values),) if values else ())


def edge(values: int) -> EdgeTraffic:
    return EdgeTraffic("w", "ps:0", "worker:0", values, 4 * values, messages=2 * values)


def test_traffic_of_a_task_that_left_is_added_to_that_of_its_successor() -> None:
    totals = Totals()
    totals.hear(1, sent(1), sent(3), sent(0))
    assert totals.told("traffic") == (edge(3),), "a newer report takes the place of the last"
    totals.on_leave([ReleaseTask(PS, 1, "killed")], 0.0)
    totals.hear(2, sent(4))
    for _ in range(2):
        assert totals.told("traffic") == (edge(7),)
        totals.on_leave([ReleaseTask(PS, 2, "killed")], 0.0)


def test_the_largest_edges_are_told_and_the_others_in_sum() -> None:
    edges = [EdgeTraffic(f"e{n}", f"worker:{n % 2}", "ps:0", 1, n) for n in range(6)]
    assert largest(edges, 6) == tuple(edges)
    assert largest(edges, 2) == (
        edges[5],
        edges[4],
        EdgeTraffic(OTHERS, "worker:1", "ps:0", 2, 4),
        EdgeTraffic(OTHERS, "worker:0", "ps:0", 2, 2),
    )


def beat(steps: int, processor_s: float, wakeups: int) -> Heartbeat:
    return Heartbeat(PS, steps=steps, processor_s=processor_s, wakeups=wakeups)


def test_costs_are_counted_from_the_first_part_of_each_process() -> None:
    totals = Totals()
    totals.hear(1, beat(0, 5.0, 900), beat(1, 7.0, 1000))
    assert totals.told("costs") == ()
    totals.hear(1, beat(1, 7.5, 1001), beat(101, 8.0, 1501))
    assert totals.told("costs") == (PartCosts(PS, 100, 1.0, 501),)
    totals.hear(2, beat(3, 0.5, 5))
    assert totals.told("costs") == ()
    totals.hear(2, beat(5, 0.75, 7))
    assert totals.told("costs") == (PartCosts(PS, 2, 0.25, 2),)


def test_the_tasks_of_a_cluster_report_their_costs(worker: Cluster) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(lambda: jnp.zeros(3), name="w")
    step, found = dflow.jit(lambda: w.read().sum()), dict[str, PartCosts]()

    def is_reported() -> bool:
        step()
        found.update({cost.task: cost for cost in worker.coordinator.ask(GetStatus(), 60.0).costs})
        return worker.task in found and len(found) > 1

    until(is_reported)
    assert all(cost.parts > 0 and cost.processor_s > 0 and cost.wakeups > 0 for cost in found.values())


def test_a_task_that_reports_no_time_has_no_costs() -> None:
    totals = Totals()
    totals.hear(1, *(Heartbeat(PS, steps=steps) for steps in range(3)))
    assert totals.told("costs") == ()


class AskedOffices:
    """The decisions of a coordinator; `restart` makes those of its next process."""

    def __init__(self) -> None:
        self.records = DurableRecords()
        self.decisions = Decisions(core_of(self.records))

    def restart(self) -> None:
        rows: dict[str, bytes] = {}
        apply_changes(rows, self.records.take_changes())
        self.decisions = Decisions(core_of(DurableRecords(rows)))

    def ask(self, message: DecideOnce | ElectOnce, life: int = 0) -> Any:
        return self.decisions.requests.handlers[type(message)](self.decisions, message, Received(0.0, 0, 0, life))

    def decide(self, what: str, value: str | None) -> str | None:
        return self.ask(DecideOnce(what, W0, value)).value  # type: ignore[no-any-return]

    def elect(self, what: str, task: str, life: int) -> bool:
        return self.ask(ElectOnce(what, task), life).elected  # type: ignore[no-any-return]


def test_the_first_value_counts_and_outlives_the_coordinator() -> None:
    asked = AskedOffices()
    assert [asked.decide("end", value) for value in (None, "", "nan", None)] == [None, "", "", ""]
    assert asked.decide("another", "nan") == "nan"
    asked.restart()
    assert (asked.decide("end", "nan"), asked.decide("another", "")) == ("", "nan")


def test_the_first_to_ask_is_elected_until_it_fails() -> None:
    for reason, is_free in (("finished", False), ("killed", True)):
        asked = AskedOffices()
        assert [asked.elect("init", task, life) for task, life in ((W0, 1), (W1, 2), (W0, 1))] == [True, False, True]
        assert asked.elect("summary", W1, 2)
        asked.decisions.on_leave([ReleaseTask(W0, 1, reason)], 0.0)
        asked.restart()
        assert asked.elect("init", W1, 2) == is_free
