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
    """Output of debug prints and callbacks, in their order."""
    told: list[str] = []
    results = jit(functools.partial(fn, lambda *values: told.append(" ".join(map(str, values)))))(*args)
    jax.effects_barrier()
    return results, told


def debug_print(jit: Any) -> Any:
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()) as out:
        f = jit(lambda x: (jax.debug.print("x is {x}, twice {y}", x=x, y=2 * x), x)[1])
        results = f(1.0), f(2.0), jax.vmap(f)(jnp.arange(2.0))
        jax.effects_barrier()
    return results, out.getvalue()


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


def a_callback_with_own_derivative(jit: Any) -> Any:
    @jax.custom_jvp
    def sine(x: Any) -> Any:
        return jax.pure_callback(np.sin, FLOAT, x)

    sine.defjvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    return jax.grad(jit(sine))(1.0), jit(jax.grad(sine))(1.0)


def checked(jit: Any, x: Any) -> Any:
    def fn(x: Any) -> Any:
        checkify.check(x > 0, "x must be positive, is {x}", x=x)
        return jnp.log(x)

    error, value = jit(checkify.checkify(fn, errors=checkify.user_checks | checkify.float_checks))(x)
    return error.get(), value


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


def index_checks(jit: Any) -> Any:
    error, _ = jit(checkify.checkify(lambda x, i: x[i], errors=checkify.index_checks))(jnp.ones(3), 5)
    return "out-of-bounds" in str(error.get())


def a_ref_outside(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def step(x: Any) -> Any:
        ref[...] += x
        return ref[0]

    return step(1.0), step(2.0), ref[...]


def a_ref_as_argument(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(3))

    @jit
    def step(r: Any, x: Any) -> Any:
        r[1] = x
        return r[...].sum()

    return step(ref, 5.0), step(ref, 7.0), ref[...]


def a_ref_inside(jit: Any) -> Any:
    @jit
    def fn(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(2))
        jax.lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(0, ref[0] + x), None)
        return jax.freeze(ref)

    return fn(2.0)


def a_ref_as_result(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(2))
    return jit(lambda r: r)(ref)


def a_ref_under_grad(jit: Any) -> Any:
    ref = jax.new_ref(0.0)

    @jit
    def fn(x: Any) -> Any:
        ref[...] = jax.lax.stop_gradient(x)
        return x**2

    return jax.grad(fn)(3.0), ref[...]


def fibonacci(jit: Any) -> Any:
    @jit
    def fn(n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, pair: (pair[1], pair[0] + pair[1]), (0, 1))[0]

    return [fn(n) for n in range(6)]


PROGRAMS: dict[str, Program] = {
    "scan of nothing": lambda jit: jit(lambda x: jax.lax.scan(lambda c, _: (c, None), x, length=0))(1.0),
    "while_loop under vmap": lambda jit: jax.vmap(
        jit(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c + 2, 0))
    )(jnp.arange(4)),
    "fori_loop with traced bounds": fibonacci,
    "cond": lambda jit: [jit(lambda p, x: jax.lax.cond(p, jit(jnp.sin), jnp.cos, x))(p, 1.0) for p in (True, False)],
    "pure_callback with a derivative": a_callback_with_own_derivative,
    "io_callback": values_from_outside,
    "io_callback, ordered in a loop": ordered_in_a_loop,
    "io_callback under vmap, ordered": lambda jit: jax.vmap(
        jit(lambda x: io_callback(lambda v: v, FLOAT, x, ordered=True))
    )(jnp.ones(2)),
    "checkify": lambda jit: (checked(jit, 1.0), checked(jit, 0.0)),
    "checkify of a jitted function": checked_outside,
    "a check that nobody asks for": an_unchecked_check,
    "a ref that is closed over": a_ref_outside,
    "a ref as an argument": a_ref_as_argument,
    "a ref inside": a_ref_inside,
    "a ref as a result": a_ref_as_result,
    "a ref under grad": a_ref_under_grad,
}


#: JAX's loops and checkify, outside of any function, compile their function themselves. A `jax.Ref` and a variable
#: cannot be used in one function, which a call reports.
WITHOUT_STATE = (
    "checkify of a jitted function",
    "a ref that is closed over",
    "a ref as an argument",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
