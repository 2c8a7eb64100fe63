"""Batches that tasks of another job read: `dflow.data.serve` and `dflow.data.served`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.data import batches, serve, served
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task_role import join_cluster
from dflow.distributed.training import served_batches
from dflow.distributed.training.batch_messages import GetBatch
from dflow.distributed.wire.messages.variables import ReadVariables
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from tests.distributed.training.sync_programs import together
from tests.distributed.waiting import until

ROWS = {"row": np.arange(240), "name": np.array([f"name {row}" for row in range(240)], object)}
DATA = batches(ROWS, 10, shuffle=True, seed=2, epochs=2)


def reader(memory: MemoryCluster, index: int, data: Any = DATA) -> tuple[Cluster, Callable[[], None]]:
    """Start a reader; return it, and a function that waits until it has ended."""
    joined = join_cluster(
        memory.coordinator.address, memory.network, job="reader", index=index, store=Store(), address=""
    )

    def run() -> None:
        with suppress(dflow.DflowError):  # of a reader that the test closes
            serve(data, joined)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return joined, thread.join


@contextmanager
def readers(workers: int = 1) -> Iterator[tuple[list[Cluster], list[Cluster]]]:
    with memory_cluster(workers=workers) as memory:
        found = [memory.worker(index) for index in range(workers)]
        given = [reader(memory, index) for index in range(2)]
        until(lambda: {"/job:reader/task:0", "/job:reader/task:1"} <= {*found[0].tasks})
        try:
            yield found, [one for one, _ in given]
        finally:
            for worker in found:
                worker.close()
            for one, end in given:
                end()
                one.close()


def test_a_worker_gets_the_batches_of_each_number_from_the_readers_with_ids_for_strings() -> None:
    with readers() as ([worker], _):
        data = served(DATA, worker)
        assert len(data) == len(DATA) == 48
        for number in (0, 1, 2, 7, 47, 3):
            np.testing.assert_array_equal(data[number]["row"], DATA[number]["row"])
            ids, expected = data[number]["name"], dflow.wide_ids(DATA[number]["name"])
            np.testing.assert_array_equal(ids.low, expected.low)
        with pytest.raises(IndexError):
            data[48]


def test_async_uses_each_row_once_an_epoch_while_a_reader_is_lost() -> None:
    with readers(workers=2) as (workers, [first, _]):

        def run(index: int, worker: Cluster) -> Any:
            with worker.parameter_servers():
                used = dflow.Variable(lambda: jnp.zeros(240), name="rows of readers")
            step = dflow.jit(lambda batch: used.scatter_add(batch["row"], jnp.ones(10)))
            data = served(DATA, worker)
            steps = dflow.distributed.Async(worker).run(step, data.__getitem__, steps=48, name="served")
            for count, _ in enumerate(steps):
                if (index, count) == (0, 3):
                    first.close()
            return used.read()

        np.testing.assert_array_equal(together(workers, run)[0], np.full(240, 2.0))


def test_without_readers_the_worker_reads_and_a_lost_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served(DATA, dflow.connect()) is DATA
    with pytest.raises(dflow.InputError, match="served: expected batches by number, got a generator"):
        served((batch for batch in DATA), dflow.connect())
    with memory_cluster() as memory:
        worker = memory.worker()
        assert served(DATA, worker) is DATA
        only, _ = reader(memory, 0, [{"value": object()}, [np.ones(2), (np.ones(1),)]])
        until(lambda: only.task in worker.tasks)
        with pytest.raises(dflow.InputError, match="expected batches of arrays in dicts by name and tuples"):
            served(DATA, worker)[0]
        assert jax.tree.structure(served(DATA, worker)[1]) == jax.tree.structure([1, (1,)])
        monkeypatch.setattr(served_batches, "SERVED_S", 0.0)
        data = served(DATA, worker, name="other")
        with pytest.raises(dflow.TaskLost, match="expected batches under 'other', got none"):
            data[0]
        only.close()
        until(lambda: only.task not in worker.tasks)
        with pytest.raises(
            dflow.TaskLost, match=r"expected a reader of batches 'other', one of \['/job:reader/task:0'"
        ):
            data[7]
        worker.close()


def test_slow_batches_hold_up_no_other_request_of_their_workers() -> None:
    class Slow:
        given, release = 0, threading.Event()

        def __getitem__(self, number: int) -> Any:
            self.release.wait(30.0)
            self.given += 1
            return np.float32(number)

    slow = Slow()
    with memory_cluster(workers=2) as memory:
        workers = [memory.worker(index) for index in range(2)]
        only, end = reader(memory, 0, slow)
        until(lambda: only.task in workers[0].tasks and only.task in workers[1].tasks)
        for worker in workers:
            with pytest.raises(TypeError, match="without end"):
                len(served(slow, worker))
        asked = [
            worker.requests.begin(only.task, GetBatch("data", number)) for worker in workers for number in range(20)
        ]
        for worker in workers:
            with pytest.raises(dflow.VariableError):
                worker.requests.ask(only.task, ReadVariables(("none",)))
        assert not slow.given
        slow.release.set()
        assert all(one.wait(60.0).message.form for one in asked)
        for worker in workers:
            worker.close()
        only.close()
        end()
