"""Gradients and training of variables on meshes with `Explicit` or `Auto` axes, beside plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import dflow
from tests.dflow.mesh_shardings import AUTO, EXPLICIT, ROWS, WHOLE, P, X, same, spread

pytestmark = pytest.mark.once


def square_loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def plain_training(transformation: Any, parameters: Any, x: Any, steps: int, loss: Any) -> tuple[list[Any], Any, Any]:
    @jax.jit
    def step(parameters: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, x)
        updates, state = transformation.update(gradients, state, parameters)
        return value, optax.apply_updates(parameters, updates), state

    state, losses = transformation.init(parameters), []
    for _ in range(steps):
        value, parameters, state = step(parameters, state, x)
        losses.append(value)
    return losses, parameters, state


def product(p: Any, x: Any) -> Any:
    return ((x * p["w"]) ** 2).mean()


BOTH = spread(P("d", "m"), AUTO, AUTO)
TRANSFORMATIONS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1)),
}
#: A loss, and its parameters and their shardings, with that of the examples as `x`: replicated, and sharded.
TRAININGS: dict[str, tuple[Callable[[Any, Any], Any], dict[str, Any], dict[str, NamedSharding]]] = {
    "data parallel": (
        lambda p, x: ((x @ p["w"] + p["b"]) ** 2).mean(),
        {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)},
        {"w": WHOLE, "b": WHOLE, "x": ROWS},
    ),
    "divided": (product, {"w": np.ones((16, 4), np.float32)}, {"w": ROWS, "x": ROWS}),
    "divided, auto": (product, {"w": np.ones((16, 4), np.float32)}, {"w": BOTH, "x": BOTH}),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
@pytest.mark.parametrize(("loss", "first", "places"), TRAININGS.values(), ids=TRAININGS)
def test_training_without_a_mesh_in_force(loss: Any, first: Any, places: Any, transformation: Any) -> None:
    x = jax.device_put(X, places["x"])
    variables = {name: dflow.Variable(first[name], sharding=places[name], name=name) for name in first}
    optimizer = dflow.Optimizer(transformation, variables)

    @dflow.jit
    def step(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss(dflow.read(variables), x), variables)()
        for name, variable in variables.items():
            if EXPLICIT in places[name].mesh.axis_types:
                assert jax.typeof(gradients[name]) == jax.typeof(variable.read())
        optimizer.apply(gradients)
        return value

    losses, parameters, state = plain_training(
        transformation, {name: jax.device_put(first[name], places[name]) for name in first}, x, 4, loss
    )
    np.testing.assert_allclose([step(x) for _ in range(4)], losses, rtol=1e-5)
    same(dflow.read(variables), parameters)
    slots = [slot for slot in jax.tree.leaves(dflow.read(optimizer.slots)) if slot.ndim]
    same(slots, [slot for slot in jax.tree.leaves(state) if slot.ndim])
    for slot in slots:
        place = places["w" if slot.ndim == 2 else "b"]
        assert jax.typeof(slot).sharding == jax.typeof(jax.device_put(np.zeros(slot.shape), place)).sharding
        assert slot.addressable_shards[0].data.shape == place.shard_shape(slot.shape)


def test_gradients_accumulate_in_a_scan_as_they_are_spread() -> None:
    w, total = (dflow.Variable(np.full((4, 4), 0.1, np.float32), sharding=WHOLE) for _ in range(2))
    batches = jax.device_put(np.stack([X, X + 1]), spread(P(None, "d"), EXPLICIT))

    @dflow.jit
    def step(batches: Any) -> None:
        total.assign(jnp.zeros((4, 4)))

        def one(carry: Any, x: Any) -> Any:
            assert str(jax.typeof(x)) == "float32[16@d,4]"
            total.assign_add(dflow.grad(lambda: square_loss(w, x), [w])()[0])
            return carry, None

        jax.lax.scan(one, 0, batches)

    step(batches)
    want = sum(jax.grad(square_loss)(np.full((4, 4), 0.1, np.float32), x) for x in (X, X + 1))
    np.testing.assert_allclose(total, want, rtol=1e-5)
    assert total.read().sharding.is_equivalent_to(WHOLE, 2)


@pytest.mark.parametrize("place", [None, WHOLE], ids=["nowhere", "whole"])
def test_a_gradient_step_with_in_shardings(place: Any) -> None:
    first = jnp.full((4, 2), 0.1)
    w = dflow.Variable(first, sharding=place)
    step = dflow.jit(lambda x: w.assign_sub(dflow.grad(lambda: square_loss(w, x), [w])()[0]), in_shardings=ROWS)
    plain = jax.jit(lambda w, x: w - jax.grad(square_loss)(w, x))
    want = first
    for _ in range(2):
        step(X)
        want = plain(want, X)
    np.testing.assert_allclose(w, want, rtol=1e-5)


def test_the_gradient_of_a_variable_on_no_mesh_is_refused_with_a_remedy() -> None:
    w = dflow.Variable(jnp.ones((4, 2)))
    with pytest.raises(Exception, match="Contracting dimensions are sharded") as caught:
        dflow.jit(lambda x: dflow.grad(lambda: square_loss(w, x), [w])())(jax.device_put(X, ROWS))
    assert "PartitionSpec()" in "".join(caught.value.__notes__)
