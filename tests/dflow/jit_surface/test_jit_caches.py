"""Repeated traces, and the release of caches, threads and garbage."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit

Pair = namedtuple("Pair", "x y")


def traces_by_name(jit: Any) -> Any:
    runs: list[int] = []
    f = jit(lambda x, y=2.0: (runs.append(1), x * y)[1])
    counts = []
    for args, kwargs in (
        ((1.0,), {}),
        ((1.0, 3.0), {}),
        ((1.0,), {"y": 3.0}),
        ((), {"y": 3.0, "x": 1.0}),
        ((5.0,), {}),
    ):
        f(*args, **kwargs)
        counts.append(len(runs))
    return counts


def of_a_closure(jit: Any) -> Any:
    """The values that a function closes over are freed with it."""
    x = jnp.ones(10)
    f = (lambda held: lambda: held + 1)(x)
    g = jit(f)
    seen = [float(g()[0]), float(g()[0])]
    del f
    seen.append(float(g()[0]))
    gone = weakref.ref(x)
    del x, g
    gc.collect()
    return seen, gone() is None


def of_functions(jit: Any) -> Any:
    class Marked:
        pass

    def make() -> Any:
        mark = Marked()
        f = jit(lambda x: (mark, x + 1)[1])
        f(1.0)
        f(2)
        return weakref.ref(f), weakref.ref(mark)

    gone = [make() for _ in range(3)]
    jax.clear_caches()
    gc.collect()
    return [[reference() is None for reference in pair] for pair in gone]


def in_threads_with_errors(jit: Any) -> Any:
    def fn(x: Any) -> Any:
        if x.ndim:
            raise ValueError("not an array")
        return x * 2

    f = jit(fn)

    def call(number: int) -> Any:
        try:
            return f(jnp.ones(2) if number % 2 else 1.0)
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(8)))


def under_transforms_again(jit: Any) -> Any:
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x * x)[1])
    g = jit(jax.grad(f))
    results = [jax.grad(f)(1.0), jax.grad(f)(2.0), g(1.0), g(2.0), jax.vmap(f)(jnp.ones(2)), jax.vmap(f)(jnp.ones(2))]
    return results, len(runs)


PROGRAMS: dict[str, Program] = {
    "positions and names": traces_by_name,
    "transforms": under_transforms_again,
    "garbage: a closure": of_a_closure,
    "garbage: functions": of_functions,
    "threads with errors": in_threads_with_errors,
}

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS)
