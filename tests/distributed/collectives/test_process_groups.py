"""Groups of processes as a state machine: they form, exchange words, and end with their first member."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from dflow.distributed.collectives.process_groups import LONG_EXCHANGE_S, ProcessGroups
from dflow.distributed.coordinator.coordinator_events import Command, Log, SendReply
from dflow.distributed.coordinator.coordinator_part import Received
from dflow.distributed.wire.messages.basic import Failure
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
        self.groups = ProcessGroups(
            lambda job, at_s: tuple(self.coming), lambda task, at_s: f"<{task[-1]}>", self.waiting.get
        )

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
        return Received(at_s, 0, ask, self.lives[task], None)  # type: ignore[arg-type]

    def tick(self, at_s: float) -> list[Command]:
        return self.groups.on_tick(at_s, None)  # type: ignore[arg-type]


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
    assert room.tick(2.0) == [
        SendReply(1, GroupFormed((A, B), (0, 1))),
        SendReply(2, GroupFormed((A, B), (0, 1))),
    ]


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
