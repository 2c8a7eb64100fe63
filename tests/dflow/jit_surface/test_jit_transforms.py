"""Under JAX's transforms, and around them: autodiff, vmap, checkpoint, custom derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def pair(x: Any, y: Any) -> Any:
    return {"x": jnp.sin(x) * y, "y": [y**2]}


def of_own_derivative(jit: Any) -> Any:
    @jax.custom_jvp
    def own(x: Any) -> Any:
        return jnp.sin(x)

    @own.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return own(*primals), 10.0 * tangents[0]

    f = jit(own)
    return f(1.0), jax.grad(f)(1.0), jit(jax.grad(own))(1.0), jax.vmap(jax.grad(f))(jnp.ones(2))


def of_own_vjp(jit: Any) -> Any:
    @functools.partial(jax.custom_vjp, nondiff_argnums=0)
    def own(n: int, x: Any) -> Any:
        return x * n

    own.defvjp(lambda n, x: (x * n, x), lambda n, x, g: (g * 100.0 + x,))
    f = jit(lambda x: own(3, x))
    return f(1.0), jax.grad(f)(1.0), jit(jax.grad(lambda x: own(2, x)))(1.0), jax.jit(jax.grad(jit(f)))(2.0)


def vjp_again(jit: Any) -> Any:
    values, pull = jax.vjp(jit(pair), 1.0, 2.0)
    return values, pull({"x": 1.0, "y": [2.0]}), pull({"x": 0.0, "y": [1.0]})


def traces_under_grad(jit: Any) -> Any:
    """Number of runs of the function under transforms that are called twice."""
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x * x)[1])
    seen = []
    for call in (jax.grad(f), jax.grad(f), jax.vmap(lambda x: f(x[0])), jit(jax.grad(f))):
        try:
            call(2.0)
        except ValueError:
            call(jnp.ones((2, 1)))
        seen.append(len(runs))
    return seen


def axis_names(jit: Any) -> Any:
    f = jit(lambda x: x - jax.lax.pmean(x, "i") + jax.lax.axis_index("i"))
    return jax.vmap(f, axis_name="i")(jnp.arange(4.0)), jax.vmap(f, axis_name="i")(jnp.arange(3.0))


def jvp_of_a_closure(jit: Any) -> Any:
    """A function whose closure holds a differentiated value, called twice."""

    def outer(x: Any) -> Any:
        inner = jit(lambda y: y * x)
        return inner(4.0) + inner(5.0)

    return jax.jvp(outer, (5.0,), (1.0,)), jax.grad(outer)(5.0), jax.vmap(outer)(jnp.arange(3.0))


def saved(jit: Any) -> Any:
    f = jax.checkpoint(jit(lambda x: jnp.sin(jnp.sin(x))), policy=jax.checkpoint_policies.dots_saveable)
    return jax.grad(f)(1.0), jit(jax.grad(f))(1.0), jax.grad(jit(f))(1.0)


PROGRAMS: dict[str, Program] = {
    "jvp of a closure": jvp_of_a_closure,
    "vjp": vjp_again,
    "vmap with an axis name": axis_names,
    "how often it is traced": traces_under_grad,
    "checkpoint with a policy": saved,
    "custom_jvp": of_own_derivative,
    "custom_vjp": of_own_vjp,
    "a pullback as a result": lambda jit: jit(lambda x: jax.vjp(jnp.sin, x)[1])(0.5)(1.0),
}

#: A plain `jax.grad` as the outermost transform runs checkpointed parts itself, so they cannot hold state;
#: `dflow.grad`, or `dflow.jit` around it, lets them.
WITHOUT_STATE = ("checkpoint with a policy",)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
