"""Parts of initial values: the bits of the whole, without the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflow.lowering.programs.initial_ops import InitialOps
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.slices import sliced

SHAPE = (37, 11)
KEY = jax.random.key(5)
GIVEN = np.arange(37 * 11, dtype=np.float32).reshape(SHAPE)
init = jax.nn.initializers

#: Computed from the part alone.
APART: dict[str, Callable[[], Any]] = {
    "zeros": lambda: jnp.zeros(SHAPE),
    "normal": lambda: jax.random.normal(KEY, SHAPE) * 0.1,
    "bfloat16": lambda: jax.random.normal(KEY, SHAPE, jnp.bfloat16),
    "uniform of a raw key": lambda: jax.random.uniform(jax.random.PRNGKey(3), SHAPE),
    "truncated": lambda: init.truncated_normal(0.02)(KEY, SHAPE),
    "glorot": lambda: init.glorot_uniform()(KEY, SHAPE),
    "integers": lambda: jax.random.randint(KEY, SHAPE, 0, 100),
    "bernoulli": lambda: jax.random.bernoulli(KEY, 0.3, SHAPE),
    "positions": lambda: jnp.sin(jnp.arange(37)[:, None] / jnp.arange(1, 12)),
    "array": lambda: GIVEN * 2 + jnp.arange(11),
}
#: Computed whole.
WHOLE: dict[str, Callable[[], Any]] = {
    "orthogonal": lambda: init.orthogonal()(KEY, SHAPE),
    "another generator": lambda: jax.random.normal(jax.random.key(1, impl="rbg"), SHAPE),
    "matrix product": lambda: jnp.asarray(GIVEN) @ jnp.ones((11, 11)),
}
PARTS = [AxisSlice(0, 0, 13), AxisSlice(0, 20, 17), AxisSlice(0, 1, 12, 3), AxisSlice(1, 3, 5), AxisSlice(0, 4, 0)]


@pytest.mark.parametrize("name", [*APART, *WHOLE])
def test_a_part_has_the_bits_of_the_whole(name: str) -> None:
    initial = {**APART, **WHOLE}[name]
    whole = np.asarray(initial())
    for part in PARTS:
        np.testing.assert_array_equal(np.asarray(InitialOps(sliced(initial, part))()), np.asarray(part.of(whole)))


@pytest.mark.parametrize("name", APART)
def test_no_array_is_larger_than_the_part(name: str) -> None:
    part = AxisSlice(0, 20, 3)
    jaxpr = jax.make_jaxpr(sliced(APART[name], part))()
    sizes = [var.aval.size for equation in _all_equations(jaxpr.jaxpr) for var in equation.outvars]
    # The two halves of the place of each element are concatenated for the cipher.
    assert max(sizes, default=0) <= 2 * 3 * 11


def _all_equations(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        for param in equation.params.values():
            if hasattr(param, "jaxpr"):
                yield from _all_equations(param.jaxpr)


@pytest.mark.parametrize(("shape", "axis", "start"), [((1 << 30, 6), 0, 715827882), ((1, 1 << 30, 4), 1, 7)])
def test_random_bits_of_four_billion_or_more(shape: tuple[int, ...], axis: int, start: int) -> None:
    """The halves of a place's number carry over."""
    part = np.asarray(sliced(lambda: jax.random.bits(KEY, shape), AxisSlice(axis, start, 1))()).ravel()
    words = jax.random.key_data(KEY)
    places = start * shape[-1] + np.arange(shape[-1])
    halves = np.concatenate([places >> 32, places & 0xFFFFFFFF]).astype(np.uint32)
    first, second = np.split(np.asarray(jax.extend.random.threefry_2x32((words[0], words[1]), halves)), 2)
    assert {*(places >> 32)} == {0, 1} or start == 7
    np.testing.assert_array_equal(part, first ^ second)
