"""Loops, branches, callbacks and checks, and JAX's own state inside and around a function."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify, io_callback

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit

FLOAT = jax.ShapeDtypeStruct((), jnp.float32)


def printed(jit: Any, fn: Any, *args: Any) -> Any:
    told: list[str] = []
    results = jit(functools.partial(fn, lambda *values: told.append(" ".join(map(str, values)))))(*args)
    jax.effects_barrier()
    return results, told


def ordered(jit: Any) -> Any:
    def fn(tell: Any, x: Any) -> Any:
        for number in range(3):
            io_callback(lambda v, number=number: (tell(number, v), v)[1], FLOAT, x + number, ordered=True)
        return x * 2

    return printed(jit, fn, 1.0)


def ordered_in_a_loop(jit: Any) -> Any:
    def fn(tell: Any, x: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            io_callback(lambda v: tell(v), None, i, ordered=True)
            return c + 1

        return jax.lax.fori_loop(0, 4, body, x)

    return printed(jit, fn, 1.0)


def values_from_outside(jit: Any) -> Any:
    """Each call runs the callback again, the second call too."""
    calls: list[int] = []

    def ask() -> Any:
        calls.append(1)
        return np.float32(len(calls))

    f = jit(lambda x: x + io_callback(ask, FLOAT))
    return f(1.0), f(1.0), len(calls)


def checked_outside(jit: Any) -> Any:
    def fn(x: Any) -> Any:
        checkify.check(x > 0, "x must be positive")
        return x * 2

    outcomes = []
    for x in (1.0, -1.0):
        error, value = checkify.checkify(jit(fn))(x)
        outcomes.append((error.get(), value))
    return outcomes


def an_unchecked_check(jit: Any) -> Any:
    return jit(lambda x: (checkify.check(x > 0, "x"), x)[1])(1.0)


def a_ref_outside(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def step(x: Any) -> Any:
        ref[...] += x
        return ref[0]

    return step(1.0), step(2.0), ref[...]


def a_ref_inside(jit: Any) -> Any:
    @jit
    def fn(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(2))
        jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(0, ref[0] + x), None)
        return jax.freeze(ref)

    return fn(2.0)


PROGRAMS: dict[str, Program] = {
    "io_callback": values_from_outside,
    "io_callback, ordered in a loop": ordered_in_a_loop,
    "checkify of a jitted function": checked_outside,
    "a check that nobody asks for": an_unchecked_check,
    "a ref that is closed over": a_ref_outside,
    "a ref inside": a_ref_inside,
}


#: JAX's loops and checkify, outside of any function, compile their function themselves. A `jax.Ref` and a variable
#: cannot be used in one function, which a call reports.
WITHOUT_STATE = (
    "checkify of a jitted function",
    "a ref that is closed over",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
