"""Exports of a cluster: its tasks write their own parts, and the worker reads no table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster_home import ClusterHome
from dflow.testing import memory_cluster

ROWS = 30


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        yield worker


def refused(*_: Any) -> Any:
    raise AssertionError("the worker reads variables")


@pytest.mark.parametrize("form", [None, "int8", "bfloat16"])
def test_the_tasks_write_the_tables_of_an_export(
    form: Any, worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worker.parameter_servers():
        tables = [
            dflow.Embedding(ROWS, 2, name="blocks", shards=3),
            dflow.Embedding(ROWS, 2, name="modulo", shards=2, by="modulo"),
        ]
        layer = dflow.Variable(jnp.ones((2, 4)), name="layer")
    local = dflow.Variable(jnp.float32(3), name="local")

    def serve(ids: Any) -> Any:
        return sum(table(ids) for table in tables) @ layer * local

    with monkeypatch.context() as patch:
        patch.setattr(ClusterHome, "read_together", refused)
        exported = dflow.export(serve, dflow.spec("b", jnp.int32), platforms=["cpu"], weights=form)
        exported.save(tmp_path / "m")
    ids = np.arange(ROWS, dtype=np.int32)
    expected = sum(np.asarray(table.read()) for table in tables) @ np.ones((2, 4), np.float32) * 3
    found = dflow.load(tmp_path / "m", prefix=f"{form}/")(ids)
    np.testing.assert_allclose(found, expected, **({"rtol": 1e-6} if form is None else {"atol": 0.05}))
    if form is not None:
        return
    # The folder of the values is a checkpoint.
    blocks = dflow.ShardedVariable(jnp.zeros((ROWS, 2)), name="blocks")
    dflow.restore(tmp_path / "m" / "variables", blocks, ignore=["unexpected"])
    np.testing.assert_array_equal(blocks.read(), tables[0].read())
