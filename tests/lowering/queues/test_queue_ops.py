"""Plans with queues: dependencies of a call, refused plans from another task, and refused registrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dflow.lowering.passes.base import run_passes
from dflow.lowering.pipeline import ALONE, pipeline
from dflow.lowering.queues.channel import StepId
from dflow.lowering.queues.queues import HeldQueue
from dflow.lowering.state.store import Store
from dflow.lowering.steps.compile_plan import run_of
from dflow.lowering.steps.executable import Executable
from dflow.lowering.steps.lowered import make_plans
from dflow.lowering.steps.plan import Call, Plan, UseResource
from dflow.lowering.steps.recorder import Recorder
from dflow.lowering.steps.step_events import ITEM_ENDED
from dflow.tracing.errors import StepCancelled
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from dflow.tracing.ir.types import ArrayType, QueueType
from dflow.tracing.syntax.text import parse
from tests.lowering.one_process import Mail, Mailbox


def plan_of(graph: str) -> Plan:
    """The plan of a graph of this process."""
    lowered = run_passes(parse(graph), pipeline(), check=True)
    return make_plans(lowered, ALONE, {ref: ref.name for ref in lowered.refs})[ALONE].plan


def test_a_call_waits_for_the_queues_that_it_needs_and_no_other() -> None:
    plan = plan_of("""graph(%a: queue<f32[]>, %b: queue<f32[]>, %v: ref<f32[]>) {
     !%x: f32[] = queue.dequeue(%a)
      %p: f32[] = jax.neg(%x)
     !%r: f32[] = var.read(%v)
      %t: f32[] = jax.add(%r, %p)
     !%w: token = var.assign(%v, %t)
     !%y: f32[] = queue.dequeue(%b)
      %q: f32[] = jax.neg(%y)
      %s: f32[] = jax.add(%p, %q)
      return %p, %q, %s
    }""")
    waits = {item.gives[0]: item.key for item in plan.items if isinstance(item, UseResource)}
    calls = [item for item in plan.items if isinstance(item, Call)]
    direct = [sorted(waits[slot] for slot in call.takes if slot in waits) for call in calls]
    assert direct == [["a"], ["b"], []]
    # The read is in the call that writes.
    assert [call.writes for call in calls] == [("v",), (), ()]


def test_a_read_that_two_queues_wait_to_use_waits_for_neither() -> None:
    plan = plan_of("""graph(%a: queue<f32[]>, %b: queue<f32[]>, %v: ref<f32[]>) {
     !%r: f32[] = var.read(%v)
     !%x: f32[] = queue.dequeue(%a)
     !%y: f32[] = queue.dequeue(%b)
      %p: f32[] = jax.mul(%r, %x)
      %q: f32[] = jax.mul(%r, %y)
      return %p, %q
    }""")
    reading = next(item for item in plan.items if isinstance(item, Call) and item.reads)
    assert (reading.takes, reading.after) == ((), ())


def test_a_wait_that_starts_when_the_execution_has_ended_is_cancelled() -> None:
    ends: list[BaseException] = []

    class Late(HeldQueue):
        def start(self, use: ResourceOp, operands: Any, on_results: Any) -> Any:
            execution.cancel(StepCancelled("enough"))
            return ends.append

    store, outcomes = Store(), list[Any]()
    store.resources["q"] = Late("q", QueueSettings(QueueKind.FIFO, 1), QueueType(()))
    executable = Executable(Plan(ALONE, 0, (UseResource("q", ResourceOp("queue.dequeue")),)))
    channel = Mailbox(Mail(), ALONE)
    execution = run_of(executable, store, channel, StepId(ALONE, 1), (), outcomes.append, lambda work: work())
    execution.start()
    assert [str(error) for error in (*ends, *outcomes)] == ["enough", "enough"]


def _a_step_that_waits(submit: Any) -> tuple[HeldQueue, list[Any]]:
    """Start a step that waits for a queue, with a later op; return the queue and the step's outcomes."""
    store, outcomes = Store(), list[Any]()
    queue = HeldQueue("q", QueueSettings(QueueKind.FIFO, 1), QueueType((ArrayType(np.dtype("float32"), ()),)))
    store.resources["q"] = queue
    waits = UseResource("q", ResourceOp("queue.dequeue"), gives=(0,))
    executable = Executable(Plan(ALONE, 2, (waits, UseResource("q", ResourceOp("queue.size"), gives=(1,), after=(0,)))))
    channel = Mailbox(Mail(), ALONE)
    run_of(executable, store, channel, StepId(ALONE, 1), (), outcomes.append, submit).start()
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

    store, outcomes, recorder = Store(), list[Any](), Recorder()
    recorder.append = interrupt
    store.resources["q"] = HeldQueue("q", QueueSettings(QueueKind.FIFO, 1), QueueType(()))
    executable = Executable(Plan(ALONE, 0, (UseResource("q", ResourceOp("queue.enqueue")),)))
    arguments = executable, store, Mailbox(Mail(), ALONE), StepId(ALONE, 1), (), outcomes.append, lambda work: work()
    with pytest.raises(KeyboardInterrupt):
        run_of(*arguments, recorder=recorder).start()
    assert [type(outcome) for outcome in outcomes] == [StepCancelled]


def test_who_waits_for_what_cannot_be_made_of_the_elements_gets_the_error() -> None:
    queue = HeldQueue("q", QueueSettings(QueueKind.FIFO, 2), QueueType((ArrayType(np.dtype("float32"), (2,)),)))
    given = list[Any]()
    queue.start(ResourceOp("queue.dequeue_many", 2), (), given.append)
    for shape in (2, (2, 2)):
        queue.start(ResourceOp("queue.enqueue"), (np.ones(shape, np.float32),), given.append)
    assert [type(results) for results in given] == [tuple, tuple, ValueError]
