"""Donated arguments: the deleted ones, the warnings, and the errors of later uses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def lost(jit: Any, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the results and the deleted arguments of a first and a second call."""
    f = jit(fn, **options)
    seen = []
    for _ in range(2):
        given = jax.tree.map(lambda x: jnp.array(x, copy=True), (args, kwargs or {}))
        results = f(*given[0], **given[1])
        seen.append((results, [leaf.is_deleted() for leaf in jax.tree.leaves(given)]))
    return seen


def again(jit: Any) -> Any:
    f = jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(3)
    f(x)
    return f(x)


def under_grad(jit: Any) -> Any:
    f = jit(lambda x: (x**2).sum(), donate_argnums=0)
    x = jnp.ones(3)
    return jax.grad(f)(x), jax.grad(f)(x), x


PROGRAMS: dict[str, Program] = {
    "by number, passed by name": lambda jit: lost(
        jit, lambda x, y: x + y, (), {"x": jnp.ones(3), "y": jnp.ones(3)}, donate_argnums=1
    ),
    "beside static ones, by number": lambda jit: (
        lambda f: [(f(2, x, 3), x.is_deleted()) for x in (jnp.ones(3), jnp.ones(3))]
    )(jit(lambda n, x, m: x * (n + m), static_argnums=(0, 2), donate_argnums=1)),
    "unused": lambda jit: lost(jit, lambda x, y: y, (jnp.ones(3), jnp.ones(2)), donate_argnums=0),
    "one array given away twice": lambda jit: (lambda f, x: f(x, x))(
        jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1)), jnp.zeros(3)
    ),
    "given away again": again,
    "under grad": under_grad,
}

#: Under a transform that runs immediately, a function with state donates nothing.
WITHOUT_STATE = ("under grad",)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
