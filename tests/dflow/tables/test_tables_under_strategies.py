"""Tables trained by several workers: the values of one process on the union of their batches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import numpy as np
import optax

import dflow
from dflow.testing import memory_cluster

STEPS, IDS = 4, 32


def batches(index: int) -> Iterator[tuple[Any, Any]]:
    draw = np.random.default_rng(index)
    for _ in range(STEPS):
        yield draw.integers(0, 1000, size=IDS).astype(np.int32), draw.normal(size=(IDS, 8)).astype(np.float32)


def built(place: AbstractContextManager[None]) -> tuple[dflow.Embedding, dflow.Optimizer]:
    with place:
        table = dflow.Embedding(1000, 8, name="table", by="modulo")
        return table, dflow.Optimizer(optax.adagrad(0.1), [table], name="optimizer")


def loss_of(table: dflow.Embedding, ids: Any, wanted: Any) -> Any:
    return ((table(ids) - wanted) ** 2).mean()


def expected() -> np.ndarray[Any, Any]:
    """The table after training in one process."""
    table, optimizer = built(nullcontext())

    @dflow.jit
    def step(first: Any, second: Any) -> None:
        def loss() -> Any:
            return (loss_of(table, *first) + loss_of(table, *second)) / 2

        optimizer.apply(dflow.grad(loss, [table])())

    for first, second in zip(batches(0), batches(1), strict=True):
        step(first, second)
    return np.asarray(table.read())


def test_two_synchronous_workers_train_as_one_process_and_send_rows_alone() -> None:
    with (
        memory_cluster(ps=2, workers=2) as cluster,
        closing(cluster.worker(0)) as first,
        closing(cluster.worker(1)) as second,
        ThreadPoolExecutor(2) as threads,
    ):

        def train(worker: Any) -> dflow.Embedding:
            table, optimizer = built(worker.parameter_servers())

            @dflow.jit
            def step(ids: Any, wanted: Any) -> Any:
                value, gradients = dflow.value_and_grad(lambda: loss_of(table, ids, wanted), [table])()
                optimizer.apply(gradients)
                return value

            run = dflow.distributed.Sync(worker).run(step, batches(int(worker is second)), steps=STEPS, name="run")
            assert len([*run]) == STEPS
            return table

        [table, _] = threads.map(train, (first, second))
        np.testing.assert_allclose(table.read(), expected(), rtol=1e-6, atol=1e-7)
        sent = sum(edge.size_bytes for edge in first.server.channel.traffic())
        # For each id its number, twice, and its row; to each of the tasks the number of the round.
        assert sent <= STEPS * (IDS * (4 + 4 + 8 * 4) + 2 * 4)
