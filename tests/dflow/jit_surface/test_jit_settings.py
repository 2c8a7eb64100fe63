"""JAX's settings and contexts: a function follows each, and is traced again when one changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.dflow.jit_surface.comparison import Program, same_as_jax_jit


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


PROGRAMS: dict[str, Program] = {
    "enable_x64": x64,
    "enable_x64, large numbers": x64_large,
    "disable_jit": eagerly,
    "debug_nans": nans,
    "checking_leaks": leaks,
    "transfer_guard": transfers,
    "log_compiles": logged,
}

test_the_same_as_jax_jit = same_as_jax_jit(PROGRAMS)
