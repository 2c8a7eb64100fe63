"""A value read before its variable is written stays the old value, also where the write is by rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.tracing.state.resources import Variable
from tests.tracing.rows.lookup_table import IDS, SHAPE, TABLE, loss_of


def old_times(write: Callable[[Any, Any], None], made: Callable[[Any], Any]) -> Any:
    """Read a slot, write it, and use the earlier value times a gradient; return dflow's and JAX's results."""
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


def test_an_old_value_is_not_assigned_by_rows_over_a_newer_one(table: Variable) -> None:
    @dflow.jit
    def step(ids: Any) -> None:
        g = dflow.grad(lambda: loss_of(table, ids), table)()
        before = table.read()
        table.assign_add(jnp.ones(SHAPE))
        table.assign(before + g * g)

    step(IDS)
    np.testing.assert_allclose(table.read(), TABLE + jax.grad(loss_of)(TABLE, IDS) ** 2, rtol=1e-5)
