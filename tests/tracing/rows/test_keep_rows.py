"""Gradients of lookups as the dense arrays they are to every program, and as rows where that is enough."""

from __future__ import annotations

import threading
import warnings
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
from dflow.lowering.passes.prune import Prune
from dflow.testing import memory_cluster
from dflow.tracing.rows import keep_rows, rows_to_dense
from dflow.tracing.rows.row_gradient import RowGradient
from dflow.tracing.state.resources import Variable
from tests.effort import examples

SHAPE = (13, 2)
TABLE = jnp.arange(26, dtype=jnp.float32).reshape(SHAPE) / 26
SCALE = jnp.array([1.0, -2.0])
IDS = jnp.array([3, 3, 0, -1, 11])


@pytest.fixture
def table() -> Variable:
    return dflow.Variable(TABLE, name="table")


@pytest.fixture
def scale() -> Variable:
    return dflow.Variable(SCALE, name="scale")


def grown(fn: Any, *args: Any) -> list[str]:
    """The ops of a function's graph that give an array of the table's shape."""
    graph = Prune()(dflow.graph(fn, *args).graph)
    return [node.op.name for node in graph.nodes for v in node.outputs if getattr(v.type, "shape", None) == SHAPE]


def loss_of(table: Any, ids: Any) -> Any:
    return (jnp.sin(jnp.asarray(table)[ids] * 3) ** 2).sum()


def test_two_microbatches_are_summed_and_their_norm_is_that_of_the_gradient() -> None:
    e = dflow.Variable(jnp.ones((10, 2)), name="e")
    optimizer = dflow.Optimizer(optax.sgd(1.0), [e])

    @dflow.jit
    def step(ids: Any, more: Any) -> Any:
        g = dflow.grad(lambda: jnp.sum(e[ids]), [e])()
        h = dflow.grad(lambda: jnp.sum(e[more]), [e])()
        optimizer.apply(jax.tree.map(jnp.add, g, h))
        return optax.tree.norm(g)

    assert float(step(jnp.array([3, 3]), jnp.array([5, 1]))) == pytest.approx(8**0.5)
    wanted = jnp.ones((10, 2)).at[jnp.array([3, 3, 5, 1])].add(-1.0)
    np.testing.assert_array_equal(e.read(), wanted)


#: What users do with a gradient and with another one: each gives an array of its shape, or a number.
USES: dict[str, Callable[[Any, Any], Any]] = {
    "scaled": lambda g, h: -0.5 * g / 3,
    "added": lambda g, h: jax.tree.map(jnp.add, g, 2 * h),
    "subtracted": lambda g, h: g - h,
    "multiplied": lambda g, h: g * h,
    "global norm": lambda g, h: optax.tree.norm([g, h]),
    "clipped by the global norm": lambda g, h: optax.clip_by_global_norm(0.3).update([g, h], None)[0][1],
    "clipped": lambda g, h: jnp.clip(g, -0.1, 0.2),
    "clipped to a range without zero": lambda g, h: jnp.clip(g, 0.1, 0.2),
    "clipped by block": lambda g, h: optax.clip_by_block_rms(0.1).update([g, h], optax.EmptyState())[0][0],
    "raveled": lambda g, h: ravel_pytree({"g": g, "h": h})[0],
    "cast": lambda g, h: g.astype(jnp.bfloat16).astype(jnp.float32),
    "squared": lambda g, h: g**2 + jnp.square(h),
    "over itself": lambda g, h: g / (jnp.abs(g) + 1e-6),
    "over the table": lambda g, h: g / (1 + TABLE),
    "with the table": lambda g, h: g + 0.1 * TABLE,
    "by columns": lambda g, h: g * SCALE,
    "plus a number": lambda g, h: g + 1.0,
    "largest": lambda g, h: jnp.max(jnp.abs(g)) + jnp.max(-jnp.abs(h)) + jnp.min(g),
    "finite": lambda g, h: jnp.where(jnp.isfinite(g).all(), g, 0 * h),
    "any": lambda g, h: jnp.any(g != 0) + jnp.any(h > 100),
    "mean": lambda g, h: g.mean(),
    "sum of rows": lambda g, h: (g * (g**2).sum(axis=1, keepdims=True)).sum(),
    "sum of columns": lambda g, h: g.sum(axis=0),
    "largest of rows": lambda g, h: jnp.max(g, axis=1),
    "transposed": lambda g, h: g.T @ h,
    "a row": lambda g, h: g[3],
    "selected": lambda g, h: jnp.where(g > 0, g, h),
    "exponential": lambda g, h: jnp.exp(g) - 1,
    "zeroed": lambda g, h: optax.zero_nans().update([g], optax.zero_nans().init([g]))[0][0],
    "in a jit": jax.jit(lambda g, h: g * 2 + h),
    "in a branch": lambda g, h: jax.lax.cond(g.sum() > 0, lambda: g, lambda: h),
    "in a vmap": lambda g, h: jax.vmap(lambda s: s * g + h)(jnp.arange(3.0)),
    "differentiated": lambda g, h: jax.grad(lambda s: ((s * g + h) ** 2).sum())(2.0),
    "summed in a loop": lambda g, h: jax.lax.fori_loop(0, 3, lambda i, acc: acc + g, jnp.zeros_like(g)),
    "with a NumPy array": lambda g, h: g * np.ones(SHAPE, np.float32) + jnp.where(np.ones(SHAPE) > 0, h, g),
    "largest of booleans": lambda g, h: jnp.max(g > 0) & jnp.min(g != 0) & jnp.any(h != 0),
    "least of whole numbers": lambda g, h: jnp.min(jnp.abs(g * 10).astype(jnp.uint32)),
    "permuted": lambda g, h: jnp.sum(jax.lax.reshape(g, SHAPE, dimensions=(1, 0)) * TABLE),
    "zero over zero": lambda g, h: g / jnp.abs(g),
    "sign of zero": lambda g, h: jnp.min(1 / (g * -1.0)),
    "relu": lambda g, h: jax.nn.relu(g) - jax.nn.softplus(h),
}


@cache
def of_arrays() -> dict[str, Any]:
    """What each use gives of the dense gradients."""
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
    """The rule makes an update and a slot of the gradients of two lookups, the table and the slot."""

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


BY_ROWS = {
    "sgd": optax.sgd(0.1),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.01, 3)),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
    "chain": optax.chain(optax.scale(3.0), optax.scale_by_learning_rate(0.1)),
    "one of two": optax.multi_transform({"a": optax.sgd(0.1), "b": optax.adam(0.1)}, ["a", "b"]),
    "adagrad": optax.adagrad(0.1),
    "global norm": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
    "clipped adagrad": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)),
    "clip": optax.chain(optax.clip(0.1), optax.sgd(0.1)),
    "block": optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "sign": optax.sign_sgd(0.1),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
    "no nans": optax.chain(optax.zero_nans(), optax.adagrad(0.1)),
    "frozen": optax.set_to_zero(),
    "finite sgd": optax.apply_if_finite(optax.sgd(0.1), 2),
    "finite adagrad": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1)), 2),
    "for two steps": optax.conditionally_transform(optax.scale(-0.1), lambda step: step < 2),
}
DENSE = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "adafactor": optax.adafactor(1e-2),
    "decay": optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "lars": optax.lars(0.1),
    "finite adam": optax.apply_if_finite(optax.adam(1e-2), 2),
    "every second step": optax.MultiSteps(optax.sgd(0.1), 2),
    "clipped by the parameters": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
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


def test_a_gradient_that_is_not_finite_changes_nothing(table: Variable) -> None:
    transformation = optax.apply_if_finite(optax.adagrad(0.1), 2)
    optimizer = dflow.Optimizer(transformation, [table])

    @dflow.jit
    def step(ids: Any, factor: Any) -> None:
        optimizer.apply(dflow.grad(lambda: loss_of(table, ids) * factor, [table])())

    values = [TABLE]
    state = transformation.init(values)
    for factor in (1.0, np.nan, np.inf, 2.0):
        assert grown(step, IDS, factor) == []
        step(IDS, factor)
        gradient = jax.grad(lambda v, factor=factor: loss_of(v, IDS) * factor)(values[0])
        updates, state = transformation.update([gradient], state, values)
        values = [optax.apply_updates(values, updates)[0]]
        np.testing.assert_allclose(table.read(), values[0], rtol=1e-5)
    for got, wanted in zip(jax.tree.leaves(dflow.read(optimizer.slots)), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


#: Branches of a gradient, another by other indices, the table and a slot: an update and a new slot.
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
    # The loop reads the table, which is not sent, and nothing else has its shape.
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


def test_steps_in_a_loop_update_rows(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [table])

    def one(carry: Any, ids: Any) -> tuple[Any, Any]:
        value, gradients = dflow.value_and_grad(lambda: loss_of(table, ids), [table])()
        optimizer.apply(gradients)
        return carry, value

    train = dflow.jit(lambda batches: jax.lax.scan(one, 0, batches)[1])
    batches = jnp.array([[3, 3], [4, 1], [3, 1]])
    assert "rows_to_dense" not in str(dflow.graph(train, batches))
    train(batches)
    values, transformation = TABLE, optax.adagrad(0.1)
    state = transformation.init(values)
    for ids in batches:
        updates, state = transformation.update(jax.grad(loss_of)(values, ids), state)
        values += updates
    np.testing.assert_allclose(table.read(), values, rtol=1e-5)


def test_a_value_that_is_needed_after_its_variable_was_written_is_of_before(table: Variable) -> None:
    slot = dflow.Variable(TABLE + 1, name="slot")

    @dflow.jit
    def step(ids: Any) -> Any:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        before = slot.read()
        both = before + g
        slot.assign(before + g * g)
        table.assign_add(g)
        return both, before, slot.read()

    both, before, after = step(IDS)
    g = jax.grad(loss_of)(TABLE, IDS)
    np.testing.assert_allclose(both, TABLE + 1 + g, rtol=1e-5)
    np.testing.assert_array_equal(before, TABLE + 1)
    np.testing.assert_allclose(after, TABLE + 1 + g * g, rtol=1e-5)


def old_times(write: Callable[[Any, Any], None], made: Callable[[Any], Any]) -> Any:
    """What is made of a slot's value before a write, times a gradient after it; and the same by JAX."""
    table, slot = dflow.Variable(TABLE, name="table"), dflow.Variable(TABLE + 1, name="slot")

    @dflow.jit
    def step(ids: Any) -> Any:
        old, g = made(slot.read()), dflow.grad(lambda: loss_of(table, ids), table)()
        write(slot, ids)
        table.assign_add(old * g)
        return jnp.sum(old * g)

    got, g = step(IDS), jax.grad(loss_of)(TABLE, IDS)
    np.testing.assert_allclose(table.read(), TABLE + made(TABLE + 1) * g, rtol=1e-5)
    return got, jnp.sum(made(TABLE + 1) * g)


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda slot, ids: slot.assign(0 * TABLE),
    "assign_add": lambda slot, ids: slot.assign_add(TABLE),
    "in a cond": lambda slot, ids: jax.lax.cond(ids[0] > 0, lambda: slot.assign(0 * TABLE), lambda: None),
    "in a jit": lambda slot, ids: jax.jit(lambda: slot.scatter_update(ids, jnp.zeros((5, 2))))(),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("made", [lambda x: x, lambda x: 2 * x + 1], ids=["read", "made of a read"])
def test_what_was_read_before_a_write_is_old_after_it(write: str, made: Callable[[Any], Any]) -> None:
    got, wanted = old_times(WRITES[write], made)
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


def test_a_value_is_assigned_whole_after_another_program_may_have_written(table: Variable) -> None:
    slot = dflow.Variable(TABLE + 1, name="slot")
    asks, answers = dflow.FIFOQueue(1, jnp.float32(0)), dflow.FIFOQueue(1, jnp.float32(0))

    @dflow.jit
    def step(ids: Any) -> None:
        old, g = slot.read(), dflow.grad(lambda: loss_of(table, ids), table)()
        asks.enqueue(old.sum())
        answers.dequeue()
        slot.assign(old + g * g)

    def other() -> None:
        asks.dequeue()
        slot.assign(0 * TABLE)
        answers.enqueue(jnp.float32(1))

    thread = threading.Thread(target=other)
    thread.start()
    step(IDS)
    thread.join()
    np.testing.assert_allclose(slot.read(), TABLE + 1 + jax.grad(loss_of)(TABLE, IDS) ** 2, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_many_lookups_of_one_row_of_few_bits_are_summed_as_in_the_dense_gradient(dtype: Any) -> None:
    values, ids = jnp.ones((2000, 2), dtype), jnp.zeros(1000, jnp.int32)
    table = dflow.Variable(values, name="table")
    optimizer = dflow.Optimizer(optax.sgd(0.001), [table])

    def loss(t: Any) -> Any:
        return jnp.sum(jnp.asarray(t)[ids].astype(jnp.float32))

    def seen(g: Any) -> list[Any]:
        return [jnp.sum(g.astype(jnp.float32) ** 2), jnp.max(g * dtype(0.001)), jnp.isfinite(g * dtype(1000)).all()]

    @dflow.jit
    def step() -> list[Any]:
        gradients = dflow.grad(lambda: loss(table), [table])()
        optimizer.apply(gradients)
        return seen(gradients[0])

    got, gradient = step(), jax.jit(jax.grad(loss))(values)
    for one, wanted in zip(got, jax.jit(seen)(gradient), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(wanted, np.float32))
    updates, _ = optax.sgd(0.001).update([gradient], optax.sgd(0.001).init([values]))
    wanted = optax.apply_updates([values], updates)[0]
    np.testing.assert_allclose(np.asarray(table.read(), np.float32), np.asarray(wanted, np.float32), rtol=1e-2)


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


def test_a_long_formula_of_a_read_is_computed_once(table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> Any:
        x = table.read()
        for _ in range(40):
            x = x * 0.5 + jnp.sin(x)
        return jnp.sum(x * dflow.grad(lambda: loss_of(table, ids), table)())

    x = TABLE
    for _ in range(40):
        x = x * 0.5 + jnp.sin(x)
    np.testing.assert_allclose(step(IDS), jnp.sum(x * jax.grad(loss_of)(TABLE, IDS)), rtol=1e-4)


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


def test_values_of_many_variables_outlive_their_writes() -> None:
    tables = [dflow.Variable(TABLE, name=f"t{n}") for n in range(8)]

    @dflow.jit
    def step(ids: Any) -> Any:
        before = [t.read() for t in tables]
        for t in tables:
            t.assign_add(dflow.grad(lambda t=t: loss_of(t, ids), t)())
        return [b * 2 for b in before]

    for got in step(IDS):
        np.testing.assert_array_equal(got, 2 * TABLE)


def test_one_number_in_arrays_of_several_shapes(table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> Any:
        g, x = dflow.grad(lambda: loss_of(table, ids), table)(), jnp.full(SHAPE[:1], ids[0].astype(jnp.float32))
        return jnp.sum(g.sum(axis=1) * x) + jnp.sum(g * jnp.broadcast_to(x[:, None], SHAPE))

    np.testing.assert_allclose(step(IDS), 6 * jax.grad(loss_of)(TABLE, IDS).sum(), rtol=1e-5)


def test_a_program_without_lookups_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(jaxpr: Any) -> Any:
        raise AssertionError("searched")

    monkeypatch.setattr(keep_rows, "is_bound", threading.Event())
    monkeypatch.setattr(keep_rows, "_counts", searched)
    assert dflow.jit(lambda x: 2 * x)(1.0) == 2.0


def test_each_body_of_a_program_is_searched_once(monkeypatch: pytest.MonkeyPatch, table: Variable) -> None:
    seen: list[Any] = []
    search = keep_rows.inner_parts
    monkeypatch.setattr(keep_rows, "inner_parts", lambda params: seen.append(params) or search(params))

    def nested(depth: int, x: Any) -> Any:
        return jax.lax.fori_loop(0, 2, lambda _, y: nested(depth - 1, y), x) if depth else x * 2

    def step(ids: Any) -> Any:
        return nested(6, dflow.grad(lambda: loss_of(table, ids), table)())

    dflow.graph(dflow.jit(step), IDS)
    assert sum("length" in params for params in seen) == 6 + 1  # the outermost is looked into when it runs


def test_an_old_value_is_not_assigned_by_rows_over_a_newer_one(table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> None:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        before = table.read()
        table.assign_add(jnp.ones(SHAPE))
        table.assign(before + g * g)

    step(IDS)
    np.testing.assert_allclose(table.read(), TABLE + jax.grad(loss_of)(TABLE, IDS) ** 2, rtol=1e-5)


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


def test_rows_of_a_bfloat16_table_are_rounded_once() -> None:
    values = TABLE.astype(jnp.bfloat16)
    table = dflow.Variable(values, name="table")
    optimizer = dflow.Optimizer(optax.chain(optax.stateless(widened), optax.sgd(0.01)), [table])

    @dflow.jit
    def step(i: Any) -> None:
        optimizer.apply(dflow.grad(lambda: loss_of(table, i).astype(jnp.float32), [table])())

    assert grown(step, IDS) == []
    step(IDS)
    gradient = jax.grad(lambda t: loss_of(t, IDS).astype(jnp.float32))(values)
    wanted = optax.apply_updates(values, -0.01 * gradient.astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(table.read(), np.float32), np.asarray(wanted, np.float32))


def widened(updates: Any, params: Any) -> Any:
    return jax.tree.map(lambda update: update.astype(jnp.float32), updates)


def test_no_lookups_change_nothing(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)), [table])
    none = jnp.zeros(0, jnp.int32)
    dflow.jit(lambda i: optimizer.apply(dflow.grad(lambda: loss_of(table, i), [table])()))(none)
    np.testing.assert_array_equal(table.read(), TABLE)


def test_a_step_allocates_nothing_of_the_size_of_its_table() -> None:
    large = dflow.Variable(lambda: jnp.ones((50_000, 16)), name="large")
    optimizer = dflow.Optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1)), [large])

    @dflow.jit
    def step(ids: Any) -> None:
        gradients = dflow.grad(lambda: loss_of(large, ids), [large])()
        half = jax.tree.map(lambda g: (g.astype(jnp.bfloat16) / 2).astype(jnp.float32), gradients)
        optimizer.apply(jax.tree.map(jnp.add, gradients, half))

    memory = step.lower(IDS).compile().memory_analysis()
    assert memory.temp_size_in_bytes < large.type.size_bytes / 100


LAZY = {
    "adam": optax.adam(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "rmsprop": optax.rmsprop(0.1),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("as_rows", [True, False], ids=["rows", "dense"])
def test_lazy_rows_are_left_as_they_are(name: str, as_rows: bool, table: Variable) -> None:
    """Whatever the gradient is made of: rows without one keep values and slots."""
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


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_to_dense, "LARGE_BYTES", 1)
    monkeypatch.setattr(rows_to_dense, "LARGE_RATIO", 1)


@pytest.mark.usefixtures("small_is_large")
def test_a_dense_gradient_of_a_large_table_is_reported_with_what_needs_it(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.adam(0.1), [table])

    @dflow.jit
    def step(i: Any) -> None:
        gradients = dflow.grad(lambda: loss_of(table, i), [table])()
        optimizer.apply(gradients)

    with pytest.warns(dflow.DenseGradientWarning) as caught:
        step(IDS)
    [message] = [str(warning.message) for warning in caught]
    assert "gradient of 'table', float32[13,2], has 5 rows and is made dense, 104 bytes" in message
    assert "test_keep_rows.py" in message
    assert "lazy_rows=True" in message


@pytest.mark.usefixtures("small_is_large")
def test_what_stays_rows_is_not_reported(table: Variable) -> None:
    optimizer = dflow.Optimizer(optax.adagrad(0.1), [table])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dflow.jit(lambda i: optimizer.apply(dflow.grad(lambda: loss_of(table, i), [table])()))(IDS)


@pytest.mark.usefixtures("small_is_large")
def test_a_gradient_that_is_given_back_is_reported(table: Variable) -> None:
    with pytest.warns(dflow.DenseGradientWarning, match=r"for the result of the function\n(.|\n)*rows=True"):
        dflow.jit(lambda i: dflow.grad(lambda: loss_of(table, i), table)())(IDS)


@pytest.mark.usefixtures("small_is_large")
def test_a_dense_gradient_outside_of_traced_code_is_reported(table: Variable) -> None:
    with pytest.warns(dflow.DenseGradientWarning, match=r"outside of traced code(.|\n)*dflow.jit"):
        dflow.grad(lambda: loss_of(table, IDS), table)()


@pytest.mark.parametrize("name", ["sgd", "adagrad", "clipped adagrad"])
def test_over_a_cluster_rows_travel(name: str) -> None:
    transformation = BY_ROWS[name]
    with memory_cluster(ps=1, workers=1) as cluster:
        worker = cluster.worker()
        with worker.parameter_servers():
            table = dflow.Variable(lambda: jnp.ones((1000, 2)), name="table")
            optimizer = dflow.Optimizer(transformation, [table], name="opt")

        @dflow.jit
        def step(i: Any) -> None:
            optimizer.apply(dflow.grad(lambda: loss_of(table, i), [table])())

        step(jnp.array([1, 2, 2]))
        sent = cluster.tasks["ps:0"].server.traffic() + worker.traffic()
        assert max(edge.size_bytes for edge in sent) == 24
        values = [jnp.ones((1000, 2))]
        gradients = [jax.grad(loss_of)(values[0], jnp.array([1, 2, 2]))]
        updates, _ = transformation.update(gradients, transformation.init(values), values)
        np.testing.assert_allclose(table.read(), values[0] + updates[0], rtol=1e-5)
        worker.close()
