"""A plan that several attempts at one step run changes state once, by both executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.programs.program import Program, lower_program
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.applied_steps import StepOfRun
from dflow.lowering.state.store import Store
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.execute import Execution, Fetches
from dflow.lowering.steps.plan import Call, Plan, Recv, UseResource
from dflow.lowering.steps.straight_line import run_of
from dflow.lowering.values.outcome import Outcome
from dflow.tracing.errors import StepCancelled
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType
from tests.lowering.flat_programs import flat_program
from tests.lowering.meaning import PS_0, WORKER
from tests.lowering.one_process import Mail, Mailbox

F32 = ArrayType(np.dtype("float32"), ())
STEP = StepOfRun("run", 7)
EXECUTORS: dict[str, Any] = {"general": Execution, "straight": run_of}


def adding() -> Program:
    """A program that adds an operand to a variable in place, and returns the new value."""

    def add(held: Any, operand: Any) -> Any:
        return held + operand, held + operand

    return lower_program(add, (F32, F32), 1).compile()


class Task:
    """A task whose plan counts in `a`, receives a value, adds it to `a` and `b`, and enqueues and prints it."""

    def __init__(self, executor: str) -> None:
        self.run_of, self.store, self.mail = EXECUTORS[executor], Store(), Mail()
        self.printed: list[float] = []
        self.outcomes: list[Outcome[Fetches]] = []
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
        plan = Plan(WORKER, 5, items, feeds=(0,), fetches=(1, 3, 4))
        self.executable = Executable(plan, [adding(), show])

    def begin(self) -> Callable[[float], list[float]]:
        """Begin an attempt, which counts; return a function that sends the value and returns the fetches."""
        step = StepId(WORKER, next(self.numbers))
        attempt = self.store.applied.attempt(STEP)
        run = self.run_of(
            self.executable,
            self.store,
            Mailbox(self.mail, WORKER),
            step,
            [jnp.float32(1)],
            self.outcomes.append,
            lambda work: work(),
            attempt=attempt,
        )
        run.start()
        self.cancel = lambda: run.cancel(StepCancelled("the worker has left"))

        def end(value: float) -> list[float]:
            Mailbox(self.mail, PS_0).send(step, "x", WORKER, [jnp.float32(value)])
            (outcome,) = self.outcomes
            assert not isinstance(outcome, BaseException), outcome
            self.outcomes.clear()
            attempt.ended()
            return [float(fetch) for fetch in outcome]

        return end

    def state(self) -> tuple[float, float, int, list[float]]:
        """The values, the number of elements in the queue, and what was printed."""
        values = self.store.snapshot(["a", "b"])
        return float(values["a"]), float(values["b"]), self.queue.depth()[0], self.printed


@pytest.fixture(params=list(EXECUTORS))
def task(request: pytest.FixtureRequest) -> Task:
    return Task(request.param)


def test_a_repeated_step_changes_nothing_and_returns_results(task: Task) -> None:
    assert task.begin()(10) == [1, 11, 10]
    applied = task.state()
    assert applied == (11, 10, 1, [10])
    assert task.begin()(20) == [12, 31, 30]
    assert task.state() == applied


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
    task.outcomes.clear()
    task.store.resources = queue
    task.begin()(10)
    assert task.state() == (11, 10, 1, [10])


def test_steps_of_no_run_change_state_each_time(task: Task) -> None:
    task.store.applied.attempt = lambda step: None  # type: ignore[method-assign, assignment, return-value]
    for count in (1, 2):
        step = StepId(WORKER, count)
        run = task.run_of(
            task.executable,
            task.store,
            Mailbox(task.mail, WORKER),
            step,
            [jnp.float32(1)],
            task.outcomes.append,
            lambda work: work(),
        )
        run.start()
        Mailbox(task.mail, PS_0).send(step, "x", WORKER, [jnp.float32(10)])
        assert task.state() == (11 * count, 10 * count, count, [10] * count)
