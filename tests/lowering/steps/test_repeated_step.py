"""A plan that several attempts at one step run changes state once, by whatever its items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.queues.accumulators import HeldAccumulator
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.state.store import Store
from dflow.lowering.steps import repeated_step
from dflow.lowering.steps.plan import Branch, Call, Plan, Recv, Scan, UseResource
from dflow.tracing.errors import StepCancelled
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import AccumulatorType, ArrayType, QueueType
from tests.lowering.flat_programs import flat_program
from tests.lowering.meaning import PS_0, WORKER
from tests.lowering.one_process import Mail, Mailbox, begin

F32 = ArrayType(np.dtype("float32"), ())
STEP = StepOfRun("run", 7)


def adding() -> Program:
    """A program that adds an operand to a variable in place, and returns the new value."""

    def add(held: Any, operand: Any) -> Any:
        return held + operand, held + operand

    return lower_program(add, (F32, F32), 1).compile()


class Task:
    """A task whose plan counts in `a`, receives a value, adds it to `a` and `b`, and enqueues and prints it."""

    def __init__(self) -> None:
        self.store, self.mail = Store(), Mail()
        self.printed: list[float] = []
        self.numbers = iter(range(100))
        for key in ("a", "b"):
            self.store.create(key, F32, lambda: jnp.zeros(()))
        self.queue = self.store.resources["q"] = HeldQueue("q", QueueSettings(QueueKind.FIFO, 9), QueueType((F32,)))
        items = (
            Call(0, ("a",), (), (0,), (1,)),
            Recv("x", PS_0, (2,), (("f32", ()),)),
            Call(0, ("a",), (), (2,), (3,), after=(0,)),
            Call(0, ("b",), (), (2,), (4,)),
            UseResource("q", ResourceOp("queue.enqueue"), takes=(2,)),
            Call(1, (), (), (2,), (), touches_anything=True),
        )
        show = flat_program(lambda x: (self.printed.append(float(x)), ())[1])
        self.plan, self.programs = Plan(WORKER, 5, items, feeds=(0,), fetches=(1, 3, 4)), [adding(), show]

    def begin(self) -> Callable[[float], list[float]]:
        """Begin an attempt, which counts; return a function that sends the value and returns the fetches."""
        step = StepId(WORKER, next(self.numbers))
        attempt = self.store.applied.attempt(STEP)
        channel, feeds = Mailbox(self.mail, WORKER).channel, [jnp.float32(1)]
        run, outcomes = begin(
            self.plan, self.programs, feeds, store=self.store, channel=channel, step=step, attempt=attempt
        )
        run.start()
        self.outcomes, self.cancel = outcomes, lambda: run.cancel(StepCancelled("the worker has left"))

        def end(value: float) -> list[float]:
            Mailbox(self.mail, PS_0).send(step, "x", WORKER, [jnp.float32(value)])
            (outcome,) = outcomes
            assert not isinstance(outcome, BaseException), outcome
            attempt.ended()
            return [float(fetch) for fetch in outcome]

        return end

    def state(self) -> tuple[float, float, int, list[float]]:
        """The values, the number of elements in the queue, and what was printed."""
        values = self.store.read_together(["a", "b"])
        return float(values["a"]), float(values["b"]), self.queue.depth()[0], self.printed


@pytest.fixture
def task() -> Task:
    return Task()


def test_a_repeated_step_changes_nothing_and_returns_results(task: Task) -> None:
    assert task.begin()(10) == [1, 11, 10]
    applied = task.state()
    assert applied == (11, 10, 1, [10])
    assert task.begin()(20) == [1, 11, 10]
    assert task.state() == applied


def test_large_results_of_a_program_are_computed_again(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_step, "MOST_KEPT", 3)
    assert task.begin()(10) == [1, 11, 10]
    assert task.begin()(20) == [12, 31, 30]
    assert task.state() == (11, 10, 1, [10])


def test_a_step_applied_in_part_is_completed(task: Task) -> None:
    task.begin()
    task.cancel()
    assert isinstance(task.outcomes.pop(), StepCancelled)
    assert task.state() == (1, 0, 0, [])
    task.begin()(10)
    assert task.state() == (11, 10, 1, [10])


def test_of_two_attempts_at_the_same_time_each_change_is_made_once(task: Task) -> None:
    first, second = task.begin(), task.begin()
    assert task.state()[0] == 1
    second(20)
    first(10)
    assert task.state() == (21, 20, 1, [20])


def test_a_change_that_failed_is_made_by_the_next_attempt(task: Task) -> None:
    end = task.begin()
    queue, task.store.resources = task.store.resources, {}
    with pytest.raises(AssertionError, match="no resource 'q' is held here"):
        end(10)
    task.store.resources = queue
    task.begin()(10)
    assert task.state() == (11, 10, 1, [10])


KINDS = {kind.value: kind for kind in QueueKind}
#: Each op with results on a queue and on an accumulator, with the number of its results.
QUEUE_OPS = [
    (ResourceOp("queue.dequeue"), 1),
    (ResourceOp("queue.dequeue_many", 2), 1),
    (ResourceOp("queue.dequeue_up_to", 2), 2),
    (ResourceOp("queue.size"), 1),
    (ResourceOp("queue.is_closed"), 1),
]
SUM_OPS = [
    (ResourceOp("accumulator.apply"), 1),
    (ResourceOp("accumulator.take", 1), 1),
    (ResourceOp("accumulator.step"), 1),
    (ResourceOp("accumulator.count"), 1),
    (ResourceOp("accumulator.dropped"), 1),
]


def queue_of(kind: QueueKind) -> HeldQueue:
    """A closed queue of 8 elements."""
    first = np.dtype("int32") if kind is QueueKind.PRIORITY else F32.dtype
    queue = HeldQueue("held", QueueSettings(kind, 8), QueueType((ArrayType(first, ()),)))
    queue.enqueue([(np.asarray(number, first),) for number in (3, 1, 4, 1, 5, 9, 2, 6)], lambda outcome: None, 1.0)
    queue.close()
    return queue


def sums() -> HeldAccumulator:
    """An accumulator that has two gradients."""
    held = HeldAccumulator("held", AccumulatorSettings(Reduction.SUM), AccumulatorType((F32,)))
    for _ in range(2):
        held.start(ResourceOp("accumulator.apply"), (np.float32(2), np.int32(0)), lambda outcome: None)
    return held


HELD: list[Any] = [
    pytest.param(lambda kind=kind: queue_of(kind), op, count, id=f"{op.name} of {name}")
    for name, kind in KINDS.items()
    for op, count in QUEUE_OPS
] + [pytest.param(sums, op, count, id=op.name) for op, count in SUM_OPS]


def plan_of(op: ResourceOp, count: int, where: str) -> Plan:
    """A plan that does an op twice, in a straight line, in a branch or in a loop, and returns its last results."""
    gives = tuple(range(3, 3 + count))
    takes = (1, 2) if op.name == "accumulator.apply" else ()
    before = ResourceOp("accumulator.count") if op.name == "accumulator.take" else op
    twice = (
        UseResource("held", before, takes, tuple(range(10, 10 + count))),
        UseResource("held", op, takes, gives, (0,)),
    )
    if where == "line":
        return Plan(WORKER, 20, twice, (0, 1, 2), gives)
    if where == "branch":
        body = Plan(WORKER, 20, twice, (0, 1, 2), gives)
        return Plan(WORKER, 20, (Branch((0,), (0, 0, 1, 2), gives),), (0, 1, 2), gives, bodies=(body,))
    times = 1 if op.name == "accumulator.take" else 2
    body = Plan(WORKER, 20, (UseResource("held", op, takes, gives),), (0, 1, 2), (0,))
    return Plan(WORKER, 20, (Scan(0, times, False, 1, 0, (), (0, 1, 2), (3,)),), (0, 1, 2), (3,), bodies=(body,))


@pytest.mark.parametrize("where", ["line", "branch", "loop"])
@pytest.mark.parametrize(("make", "op", "count"), HELD)
def test_an_op_with_results_is_done_once_and_gives_the_same_again(
    make: Callable[[], Any], op: ResourceOp, count: int, where: str
) -> None:
    store, held = Store(), make()
    store.resources["held"] = held
    plan, feeds = plan_of(op, count, where), [jnp.int32(0), jnp.float32(1), jnp.int32(0)]

    def attempt(step: StepOfRun) -> list[Any]:
        run, outcomes = begin(plan, feeds=feeds, store=store, attempt=store.applied.attempt(step))
        run.start()
        (outcome,) = outcomes
        assert not isinstance(outcome, BaseException), outcome
        return [np.asarray(fetch).tolist() for fetch in outcome]

    first = attempt(STEP)
    contents = held.saved()
    assert attempt(STEP) == first
    after = held.saved()
    assert after.numbers == contents.numbers
    jax.tree.map(np.testing.assert_array_equal, after.arrays, contents.arrays)
    if op.name.startswith("queue.dequeue"):
        attempt(StepOfRun("run", 8))
        assert held.saved().numbers != contents.numbers
