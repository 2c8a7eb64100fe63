"""`jax.debug_nans` and `jax.debug_infs` over functions with state: the op is named, and nothing is written."""

from __future__ import annotations

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.calls.number_checks import run_checked


def test_the_op_is_named_and_the_variables_are_as_before() -> None:
    v = dflow.Variable(jnp.ones(2))

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(jnp.ones(2))
        return v + jnp.log(x)

    with jax.debug_nans(True):
        np.testing.assert_array_equal(step(1.0), [2, 2])
        for _ in range(2):
            with pytest.raises(FloatingPointError, match="nan") as caught:
                step(-1.0)
        np.testing.assert_array_equal(step(1.0), [3, 3])
    np.testing.assert_array_equal(v, [3, 3])
    assert "step" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_a_variable_that_becomes_nan_is_found() -> None:
    v = dflow.Variable(0.0)
    poison = dflow.jit(lambda x: v.assign(v / x))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        poison(0.0)
    assert float(v) == 0.0


def test_infinities_are_looked_for_when_asked_for() -> None:
    v = dflow.Variable(1.0)
    grow = dflow.jit(lambda x: v / x)
    assert float(grow(0.0)) == float("inf")
    with jax.debug_nans(True):
        assert float(grow(0.0)) == float("inf")
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="inf"):
        grow(0.0)


def test_a_function_that_uses_queues_is_not_run_again() -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), jnp.float32))
    take = dflow.jit(lambda: jnp.log(queue.dequeue()))
    queue.enqueue(-1.0)
    queue.enqueue(1.0)
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in <lambda>"),
    ):
        take()
    assert int(queue.size()) == 1


def test_donated_arguments_do_not_hide_the_error() -> None:
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: jnp.log(x) * v, donate_argnums=0)
    f(jnp.ones(3))
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match=r"invalid value \(nan\) encountered in <lambda>"),
    ):
        f(-jnp.ones(3))


def test_what_others_write_to_variables_that_are_only_read_stays() -> None:
    v, seen = dflow.Variable(jnp.ones(2)), dflow.Variable(0.0)

    def meanwhile(x: Any) -> Any:
        seen.assign_add(1.0)
        return x

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(jnp.ones(2))
        return jnp.log(x) * jnp.float32(seen)

    dflow.jit(lambda: seen.assign(1.0))()
    step(1.0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        run_checked("step", lambda: (meanwhile(0), step(-1.0))[1], [v, seen], {v.key}, lambda: None)
    assert (v.read().tolist(), float(seen)) == ([2, 2], 2.0)
