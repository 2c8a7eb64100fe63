"""Steps of other workers between a lookup and its update: a gradient never reaches the row of another id."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.testing import memory_cluster
from tests.dflow.tables.vocabulary_model import RATE

pytestmark = pytest.mark.once

#: Ids of the only bucket, which has one row for them.
ONE, OTHER = 7, 8
DEADLINE_S = 60.0


@pytest.fixture
def workers() -> Iterator[list[Any]]:
    with (
        memory_cluster(ps=1, workers=2) as cluster,
        closing(cluster.worker(0)) as first,
        closing(cluster.worker(1)) as second,
    ):
        yield [first, second]


class Program:
    """A table with a row for one id, and a worker's step, which waits between its lookup and its update."""

    def __init__(
        self,
        worker: Any,
        transformation: Any,
        wait: Callable[[], None] = lambda: None,
        *,
        admit_after: int = 1,
        lazy_rows: bool = False,
    ) -> None:
        config = dflow.Vocabulary(admit_after=admit_after, bucket=1)
        with worker.parameter_servers():
            self.table = table = dflow.Embedding(1, 2, vocabulary=config, name="table")
            self.optimizer = optimizer = dflow.Optimizer(transformation, [table], name="optimizer", lazy_rows=lazy_rows)

        def waited(rows: Any) -> Any:
            wait()
            return np.ones_like(rows)

        @dflow.jit
        def step(id: dflow.WideIds) -> None:
            found = table.find(id)

            def loss() -> Any:
                rows = table(found)
                type = jax.ShapeDtypeStruct(rows.shape, rows.dtype)
                return (rows * jax.pure_callback(waited, type, jax.lax.stop_gradient(rows))).sum()

            optimizer.apply(dflow.grad(loss, [table])(), found=found)

        self.step = step

    def train(self, id: int) -> None:
        self.step(dflow.wide_ids([id]))

    def state(self) -> list[Any]:
        """The row that one id owns, in the table and in the slots."""
        slots = jax.tree.leaves(self.optimizer.slots, is_leaf=dflow.is_variable)
        return [v.read()[0] for v in (*self.table.shards, *(slot for slot in slots if slot.shape == (2, 2)))]


@pytest.mark.parametrize(
    ("transformation", "lazy_rows"),
    [
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(RATE)), False),
        (optax.adam(RATE), True),
    ],
)
def test_an_update_leaves_out_rows_that_have_another_id(
    workers: list[Any], transformation: Any, lazy_rows: bool
) -> None:
    looked_up, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        looked_up.set()
        assert go_on.wait(DEADLINE_S)

    slow = Program(workers[0], transformation, wait, admit_after=2, lazy_rows=lazy_rows)
    other = Program(workers[1], transformation, admit_after=2, lazy_rows=lazy_rows)
    fresh = other.state()
    for _ in range(3):
        other.train(ONE)
    assert not np.allclose(other.state()[0], fresh[0])
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(slow.train, ONE)
        assert looked_up.wait(DEADLINE_S)
        for _ in range(2):
            other.train(OTHER)
        jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-6), other.state(), fresh)
        other.train(OTHER)
        before = other.state()
        go_on.set()
        late.result(DEADLINE_S)
    jax.tree.map(np.testing.assert_array_equal, other.state(), before)
    # The late step saw its id once, so the row stays with the other one.
    assert other.table.counts() == dflow.VocabularyCounts(3, 4, 2, 1, 0, 1)


def test_a_synchronous_step_takes_no_row_that_it_has_looked_up(
    workers: list[Any], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The first worker looks an id up, the second one asks for its row, and then the first one gives its gradient."""
    looked_up, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        looked_up.set()
        assert go_on.wait(DEADLINE_S)

    def asked() -> None:
        if looked_up.is_set():
            go_on.set()  # within the step: the last result of a run comes after its round, which needs both gradients

    first, second = Program(workers[0], optax.sgd(1.0), wait), Program(workers[1], optax.sgd(1.0), asked)
    second.train(ONE)
    [fresh] = second.state()

    def train(index: int) -> int:
        program, id = (first, ONE) if index == 0 else (second, OTHER)

        def batches() -> Iterator[Any]:
            for number in itertools.count():
                if index == 1 and number == 0:
                    assert looked_up.wait(DEADLINE_S)
                yield dflow.wide_ids([id])

        return len([*dflow.distributed.Sync(workers[index]).run(program.step, batches(), steps=1, name="run")])

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(train, range(2))] == [1, 1]
    np.testing.assert_allclose(second.state()[0], fresh - 0.5, rtol=1e-6)
    assert "ids were refused" not in caplog.text
    dflow.save(tmp_path / "saved", [second.table])
    assert "table 'table': ids were refused a row 1 times" in caplog.text
    caplog.clear()
    assert second.table.counts() == dflow.VocabularyCounts(1, 2, 1, 0, 1, 0)
    assert not caplog.text
    second.train(OTHER)
    np.testing.assert_allclose(second.state()[0], fresh, rtol=1e-6)


def test_an_id_of_a_synchronous_step_is_there_after_the_update() -> None:
    """Before that its row may get a gradient of the id that had it."""
    table = dflow.Embedding(1, 2, vocabulary=dflow.Vocabulary(bucket=1), name="one row")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [table])
    zeros = jnp.zeros((2, 2))
    optimizer.apply([jax.tree.map(lambda _: zeros, table)], found=table.find([ONE]))
    fresh = table.read()
    one, [shard] = table.find([ONE]), table.shards
    assert one.shards[0].rows.tolist() == [0]
    shard.hooks.admit(table.find([OTHER]).shards)
    assert table.find([OTHER]).shards[0].rows.tolist() == [1]
    optimizer.apply_mean(([jax.tree.map(lambda _: zeros + 1, table)], {}))
    np.testing.assert_allclose(table.read() - fresh, [[0, 0], [-1, -1]], rtol=1e-6)
    assert table.find([OTHER]).shards[0].rows.tolist() == [0]
