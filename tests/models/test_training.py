"""A training step of Linen and Haiku, with statistics and dropout, with variables: equal to `jax.jit` without them."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflow

X = jax.random.normal(jax.random.key(1), (8, 4))
Y = jnp.arange(8) % 3
STEPS = 3


def cross_entropy(logits: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()


def assert_same(got: Any, want: Any) -> None:
    left, right = jax.tree.leaves(dflow.read(got)), jax.tree.leaves(want)
    assert len(left) == len(right) > 0
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.Dense(5)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


def test_flax_linen_with_batch_statistics_and_dropout() -> None:
    model, adam = Linen(), optax.adam(1e-2)
    start = model.init(jax.random.key(0), X, train=False)
    params = dflow.variables(start["params"])
    stats = dflow.variables(start["batch_stats"], trainable=False)
    key = dflow.Variable(jax.random.key(7))
    optimizer = dflow.Optimizer(adam, params)

    @dflow.jit
    def step(x: Any) -> Any:
        now, after = jax.random.split(key.read())
        key.assign(after)

        def loss() -> Any:
            given = {"params": dflow.read(params), "batch_stats": dflow.read(stats)}
            logits, changed = model.apply(given, x, train=True, mutable=["batch_stats"], rngs={"dropout": now})
            jax.tree.map(lambda v, new: v.assign(new), stats, changed["batch_stats"], is_leaf=is_variable)
            return cross_entropy(logits)

        value, gradients = dflow.value_and_grad(loss, params)()
        optimizer.apply(gradients)
        return value

    @jax.jit
    def plain(params: Any, stats: Any, key: Any, state: Any) -> Any:
        now, after = jax.random.split(key)

        def loss(params: Any) -> Any:
            given = {"params": params, "batch_stats": stats}
            logits, changed = model.apply(given, X, train=True, mutable=["batch_stats"], rngs={"dropout": now})
            return cross_entropy(logits), changed["batch_stats"]

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = adam.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), stats, after, state

    want = (start["params"], start["batch_stats"], jax.random.key(7), adam.init(start["params"]))
    for _ in range(STEPS):
        value, *want = plain(*want)
        np.testing.assert_allclose(step(X), value, rtol=1e-5)
    assert_same([params, stats], want[:2])


def is_variable(value: Any) -> bool:
    return isinstance(value, dflow.Variable)


def haiku_forward(x: Any, is_training: bool) -> Any:
    x = hk.BatchNorm(True, True, 0.9)(hk.Linear(5)(x), is_training)
    return hk.Linear(3)(jax.nn.relu(hk.dropout(hk.next_rng_key(), 0.3, x)))


def test_haiku_with_state_and_dropout() -> None:
    model, sgd = hk.transform_with_state(haiku_forward), optax.sgd(0.1, momentum=0.9)
    first_params, first_state = model.init(jax.random.key(0), X, True)
    params, state = dflow.variables(first_params), dflow.variables(first_state, trainable=False)
    optimizer = dflow.Optimizer(sgd, params)

    @dflow.jit
    def step(x: Any, key: Any) -> Any:
        def loss() -> Any:
            logits, changed = model.apply(dflow.read(params), dflow.read(state), key, x, True)
            jax.tree.map(lambda v, new: v.assign(new), state, changed, is_leaf=is_variable)
            return cross_entropy(logits)

        value, gradients = dflow.value_and_grad(loss, params)()
        optimizer.apply(gradients)
        return value

    @jax.jit
    def plain(key: Any, params: Any, state: Any, slots: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, changed = model.apply(params, state, key, X, True)
            return cross_entropy(logits), changed

        (value, after), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, slots = sgd.update(gradients, slots, params)
        return value, optax.apply_updates(params, updates), after, slots

    want = (first_params, first_state, sgd.init(first_params))
    for key in jax.random.split(jax.random.key(5), STEPS):
        value, *want = plain(key, *want)
        np.testing.assert_allclose(step(X, key), value, rtol=1e-5)
    assert_same([params, state], want[:2])
