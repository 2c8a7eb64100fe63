"""An optimizer's update of a narrow variable by a wide delta rounds once, as `optax.apply_updates` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import memory_cluster
from tests.effort import examples

COUNT = 1000


def drawn(seed: int, dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    """Parameters of a narrow dtype and updates of float32."""
    keys = jax.random.split(jax.random.key(seed), 2)
    return jax.random.normal(keys[0], (COUNT,), dtype), jax.random.normal(keys[1], (COUNT,)) / 10


def assert_rounded_once(variable: Any, first: Any, delta: Any) -> None:
    wanted = optax.apply_updates(first, delta)
    assert variable.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(variable.read(), np.float32), np.asarray(wanted, np.float32))
    assert (np.asarray(first + delta.astype(first.dtype)) != np.asarray(wanted)).any()


@given(st.integers(0, 2**16), st.sampled_from([jnp.bfloat16, jnp.float16]), st.booleans())
@settings(max_examples=examples(8), deadline=None)
def test_a_narrow_variable_rounds_as_apply_updates_does(seed: int, dtype: Any, compiled: bool) -> None:
    first, delta = drawn(seed, dtype)
    variable = dflow.Variable(first)
    apply = dflow.Optimizer(optax.scale(1.0), variable).apply
    (dflow.jit(apply) if compiled else apply)(delta)
    assert_rounded_once(variable, first, delta)


def test_rows_of_a_narrow_table_round_once() -> None:
    first = jax.random.normal(jax.random.key(0), (6, 2000), jnp.bfloat16)
    table = dflow.Variable(first)
    optimizer = dflow.Optimizer(optax.scale(jnp.float32(-0.1)), [table])
    ids = jnp.array([1, 4, 1])

    @dflow.jit
    def step(ids: Any) -> None:
        optimizer.apply(dflow.grad(lambda: jnp.sin(table[ids]).sum(), [table])())

    step(ids)
    gradient = jax.grad(lambda table: jnp.sin(table[ids]).sum())(first)
    wanted = optax.apply_updates(first, gradient * jnp.float32(-0.1))
    # The two gradients of row 1 may be summed in float32 or bfloat16; the others are one number each.
    np.testing.assert_array_equal(*(np.asarray(each, np.float32)[[0, 2, 3, 4, 5]] for each in (table.read(), wanted)))


@pytest.fixture
def worker() -> Iterator[Cluster]:
    with memory_cluster(ps=1) as memory:
        cluster = memory.worker()
        yield cluster
        cluster.close()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_narrow_variable_on_a_parameter_task_rounds_alike(worker: Cluster, compiled: bool) -> None:
    first, delta = drawn(2)
    with worker.parameter_servers():
        variable = dflow.Variable(first, name="narrow")
        apply = dflow.Optimizer(optax.scale(1.0), variable, name="opt").apply
    (dflow.jit(apply) if compiled else apply)(delta)
    assert_rounded_once(variable, first, delta)
