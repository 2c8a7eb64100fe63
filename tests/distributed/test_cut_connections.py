"""Steps whose connection between two tasks is cut: each runs once, and none fails."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import jax.numpy as jnp
import numpy as np

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.cluster.stock_task import StockTask
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.transport.base import Peer
from dflow.distributed.transport.sockets import SocketTransport
from dflow.state_backends import LOCAL
from tests.distributed.proxy import Proxy

PS = "/job:ps/task:0"


class CutTransport(SocketTransport):
    """Connects to the ps task through a proxy that cuts each connection after at most 30,000 bytes."""

    proxy: Proxy | None = None

    def connect(self, address: str, *, who: str, **rest: Any) -> Peer:
        if who == PS:
            self.proxy = self.proxy or Proxy(address.partition(";")[0], random.Random(0), most_bytes=30_000)
            address = self.proxy.address
        return super().connect(address, who=who, **rest)


def test_steps_over_a_connection_that_is_cut_run_once_each() -> None:
    coordinator = Coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1, "worker": 1})
    task, cut = StockTask(SocketTransport(), PS, coordinator.address), CutTransport()
    with closing(coordinator), closing(task):
        settings = ClusterSettings()
        worker = Cluster(
            coordinator.address, cut, job="worker", index=0, store=LOCAL.store, address="127.0.0.1:0", settings=settings
        )
        with closing(worker):
            with worker.parameter_servers():
                v = dflow.Variable(lambda: jnp.zeros(1000), name="v")

            @dflow.jit
            def step(x: Any) -> Any:
                before = v.read()
                v.assign_add(x)
                return before

            for number in range(40):
                np.testing.assert_array_equal(step(jnp.ones(1000)), np.full(1000, number))
            assert cut.proxy is not None
            assert cut.proxy.connections > 5
            cut.proxy.close()
