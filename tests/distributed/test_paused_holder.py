"""A parameter task that is paused or cut off for longer than a worker may be silent: no step is lost or repeated."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.client.coordinator_client import CoordinatorClient
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.stock_task import StockTask
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.coordinator.coordinator_state import CoordinatorSettings
from dflow.distributed.transport.base import Peer
from dflow.distributed.transport.sockets import SocketTransport
from dflow.lowering.state.store import Store
from dflow.tracing.errors import TaskLost
from tests.distributed.processes import Spawned
from tests.distributed.proxy import Proxy
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
        Coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1, "worker": WORKERS}, settings=SETTINGS)
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
        worker = Cluster(coordinator.address, SocketTransport(), job="worker", index=0, store=Store())
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


class CutTransport(SocketTransport):
    """Connects to `target` through a proxy."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self.proxy: Proxy | None = None

    def connect(self, address: str, *, who: str, **rest: Any) -> Peer:
        if who == self._target:
            self.proxy = self.proxy or Proxy(address.partition(";")[0], random.Random(0), most_bytes=1 << 40)
            address = self.proxy.address
        return super().connect(address, who=who, **rest)


@pytest.mark.once
def test_steps_go_on_after_a_parameter_task_was_cut_off(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    to_coordinator, to_ps = CutTransport("the coordinator"), CutTransport(PS)
    task = StockTask(to_coordinator, PS, coordinator.address, "127.0.0.1:0")
    other = Cluster(coordinator.address, SocketTransport(), job="worker", index=1, store=Store(), address="127.0.0.1:0")
    worker = Cluster(coordinator.address, to_ps, job="worker", index=0, store=Store(), address="127.0.0.1:0")
    enough, seen, errors = threading.Event(), list[int](), list[BaseException]()
    with closing(task), closing(other), closing(worker):
        with worker.parameter_servers():
            count = dflow.Variable(lambda: jnp.zeros((), jnp.int32), name="count")

        @dflow.jit
        def step() -> Any:
            before = count.read()
            count.assign_add(1)
            return before

        def train() -> None:
            try:
                while not enough.is_set():
                    seen.append(int(step()))  # type: ignore[call-overload]
            except BaseException as error:
                errors.append(error)

        training = threading.Thread(target=train)
        training.start()
        until(lambda: len(seen) > SOME)
        proxies = [transport.proxy for transport in (to_coordinator, to_ps) if transport.proxy is not None]
        assert len(proxies) == 2
        for proxy in proxies:
            proxy.cuts_at_once = True
            proxy.cut()
        until(lambda: coordinator.status().away == (PS,) or bool(errors))
        until(lambda: "worker:0: ps:0 is away since" in caplog.text or bool(errors))
        # The connection to the coordinator ends after `Limits.resume_s`; that to the worker must not.
        until(lambda: bool(task.client.session.outage) or bool(errors))
        until(lambda: f"no connection to {PS} for" in caplog.text or bool(errors))
        before = len(seen)
        for proxy in proxies:
            proxy.cuts_at_once = False
        until(lambda: len(seen) > before + SOME or bool(errors))
        enough.set()
        training.join()
        assert not errors
        np.testing.assert_array_equal(seen, range(len(seen)))
        assert int(count) == len(seen)
        until(lambda: "worker:0: ps:0 is back after" in caplog.text)
        assert f"the connection to {PS} is back after" in caplog.text
        assert all_left_well(coordinator)
        for proxy in proxies:
            proxy.close()
