"""A differentiated variable that the function never reads gives a warning."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import dflow


@pytest.fixture
def v() -> dflow.Variable:
    return dflow.Variable(jnp.array([1.0, 2.0, 3.0]), name="leaf")


def test_a_variable_that_the_loss_never_reads_is_warned_of(v: dflow.Variable) -> None:
    unused, counted = dflow.Variable(1.0, name="unused"), dflow.Variable(0.0, name="counted")

    def loss() -> Any:
        counted.assign_add(1.0)
        return (v**2).sum()

    for function in (dflow.value_and_grad, dflow.grad, lambda *args: dflow.jit(dflow.grad(*args))):
        with pytest.warns(
            dflow.UnreadVariableWarning, match=r"2 variables .* reads, 'unused', 'counted': .*are zero"
        ) as w:
            function(loss, [v, unused, counted])()
        assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dflow.grad(loss, [v])()
        dflow.grad(lambda: v[jnp.array([0])].sum() + jax.lax.cond(True, unused.read, lambda: 0.0), [v, unused])()
