"""Plans with queues: dependencies of a call, refused plans from another task, and refused registrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflow.lowering.pipeline import ALONE
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.store import Store
from dflow.lowering.steps.plan import Plan, UseResource
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import ITEM_ENDED
from dflow.tracing.errors import StepCancelled
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType
from tests.lowering.one_process import begin


def test_a_wait_that_starts_when_the_execution_has_ended_is_cancelled() -> None:
    ends: list[BaseException] = []

    class Late(HeldQueue):
        def start(self, use: ResourceOp, operands: Any, on_results: Any) -> Any:
            execution.cancel(StepCancelled("enough"))
            return ends.append

    store = Store()
    store.resources["q"] = Late("q", QueueSettings(QueueKind.FIFO, 1), QueueType(()))
    execution, outcomes = begin(Plan(ALONE, 0, (UseResource("q", ResourceOp("queue.dequeue")),)), store=store)
    execution.start()
    assert [str(error) for error in (*ends, *outcomes)] == ["enough", "enough"]


def _a_step_that_waits(submit: Any) -> tuple[HeldQueue, list[Any]]:
    """Start a step that waits for a queue, with a later op; return the queue and the step's outcomes."""
    store = Store()
    queue = HeldQueue("q", QueueSettings(QueueKind.FIFO, 1), QueueType((ArrayType(np.dtype("float32"), ()),)))
    store.resources["q"] = queue
    waits = UseResource("q", ResourceOp("queue.dequeue"), gives=(0,))
    plan = Plan(ALONE, 2, (waits, UseResource("q", ResourceOp("queue.size"), gives=(1,), after=(0,))))
    run, outcomes = begin(plan, store=store, submit=submit)
    run.start()
    return queue, outcomes


def test_a_step_that_cannot_take_what_it_waited_for_ends_with_the_error() -> None:
    def no_worker(work: Any) -> None:
        raise RuntimeError("the pool is shut down")

    queue, outcomes = _a_step_that_waits(no_worker)
    queue.start(ResourceOp("queue.enqueue"), (np.float32(1),), lambda results: None)
    assert [str(outcome) for outcome in outcomes] == ["the pool is shut down"]


def test_a_step_ends_when_the_thread_that_brings_what_it_waits_for_is_interrupted() -> None:
    def interrupted(work: Any) -> None:
        raise KeyboardInterrupt

    queue, outcomes = _a_step_that_waits(interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.start(ResourceOp("queue.enqueue"), (np.float32(1),), lambda results: None)
    assert [type(outcome) for outcome in outcomes] == [StepCancelled]
    assert "the thread that brought what this step waited for was interrupted" in str(outcomes[0])


def test_an_interrupt_reaches_the_thread_that_brought_what_its_own_step_waited_for() -> None:
    def interrupt(noted: tuple[Any, ...]) -> None:
        if noted[1] is ITEM_ENDED:
            raise KeyboardInterrupt

    store, recorder = Store(), Recorder()
    recorder.append = interrupt
    store.resources["q"] = HeldQueue("q", QueueSettings(QueueKind.FIFO, 1), QueueType(()))
    plan = Plan(ALONE, 0, (UseResource("q", ResourceOp("queue.enqueue")),))
    run, outcomes = begin(plan, store=store, recorder=recorder)
    with pytest.raises(KeyboardInterrupt):
        run.start()
    assert [type(outcome) for outcome in outcomes] == [StepCancelled]


def test_who_waits_for_what_cannot_be_made_of_the_elements_gets_the_error() -> None:
    queue = HeldQueue("q", QueueSettings(QueueKind.FIFO, 2), QueueType((ArrayType(np.dtype("float32"), (2,)),)))
    given = list[Any]()
    queue.start(ResourceOp("queue.dequeue_many", 2), (), given.append)
    for shape in (2, (2, 2)):
        queue.start(ResourceOp("queue.enqueue"), (np.ones(shape, np.float32),), given.append)
    assert [type(results) for results in given] == [tuple, tuple, ValueError]
