"""Each element of a queue, ticket of a counter and key of a generator is used once, whatever fails and returns.

A step takes an element, draws a ticket and a key, and writes them to another task. Parameter tasks are started again
and return to snapshots; answers are lost, so that steps fail on the worker after one task or all have done their part.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.steps import retries
from dflow.distributed.steps.step_starter import StepParts
from dflow.tracing.errors import TaskLost
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.waiting import until

pytestmark = pytest.mark.once

STEPS = 40
#: With a momentum of 1, the n-th step moves the weight by n.
MOVED = STEPS * (STEPS + 1) / 2
ONE = jnp.ones(1, jnp.int32)


def on(cluster: Any, place: str) -> Any:
    """A context that makes state on a task, or in this process."""
    return cluster.parameter_servers() if place != "worker" else nullcontext()


class Program:
    """The step of one worker, and its state: `place` has the queue, ps:0 the rest, and ps:1 what the steps bring."""

    def __init__(self, cluster: Cluster, place: str, elements: int = STEPS) -> None:
        self.cluster = cluster
        with on(cluster, place), dflow.device(place) if place != "worker" else nullcontext():
            self.queue = dflow.FIFOQueue(STEPS, jnp.int32(0), name=f"elements of {place}")
        with cluster.parameter_servers():
            with dflow.device("ps:0"):
                self.ticket = dflow.Variable(0, name="ticket")
                self.noise = dflow.Generator(0, name="noise")
                self.sum = dflow.ConditionalAccumulator(jnp.float32(0), name="sum")
            with dflow.device("ps:1"):
                zeros = lambda: jnp.zeros(STEPS, jnp.int32)  # noqa: E731
                self.seen = dflow.Variable(zeros, name="seen")
                self.tickets = dflow.Variable(zeros, name="tickets")
                self.draws = dflow.Variable(lambda: jnp.zeros(STEPS, jnp.uint32), name="draws")
                self.weight = dflow.Variable(lambda: jnp.zeros(()), name="weight")
            self.optimizer = dflow.Optimizer(optax.sgd(1.0, momentum=1.0), [self.weight], name="sgd")
        self.step = dflow.jit(self._step)

    def fill(self) -> None:
        self.queue.enqueue_many(jnp.arange(STEPS))
        self.queue.close()

    def _step(self, number: Any) -> jax.Array:
        element = self.queue.dequeue(timeout_s=30)
        ticket = self.ticket.read()
        self.ticket.assign_add(1)
        self.sum.apply(jnp.float32(1))
        self.seen.scatter_add(element[None], ONE)
        self.tickets.scatter_add(ticket[None], ONE)
        self.draws.scatter_update(ticket[None], jax.random.bits(self.noise.split(), (1,)))
        self.optimizer.apply([jnp.float32(-1.0)])
        return element

    def check(self) -> None:
        np.testing.assert_array_equal(self.seen.read(), np.ones(STEPS))
        np.testing.assert_array_equal(self.tickets.read(), np.ones(STEPS))
        assert (int(self.sum.count()), float(self.weight.read())) == (STEPS, MOVED)
        assert int(self.queue.size()) == 0
        alone = dflow.Generator(0)
        expected = [int(jax.random.bits(alone.split(), (1,))[0]) for _ in range(STEPS)]
        assert sorted(np.asarray(self.draws.read()).tolist()) == sorted(expected)


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tasks]:
    monkeypatch.setattr(retries, "RETRY_S", 0.0)
    running = Tasks(tmp_path, every_s=0.05, workers=2)
    yield running
    running.close()


def numbers(tasks: Tasks, returns: dict[int, int]) -> Iterator[jax.Array]:
    """Yield numbers; before each key of `returns`, start that parameter task again, right after a snapshot."""
    for number in itertools.count():
        if number in returns:
            tasks.await_new_snapshot()
            tasks.start_again(returns.pop(number))
        yield jnp.int32(number)


OPTIONS: list[dict[str, Any]] = [{}, {"prefetch": 1}, {"max_staleness": 1}]


@pytest.mark.parametrize(("place", "options"), [*zip(["ps:0", "ps:1", "ps:0"], OPTIONS, strict=True)], ids=str)
def test_returns_to_snapshots_between_steps_that_were_not_reported(
    tasks: Tasks, place: str, options: dict[str, Any]
) -> None:
    program = Program(tasks.worker, place)
    program.fill()
    tasks.await_new_snapshot()
    for _ in Async(tasks.worker, **options).run(program.step, numbers(tasks, {11: 0, 25: 1}), steps=STEPS, name="run"):
        pass
    assert tasks.worker.steps.epoch == 2
    program.check()


def lose(monkeypatch: pytest.MonkeyPatch, is_lost: Callable[[str], bool], error: type[Exception] = TaskLost) -> None:
    """Have the answers of parts of steps lost, after the parts have ended."""
    ended = StepParts.ended

    def losing(parts: StepParts, task: str, outcome: Any) -> None:
        lost = not isinstance(outcome, BaseException) and is_lost(task)
        ended(parts, task, error(f"the answer of {task} was lost") if lost else outcome)

    monkeypatch.setattr(StepParts, "ended", losing)


@pytest.mark.parametrize(("place", "options"), [*zip(["worker", "ps:0", "ps:1"], OPTIONS, strict=True)], ids=str)
def test_steps_that_fail_and_are_tried_again(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch, place: str, options: dict[str, Any]
) -> None:
    program, choices = Program(tasks.worker, place), random.Random(1)
    program.fill()
    lose(monkeypatch, lambda task: choices.random() < 0.1)
    for _ in Async(tasks.worker, **options).run(program.step, numbers(tasks, {}), steps=STEPS, name="run"):
        pass
    monkeypatch.undo()
    program.check()


def test_a_step_that_waits_for_room_in_a_queue_does_not_hold_up_a_return(tasks: Tasks) -> None:
    queues, seen = [], []
    for cluster in tasks.workers:
        with cluster.parameter_servers():
            with dflow.device("ps:0"):
                queues.append(dflow.FIFOQueue(2, jnp.int32(0), name="room"))
            with dflow.device("ps:1"):
                seen.append(dflow.Variable(lambda: jnp.zeros(STEPS, jnp.int32), name="learned"))
                acted = dflow.Variable(0, name="acted")
    tasks.await_new_snapshot()

    @dflow.jit
    def act(_: Any) -> None:
        number = acted.read()
        acted.assign_add(1)
        queues[1].enqueue(number)

    @dflow.jit
    def learn(_: Any) -> None:
        seen[0].scatter_add(queues[0].dequeue()[None], ONE)

    def batches() -> Iterator[jax.Array]:
        for number in itertools.count():
            if number == 5:
                # The actor waits for room, and this worker for the return.
                until(lambda: any(part.run.is_blocked for part in [*tasks.ps[0].server.runs._parts.values()]))
                tasks.start_again(1)
            yield jnp.int32(number)

    with ThreadPoolExecutor(2) as pool:
        work = [
            pool.submit(lambda: [*Async(tasks.workers[1]).run(act, itertools.repeat(jnp.int32(0)), steps=STEPS)]),
            pool.submit(lambda: [*Async(tasks.workers[0]).run(learn, batches(), steps=STEPS, name="learn")]),
        ]
        for one in work:
            one.result(60)
    assert tasks.worker.steps.epoch == 1
    np.testing.assert_array_equal(seen[0].read(), np.ones(STEPS))
