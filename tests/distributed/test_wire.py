"""Values that travel by a codec: the values and bytes that are sent, and the results of the step."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster


def sent_by(memory: MemoryCluster, worker: Cluster) -> dict[str, int]:
    """Bytes sent over each edge, to all destinations."""
    found: dict[str, int] = {}
    for server in (worker.server, *(task.server for task in memory.tasks.values())):
        for edge in server.traffic():
            found[edge.edge] = found.get(edge.edge, 0) + edge.size_bytes
    return found


SIZES = {"none": 4000, "bfloat16": 2000, "float8_e4m3fn": 1004, "float8_e5m2": 1004, "int8": 1004}


@pytest.mark.parametrize("codec", SIZES)
def test_a_read_and_its_gradient_travel_by_the_codec(memory: MemoryCluster, worker: Cluster, codec: str) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(lambda: jnp.linspace(-1, 1, 1000), name="w")
        optimizer = dflow.Optimizer(optax.sgd(0.5), [w], name="sgd")
    before = np.asarray(w.read())

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: jnp.sum(dflow.wire(w, codec) * x), [w])()
        optimizer.apply(gradients)
        return value

    x = jnp.cos(jnp.arange(1000.0))
    value = step(x)
    suffix = "" if codec == "none" else f":{codec}"
    assert sent_by(memory, worker) == {f"w{suffix}": SIZES[codec], f"grad/w{suffix}": SIZES[codec]}
    atol = 0 if codec == "none" else 0.01
    np.testing.assert_allclose(value, (before * x).sum(), atol=1000 * atol, rtol=1e-5)
    np.testing.assert_allclose(w.read(), before - 0.5 * np.asarray(x), rtol=1e-6, atol=1e-6 + (2**-4 if atol else 0))


def test_an_optimizer_has_gradients_sent_small_rows_too(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        table = dflow.Variable(lambda: jnp.ones((50, 64)), name="table")
        bias = dflow.Variable(lambda: jnp.ones(64), name="bias")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [table, bias], name="sgd", wire="int8")

    @dflow.jit
    def step(rows: Any) -> None:
        optimizer.apply(dflow.grad(lambda: jnp.sum(table[rows] * bias), [table, bias])())

    step(jnp.array([1, 2]))
    sent = sent_by(memory, worker)
    assert sorted(size for edge, size in sent.items() if edge.endswith(":int8")) == [64 + 4, 2 * 64 + 4]
    np.testing.assert_allclose(table.read()[:3, 0], [1, 0, 0], atol=1e-2)
    np.testing.assert_allclose(bias.read(), -np.ones(64), atol=2e-2)


def test_one_value_goes_once_to_each_task_and_arrives_alike(memory: MemoryCluster, worker: Cluster) -> None:
    @dflow.jit
    def step(x: Any) -> Any:
        y = dflow.wire(x, "bfloat16")
        with dflow.device("ps:0"):
            first, second = y + 1, y * 2
        with dflow.device("ps:1"):
            third = y + 1
        return first, second, third, y

    x = jnp.linspace(0, 1, 100)
    first, second, third, same = step(x)
    sizes = {edge: size for edge, size in sent_by(memory, worker).items() if edge.startswith("x")}
    assert sizes == {"x:bfloat16": 2 * 200}
    rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(first, rounded + 1)
    np.testing.assert_array_equal(first, third)
    np.testing.assert_array_equal(second, rounded * 2)
    np.testing.assert_array_equal(same, x)
