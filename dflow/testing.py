"""A whole cluster inside one process, for tests and experiments: the same code, with messages in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster, start_task
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.graphs.compiled_functions import function_data
from dflow.state_backends import LOCAL
from dflow.tracing.devices.task_name import task_name


class MemoryCluster:
    """A coordinator and parameter tasks in this process. Made by `memory_cluster`."""

    def __init__(self, ps: int, workers: int) -> None:
        self.network = MemoryNetwork()
        self.coordinator = make_coordinator(self.network, "", {"ps": ps, "worker": workers})
        #: The parameter tasks, by short name.
        self.tasks = {
            f"ps:{index}": start_task(self.network, task_name("ps", index), self.coordinator.address, address="")
            for index in range(ps)
        }
        self._workers = contextlib.ExitStack()

    def worker(self, index: int = 0, settings: ClusterSettings | None = None) -> Cluster:
        """Join as worker `index`, and return its cluster, which `close` also closes."""
        cluster = join_cluster(
            self.coordinator.address,
            self.network,
            job="worker",
            index=index,
            store=LOCAL.store,
            address="",
            settings=settings or ClusterSettings(),
        )
        cluster.server.observer.functions = function_data
        self._workers.callback(cluster.close)
        return cluster

    def close(self) -> None:
        """Close the workers, then end the parameter tasks and the coordinator."""
        self._workers.close()
        for task in self.tasks.values():
            task.close()
        self.coordinator.close()


@contextlib.contextmanager
def memory_cluster(*, ps: int = 1, workers: int = 1) -> Iterator[MemoryCluster]:
    """Start a cluster of `ps` parameter tasks in this process, which expects `workers` workers; close it on exit."""
    cluster = MemoryCluster(ps, workers)
    try:
        yield cluster
    finally:
        cluster.close()
