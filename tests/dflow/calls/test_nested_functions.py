"""Functions with state inside each other, inside `jax.jit`, and inside JAX's transforms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow

HERE = Path(__file__).name


def test_nested_functions_share_state_in_program_order() -> None:
    v = dflow.Variable(1.0)

    @dflow.jit
    def inner(x: Any) -> Any:
        v.assign_add(x)
        return v.read()

    @dflow.jit
    def outer(x: Any) -> Any:
        before = v.read()
        first = inner(x)
        v.assign(v.read() * 10)
        return before, first, inner(x)

    assert [float(x) for x in outer(1.0)] == [1.0, 2.0, 21.0]
    assert float(inner(1.0)) == 22.0
    assert [float(x) for x in outer(1.0)] == [22.0, 23.0, 231.0]


def test_a_plain_jit_inside_keeps_its_state() -> None:
    v = dflow.Variable(jnp.zeros(2))

    @jax.jit
    def add(x: Any) -> Any:
        v.assign_add(x)
        return v.read() + 1

    @dflow.jit
    def step(x: Any) -> Any:
        return add(x), add(x)

    first, second = step(jnp.ones(2))
    np.testing.assert_array_equal([first, second], [[2, 2], [3, 3]])
    np.testing.assert_array_equal(v, [2, 2])


@pytest.mark.device
def test_transforms_inside_read_variables() -> None:
    v = dflow.Variable(jnp.arange(3.0))

    @dflow.jit
    def f(x: Any) -> Any:
        rows = jax.vmap(lambda row: row @ v)(x)
        slope = jax.grad(lambda scale: (scale * v.read()).sum())(2.0)
        return rows, slope, jax.lax.fori_loop(0, 3, lambda i, total: total + v[i], 0.0)

    rows, slope, looped = f(jnp.ones((2, 3)))
    np.testing.assert_allclose(rows, [3, 3])
    assert (float(slope), float(looped)) == (3.0, 3.0)


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": jax.vmap,
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_function_with_state_is_compiled_once(
    transform: Any, caplog: pytest.LogCaptureFixture
) -> None:
    v, table = dflow.Variable(2.0, name="v"), jnp.array([1.0, 3.0])
    transformed = transform(dflow.jit(lambda x: (x * v * table).sum()))
    points = jnp.ones(2)
    expected = transform(lambda x: (x * 2.0 * table).sum())(points)
    for value in (2.0, 3.0):
        v.assign(value)
        with jax.log_compiles():
            caplog.clear()
            got = transformed(points)
        np.testing.assert_allclose(got, expected * value / 2)
    assert "Finished XLA compilation" not in caplog.text


def test_what_a_transform_was_compiled_for_is_gone_with_the_function() -> None:
    v = dflow.Variable(jnp.ones((7, 77)), name="v")
    gone = weakref.ref(v)
    f = dflow.jit(lambda x, v=v: (x * v).sum())
    jax.grad(f)(2.0)
    jax.vmap(f)(jnp.ones(2))
    del f, v
    gc.collect()
    assert gone() is None
    assert not [array for array in jax.live_arrays() if array.shape == (7, 77)]
