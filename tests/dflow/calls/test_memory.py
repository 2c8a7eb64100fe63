"""Memory of a step: at most that of `jax.jit` with the state donated by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import dflow

WIDTH, LAYERS = 64, 4
X = jnp.ones((8, WIDTH))


def loss_of(weights: Any, x: Any) -> Any:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def peak(compiled: Any) -> int:
    """Peak memory of the program, in bytes."""
    sizes = compiled.memory_analysis()
    own = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return int(sizes.argument_size_in_bytes + own + sizes.temp_size_in_bytes)


def test_a_training_step_needs_what_it_needs_with_state_donated_by_hand() -> None:
    initial = [jnp.eye(WIDTH) * (number + 1) for number in range(LAYERS)]
    weights = [dflow.Variable(value, name=f"w{number}") for number, value in enumerate(initial)]
    adam = optax.adam(1e-3)
    optimizer = dflow.Optimizer(adam, weights)

    @dflow.jit
    def ours(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: loss_of(weights, x), weights)()
        optimizer.apply(gradients)
        return value

    def theirs(weights: Any, state: Any, x: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(weights, x)
        changes, state = adam.update(gradients, state, weights)
        return optax.apply_updates(weights, changes), state, value

    by_hand = jax.jit(theirs, donate_argnums=(0, 1)).lower(initial, adam.init(initial), X).compile()
    assert peak(ours.lower(X).compile()) <= 1.02 * peak(by_hand)


@pytest.mark.device
def test_a_step_writes_into_the_buffers_of_its_variables_and_keeps_no_other() -> None:
    shape = (WIDTH, WIDTH + 1)
    w = dflow.Variable(lambda: jnp.ones(shape), name="w")
    step = dflow.jit(lambda x: w.assign_add(jnp.full(shape, x)))
    step(1.0)

    def where() -> int:
        return int(w.home.store.table.buffer(w.key).unsafe_buffer_pointer())  # type: ignore[attr-defined]

    before = where()
    for _ in range(3):
        step(1.0)
    assert where() == before
    assert len([array for array in jax.live_arrays() if array.shape == shape]) == 1
