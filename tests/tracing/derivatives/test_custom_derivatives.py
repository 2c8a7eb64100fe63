"""Functions with custom derivative rules that use variables, compared with the same rules in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.errors import DflowError

X = jnp.array([1.0, 2.0, 3.0])
W = jnp.array([0.5, -1.0, 2.0])


class State:
    def __init__(self) -> None:
        self.w = dflow.Variable(W, name="w")
        self.total = dflow.Variable(0.0, name="total")
        self.calls = dflow.Variable(0, name="calls")


@pytest.fixture
def state() -> State:
    return State()


def touch(state: State, x: Any) -> Any:
    """The body of the functions below: reads one variable and adds to two."""
    state.calls.assign_add(1)
    state.total.assign_add(x.sum())
    return jnp.sin(x) * state.w.read(), state.calls.read()


def with_jvp(state: State) -> Callable[..., Any]:
    @jax.custom_jvp
    def fn(x: Any) -> Any:
        return touch(state, x)

    @fn.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        y, calls = fn(*primals)
        return (y, calls), (7.0 * tangents[0] * state.w.read(), np.zeros((), jax.dtypes.float0))

    return fn


def with_vjp(state: State) -> Callable[..., Any]:
    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return touch(state, x)

    fn.defvjp(lambda x: (fn(x), state.w.read()), lambda w, cts: (7.0 * cts[0] * w,))
    return fn


KINDS = pytest.mark.parametrize("make", [with_jvp, with_vjp])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@jax.custom_jvp
def plain(x: Any) -> Any:
    return jnp.sin(x) * W


plain.defjvps(lambda dx, y, x: 7.0 * dx * W)


def run(fn: Callable[..., Any], compiled: bool, *args: Any) -> Any:
    return (dflow.jit(fn) if compiled else fn)(*args)


@KINDS
@COMPILED
def test_the_rule_is_kept_and_the_function_has_run_once(make: Any, compiled: bool, state: State) -> None:
    fn = make(state)
    value, gradient = run(dflow.value_and_grad(lambda x: (fn(x)[0] ** 2).sum()), compiled, X)
    want, want_gradient = jax.value_and_grad(lambda x: (plain(x) ** 2).sum())(X)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(gradient, want_gradient, rtol=1e-6)
    assert (state.calls.read(), state.total.read()) == (1, 6.0)
    y, calls = run(fn, compiled, X)
    np.testing.assert_allclose(y, plain(X), rtol=1e-6)
    assert (calls, state.total.read()) == (2, 12.0)


@KINDS
@COMPILED
def test_a_later_read_of_what_it_wrote_has_its_ordinary_derivative(make: Any, compiled: bool, state: State) -> None:
    fn = make(state)
    gradient = run(dflow.grad(lambda x: fn(x)[0].sum() + 2.0 * state.total.read() ** 2), compiled, X)
    want = jax.grad(lambda x: plain(x).sum() + 2.0 * x.sum() ** 2)(X)
    np.testing.assert_allclose(gradient, want, rtol=1e-6)


@KINDS
def test_a_variable_that_the_rule_says_nothing_of_is_refused(make: Any, state: State) -> None:
    fn = make(state)
    with pytest.raises(DflowError, match=r"depends on variables \(w\), and the rule says nothing(.|\n)*w.read\(\)"):
        dflow.grad(lambda x: fn(x)[0].sum(), state.w)(X)
    by_total = dflow.grad(lambda x: fn(x)[0].sum() + state.total.read() ** 2, state.total)(X)
    assert by_total == 12.0


def test_a_rule_may_not_use_variables_that_its_function_does_not(state: State) -> None:
    @jax.custom_jvp
    def fn(x: Any) -> Any:
        state.calls.assign_add(1)
        return x

    fn.defjvps(lambda dx, y, x: dx * state.w.read())
    with pytest.raises(DflowError, match=r"a derivative rule uses variables \(w\) that its function does not use so"):
        dflow.grad(lambda x: fn(x).sum())(X)


def test_a_backward_rule_may_not_use_variables(state: State) -> None:
    @jax.custom_vjp
    def fn(x: Any) -> Any:
        return x * state.w.read()

    fn.defvjp(lambda x: (fn(x), None), lambda _, ct: (ct * state.w.read(),))
    with pytest.raises(DflowError, match=r"the backward rule of a custom_vjp function uses variables(.|\n)*residuals"):
        dflow.grad(lambda x: fn(x).sum())(X)


def test_a_body_that_cannot_be_transposed_may_write(state: State) -> None:
    @jax.custom_vjp
    def root(x: Any) -> Any:
        state.total.assign_add(x)
        return jax.lax.while_loop(lambda y: jnp.abs(y * y - x) > 1e-5, lambda y: (y + x / y) / 2, x)

    root.defvjp(lambda x: (root(x), x), lambda x, ct: (ct / (2 * jnp.sqrt(x)),))
    gradient = dflow.jit(dflow.grad(lambda x: root(x) + state.total.read()))(jnp.float32(4.0))
    np.testing.assert_allclose(gradient, 0.25 + 1.0, rtol=1e-6)
    assert state.total.read() == 4.0


def test_integer_arguments_and_arguments_without_a_derivative(state: State) -> None:
    @jax.custom_jvp
    def fn(x: Any, k: Any, y: Any) -> Any:
        state.calls.assign_add(k)
        return x * k + y

    @fn.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return fn(*primals), 3.0 * tangents[0] + 5.0 * tangents[2]

    assert dflow.grad(lambda x: fn(x, 2, 1.0))(2.0) == 3.0
    assert dflow.grad(lambda y: fn(1.0, 2, y))(2.0) == 5.0
    assert state.calls.read() == 4


def with_rule(way: str, body: Callable[[Any], Any]) -> Any:
    """Return the function with a rule whose derivative is 7 times the sum."""
    fn: Any = jax.custom_jvp(body) if way == "jvp" else jax.custom_vjp(body)
    if way == "jvp":
        fn.defjvp(lambda primals, tangents: (fn(*primals), 7.0 * tangents[0].sum()))
    else:
        fn.defvjp(lambda x: (fn(x), x), lambda x, ct: (7.0 * ct * jnp.ones_like(x),))
    return fn


@pytest.mark.parametrize("way", ["jvp", "vjp"])
@COMPILED
def test_a_function_with_a_rule_may_close_over_an_array(way: str, compiled: bool, state: State) -> None:
    factors = np.array([1.0, 2.0, 3.0], np.float32)

    def body(x: Any) -> Any:
        state.calls.assign_add(1)
        return (x * factors).sum()

    fn = with_rule(way, body)
    np.testing.assert_allclose(run(dflow.grad(lambda x: fn(x) ** 2), compiled, X), 14 * (X * factors).sum() + 0 * X)
    assert state.calls.read() == 1


@pytest.mark.parametrize("way", ["jvp", "vjp"])
@COMPILED
def test_a_queue_in_a_differentiated_function_with_a_rule_is_refused_and_loses_no_element(
    way: str, compiled: bool
) -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), jnp.float32))
    queue.enqueue_many(jnp.arange(4.0))

    def body(x: Any) -> Any:
        return queue.dequeue() * x.sum()

    fn = with_rule(way, body)
    with pytest.raises(dflow.QueueError, match=r"in a differentiated function with a custom(.|\n)*as an argument"):
        run(dflow.grad(fn, argnums=0), compiled, X)
    assert queue.size() == 4
    run(fn, compiled, X)
    assert queue.size() == 3
