"""Synchronous steps that call several compiled functions, each with its own optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.tracing.errors import StrategyError
from tests.distributed.training.sync_programs import Sync, together

# The workers are threads of this process.
pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")
ROWS = 6


class Pair:
    """A critic of dense weights and a table, each with an optimizer, trained by functions that `compiled` makes."""

    def __init__(self, cluster: Cluster, prefix: str, compiled: Callable[..., Any]) -> None:
        with cluster.parameter_servers():
            self.w = dflow.Variable(lambda: jnp.arange(3.0), name=f"{prefix}/w")
            self.table = dflow.Variable(lambda: jnp.ones((ROWS, 3)), name=f"{prefix}/table")
            of_w = dflow.Optimizer(optax.sgd(0.1), [self.w], name=f"{prefix}/of w")
            of_table = dflow.Optimizer(optax.sgd(0.1), [self.table], name=f"{prefix}/of table")

        @compiled
        def critic(x: Any, scale: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: scale * jnp.sum(self.w * x), [self.w])()
            of_w.apply(gradients)
            return value

        @compiled
        def generator(ids: Any) -> Any:
            value, gradients = dflow.value_and_grad(lambda: jnp.sum(self.table[ids] * self.w), [self.table])()
            of_table.apply(gradients)
            return {"of the generator": value}

        @dflow.jit
        def step(x: Any, ids: Any) -> Any:
            return {"loss": critic(x, 0.5) + generator(ids)["of the generator"]}

        self.step = step


def batch_of(index: int, number: int) -> tuple[Any, Any]:
    """A worker's batch; its numbers of rows differ, so that the step is traced twice."""
    return np.full(3, index + 1, np.float32), np.arange(2 + number % 2, dtype=np.int32) + index


def expected(steps: int) -> tuple[Any, Any]:
    w, table = np.arange(3.0), np.ones((ROWS, 3))
    for number in range(steps):
        of_w, of_table = np.zeros(3), np.zeros((ROWS, 3))
        for x, ids in (batch_of(index, number) for index in range(3)):
            of_w += 0.5 * x / 3
            np.add.at(of_table, ids, w / 3)
        w, table = w - 0.1 * of_w, table - 0.1 * of_table
    return w, table


def test_each_function_gives_gradients_to_its_own_optimizer(workers: list[Cluster]) -> None:
    def work(index: int, cluster: Cluster) -> tuple[Any, Any]:
        pair = Pair(cluster, "pair", dflow.jit)
        batches = (batch_of(index, number) for number in range(4))
        assert len(list(Sync(cluster).run(pair.step, batches, steps=4, name="pair"))) == 4
        return np.asarray(pair.w.read()), np.asarray(pair.table.read())

    for w, table in together(workers, work):
        np.testing.assert_allclose(w, expected(4)[0], rtol=1e-6)
        np.testing.assert_allclose(table, expected(4)[1], rtol=1e-6)


def test_functions_that_another_transformation_traces_are_refused(workers: list[Cluster]) -> None:
    pair = Pair(workers[0], "refused", jax.jit)
    fact = (
        r"step gives gradients to 'refused/of w', 'refused/of table' in several functions(.|\n)*by dflow.jit in place"
    )
    with pytest.raises(StrategyError, match=fact):
        list(Sync(workers[0]).run(pair.step, [batch_of(0, 0)], steps=1, name="refused"))
