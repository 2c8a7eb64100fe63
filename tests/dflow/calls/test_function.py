"""Functions by `dflow.jit`: arguments and results, what they keep alive, and functions of JAX inside and around."""

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


def test_variables_are_arguments_even_twice_and_results() -> None:
    v = dflow.Variable(jnp.zeros(2))

    @dflow.jit
    def f(first: dflow.Variable, pair: dict[str, Any]) -> Any:
        first.assign_add(jnp.ones(2))
        seen = pair["again"].read()
        pair["again"].assign(seen * 10)
        return pair["again"], seen, {"v": v}

    result, seen, tree = f(v, {"again": v, "other": 1.0})
    assert result is v
    assert tree["v"] is v
    np.testing.assert_array_equal(seen, [1, 1])
    np.testing.assert_array_equal(v, [10, 10])


def test_a_failed_call_changes_no_variable_and_may_be_tried_again() -> None:
    v, fail = dflow.Variable(1.0), [True]

    @dflow.jit
    def f() -> None:
        v.assign(5.0)
        if fail[0]:
            raise ValueError("not yet")

    with pytest.raises(ValueError, match="not yet"):
        f()
    assert float(v) == 1.0
    fail[0] = False
    f()
    assert float(v) == 5.0


@pytest.mark.device
def test_arrays_read_earlier_stay_valid() -> None:
    given = jnp.full(3, 7.0)
    v = dflow.Variable(given)
    before = v.read()

    @dflow.jit
    def step() -> Any:
        v.assign_add(jnp.ones(3))
        return v.read()

    results = [step() for _ in range(3)]
    np.testing.assert_array_equal([given, before, *results, v], np.array([7, 7, 8, 9, 10, 10])[:, None] * np.ones(3))


@pytest.mark.device
def test_arguments_that_become_state_stay_the_callers() -> None:
    first, second = dflow.Variable(jnp.zeros(2)), dflow.Variable(jnp.zeros(2))

    @dflow.jit
    def keep(x: Any) -> Any:
        first.assign(x)
        second.assign(x)
        return x

    @dflow.jit
    def grow() -> None:
        first.assign_add(jnp.ones(2))
        second.assign_add(jnp.ones(2) * 2)

    mine = jnp.full(2, 5.0)
    returned = keep(mine)
    grow()
    grow()
    np.testing.assert_array_equal([mine, returned, first, second], [[5, 5], [5, 5], [7, 7], [9, 9]])


@pytest.mark.parametrize("keep", [lambda v: v, lambda v: {"deep": [v, 1.0]}], ids=["itself", "in a tree"])
def test_a_variable_that_was_an_argument_is_freed_with_its_last_user(keep: Callable[[Any], Any]) -> None:
    f = dflow.jit(lambda tree: jax.tree.leaves(tree, is_leaf=dflow.is_variable)[0].assign_add(1.0))
    v = dflow.Variable(1.0)
    for _ in range(2):
        f(keep(v))
    assert float(v) == 3.0
    gone = weakref.ref(v)
    del v
    gc.collect()
    assert gone() is None
    assert f._plans.is_empty


def test_a_signature_says_what_is_static() -> None:
    """Positions count all parameters, positional-only parameters too."""
    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x, /, n: [x + v] * n, static_argnames="n")
    assert len(f(1.0, 2)) == 2
    assert len(f(1.0, n=3)) == 3


def test_a_copy_of_a_function_runs_by_itself() -> None:
    import copy

    v = dflow.Variable(1.0)
    f = dflow.jit(lambda x: v.assign_add(x * 1))
    f(1.0)
    again = copy.deepcopy(f)
    again(1.0)
    assert again is not f
    assert float(v) == 3.0
    assert (len(f.trace_log()), len(again.trace_log())) == (1, 1)


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
