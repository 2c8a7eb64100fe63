"""A worker's view of a cluster, with every task in this process: it joins, and trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeadlineExceeded, RemoteError

SOON = ClusterSettings(join_timeout_s=0.2, request_timeout_s=30.0, step_timeout_s=30.0)


def zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


def test_variables_are_spread_and_slots_are_with_what_they_belong_to(worker: Cluster) -> None:
    with worker.parameter_servers():
        model = dflow.variables({name: zeros(100) for name in "abcd"}, prefix="spread/")
        optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="spread/adam")
    assert {variable.device for variable in model.values()} == {"/job:ps/task:0", "/job:ps/task:1"}
    for name, variable in model.items():
        assert optimizer.slots[0].mu[name].device == optimizer.slots[0].nu[name].device == variable.device


def test_gradients_travel_and_the_state_of_the_optimizer_stays(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        model = dflow.variables({name: zeros(100) for name in "abcd"}, prefix="stay/")
        optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="stay/adam")

    @dflow.jit
    def step() -> None:
        optimizer.apply(dflow.grad(lambda: sum((v.read() - 1) @ v.read() for v in model.values()), model)())

    step()
    servers = [worker.server, *(task.server for task in memory.tasks.values())]
    large = [sent for server in servers for sent in server.traffic() if sent.size_bytes > 99]
    gradients = [sent for sent in large if sent.source == worker.task]
    values = [sent for sent in large if sent.source != worker.task]
    assert {sent.edge for sent in gradients} == {"grad/stay/a+1", "grad/stay/b+1"}
    assert {sent.edge for sent in values} == {"stay/a+1", "stay/b+1"}
    # Two arrays of 400 bytes; the second one is aligned to 64 bytes.
    assert {(sent.values, sent.size_bytes) for sent in large} == {(2, 448 + 400)}


@pytest.mark.parametrize("layout", ["whole", "every second column", "by columns", "rows backwards"])
def test_a_numpy_argument_has_the_value_that_it_had_at_the_call(worker: Cluster, layout: str) -> None:
    with worker.parameter_servers():
        total = dflow.Variable(lambda: jnp.zeros((8, 2)), name="total")

    @dflow.jit
    def step(x: Any, slow: Any) -> Any:
        total.assign_add(x)
        for _ in range(4):
            slow = slow @ slow
        return x, x + 0 * slow.sum()

    slow = jnp.eye(600)
    for _ in range(2):  # the first call compiles
        batch = aligned_zeros(8, 4)
        batch[...] = np.arange(32).reshape(8, 4)
        views = {
            "whole": batch.reshape(16, 2)[:8],
            "every second column": batch[:, ::2],
            "by columns": batch.reshape(4, 8)[:2].T,
            "rows backwards": batch[::-1, :2],
        }
        given = np.array(views[layout])
        total.assign(jnp.zeros((8, 2)))
        results = step(views[layout], slow)
        batch[...] = -1  # while the program runs
        for result in (*results, total.read()):
            np.testing.assert_array_equal(result, given)


def aligned_zeros(*shape: int) -> Any:
    """Return float32 zeros that a program on a CPU takes without a copy."""
    size_bytes = 4 * int(np.prod(shape))
    memory = np.zeros(size_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size_bytes].view(np.float32).reshape(shape)


def test_a_coordinator_nobody_answers_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at nowhere could not be reached within 0\.2 s"):
        join_cluster("nowhere", MemoryNetwork(), job="worker", index=0, store=Store(), settings=SOON, address="")


def test_a_parameter_task_that_never_comes_is_named() -> None:
    network = MemoryNetwork()
    coordinator = make_coordinator(network, "", {"ps": 2, "worker": 1})
    with closing(coordinator), pytest.raises(DeadlineExceeded, match=r"2 are missing: ps:0, ps:1") as caught:
        join_cluster(coordinator.address, network, job="worker", index=0, store=Store(), settings=SOON, address="")
    assert "waited 0.2 s" in str(caught.value)


@pytest.mark.parametrize(("job", "meant"), [("wroker", "'worker'"), ("worker", ""), ("evaluator", ""), ("worker2", "")])
def test_a_job_that_looks_misspelt_is_said_to(
    memory: MemoryCluster, worker: Cluster, job: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(DeadlineExceeded):  # worker:1 is expected as well
        address = memory.coordinator.address
        join_cluster(address, memory.network, job=job, index=1, store=Store(), settings=SOON, address="").close()
    texts = [record.getMessage() for record in caplog.records if "meant?" in record.getMessage()]
    expected = [f"/job:{job}/task:1 has joined as the first of job {job!r}, was {meant} meant?"] if meant else []
    assert texts == expected


def test_a_second_worker_of_one_number_is_refused(memory: MemoryCluster, worker: Cluster) -> None:
    with pytest.raises(RemoteError, match="worker:0"):
        memory.worker(0)
    assert "/job:worker/task:0" in worker.tasks


def test_a_part_is_made_once_and_closed_before_those_that_it_was_made_of() -> None:
    cluster, closed = dflow.connect(), list[str]()

    class First:
        def __init__(self, cluster: Cluster) -> None:
            self.cluster = cluster

        def close(self) -> None:
            closed.append(type(self).__name__)

    class Second(First):
        def __init__(self, cluster: Cluster) -> None:
            self.first = cluster.part(First)

    second = cluster.part(Second)
    assert cluster.part(Second) is second
    assert cluster.part(First) is second.first
    cluster.close()
    cluster.close()
    assert closed == ["Second", "First"]
