"""The newest events of a task: the kept ones, and a reader's view of them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.queues.channel import StepId
from dflow.lowering.steps.plan import Call, Plan, Recv, Send
from dflow.lowering.steps.recorder import MOST_TEXT, Recorder, described_end
from dflow.lowering.steps.step_events import (
    COMPUTED,
    CONNECTED,
    ITEM_BEGAN,
    ITEM_FAILED,
    RECEIVED,
    SENT,
    STEP_BEGAN,
    Event,
)
from tests.distributed.waiting import until

STEP = StepId("/job:worker/task:0", 7)
PLAN = Plan(
    "/job:ps/task:0",
    2,
    (
        Recv("w", "/job:worker/task:0", (0,), (("f32", ()),)),
        Call(0, (), (), (0,), (1,)),
        Send("y+1", "/job:worker/task:0", (0, 1)),
    ),
    names=("%w (net.recv)\n  at model.py:12", "%y (xla.call)", "%sent (net.send)"),
)


class Clock:
    """A clock that counts up by one at each reading."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


@given(st.integers(1, 20), st.lists(st.one_of(st.none(), st.integers(1, 40)), max_size=80))
def test_the_newest_are_kept_in_order_and_as_many_as_was_asked_for_last(
    capacity: int, orders: list[int | None]
) -> None:
    recorder, expected, most, number = Recorder(capacity, Clock()), [], capacity, 0
    for order in orders:
        if order is None:
            number = recorder.note(STEP_BEGAN, StepId("a", number))
            expected.append(number)
        else:
            recorder.keep(order)
            most = max(order, capacity)
        expected = expected[-most:]
    assert [event.at_ns for event in recorder.events()] == expected
    assert [event.at_ns for event in recorder.events(since_ns=number)] == expected[-1:]


def test_an_item_is_told_by_its_class_its_node_and_the_users_line() -> None:
    recorder = Recorder(clock=Clock())
    recorder.note(ITEM_BEGAN, STEP, PLAN, 0)
    recorder.note(ITEM_FAILED, STEP, PLAN, (1, "VariableError"))
    recorder.note(ITEM_BEGAN, STEP, PLAN, 2)
    assert recorder.events() == [
        Event(1, ITEM_BEGAN, STEP.origin, STEP.number, "Recv", "w", "model.py:12", "/job:worker/task:0", values=1),
        Event(2, ITEM_FAILED, STEP.origin, STEP.number, "Call", "%y (xla.call)", number=1, text="VariableError"),
        Event(3, ITEM_BEGAN, STEP.origin, STEP.number, "Send", "y+1", "", "/job:worker/task:0", values=2, number=2),
    ]


def test_a_value_is_told_by_its_edge_its_peer_and_its_size() -> None:
    recorder = Recorder(clock=Clock())
    recorder.note(SENT, STEP, "w", "/job:ps/task:0", 4, 17)
    recorder.note(RECEIVED, STEP, "v", "/job:ps/task:0", 8)
    recorder.note(CONNECTED, None, "/job:ps/task:0", "127.0.0.1:7711")
    assert recorder.events() == [
        Event(1, SENT, STEP.origin, STEP.number, name="w", peer="/job:ps/task:0", size_bytes=4, began_ns=17),
        Event(2, RECEIVED, STEP.origin, STEP.number, name="v", peer="/job:ps/task:0", size_bytes=8),
        Event(3, CONNECTED, peer="/job:ps/task:0", text="127.0.0.1:7711"),
    ]


def test_an_error_is_kept_as_a_text_of_bounded_length() -> None:
    assert described_end(ValueError("too few")) == "ValueError: too few"
    assert len(described_end(ValueError("x" * 10_000))) == MOST_TEXT


class Result:
    """A result of a call, which is computed when `end` is called, or was donated to another call."""

    def __init__(self, is_computed: bool = False, is_donated: bool = False) -> None:
        self._computed = threading.Event()
        self._is_donated = is_donated
        if is_computed:
            self.end()

    def is_ready(self) -> bool:
        if self._is_donated:
            raise RuntimeError("donated")
        return self._computed.is_set()

    def block_until_ready(self) -> None:
        if self._is_donated:
            raise RuntimeError("donated")
        self._computed.wait()

    def end(self) -> None:
        self._computed.set()


def computed(recorder: Recorder) -> list[int]:
    return [event.number for event in recorder.events() if event.what == COMPUTED]


def test_a_call_whose_results_are_ready_is_noted_as_computed_at_once() -> None:
    recorder = Recorder(clock=Clock())
    recorder.called((Result(True),), STEP, PLAN, 1)
    assert computed(recorder) == [], "no trace is on"
    recorder.watch()
    try:
        recorder.called((Result(True), Result(True)), STEP, PLAN, 1)
        assert computed(recorder) == [1]
    finally:
        recorder.unwatch()


@pytest.mark.parametrize("donated", [False, True])
def test_a_call_that_is_still_computed_is_noted_when_all_its_results_are_there(donated: bool) -> None:
    recorder, later = Recorder(clock=Clock()), Result()
    recorder.watch()
    try:
        recorder.called((Result(True, is_donated=donated), later), STEP, PLAN, 1)
        recorder.called((Result(True),), STEP, PLAN, 0)
        later.end()
        until(lambda: sorted(computed(recorder)) == [0, 1])
    finally:
        recorder.unwatch()


def test_the_end_of_a_call_is_noted_before_any_event_after_it() -> None:
    recorder, results, others = Recorder(clock=Clock()), Result(), Result()
    recorder.watch()
    try:
        # The thread that waits is busy with the first call until the end of the test.
        recorder.called((others,), STEP, PLAN, 0)
        recorder.called((results,), STEP, PLAN, 1)
        recorder.note(STEP_BEGAN, STEP)
        results.end()
        recorder.note(SENT, STEP, "w", "/job:ps/task:0", 4, 17)
        assert [event.what for event in recorder.events()] == [STEP_BEGAN, COMPUTED, SENT]
        assert computed(recorder) == [1]
    finally:
        others.end()
        recorder.unwatch()
    until(lambda: computed(recorder) == [1, 0])
    recorder.note(STEP_BEGAN, STEP)
    assert len(recorder.events()) == 5
