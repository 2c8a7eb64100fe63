"""A cluster in memory whose parameter tasks make snapshots, and are started again as empty processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.stock_task import StockTask
from dflow.distributed.coordinator.coordinator_part import CoordinatorSettings
from dflow.distributed.coordinator.coordinator_store import MemoryStore
from dflow.distributed.coordinator.durable_records import Change
from dflow.distributed.coordinator_role import COORDINATOR_PARTS, make_coordinator
from dflow.distributed.snapshots.cluster_snapshots import ClusterSnapshots
from dflow.distributed.snapshots.resumption import newest_snapshot, resumed
from dflow.distributed.task_role import join_cluster, start_task
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.state_backends import LOCAL
from dflow.tracing.devices.task_name import task_name
from tests.distributed.waiting import until


class Tasks:
    """A coordinator, two parameter tasks with snapshots in `folder`, and workers.

    rows  the coordinator's first records, such as `ended_here` of earlier tasks
    """

    def __init__(
        self, folder: Path, every_s: float, workers: int = 1, rows: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        self.network, self.folder, self._store = MemoryNetwork(), folder, MemoryStore()
        self._store.write(Change(*row) for row in rows.items())
        settings = CoordinatorSettings(snapshot_every_s=every_s, rejoin_s=0.1)
        expected = {"ps": 2, "worker": workers}
        self.coordinator = make_coordinator(
            self.network, "", expected, store=self._store, settings=settings, tick_s=0.02
        )
        self.ps: list[StockTask] = []
        for index in range(2):
            self.ps.append(self.start(index))
        with ThreadPoolExecutor(workers) as pool:
            self.workers = list(pool.map(self.join, range(workers)))
        self.worker = self.workers[0]

    def join(self, index: int) -> Cluster:
        address = self.coordinator.address
        return join_cluster(address, self.network, job="worker", index=index, store=LOCAL.store, address="")

    def start(self, index: int) -> StockTask:
        address = self.coordinator.address
        return start_task(self.network, task_name("ps", index), address, address="", snapshots=self.folder)

    def start_again(self, index: int) -> None:
        """End a process of a parameter task, and start the next one, which is empty."""
        self.ps[index].close()
        self.ps[index] = self.start(index)

    def ended_here(self) -> dict[str, bytes]:
        """The records of the next launch, if all processes ended now."""
        rows = self._store.load()
        return resumed(rows, newest_snapshot(rows), COORDINATOR_PARTS)

    def await_snapshot(self, steps: int) -> None:
        """Wait for a committed snapshot with at least `steps` steps, or rounds, that are reported as done."""
        snapshots = self.coordinator._state.core.part(ClusterSnapshots)

        def is_there() -> bool:
            known = snapshots.committed
            return known.number > 0 and (known.steps_done or 0) >= steps

        until(is_there)

    def await_new_snapshot(self, change: Callable[[], object] = lambda: None) -> None:
        """Wait for a committed snapshot that is begun from now on, after a `change` that asks for one."""
        snapshots = self.coordinator._state.core.part(ClusterSnapshots)
        newest = snapshots.counted.number
        change()
        until(lambda: snapshots.committed.number > newest)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for task in self.ps:
            task.close()
        self.coordinator.close()
