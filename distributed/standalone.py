"""The cluster of a standalone process, which `dflow.connect()` returns when no cluster was configured."""

from __future__ import annotations

import time
from collections.abc import Callable

from dflow.distributed.cluster.cluster import LOCAL_JOB, Cluster
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.lowering.state.store import Store


class NoCalls:
    """A clock that never runs the calls scheduled on it: a standalone process needs no heartbeats or reconnects."""

    @property
    def now_s(self) -> float:
        """Time in seconds since an arbitrary moment."""
        return time.monotonic()

    def after(self, delay_s: float, call: Callable[[], None]) -> NoCalls:
        """Return an object with `stop`, and never call `call`."""
        return self

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def standalone(store: Store) -> Cluster:
    """Start a coordinator in this process, and return the cluster of which the process is the only task.

    It has no threads and no sockets.
    """
    network = MemoryNetwork(is_threaded=False)
    coordinator = make_coordinator(network, "", {LOCAL_JOB: 1}, tick_s=None)
    return join_cluster(
        coordinator.address,
        network,
        job=LOCAL_JOB,
        index=0,
        store=store,
        address="",
        is_standalone=True,
        clock=NoCalls(),
    )
