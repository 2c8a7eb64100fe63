"""Stochastic rounding: tiny updates arrive in the mean, and the bits depend on the update and the position alone."""

from __future__ import annotations

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
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.random_rounding import rounded_at_random
from dflow.tracing.rows.slices import ArrayPart

pytestmark = pytest.mark.once


def test_each_number_becomes_a_neighbour_and_the_mean_is_the_number() -> None:
    values = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    rounded = jax.vmap(lambda seed: rounded_at_random(jnp.asarray(values), seed))(jnp.arange(200, dtype=jnp.uint32))
    error = np.asarray(rounded, np.float32) - values
    step = np.abs(values) * 2**-7
    assert (np.abs(error) <= step).all()
    assert (np.abs(error.mean(0)) < 6 * step / 2 / np.sqrt(200)).all()
    # Those of neighbouring numbers, rows and updates are independent.
    for axis in range(3):
        one, other = np.delete(error, 0, axis), np.delete(error, -1, axis)
        assert abs((one * other).mean()) < 0.01 * (error**2).mean()
    exact = jnp.append(rounded[0].ravel(), jnp.array([jnp.inf, -jnp.inf, 0, -0.0], jnp.bfloat16))
    np.testing.assert_array_equal(rounded_at_random(exact.astype(jnp.float32), jnp.uint32(3)), exact)
    assert jnp.isnan(rounded_at_random(jnp.float32(jnp.nan), jnp.uint32(3)))
    part = ArrayPart(values.shape, AxisSlice(0, 1, 1000, 2))
    half = rounded_at_random(jnp.asarray(values[1::2]), jnp.uint32(7), part)
    np.testing.assert_array_equal(half, rounded[7][1::2])


def made(rounded: bool = True, **options: Any) -> tuple[Any, Any, Any]:
    ones = jax.nn.initializers.ones
    table = dflow.Embedding(30, 4, dtype=jnp.bfloat16, initializer=ones, name="table", **options)
    optimizer = dflow.Optimizer(optax.adagrad(1e-3), [table], name="adagrad", stochastic_rounding=rounded)

    @dflow.jit
    def step(ids: Any, scale: Any) -> None:
        optimizer.apply(dflow.grad(lambda: (table(ids) * scale).sum().astype(jnp.float32), [table])())

    return table, optimizer, step


def test_many_tiny_updates_arrive() -> None:
    for rounded in (True, False):
        table, _, step = made(rounded)
        for _ in range(300):
            step(jnp.array([1, 2, 3, 3]), jnp.bfloat16(1))
        moved = np.asarray(table.read()[1:4], np.float32).mean() - 1
        expected = -sum(1e-3 * g / np.sqrt(0.1 + g * g * n) for n in range(1, 301) for g in (1, 1, 2)) / 3
        assert abs(moved - expected) < 0.2 * abs(expected) if rounded else moved == 0
        np.testing.assert_array_equal(table.read()[4:], jnp.ones((26, 4), jnp.bfloat16))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_resumed_run_has_the_same_bits_on_any_shards(shards: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    steps = [(draw.permutation(30)[:5].astype(np.int32), jnp.bfloat16(draw.normal())) for _ in range(12)]

    def run(container: str, shards: int, first: int, last: int) -> Any:
        with dflow.container(container):
            table, optimizer, step = made(shards=shards)
        state = {"table": table, "optimizer": optimizer}
        if first:
            dflow.restore(tmp_path / "saved", state, names=lambda name: name.replace(container, "first"))
        for one in steps[first:last]:
            step(*one)
        if container == "first":
            dflow.save(tmp_path / "saved", state)
        return table.read()

    run("first", 2, 0, 6)
    np.testing.assert_array_equal(run("second", shards, 6, 12), run("whole", 1, 0, 12))


def test_tasks_and_updates_of_every_row_have_the_same_bits() -> None:
    ids = np.arange(0, 30, 7, dtype=np.int32)
    with dflow.container("rows"):
        rows, _, step = made()
    with dflow.container("dense"):
        dense, optimizer, _ = made()
    for _ in range(4):
        step(ids, jnp.bfloat16(1))
        optimizer.apply([jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype).at[ids].set(1), dense)])
    np.testing.assert_array_equal(rows.read(), dense.read())
    with memory_cluster(ps=2, workers=1) as cluster, closing(cluster.worker()) as worker:
        with worker.parameter_servers():
            table, _, step = made()
        for _ in range(4):
            step(ids, jnp.bfloat16(1))
        np.testing.assert_array_equal(table.read(), rows.read())


def test_only_the_rows_of_a_lookup_are_rounded() -> None:
    """A program for rounding at random has no other arrays as large as the table than one for rounding to the nearest.

    On a CPU, XLA converts a whole table of bfloat16 to write a row of it.
    """

    def temporary(rounded: bool) -> int:
        table = dflow.Embedding(300_000, 4, dtype=jnp.bfloat16, vocabulary=dflow.Vocabulary(), name=f"of {rounded}")
        optimizer = dflow.Optimizer(optax.adagrad(1e-3), [table], stochastic_rounding=rounded)

        @dflow.jit
        def step(ids: dflow.WideIds) -> None:
            found = table.find(ids)
            optimizer.apply(dflow.grad(lambda: table(found).sum().astype(jnp.float32), [table])(), found=found)

        memory = step.lower(dflow.wide_ids(np.arange(8))).compile().memory_analysis()
        return int(memory.temp_size_in_bytes)

    assert temporary(True) < temporary(False) + 300_000


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    variable = dflow.Variable(jnp.zeros(3, dtype), name="v")
    with pytest.raises(dflow.VariableError, match=f"stochastic_rounding: expected .* got 'v' of {variable.dtype}"):
        dflow.Optimizer(optax.sgd(0.1), [variable], stochastic_rounding=True)
