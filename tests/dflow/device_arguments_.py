"""Arguments and results of functions over several devices of one process; run by `test_several_devices.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from tests.dflow.on_devices import X, on, variable
from tests.several_devices import DEVICES


@pytest.mark.parametrize("place", [0, 1, 2, 7])
def test_an_argument_may_lie_anywhere(place: int) -> None:
    v, w = variable("cpu:1", X), variable("cpu:2", X)

    @dflow.jit
    def f(x: Any, z: Any) -> Any:
        v.assign_add(x)
        return v + x, w * x, w - z

    # Over explicit axes the argument's type would name the mesh, which a variable on no mesh refuses.
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    for x in (X, jax.device_put(X, jax.devices()[place]), jax.device_put(X, spread)):
        before = np.asarray(v)
        one, other, third = f(x, x)
        assert (on(one), on(other), on(third)) == ("cpu:1", "cpu:2", "cpu:2")
        np.testing.assert_array_equal(one, before + 2 * X)
        np.testing.assert_array_equal(other, X * X)
        np.testing.assert_array_equal(third, 0 * X)


@pytest.mark.parametrize("place", [None, 3, 5])
def test_a_donated_argument_is_gone(place: int | None) -> None:
    v = variable("cpu:3", X)

    def step(x: Any) -> Any:
        v.assign_add(x)
        return x * 2

    f = dflow.jit(step, donate_argnums=0)
    for _ in range(2):
        x = jnp.asarray(X) if place is None else jax.device_put(X, jax.devices()[place])
        np.testing.assert_array_equal(f(x), 2 * X)
        assert x.is_deleted() == (place == 3)


def test_a_value_read_stays_when_the_variable_is_written() -> None:
    v, w = variable("cpu:1", X), variable("cpu:2", X)

    @dflow.jit
    def f() -> Any:
        before = v.read()
        v.assign(before * 2)
        w.assign(before)
        return before

    kept = [f() for _ in range(3)]
    for times, array in enumerate(kept):
        np.testing.assert_array_equal(array, X * 2**times)
    np.testing.assert_array_equal(w, X * 4)


def test_keys_and_plain_numbers_cross_devices() -> None:
    with dflow.device("cpu:1"):
        key = dflow.Variable(jax.random.key(0))

    @dflow.jit
    def f(scale: Any) -> Any:
        with dflow.device("cpu:2"):
            return jax.random.normal(key.read(), (3,)) * scale

    y = f(2.0)
    assert on(y) == "cpu:2"
    np.testing.assert_array_equal(y, jax.random.normal(jax.random.key(0), (3,)) * 2.0)


def test_a_queue_is_the_hosts_and_passes_values_between_devices() -> None:
    queue = dflow.FIFOQueue(4, [jax.ShapeDtypeStruct((2, 3), jnp.float32)])
    v, w = variable("cpu:1", X), variable("cpu:2", 0 * X)

    @dflow.jit
    def put() -> None:
        queue.enqueue([v.read() * 2])

    @dflow.jit
    def take() -> Any:
        [value] = queue.dequeue()
        w.assign_add(value)
        with dflow.device("cpu:3"):
            return value + 1

    for times in (1, 2):
        put()
        assert on(take()) == "cpu:3"
        np.testing.assert_array_equal(w, 2 * times * X)


def test_an_argument_on_another_device_than_a_variable_names_the_variable() -> None:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    w = dflow.Variable(jnp.ones(8), name="spread", sharding=spread)
    here, there = jnp.ones(8), jax.device_put(jnp.ones(8), jax.devices()[3])
    for step in (w.assign_add, lambda x: x * w.read()):
        run = dflow.jit(step)
        for before in ([], [here]):
            for x in before:
                run(x)
            with pytest.raises(ValueError, match=r"incompatible devices .* variable 'spread' with shape") as caught:
                run(there)
            assert "_dflow" not in str(caught.value)


def test_all_reduce_divides_the_ids_of_strings_over_the_devices() -> None:
    names = np.array([f"user-{number % 5}" for number in range(2 * DEVICES)])
    batch = {"user": names, "wanted": np.arange(2.0 * DEVICES, dtype=np.float32)}
    losses = []
    for _ in range(2):
        table = dflow.Embedding(64, 2, vocabulary=dflow.Vocabulary(), name="names")
        sgd = dflow.Optimizer(optax.sgd(0.1), [table], name="sgd")

        @dflow.jit
        def step(batch: Any, table: Any = table, sgd: Any = sgd) -> Any:
            found = table.find(batch["user"])

            def loss() -> Any:
                return ((table(found).sum(-1) - batch["wanted"]) ** 2).mean()

            value, gradients = dflow.value_and_grad(loss, [table])()
            sgd.apply(gradients, found=found)
            return value

        strategy = dflow.distributed.AllReduce(dflow.connect())
        assert strategy.mesh.size == DEVICES
        run = strategy.run(step, iter([batch] * 3), steps=3) if not losses else map(step, [batch] * 3)
        losses.append([*map(float, run)])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize("given", ["cpu:2", "cpu:3"])
def test_a_donated_argument_is_given_up_only_where_it_is_used(given: str) -> None:
    w = variable("cpu:2", np.ones((16, 4)), name="w")
    number = int(given.partition(":")[2])

    @partial(dflow.jit, donate_argnums=0)
    def f(x: Any) -> Any:
        with dflow.device("cpu:2"):
            return x * 2 + w

    for _ in range(2):
        x = jax.device_put(jnp.ones((16, 4)), jax.devices()[number])
        np.testing.assert_array_equal(f(x), 3.0 * np.ones((16, 4)))
        assert x.is_deleted() == (given == "cpu:2")
