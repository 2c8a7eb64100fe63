"""Clusters with unexpected tasks, and with expected tasks that are missing."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.cluster.stock_task import StockTask
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster, start_task
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.lowering.state.store import Store

SOON_S = 30.0


class Place:
    """A coordinator that expects one ps and one worker, and the tasks that joined it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.coordinator = make_coordinator(self.network, "", {"ps": 1, "worker": 1})
        self.made: list[Cluster | StockTask | CoordinatorClient] = []

    def ps(self, index: int) -> StockTask:
        task = start_task(self.network, f"/job:ps/task:{index}", self.coordinator.address, address="")
        self.made.append(task)
        return task

    def worker(self, index: int) -> Cluster:
        made = join_cluster(
            self.coordinator.address,
            self.network,
            job="worker",
            index=index,
            store=Store(),
            address="",
            settings=ClusterSettings(SOON_S, SOON_S, SOON_S),
        )
        self.made.append(made)
        return made

    def client(self, task: str) -> CoordinatorClient:
        client = CoordinatorClient(self.network, self.coordinator.address, name=task)
        client.join(task, "nowhere")
        self.made.append(client)
        return client


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    for one in reversed(made.made):
        one.close()
    made.coordinator.close()


def test_a_ps_task_that_joins_later_gets_new_variables_and_the_old_stay_where_they_are(place: Place) -> None:
    place.ps(0)
    worker = place.worker(0)
    with worker.parameter_servers():
        first = dflow.Variable(np.zeros(4, np.float32), name="first")
        place.ps(1)
        worker.coordinator.wait_for_tasks(["/job:ps/task:1"], timeout_s=SOON_S)
        second = dflow.Variable(np.ones(4, np.float32), name="second")

    @dflow.jit
    def step(x: object) -> object:
        first.assign_add(x)
        return first.read() + second.read()

    assert (first.device, second.device) == ("/job:ps/task:0", "/job:ps/task:1")
    np.testing.assert_array_equal(step(jnp.ones(4)), [2, 2, 2, 2])  # type: ignore[arg-type]
