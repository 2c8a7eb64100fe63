"""The while loop with a backward pass: forward as JAX's own loop, backward as the unrolled loop."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("a", [0.3, 2.0, 900.0])
def test_the_number_of_turns_may_depend_on_the_data(a: float) -> None:
    def root(a: Any) -> Any:
        return dflow.while_loop(lambda y: jnp.abs(y * y - a) > 1e-5 * a, lambda y: (y + a / y) / 2, a, max_iters=64)

    value, gradient = dflow.jit(dflow.value_and_grad(root))(jnp.float32(a))
    np.testing.assert_allclose(value, math.sqrt(a), rtol=1e-5)
    np.testing.assert_allclose(gradient, 0.5 / math.sqrt(a), rtol=1e-2)


def test_second_order_and_forward_mode() -> None:
    def loop(x: Any) -> Any:
        return dflow.while_loop(lambda c: c["turn"] < 3, body, start(x), max_iters=5)["x"].sum()

    def plain(x: Any) -> Any:
        return unrolled(3, x)["x"].sum()

    np.testing.assert_allclose(jax.hessian(loop)(X), jax.hessian(plain)(X), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.jvp(loop, (X,), (X,))[1], jax.jvp(plain, (X,), (X,))[1], rtol=1e-5)


def test_each_element_of_a_batch_stops_by_itself() -> None:
    def loop(x: Any, turns: Any) -> Any:
        return dflow.while_loop(lambda c: c["turn"] < turns, body, start(x), max_iters=9)["x"].sum()

    turns = jnp.array([0, 2, 5])
    got = jax.vmap(jax.grad(loop), in_axes=(None, 0))(X, turns)
    want = [jax.grad(lambda x, n=n: unrolled(int(n), x)["x"].sum())(X) for n in turns]
    np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_variables_are_read_and_written_in_it(compiled: bool) -> None:
    limit, turns, total = (dflow.Variable(value, name=name) for value, name in ((9.0, "l"), (0, "n"), (0.0, "t")))

    def loss(x: Any) -> Any:
        def step(y: Any) -> Any:
            turns.assign_add(1)
            total.assign_add(y * y)
            return y * x

        return dflow.while_loop(lambda y: y < limit.read(), step, x, max_iters=20) + total.read()

    both = dflow.value_and_grad(loss, total, argnums=0)
    value, (by_total, by_x) = (dflow.jit(both) if compiled else both)(jnp.float32(2.0))
    assert (value, turns.read(), total.read()) == (16.0 + 4 + 16 + 64, 3, 84.0)
    assert by_total == 1.0
    np.testing.assert_allclose(by_x, 4 * 8 + 2 * 2 + 4 * 8 + 6 * 32, rtol=1e-6)


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


def test_the_condition_may_not_write() -> None:
    v = dflow.Variable(0.0, name="v")

    def cond(x: Any) -> Any:
        v.assign_add(1.0)
        return x < 1

    with pytest.raises(DflowError, match=r"the condition of a while_loop writes variables \(v\)(.|\n)*in its body"):
        dflow.jit(lambda x: dflow.while_loop(cond, lambda x: x + 1, x, max_iters=3))(0)
