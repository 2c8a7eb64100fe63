"""Loops and branches over several devices of one process; run by `test_several_devices.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from tests.dflow.on_devices import X, calls, on, plan_of, variable

pytestmark = pytest.mark.once


def loop_scan(v: Any, w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        with dflow.device("cpu:1"):
            carry = jnp.sin(carry) + row
            v.assign_add(carry)
        with dflow.device("cpu:2"):
            w.assign_add(carry * 2)
            row = carry - w
        return carry, (row, carry)

    return jax.lax.scan(body, jnp.zeros(3), x)


def loop_while(v: Any, w: Any, x: Any) -> Any:
    def body(state: Any) -> Any:
        count, value = state
        with dflow.device("cpu:1"):
            value = value + v.read()
        with dflow.device("cpu:2"):
            w.assign_add(value)
        return count + 1, value

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x[0]))


def branch(v: Any, w: Any, x: Any) -> Any:
    def one(y: Any) -> Any:
        with dflow.device("cpu:1"):
            return y + v.read()

    def other(y: Any) -> Any:
        with dflow.device("cpu:2"):
            w.assign_add(y)
            return y * w.read()

    return [jax.lax.cond(x[0, 1] > bound, one, other, x[0]) for bound in (0.0, 5.0)]


def nested(v: Any, w: Any, x: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        return loop_while(v, w, row[None])[1] + carry, None

    return jax.lax.scan(body, jnp.zeros(3), x, reverse=True)[0]


def differentiated(v: Any, w: Any, x: Any) -> Any:
    def loss() -> Any:
        def body(carry: Any, row: Any) -> Any:
            with dflow.device("cpu:1"):
                carry = jnp.sin(carry * v.read()) + row
            with dflow.device("cpu:2"):
                return carry * w.read(), None

        return jax.lax.scan(body, jnp.ones(3), x)[0].sum()

    return dflow.value_and_grad(loss, [v, w])()


def checkpointed(v: Any, w: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(y: Any) -> Any:
        with dflow.device("cpu:1"):
            y = jnp.sin(y * v.read())
        with dflow.device("cpu:2"):
            return jnp.cos(y * w.read())

    return dflow.value_and_grad(lambda: layer(jnp.asarray(x[0])).sum(), [v, w])()


@pytest.mark.parametrize("program", [loop_scan, loop_while, branch, nested, differentiated, checkpointed])
def test_bodies_over_two_devices(program: Callable[..., Any]) -> None:
    there = variable("cpu:1", np.full(3, 0.5)), variable("cpu:2", np.full(3, 0.25))
    here = dflow.Variable(jnp.full(3, 0.5)), dflow.Variable(jnp.full(3, 0.25))
    run = dflow.jit(lambda x: program(*there, x))
    for _ in range(2):
        got = run(X)
        with dflow.device("cpu:0"), pytest.MonkeyPatch.context() as patch:
            patch.setattr(dflow, "device", lambda name: dflow.colocate_with(here[0]))
            want = dflow.jit(lambda x: program(*here, x))(X)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
        for one, other in zip(there, here, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)
    assert [on(each.read()) for each in there] == ["cpu:1", "cpu:2"]


def test_a_loop_of_one_device_is_one_op_on_it() -> None:
    def f(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            with dflow.device("cpu:3"):
                carry = carry + row
            return carry, carry * 2

        return jax.lax.scan(body, jnp.zeros(3), x)

    assert calls(plan_of(f, X).items) == ["cpu:3"]
    total, rows = dflow.jit(f)(X)
    assert (on(total), on(rows)) == ("cpu:3", "cpu:3")
