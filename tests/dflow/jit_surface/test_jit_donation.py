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


def used_afterwards(jit: Any, use: Any, **options: Any) -> Any:
    f = jit(lambda x: x + 1, **options)
    x = jnp.ones(3)
    f(x)
    return use(x)


def again(jit: Any) -> Any:
    f = jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.ones(3)
    f(x)
    return f(x)


def results_that_are_arguments(jit: Any) -> Any:
    f = jit(lambda x: x, donate_argnums=0)
    x = jnp.arange(3.0)
    y = f(x)
    return y, x.is_deleted()


def under_grad(jit: Any) -> Any:
    f = jit(lambda x: (x**2).sum(), donate_argnums=0)
    x = jnp.ones(3)
    return jax.grad(f)(x), jax.grad(f)(x), x


PROGRAMS: dict[str, Program] = {
    "by name": lambda jit: lost(jit, lambda x, y: x + y, (jnp.ones(3), jnp.ones(3)), donate_argnames="y"),
    "by number, passed by name": lambda jit: lost(
        jit, lambda x, y: x + y, (), {"x": jnp.ones(3), "y": jnp.ones(3)}, donate_argnums=1
    ),
    "by numbers and names": lambda jit: lost(
        jit,
        lambda x, y, z: (x * 2, y * 2, z * 2),
        (jnp.ones(3),),
        {"y": jnp.ones(3), "z": jnp.ones(3)},
        donate_argnums=0,
        donate_argnames=("y", "z"),
    ),
    "a number too large": lambda jit: jit(lambda x: x, donate_argnums=1)(2.0),
    "a name that is none": lambda jit: jit(lambda x: x, donate_argnames="y")(2.0),
    "a name of a builtin": lambda jit: jit(max, donate_argnames="a")(2.0),
    "beside static ones, by number": lambda jit: (
        lambda f: [(f(2, x, 3), x.is_deleted()) for x in (jnp.ones(3), jnp.ones(3))]
    )(jit(lambda n, x, m: x * (n + m), static_argnums=(0, 2), donate_argnums=1)),
    "unused": lambda jit: lost(jit, lambda x, y: y, (jnp.ones(3), jnp.ones(2)), donate_argnums=0),
    "unused and kept": lambda jit: lost(
        jit, lambda x, y: y + 1, (jnp.ones(3), jnp.ones(2)), donate_argnums=0, keep_unused=True
    ),
    "a number": lambda jit: jit(lambda x: x + 1, donate_argnums=0)(1.0),
    "one array given away twice": lambda jit: (lambda f, x: f(x, x))(
        jit(lambda x, y: (x + 1, y + 2), donate_argnums=(0, 1)), jnp.zeros(3)
    ),
    "used afterwards: an op": lambda jit: used_afterwards(jit, lambda x: x + 1, donate_argnums=0),
    "given away again": again,
    "returned as it is": results_that_are_arguments,
    "under grad": under_grad,
    "under vmap": lambda jit: (lambda x: (jax.vmap(jit(lambda x: x + 1, donate_argnums=0))(x), x.is_deleted()))(
        jnp.ones(3)
    ),
}

#: A function with state keeps all its arguments, whatever `keep_unused` is, and warns of none. Under a transform that
#: runs immediately it donates none.
WITHOUT_STATE = ("a name of a builtin", "unused and kept", "under grad", "under vmap")

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
