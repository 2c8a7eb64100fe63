"""The end of a queue's elements in training: all elements are used, and no worker waits for one that has none left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.cluster.cluster import Cluster
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.training.sync_programs import together

pytestmark = pytest.mark.once

#: More steps than there are elements.
STEPS = 40
STRATEGIES: dict[str, Callable[[Any], Any]] = {
    "async": Async,
    "bounded": lambda cluster: Async(cluster, max_staleness=2),
    "sync": Sync,
    "backup": lambda cluster: Sync(cluster, backup_workers=1),
}


def variables(cluster: Cluster) -> tuple[Any, Any]:
    """What the steps write: how often each element was seen, and an optimizer of a weight."""
    with cluster.parameter_servers(), dflow.device("ps:1"):
        seen = dflow.Variable(lambda: jnp.zeros(STEPS, jnp.int32), name="seen")
        weight = dflow.Variable(lambda: jnp.zeros(()), name="weight")
        return seen, dflow.Optimizer(optax.sgd(1.0), [weight], name="sgd")


def train(
    cluster: Cluster, strategy: Callable[[Any], Any], queue: Any, before: Callable[[int], None] = lambda number: None
) -> int:
    """Train until the queue has ended; return the number of this worker's steps."""
    seen, optimizer = variables(cluster)

    @dflow.jit
    def step(_: jax.Array) -> None:
        element = queue.dequeue(timeout_s=30)
        seen.scatter_add(element[None], jnp.ones(1, jnp.int32))
        optimizer.apply([jnp.float32(-1)])

    def batches() -> Iterator[jax.Array]:
        for number in range(STEPS):
            before(number)
            yield jnp.int32(number)

    loop, done = strategy(cluster).run(step, batches(), steps=STEPS, name="run"), 0
    while True:
        try:
            next(loop)
        except dflow.QueueClosed:
            return done
        done += 1


def shared_queue(tasks: Tasks, count: int) -> list[Any]:
    queues = []
    for cluster in tasks.workers:
        variables(cluster)
        with cluster.parameter_servers(), dflow.device("ps:0"):
            queues.append(dflow.FIFOQueue(STEPS, jnp.int32(0), name="elements"))
    queues[0].enqueue_many(jnp.arange(count))
    queues[0].close()
    tasks.await_new_snapshot()
    return queues


def seen_by(tasks: Tasks) -> Any:
    seen, _ = variables(tasks.worker)
    return np.asarray(seen.read())


@pytest.mark.parametrize(("count", "kills"), [(7, False), (8, True)], ids=["undisturbed", "returns"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_the_last_elements_of_a_shared_queue(tasks: Tasks, strategy: Any, count: int, kills: bool) -> None:
    queues = shared_queue(tasks, count)
    # One worker may use nearly all elements, so the first that comes to its third batch ends the task.
    first = threading.Lock()

    def before(number: int) -> None:
        if kills and number == 2 and first.acquire(blocking=False):
            tasks.start_again(1)

    def work(index: int, cluster: Cluster) -> int:
        return train(cluster, strategy, queues[index], before)

    together(tasks.workers, work)
    assert tasks.worker.steps.epoch == kills
    np.testing.assert_array_equal(seen_by(tasks), np.arange(STEPS) < count)
