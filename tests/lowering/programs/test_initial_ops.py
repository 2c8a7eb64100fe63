"""Recorded ops of an initialiser give JAX's bits, in this process and by their recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from dflow.lowering.programs.initial_ops import SENT_BYTES, Exports, InitialOps, Recipe
from dflow.lowering.programs.program import load_program

KEY = jax.random.key(3)
ROW = np.linspace(-1, 1, 257, dtype=np.float32)
init = jax.nn.initializers

signed_p = jex.Primitive("signed")
signed_p.def_impl(lambda x, by: x * by)
signed_p.def_abstract_eval(lambda x, **_: x)


def normalised() -> Any:
    x = jax.random.normal(KEY, (999,))
    return (x - x.mean()) / x.std()


INITIALISERS: dict[str, Callable[[], Any]] = {
    "scaled": lambda: jax.random.normal(KEY, (64, 64)) * 0.02,
    "normalised": normalised,
    "of ops that JAX inlines in a trace": lambda: jax.random.lognormal(KEY, 0.7, (999,)),
    "of branches": lambda: jax.random.binomial(KEY, 20, 0.3, (99,)),
    "of a linear solver": lambda: init.orthogonal()(KEY, (16, 16)),
    "of an old key": lambda: jax.random.normal(jax.random.PRNGKey(7), (99,)) * 0.02,
    "of one of several keys": lambda: jax.random.normal(jax.random.split(KEY, 3)[1], (99,)),
    "of another kind of keys": lambda: jax.random.uniform(jax.random.key(1, impl="rbg"), (99,)) * 0.3,
    "of a loop": lambda: jax.lax.scan(lambda c, x: (c * 1.1 + x, c), 1.0, jnp.arange(50.0))[1],
    "of an array closed over": lambda: jnp.asarray(ROW) * 3 + 1,
    "of few bits": lambda: jnp.full((3,), 2.3, jnp.bfloat16) * 1.1,
}


def cooked(recipe: Recipe, blobs: list[bytes]) -> Any:
    """Return the value of a recipe."""
    programs = [load_program(blob, 0) for blob in blobs]
    values: list[Any] = list(recipe.arrays)
    for program, takes in recipe.calls:
        values += programs[program](*(values[number] for number in takes))
    return values[recipe.result]


@pytest.mark.parametrize("name", INITIALISERS)
def test_the_ops_give_the_bits_of_the_initialiser_here_and_elsewhere(name: str) -> None:
    initial, exports = INITIALISERS[name], Exports()
    ops, wanted = InitialOps(initial), initial()
    found = ops(), cooked(ops.recipe(exports), exports.blobs)
    assert [value.dtype for value in found] == [wanted.dtype] * 2
    for value in found:
        np.testing.assert_array_equal(value, wanted)


def test_initialisers_that_differ_in_numbers_share_their_programs() -> None:
    exports = Exports()
    recipes = [
        InitialOps(lambda n=n: jax.random.normal(jax.random.key(n), (9, 9)) * (0.1 * n)).recipe(exports)
        for n in range(1, 5)
    ]
    assert len(exports.blobs) == len(recipes[0].calls)
    assert len({tuple(recipe.calls) for recipe in recipes}) == 1


def test_parameters_that_compare_equal_and_differ_in_bits_have_two_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflow.lowering.programs.initial_ops.export_program", lambda *_: b"")
    exports = Exports()
    for by in (0.0, -0.0, 0.0):
        InitialOps(lambda by=by: signed_p.bind(jnp.ones(3), by=by)).recipe(exports)
    assert len(exports.blobs) == 3  # one of them for the ones


def test_a_recipe_is_for_values_that_are_larger_than_what_makes_them() -> None:
    many, few = (SENT_BYTES,), (SENT_BYTES // 4,)
    table = np.ones(many, np.float32)
    assert InitialOps(lambda: jnp.zeros(many)).are_sent
    assert not InitialOps(lambda: jnp.zeros(few)).are_sent
    assert not InitialOps(lambda: jnp.asarray(table) + 1).are_sent
    assert not InitialOps(lambda: jnp.asarray(table)).are_sent


def test_what_is_closed_over_is_read_at_once() -> None:
    row = np.ones(3, np.float32)
    scale = 2.0
    ops = InitialOps(lambda: jnp.asarray(row) * scale)
    row[:] = 7
    scale = 5.0
    np.testing.assert_array_equal(ops(), [2, 2, 2])


def test_the_ops_run_outside_of_the_trace_that_asks_for_them() -> None:
    ops, seen = InitialOps(lambda: jnp.arange(3.0) * 2), []
    jax.make_jaxpr(lambda: seen.append(ops()) or 0)()  # type: ignore[func-returns-value]
    np.testing.assert_array_equal(seen[0], [0, 2, 4])
