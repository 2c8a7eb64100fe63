"""Decisions of the rounds of synchronous training: scripted, and random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.distributed.coordinator.coordinator_events import SendReply
from dflow.distributed.synchronous.round_messages import RoundOpen
from dflow.distributed.synchronous.rounds import FreeRun, OpenRound, RoundCommand, Rounds, SetEnough
from dflow.distributed.wire.messages.basic import Failure
from tests.effort import examples

A, B, C = "a", "b", "c"


def last(*commands: list[RoundCommand]) -> list[RoundCommand]:
    return commands[-1]


def opened(rounds: int = 10, wanted: int = 3, workers: tuple[str, ...] = (A, B, C)) -> Rounds:
    run = Rounds("run")
    for worker in (A, B, C):
        assert run.began(worker) == []
    assert run.open(rounds, wanted, workers)[0] == OpenRound(0)
    return run


def test_who_has_given_a_gradient_waits_for_the_update_and_who_is_late_does_not() -> None:
    run = opened(wanted=2)
    assert (
        last(run.ready(1, A, -1), run.ready(2, B, -1), run.ready(3, C, -1), run.ready(4, A, 0), run.ready(5, B, 0))
        == []
    )
    assert run.updated() == [OpenRound(1), SetEnough(2), SendReply(4, RoundOpen(1, 1)), SendReply(5, RoundOpen(1, 1))]
    assert run.ready(6, C, 0) == [SendReply(6, RoundOpen(1, 1))]


def test_a_run_that_is_not_open_says_so() -> None:
    (reply,) = Rounds("run").ready(1, A, -1)
    assert isinstance(reply, SendReply)
    assert isinstance(reply.message, Failure)
    assert reply.message.text == "'run' is not open; run it again"


def test_a_worker_that_comes_late_or_again_is_waited_for_from_then_on() -> None:
    run = opened(wanted=3, workers=(A, B))
    assert run.enough == 2
    assert run.ready(1, C, -1) == [SendReply(1, RoundOpen(0, 0)), SetEnough(3)]
    assert run.leave(A, -1) == [SetEnough(2)]
    assert run.ready(2, A, -1) == [SendReply(2, RoundOpen(0, 0)), SetEnough(3)]


def test_a_failed_update_is_told_once_to_each_and_the_round_is_done_again_when_the_run_is_opened_again() -> None:
    run = opened(wanted=2)
    refusals = last(
        run.leave(C, -1), run.ready(1, A, -1), run.ready(3, A, 0), run.mean_taken(), run.updated("ps:1", "TaskLost")
    )
    text = "the update of round 0 of 'run' failed: ps:1\n  run it again under this name, and it goes on with this round"
    assert refusals == [SendReply(3, Failure("TaskLost", text))]
    assert last(run.leave(A, 0), run.began(A)) == []
    assert run.ready(4, A, -1) == [SendReply(4, Failure("TaskLost", text))], "it has not been opened again"
    # B still computes, and is waited for after it knows of the failure; C left regularly before.
    assert run.open(10, 2, (A, B, C)) == [OpenRound(1), SetEnough(2)]
    assert run.ready(5, A, -1) == [SendReply(5, RoundOpen(1, 0))]
    assert run.ready(6, B, 0) == [SendReply(6, Failure("TaskLost", text))]
    assert last(run.leave(B, 0), run.began(B), run.open(10, 2, (A, B)), run.ready(7, B, -1)) == [
        SendReply(7, RoundOpen(1, 0)),
        SetEnough(2),
    ]
    assert last(run.ready(8, A, 1), run.ready(9, B, 1)) == []
    assert run.updated() == [OpenRound(2), SetEnough(2), SendReply(8, RoundOpen(2, 1)), SendReply(9, RoundOpen(2, 1))]


def test_what_a_run_holds_is_released_when_nobody_takes_part_and_held_again_for_the_next() -> None:
    run = opened(rounds=2)
    assert last(run.ready(1, A, -1), run.leave(A, -1), run.leave(B, -1)) == [SetEnough(1)]
    assert run.leave(C) == [FreeRun()]
    assert run.leave(B) == []
    assert last(run.began(B)) == []
    assert run.open(2, 3, (B,)) == [OpenRound(0), SetEnough(1)]
    assert last(run.ready(2, B, -1), run.mean_taken(), run.leave(B, 0)) == []
    assert run.updated() == [OpenRound(1), SetEnough(1), FreeRun()]
    assert run.began(A) == []
    assert run.open(2, 3, (A,)) == [OpenRound(1), SetEnough(1)]
    assert last(run.ready(3, A, -1), run.ready(4, A, 1), run.mean_taken(), run.updated()) == [
        SendReply(4, RoundOpen(2, 2))
    ]
    assert run.leave(A, 1) == [FreeRun()]
    assert last(run.began(B), run.open(2, 3, (B,))) == []
    assert run.ready(5, B, -1) == [SendReply(5, RoundOpen(2, 2))]
    assert run.leave(B, -1) == []


def test_a_wait_that_is_given_up_names_who_gave_no_gradient() -> None:
    run = opened()
    [refusal] = last(run.ready(1, A, -1), run.ready(2, A, 0), run.timed_out(2))
    text = "round 0 of 'run' has not ended: 3 gradients are enough for it, a gave one and b, c did not"
    assert refusal == SendReply(2, Failure("DeadlineExceeded", text))
    assert run.timed_out(2) == []


def test_a_second_ask_takes_the_place_of_the_first() -> None:
    run = opened()
    [refusal] = last(run.ready(1, A, -1), run.ready(2, A, 0), run.ready(3, A, 0))
    assert refusal.ask == 2  # type: ignore[union-attr]
    assert SendReply(3, RoundOpen(1, 1)) in run.updated()


class World:
    """Workers that compute, die, end and return at random, and an accumulator that takes the first gradients."""

    def __init__(self, seed: int, workers: int, backup: int, rounds: int) -> None:
        self.random = random.Random(seed)
        self.rounds, self.wanted = rounds, workers - backup
        self.names = [f"w{number}" for number in range(workers)]
        self.machine = Rounds("run")
        self.asks = 0
        self.waiting: dict[int, str] = {}
        self.state: dict[str, str] = dict.fromkeys(self.names, "new")
        self.at: dict[str, int] = dict.fromkeys(self.names, -1)
        self.step, self.enough, self.is_taking = 0, 0, False
        self.count = 0
        self.averaged: list[int] = []
        self.do(self.machine.open(rounds, self.wanted, tuple(self.names)))

    def do(self, commands: list[RoundCommand]) -> None:
        for command in commands:
            match command:
                case OpenRound(number):
                    assert number == len(self.averaged) == self.step
                    assert not self.is_taking
                    self.is_taking = True
                case SetEnough(count):
                    assert 1 <= count <= self.wanted
                    self.enough = count
                case SendReply(ask, RoundOpen(number)):
                    worker = self.waiting.pop(ask)
                    assert number > self.at[worker] or number == self.rounds
                    self.at[worker], self.state[worker] = number, "over" if number == self.rounds else "busy"
                case SendReply(ask):
                    self.waiting.pop(ask)

    def update(self) -> bool:
        if not self.is_taking or self.count < min(self.enough, self.wanted):
            return False
        self.averaged.append(self.count)
        self.count, self.step, self.is_taking = 0, self.step + 1, False
        self.do(self.machine.updated())
        return True

    def move(self, worker: str) -> None:
        state = self.state[worker]
        if state in ("new", "dead"):
            self.at[worker] = -1
            self.ask(worker, -1)
        elif state == "busy" and self.random.random() < 0.1:
            self.die(worker)
        elif state == "busy":
            if self.at[worker] == self.step and self.count < self.wanted:
                self.count += 1
            if self.random.random() < 0.05:
                self.state[worker] = "over"
                self.do(self.machine.leave(worker, self.at[worker]))
            else:
                self.ask(worker, self.at[worker])
        elif state == "waiting" and self.random.random() < 0.05:
            self.die(worker)

    def ask(self, worker: str, done: int) -> None:
        self.asks += 1
        self.waiting[self.asks], self.state[worker] = worker, "waiting"
        self.do(self.machine.ready(self.asks, worker, done))

    def die(self, worker: str) -> None:
        self.state[worker] = "dead"
        self.do(self.machine.leave(worker))
        assert worker not in self.waiting.values()


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 2), st.integers(0, 8))
@pytest.mark.parametrize("deaths", [True, False])
def test_whatever_workers_do_every_round_ends_with_no_more_gradients_than_are_wanted(
    deaths: bool, seed: int, workers: int, backup: int, rounds: int
) -> None:
    world = World(seed, workers, min(backup, workers - 1), rounds)
    for _ in range(60):
        if world.random.random() < 0.3:
            world.update()
        else:
            world.move(world.random.choice(world.names))
    # From here on no worker dies or returns, and all present workers continue to the end.
    world.random.random = lambda: 1.0  # type: ignore[method-assign]
    for worker in world.names:
        if world.state[worker] in ("new", "dead") and deaths:
            world.state[worker] = "over"
            world.do(world.machine.leave(worker))
    for _ in range(40 * (rounds + 1)):
        for worker in world.names:
            if world.state[worker] != "waiting":
                world.move(worker)
        world.update()
    present = [worker for worker in world.names if world.at[worker] == rounds]
    assert not world.waiting
    if present:
        assert len(world.averaged) == rounds
    assert all(1 <= count <= world.wanted for count in world.averaged)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 8))
def test_whoever_dies_no_gradient_of_a_worker_that_lives_is_left_out(seed: int, workers: int, rounds: int) -> None:
    world = World(seed, workers, 0, rounds)
    for _ in range(40 * rounds):
        if world.random.random() < 0.3:
            world.update()
            continue
        worker = world.random.choice([name for name in world.names if world.state[name] != "dead"] or world.names[:1])
        if world.state[worker] == "dead":
            break
        if world.state[worker] == "busy" and world.random.random() < 0.2:
            # It sends its gradient, and dies before its report.
            world.count += world.at[worker] == world.step
            world.die(worker)
        elif world.state[worker] == "busy":
            assert world.at[worker] == world.step
            assert world.count < world.wanted
            world.move(worker)
        else:
            world.move(worker)


def test_a_run_that_is_not_elastic_waits_for_the_next_process_of_a_worker_that_died() -> None:
    run = Rounds("run")
    for worker in (A, B):
        run.began(worker)
    assert run.open(10, 2, (A, B), is_elastic=False) == [OpenRound(0), SetEnough(2)]
    assert last(run.ready(1, A, -1), run.ready(2, B, -1), run.ready(3, A, 0), run.leave(B)) == []
    # The next process of B does the step of the open round, or finds that its gradient is in it.
    assert last(run.began(B), run.ready(4, B, -1)) == [SendReply(4, RoundOpen(0, 0))]
    assert run.ready(5, B, 0) == []
    assert run.updated() == [OpenRound(1), SetEnough(2), SendReply(3, RoundOpen(1, 1)), SendReply(5, RoundOpen(1, 1))]


def test_a_run_that_is_not_elastic_waits_for_a_worker_that_died_before_it_was_opened() -> None:
    run = Rounds("run")
    for worker in (A, B, C):
        run.began(worker)
    assert last(run.leave(B), run.leave(C, -1), run.leave(C)) == []
    assert run.open(10, 3, (A, B, C), is_elastic=False) == [OpenRound(0), SetEnough(2)]
