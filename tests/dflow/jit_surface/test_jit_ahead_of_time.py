"""Functions traced, lowered and compiled by hand, and the types of their results without a run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


def affine(x: Any, w: Any, *, b: Any = 0.0) -> Any:
    return {"y": x @ w + b}


def struct(*shape: int, dtype: Any = jnp.float32, **more: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, **more)


def compiled(jit: Any, fn: Any, *args: Any, **options: Any) -> Any:
    return jit(fn, **options).lower(*args).compile()


def equation_of_options(jit: Any) -> Any:
    f = jit(affine, donate_argnums=0, keep_unused=True, inline=False)
    (equation,) = jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones((3, 4))).eqns
    return [str(equation.params[name]) for name in ("inline", "keep_unused", "donated_invars")]


def stages(jit: Any) -> Any:
    """Return the public facts of each stage of the function."""
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    traced = jit(affine, donate_argnums=0).trace(x, w, b=1.0)
    lowered = traced.lower()
    done = lowered.compile()
    return (
        [sorted(n for n in dir(stage) if not n.startswith("_")) for stage in (traced, lowered, done)],
        [str(stage.in_tree) for stage in (lowered, done)],
        [str(stage.out_tree) for stage in (lowered, done)],
        [str(stage.in_avals) for stage in (lowered, done)],
        [str(stage.args_info) for stage in (traced, lowered, done)],
        [str(stage.out_info) for stage in (traced, lowered, done)],
        [str(stage.donate_argnums) for stage in (traced, lowered, done)],
        traced.fun_name,
        str(done.input_shardings),
        str(done.output_shardings),
        done(x, w, b=1.0),
    )


def counts(jit: Any) -> Any:
    f = jit(lambda x: x + 1)
    seen = [f._cache_size()]
    for x in (1.0, 2.0, 3.0):
        f(x)
        seen.append(f._cache_size())
    f.clear_cache()
    return [*seen, f._cache_size(), f(1.0)]


PROGRAMS: dict[str, Program] = {
    "eval_shape": lambda jit: repr(jit(affine).eval_shape(struct(2, 3), struct(3, 4), b=1)),
    "eval_shape of a wrong product": lambda jit: jit(affine).eval_shape(struct(2, 3), struct(2, 3)),
    "the equation in a jaxpr has the options": equation_of_options,
    "stages": stages,
    "lower of an error": lambda jit: jit(lambda x: {}["missing"]).lower(1.0),
    "compiled, with static arguments": lambda jit: compiled(jit, lambda x, n: [x] * n, 1.0, 2, static_argnums=1)(3.0),
    "the size of its cache": counts,
}

#: With a variable, `lower`, the jaxpr and the number of programs are those of a function with more ops.
WITHOUT_STATE = tuple(name for name in PROGRAMS if "eval_shape" not in name)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
