"""A user's program as type checkers see it: `make types` has pyright and mypy check it in their strict modes.

`assert_type` fails if an expression has another type than the named one. Arrays are NumPy's, since some of JAX's own
annotations are incomplete.
"""

# pyright: strict, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import jax
import numpy as np
import optax

import dflow

weights = dflow.Variable(np.zeros((64, 10), np.float32), name="weights")
optimizer = dflow.Optimizer(optax.adam(1e-3), [weights], name="adam")
queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), np.float32))


@dflow.jit
def train_step(x: jax.Array, y: jax.Array) -> dict[str, jax.Array]:
    def loss() -> jax.Array:
        return (((x @ weights)[:, 0] - y) ** 2).mean()

    value, gradients = dflow.value_and_grad(loss, [weights])()
    optimizer.apply(gradients)
    return {"loss": value}


@dflow.jit
def count(step: int, scale: float = 1.0) -> float:
    return step * scale


def batches() -> Iterator[tuple[jax.Array, jax.Array]]:
    key = jax.random.key(0)
    while True:
        yield jax.random.normal(key, (8, 64)), jax.random.randint(key, (8,), 0, 10)


def main() -> None:
    assert_type(weights, dflow.Variable)
    assert_type(weights.read(), jax.Array)
    assert_type(weights.shape, tuple[int, ...])
    assert_type(weights.name, str)
    weights.assign_add(1.0)
    assert_type(train_step(*next(batches())), dict[str, jax.Array])
    assert_type(count(3, scale=0.5), float)
    count("three")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(queue.is_closed(), jax.Array)
    cluster = dflow.connect()
    with cluster.parameter_servers():
        assert_type(dflow.Variable(1.0).name, str)
    for metrics in dflow.distributed.Async(cluster).run(train_step, batches(), steps=3):
        assert_type(metrics, dict[str, jax.Array])
    report = dflow.restore("folder", {"weights": weights})
    assert_type(report, dflow.RestoreReport)
    assert_type(dflow.graph(train_step, *next(batches())), dflow.GraphView)
    cluster.close()
