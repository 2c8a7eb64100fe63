"""Exports whose tables are at tasks: the rows that a call looks up come from there, and answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster, memory_cluster

ROWS, DIM = 4000, 8
#: Of the vocabulary: those with a row, and one without.
NAMES = ["ann", "bob", "eve", "zoe"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[MemoryCluster, Cluster]]:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield cluster, worker


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of a function of strings and of ragged bags of numbers, with a dense layer."""
    items = dflow.Embedding(ROWS, DIM, name="items", shards=2)
    users = dflow.Embedding(64, DIM, name="users", shards=2, vocabulary=dflow.Vocabulary(bucket=8))
    layer = dflow.Variable(jnp.arange(DIM, dtype=jnp.float32), name="layer")
    optimizer = dflow.Optimizer(optax.sgd(0.1), [users], name="sgd")

    @dflow.jit
    def step(names: Any) -> None:
        found = users.find(names)
        optimizer.apply(dflow.grad(lambda: jnp.sum(users(found) ** 2), [users])(), found=found)

    step(NAMES[:-1])

    def serve(names: Any, ids: Any, bags: Any) -> Any:
        return (users(names) * items.bag(ids, segments=bags, bags=names.shape[0])) @ layer

    specs = dflow.spec("b", np.str_), dflow.spec("n", jnp.int32), dflow.spec("n", jnp.int32)
    folder = tmp_path_factory.mktemp("row_lookups") / "m"
    return dflow.export(serve, *specs, platforms=["cpu"]).save(folder)


ARGUMENTS = NAMES, np.array([7, 3999, 7, 0], np.int32), np.array([0, 3, 3, 1], np.int32)
EMPTY: Any = np.zeros(0, np.str_), np.zeros(0, np.int32), np.zeros(0, np.int32)


def sent_bytes(cluster: MemoryCluster) -> int:
    """Return the bytes of values that the tasks have sent."""
    return sum(edge.size_bytes for task in cluster.tasks.values() for edge in task.server.traffic())


def test_only_rows_of_tables_that_are_at_tasks_travel(path: Path, cluster: tuple[MemoryCluster, Cluster]) -> None:
    here = dflow.load(path, prefix="here/")
    with cluster[1].parameter_servers():
        there = dflow.load(path, prefix="there/")
    before = sent_bytes(cluster[0])
    for arguments in (ARGUMENTS, EMPTY):
        np.testing.assert_array_equal(there(*arguments), here(*arguments))
    assert 0 < sent_bytes(cluster[0]) - before < ROWS * DIM
    with pytest.raises(dflow.InputError, match=r"table 'items': expected ids from 0 to 3999, got 4000"):
        there(NAMES, ARGUMENTS[1] + 1, ARGUMENTS[2])
