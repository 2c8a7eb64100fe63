"""Copies between devices of one process are delayed until they are needed; run by `test_several_devices.py`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dflow
from dflow.lowering.steps.plan import Call, Copy, Read
from tests.dflow.on_devices import X, calls, plan_of, variable


def layers(weights: Sequence[dflow.Variable], x: Any) -> Any:
    """Layers on one device with weights on another, and a small op on a third device between them."""
    for weight in weights:
        with dflow.device("cpu:1"):
            x = x @ weight
        with dflow.device("cpu:2"):
            x = jnp.sin(x)
    return x


def by_hand(weights: Sequence[np.ndarray[Any, Any]], x: Any) -> Any:
    for weight in weights:
        x = np.sin(x @ weight)
    return x


def large_weights(count: int) -> list[np.ndarray[Any, Any]]:
    """Weights of 1 MiB each, the least size whose copies are delayed."""
    draws = np.random.default_rng(0)
    return [draws.normal(size=(512, 512)).astype(np.float32) / 20 for _ in range(count)]


def test_weights_are_copied_in_time_for_their_layer_and_no_earlier() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]
    items = plan_of(lambda x: layers(weights, x), jnp.ones((2, 512))).items
    late = [item for item in items if isinstance(item, Copy) and item.after]
    assert len(late) >= 6
    for copy in late:
        (before,) = (items[number] for number in copy.after)
        assert isinstance(before, Call)
        assert before.device == copy.device == "cpu:1"
    f, x = dflow.jit(lambda x: layers(weights, x)), np.ones((2, 512), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(f(x), by_hand(values, x), rtol=1e-3, atol=1e-4)


def test_weights_that_the_step_writes_are_copied_as_they_were_before() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]

    @dflow.jit
    def step(x: Any) -> Any:
        y = layers(weights, x)
        for weight in weights:
            weight.assign(weight * 0.5)
        return y, layers(weights, x)

    x = np.ones((2, 512), np.float32)
    for turn in range(2):
        before, after = ([value * factor for value in values] for factor in (0.5**turn, 0.5 ** (turn + 1)))
        for found, wanted in zip(step(x), (by_hand(before, x), by_hand(after, x)), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(weights[0].read(), values[0] / 4)


def test_in_a_loop_that_waits_for_a_queue_copies_wait_too() -> None:
    values = large_weights(12)
    weights = [variable("cpu:3", value) for value in values]
    queue = dflow.FIFOQueue(4, jax.ShapeDtypeStruct((2, 512), jnp.float32))

    def turn(total: Any, _: None) -> Any:
        return total + layers(weights, queue.dequeue()), None

    def loop() -> Any:
        return jax.lax.scan(turn, jnp.zeros((2, 512)), None, length=3)[0]

    assert any(isinstance(item, Copy) and item.after for item in plan_of(loop).bodies[0].items)
    elements = [np.full((2, 512), number, np.float32) for number in range(3)]
    for element in elements:
        queue.enqueue(element)
    found = dflow.jit(loop)()
    np.testing.assert_allclose(found, sum(by_hand(values, x) for x in elements), rtol=1e-3, atol=1e-3)


def test_variables_that_are_only_copied_elsewhere_are_not_copied_where_they_are() -> None:
    w = variable("cpu:3", np.ones(3))

    def copied() -> Any:
        with dflow.device("cpu:1"):
            return w + 1

    read, copy, call = plan_of(copied).items
    assert isinstance(read, Read)
    assert isinstance(copy, Copy)
    assert isinstance(call, Call)
    np.testing.assert_array_equal(dflow.jit(copied)(), [2, 2, 2])


def test_a_variable_that_is_given_back_is_a_copy_which_may_be_donated() -> None:
    w = variable("cpu:3", np.ones(3))

    @dflow.jit
    def f() -> Any:
        with dflow.device("cpu:1"):
            y = w + 1
        return y, w.read()

    _, value = f()
    value.delete()
    np.testing.assert_array_equal(w.read(), [1, 1, 1])


def test_a_value_is_moved_once_to_each_device_that_takes_it() -> None:
    v = variable("cpu:1", X)

    def f() -> Any:
        value = v.read() * 2
        with dflow.device("cpu:2"):
            a = value + 1, value + 2
        with dflow.device("cpu:3"):
            b = value + 3
        return a, b

    plan = plan_of(f)
    assert [item.device for item in plan.items if isinstance(item, Copy)] == ["cpu:2", "cpu:3"]
    assert calls(plan.items) == ["cpu:1", "cpu:2", "cpu:3"]
    (a, _), b = dflow.jit(f)()
    np.testing.assert_array_equal(a, 2 * X + 1)
    np.testing.assert_array_equal(b, 2 * X + 3)


@pytest.mark.skipif(sys.platform != "linux", reason="pages of files are those of Linux")
def test_a_value_over_several_devices_is_paged_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    rows = NamedSharding(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))
    for first in (1.0, jax.device_put(np.ones((9 << 20,), np.float32), rows)):
        table = dflow.Variable(jnp.broadcast_to(first, (9 << 20,)), max_memory=40 << 20)
        table.assign(jax.device_put(np.full((9 << 20,), 2, np.float32), rows))
        table.scatter_add(jnp.array([5]), jnp.ones(1))
        np.testing.assert_array_equal(table[4:7], [2, 3, 2])
