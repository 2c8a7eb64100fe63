"""Caches, JAX's settings, compilation ahead of time, and errors in the user's program."""

from __future__ import annotations

import gc
import traceback
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


CACHES: dict[str, Program] = {
    "positions and names": traces_by_name,
    "transforms": under_transforms_again,
    "garbage: a closure": of_a_closure,
    "garbage: functions": of_functions,
    "threads with errors": in_threads_with_errors,
}

test_caches_are_the_same_as_under_jax_jit = same_as_jax_jit(CACHES)


def eagerly(jit: Any) -> Any:
    """Return the types that the function sees without JAX's jit, and the number of its runs."""
    seen: list[str] = []
    f = jit(lambda x, n: (seen.append(type(x).__name__), x * n)[1], static_argnums=1)
    with jax.disable_jit():
        results = f(2.0, 3), f(2, 3), f(jnp.ones(2), 3)
    return results, f(2.0, 3), f(2.0, 3), seen


def nans(jit: Any) -> Any:
    f = jit(lambda x: jnp.log(x))
    before = f(-1.0)
    with jax.debug_nans(True):
        try:
            f(-1.0)
        except FloatingPointError as error:
            return before, type(error).__name__, "nan" in str(error), f(1.0)
    return before, "nothing"


def leaks(jit: Any) -> Any:
    kept: list[Any] = []
    with jax.checking_leaks():
        fine = jit(lambda x: x + 1)(1.0)
        try:
            jit(lambda x: (kept.append(x), x)[1])(1.0)
        except Exception as error:
            return fine, "Leaked" in str(error)
    return fine, "nothing"


def transfers(jit: Any) -> Any:
    f = jit(lambda x: x + 1)
    warm = f(np.ones(2, np.float32)), f(jnp.ones(2))
    seen: list[Any] = []
    for x in (np.ones(2, np.float32), 1.0):
        try:
            with jax.transfer_guard("disallow_explicit"):
                seen.append(f(x))
        except Exception as error:
            seen.append("Disallowed" in str(error))
    with jax.transfer_guard("disallow"):
        seen.append(f(warm[1]))
    return seen


def x64(jit: Any) -> Any:
    f = jit(lambda x: (x, x + 1, jnp.arange(2)))
    seen = []
    for on in (False, True, False, True):
        with jax.enable_x64(on):
            seen.append([(y.dtype.name, y.weak_type) for y in (*f(1.0), *f(np.float64(2)))])
    return seen


def x64_large(jit: Any) -> Any:
    f = jit(lambda x: x * 2)
    with jax.enable_x64(True):
        large = int(f(2**40))
    with pytest.raises(OverflowError):  # dflow's is a subclass, which names the argument
        f(2**40)
    return large


def logged(jit: Any) -> Any:
    """JAX's own log of compilations names the user's function."""
    import logging

    words: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jax._src.interpreters.pxla")
    logger.addHandler(handler)

    def my_function(x: Any) -> Any:
        return x + 1

    try:
        with jax.log_compiles():
            jit(my_function)(jnp.ones(7))
    finally:
        logger.removeHandler(handler)
    return any("Compiling jit(my_function)" in word for word in words), sum("my_function" in word for word in words)


SETTINGS: dict[str, Program] = {
    "enable_x64": x64,
    "enable_x64, large numbers": x64_large,
    "disable_jit": eagerly,
    "debug_nans": nans,
    "checking_leaks": leaks,
    "transfer_guard": transfers,
    "log_compiles": logged,
}

test_settings_are_the_same_as_under_jax_jit = same_as_jax_jit(SETTINGS)


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


STAGES: dict[str, Program] = {
    "eval_shape": lambda jit: repr(jit(affine).eval_shape(struct(2, 3), struct(3, 4), b=1)),
    "eval_shape of a wrong product": lambda jit: jit(affine).eval_shape(struct(2, 3), struct(2, 3)),
    "the equation in a jaxpr has the options": equation_of_options,
    "stages": stages,
    "lower of an error": lambda jit: jit(lambda x: {}["missing"]).lower(1.0),
    "compiled, with static arguments": lambda jit: compiled(jit, lambda x, n: [x] * n, 1.0, 2, static_argnums=1)(3.0),
    "the size of its cache": counts,
}

#: With a variable, `lower`, the jaxpr and the number of programs are those of a function with more ops.
STAGES_WITHOUT_STATE = tuple(name for name in STAGES if "eval_shape" not in name)

test_stages_are_the_same_as_under_jax_jit = same_as_jax_jit(STAGES, only_without_state=STAGES_WITHOUT_STATE)


class OwnError(Exception):
    """An exception class of the user's."""


def raises(x: Any) -> Any:
    return raises_inside(x)


def raises_inside(x: Any) -> Any:
    raise OwnError("an error of mine", 3)


def chain(jit: Any, fn: Any) -> Any:
    try:
        jit(fn)(1.0)
    except Exception as error:
        behind, kinds = error, []
        while behind is not None:
            kinds.append(type(behind).__name__)
            behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)
        return [kind for kind in kinds if kind != "SimplifiedTraceback"]


def last_frames(jit: Any) -> Any:
    """Return the names of the last frames, and whether any of them is a library's."""
    try:
        jit(raises)(1.0)
    except OwnError as error:
        return [frame.name for frame in traceback.extract_tb(error.__traceback__)][-2:]


def raises_once(jit: Any) -> Any:
    """Return a function whose first trace fails and whose second succeeds."""
    calls: list[int] = []

    def fn(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OwnError("the first time")
        return x * 2

    f = jit(fn)
    outcomes = []
    for _ in range(3):
        try:
            outcomes.append(f(2.0))
        except OwnError as error:
            outcomes.append(str(error))
    return outcomes, len(calls)


def a_leaked_tracer_as_argument(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + 1)(kept[0])


def a_leaked_tracer_in_a_closure(jit: Any) -> Any:
    kept: list[Any] = []
    jit(lambda x: (kept.append(x), x)[1])(1.0)
    return jit(lambda x: x + kept[0])(1.0)


def exits(jit: Any, error: type[BaseException]) -> Any:
    """Exceptions that are not an `Exception` pass through."""

    def fn(x: Any) -> Any:
        raise error("stop")

    f = jit(fn)
    seen = []
    for _ in range(2):
        try:
            f(1.0)
        except BaseException as caught:
            seen.append((type(caught).__name__, str(caught)))
    return seen


ERRORS: dict[str, Program] = {
    "an error of one's own": lambda jit: jit(raises)(1.0),
    "an error has no context of the library": lambda jit: chain(jit, raises),
    "the last frames are the user's": last_frames,
    "an error the first time": raises_once,
    "an interrupt": lambda jit: exits(jit, KeyboardInterrupt),
    "a bool of a tracer": lambda jit: jit(lambda x: 1 if x > 0 else 2)(1.0),
    "a leaked tracer as an argument": a_leaked_tracer_as_argument,
    "a leaked tracer in a closure": a_leaked_tracer_in_a_closure,
    "no such option": lambda jit: jit(lambda x: x, static_arguments=1),
    "not callable": lambda jit: jit(3),
    "a backend that is none": lambda jit: jit(lambda x: x, backend="abacus")(1.0),
}


ERRORS_WITHOUT_STATE = ("a leaked tracer as an argument", "a leaked tracer in a closure")

test_errors_are_the_same_as_under_jax_jit = same_as_jax_jit(ERRORS, only_without_state=ERRORS_WITHOUT_STATE)
