"""Functions traced, lowered and compiled by hand, and the types of their results without a run."""

from __future__ import annotations

import re
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


def donated(info: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.donated, info)


def jaxpr_text(jaxpr: Any) -> str:
    """Return the jaxpr's text without names that are numbered over the whole process."""
    return re.sub(r"\s+", " ", str(jaxpr))


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


def texts(jit: Any) -> Any:
    lowered = jit(lambda x: jnp.sin(x) * 2.5).lower(1.0)
    text = lowered.as_text()
    return (
        "stablehlo.sine" in text,
        "stablehlo.multiply" in text,
        text.count("func.func"),
        "loc(" in lowered.as_text(debug_info=True),
        "HloModule" in lowered.as_text(dialect="hlo"),
        "HloModule" in lowered.compile().as_text(),
        "mhlo.num_partitions = 1" in text,
    )


def a_trace_shows_the_result(jit: Any) -> Any:
    traced = jit(affine).trace(struct(2, 3), struct(3, 4))
    return (
        jaxpr_text(traced.jaxpr),
        traced.out_info["y"].shape,
        traced.lower().compile()(jnp.ones((2, 3)), jnp.ones((3, 4))),
    )


def counts(jit: Any) -> Any:
    f = jit(lambda x: x + 1)
    seen = [f._cache_size()]
    for x in (1.0, 2.0, 3.0):
        f(x)
        seen.append(f._cache_size())
    f.clear_cache()
    return [*seen, f._cache_size(), f(1.0)]


def no_tracing(jit: Any) -> Any:
    f = jit(lambda x: x + 1)
    warm = f(jnp.ones(3))
    with jax.no_tracing():
        again = f(jnp.ones(3))
        f(jnp.ones(4))
    return warm, again


PROGRAMS: dict[str, Program] = {
    "eval_shape": lambda jit: repr(jit(affine).eval_shape(struct(2, 3), struct(3, 4), b=1)),
    "eval_shape of weak types": lambda jit: repr(jit(lambda x, y: (x, y, x + y)).eval_shape(1.0, 2)),
    "eval_shape of a wrong product": lambda jit: jit(affine).eval_shape(struct(2, 3), struct(2, 3)),
    "jax.eval_shape": lambda jit: repr(jax.eval_shape(jit(affine), struct(2, 3), struct(3, 4))),
    "make_jaxpr": lambda jit: jaxpr_text(jax.make_jaxpr(jit(affine))(jnp.ones((2, 3)), jnp.ones((3, 4)))),
    "make_jaxpr of a jit in a jit": lambda jit: jaxpr_text(
        jax.make_jaxpr(jit(lambda x: jit(affine)(x, x)["y"] + 1))(jnp.ones((2, 2)))
    ),
    "make_jaxpr of static arguments": lambda jit: jaxpr_text(
        jax.make_jaxpr(jit(lambda x, n: x * n, static_argnums=1), static_argnums=1)(2.0, 3)
    ),
    "the equation in a jaxpr has the options": equation_of_options,
    "stages": stages,
    "texts": texts,
    "trace": a_trace_shows_the_result,
    "lower of an error": lambda jit: jit(lambda x: {}["missing"]).lower(1.0),
    "lower of a string": lambda jit: jit(lambda x: x).lower("text"),
    "compiled, with static arguments": lambda jit: compiled(jit, lambda x, n: [x] * n, 1.0, 2, static_argnums=1)(3.0),
    "compiled with options": lambda jit: (
        jit(lambda x: x + 1).lower(1.0).compile(compiler_options={"xla_embed_ir_in_executable": True})(1.0)
    ),
    "compiler options": lambda jit: jit(lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": True})(1.0),
    "a compiler option that is none": lambda jit: jit(lambda x: x + 1, compiler_options={"no_such_option": 1})(1.0),
    "the size of its cache": counts,
    "no_tracing": no_tracing,
    "jax.export": lambda jit: jax.export.deserialize(
        bytearray(jax.export.export(jit(lambda x: jnp.sin(x) * 2))(struct(3)).serialize())
    ).call(jnp.ones(3)),
}

#: With a variable, `lower`, the jaxpr and the number of programs are those of a function with more ops.
WITHOUT_STATE = tuple(name for name in PROGRAMS if "eval_shape" not in name)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
