"""The step aggregator, with averages that the test makes and applies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dflow.distributed.steps.step_gate import StepGate
from dflow.distributed.synchronous.round_messages import (
    LeaveRounds,
    NextRound,
    OpenRounds,
    ProposeRounds,
    RoundOpen,
    RoundsAgreed,
    RoundsLeft,
)
from dflow.distributed.synchronous.step_aggregator import RunCopy, StepAggregator
from dflow.distributed.wire.codec import encode_arrays
from dflow.distributed.wire.messages.basic import Ok
from dflow.distributed.wire.messages.message import Message
from dflow.distributed.wire.messages.variables import ForgetState
from dflow.lowering.queues.pending_operations import Cancel, OnResults
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.tracing.errors import CheckpointError, DflowError, RemoteError, TaskLost
from dflow.tracing.ir.resource_op import ResourceOp
from tests.distributed.task_parts import handled, without_server

PS, A, B = "/job:ps/task:0", "/job:worker/task:0", "/job:worker/task:1"
OTHERS = ("/job:ps/task:1", "/job:ps/task:2")
Done = Callable[[BaseException | None], None]


class ByHand:
    """An accumulator, the start of updates, and the calls that wait for rounds, all controlled by the test."""

    def __init__(self, process: str = "process") -> None:
        self.enough: list[int] = []
        self.averages: list[OnResults] = []
        self.steps: list[int] = []
        self.forgotten: list[str] = []
        self.updates: list[tuple[weakref.ref[Any], Done]] = []
        self.rounds: list[StepOfRun] = []
        self.answers: list[Message | BaseException] = []
        self.gone: set[str] = set()
        self.host = without_server(
            StepAggregator,
            self.gone.__contains__,
            name=PS,
            process=process,
            resources=self,
            starter=SimpleNamespace(start_unattended=self.update),
            gate=StepGate(PS),
            soon=lambda do, *args: do(*args),
            peer=lambda task: SimpleNamespace(start=partial(self.ask_task, task)),
        )
        #: Requests to other tasks to free an accumulator, each with its callback.
        self.asked: list[tuple[str, str, Callable[[Any], None]]] = []

    def accumulator(self, name: str) -> ByHand:
        return self

    def set_enough(self, count: int) -> None:
        self.enough.append(count)

    def start(self, op: ResourceOp, operands: Sequence[Any], on_results: OnResults) -> Cancel:
        if op.name == "accumulator.set_step":
            self.steps.append(operands[0])
        else:
            self.averages.append(on_results)
        return on_results

    def forget(self, name: str, reason: str, remedy: str) -> None:
        self.forgotten.append(name)

    def handle(self, message: Message, payload: bytes = b"") -> Any:
        return handled(self.host, message, payload, self)

    def ask_task(self, task: str, message: ForgetState, on_reply: Callable[[Any], None]) -> None:
        if task in self.gone:
            raise TaskLost(f"{task} has left")
        self.asked.append((task, message.key, on_reply))

    def update(self, handles: Mapping[str, int], feeds: Sequence[Any], on_done: Done, of: StepOfRun) -> None:
        self.updates.append((weakref.ref(feeds[0]), on_done))
        self.rounds.append(of)

    def reply(self, message: Message, payload: bytes = b"") -> None:
        self.answers.append(message)

    def fail(self, error: BaseException) -> None:
        self.answers.append(error)

    def open(self, rounds: int = 1, workers: Sequence[str] = (A, B), others: tuple[str, ...] = ()) -> None:
        agreed = [self.handle(ProposeRounds("run", worker, rounds, 2, "sums", others)) for worker in workers]
        infos, payload = encode_arrays([np.ones(1000, np.float32)])
        message = OpenRounds("run", rounds, 2, (A, B), *[agreed[0].accumulator] * 2, {PS: 0}, before=infos)
        self.handle(message, bytes(payload))

    def ask(self, worker: str, done: int, accumulator: str = "sums") -> None:
        self.handle(NextRound("run", worker, done, accumulator, 100.0))


@pytest.mark.parametrize("error", [None, DflowError("no room")], ids=["ends", "fails"])
def test_what_a_run_was_fed_is_let_go_of_at_its_end(error: BaseException | None) -> None:
    run = ByHand()
    run.open()
    run.averages[0]((np.zeros(1000, np.float32),))
    [(feed, on_done)] = run.updates
    gc.collect()
    assert feed() is not None
    on_done(error)
    del on_done
    gc.collect()
    assert feed() is None
    run.ask(A, 0)
    if error is None:
        assert run.answers == [RoundOpen(1, 1)]
    else:
        [answer] = run.answers
        assert str(answer).startswith(
            "rounds: the update of round 0 of 'run' failed: DflowError: no room\n  run it again"
        )
        run.open()
        run.ask(A, -1)
        assert (run.answers[1:], run.steps) == ([RoundOpen(1, 0)], [0, 1])
        run.averages[1]((np.zeros(1, np.float32),))
        # The second update is another attempt at the round, for tasks that applied the first.
        first, second = run.rounds
        assert (first, first.number) == (second, 0)


def test_an_accumulator_is_of_one_run_at_a_time_and_released_when_all_have_left_it() -> None:
    run = ByHand()
    run.open()
    assert run.handle(ProposeRounds("another", A, 3, 5, "sums")) == RoundsAgreed(5, "sums 1", False, "process")
    assert run.handle(ProposeRounds("another", B, 3, 1, "others")) == RoundsAgreed(5, "sums 1", False, "process")
    run.handle(LeaveRounds("run", A, -1, "sums"))
    assert run.forgotten == []
    run.host.left(B)
    assert run.forgotten == ["sums"]
    run.handle(LeaveRounds("another", A, -1, "sums"))
    assert run.forgotten == ["sums", "sums 1"]
    assert run.handle(ProposeRounds("run", A, 1, 2, "sums")) == RoundsAgreed(2, "sums", False, "process")
    run.gone.add(B)
    with pytest.raises(TaskLost, match=f"{B} has left the cluster, and cannot take part in a run"):
        run.handle(ProposeRounds("run", B, 1, 2, "sums"))
    with pytest.raises(RemoteError, match="run 'run' has 1 rounds and was asked for with 2"):
        run.handle(ProposeRounds("run", A, 2, 2, "sums"))


def test_who_waits_is_answered_when_the_task_closes_and_not_again() -> None:
    run, left = ByHand(), ByHand()
    run.open(rounds=2)
    run.ask(A, 0)
    left.open(workers=[A], others=OTHERS)
    left.handle(LeaveRounds("run", A, -1, "sums"))
    for one in (run, left):
        assert one.answers == []
        one.host.close(TaskLost("it closes"))
        assert [*map(type, one.answers)] == [TaskLost]
    run.handle(LeaveRounds("run", B, 0, "sums"))
    run.averages[0]((np.zeros(1000, np.float32),))
    run.updates[0][1](None)
    for _, _, on_reply in left.asked:
        on_reply(Ok())
    assert (run.answers[1:], left.answers[1:]) == ([RoundsLeft()], [])


def test_a_name_is_free_and_the_last_leave_answered_when_all_tasks_have_freed_their_accumulators() -> None:
    run = ByHand()
    run.open(others=OTHERS)
    run.handle(LeaveRounds("run", A, -1, "sums"))
    assert (run.answers, run.asked) == ([RoundsLeft()], [])
    run.handle(LeaveRounds("run", B, -1, "sums"))
    assert run.forgotten == ["sums"]
    assert [asked[:2] for asked in run.asked] == [(OTHERS[0], "sums/ps:1"), (OTHERS[1], "sums/ps:2")]
    run.asked[0][2](Ok())
    assert run.handle(ProposeRounds("early", A, 3, 2, "sums")).accumulator == "sums 1"
    assert run.answers == [RoundsLeft()]
    run.asked[1][2](Ok())
    assert run.answers == [RoundsLeft()] * 2
    assert run.handle(ProposeRounds("late", A, 3, 2, "sums")).accumulator == "sums"


def test_a_name_is_not_used_again_where_a_task_may_still_hold_its_accumulator() -> None:
    run = ByHand()
    run.gone.add(OTHERS[0])
    run.open(workers=[A], others=OTHERS)
    run.handle(LeaveRounds("run", A, -1, "sums"))
    assert run.answers == []
    run.asked[0][2](Ok())
    assert run.answers == [RoundsLeft()]
    assert run.handle(ProposeRounds("another", A, 3, 2, "sums")).accumulator == "sums 1"


def test_an_opening_of_another_process_is_none_of_this_one() -> None:
    run = ByHand()
    run.host.return_to([RunCopy("run", 3, 2, 2, 1)], 1)
    run.open(rounds=3)
    given = len(run.enough)
    text = "run 'run': expected accumulator 'sums/1', got 'sums', which belongs to an earlier process"
    with pytest.raises(TaskLost, match=text):
        run.ask(A, 7)
    with pytest.raises(TaskLost, match=text):
        run.handle(OpenRounds("run", 3, 2, (A, B), "sums", "sums", {PS: 0}))
    run.handle(LeaveRounds("run", B, 7, "sums"))
    assert run.enough[given:] == [1], "the gradient of the worker that left does not come"


def test_a_round_whose_update_failed_is_in_no_snapshot_while_workers_may_do_it_again() -> None:
    run = ByHand()
    run.open(rounds=3)
    run.averages[0]((np.zeros(1, np.float32),))
    run.updates[0][1](RemoteError("it fails on one task"))
    text = "run 'run': expected round 0 on all tasks or none, got a failed update"
    with pytest.raises(CheckpointError, match=text):
        run.host.copy()
    run.open(rounds=3)
    run.averages[1]((np.zeros(1, np.float32),))
    run.updates[1][1](None)
    assert [(one.done, one.is_half_done) for one in run.host.copy()] == [(1, False)]


def test_a_failed_round_that_is_in_a_snapshot_keeps_its_identity_in_another_process() -> None:
    run, other = ByHand(), ByHand("another")
    run.open(rounds=3)
    run.averages[0]((np.zeros(1, np.float32),))
    run.updates[0][1](RemoteError("it fails on one task"))
    for worker in (A, B):
        run.handle(LeaveRounds("run", worker, -1, "sums"))
    [copy] = run.host.copy()
    assert copy.is_half_done
    other.host.return_to([copy], 1)
    other.open(rounds=3)
    other.averages[0]((np.zeros(1, np.float32),))
    assert other.rounds == [one._replace(epoch=1) for one in run.rounds]
    with pytest.raises(CheckpointError, match="expected round 0 on all tasks or none"):
        other.host.copy()
