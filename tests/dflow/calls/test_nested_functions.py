"""Functions with state inside each other, inside `jax.jit`, and inside JAX's transforms."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow


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
