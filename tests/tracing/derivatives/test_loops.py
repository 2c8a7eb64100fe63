"""The while loop with a backward pass, beside JAX's own and the unrolled loop; state where control flow has no room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DflowError, GraphTypeError


def body(carry: Any) -> Any:
    turn, x = carry["turn"], carry["x"]
    return {"turn": turn + 1, "x": jnp.sin(x) * x + 0.1 * turn}


def start(x: Any) -> Any:
    return {"turn": jnp.int32(0), "x": x}


def unrolled(turns: int, x: Any) -> Any:
    carry = start(x)
    for _ in range(turns):
        carry = body(carry)
    return carry


X = jnp.array([1.2, 2.5])


@pytest.mark.parametrize("max_iters", [1, 3, 16, 17])
@pytest.mark.parametrize("turns", [0, 1, 16])
def test_it_is_jaxs_loop_forward_and_the_unrolled_loop_backward(turns: int, max_iters: int) -> None:
    def loop(x: Any) -> Any:
        return dflow.while_loop(lambda c: c["turn"] < turns, body, start(x), max_iters=max_iters)

    run = min(turns, max_iters)
    result, by_hand = jax.jit(loop)(X), unrolled(run, X)
    assert result["turn"] == run
    np.testing.assert_allclose(result["x"], by_hand["x"], rtol=1e-5)
    if turns <= max_iters:
        jaxs = jax.lax.while_loop(lambda c: c["turn"] < turns, body, start(X))
        np.testing.assert_allclose(result["x"], jaxs["x"], rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: loop(x)["x"].sum()))(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: unrolled(run, x)["x"].sum())(X), rtol=1e-4)


def saved_bytes(max_iters: int) -> int:
    """Bytes that the backward pass of a loop keeps from the forward pass."""
    x = jnp.zeros(1000)
    _, pull = jax.vjp(lambda x: dflow.while_loop(lambda y: y[0] < 1, jnp.sin, x, max_iters=max_iters), x)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))


def test_the_memory_grows_with_the_square_root_of_the_bound() -> None:
    assert saved_bytes(10_000) < 3 * saved_bytes(1_600)
    assert saved_bytes(10_000) < 300 * 4_000


@pytest.mark.parametrize("bound", [0, -1, 2.5, True, None])
def test_a_bound_that_is_none_is_refused(bound: Any) -> None:
    with pytest.raises(GraphTypeError, match=rf"given max_iters={bound}, not a positive integer\n  at .*test_loops.py"):
        dflow.while_loop(lambda x: x < 1, lambda x: x + 1, 0, max_iters=bound)


@pytest.mark.parametrize("loop", [jax.lax.while_loop, partial(dflow.while_loop, max_iters=3)])
def test_the_condition_of_a_while_loop_may_not_write(loop: Callable[..., Any]) -> None:
    a = dflow.Variable(0.0, name="a")

    def condition(carry: Any) -> Any:
        a.assign_add(1.0)
        return carry < 3

    def fn(x: Any) -> Any:
        return loop(condition, lambda carry: carry + 1, x)

    fact = r"the condition of a while_loop writes variables \(a\)(.|\n)*in its body"
    with pytest.raises(DflowError, match=fact) as caught:
        dflow.jit(fn)(0)
    assert f"test_loops.py:{fn.__code__.co_firstlineno + 1}\n" in str(caught.value)


def test_a_variable_inside_a_function_that_cannot_hold_state_is_refused() -> None:
    a = dflow.Variable(jnp.zeros(2), name="a")

    def fn(x: Any) -> Any:
        return jax.lax.custom_linear_solve(lambda y: y * a.read(), x, lambda f, y: f(y) + a.read(), symmetric=True)

    with pytest.raises(DflowError, match=r"variables \(a\) are used inside .*, which cannot hold state yet"):
        dflow.jit(fn)(jnp.ones(2))
