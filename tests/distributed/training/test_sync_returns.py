"""A return to a snapshot between the moments of a worker's synchronous steps: each element is used once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Sync
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.snapshots.snapshot_schedule import SnapshotSchedule
from dflow.distributed.synchronous.round_part import RoundPart
from dflow.distributed.synchronous.step_aggregator import StepAggregator
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.task_parts import part_of
from tests.distributed.waiting import DEADLINE_S, until

pytestmark = pytest.mark.once

ROUNDS = 4
#: The elements of both workers.
COUNT = 2 * ROUNDS


class Program:
    """A worker's step: it takes an element on ps:0, counts it on ps:1, and gives a gradient for a weight there."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        with cluster.parameter_servers():
            with dflow.device("ps:0"):
                self.queue = dflow.FIFOQueue(COUNT, jnp.int32(0), name="taken in rounds")
            with dflow.device("ps:1"):
                self.seen = dflow.Variable(lambda: jnp.zeros(COUNT, jnp.int32), name="seen in rounds")
                weight = dflow.Variable(lambda: jnp.zeros(()), name="weight of rounds")
            self.optimizer = dflow.Optimizer(optax.sgd(1.0), [weight], name="sgd of rounds")
        self.step = dflow.jit(self._step)

    def _step(self, _: Any) -> jax.Array:
        element = self.queue.dequeue(timeout_s=30)
        self.seen.scatter_add(element[None], jnp.ones(1, jnp.int32))
        self.optimizer.apply([jnp.float32(-1)])
        return element

    def run(self) -> Any:
        self.strategy = Sync(self.cluster)
        return self.strategy.run(self.step, itertools.repeat(jnp.int32(0)), steps=ROUNDS, name="run")


@pytest.fixture
def programs(tasks: Tasks) -> list[Program]:
    made = [Program(worker) for worker in tasks.workers]
    made[0].queue.enqueue_many(jnp.arange(COUNT))
    return made


def lose_state(tasks: Tasks, worker: Cluster) -> None:
    """Have all tasks return to the newest snapshot, and wait until this worker knows of it."""
    tasks.start_again(1)
    until(lambda: worker.steps.epoch == 1)


def check(program: Program) -> None:
    np.testing.assert_array_equal(program.seen.read(), np.ones(COUNT))
    assert int(program.queue.size()) == 0


def before_steps(monkeypatch: pytest.MonkeyPatch, cluster: Cluster, do: Callable[[], object]) -> None:
    """Call `do` before each step of a worker enters the gate."""
    enter = cluster.server.gate.step

    @contextmanager
    def late(timeout_s: float) -> Iterator[None]:
        do()
        with enter(timeout_s):
            yield

    monkeypatch.setattr(cluster.server.gate, "step", late)


def test_a_round_that_was_opened_before_a_return_is_not_done_after_it(
    tasks: Tasks, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has the opening of round 1, and enters the gate when all have returned to the middle of round 0."""
    entered = itertools.count()
    tasks.await_new_snapshot()
    before_steps(monkeypatch, tasks.worker, lambda: lose_state(tasks, tasks.worker) if next(entered) == 1 else None)
    run = programs[0].run()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: [*run])
        until(lambda: int(programs[0].seen.read().sum()) == 1)
        tasks.await_new_snapshot()
        monkeypatch.setattr(SnapshotSchedule, "is_due", lambda *_: False)
        second = pool.submit(lambda: [*programs[1].run()])
        for one in (first, second):
            assert len(one.result(DEADLINE_S)) >= ROUNDS
    check(programs[0])


@pytest.mark.parametrize("is_lost", [False, True], ids=["undisturbed", "returns"])
@pytest.mark.parametrize("is_next", [False, True], ids=["same process", "next process"])
def test_a_worker_that_comes_back_to_an_open_round_takes_no_other_element(
    tasks: Tasks, programs: list[Program], monkeypatch: pytest.MonkeyPatch, is_next: bool, is_lost: bool
) -> None:
    """The worker leaves the run, or its process ends, after its step in round 0, before the other gives a gradient."""
    is_after = threading.Event()
    before_steps(monkeypatch, tasks.workers[1], lambda: is_after.wait(DEADLINE_S))
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(lambda: [*programs[1].run()])
        run = programs[0].run()
        next(run)
        with monkeypatch.context() as killed:
            if is_next:
                killed.setattr(RoundPart, "leave", lambda part, done: None)
                tasks.worker.close()
            run.close()
        if is_lost:
            tasks.await_new_snapshot()
            monkeypatch.setattr(SnapshotSchedule, "is_due", lambda *_: False)
            lose_state(tasks, tasks.workers[1])
        if is_next:
            tasks.workers[0] = tasks.worker = tasks.join(0)
            programs[0] = Program(tasks.worker)
        mine = pool.submit(lambda: [*programs[0].run()])
        # It takes part again, and has given its gradient for round 0.
        hosted = [part_of(ps.server, StepAggregator)._runs for ps in tasks.ps]
        rounds = lambda: [one._rounds for runs in hosted for one in [*runs.values()]]  # noqa: E731
        until(lambda: any(tasks.worker.task in one.workers & one.given for one in rounds()))
        is_after.set()
        counts = [len(loop.result(DEADLINE_S)) for loop in (mine, other)]
    assert counts == [ROUNDS if is_lost or is_next else ROUNDS - 1, ROUNDS]
    # A round has one gradient of each worker, so none of the other's was too late.
    assert [program.strategy.dropped for program in programs] == [0, 0]
    check(programs[0])
