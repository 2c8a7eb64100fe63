"""Training goes on after parameter tasks were started again, with what a snapshot has; without one, it is an error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.snapshots.recovery import Recovery
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.waiting import until

pytestmark = pytest.mark.once


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    running = Tasks(tmp_path, every_s=0.05)
    yield running
    running.close()


STEPS = 60


def queue_on_ps_0(tasks: Tasks) -> tuple[Any, Any]:
    """A queue on ps:0, and the number of elements taken out of it, on ps:1."""
    with tasks.worker.parameter_servers():
        with dflow.device("ps:0"):
            queue = dflow.FIFOQueue(4, jnp.int32(0), name="queue")
        with dflow.device("ps:1"):
            total = dflow.Variable(0, name="total")
    return queue, total


def test_the_feed_of_a_queue_goes_on_after_its_task_was_started_again(tasks: Tasks) -> None:
    queue, total = queue_on_ps_0(tasks)

    @dflow.jit
    def step(number: jax.Array) -> None:
        total.assign_add(1 + 0 * queue.dequeue())

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if number == 20:
                tasks.await_snapshot(15)
                tasks.start_again(0)
            yield jnp.int32(number)

    with dflow.data.feed(itertools.repeat(np.int32(1)), queue) as feed:
        for _ in Async(tasks.worker).run(step, batches(), steps=STEPS, name="run"):
            pass
        assert feed.is_running()
    assert tasks.worker.steps.epoch == 1
    assert int(total.read()) == STEPS


def test_a_queue_whose_data_has_ended_gives_its_last_elements_again(tasks: Tasks) -> None:
    queue, _ = queue_on_ps_0(tasks)
    dflow.data.feed(map(np.int32, range(3)), queue).join()
    for index in range(2):
        tasks.start_again(index)
    tasks.worker.steps.await_recovery()
    assert [int(queue.dequeue()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(dflow.QueueClosed):
        queue.dequeue()


def test_restored_values_are_not_lost_with_a_task(tasks: Tasks, tmp_path: Path) -> None:
    with tasks.worker.parameter_servers():
        table = dflow.Variable(jnp.zeros(3), name="table")
    dflow.save(tmp_path / "saved", {"table": table})
    table.assign(jnp.ones(3))
    tasks.await_snapshot(0)
    dflow.restore(tmp_path / "saved", {"table": table})
    for index in range(2):
        tasks.start_again(index)
    tasks.worker.steps.await_recovery()
    np.testing.assert_array_equal(table.read(), np.zeros(3))


def test_a_worker_that_starts_during_a_return_waits_for_its_variables(tmp_path: Path) -> None:
    tasks = Tasks(tmp_path, every_s=0.05, workers=2)

    def weights(cluster: Cluster) -> Any:
        with cluster.parameter_servers():
            return [dflow.Variable(lambda: jnp.zeros(3), name=f"w{index}") for index in range(4)]

    try:
        for index, variable in enumerate(weights(tasks.workers[0])):
            variable.assign(jnp.full(3, index))
        tasks.await_new_snapshot()
        with ThreadPoolExecutor(1) as pool:
            # The return waits for this step.
            with tasks.workers[0].server.gate.step(60.0):
                tasks.start_again(0)
                until(lambda: tasks.coordinator._state.core.part(Recovery).is_returning)
                made = pool.submit(weights, tasks.workers[1])
                until(lambda: bool(tasks.coordinator._state.core.part(Recovery)._asks) or made.done())
            found = made.result(60)
        for index, variable in enumerate(found):
            np.testing.assert_array_equal(variable.read(), np.full(3, index))
    finally:
        tasks.close()
