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


def a_pure_callback(jit: Any) -> Any:
    f = jit(lambda x: jax.pure_callback(np.sin, FLOAT, x, vmap_method="sequential") * 2)
    return f(1.0), jax.vmap(f)(jnp.arange(3.0))


def a_pure_callback_under_grad(jit: Any) -> Any:
    return jax.grad(jit(lambda x: jax.pure_callback(np.sin, FLOAT, x)))(1.0)


def a_callback_with_own_derivative(jit: Any) -> Any:
    @jax.custom_jvp
    def sine(x: Any) -> Any:
        return jax.pure_callback(np.sin, FLOAT, x)

    sine.defjvp(lambda p, t: (sine(*p), jnp.cos(p[0]) * t[0]))
    return jax.grad(jit(sine))(1.0), jit(jax.grad(sine))(1.0)


def debug_callback(jit: Any) -> Any:
    def fn(tell: Any, x: Any) -> Any:
        jax.debug.callback(tell, x, ordered=True)
        jax.debug.callback(lambda v: tell("second", v), x * 2, ordered=True)
        return x

    return printed(jit, fn, 1.0)


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


def a_ref_given_twice(jit: Any) -> Any:
    ref = jax.new_ref(jnp.zeros(2))
    return jit(lambda a, b: a[0] + b[0])(ref, ref)


def a_ref_under_grad(jit: Any) -> Any:
    ref = jax.new_ref(0.0)

    @jit
    def fn(x: Any) -> Any:
        ref[...] = jax.lax.stop_gradient(x)
        return x**2

    return jax.grad(fn)(3.0), ref[...]


def a_static_loop(jit: Any) -> Any:
    @functools.partial(jit, static_argnums=1)
    def power(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x * 2
        return x

    return power(1.0, 3), power(1.0, 4), power(2.0, 3)


def fibonacci(jit: Any) -> Any:
    @jit
    def fn(n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda _, pair: (pair[1], pair[0] + pair[1]), (0, 1))[0]

    return [fn(n) for n in range(6)]


def a_ref_beside_a_large_array(jit: Any) -> Any:
    """The array is large enough that dflow makes it an input."""
    ref, table = jax.new_ref(jnp.zeros(())), jnp.ones((256, 256))

    @jit
    def step(x: Any) -> Any:
        ref[...] += x
        return table[0, 0] + ref[...]

    return step(1.0), step(2.0), ref[...]


PROGRAMS: dict[str, Program] = {
    "scan of a jitted function": lambda jit: jax.lax.scan(jit(lambda c, x: (c + x, c * x)), 0.0, jnp.arange(4.0)),
    "scan in a jit": lambda jit: jit(lambda x: jax.lax.scan(lambda c, y: (c + y, {"c": c}), x, jnp.arange(4.0)))(1.0),
    "scan in reverse": lambda jit: jit(
        lambda x: jax.lax.scan(lambda c, y: (c * 2, c + y), x, jnp.arange(4.0), reverse=True, unroll=2)
    )(1.0),
    "scan of nothing": lambda jit: jit(lambda x: jax.lax.scan(lambda c, _: (c, None), x, length=0))(1.0),
    "scan under grad": lambda jit: jax.grad(
        jit(lambda x: jax.lax.scan(lambda c, y: (c * x, c), x, jnp.arange(3.0))[1].sum())
    )(2.0),
    "while_loop of jitted functions": lambda jit: jax.lax.while_loop(jit(lambda x: x < 10), jit(lambda x: x * 2), 1),
    "while_loop in a jit": lambda jit: jit(
        lambda x: jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, x))
    )(1.0),
    "while_loop under vmap": lambda jit: jax.vmap(
        jit(lambda n: jax.lax.while_loop(lambda c: c < n, lambda c: c + 2, 0))
    )(jnp.arange(4)),
    "fori_loop with traced bounds": fibonacci,
    "fori_loop under grad with traced bounds": lambda jit: jax.grad(
        jit(lambda x, n: jax.lax.fori_loop(0, n, lambda i, c: c * x, 1.0))
    )(2.0, 3),
    "a Python loop over a static number": a_static_loop,
    "cond": lambda jit: [jit(lambda p, x: jax.lax.cond(p, jit(jnp.sin), jnp.cos, x))(p, 1.0) for p in (True, False)],
    "cond under vmap": lambda jit: jax.vmap(jit(lambda p: jax.lax.cond(p > 0, lambda: 1.0, lambda: 2.0)))(
        jnp.arange(2)
    ),
    "cond of a Python bool": lambda jit: jit(lambda x: jax.lax.cond(True, lambda y: y + 1, lambda y: y, x))(1.0),
    "switch": lambda jit: [
        jit(lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x))(i, 1.0) for i in (0, 2, 7)
    ],
    "switch under grad": lambda jit: jax.grad(jit(lambda x: jax.lax.switch(1, [jnp.sin, jnp.cos], x)))(1.0),
    "map": lambda jit: jax.lax.map(jit(lambda x: x * 2), jnp.arange(3)),
    "map in batches": lambda jit: jit(lambda x: jax.lax.map(lambda y: y * 2, x, batch_size=2))(jnp.arange(5)),
    "associative_scan": lambda jit: jit(lambda x: jax.lax.associative_scan(jnp.add, x))(jnp.arange(5)),
    "custom_root": lambda jit: jax.grad(
        jit(
            lambda a: jax.lax.custom_root(
                lambda x: x**2 - a,
                1.0,
                lambda f, x: jax.lax.fori_loop(0, 9, lambda _, y: y - f(y) / (2 * y), x),
                lambda g, y: y / g(1.0),
            )
        )
    )(4.0),
    "select": lambda jit: jit(lambda x: jnp.where(x > 1, x, -x))(jnp.arange(3.0)),
    "dynamic slices": lambda jit: jit(lambda x, i: jax.lax.dynamic_slice(x, (i,), (2,)).sum() + x.at[i].add(1))(
        jnp.arange(4.0), 1
    ),
    "sort and top_k": lambda jit: jit(lambda x: (jnp.sort(x), jax.lax.top_k(x, 2)))(jnp.array([3.0, 1.0, 2.0])),
    "named_call": lambda jit: jit(jax.named_call(lambda x: x + 1, name="here"))(1.0),
    "named_scope": lambda jit: jit(jax.named_scope("here")(lambda x: x + 1))(1.0),
    "an optimization barrier": lambda jit: jit(lambda x: jax.lax.optimization_barrier((x, x + 1)))(1.0),
    "debug.print": debug_print,
    "debug.callback": debug_callback,
    "pure_callback": a_pure_callback,
    "pure_callback under grad": a_pure_callback_under_grad,
    "pure_callback with a derivative": a_callback_with_own_derivative,
    "pure_callback of a wrong shape": lambda jit: "incompatible" in str(_failure(jit)).lower(),
    "io_callback": values_from_outside,
    "io_callback, ordered": ordered,
    "io_callback, ordered in a loop": ordered_in_a_loop,
    "io_callback under vmap, ordered": lambda jit: jax.vmap(
        jit(lambda x: io_callback(lambda v: v, FLOAT, x, ordered=True))
    )(jnp.ones(2)),
    "checkify": lambda jit: (checked(jit, 1.0), checked(jit, 0.0)),
    "checkify of a jitted function": checked_outside,
    "checkify of indices": index_checks,
    "a check that nobody asks for": an_unchecked_check,
    "a ref that is closed over": a_ref_outside,
    "a ref as an argument": a_ref_as_argument,
    "a ref beside a large array": a_ref_beside_a_large_array,
    "a ref inside": a_ref_inside,
    "a ref as a result": a_ref_as_result,
    "a ref given twice": a_ref_given_twice,
    "a ref under grad": a_ref_under_grad,
    "random draws in a loop": lambda jit: jit(
        lambda k: jax.lax.fori_loop(0, 3, lambda i, c: c + jax.random.normal(jax.random.fold_in(k, i)), 0.0)
    )(jax.random.key(0)),
    "an FFT": lambda jit: jit(jnp.fft.fft)(jnp.arange(4.0)),
    "a decomposition": lambda jit: jit(jnp.linalg.cholesky)(jnp.eye(2) * 4),
    "a solution": lambda jit: jax.grad(jit(lambda a: jnp.linalg.solve(a, jnp.ones(2)).sum()))(jnp.eye(2) * 2),
}


def _failure(jit: Any) -> Any:
    try:
        f = jit(lambda x: jax.pure_callback(lambda v: np.ones(3, np.float32), FLOAT, x))
        return jax.block_until_ready(f(1.0))
    except Exception as error:
        return error


#: JAX's loops and checkify, outside of any function, compile their function themselves. A `jax.Ref` and a variable
#: cannot be used in one function, which a call reports.
WITHOUT_STATE = (
    "scan of a jitted function",
    "while_loop of jitted functions",
    "map",
    "checkify of a jitted function",
    "a ref that is closed over",
    "a ref as an argument",
    "a ref beside a large array",
)

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS, only_without_state=WITHOUT_STATE)
