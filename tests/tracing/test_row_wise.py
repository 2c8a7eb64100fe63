"""Which update rules only scale a gradient: each case is one that would go wrong if it were judged otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dflow.tracing.jax_frontend import make_jaxpr
from dflow.tracing.row_wise import scales_only

ROWS, NUMBER = jnp.ones((3, 2)), jnp.float32(2)

#: From gradient, parameters and a number of the state to the update and the state after.
SCALES: dict[str, Callable[..., Any]] = {
    "times a constant": lambda g, p, s: (-0.1 * g, s),
    "times the state": lambda g, p, s: (g * s, s + 1),
    "the state times it": lambda g, p, s: (jnp.full(g.shape, s) * g, s),
    "over the state": lambda g, p, s: (g / s, s),
    "in a nested jit": lambda g, p, s: (jax.jit(lambda h, t: -h * t)(g, s), s),
    "to another dtype and back": lambda g, p, s: (g.astype(jnp.float16).astype(jnp.float32), s),
    "by a norm of the parameters": lambda g, p, s: (g * jnp.sqrt((p * p).sum()), s),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "element by element": lambda g, p, s: (g * p, s),
    "squared": lambda g, p, s: (g * g, s),
    "below": lambda g, p, s: (s / g, s),
    "with decay": lambda g, p, s: (g + 0.1 * p, s),
    "clipped": lambda g, p, s: (jnp.clip(g, -1, 1), s),
    "over its norm": lambda g, p, s: (g / jnp.sqrt((g * g).sum()), s),
    "kept in the state": lambda g, p, s: (-g, g),
    "summed into the state": lambda g, p, s: (-g, s + g.sum()),
    "squared in a nested jit": lambda g, p, s: (jax.jit(lambda h: h * h)(g), s),
    "not used": lambda g, p, s: (p * s, s),
    "given twice": lambda g, p, s: (lambda u: (u, u))(-g),
}


def judged(rule: Callable[..., Any], *operands: Any) -> bool:
    jaxpr, _, _ = make_jaxpr(rule, *operands)
    return scales_only(jaxpr, jaxpr.invars[0], jaxpr.outvars[0])


@pytest.mark.parametrize("rule", SCALES)
def test_what_only_scales(rule: str) -> None:
    assert judged(SCALES[rule], ROWS, ROWS, NUMBER)


@pytest.mark.parametrize("rule", OTHERS)
def test_what_does_more(rule: str) -> None:
    assert not judged(OTHERS[rule], ROWS, ROWS, NUMBER)


def test_a_number_squared_is_not_scaled() -> None:
    assert judged(SCALES["times the state"], NUMBER, NUMBER, NUMBER)
    assert not judged(OTHERS["squared"], NUMBER, NUMBER, NUMBER)
