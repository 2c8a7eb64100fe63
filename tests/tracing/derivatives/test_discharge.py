"""State inside JAX's control flow, with gradients, compared with plain JAX where the state is passed explicitly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DflowError

X = jnp.array([1.0, 2.0, 3.0])


class Held:
    """A stand-in for a variable in plain JAX; its value is a value of the trace."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value

    def assign(self, value: Any) -> None:
        self.value = value

    def assign_add(self, value: Any) -> None:
        self.value = self.value + value


def in_map(a: Any, b: Any, x: Any) -> Any:
    def one(row: Any) -> Any:
        a.assign(a.read() * row)
        return a.read() + b.read()

    return jax.lax.map(one, x).sum()


def in_map_by_hand(a: Any, b: Any, x: Any) -> Any:
    total = 0.0
    for row in x:
        a.assign(a.read() * row)
        total += a.read() + b.read()
    return total


def in_fori(a: Any, b: Any, x: Any) -> Any:
    def body(turn: Any, carry: Any) -> Any:
        b.assign_add(carry.sum() * a.read())
        return jnp.sin(carry) * b.read()

    return jax.lax.fori_loop(0, 3, body, x).sum()


def in_fori_by_hand(a: Any, b: Any, x: Any) -> Any:
    for _ in range(3):
        b.assign_add(x.sum() * a.read())
        x = jnp.sin(x) * b.read()
    return x.sum()


def in_switch(a: Any, b: Any, x: Any) -> Any:
    def first() -> Any:
        a.assign(x.sum() * b.read())
        return a.read()

    def second() -> Any:
        b.assign(x.prod() * a.read())
        return b.read()

    total = jnp.float32(0)
    for index in (jnp.int32(x[0] > 0), jnp.int32(x[0] < 0), jnp.int32(2)):
        total += jax.lax.switch(index, [first, second, lambda: x[0]])
    return total


def in_switch_by_hand(a: Any, b: Any, x: Any) -> Any:
    b.assign(x.prod() * a.read())
    total = b.read()
    a.assign(x.sum() * b.read())
    return total + a.read() + x[0]


def in_remat_of_scan(a: Any, b: Any, x: Any) -> Any:
    @jax.checkpoint
    def inner(y: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            a.assign_add(jnp.sin(carry) * b.read())
            return carry * row, None

        return jax.lax.scan(step, y[0], y)[0]

    return inner(x) * a.read()


def in_remat_of_scan_by_hand(a: Any, b: Any, x: Any) -> Any:
    carry = x[0]
    for row in x:
        a.assign_add(jnp.sin(carry) * b.read())
        carry = carry * row
    return carry * a.read()


def in_jits(a: Any, b: Any, x: Any) -> Any:
    @jax.jit
    def inner(y: Any) -> Any:
        a.assign_add(y.sum())
        return y * a.read()

    @jax.jit
    def outer(y: Any) -> Any:
        return inner(inner(y)) + b.read()

    return outer(x).sum()


def in_jits_by_hand(a: Any, b: Any, x: Any) -> Any:
    for _ in range(2):
        a.assign_add(x.sum())
        x = x * a.read()
    return (x + b.read()).sum()


PAIRS = [
    (in_map, in_map_by_hand),
    (in_fori, in_fori_by_hand),
    (in_switch, in_switch_by_hand),
    (in_remat_of_scan, in_remat_of_scan_by_hand),
    (in_jits, in_jits_by_hand),
]


@pytest.mark.parametrize(("fn", "by_hand"), PAIRS, ids=[fn.__name__ for fn, _ in PAIRS])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_control_flow_over_state_equals_plain_jax_in_values_state_and_gradients(
    fn: Any, by_hand: Any, compiled: bool
) -> None:
    a, b = dflow.Variable(0.5, name="a"), dflow.Variable(-1.5, name="b")
    both = dflow.value_and_grad(lambda x: fn(a, b, x), [a, b], argnums=0)
    value, (by_variables, by_x) = (dflow.jit(both) if compiled else both)(X)

    def plain(starts: Any, x: Any) -> Any:
        held = [Held(start) for start in starts]
        return by_hand(*held, x), [one.read() for one in held]

    starts = [jnp.float32(0.5), jnp.float32(-1.5)]
    (want, after), grads = jax.value_and_grad(plain, argnums=(0, 1), has_aux=True)(starts, X)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose([a.read(), b.read()], after, rtol=1e-5)
    np.testing.assert_allclose(by_variables, grads[0], rtol=1e-5)
    np.testing.assert_allclose(by_x, grads[1], rtol=1e-5)


def test_the_condition_of_a_while_loop_may_not_write() -> None:
    a = dflow.Variable(0.0, name="a")

    def condition(carry: Any) -> Any:
        a.assign_add(1.0)
        return carry < 3

    def fn(x: Any) -> Any:
        return jax.lax.while_loop(condition, lambda carry: carry + 1, x)

    with pytest.raises(
        DflowError, match=r"condition of a while_loop writes variables \(a\)(.|\n)*in its body"
    ) as caught:
        dflow.jit(fn)(0)
    assert f"test_discharge.py:{fn.__code__.co_firstlineno + 1}\n" in str(caught.value)


def test_a_variable_inside_a_function_that_cannot_hold_state_is_refused() -> None:
    a = dflow.Variable(jnp.zeros(2), name="a")

    def fn(x: Any) -> Any:
        return jax.lax.custom_linear_solve(lambda y: y * a.read(), x, lambda f, y: f(y) + a.read(), symmetric=True)

    with pytest.raises(DflowError, match=r"variables \(a\) are used inside .*, which cannot hold state yet"):
        dflow.jit(fn)(jnp.ones(2))
