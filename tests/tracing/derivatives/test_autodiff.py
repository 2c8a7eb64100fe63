"""Gradients of functions with state, also with custom rules, compared with `jax.grad` without state."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.derivatives.autodiff import grad, hvp, jvp, value_and_grad, vjp
from dflow.tracing.errors import DflowError, GraphTypeError, LostWriteError, VariableError
from dflow.tracing.state.resources import Variable
from dflow.tracing.state.variable_trees import trainable_variables
from tests.graphs_ import a_home

X = jnp.array([1.0, 2.0, 3.0])
W = jnp.array([0.5, -1.0, 2.0])


@pytest.fixture
def w() -> Variable:
    with a_home():
        return Variable(W, name="w")


@pytest.fixture
def count() -> Variable:
    with a_home():
        return Variable(jnp.zeros(()), name="count")


def loss(w: Any, x: Any) -> Any:
    return jnp.sin(w * x).sum() + (w**2).sum()


def test_a_gradient_is_by_a_tree_of_variables(w: Variable) -> None:
    value, gradient = value_and_grad(lambda x: loss(w.read(), x), [w])(X)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], jax.grad(loss)(W, X), rtol=1e-6)
    structured = grad(lambda x: loss(w.read(), x), {"a": (w,)})(X)
    np.testing.assert_allclose(structured["a"][0], jax.grad(loss)(W, X), rtol=1e-6)


def test_a_gradient_is_by_the_arguments_of_argnums(w: Variable) -> None:
    def fn(x: Any, y: Any) -> Any:
        return loss(w.read(), x * y["k"])

    def pure(x: Any, y: Any) -> Any:
        return loss(W, x * y["k"])

    arguments = (X, {"k": X + 1})
    for argnums in (0, 1, -1, (0, 1), (1,)):
        expected = jax.grad(pure, argnums=argnums)(*arguments)
        jax.tree.map(np.testing.assert_allclose, grad(fn, argnums=argnums)(*arguments), expected)
    np.testing.assert_allclose(grad(fn)(*arguments), jax.grad(pure)(*arguments))


def test_a_gradient_is_by_both_and_comes_with_the_aux_value(w: Variable) -> None:
    def fn(x: Any, *, scale: float) -> Any:
        return loss(w.read(), x) * scale, {"x": x + 1, "n": 3}

    (value, aux), (by_w, by_x) = value_and_grad(fn, w, argnums=0, has_aux=True)(X, scale=2.0)
    expected = jax.grad(loss, argnums=(0, 1))(W, X)
    np.testing.assert_allclose(value, 2 * loss(W, X), rtol=1e-6)
    np.testing.assert_allclose(by_w, 2 * expected[0], rtol=1e-6)
    np.testing.assert_allclose(by_x, 2 * expected[1], rtol=1e-6)
    np.testing.assert_array_equal(aux["x"], X + 1)
    assert aux["n"] == 3
    gradient, aux = grad(fn, w, has_aux=True)(X, scale=2.0)
    np.testing.assert_allclose(gradient, 2 * expected[0], rtol=1e-6)


def test_plain_grad_over_a_dependent_write_raises(w: Variable, count: Variable) -> None:
    def direct(x: Any) -> Any:
        w.assign(x * 2)
        return x.sum()

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (w.assign_add(c), c * 2)[::-1], x, None, length=2)[0].sum()

    for fn in (direct, looped):
        with pytest.raises(LostWriteError, match=r"\bw\b(.|\n)*use dflow.grad or") as caught:
            jax.make_jaxpr(jax.grad(fn))(X)
        assert f"test_autodiff.py:{fn.__code__.co_firstlineno + 1}\n" in str(caught.value)


def test_plain_grad_lets_other_writes_be(w: Variable, count: Variable) -> None:
    def fn(x: Any) -> Any:
        count.assign_add(jnp.ones(()))
        w.assign(jax.lax.stop_gradient(x * 2))
        return (x * w.read()).sum()

    gradient = jax.grad(fn)(X)
    np.testing.assert_array_equal(gradient, X * 2)
    assert count.read() == 1


def test_arguments_and_results_without_a_gradient_are_refused(w: Variable, count: Variable) -> None:
    with pytest.raises(GraphTypeError, match=r"returned f32\[3\], not a real scalar(.|\n)*mean"):
        grad(lambda x: w.read() * x, w)(X)
    with pytest.raises(GraphTypeError, match="returned str, not a scalar"):
        grad(lambda x: "loss", w)(X)
    with pytest.raises(GraphTypeError, match=r"an argument to differentiate is int32, which has no gradient"):
        grad(lambda x: x.sum())(jnp.arange(3))
    with pytest.raises(GraphTypeError, match="argnums has 3 but the function was given 1 arguments"):
        grad(lambda x: x.sum(), argnums=3)(X)
    with pytest.raises(VariableError, match=r"among its variables(.|\n)*give argnums"):
        grad(lambda x: x.sum(), [X])(X)
    with pytest.raises(GraphTypeError, match="nothing to differentiate"):
        grad(lambda x: x.sum(), [])(X)
    with a_home():
        integers = Variable(jnp.arange(3), name="n")
    with pytest.raises(GraphTypeError, match="variable 'n' is int32, which has no gradient"):
        grad(lambda: integers.read().sum(), integers)()


def counted(w: Variable, count: Variable, x: Any) -> Any:
    """Reads one variable and adds to another; the result alone shows which were written."""
    count.assign_add(jnp.ones(()))
    return {"y": jnp.sin(w.read() * x) + x, "n": jnp.int32(3)}


def counted_by_hand(w: Any, x: Any) -> Any:
    return {"y": jnp.sin(w * x) + x, "n": jnp.int32(3)}


def test_jvp_is_jaxs(w: Variable, count: Variable) -> None:
    out, tangent = jvp(lambda x: counted(w, count, x)["y"], (X,), (X + 1,), variables=[w], directions=[X * 2])
    want = jax.jvp(lambda w, x: counted_by_hand(w, x)["y"], (W, X), (X * 2, X + 1))
    np.testing.assert_allclose(out, want[0], rtol=1e-6)
    np.testing.assert_allclose(tangent, want[1], rtol=1e-5)
    assert count.read() == 1


def test_jvp_of_a_tree_with_integers(w: Variable, count: Variable) -> None:
    _, tangent = jvp(lambda x: counted(w, count, x), (X,), (X,))
    _, want = jax.jvp(lambda x: counted_by_hand(W, x), (X,), (X,))
    np.testing.assert_allclose(tangent["y"], want["y"], rtol=1e-6)
    assert tangent["n"].dtype == jax.dtypes.float0
    assert count.read() == 1


def test_vjp_is_jaxs_and_writes_once(w: Variable, count: Variable) -> None:
    out, pull = vjp(lambda x, k: counted(w, count, x)["y"] * k["k"], X, {"k": X}, variables={"w": w})
    _, want = jax.vjp(lambda w, x, k: counted_by_hand(w, x)["y"] * k["k"], W, X, {"k": X})
    np.testing.assert_allclose(out, counted_by_hand(W, X)["y"] * X, rtol=1e-6)
    for cotangent in (X, -X):
        by_w, by_x, by_k = want(cotangent)
        by_variable, by_argument = pull(cotangent)
        np.testing.assert_allclose(by_variable["w"], by_w, rtol=1e-5)
        np.testing.assert_allclose(by_argument[0], by_x, rtol=1e-5)
        np.testing.assert_allclose(by_argument[1]["k"], by_k["k"], rtol=1e-5)
    assert count.read() == 1
    _, pull_arguments = vjp(lambda x: w.read() * x, X)
    np.testing.assert_allclose(pull_arguments(X)[0], W * X)


def test_hvp_is_the_hessian_times_a_vector(w: Variable, count: Variable) -> None:
    def fn(x: Any) -> Any:
        count.assign_add(jnp.ones(()))
        return loss(w.read(), x) * (x**2).sum()

    (by_w,), by_x = hvp(fn, [w], argnums=0)(([X + 1], X * 3), X)
    assert count.read() == 1
    hessian = jax.hessian(lambda w, x: loss(w, x) * (x**2).sum(), argnums=(0, 1))(W, X)
    np.testing.assert_allclose(by_w, hessian[0][0] @ (X + 1) + hessian[0][1] @ (X * 3), rtol=1e-4)
    np.testing.assert_allclose(by_x, hessian[1][0] @ (X + 1) + hessian[1][1] @ (X * 3), rtol=1e-4)
    np.testing.assert_allclose(hvp(fn)(X, X), jax.hessian(lambda x: loss(W, x) * (x**2).sum())(X) @ X, rtol=1e-4)
    np.testing.assert_allclose(hvp(fn, w)(X, X), hessian[0][0] @ X, rtol=1e-4)


def test_hvp_and_jvp_of_lookups_are_dense(w: Variable) -> None:
    indices = jnp.array([0, 2, 2])
    product = hvp(lambda i: (w[i] ** 3).sum(), w)(X, indices)
    np.testing.assert_allclose(product, jax.hessian(lambda v: (v[indices] ** 3).sum())(W) @ X, rtol=1e-6)
    _, tangent = jvp(lambda: w[indices], variables=w, directions=X)
    np.testing.assert_array_equal(tangent, X[indices])


def test_a_variable_may_change_its_own_gradient() -> None:
    with a_home():
        half = Variable(W, name="half", gradient=lambda g: g / 2)
        wrong = Variable(W, name="wrong", gradient=lambda g: g.sum())
    np.testing.assert_allclose(grad(lambda x: (half.read() * x).sum(), half)(X), X / 2)
    _, pull = vjp(lambda: half.read(), variables=[half])  # noqa: PLW0108
    np.testing.assert_allclose(pull(X)[0][0], X / 2)
    np.testing.assert_allclose(grad(lambda x: (half.read() * x).sum())(X), W)
    with pytest.raises(GraphTypeError, match=r"function of variable 'wrong' gives: expected f32\[3\], got f32\[\]"):
        grad(lambda x: (wrong.read() * x).sum(), wrong)(X)


def test_a_variable_that_is_not_trained_has_no_gradient(w: Variable) -> None:
    with a_home():
        mean = Variable(W, name="mean", trainable=False)
    assert trainable_variables({"a": [w, mean], "b": 3.0}) == [w]
    for take in (value_and_grad(loss, [w, mean]), hvp(loss, mean)):
        with pytest.raises(VariableError, match=r"variable 'mean' is not trainable(.|\n)*dflow.trainable_variables"):
            take(W, X)


def test_directions_and_cotangents_that_do_not_fit_are_refused(w: Variable) -> None:
    with pytest.raises(GraphTypeError, match=r"the structure of the directions: expected .*, got "):
        jvp(lambda: w.read(), variables=[w], directions=[X, X])  # noqa: PLW0108
    with pytest.raises(GraphTypeError, match=r"direction of variable 'w': expected f32\[3\], got f32\[2\]"):
        jvp(lambda: w.read(), variables=[w], directions=[X[:2]])  # noqa: PLW0108
    with pytest.raises(GraphTypeError, match=r"the direction: expected f32\[3\], got i32\[3\]"):
        hvp(lambda: w.read().sum(), w)(jnp.arange(3))
    with pytest.raises(GraphTypeError, match="the structure of the cotangent: expected"):
        vjp(lambda x: w.read() * x, X)[1]((X, X))
    with pytest.raises(VariableError, match="jvp was given ArrayImpl among its variables"):
        jvp(lambda x: x, (X,), (X,), variables=[X], directions=[X])


def test_a_variable_that_the_loss_never_reads_is_warned_of() -> None:
    v = dflow.Variable(X, name="leaf")
    unused, counted = dflow.Variable(1.0, name="unused"), dflow.Variable(0.0, name="counted")

    def loss() -> Any:
        counted.assign_add(1.0)
        return (v**2).sum()

    fact = r"2 variables .* reads, 'unused', 'counted': .*are zero"
    for function in (dflow.value_and_grad, dflow.grad, lambda *args: dflow.jit(dflow.grad(*args))):
        with pytest.warns(dflow.UnreadVariableWarning, match=fact) as caught:
            function(loss, [v, unused, counted])()
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dflow.grad(loss, [v])()
        dflow.grad(lambda: v[jnp.array([0])].sum() + jax.lax.cond(True, unused.read, lambda: 0.0), [v, unused])()


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
