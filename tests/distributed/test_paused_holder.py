"""A parameter task that is paused or cut off for longer than a worker may be silent: no step is lost or repeated."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import jax.numpy as jnp
import pytest

import dflow
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.sockets import SocketTransport
from dflow.lowering.state.store import Store
from dflow.tracing.errors import TaskLost
from tests.distributed.processes import Spawned
from tests.distributed.waiting import DEADLINE_S, until

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
