"""Optimizers over gradients of lookups: optax's results, by rows where the rule allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.state.resources import Variable
from tests.tracing.rows.lookup_table import IDS, SCALE, SHAPE, TABLE, grown, loss_of

BY_ROWS = {
    "sgd": optax.sgd(0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.01, 3)),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "one of two": optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, ["a", "b"]),
    "adagrad": optax.adagrad(0.1),
    "global norm": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "clipped adagrad": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
    "clip": optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "no nans": optax.chain(optax.zero_nans(), optax.adagrad(0.1)),
    "frozen": optax.set_to_zero(),
    "finite adagrad": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)), 2),
    "for two steps": optax.conditionally_transform(optax.scale(-0.1), lambda step: step < 2),
}
DENSE = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "every second step": optax.MultiSteps(optax.sgd(0.1), 2),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
}


@pytest.mark.parametrize("name", [*BY_ROWS, *DENSE])
def test_an_optimizer_does_what_optax_does(name: str, table: Variable, scale: Variable) -> None:
    transformation = BY_ROWS.get(name) or DENSE[name]
    optimizer = dflow.Optimizer(transformation, [table, scale])

    @dflow.jit
    def step(i: Any) -> None:
        optimizer.apply(dflow.grad(lambda: jnp.sum(jnp.sin(table[i] * scale.read())), [table, scale])())

    assert (grown(step, IDS) == []) == (name in BY_ROWS)

    @jax.jit
    def plain_step(params: Any, state: Any, i: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sin(p[0][i] * p[1]).sum())(params)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = [TABLE, SCALE]
    state = transformation.init(params)
    for turn in range(3):
        step(IDS + turn)
        params, state = plain_step(params, state, IDS + turn)
    np.testing.assert_allclose(table.read(), params[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(scale.read(), params[1], rtol=1e-5, atol=1e-6)
    kept = jax.tree.leaves(dflow.read(optimizer.slots))
    for got, wanted in zip(kept, jax.tree.leaves(state), strict=True):
        if not jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


#: Branches over a gradient, a gradient of other rows, the table and a slot; each gives an update and a new slot.
BRANCHES: dict[str, tuple[bool, Callable[[Any, Any, Any, Any], Any]]] = {
    "one of two": (True, lambda g, h, t, s: (g, s)),
    "both": (True, lambda g, h, t, s: (g + 0 * g**2, s + g * t)),
    "none": (True, lambda g, h, t, s: (jnp.zeros_like(t), s)),
    "the other": (False, lambda g, h, t, s: (h, s)),
    "every row": (False, lambda g, h, t, s: (g, 2 * s)),
    "dense": (False, lambda g, h, t, s: (g - jnp.flip(g), s)),
    "nested": (True, lambda g, h, t, s: jax.lax.cond(jnp.sum(g) > 0, lambda: (-g, s * 1.0), lambda: (g, s + g))),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("first", [True, False])
def test_branches_of_rows(name: str, first: bool, table: Variable) -> None:
    is_rows, made = BRANCHES[name]
    slot = dflow.Variable(TABLE + 1, name="slot")

    def otherwise(g: Any, h: Any, t: Any, s: Any) -> Any:
        return g * 0.5, s + g * g

    @dflow.jit
    def step(ids: Any, which: Any) -> Any:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        h = dflow.grad(lambda: loss_of(table, ids[:2] + 4), table)()
        t, s = table.read(), slot.read()
        update, new = jax.lax.cond(which, lambda: made(g, h, t, s), lambda: otherwise(g, h, t, s))
        table.assign_add(update)
        slot.assign(new)
        return update, new, optax.tree.norm(update)

    g, h = jax.grad(loss_of)(TABLE, IDS), jax.grad(loss_of)(TABLE, IDS[:2] + 4)
    update, new = (made if first else otherwise)(g, h, TABLE, TABLE + 1)
    got = step(IDS, first)
    for one, wanted in zip(got, (update, new, optax.tree.norm(update)), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(table.read(), TABLE + update, rtol=1e-5)
    np.testing.assert_allclose(slot.read(), new, rtol=1e-5)
    quiet = dflow.jit(lambda ids, which: step(ids, which) and None)
    assert (grown(quiet, IDS, first) == []) == is_rows


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_row_gradients_that_were_asked_for_are_applied_as_rows(name: str, table: Variable) -> None:
    """Outside of traced code too."""
    transformation = BY_ROWS.get(name) or DENSE[name]
    optimizer = dflow.Optimizer(transformation, [table])
    gradient = RowGradient(jnp.array([2, 2, -1]), jnp.ones((3, 2)), SHAPE)
    dense = jnp.zeros(SHAPE).at[jnp.array([2, 2, 12])].add(1.0)
    optimizer.apply([gradient])
    updates, _ = transformation.update([dense], transformation.init([TABLE]), [TABLE])
    np.testing.assert_allclose(table.read(), TABLE + updates[0], rtol=1e-6)
    assert (grown(lambda: optimizer.apply([gradient])) == []) == (name in BY_ROWS)


LAZY = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("as_rows", [True, False], ids=["rows", "dense"])
def test_lazy_rows_are_left_as_they_are(name: str, as_rows: bool, table: Variable) -> None:
    """Rows without a gradient keep their values and slots, for every form of the gradient."""
    transformation = LAZY[name]
    optimizer = dflow.Optimizer(transformation, [table], lazy_rows=True)

    @dflow.jit
    def step(i: Any) -> None:
        gradient = dflow.grad(lambda: loss_of(table, i), table)()
        optimizer.apply([gradient if as_rows else jnp.flip(jnp.flip(gradient))])

    assert (grown(step, IDS) == []) == as_rows
    values = [TABLE]
    state = transformation.init(values)
    for turn in range(3):
        step(IDS + turn)
        gradient = jax.grad(loss_of)(values[0], IDS + turn)
        updates, after = transformation.update([gradient], state, values)
        touched = (gradient != 0).any(axis=1, keepdims=True)

        def kept(new: Any, old: Any, touched: Any = touched) -> Any:
            return jnp.where(touched, new, old) if new.shape == SHAPE else new

        values = [kept(values[0] + updates[0], values[0])]
        state = jax.tree.map(kept, after, state)
    np.testing.assert_allclose(table.read(), values[0], rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(dflow.read(optimizer.slots)), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
