"""A queue or an accumulator that returned to saved contents acts as the saved one."""

from __future__ import annotations

import json
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.pending_operations import SavedContents, wait
from dflow.lowering.queues.queues import HeldQueue
from dflow.tracing.errors import FeedError, QueueClosed
from dflow.tracing.ir import ops
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import FedElement, ResourceOp
from dflow.tracing.ir.types import AccumulatorType, ArrayType, QueueType, RowsType

WAIT_S = 60.0
CAPACITY = 8
F32, I32 = np.dtype("float32"), np.dtype("int32")


def through_a_file(saved: SavedContents) -> SavedContents:
    """The contents as they are read again: numbers as JSON with sorted keys, arrays in the memory of a file."""
    numbers = json.loads(json.dumps(msgspec.to_builtins(saved.numbers, str_keys=True), sort_keys=True))
    return SavedContents(numbers, {name: np.array(array) for name, array in saved.arrays.items()})


def queue_of(kind: QueueKind, seed: int) -> HeldQueue:
    components = (ArrayType(I32, ()), ArrayType(np.dtype(jnp.bfloat16), (None,)))
    least = 2 if kind is QueueKind.SHUFFLE else 0
    return HeldQueue("q", QueueSettings(kind, CAPACITY, least, seed), QueueType(components))


def put(queue: HeldQueue, number: int, size: int) -> None:
    element = np.int32(number), np.full(size, number, jnp.bfloat16)
    wait(lambda done: queue.enqueue([element], done, WAIT_S))


def drained(queue: HeldQueue) -> list[tuple[int, list[float]]]:
    """Close the queue, and return its elements in the order of their dequeues."""
    queue.close()
    found = []
    while queue.depth()[0]:
        ((number, row),) = wait(lambda done: queue.dequeue(1, done, WAIT_S))
        found.append((int(number), np.asarray(row, np.float32).tolist()))
    return found


@given(
    st.sampled_from(QueueKind),
    st.integers(0, 9),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(0, 3))), max_size=20),
    st.integers(0, 3),
)
def test_a_queue_gives_the_same_elements_in_the_same_order(
    kind: QueueKind, seed: int, events: list[tuple[int, int] | None], later: int
) -> None:
    queue, twin = queue_of(kind, seed), queue_of(kind, seed + 1)
    for event in events:
        size, _ = queue.depth()
        if event is not None and size < CAPACITY:
            put(queue, *event)
        elif event is None and size > queue.machine.order.held_back:
            wait(lambda done: queue.dequeue(1, done, WAIT_S))
    put(twin, 99, 1)  # of no consequence
    twin.return_to(through_a_file(queue.saved()))
    for number in range(min(later, CAPACITY - queue.depth()[0])):
        put(queue, number, 1)
        put(twin, number, 1)
    assert drained(twin) == drained(queue)


def test_pending_operations_go_on_with_the_saved_elements() -> None:
    queue, answers = queue_of(QueueKind.FIFO, 0), list[Any]()
    put(queue, 7, 2)
    saved = through_a_file(queue.saved())
    wait(lambda done: queue.dequeue(1, done, WAIT_S))
    queue.dequeue(1, answers.append, WAIT_S)
    queue.return_to(saved)
    (((number, _),),) = answers
    assert (int(number), queue.depth()[0]) == (7, 0)


def test_the_elements_of_a_feed_that_are_not_saved_can_be_put_in_again() -> None:
    queue = queue_of(QueueKind.FIFO, 0)

    def feed(number: int) -> None:
        element = np.int32(number), np.zeros(0, jnp.bfloat16)
        wait(lambda done: queue.enqueue([element], done, WAIT_S, of=FedElement("feed", number)))

    feed(0)
    for number in range(1, CAPACITY):
        put(queue, number, 0)
    pending = list[Any]()
    queue.enqueue([(np.int32(9), np.zeros(0, jnp.bfloat16))], pending.append, WAIT_S, of=FedElement("feed", 9))
    saved = through_a_file(queue.saved())
    wait(lambda done: queue.dequeue(2, done, WAIT_S))
    assert pending == [()]
    queue.return_to(saved)
    wait(lambda done: queue.dequeue(2, done, WAIT_S))
    feed(0)
    feed(9)
    assert [number for number, _ in drained(queue)] == [*range(2, CAPACITY), 9]


def test_a_queue_that_was_closed_stays_closed() -> None:
    queue = queue_of(QueueKind.FIFO, 0)
    saved = through_a_file(queue.saved())
    queue.fail("ValueError: no data", "\n  at data.py:3")
    queue.return_to(saved)
    with pytest.raises(FeedError, match="no data"):
        put(queue, 1, 1)
    other = queue_of(QueueKind.FIFO, 0)
    other.return_to(through_a_file(queue.saved()))
    with pytest.raises(FeedError, match="no data"):
        put(other, 1, 1)
    queue = queue_of(QueueKind.FIFO, 0)
    put(queue, 1, 0)
    queue.close()
    other = queue_of(QueueKind.FIFO, 0)
    other.return_to(through_a_file(queue.saved()))
    assert drained(other) == [(1, [])]
    with pytest.raises(QueueClosed):
        put(other, 1, 1)


TYPE = AccumulatorType((ArrayType(F32, (2,)), RowsType(9, ArrayType(F32, (9, 2)))))


def op(name: str, count: int = 0) -> ResourceOp:
    return ResourceOp(name, count, WAIT_S)


def run(accumulator: HeldAccumulator, given: ResourceOp, *operands: Any) -> list[Any]:
    return [np.asarray(result).tolist() for result in wait(lambda done: accumulator.start(given, operands, done))]


def gradient(number: int) -> tuple[Any, ...]:
    return (
        np.full(2, number, np.float32),
        np.array([number % 9, (3 * number + 1) % 9], np.int32),
        np.full((2, 2), number + 1, np.float32),
    )


@given(st.lists(st.tuples(st.sampled_from(["apply", "keep", "take"]), st.integers(0, 20), st.integers(0, 2))))
def test_an_accumulator_gives_the_same_averages(events: list[tuple[str, int, int]]) -> None:
    accumulator, twin = (HeldAccumulator("a", AccumulatorSettings(Reduction.MEAN), TYPE) for _ in range(2))
    run(twin, op(ops.accumulator_apply.name), *gradient(5), np.int32(0))  # of no consequence
    for name, number, late in events:
        step = np.int32(max(0, accumulator.machine.step - late))
        if name == "apply":
            run(accumulator, op(ops.accumulator_apply.name), *gradient(number), step)
        elif name == "keep":
            run(accumulator, op(ops.accumulator_keep.name), *gradient(number), step)
        elif accumulator.machine.count:
            run(accumulator, op(ops.accumulator_take.name, 1))
    twin.return_to(through_a_file(accumulator.saved()))
    step = np.int32(accumulator.machine.step)
    for one in (accumulator, twin):
        run(one, op(ops.accumulator_apply.name), *gradient(3), step)
    assert twin.machine.saved() == accumulator.machine.saved()
    if (ticket := next(iter(accumulator.machine.kept), None)) is not None:
        taken = op(ops.accumulator_take_kept.name), np.array([ticket], np.int32)
        assert run(twin, *taken) == run(accumulator, *taken)
    take = op(ops.accumulator_take.name, 1)
    assert run(twin, take) == run(accumulator, take)
