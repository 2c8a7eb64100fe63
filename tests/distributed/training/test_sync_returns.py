"""A return to a snapshot between the moments of a worker's synchronous steps: each element is used once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
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
from tests.distributed.cluster.tasks_with_snapshots import Tasks
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


def check(program: Program) -> None:
    np.testing.assert_array_equal(program.seen.read(), np.ones(COUNT))
    assert int(program.queue.size()) == 0


def test_a_round_that_was_opened_before_a_return_is_not_done_after_it(
    tasks: Tasks, programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has the opening of round 1, and enters the gate when all have returned to the middle of round 0."""
    gate, entered = tasks.worker.server.gate, itertools.count()
    enter = gate.step
    tasks.await_new_snapshot()

    @contextmanager
    def late(timeout_s: float) -> Iterator[None]:
        if next(entered) == 1:
            tasks.start_again(1)
            until(lambda: tasks.worker.steps.epoch == 1)
        with enter(timeout_s):
            yield

    monkeypatch.setattr(gate, "step", late)
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
    gate, is_after = tasks.workers[1].server.gate, threading.Event()
    enter = gate.step

    @contextmanager
    def late(timeout_s: float) -> Iterator[None]:
        assert is_after.wait(DEADLINE_S)
        with enter(timeout_s):
            yield

    monkeypatch.setattr(gate, "step", late)
    with ThreadPoolExecutor(1) as pool:
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
            tasks.start_again(1)
            until(lambda: tasks.workers[1].steps.epoch == 1)
        if is_next:
            tasks.workers[0] = tasks.worker = tasks.join(0)
            programs[0] = Program(tasks.worker)
        run = programs[0].run()
        done = [next(run)] if is_next or is_lost else []
        is_after.set()
        done += run
        assert (len(done), len(other.result(DEADLINE_S))) == (ROUNDS - (not is_next and not is_lost), ROUNDS)
    # A round has one gradient of each worker, so none of the other's was too late.
    assert [program.strategy.dropped for program in programs] == [0, 0]
    check(programs[0])
