"""Gradients of lookups are dense arrays to every program, and are kept as rows where rows suffice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import dflow
from dflow.tracing.rows import keep_rows
from dflow.tracing.state.resources import Variable
from tests.effort import examples
from tests.tracing.rows.lookup_table import IDS, SCALE, SHAPE, TABLE, grown, loss_of

#: Uses of a gradient and of a second one; each gives an array of their shape, or a number.
USES: dict[str, Callable[[Any, Any], Any]] = {
    "global norm": lambda g, h: optax.tree.norm([g, h]),
    "clipped to a range without zero": lambda g, h: jnp.clip(g, 0.1, 0.2),
    "clipped by block": lambda g, h: optax.clip_by_block_rms(0.1).update([g, h], optax.EmptyState())[0][0],
    "raveled": lambda g, h: ravel_pytree({"g": g, "h": h})[0],
    "over itself": lambda g, h: g / (jnp.abs(g) + 1e-6),
    "by columns": lambda g, h: g * SCALE,
    "largest": lambda g, h: jnp.max(jnp.abs(g)) + jnp.max(-jnp.abs(h)) + jnp.min(g),
    "finite": lambda g, h: jnp.where(jnp.isfinite(g).all(), g, 0 * h),
    "any": lambda g, h: jnp.any(g != 0) + jnp.any(h > 100),
    "sum of rows": lambda g, h: (g * (g**2).sum(axis=1, keepdims=True)).sum(),
    "sum of columns": lambda g, h: g.sum(axis=0),
    "largest of rows": lambda g, h: jnp.max(g, axis=1),
    "transposed": lambda g, h: g.T @ h,
    "a row": lambda g, h: g[3],
    "zeroed": lambda g, h: optax.zero_nans().update([g], optax.zero_nans().init([g]))[0][0],
    "in a jit": jax.jit(lambda g, h: g * 2 + h),
    "in a branch": lambda g, h: jax.lax.cond(g.sum() > 0, lambda: g, lambda: h),
    "in a vmap": lambda g, h: jax.vmap(lambda s: s * g + h)(jnp.arange(3.0)),
    "summed in a loop": lambda g, h: jax.lax.fori_loop(0, 3, lambda i, acc: acc + g, jnp.zeros_like(g)),
    "with a NumPy array": lambda g, h: g * np.ones(SHAPE, np.float32) + jnp.where(np.ones(SHAPE) > 0, h, g),
    "largest of booleans": lambda g, h: jnp.max(g > 0) & jnp.min(g != 0) & jnp.any(h != 0),
    "least of whole numbers": lambda g, h: jnp.min(jnp.abs(g * 10).astype(jnp.uint32)),
    "bits of whole numbers": lambda g, h: jax.lax.reduce((g * 10).astype(int), np.int32(0), jax.lax.bitwise_or, (0, 1)),
    "permuted": lambda g, h: jnp.sum(jax.lax.reshape(g, SHAPE, dimensions=(1, 0)) * TABLE),
    "zero over zero": lambda g, h: g / jnp.abs(g),
    "sign of zero": lambda g, h: jnp.min(1 / (g * -1.0)),
    "relu": lambda g, h: jax.nn.relu(g) - jax.nn.softplus(h),
}


@cache
def of_arrays() -> dict[str, Any]:
    """Results of each use with dense gradients."""
    g, h = jax.grad(loss_of)(TABLE, IDS), jax.grad(loss_of)(TABLE, IDS[:2] + 4)
    return {name: use(g, h) for name, use in USES.items()}


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "eager"])
def test_a_gradient_is_an_array_to_any_use(compiled: bool, table: Variable) -> None:
    def used(ids: Any) -> Any:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        h = dflow.grad(lambda: loss_of(table, ids[:2] + 4), table)()
        return {name: use(g, h) for name, use in USES.items()}

    got = (dflow.jit(used) if compiled else used)(IDS)
    for name, wanted in of_arrays().items():
        np.testing.assert_allclose(got[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)


#: Ops of random programs, from two values to one.
OPS: list[Callable[[Any, Any], Any]] = [
    jnp.add,
    jnp.subtract,
    jnp.multiply,
    jnp.maximum,
    lambda a, b: a / (1 + b * b),
    lambda a, b: jnp.where(a > 0.1, a, b),
    lambda a, b: jnp.where(a == 0, b, a),
    lambda a, b: -2 * a,
    lambda a, b: a.astype(jnp.bfloat16).astype(jnp.float32),
    lambda a, b: jnp.sqrt(jnp.abs(a)),
    lambda a, b: jnp.clip(a, -0.3, 0.2),
    lambda a, b: a * jnp.sum(b),
    lambda a, b: a * jnp.sum(b * b, axis=1, keepdims=True),
    lambda a, b: a + jnp.max(b),
]


@settings(max_examples=examples(9), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(range(len(OPS))), st.integers(0, 20), st.integers(0, 20)), max_size=8))
def test_a_random_rule_does_to_values_and_slots_what_it_does_to_arrays(rule: list[tuple[int, int, int]]) -> None:
    """The rule computes an update and a new slot from the gradients of two lookups, the table and the slot."""

    def after(g: Any, h: Any, t: Any, s: Any) -> tuple[Any, Any]:
        values = [g, h, t, s]
        for number, first, second in rule:
            values.append(OPS[number](values[first % len(values)], values[second % len(values)]))
        return values[-1], values[-2]

    t, s = dflow.Variable(TABLE, name="t"), dflow.Variable(TABLE + 1, name="s")

    @dflow.jit
    def step(ids: Any) -> None:
        g = dflow.grad(lambda: loss_of(t, ids), t)()
        h = dflow.grad(lambda: loss_of(t, ids[:2] + 4), t)()
        update, slot = after(g, h, t.read(), s.read())
        t.assign_add(update)
        s.assign(slot)

    step(IDS)
    g, h = jax.grad(loss_of)(TABLE, IDS), jax.grad(loss_of)(TABLE, IDS[:2] + 4)
    update, slot = after(g, h, TABLE, TABLE + 1)
    np.testing.assert_allclose(t.read(), TABLE + update, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(s.read(), slot, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", ["zeros", "a gradient"])
def test_microbatches_summed_in_a_loop_stay_rows(first: str, table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)), {"t": table})

    def gradient(ids: Any) -> Any:
        return dflow.grad(lambda: loss_of(table, ids), {"t": table})()

    @dflow.jit
    def step(batches: Any) -> Any:
        start = {"t": jnp.zeros(SHAPE)} if first == "zeros" else gradient(batches[0])

        def add(total: Any, ids: Any) -> tuple[Any, Any]:
            return jax.tree.map(lambda t, g: t + g / 2, total, gradient(ids)), ids.sum()

        total, sums = jax.lax.scan(add, start, batches)
        optimizer.apply(total)
        return optax.tree.norm(total), sums

    batches = jnp.array([[3, 3], [4, 1]])
    grads = [jax.grad(loss_of)(TABLE, ids) for ids in batches]
    total = sum(g / 2 for g in grads) + (0 if first == "zeros" else grads[0])
    # The loop reads the table, which is not sent, and no other value has its shape.
    assert set(grown(step, batches)) <= {"var.read"}
    norm, sums = step(batches)
    np.testing.assert_allclose(norm, optax.tree.norm(total), rtol=1e-5)
    np.testing.assert_array_equal(sums, batches.sum(1))
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))
    updates, _ = transformation.update(total, transformation.init(TABLE))
    np.testing.assert_allclose(table.read(), TABLE + updates, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.5, None])
def test_a_sum_that_decays_or_is_read_in_its_loop_is_not_taken_for_one(decay: float | None, table: Variable) -> None:
    def add(total: Any, gradient: Any) -> tuple[Any, Any]:
        return (total * decay if decay else total) + gradient, total.sum()

    @dflow.jit
    def summed(batches: Any) -> Any:
        return jax.lax.scan(
            lambda c, ids: add(c, dflow.grad(lambda: loss_of(table, ids), table)()), jnp.zeros(SHAPE), batches
        )

    batches = jnp.array([[3, 3], [4, 1]])
    got = summed(batches)
    wanted = jax.lax.scan(lambda c, ids: add(c, jax.grad(loss_of)(TABLE, ids)), jnp.zeros(SHAPE), batches)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, wanted)


def test_whole_numbers_that_a_float_cannot_hold_are_rounded_in_every_row(table: Variable) -> None:
    numbers = dflow.Variable(jnp.full(SHAPE, 257), name="numbers")

    @dflow.jit
    def step(ids: Any) -> None:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        numbers.assign((numbers.read().astype(jnp.bfloat16) + 0 * g.astype(jnp.bfloat16)).astype(jnp.int32))

    step(IDS)
    np.testing.assert_array_equal(numbers.read(), np.full(SHAPE, 256))


def test_a_table_of_one_row(table: Variable) -> None:
    row, slot = dflow.Variable(jnp.ones((1, 4)), name="row"), dflow.Variable(jnp.ones(1), name="slot")
    step = dflow.jit(lambda i: slot.read().squeeze() * dflow.grad(lambda: jnp.sum(row[i]), row)().sum())
    assert step(jnp.array([0, 0])) == 8.0


@pytest.mark.parametrize("taken", ["as rows", "dense"])
def test_a_chain_of_5000_ops_on_a_gradient_has_no_limit(taken: str, table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> Any:
        g, x = dflow.grad(lambda: loss_of(table, ids), table)(), table.read()
        for _ in range(2500):
            g, x = g * 0.999, x * 0.999
        if taken == "as rows":
            table.assign_add(g * x)
        return g.T if taken == "dense" else None

    nodes = dflow.graph(step, IDS).graph.nodes
    assert sum(node.op.name == "jax.mul" for node in nodes) >= 2500
    assert any(node.op.name == "jax.transpose" for node in nodes) == (taken == "dense")
    assert any(node.op.name == "var.scatter_add" for node in nodes) == (taken == "as rows")


def test_one_number_in_arrays_of_several_shapes(table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> Any:
        g, x = dflow.grad(lambda: loss_of(table, ids), table)(), jnp.full(SHAPE[:1], ids[0].astype(jnp.float32))
        return jnp.sum(g.sum(axis=1) * x) + jnp.sum(g * jnp.broadcast_to(x[:, None], SHAPE))

    np.testing.assert_allclose(step(IDS), 6 * jax.grad(loss_of)(TABLE, IDS).sum(), rtol=1e-5)


def test_each_body_of_a_program_is_searched_once(monkeypatch: pytest.MonkeyPatch, table: Variable) -> None:
    seen: list[Any] = []
    search = keep_rows.inner_parts
    monkeypatch.setattr(keep_rows, "inner_parts", lambda params: seen.append(params) or search(params))

    def nested(depth: int, x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, y: nested(depth - 1, y), x) if depth else x * 2

    def step(ids: Any) -> Any:
        return nested(6, dflow.grad(lambda: loss_of(table, ids), table)())

    dflow.graph(dflow.jit(step), IDS)
    assert sum("length" in params for params in seen) == 6 + 1  # the outermost body is searched when it runs


def test_as_many_lookups_as_rows_are_no_fewer(table: Variable) -> None:
    ids = jnp.arange(20) % 13
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [table])

    @dflow.jit
    def step() -> None:
        optimizer.apply(dflow.grad(lambda: loss_of(table, ids), [table])())

    assert "rows_to_dense" in " ".join(grown(step))
    step()
    transformation = optax.adagrad(0.1)
    updates, _ = transformation.update(jax.grad(loss_of)(TABLE, ids), transformation.init(TABLE))
    np.testing.assert_allclose(table.read(), TABLE + updates, rtol=1e-5)


def test_no_lookups_change_nothing(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)), [table])
    none = jnp.zeros(0, jnp.int32)
    dflow.jit(lambda i: optimizer.apply(dflow.grad(lambda: loss_of(table, i), [table])()))(none)
    np.testing.assert_array_equal(table.read(), TABLE)
