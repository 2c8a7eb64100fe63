"""Repeated traces, and the release of caches, threads and garbage."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit

Pair = namedtuple("Pair", "x y")


def traces(jit: Any, *calls: Any, **options: Any) -> Any:
    """Number of traces after each call; a call is a tuple of positional arguments."""
    runs: list[int] = []
    f = jit(lambda *args: (runs.append(1), 0)[1], **options)
    counts = []
    for args in calls:
        f(*args)
        counts.append(len(runs))
    return counts


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


def of_static_arguments(jit: Any) -> Any:
    class Model:
        pass

    f = jit(lambda m, x: x + 1, static_argnums=0)
    model = Model()
    gone = weakref.ref(model)
    f(model, 1.0)
    f.clear_cache()
    del model
    gc.collect()
    return gone() is None or "kept"


def cleared(jit: Any) -> Any:
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x + 1)[1])
    f(1.0)
    f(2.0)
    before = len(runs)
    f.clear_cache()
    return before, f(3.0), len(runs) > before


def in_threads(jit: Any) -> Any:
    f = jit(lambda x: x + x - 3.0)
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(f, [np.arange(size, dtype=np.float32) for size in range(1, 6)] * 3))


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


def in_threads_with_settings(jit: Any) -> Any:
    f = jit(lambda x: x + 1)

    def call(number: int) -> Any:
        with jax.enable_x64(bool(number % 2)):
            return f(1.0).dtype.name

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(call, range(8)))


def under_transforms_again(jit: Any) -> Any:
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x * x)[1])
    g = jit(jax.grad(f))
    results = [jax.grad(f)(1.0), jax.grad(f)(2.0), g(1.0), g(2.0), jax.vmap(f)(jnp.ones(2)), jax.vmap(f)(jnp.ones(2))]
    return results, len(runs)


def many_types(jit: Any) -> Any:
    """Old argument types stay cached while new ones come."""
    runs: list[int] = []
    f = jit(lambda x: (runs.append(1), x + 1)[1])
    for _ in range(3):
        for x in (1.0, 1, jnp.ones(2), jnp.ones(3)):
            f(x)
    return len(runs)


PROGRAMS: dict[str, Program] = {
    "values": lambda jit: traces(jit, (1.0,), (2.0,), (np.float32(3),), (jnp.float32(4),), (jnp.asarray(5.0),)),
    "NumPy's types of 64 bits": lambda jit: traces(
        jit, (np.float64(1),), (np.float32(1),), (np.int64(1),), (np.int32(1),)
    ),
    "containers": lambda jit: traces(jit, ([1.0],), ((1.0,),), ({"a": 1.0},), ({"b": 1.0},), (OrderedDict(a=1.0),)),
    "static arguments": lambda jit: traces(jit, (1.0, "a"), (1.0, "b"), (2.0, "a"), static_argnums=1),
    "positions and names": traces_by_name,
    "transforms": under_transforms_again,
    "many types": many_types,
    "the cache of a function is cleared": cleared,
    "garbage: a closure": of_a_closure,
    "garbage: functions": of_functions,
    "garbage: static arguments": of_static_arguments,
    "threads with errors": in_threads_with_errors,
    "threads with settings": in_threads_with_settings,
}

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS)
