"""Loops and branches over several devices of one process; run by `test_several_devices.py`."""

from __future__ import annotations

import threading
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


def test_two_loops_over_devices_meet_in_a_queue() -> None:
    queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((3,), jnp.float32))
    made, taken = variable("cpu:1", np.zeros(3)), variable("cpu:2", np.zeros(3))

    @dflow.jit
    def make() -> Any:
        def body(_: Any, value: Any) -> Any:
            with dflow.device("cpu:1"):
                value = value + 1
                queue.enqueue(value)
            with dflow.device("cpu:2"):
                value = value * 1
            made.assign_add(value)
            return value

        return jax.lax.fori_loop(0, 8, body, jnp.zeros(3))

    @dflow.jit
    def take() -> Any:
        def body(_: Any, total: Any) -> Any:
            value = queue.dequeue()
            with dflow.device("cpu:3"):
                total = total + value
            with dflow.device("cpu:2"):
                taken.assign_add(value)
            return total

        return jax.lax.fori_loop(0, 8, body, jnp.zeros(3))

    maker = threading.Thread(target=make)
    maker.start()
    total = take()
    maker.join()
    for one in (total, made, taken):
        np.testing.assert_array_equal(one, np.full(3, 36.0))
    assert (on(total), on(made.read()), on(taken.read())) == ("cpu:3", "cpu:1", "cpu:2")


def test_steps_of_many_threads_over_two_devices_lose_no_update() -> None:
    v, w = variable("cpu:1", np.zeros(3)), variable("cpu:2", np.zeros(3))

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(x)
        w.assign_add(2 * x)
        return v.read() + w.read()

    threads = [threading.Thread(target=lambda: [step(jnp.ones(3)) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(v, np.full(3, 80.0))
    np.testing.assert_array_equal(w, np.full(3, 160.0))


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
