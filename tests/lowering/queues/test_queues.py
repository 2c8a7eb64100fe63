"""The queue shared by threads: callbacks, deadlines, cancellation, and no lost elements."""

from __future__ import annotations

import itertools
import linecache
import queue as stdlib_queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest

from dflow.lowering.queues import pending_operations
from dflow.lowering.queues.pending_operations import Results, wait
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.queues.resource_rules import giving
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import DeadlineExceeded, QueueClosed, QueueError, StepCancelled
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.types import QueueType

WAIT_S = 60.0


def fifo(capacity: int) -> HeldQueue:
    """A new queue."""
    return HeldQueue("q", QueueSettings(QueueKind.FIFO, capacity), QueueType(()))


def put(queue: HeldQueue, *numbers: int, timeout_s: float = WAIT_S) -> None:
    """Enqueue numbers, and wait until they are in."""
    wait(lambda done: queue.enqueue([(number,) for number in numbers], done, timeout_s))


def take(queue: HeldQueue, count: int = 1, timeout_s: float = WAIT_S) -> list[int]:
    """Dequeue numbers, waiting for them."""
    return [number for (number,) in wait(lambda done: queue.dequeue(count, done, timeout_s))]


def test_a_deadline_says_what_was_waited_for() -> None:
    queue = fifo(2)
    put(queue, 1, 2)
    fact, remedy = (
        r"queue 'q' could not {} within {} s; it holds 2 of at most 2\n",
        "  does every thread that {} still run",
    )
    with pytest.raises(DeadlineExceeded, match=fact.format("take 1 element", 0) + remedy.format("dequeues")):
        put(queue, 3, timeout_s=0)
    with pytest.raises(DeadlineExceeded, match=fact.format("give 3 elements", r"0\.01") + remedy.format("enqueues")):
        take(queue, 3, timeout_s=0.01)
    assert take(queue, 2) == [1, 2]


def test_an_error_says_how_many_of_several_went_in() -> None:
    queue = fifo(3)
    put(queue, 1)
    says = r"could not take 4 elements within 0\.01 s, of which 2 went in; it holds 3 of at most 3"
    with pytest.raises(DeadlineExceeded, match=says):
        put(queue, 2, 3, 4, 5, timeout_s=0.01)
    assert queue.contents() == [(1,), (2,), (3,)]
    answers = list[Outcome[Any]]()
    queue.enqueue([(6,), (7,)], answers.append, WAIT_S)
    assert take(queue) == [1]
    queue.close(cancel_pending=True)
    assert "is closed and cannot take 2 elements, of which 1 went in; it holds 3" in str(answers[0])
    with pytest.raises(QueueClosed, match="cannot take 2 elements, of which 0 went in"):
        put(queue, 8, 9)


def test_closing_wakes_every_waiter() -> None:
    queue, answers = fifo(1), stdlib_queue.SimpleQueue[Outcome[Any]]()
    for count in (2, 1, 2):
        queue.dequeue(count, answers.put, WAIT_S)
    put(queue, 1)
    queue.close()
    assert "queue 'q' is closed and cannot give 2 elements; it holds" in str(answers.get(timeout=WAIT_S))
    assert answers.get(timeout=WAIT_S) == ((1,),)
    assert isinstance(answers.get(timeout=WAIT_S), QueueClosed)
    with pytest.raises(QueueClosed, match="queue 'q' is closed and cannot take 1 element; it holds 0 of at most 1"):
        put(queue, 1)


def test_a_cancelled_wait_ends_with_the_reason_and_takes_nothing() -> None:
    queue, answers = fifo(2), list[Outcome[Any]]()
    cancel = queue.dequeue(1, answers.append, WAIT_S)
    cancel(StepCancelled("enough"))
    cancel(StepCancelled("too late"))
    put(queue, 1)
    assert [str(answer) for answer in answers] == ["enough"]
    assert queue.contents() == [(1,)]


def test_a_callback_that_raises_takes_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    queue, answers = fifo(4), list[Outcome[Any]]()
    queue.dequeue(1, lambda answer: [].pop(), WAIT_S)
    queue.dequeue(1, answers.append, WAIT_S)
    put(queue, 1, 2)
    assert answers == [((2,),)]
    assert "the callback of an operation to give 1 element failed" in caplog.text
    queue.dequeue(1, lambda answer: [].pop(), WAIT_S)
    queue.dequeue(1, answers.append, WAIT_S)
    queue.close()
    assert isinstance(answers[1], QueueClosed)


def test_an_interrupt_in_a_callback_is_raised_when_the_others_were_told() -> None:
    queue, answers = fifo(4), list[Outcome[Any]]()

    def interrupted(answer: Outcome[Any]) -> None:
        raise KeyboardInterrupt

    queue.dequeue(1, interrupted, WAIT_S)
    queue.dequeue(1, answers.append, WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        put(queue, 1, 2)
    assert answers == [((2,),)]


def _interrupted_at(line: int, use: Callable[[], None]) -> bool:
    """Interrupt `use` before line number `line` that it runs in pending_operations.py. Return whether it got there."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != pending_operations.__file__:
            return None
        # At the end of a `with` block no signal comes; a trace function would raise there and leave the lock held.
        line = linecache.getline(pending_operations.__file__, frame.f_lineno).lstrip()
        if event == "line" and not line.startswith("with "):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        use()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def _each_interrupt(
    use: Callable[[HeldQueue, list[Outcome[Any]]], Callable[[], None]],
) -> Iterator[tuple[HeldQueue, list[Outcome[Any]]]]:
    """Interrupt `use` at each of its lines; yield a queue with capacity three and the answers of its pending
    operations.
    """
    for line in itertools.count(1):
        queue, answers = fifo(3), list[Outcome[Any]]()
        was_interrupted = _interrupted_at(line, use(queue, answers))
        yield queue, answers
        if not was_interrupted:
            assert line > 10
            return


def test_an_interrupt_of_who_enqueues_for_several_tells_them_all_or_none() -> None:
    def use(queue: HeldQueue, answers: list[Outcome[Any]]) -> Callable[[], None]:
        for _ in range(3):
            queue.dequeue(1, answers.append, WAIT_S)
        return lambda: put(queue, 1, 2, 3)

    for queue, answers in _each_interrupt(use):
        assert answers in ([], [((1,),), ((2,),), ((3,),)])
        put(queue, 4, 5, 6)
        assert len(answers) == 3


def test_an_interrupt_of_who_dequeues_leaves_nobody_in_line() -> None:
    def use(queue: HeldQueue, answers: list[Outcome[Any]]) -> Callable[[], None]:
        def dequeue() -> None:
            with pytest.raises(DeadlineExceeded):
                take(queue, timeout_s=0)

        return dequeue

    for queue, _ in _each_interrupt(use):
        put(queue, 1)
        assert queue.contents() == [(1,)]


def test_an_interrupt_of_who_closes_the_queue_tells_all_who_wait() -> None:
    def use(queue: HeldQueue, answers: list[Outcome[Any]]) -> Callable[[], None]:
        for _ in range(2):
            queue.dequeue(1, answers.append, WAIT_S)
        return queue.close

    for queue, answers in _each_interrupt(use):
        queue.close()
        assert [type(answer) for answer in answers] == [QueueClosed] * 2


def test_who_waits_is_told_though_the_thread_that_makes_its_results_is_interrupted() -> None:
    queue, results = fifo(1), list[Outcome[Results]]()
    calls = itertools.count()

    def made(answer: tuple[Any, ...]) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return answer

    queue.dequeue(1, giving(results.append, made), WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        put(queue, 1)
    assert results == [((1,),)]


def test_who_waits_and_who_comes_later_are_told_when_it_was_forgotten() -> None:
    queue, answers = fifo(1), list[Outcome[Any]]()
    put(queue, 1)
    queue.dequeue(3, answers.append, WAIT_S, "\n  at first.py:1")
    queue.enqueue([(2,)], answers.append, WAIT_S)
    assert answers == [()]
    queue.forget("queue 'q' is gone", "make it again")
    assert [type(answer) for answer in answers] == [tuple, QueueError]
    assert str(answers[1]) == "queue 'q' is gone\n  at first.py:1\n  make it again"
    for use in (lambda: put(queue, 1), lambda: take(queue), queue.close, lambda: queue.with_machine(id, "")):
        with pytest.raises(QueueError, match=r"queue 'q' is gone\n  at .*\n  make it again"):
            use()
    assert queue.contents() == []


def test_a_callback_may_use_the_queue() -> None:
    queue, answers = fifo(2), list[Outcome[Any]]()
    queue.dequeue(1, lambda answer: wait(lambda done: queue.enqueue([(2,)], done, WAIT_S)) and None, WAIT_S)
    put(queue, 1)
    queue.dequeue(1, answers.append, WAIT_S)
    assert answers == [((2,),)]


@pytest.mark.parametrize("capacity", [1, 3])
def test_threads_lose_and_double_nothing(capacity: int) -> None:
    queue, each = fifo(capacity), 200
    taken: list[list[int]] = [[] for _ in range(4)]

    def produce(producer: int) -> None:
        for number in range(each):
            put(queue, producer * each + number)

    def consume(numbers: list[int]) -> None:
        while True:
            try:
                numbers += take(queue)
            except QueueClosed:
                return

    producers = [threading.Thread(target=partial(produce, producer)) for producer in range(4)]
    consumers = [threading.Thread(target=partial(consume, numbers)) for numbers in taken]
    for thread in (*producers, *consumers):
        thread.start()
    for thread in producers:
        thread.join(WAIT_S)
    queue.close()
    for thread in consumers:
        thread.join(WAIT_S)
    assert sorted(number for numbers in taken for number in numbers) == list(range(4 * each))
    for numbers in taken:
        for producer in range(4):
            mine = [number for number in numbers if number // each == producer]
            assert mine == sorted(mine)
