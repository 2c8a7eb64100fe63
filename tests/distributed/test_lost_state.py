"""Parameter tasks that restart empty: each use of their lost state fails and names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.task_role import start_task
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.errors import TaskLost
from dflow.tracing.state.resources import is_variable
from tests.distributed.waiting import until

SOON = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=30.0)
LOST = r"lost: ps:0 left at .* s: .*, and ps:0 has been started again without (it|them)"


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=1, workers=2) as cluster:
        yield cluster


def restart(memory: MemoryCluster, worker: Cluster) -> None:
    """End the parameter task and restart it empty; wait until the worker knows."""
    before = memory.tasks["ps:0"]
    before.client.close("killed")
    before.server.close()
    until(lambda: before_left(memory))
    memory.tasks["ps:0"] = start_task(memory.network, task_name("ps", 0), memory.coordinator.address, address="")
    process = memory.tasks["ps:0"].client.session.process
    until(lambda: any(info.process == process for info in worker.coordinator.session.roster.tasks))


def before_left(memory: MemoryCluster) -> bool:
    memory.coordinator.tick()
    return "/job:ps/task:0" not in [info.task for info in memory.coordinator.status().tasks if info.left_at_s is None]


USES: dict[str, Callable[[dflow.Variable, dflow.FIFOQueue], object]] = {
    "read": lambda w, queue: w.read(),
    "assign": lambda w, queue: w.assign(jnp.ones(2)),
    "add": lambda w, queue: w.assign_add(jnp.ones(2)),
    "gather": lambda w, queue: w[jnp.array([0])],
    "enqueue": lambda w, queue: queue.enqueue(1.0),
    "new step": lambda w, queue: dflow.jit(lambda: w.read() * 2)(),
}


def test_the_next_process_of_a_task_is_not_filled_from_initialisers(memory: MemoryCluster) -> None:
    with closing(memory.worker(0, SOON)) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(np.zeros(2, np.float32), name="w")
            queue = dflow.FIFOQueue(4, jnp.float32(0), name="q")
            opt = dflow.Optimizer(optax.adam(0.1), [w], name="opt")

        @dflow.jit
        def step() -> object:
            opt.apply([w.read() + 1])
            return w.read()

        step()
        restart(memory, worker)
        with pytest.raises(TaskLost, match=LOST) as caught:
            step()
        for name in ("'w'", "'q'", "'opt/"):
            assert name in str(caught.value)
        assert f"at {__file__}:" in str(caught.value)
        for use in USES.values():
            with pytest.raises(TaskLost, match=LOST):
                use(w, queue)
        with worker.parameter_servers():
            with pytest.raises(TaskLost, match=f"variable 'w' is {LOST}"):
                dflow.Variable(np.zeros(2, np.float32), name="w").read()
            with pytest.raises(TaskLost, match=f"fifo queue 'q' is {LOST}|queue 'q' is {LOST}"):
                dflow.FIFOQueue(4, jnp.float32(0), name="q")
            with pytest.raises(TaskLost, match=f"variable 'w' is {LOST}"):
                dflow.Optimizer(optax.sgd(0.1, momentum=0.9), [w], name="another")
            new = dflow.Variable(np.ones(2, np.float32), name="new")
        np.testing.assert_array_equal(new.read(), [1, 1])
        slots = jax.tree.leaves(opt.slots, is_leaf=is_variable)
    with closing(memory.worker(1, SOON)) as late, late.parameter_servers():
        for one in (w, *slots):
            with pytest.raises(TaskLost, match=f"variable '{one.name}' is {LOST}"):
                dflow.Variable(np.zeros(one.shape, one.dtype), name=one.name).read()
    assert "w" not in memory.tasks["ps:0"].server.store


def test_a_read_whose_task_dies_meanwhile_names_the_task(memory: MemoryCluster) -> None:
    with closing(memory.worker(0, SOON)) as worker:
        with worker.parameter_servers():
            w = dflow.Variable(np.zeros(2, np.float32), name="w")
        task = memory.tasks["ps:0"]

        def views(keys: Sequence[str]) -> list[Any]:
            task.server.close()
            return [np.zeros(2, np.float32)]

        task.server.store.views = views  # type: ignore[method-assign]
        with pytest.raises(TaskLost, match="ps:0 was lost while worker:0 waited"):
            w.read()
