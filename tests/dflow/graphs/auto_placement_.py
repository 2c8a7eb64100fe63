"""Functions whose devices are chosen by cost; `test_several_devices.py` runs this with eight devices."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from tests.dflow.on_devices import X, on, variable

pytestmark = pytest.mark.once


def test_ops_that_may_choose_give_what_they_give_anywhere() -> None:
    v, w = variable("cpu:1", np.ones((3, 4))), variable("cpu:2", np.ones((4, 3)))

    @dflow.jit
    def step(x: Any) -> Any:
        with dflow.device("auto"):
            y = jnp.tanh(x @ v) @ w
        w.assign_add(jnp.full((4, 3), 0.5) * y.sum())
        return y

    for turn in range(3):
        held = np.asarray(w)
        want = np.tanh(X @ np.ones((3, 4), np.float32)) @ held
        np.testing.assert_allclose(step(X), want, rtol=1e-6)
        np.testing.assert_allclose(w, held + 0.5 * want.sum(), rtol=1e-6)
        assert on(w.read()) == "cpu:2", turn


def test_a_choice_is_among_the_devices_that_are_listed() -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device(["cpu:5", jax.devices()[6]]):
            return x + 1

    assert on(f(X)) in {"cpu:5", "cpu:6"}


def test_a_scope_of_choice_around_the_call_is_part_of_the_trace() -> None:
    f = dflow.jit(lambda x: x + 1)
    with dflow.device(["cpu:7"]):
        assert on(f(jnp.asarray(X))) == "cpu:7"
    assert on(f(jnp.asarray(X))) == "cpu:0"


def test_a_stated_device_within_a_choice_is_kept_and_so_is_the_gradient_of_either() -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device(["cpu:3"]):
            y = jnp.sin(x)
            with dflow.device("cpu:4"):
                z = jnp.cos(x)
        return y, z

    y, z = f(X)
    assert (on(y), on(z)) == ("cpu:3", "cpu:4")

    def loss(x: Any) -> Any:
        with dflow.device(["cpu:3"]):
            return jnp.sin(x).sum()

    gradient = dflow.jit(jax.grad(loss))(X)
    assert on(gradient) == "cpu:3"
    np.testing.assert_allclose(gradient, np.cos(X), rtol=1e-6)


def test_a_variable_made_where_ops_may_choose_is_where_it_would_be_without_a_scope() -> None:
    with dflow.device("auto"):
        w = dflow.Variable(jnp.ones(3), name="w")
    assert w.device is None


def test_loops_branches_and_queues_run_wherever_their_ops_were_put() -> None:
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((), jnp.float32))
    total = dflow.Variable(0.0)

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("auto"):
            y = jax.lax.scan(lambda c, row: (c + row, None), jnp.zeros(3), x)[0]
            total.assign_add(y.sum())
            queue.enqueue(y.sum())
            return jax.lax.cond(y.sum() > 0, lambda y: y * 2, lambda y: y, y)

    np.testing.assert_allclose(f(X), 2 * X.sum(0))
    np.testing.assert_allclose(total, X.sum())
    np.testing.assert_allclose(queue.dequeue(), X.sum())


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["ps:0"], "'/job:ps/task:0' is a task, and a choice is among devices of this process\n  at .*\n  name these"),
        (["cpu:1", "cpu:8"], "there is no device cpu:8 in this process"),
        (["cpu"], "'cpu' is not the name of a device"),
        ([], "no device is listed to choose among\n  at .*\n  name some, or say 'auto' for any"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(names: list[str], match: str) -> None:
    with pytest.raises(dflow.DeviceError, match=match), dflow.device(names):
        pass


def test_an_explanation_names_devices_and_reasons_and_changes_nothing() -> None:
    w = variable("cpu:2", np.ones((3, 4)), name="w")

    @dflow.jit
    def step(x: Any) -> Any:
        with dflow.device("auto"):
            y = x @ w
        with dflow.device("cpu:4"):
            z = y.sum()
        w.assign_add(z * jnp.ones((3, 4)))
        return z

    found = dflow.explain_placement(step, X, rounds=2)
    assert {part.reason for part in found.parts if part.is_state} == {"%w lives there"}
    assert [part.device for part in found.parts if part.reason == "stated"] == ["cpu:4"]
    assert sum(part.reason.startswith("chosen: the step ends") for part in found.parts) == 1
    assert found.measured_s is not None
    assert found.measured_s > 0
    np.testing.assert_array_equal(w, np.ones((3, 4)))
    assert re.match(r"step: a step is predicted to take .*s, measured .*s\n", str(found))
    assert dflow.explain_placement(step, jax.ShapeDtypeStruct((2, 3), jnp.float32)).measured_s is None
    assert dflow.explain_placement(step, X, rounds=0).measured_s is None
