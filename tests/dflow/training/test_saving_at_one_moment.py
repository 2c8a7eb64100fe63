"""A save on a cluster has all of a step or none of it, while workers train."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.cluster.cluster import Cluster
from dflow.lowering.files.array_files import read_arrays
from dflow.testing import MemoryCluster, memory_cluster
from tests.distributed.waiting import until

SAVES = 12


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[list[Cluster]]:
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(memory.worker, range(3)))
    yield joined
    for one in joined:
        one.close()


def pair(cluster: Cluster) -> dict[str, dflow.Variable]:
    """A variable on each parameter task."""
    with cluster.parameter_servers():
        found = {}
        for index in range(2):
            with dflow.device(f"ps:{index}"):
                found[f"v{index}"] = dflow.Variable(lambda: jnp.zeros(()), name=f"v{index}")
    return found


def saved(folder: Path) -> list[tuple[float, float]]:
    """The two values in each checkpoint."""
    found = []
    for number in range(SAVES):
        values = read_arrays(folder / str(number)).read({"v0": None, "v1": None})
        found.append((float(values["v0"]), float(values["v1"])))
    return found


def test_a_save_while_workers_train_asynchronously(workers: list[Cluster], tmp_path: Path) -> None:
    enough = threading.Event()

    def train(cluster: Cluster) -> int:
        model = pair(cluster)

        @dflow.jit
        def step(x: Any) -> None:
            # The second update comes some milliseconds after the first.
            model["v0"].assign_add(x[0, 0])
            product = jax.lax.fori_loop(0, 300, lambda _, y: y @ x, x)
            model["v1"].assign_add(product[0, 0])

        batches = itertools.takewhile(lambda _: not enough.is_set(), itertools.repeat(jnp.eye(96)))
        return sum(1 for _ in Async(cluster).run(step, batches, steps=10**6, name="run"))

    with ThreadPoolExecutor(2) as pool:
        trained = pool.map(train, workers[:2])
        try:
            model = pair(workers[2])
            for number in range(SAVES):
                seen = float(model["v0"].read())
                until(lambda seen=seen: float(model["v0"].read()) > seen)  # type: ignore[misc]
                dflow.save(tmp_path / str(number), model)
        finally:
            enough.set()
        steps = sum(trained)
    counts = saved(tmp_path)
    assert all(first == second for first, second in counts), counts
    assert counts == sorted(counts)
    assert float(model["v0"].read()) == float(model["v1"].read()) == steps


def test_a_worker_saves_in_its_own_loop_of_synchronous_steps(workers: list[Cluster], tmp_path: Path) -> None:
    def train(cluster: Cluster) -> None:
        model = pair(cluster)
        optimizer = dflow.Optimizer(optax.sgd(1.0), model, name="sgd")

        @dflow.jit
        def step(x: Any) -> None:
            optimizer.apply({"v0": -x, "v1": -x})

        batches = itertools.repeat(jnp.float32(1))
        for number, _ in enumerate(Sync(cluster).run(step, batches, steps=SAVES, name="run")):
            if cluster.index == 0:
                dflow.save(tmp_path / str(number), model)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(train, workers))
    counts = saved(tmp_path)
    assert all(first == second for first, second in counts), counts
    assert counts == sorted(counts)
