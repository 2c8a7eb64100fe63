"""Under JAX's transforms, and around them: autodiff, vmap, checkpoint, custom derivatives."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def cubed(x: Any) -> Any:
    return (x**3).sum()


def pair(x: Any, y: Any) -> Any:
    return {"x": jnp.sin(x) * y, "y": [y**2]}


def with_aux(x: Any) -> Any:
    return (x**2).sum(), {"aux": x + 1}


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


def rules_that_are_jitted(jit: Any) -> Any:
    @jax.custom_vjp
    def own(x: Any) -> Any:
        return x * 2

    own.defvjp(jit(lambda x: (x * 2, x)), jit(lambda x, g: (g * x,)))
    return jax.grad(own)(3.0), jit(jax.grad(own))(3.0)


def own_batching(jit: Any) -> Any:
    @jax.custom_batching.custom_vmap
    def own(x: Any) -> Any:
        return x * 2

    @own.def_vmap
    def _(size: int, batched: Any, x: Any) -> Any:
        return x * 3, True

    return jit(own)(1.0), jax.vmap(jit(own))(jnp.ones(3)), jit(jax.vmap(own))(jnp.ones(3))


def transposed(jit: Any) -> Any:
    return jax.linear_transpose(jit(lambda x: 3.0 * x), jnp.ones(2))(jnp.ones(2))


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


def axis_sizes_are_another_trace(jit: Any) -> Any:
    f = jit(lambda: jax.lax.psum(1, "i"))
    return [jax.vmap(f, axis_name="i", axis_size=n, out_axes=None)() for n in (2, 3, 2)]


def two_axes(jit: Any) -> Any:
    f = jit(lambda x: x + jax.lax.psum(x, ("i", "j")) + jax.lax.all_gather(x, "j").sum())
    return jax.vmap(jax.vmap(f, axis_name="j"), axis_name="i")(jnp.arange(6.0).reshape(2, 3))


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
    "grad with aux": lambda jit: jax.grad(jit(with_aux), has_aux=True)(jnp.arange(2.0)),
    "grad of an integer": lambda jit: jax.grad(jit(lambda x: x * 2))(1),
    "grad of an integer, allowed": lambda jit: jax.grad(jit(lambda x: x * 2.0), allow_int=True)(1),
    "value_and_grad with aux": lambda jit: jax.value_and_grad(jit(with_aux), has_aux=True)(jnp.arange(2.0)),
    "grad of jit of grad of jit": lambda jit: jax.grad(jit(jax.grad(jit(lambda x: x**4))))(2.0),
    "jit of grad with static arguments": lambda jit: jit(jax.grad(lambda x, n: x**n), static_argnums=1)(2.0, 3),
    "jit of grad with a flag by name": lambda jit: jit(
        jax.grad(lambda x, flag: x if flag else 0 * x), static_argnames="flag"
    )(2.0, flag=True),
    "jvp": lambda jit: jax.jvp(jit(pair), (1.0, 2.0), (0.5, 0.25)),
    "jvp of wrong tangents": lambda jit: jax.jvp(jit(jnp.sin), (1.0,), (1,)),
    "jvp of a closure": jvp_of_a_closure,
    "vjp": vjp_again,
    "vjp of a wrong cotangent": lambda jit: jax.vjp(jit(jnp.sin), 1.0)[1]((1.0, 2.0)),
    "hessian": lambda jit: jax.hessian(jit(cubed))(jnp.arange(2.0)),
    "vmap over a tree": lambda jit: jax.vmap(jit(lambda t: t["a"] @ t["b"]), in_axes=({"a": 0, "b": None},))(
        {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    ),
    "jit of vmap of jit": lambda jit: jit(jax.vmap(jit(jnp.sin)))(jnp.arange(3.0)),
    "vmap with an axis name": axis_names,
    "vmap with sizes that are another trace": axis_sizes_are_another_trace,
    "vmap with two axis names": two_axes,
    "how often it is traced": traces_under_grad,
    "checkpoint": lambda jit: jax.grad(jax.checkpoint(jit(lambda x: jnp.sin(jnp.sin(x)))))(1.0),
    "checkpoint with a policy": saved,
    "checkpoint_name": lambda jit: jax.grad(jit(lambda x: jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "s")))(1.0),
    "custom_jvp": of_own_derivative,
    "custom_vjp": of_own_vjp,
    "custom_vjp with jitted rules": rules_that_are_jitted,
    "custom_vmap": own_batching,
    "float0 tangents": lambda jit: jax.jvp(jit(lambda x, n: x * n), (2.0, 3), (1.0, np.zeros((), jax.dtypes.float0))),
    "a pullback as a result": lambda jit: jit(lambda x: jax.vjp(jnp.sin, x)[1])(0.5)(1.0),
}

#: A plain `jax.grad` as the outermost transform runs checkpointed parts itself, so they cannot hold state;
#: `dflow.grad`, or `dflow.jit` around it, lets them.
WITHOUT_STATE = ("checkpoint", "checkpoint with a policy")

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
