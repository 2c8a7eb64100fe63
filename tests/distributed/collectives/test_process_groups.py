"""Groups of processes that compute together: how the coordinator forms them, a member's part, and JAX's service."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.collectives import collectives, jax_runtime, process_group
from dflow.distributed.collectives.collectives import Collectives
from dflow.distributed.collectives.group_messages import (
    END,
    MAIN,
    AwaitLeaderWork,
    Exchange,
    Exchanged,
    GroupFormed,
    JoinGroup,
    LeaderWork,
    LeaderWorkEnded,
    LeaderWorks,
)
from dflow.distributed.collectives.process_group import ProcessGroup
from dflow.distributed.collectives.process_groups import LONG_EXCHANGE_S, ProcessGroups
from dflow.distributed.coordinator.coordinator_events import Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.process.termination import Terminated
from dflow.distributed.transport.loopback import LOOPBACK, loopback
from dflow.distributed.wire.messages.basic import Failure
from dflow.distributed.wire.messages.roster import Roster, TaskInfo
from dflow.lowering.queues.timers import TIMERS
from dflow.testing import memory_cluster
from dflow.tracing.errors import StrategyError, TaskLost
from tests.distributed.waiting import DEADLINE_S
from tests.effort import examples

A, B, C = (f"/job:worker/task:{index}" for index in range(3))


class Room:
    """A coordinator's groups, and its tasks in their lives: 0, 1 and 2 at first."""

    def __init__(self, *tasks: str) -> None:
        self.lives = {task: number for number, task in enumerate(tasks)}
        #: The tasks to wait for when a group forms.
        self.coming = set(tasks)
        #: The barrier at which each task waits, and the tasks that are missing there.
        self.waiting: dict[str, tuple[str, frozenset[str]]] = {}
        members = SimpleNamespace(coming=lambda job, at_s, within_s: tuple(self.coming))
        part = SimpleNamespace(describe=lambda task, at_s: f"<{task[-1]}>", waiting_at=self.waiting.get)
        core: Any = SimpleNamespace(members=members, part=lambda kind: part)
        self.groups = ProcessGroups(core)

    def join(self, ask: int, task: str, at_s: float = 0.0) -> list[Command]:
        return [*self.groups.join(JoinGroup(task, 60.0), self.received(ask, task, at_s))]

    def formed(self) -> Room:
        for ask, task in enumerate(self.lives):
            self.join(ask, task)
        return self

    def give(
        self, ask: int, task: str, word: str, number: int = 1, at_s: float = 0.0, name: str = "here", channel: str = "c"
    ) -> list[Command]:
        request = Exchange(task, channel, number, name, word, 100.0)
        return [*self.groups.exchange(request, self.received(ask, task, at_s))]

    def received(self, ask: int, task: str, at_s: float = 0.0) -> Received:
        return Received(at_s, 0, ask, self.lives[task])

    def tick(self, at_s: float) -> list[Command]:
        return self.groups.on_tick(at_s)


def texts(replies: Sequence[Command]) -> list[str]:
    failures = [one.message for one in replies if isinstance(one, SendReply)]
    return [f"{failure.kind}: {failure.text}" for failure in failures if isinstance(failure, Failure)]


def test_a_group_forms_when_all_have_asked_and_ranks_go_by_index() -> None:
    room = Room(B, A, C)
    assert room.join(1, B) == []
    assert room.join(2, C) == []
    formed = GroupFormed((A, B, C), (1, 0, 2))
    assert set(room.join(3, A)) == {SendReply(1, formed), SendReply(2, formed), SendReply(3, formed)}
    assert room.join(9, B) == [SendReply(9, formed)]  # its answer was lost with a connection


def test_a_task_that_will_not_come_back_is_left_out() -> None:
    room = Room(A, B, C)
    room.join(1, A)
    room.join(2, B)
    assert room.tick(1.0) == []
    room.coming.remove(C)
    assert room.tick(2.0) == [SendReply(1, GroupFormed((A, B), (0, 1))), SendReply(2, GroupFormed((A, B), (0, 1)))]


def test_a_group_that_does_not_form_names_the_missing_tasks() -> None:
    room = Room(A, B, C)
    room.join(1, A)
    (text,) = texts(room.tick(60.0))
    assert text.startswith("DeadlineExceeded: worker:0 waited 60 s for its group to form; missing: <1>, <2>\n  start")
    room.join(2, B, at_s=61.0)
    assert room.tick(120.0) == []


def test_members_at_different_points_of_the_program_are_told_so() -> None:
    room = Room(A, B).formed()
    room.give(1, A, "", name="step 3")
    replies = room.give(2, B, "", name="the end")
    assert {reply.ask for reply in replies} == {1, 2}
    assert "different points of the program: worker:0 at step 3, worker:1 at the end" in texts(replies)[0]


@pytest.mark.parametrize("lost", [A, B])
def test_a_group_is_over_when_a_member_has_left(lost: str) -> None:
    room = Room(A, B, C).formed()
    room.give(1, C, "")
    why = f"worker:{lost[-1]} has left: killed"
    (reply,) = room.groups.leave(5.0, lost, room.lives[lost], why)
    assert reply.ask == 1
    assert texts([reply]) == [f"TaskLost: the group of worker:0, worker:1, worker:2 is over: {why}"]
    other = B if lost == A else A
    assert texts(room.give(2, other, "")) == [f"TaskLost: the group of {'worker:' + other[-1]} is over: {why}"]
    # Its next life waits for those of the others.
    room.lives |= {lost: 10}
    assert room.join(3, lost) == []


def test_a_long_exchange_is_logged_once_and_ends_at_its_deadline() -> None:
    room = Room(A, B).formed()
    room.give(1, A, "", at_s=1.0, name="step 3")
    assert room.tick(LONG_EXCHANGE_S) == []
    assert room.tick(12.0) == [Log("worker:0 waited 11.0 s at step 3 for <1>")]
    assert room.tick(13.0) == []
    assert texts(room.tick(101.0)) == ["DeadlineExceeded: worker:0 waited 100.0 s at step 3 for <1>"]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.booleans()), max_size=40))
def test_no_request_is_answered_twice_and_no_word_is_mixed(events: list[tuple[str, bool]]) -> None:
    room, ask, next_life = Room(A, B, C), 0, 10
    asked: dict[int, str] = {}
    answered: dict[int, object] = {}
    numbers: dict[str, int] = {}
    waiting: set[str] = set()
    for task, leaves in events:
        replies: Sequence[Command] = []
        if leaves:
            replies = room.groups.leave(0.0, task, room.lives[task], "it left")
            room.lives[task], next_life = next_life, next_life + 1
            numbers.pop(task, None)
            waiting.discard(task)
        elif task not in waiting:
            ask += 1
            waiting.add(task)
            if task not in numbers:
                asked[ask] = task
                replies = room.join(ask, task)
            else:
                asked[ask] = task
                replies = room.give(ask, task, f"{task} {numbers[task]}", numbers[task])
        for reply in replies:
            assert reply.ask not in answered
            answered[reply.ask] = reply.message
            waiting.discard(asked[reply.ask])
            if isinstance(reply.message, GroupFormed):
                numbers[asked[reply.ask]] = 1
            elif isinstance(reply.message, Exchanged):
                number = numbers[asked[reply.ask]]
                assert reply.message.words == tuple(f"{member} {number}" for member in (A, B, C))
                numbers[asked[reply.ask]] += 1


WORK = LeaderWork("the save", 2, 1)


def told(room: Room, has_ended: bool, error: str = "") -> list[Command]:
    works = LeaderWorks(A, WORK, has_ended, "Bad" if error else "", error)
    *replies, _ = room.groups.note_work(works, room.received(9, A))
    return replies


def await_work(room: Room, ask: int, task: str, work: LeaderWork = WORK) -> list[Command]:
    return [*room.groups.await_work(AwaitLeaderWork(task, work, 100.0), room.received(ask, task))]


@pytest.mark.parametrize("error", ["", "the disk is full"])
def test_members_that_ask_wait_for_a_work_of_the_first_one(error: str) -> None:
    room = Room(A, B, C).formed()
    assert await_work(room, 1, B) == []
    assert told(room, has_ended=False) == []
    # It goes on while another thread of it works.
    room.give(2, A, "", number=3, channel=MAIN)
    ended = LeaderWorkEnded("Bad" if error else "", error)
    assert told(room, has_ended=True, error=error) == [SendReply(1, ended)]
    assert await_work(room, 3, C) == [SendReply(3, ended)]


def test_a_work_that_the_first_member_passes_by_is_refused_immediately() -> None:
    room = Room(A, B, C).formed()
    assert await_work(room, 1, B) == []
    fact = "StrategyError: worker:1 waits for the save by worker:0, which has gone on without it\n  call it on all"
    (text,) = texts(room.give(2, A, "", number=3, channel=MAIN))
    assert text.startswith(fact)
    assert texts(await_work(room, 3, C))[0].startswith(fact.replace("worker:1", "worker:2"))
    assert await_work(room, 4, B, LeaderWork("the save", 3, 1)) == []


def test_a_wait_for_a_work_ends_at_its_deadline_and_with_the_group() -> None:
    room = Room(A, B).formed()
    await_work(room, 1, B)
    assert texts(room.tick(100.0)) == [
        (
            "DeadlineExceeded: worker:1 waits for the save by worker:0, and it has not ended\n"
            "  call it on all workers, or on worker:0 alone"
        )
    ]
    await_work(room, 2, B)
    assert texts(room.groups.leave(5.0, A, room.lives[A], "killed"))[0].startswith("TaskLost: the group of")


@pytest.mark.parametrize("where", ["barrier", "end"])
def test_an_exchange_whose_missing_members_wait_for_it_is_refused(where: str) -> None:
    room = Room(A, B).formed()
    if where == "barrier":
        room.waiting[B] = "start", frozenset({A})
        room.give(1, A, "", name="a save", channel=MAIN)
    else:
        room.give(1, B, "", name=END, channel=MAIN)
        room.give(2, A, "", name="a save", channel="other")
    assert texts(room.tick(LONG_EXCHANGE_S - 1)) == []
    (text,) = texts(room.tick(LONG_EXCHANGE_S))
    place = "barrier 'start'" if where == "barrier" else END
    assert f"different points of the program: worker:0 at a save, worker:1 at {place}\n" in text


# A member of a group: errors of its computations, when another member has left or not.


TASKS = "/job:worker/task:0", "/job:worker/task:1"


class Coordinator:
    """The coordinator as a member sees it: every other member says what this one says."""

    task = TASKS[0]

    def __init__(self) -> None:
        self.session = self
        self.asked: list[str] = []
        self.look: Callable[[Roster], None] | None = None
        self.refuse: Callable[[str], None] | None = None

    def call_on_roster(self, look: Callable[[Roster], None]) -> None:
        self.look = look

    def call_on_lost(self, refuse: Callable[[str], None]) -> None:
        self.refuse = refuse

    def ask(self, message: Exchange, timeout_s: float) -> Exchanged:
        self.asked.append(message.name)
        return Exchanged((message.word,) * len(TASKS))

    def leave(self, reason: str) -> None:
        self.asked.append(f"leave: {reason}")

    def lose(self, left: str) -> None:
        assert self.look is not None
        infos = [TaskInfo(TASKS[0], "", 0.0, life=1), TaskInfo(TASKS[1], "", 0.0, 1.0, left, life=2)]
        self.look(Roster(tuple(infos), ()))


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def group(coordinator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    monkeypatch.setattr(process_group, "CAUSE_S", 0.05)
    made = ProcessGroup(coordinator, GroupFormed(TASKS, (1, 2)), 1.0)
    yield made
    made.close()  # otherwise the group ends this process


def fail(group: ProcessGroup, error: Exception) -> None:
    with group.computing():
        raise error


def test_a_collective_that_fails_with_a_member_names_that_member(group: ProcessGroup, coordinator: Coordinator) -> None:
    coordinator.lose("its process has ended")
    fact = (
        r"the group of worker:0, worker:1 is over: worker:1 has left: its process has ended(.|\n)*start its processes"
    )
    with pytest.raises(TaskLost, match=fact) as raised:
        fail(group, ValueError("Gloo AllReduce failed"))
    assert str(raised.value.__cause__) == "Gloo AllReduce failed"


def test_a_process_that_the_coordinator_refuses_is_in_no_group(group: ProcessGroup, coordinator: Coordinator) -> None:
    assert coordinator.refuse is not None
    coordinator.refuse("the coordinator did not take this task back")
    with pytest.raises(TaskLost, match="is over: the coordinator did not take this task back"):
        fail(group, ValueError("Gloo AllReduce failed"))


def test_a_lost_group_ends_the_process_also_while_it_exits_and_can_start_no_thread(
    group: ProcessGroup, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    ends: queue.SimpleQueue[int] = queue.SimpleQueue()
    monkeypatch.setattr(process_group, "_end_now", ends.put)
    monkeypatch.setattr(process_group, "GRACE_S", 0.0)
    TIMERS.after(0.0, lambda: None)  # as `dflow.connect` does
    monkeypatch.setattr(threading.Thread, "start", refuse)
    coordinator.lose("its process has ended")
    assert ends.get(timeout=DEADLINE_S) == process_group.STATUS


@pytest.mark.parametrize("left", ["", "finished"])
def test_an_error_without_a_loss_is_raised_as_it_is(group: ProcessGroup, coordinator: Coordinator, left: str) -> None:
    if left:
        coordinator.lose(left)
    with pytest.raises(ValueError, match="of the step"):
        fail(group, ValueError("of the step"))


def test_an_error_of_dflow_is_raised_without_a_wait(
    group: ProcessGroup, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "CAUSE_S", 1e9)
    with pytest.raises(StrategyError, match="of the step"):
        fail(group, StrategyError("of the step"))


@pytest.mark.usefixtures("default_termination")
@pytest.mark.parametrize("is_agreed", [True, False])
def test_a_stop_of_all_processes_waits_for_their_checkpoint(
    group: ProcessGroup, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, is_agreed: bool
) -> None:
    def end(status: int) -> NoReturn:
        raise SystemExit(status)

    monkeypatch.setattr(process_group, "_end_now", end)
    Terminated("SIGTERM has come to worker:1", is_agreed=is_agreed)
    with pytest.raises(SystemExit, match="143"):
        group._end_of_program()
    assert coordinator.asked == ["the end of the program"] * is_agreed + ["leave: SIGTERM has come to worker:1"]


# The start of JAX's runtime: the addresses that it connects to and listens at.


@pytest.mark.parametrize(
    ("given", "within"),
    [
        ({}, None),
        ({"http_proxy": "http://proxy:1"}, "10.0.0.1"),
        ({"https_proxy": "http://proxy:1", "no_proxy": "a.example,b"}, "a.example,b,10.0.0.1"),
        ({"grpc_proxy": "http://proxy:1", "no_grpc_proxy": "c", "no_proxy": "b"}, "c,10.0.0.1"),
    ],
)
def test_grpc_reaches_the_service_without_a_proxy(
    given: Mapping[str, str], within: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if "_proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with jax_runtime._without_proxy("10.0.0.1:7711"):
        assert os.environ.get(jax_runtime._NO_PROXY) == within
        assert jax.config.read("jax_check_proxy_envs") == (within is None)
    assert dict(os.environ) == before
    assert jax.config.read("jax_check_proxy_envs")


def test_a_service_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = "{}:{}".format(*server.getsockname())
        jax_runtime._check_reached(place, 5.0)
    with pytest.raises(StrategyError, match=rf"expected a connection to {place}, got: .*refused(.|\n)*address="):
        jax_runtime._check_reached(place, 5.0)


def test_collectives_listen_at_an_address_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_runtime._host_here("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: LOOPBACK)
    assert jax_runtime._host_here("192.0.2.1") == LOOPBACK  # a translated address
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    fact = r"expected an address of this host, got '192.0.2.1' and 'no-such-host.invalid', which are none"
    with pytest.raises(StrategyError, match=fact):
        jax_runtime._host_here("192.0.2.1")


def test_each_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0] for address in ("192.0.2.1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *args, **options: found)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    assert jax_runtime._host_here("here") == "127.0.0.1"


def test_loopback_is_of_the_sixth_version_where_there_is_no_other() -> None:
    assert loopback(v4="127.0.0.1", v6="192.0.2.1") == "127.0.0.1"
    assert loopback(v4="192.0.2.1", v6="::1") == ("::1" if socket.has_ipv6 else "192.0.2.1")


def test_a_process_whose_runtime_does_not_start_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        closed = False

        def __init__(self, *_: object) -> None: ...

        def abandon(self) -> None: ...

        def close(self) -> None:
            Group.closed = True

    def unreached(*_: object) -> None:
        raise StrategyError("no connection")

    for name, stub in {"ProcessGroup": Group, "start_runtime": unreached, "refuse_late_start": lambda: None}.items():
        monkeypatch.setattr(collectives, name, stub)
    with memory_cluster() as memory, closing(memory.worker()) as worker:
        monkeypatch.setattr(worker.coordinator, "ask", lambda *_: None)
        monkeypatch.setattr(collectives, "parse_endpoints", lambda _: SimpleNamespace(main=None))
        started = Collectives(worker)
        with pytest.raises(StrategyError, match="no connection"):
            started.start()
        started.close()
    assert not Group.closed
