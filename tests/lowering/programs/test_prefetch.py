"""Lookups in large tables: the usual rows, and on a CPU a program that reads the rows once before."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.lowering.programs.prefetch import LEAST_TABLE_BYTES, prefetched
from tests.effort import examples

ROWS = LEAST_TABLE_BYTES // 4 // 64


def table(rows: int = ROWS, shape: tuple[int, ...] = (64,), dtype: Any = jnp.float32) -> jax.Array:
    """A table whose elements are all different where the dtype allows."""
    return jnp.arange(rows * np.prod(shape, dtype=int)).reshape(rows, *shape).astype(dtype)


def gathers(table: Any, indices: Any, platform: str = "cpu") -> int:
    """Number of gathers in the program of a lookup."""
    lookup = jax.jit(lambda table, indices: table[prefetched(table, indices)])
    return jax.export.export(lookup, platforms=[platform])(table, indices).mlir_module().count('"stablehlo.gather"')


LARGE = table()
#: Compiled once for each number of indices.
rows = jax.jit(lambda table, places: table[prefetched(table, places)])


@settings(max_examples=examples(30), deadline=None)
@given(
    indices=st.lists(st.integers(-2 * ROWS, 2 * ROWS) | st.sampled_from([0, -1, ROWS - 1, ROWS, -ROWS]), max_size=5),
)
def test_the_rows_are_those_of_a_plain_lookup(indices: list[int]) -> None:
    places = jnp.array(indices, jnp.int32)
    np.testing.assert_array_equal(rows(LARGE, places), LARGE[places])


def test_zeros_are_found_too() -> None:
    zeros = jnp.zeros_like(LARGE)
    np.testing.assert_array_equal(zeros[prefetched(zeros, jnp.array([5, ROWS - 1]))], np.zeros((2, 64)))


@pytest.mark.parametrize(
    ("shape", "dtype", "reads"),
    [
        ((64,), jnp.float32, 2),
        ((8, 8), jnp.float32, 2),
        ((32,), jnp.float32, 2),
        ((64,), jnp.bfloat16, 2),
        ((31,), jnp.float32, 1),  # too short to gain
        ((65,), jnp.float32, 1),  # copied by vector instructions
        ((32,), jnp.bfloat16, 1),  # a cache line
        ((64,), bool, 1),
    ],
)
def test_which_rows_are_read_first(shape: tuple[int, ...], dtype: Any, reads: int) -> None:
    rows = -(-LEAST_TABLE_BYTES // (int(np.prod(shape)) * jnp.dtype(dtype).itemsize))
    assert gathers(table(rows, shape, dtype), jnp.array([1, 2])) == reads


def test_a_small_table_other_indices_and_other_platforms_read_once() -> None:
    indices = jnp.array([1, 2])
    assert gathers(LARGE[:-1], indices) == 1
    assert gathers(LARGE, indices.astype(jnp.int16)) == gathers(LARGE, indices.astype(jnp.uint32)) == 1
    assert gathers(LARGE, indices, "cuda") == gathers(LARGE, indices, "tpu") == 1


def test_a_step_reads_the_rows_of_a_variable_first() -> None:
    rows = dflow.Variable(LARGE, name="rows")

    @dflow.jit
    def step(ids: jax.Array) -> jax.Array:
        return rows[ids]

    program = step.lower(jnp.array([1, 2])).compile().as_text()
    assert program.count(" gather(") == 2
    np.testing.assert_array_equal(step(jnp.array([1, -1])), LARGE[jnp.array([1, -1])])
