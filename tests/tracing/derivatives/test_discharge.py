"""State where JAX's control flow cannot hold it. `tests/dflow/test_programs.py` has random programs where it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow
from dflow.tracing.errors import DflowError


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
    assert f"test_discharge.py:{fn.__code__.co_firstlineno + 1}\n" in str(caught.value)


def test_a_variable_inside_a_function_that_cannot_hold_state_is_refused() -> None:
    a = dflow.Variable(jnp.zeros(2), name="a")

    def fn(x: Any) -> Any:
        return jax.lax.custom_linear_solve(lambda y: y * a.read(), x, lambda f, y: f(y) + a.read(), symmetric=True)

    with pytest.raises(DflowError, match=r"variables \(a\) are used inside .*, which cannot hold state yet"):
        dflow.jit(fn)(jnp.ones(2))
