"""A derivative that is used without a call raises an error that says to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.array([1.0, 2.0, 3.0]), name="leaf")


_UNCALLED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "unpacked": (lambda made, v: (lambda value, gradient: None)(*made), "unpacking"),
    "indexed": (lambda made, v: made[0], "indexing"),
    "scaled": (lambda made, v: 0.1 * made, "arithmetic"),
    "assigned": (lambda made, v: v.assign_sub(made), "an operation on arrays"),
    "compared": (lambda made, v: made < 1, "a comparison"),
    "converted": (lambda made, v: float(made), "a conversion"),
    "summed": (lambda made, v: jnp.sum(made), "an operation on arrays"),
    "compiled": (lambda made, v: dflow.jit(lambda x: x)(made), "an operation on arrays"),
    "by lax": (lambda made, v: jax.lax.neg(made), "an operation on arrays"),
    "by lax in traced code": (lambda made, v: jax.jit(lambda: jax.lax.exp(made))(), "an operation on arrays"),
    "the rest": (lambda made, v: 2 % made, "arithmetic"),
    "to NumPy": (lambda made, v: np.asarray(made), "an operation on arrays"),
    "applied": (lambda made, v: dflow.Optimizer(optax.sgd(0.1), v).apply(made), "apply"),
}


@pytest.mark.parametrize("case", _UNCALLED)
@pytest.mark.parametrize("function", [dflow.value_and_grad, dflow.grad])
def test_a_derivative_used_without_a_call_says_so(v: dflow.Variable, case: str, function: Callable[..., Any]) -> None:
    use, named = _UNCALLED[case]
    made, name = function(v.sum, v), function.__name__
    with pytest.raises(dflow.DflowError, match=rf"dflow\.{name} returns a function, and {named} needs") as caught:
        use(made, v)
    assert f"call it: dflow.{name}(loss, variables)()" in str(caught.value)
    assert __file__ in str(caught.value)


def test_a_derivative_is_a_method_like_any_function(v: dflow.Variable) -> None:
    class Model:
        def loss(self, x: Any) -> Any:
            return (x * v).sum()

        gradient = dflow.grad(loss, v)

    np.testing.assert_array_equal(Model().gradient(jnp.arange(3.0)), [0, 1, 2])
    assert dflow.grad(cubes).__name__ == "cubes"
    assert dflow.grad(cubes)
    assert repr(dflow.grad(cubes)) == "<dflow.grad of cubes>"


def cubes(x: Any) -> Any:
    return (x**3).sum()


def test_an_attribute_of_an_array_is_not_there_until_the_call(v: dflow.Variable) -> None:
    with pytest.raises(AttributeError, match=r"dflow\.grad returns a function, which has no 'real'(.|\n)*call it"):
        optax.tree.norm(dflow.grad(v.sum, [v]))
