"""Tasks that hold state and are lost, restarted or stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster, start_task
from dflow.distributed.transport.sockets import SocketTransport
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.devices.task_name import task_name
from dflow.tracing.errors import TaskLost
from dflow.tracing.state.resources import is_variable
from tests.distributed.processes import Spawned
from tests.distributed.waiting import DEADLINE_S, until

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


# A parameter task that is paused or cut off for longer than a worker may be silent: no step is lost or repeated.


PS = "/job:ps/task:0"
WORKERS = 2
#: Steps that must be done before a pause, and again after it.
SOME = 20
#: A worker is dead after 3 s of silence; the parameter task holds the only copy of a variable, and is waited for.
SETTINGS = CoordinatorSettings(heartbeat_timeout_s=3.0, holder_timeout_s=120.0)

#: Trains until the file `enough` exists, and reports the number of steps that this worker has done.
TRAIN = """
from pathlib import Path
import jax.numpy as jnp
import dflow

cluster = dflow.connect()
with cluster.parameter_servers():
    count = dflow.Variable(lambda: jnp.zeros((), jnp.int32), name="count")

@dflow.jit
def step(x):
    count.assign_add(x)

def batches():
    while not Path("enough").exists():
        yield jnp.int32(1)

done = sum(1 for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=10**9, name="train"))
cluster.report(f"done {cluster.index}", done)
cluster.barrier("done")
if cluster.elect("report"):
    cluster.report("count", int(count))
cluster.close()
"""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with closing(
        make_coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1, "worker": WORKERS}, settings=SETTINGS)
    ) as made:
        yield made


def all_left_well(coordinator: Coordinator) -> bool:
    """Whether each task of the cluster is in its first life, and is live or has finished."""
    tasks = coordinator.status().tasks
    return len({info.task for info in tasks}) == len(tasks) and {info.left for info in tasks} <= {"", "finished"}


@pytest.mark.once
def test_steps_go_on_after_a_parameter_task_was_stopped(coordinator: Coordinator, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    at = {"DFLOW_COORDINATOR": coordinator.address}
    with ExitStack() as stack:
        ps = stack.enter_context(Spawned("-m", "dflow", "task", "--job", "ps", "--index", "0", cwd=tmp_path, **at))
        workers = [
            stack.enter_context(Spawned("train.py", cwd=tmp_path, **at, DFLOW_JOB="worker", DFLOW_INDEX=str(index)))
            for index in range(WORKERS)
        ]
        until(lambda: coordinator.status().steps_done > SOME)
        os.kill(ps.process.pid, signal.SIGSTOP)
        for worker in workers:
            worker.read_until("ps:0 is away since")
        assert coordinator.status().away == (PS,)
        os.kill(ps.process.pid, signal.SIGCONT)
        for worker in workers:
            worker.read_until("ps:0 is back after")
        done = coordinator.status().steps_done
        until(lambda: coordinator.status().steps_done > done + SOME)
        (tmp_path / "enough").touch()
        for worker in workers:
            status, output = worker.finish()
            assert status == 0, output
        assert all_left_well(coordinator)
        results = coordinator.status().results
        assert results["count"] == results["done 0"] + results["done 1"] == coordinator.status().steps_done


def test_a_step_fails_immediately_when_the_process_of_a_parameter_task_has_ended(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """No process replaces it, and the coordinator waits for it; its address refuses connections."""
    at = {"DFLOW_COORDINATOR": coordinator.address}
    with ExitStack() as stack:
        ps = stack.enter_context(Spawned("-m", "dflow", "task", "--job", "ps", "--index", "0", cwd=tmp_path, **at))
        other = CoordinatorClient(SocketTransport(), coordinator.address, name="/job:worker/task:1")
        other.join("/job:worker/task:1", "nowhere")
        stack.callback(other.close)
        worker = join_cluster(coordinator.address, SocketTransport(), job="worker", index=0, store=Store())
        stack.callback(worker.close)
        with worker.parameter_servers():
            queue = dflow.FIFOQueue(4, jnp.float32(0), name="queue")
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(queue.dequeue)
            until(lambda: bool(worker.server.peers.connected(PS)))
            ps.process.kill()
            with pytest.raises(TaskLost, match="ps:0 was lost while worker:0 waited"):
                waits.result(DEADLINE_S)
        until(lambda: coordinator.status().away == (PS,))
        assert all_left_well(coordinator)
