"""Closed-over arrays keep their values from the time of the trace."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.jaxprs.captured import captured

LARGE = 1 << 16


@pytest.mark.parametrize("size", [4, LARGE])
@pytest.mark.parametrize("state", [False, True])
def test_writing_to_a_numpy_array_after_the_trace_changes_nothing(size: int, state: bool) -> None:
    table, count = np.ones(size, np.float32), dflow.Variable(0, name="count")

    def fn(x: Any) -> Any:
        if state:
            count.assign_add(1)
        return (x + table).sum()

    ours, theirs = dflow.jit(fn), jax.jit(lambda x: (x + table).sum())
    before = ours(1.0), theirs(1.0)
    table[:] = 7
    assert before == (ours(1.0), theirs(1.0)) == (2 * size, 2 * size)


def test_an_array_that_is_closed_over_may_be_donated_too() -> None:
    table = jnp.ones(LARGE)
    fn = dflow.jit(lambda x: x + table, donate_argnums=0)
    assert fn(table).sum() == 2 * LARGE
    assert fn(jnp.zeros(LARGE)).sum() == LARGE


def test_a_random_key_is_captured() -> None:
    key, count = jax.random.key(3), dflow.Variable(0, name="count")

    @dflow.jit
    def fn() -> Any:
        count.assign_add(1)
        return jax.random.uniform(key, (3,))

    np.testing.assert_array_equal(fn(), jax.random.uniform(key, (3,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int4"])
@pytest.mark.parametrize("committed", [False, True])
def test_an_array_is_captured_as_it_is(dtype: str, committed: bool) -> None:
    table = jnp.ones((3, 4), dtype)
    if committed:
        table = jax.device_put(table, jax.devices()[0])
    held = captured(table)
    assert held is not table
    assert (held.aval, held.committed, held.sharding) == (table.aval, table.committed, table.sharding)
    np.testing.assert_array_equal(held, table)
    is_copy = held.unsafe_buffer_pointer() != table.unsafe_buffer_pointer()
    assert is_copy == (dtype == "int4")


def test_traces_share_what_they_hold_of_an_array_and_keep_it_as_long_as_they_live() -> None:
    table = jnp.ones(3)
    held = captured(table)
    assert captured(table) is held is not table
    alive = weakref.ref(held)
    del held
    gc.collect()
    assert alive() is None
    assert captured(table).tolist() == [1, 1, 1]


def test_traces_share_no_copy_of_an_array_that_can_be_written_to() -> None:
    table = np.ones(3)
    first = captured(table)
    table[:] = 2
    assert (first.tolist(), captured(table).tolist()) == ([1, 1, 1], [2, 2, 2])
