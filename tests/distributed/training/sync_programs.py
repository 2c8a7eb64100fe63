"""Deadlines, a step, and a function that runs work on all workers, for the tests of synchronous training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import optax

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.testing import MemoryCluster
from tests.distributed.waiting import DEADLINE_S

SOON = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=30.0)
Sync = dflow.distributed.Sync


def together(workers: Sequence[Any], work: Callable[[int, Any], Any]) -> list[Any]:
    """Do the work of every worker concurrently; return the results."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return [done.result(DEADLINE_S) for done in [pool.submit(work, *pair) for pair in enumerate(workers)]]


def pair(cluster: Cluster, prefix: str = "pair") -> tuple[Any, Any]:
    """Two variables on two tasks; a step subtracts its argument from each and returns the values that it read."""
    with cluster.parameter_servers():
        model = dflow.variables({name: (lambda: jnp.zeros(4)) for name in ("first", "second")}, prefix=f"{prefix}/")
        optimizer = dflow.Optimizer(optax.sgd(1.0), model, name=f"{prefix}/opt")
    assert model["first"].device != model["second"].device

    @dflow.jit
    def step(x: Any) -> Any:
        seen = {name: variable.read()[0] for name, variable in model.items()}
        # The gradient depends on the read value, as usual, so the read comes before the gradient is sent.
        optimizer.apply({name: jnp.full(4, -x) + 0 * sum(seen.values()) for name in model})
        return seen

    return model, step


def nothing_is_left(memory: MemoryCluster, cluster: Cluster) -> bool:
    servers = [cluster.server, *(task.server for task in memory.tasks.values())]
    held = [server.statistics() for server in servers]
    return all(not (s.rendezvous.open_steps or s.rendezvous.waiters or s.rendezvous.values) for s in held)


class Turns:
    """Named events; workers wait for each other with them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: dict[str, threading.Event] = {}

    def _event(self, name: str) -> threading.Event:
        with self._lock:
            return self._events.setdefault(name, threading.Event())

    def done(self, name: str) -> None:
        self._event(name).set()

    def wait(self, *names: str) -> None:
        for name in names:
            assert self._event(name).wait(DEADLINE_S), f"{name} never came"
