"""In synchronous training each task averages the gradients of the variables that it holds: all tasks the same ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster
from tests.distributed.training.sync_programs import Sync, together

pytestmark = pytest.mark.once


def bytes_sent(memory: MemoryCluster, workers: list[Cluster]) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for server in [*(task.server for task in memory.tasks.values()), *(cluster.server for cluster in workers)]:
        for sent in server.traffic():
            total[sent.source[5:-7], sent.destination[5:-7]] += sent.size_bytes
    return total


def spread(cluster: Cluster, tasks: Sequence[str], transformation: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Four variables of zeros on these tasks; a step gives `x + number` as the gradient of each, by its number."""
    model = {}
    with cluster.parameter_servers():
        for name, task in zip("abcd", itertools.cycle(tasks), strict=False):
            with dflow.device(task):
                model[name] = dflow.Variable(lambda: jnp.zeros(shape), name=name)
        optimizer = dflow.Optimizer(transformation, model, name="optimizer")

    @dflow.jit
    def step(x: Any) -> None:
        optimizer.apply({name: jnp.full(shape, x + number) for number, name in enumerate(model)})

    return model, step


@pytest.mark.parametrize("tasks", [("ps:0", "ps:1"), ("ps:1",)], ids=["both", "one"])
def test_a_gradient_travels_once_and_averages_do_not_travel(
    memory: MemoryCluster, workers: list[Cluster], tasks: tuple[str, ...]
) -> None:
    rounds = 4

    def work(index: int, cluster: Cluster) -> None:
        _, step = spread(cluster, tasks, optax.adam(1e-3), (64, 64))
        list(Sync(cluster).run(step, itertools.repeat(1.0), steps=rounds, name="run"))

    together(workers, work)
    assert [(task.server.runs.updates, task.server.runs.missed) for task in memory.tasks.values()] == [(0, 0)] * 2
    sent = bytes_sent(memory, workers)
    gradients = 3 * rounds * 4 * 4 * 64 * 64
    assert gradients <= sent["worker", "ps"] < gradients * 1.01
    assert sent["ps", "ps"] < gradients / 100
