"""Barriers as a state machine, and in a coordinator with workers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.barriers import ASKED_AGAIN_S, Barriers
from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.coordinator.durable_records import DurableRecords, apply_changes
from dflow.distributed.coordinator.membership import ReleaseTask
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.transport.base import PendingReply
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.coordination import AwaitBarrier, BarrierPassed
from dflow.distributed.wire.messages.status import GetStatus
from dflow.tracing.errors import DeadlineExceeded, TaskLost
from tests.effort import examples

A, B, C = (f"/job:worker/task:{index}" for index in range(3))
SOON_S = 20.0


class Room:
    def __init__(self, *tasks: str) -> None:
        self.tasks = list(tasks)
        self.members = SimpleNamespace(version=7, by_job=lambda: {"worker": tuple(self.tasks)})
        self.rows: dict[str, bytes] = {}
        self.make()

    def make(self) -> None:
        self.records = DurableRecords(self.rows)
        watch = SimpleNamespace(describe=lambda task, at_s: f"{task} at {at_s:g} s")
        core: Any = SimpleNamespace(members=self.members, records=self.records, part=lambda kind: watch)
        self.barriers = Barriers(core)

    def restart(self) -> None:
        apply_changes(self.rows, self.records.take_changes())
        self.make()

    def arrive(self, ask: int, task: str, at_s: float = 0.0, life: int = 0, **rest: object) -> list[SendReply]:
        request = AwaitBarrier("b", task, ask, 10.0, **rest)  # type: ignore[arg-type]
        return self.barriers.arrive(request, Received(at_s, 0, ask, life))


def text(reply: SendReply) -> str:
    assert isinstance(reply.message, Failure)
    return f"{reply.message.kind}: {reply.message.text}"


def test_a_barrier_is_forgotten_when_nobody_can_ask_again_about_an_arrival() -> None:
    room = Room(A, B)
    room.arrive(1, A, at_s=0.0)
    passed = room.arrive(2, B, at_s=5.0)
    assert room.barriers.on_tick(5.0 + 10.0 + ASKED_AGAIN_S - 1) == []
    assert room.arrive(2, B, at_s=70.0) == [passed[1]], "the same arrival, asked again"
    room.barriers.on_tick(80.0)
    apply_changes(room.rows, room.records.take_changes())
    assert [key for key in room.rows if key.startswith("barrier/")] == []
    room.make()
    room.arrive(3, A, at_s=100.0)
    assert room.arrive(4, B, at_s=100.0)[0] == SendReply(3, BarrierPassed(2, 7, (A, B)))


def test_a_barrier_at_which_somebody_waits_is_not_forgotten() -> None:
    room = Room(A, B)
    room.arrive(1, A, at_s=0.0)
    room.arrive(2, B, at_s=0.0)
    room.arrive(3, A, at_s=70.0)
    room.barriers.on_tick(75.0)
    room.restart()
    room.barriers.on_tick(75.0 + ASKED_AGAIN_S)
    assert room.arrive(3, A, at_s=75.0 + ASKED_AGAIN_S) == []
    assert room.arrive(4, B, at_s=75.0 + ASKED_AGAIN_S)[0] == SendReply(3, BarrierPassed(2, 7, (A, B)))


def test_a_task_started_anew_is_another_than_the_member_that_left() -> None:
    room = Room(A, B)
    room.arrive(1, A)
    room.arrive(2, B)
    assert room.arrive(2, B, life=5) == [], "the same number in another life is no arrival of the first"


def test_a_task_that_waited_for_too_long_is_told_who_is_missing() -> None:
    room = Room(A, B, C)
    room.arrive(1, A, at_s=0.0)
    room.arrive(2, B, at_s=5.0)
    assert room.barriers.on_tick(9.9) == []
    [late] = room.barriers.on_tick(10.0)
    assert late.ask == 1
    assert text(late) == (
        "DeadlineExceeded: worker:0 waited 10 s at barrier 'b' for 1 of 3 tasks: /job:worker/task:2 at 10 s"
    )
    assert room.arrive(3, C, at_s=11.0) == [], "the first waits no more"
    assert [reply.ask for reply in room.barriers.on_tick(15.0)] == [2]
    assert [reply.ask for reply in room.barriers.on_tick(21.0)] == [3]
    room.tasks = [A]
    assert room.arrive(4, A) == [SendReply(4, BarrierPassed(2, 7, (A,)))], "nobody waited in the first generation"


def test_a_task_that_came_too_late_is_told_so_when_it_waited_in_vain() -> None:
    room = Room(A, B)
    room.arrive(1, A, at_s=5.0)
    room.tasks = [A, B, C]
    room.arrive(2, C, at_s=0.0)
    [late] = room.barriers.on_tick(10.0)
    assert "worker:2 waited 10 s at barrier 'b', which had begun before it joined, for 1 of 2 tasks" in text(late)
    many = Room(*(f"/job:worker/task:{index}" for index in range(30)))
    many.arrive(1, A)
    [late] = many.barriers.on_tick(10.0)
    assert "for 29 of 30 tasks: /job:worker/task:1 at 10 s, " in text(late)
    assert text(late).endswith(" and 9 more")


def test_an_arrival_asked_again_takes_the_place_of_the_first_or_is_told_that_it_has_passed() -> None:
    room = Room(A, B)
    room.arrive(1, A)
    [overtaken] = room.arrive(1, A)
    assert text(overtaken) == "RemoteError: worker:0 has come to barrier 'b' again"
    passed = BarrierPassed(1, 7, (A, B))
    assert room.arrive(2, B) == [SendReply(1, passed), SendReply(2, passed)]
    assert room.arrive(1, A) == [SendReply(1, passed)]
    assert room.arrive(3, A) == []
    assert room.arrive(2, B) == [SendReply(2, passed)], "the other has come again, and not this one"


class RandomRoom(RuleBasedStateMachine):
    """Tasks that come, leave, return and time out in any order, while the coordinator is restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.room = Room(A, B, C)
        self.at_s = 0.0
        self.last_ask = 0
        self.lives = {A: 0, B: 1, C: 2}
        self.open: dict[int, tuple[str, int, float]] = {}
        self.arrived: dict[int, set[str]] = {}
        self.told: dict[int, BarrierPassed] = {}
        self.passed: set[tuple[str, int]] = set()

    def take(self, replies: list[SendReply]) -> None:
        for reply in replies:
            task, _, until_s = self.open.pop(reply.ask)
            if isinstance(reply.message, BarrierPassed):
                generation = reply.message.generation
                assert self.told.setdefault(generation, reply.message) == reply.message, "one view of the members"
                assert task in reply.message.members
                assert (task, generation) not in self.passed
                self.passed.add((task, generation))
                self.arrived.setdefault(generation, set()).add(task)
            else:
                assert isinstance(reply.message, Failure)
                assert reply.message.kind != "DeadlineExceeded" or self.at_s >= until_s

    @rule(task=st.sampled_from([A, B, C]), fails=st.booleans())
    def come(self, task: str, fails: bool = False) -> None:
        if task in self.room.tasks and task not in {name for name, _, _ in self.open.values()}:
            self.last_ask += 1
            self.open[self.last_ask] = task, self.lives[task], self.at_s + 10.0
            self.take(self.room.arrive(self.last_ask, task, self.at_s, self.lives[task], fails_on_leave=fails))

    @rule(task=st.sampled_from([A, B, C]))
    def leave_or_join(self, task: str) -> None:
        self.room.members.version += 1
        if task in self.room.tasks:
            self.room.tasks.remove(task)
            self.take(self.room.barriers.on_leave([ReleaseTask(task, 0, "killed")], self.at_s))
            assert task not in {name for name, _, _ in self.open.values()}, "one that left is answered"
        else:
            self.room.tasks.append(task)
            self.lives[task] += 3

    @rule(pause_s=st.integers(1, 6))
    def wait(self, pause_s: int) -> None:
        self.at_s += pause_s
        self.take(self.room.barriers.on_tick(self.at_s))
        assert all(until_s > self.at_s for _, _, until_s in self.open.values())

    @rule()
    def restart(self) -> None:
        self.room.restart()
        for ask, (task, life, _) in list(self.open.items()):
            self.open[ask] = task, life, self.at_s + 10.0
            self.take(self.room.arrive(ask, task, self.at_s, life))

    @invariant()
    def whoever_waits_misses_somebody(self) -> None:
        waiting = {task for task, _, _ in self.open.values()}
        assert not waiting or waiting != set(self.room.tasks)

    def teardown(self) -> None:
        for generation, told in self.told.items():
            assert self.arrived[generation] == set(told.members), "none has passed before each had come"
        waited = set(self.open)
        for task in [*self.room.tasks, *self.room.tasks]:
            self.come(task)
        assert not waited & set(self.open), "with all there, all go"


TestRandomRoom = RandomRoom.TestCase
TestRandomRoom.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)


class Cluster:
    """A coordinator and two workers on a manual clock."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.network = MemoryNetwork()
        jobs = {"ps": 1, "worker": 2}
        self.coordinator = make_coordinator(self.network, "", jobs, tick_s=None, clock=lambda: self.now_s)
        self.first, self.second = self.join(A), self.join(B)

    def join(self, task: str) -> CoordinatorClient:
        client = CoordinatorClient(self.network, self.coordinator.address, name=task)
        client.join(task, "here", steps=lambda: 12, doing=lambda: "step 13")
        return client

    def close(self) -> None:
        self.first.close()
        self.second.close()
        self.coordinator.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def begin(client: CoordinatorClient, request: AwaitBarrier) -> PendingReply:
    """Reach a barrier over the client's connection; when this returns, the client waits there."""
    [peer] = client.session._links.values()
    pending = peer.start(request)
    client.ask(GetStatus())
    return pending


def test_an_error_names_who_is_missing_with_when_it_was_heard_and_what_it_is_at(cluster: Cluster) -> None:
    cluster.second._beat()
    cluster.second.ask(GetStatus())
    cluster.now_s += 1.0
    pending = begin(cluster.first, AwaitBarrier("epoch", A, 50, 5.0))
    cluster.now_s += 5.0
    cluster.coordinator.tick()
    missing = r"worker:1 \(last heard 6.0 s ago, 12 steps ended, now at: step 13\)"
    with pytest.raises(DeadlineExceeded, match=f"worker:0 waited 5 s at barrier 'epoch' for 1 of 2 tasks: {missing}"):
        pending.wait(SOON_S)


def test_a_task_that_leaves_the_cluster_leaves_its_barriers(cluster: Cluster) -> None:
    shrinks = begin(cluster.first, AwaitBarrier("shrinks", A, 50, 5.0))
    fails = begin(cluster.first, AwaitBarrier("fails", A, 51, 5.0, fails_on_leave=True))
    cluster.second.leave("finished")
    passed = shrinks.wait(SOON_S).message
    assert isinstance(passed, BarrierPassed)
    assert (passed.generation, passed.version, passed.members) == (1, 2, (A,))
    lost = r"barrier 'fails' has failed, since a member is lost: worker:1 has left: finished"
    with pytest.raises(TaskLost, match=lost):
        fails.wait(SOON_S)
