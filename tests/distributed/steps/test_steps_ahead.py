"""When steps of a training loop begin ahead, with a starter that only records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from dflow.distributed.steps.ahead_rules import AheadRules
from dflow.distributed.steps.step_identity import LoopSteps
from dflow.distributed.steps.step_starter import StepParts, StepStarter
from dflow.distributed.steps.steps_ahead import CURRENT, OTHER_ARRAYS, SHORT_S, RegisteredStep, StepsAhead
from dflow.distributed.transport.base import Peer
from dflow.distributed.wire.messages.plans import Ahead, ReleaseStep
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.applied_steps import StepOfRun

TASK = "/job:worker/task:0"


class Starter:
    """Records the steps begun ahead, each with the step it comes after and its index, and the cancelled ones."""

    def __init__(self) -> None:
        self.number, self.is_next = 100, False
        self.begun: list[tuple[int, int]] = []
        self.cancelled: list[int] = []
        self.of: dict[int, StepOfRun | None] = {}
        #: The steps whose own part has begun ahead, each with its feeds; what happens in that part.
        self.own: list[tuple[int, list[Any]]] = []
        self.happens: Callable[[StepParts], None] = lambda parts: None

    def next_step(self) -> StepId:
        self.number += 1
        return StepId(TASK, self.number)

    def start(self, step: StepId, *_: Any, ahead: Ahead, of: StepOfRun | None) -> StepParts:
        assert ahead.is_numbered == (of is not None)
        self.is_next, self.of[step.number] = ahead.is_next, of
        self.begun.append((step.number, ahead.after))
        return StepParts([TASK], lambda outcome: None)

    def run_own(self, step: StepId, handles: Any, feeds: list[Any], parts: StepParts, *, ahead: Ahead) -> None:
        assert ahead == Ahead()
        self.own.append((step.number, feeds))
        self.happens(parts)

    def cancel(self, step: StepId, *_: Any) -> None:
        self.cancelled.append(step.number)


class ReleasedPeer:
    """A connection to another task, which records the notices of release."""

    def __init__(self) -> None:
        self.released: list[ReleaseStep] = []

    def notify(self, message: ReleaseStep) -> None:
        self.released.append(message)


class Loop:
    """A loop with its starter and clock; `call` is one iteration, and returns the numbers of its steps.

    claims  the number of steps of each claim of the loop
    """

    def __init__(self, prefetch: int = 0, claims: Sequence[int] = (100,)) -> None:
        self.starter, self.now_s = Starter(), 100.0
        self.warnings: list[str] = []
        self.ahead = StepsAhead(
            cast(StepStarter, self.starter),
            LoopSteps("run", set()),
            AheadRules(prefetch, lookahead=True),
            warn=self.warnings.append,
            clock=lambda: self.now_s,
        )
        ends = itertools.accumulate(claims)
        self.claimed = iter(
            [range(index, end) for count, end in zip(claims, ends, strict=True) for index in range(end - count, end)]
        )
        self.peer = ReleasedPeer()
        #: The calls of the iterations by step number, as the loop knows them.
        self.calls: dict[int, StepOfRun] = {}

    def call(
        self, *steps: RegisteredStep, took_s: float = 0.001, leaves: Sequence[Any] = (), following: Any = None
    ) -> list[int]:
        """Call steps with arguments of these leaves; `following` is the batch of the next iteration."""
        found = []
        with self.ahead.iteration(next(self.claimed), None if following is None else (leaves, following)):
            assert CURRENT.get() is self.ahead
            for registered in steps:
                begun = self.ahead.take(registered, leaves)
                step = self.starter.next_step() if begun is None else begun.step
                self.calls[step.number] = self.ahead.identities.current
                self.ahead.begin_more(step, {"ps": cast(Peer, self.peer)}, registered, leaves)
                found.append(step.number)
            self.now_s += took_s
        assert CURRENT.get() is None
        return found


def registered() -> RegisteredStep:
    return RegisteredStep({}, ())


def test_each_step_begins_after_the_one_before() -> None:
    loop, step = Loop(), registered()
    # The first iteration shows that each has one step.
    assert [loop.call(step) for _ in range(4)] == [[101], [102], [103], [104]]
    assert loop.starter.begun == [(103, 102), (104, 103), (105, 104)]
    assert loop.starter.is_next


@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_with_prefetch_a_step_lacks_that_many_updates(prefetch: int) -> None:
    loop, step = Loop(prefetch), registered()
    called = [number for _ in range(12) for number in loop.call(step)]
    after = dict(loop.starter.begun)
    # Of the first steps there was none to begin after.
    assert [after[number] for number in called[2 + prefetch :]] == called[1 : -1 - prefetch]
    assert all(after[number] == 0 for number in called[2 : 2 + prefetch])
    assert not loop.starter.is_next


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("claims", [(12,), (5, 7), (1,) * 12])
def test_each_step_has_its_index_from_the_start_or_from_its_release(prefetch: int, claims: Sequence[int]) -> None:
    loop, step = Loop(prefetch, claims), registered()
    for _ in range(12):
        loop.call(step)
    released = {notice.step: notice.of for notice in loop.peer.released}
    for number, of in loop.starter.of.items():
        if number in loop.calls:
            assert (of == loop.calls[number]) != (released.get(number) == loop.calls[number])
            assert (of is None) == (number in released)
    assert [loop.calls[number].number for number in sorted(loop.calls)] == list(range(12))


def change_function(loop: Loop, step: RegisteredStep) -> None:
    loop.call(registered())


def call_two(loop: Loop, step: RegisteredStep) -> None:
    loop.call(step, registered())


def pause(loop: Loop, step: RegisteredStep) -> None:
    loop.now_s += 2 * SHORT_S
    loop.call(step)


def fail(loop: Loop, step: RegisteredStep) -> None:
    with pytest.raises(ZeroDivisionError), loop.ahead.iteration(range(1)):
        raise ZeroDivisionError


def end(loop: Loop, step: RegisteredStep) -> None:
    loop.ahead.cancel("the loop ended")


@pytest.mark.parametrize("disturb", [change_function, call_two, pause, fail, end])
def test_a_step_ahead_is_cancelled_by_whatever_may_outdate_its_values(
    disturb: Callable[[Loop, RegisteredStep], None],
) -> None:
    loop, step = Loop(), registered()
    for _ in range(3):
        loop.call(step)
    ahead = loop.starter.begun[-1][0]
    disturb(loop, step)
    if disturb is call_two:  # its first call took the step that was begun for it, and began another
        ahead = loop.starter.begun[-1][0]
    assert loop.starter.cancelled == [ahead]
    for _ in range(3):
        loop.call(step)
    assert len(loop.starter.cancelled) == 1


def test_a_pause_as_short_as_a_step_does_not_cancel() -> None:
    loop, step = Loop(), registered()
    for _ in range(5):
        loop.now_s += 3.0
        loop.call(step, took_s=3.0)
    assert not loop.starter.cancelled
    assert len(loop.starter.begun) == 4


def test_a_loop_of_alternating_functions_begins_nothing() -> None:
    loop, steps = Loop(1), [registered(), registered()]
    for number in range(6):
        loop.call(steps[number % 2])
    assert (loop.starter.begun, loop.warnings) == ([], [])


def test_a_refusal_is_reported_once() -> None:
    unknown = RegisteredStep({}, None)
    loop, unused = Loop(1), Loop()
    for _ in range(3):
        loop.call(unknown)
        unused.call(unknown)
    assert loop.starter.begun == []
    assert loop.warnings == ["prefetch=1 has no effect: the function has branches or loops on other tasks"]
    assert unused.warnings == []


def test_a_change_of_state_cancels_and_is_waited_out() -> None:
    loop, step = Loop(), registered()
    for _ in range(3):
        loop.call(step)
    ahead = loop.starter.begun[-1][0]
    loop.ahead.state_changed()
    assert loop.starter.cancelled == [ahead]
    count = len(loop.starter.begun)
    loop.call(step)
    assert len(loop.starter.begun) == count
    loop.call(step)
    assert len(loop.starter.begun) == count + 1


def test_a_step_whose_release_is_interrupted_is_cancelled() -> None:
    loop, step = Loop(), RegisteredStep({}, ("/job:ps/task:0",))
    for _ in range(2):
        loop.call(step)
    with pytest.raises(KeyError):  # the loop of this test has no peers
        loop.call(step)
    assert loop.starter.cancelled == [loop.starter.begun[-1][0]]


def batch(number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.full(2, number), np.full(3, number, np.float32)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_own_part_of_the_next_step_begins_with_its_batch(prefetch: int) -> None:
    loop, step, batches = Loop(prefetch), registered(), [batch(number) for number in range(12)]
    called = [loop.call(step, leaves=now, following=then)[0] for now, then in itertools.pairwise(batches)]
    # The first iteration shows what the step is, and the second one begins the third.
    assert [number for number, _ in loop.starter.own[:-1]] == called[2:]
    for (_, feeds), expected in zip(loop.starter.own, batches[2:], strict=True):
        assert [*map(id, feeds)] == [*map(id, expected)]
    # Values that are sent ahead release nothing.
    assert all(of is None for number, of in loop.starter.of.items() if number in called[2:])
    assert {notice.step for notice in loop.peer.released} == {*called[2:]}
    assert (loop.starter.cancelled, loop.warnings) == ([], [])


def test_the_leaves_of_a_call_may_be_some_of_the_batch_in_another_order() -> None:
    loop, step = Loop(), registered()
    for now, then in itertools.pairwise(map(batch, range(4))):
        loop.call(step, leaves=now[::-1], following=dict(zip("ab", then, strict=True)))
    assert loop.starter.own == []  # it has another structure
    one, two, three = map(batch, range(3))
    for now, then in ((one, two), (two, three)):
        with loop.ahead.iteration(next(loop.claimed), ({"a": now}, {"a": then})):
            leaves = [now[1]]
            loop.ahead.take(step, leaves)
            loop.ahead.begin_more(loop.starter.next_step(), {"ps": cast(Peer, loop.peer)}, step, leaves)
    assert [[*map(id, feeds)] for _, feeds in loop.starter.own] == [[id(two[1])], [id(three[1])]]


OTHER_TYPES = [
    (np.full(2, 1), np.full(4, 1, np.float32)),
    (np.full(2, 1), np.full(3, 1)),
    (np.full(2, 1), 1.0),
    (np.full(2, 1), jnp.full(3, 1, jnp.float32)),
]


@pytest.mark.parametrize("following", OTHER_TYPES, ids=["shape", "dtype", "scalar", "class"])
def test_a_batch_of_other_types_is_not_begun(following: Any) -> None:
    loop, step = Loop(), registered()
    loop.call(step, leaves=batch(0), following=batch(1))
    loop.call(step, leaves=batch(1), following=following)
    assert (loop.starter.own, loop.warnings) == ([], [])


def test_a_call_with_other_arrays_than_those_begun_cancels_them() -> None:
    loop, step = Loop(), registered()
    batches = [batch(number) for number in range(4)]
    for now, then in itertools.pairwise(batches[:3]):
        loop.call(step, leaves=now, following=then)
    (ahead, _) = loop.starter.own[-1]
    assert loop.call(step, leaves=batch(2), following=batches[3]) != [ahead]
    assert loop.starter.cancelled == [ahead]
    assert loop.warnings == [f"lookahead=True has no effect: {OTHER_ARRAYS}"]


def test_why_own_parts_cannot_begin_is_reported_once() -> None:
    loop, step = Loop(), RegisteredStep({}, (), why_not_own="it rains")
    for now, then in itertools.pairwise(map(batch, range(5))):
        loop.call(step, leaves=now, following=then)
    assert (loop.starter.own, loop.warnings) == ([], ["lookahead=True has no effect: it rains"])


def test_of_a_step_that_has_failed_before_its_call_nothing_is_released() -> None:
    loop, step = Loop(), registered()
    loop.starter.happens = lambda parts: parts.ended(TASK, ZeroDivisionError())
    batches = [batch(number) for number in range(4)]
    for now, then in itertools.pairwise(batches):
        loop.call(step, leaves=now, following=then)
    assert len(loop.starter.own) == 2
    assert loop.peer.released == []


def test_an_interrupt_while_the_own_part_of_a_later_step_begins_is_raised() -> None:
    loop, step = Loop(), registered()
    loop.starter.happens = lambda parts: parts.ended(TASK, KeyboardInterrupt())
    loop.call(step, leaves=batch(0), following=batch(1))
    one = batch(1)
    with pytest.raises(KeyboardInterrupt):
        loop.call(step, leaves=one, following=batch(2))
    assert loop.starter.cancelled == [loop.starter.begun[-1][0]]
