"""Closed-over arrays as a trace keeps them: they are constants, with their values at the time of the trace.

So a trace must not be affected when a NumPy array is written to later, or a JAX array is deleted or donated.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dflow.tracing.ir.types import array_type_of
from dflow.tracing.jax_frontend import Jaxpr, closed_parts, is_array_type, same_buffers
from dflow.tracing.rows.lookups import CALLS

#: Closed-over arrays of this size or more become inputs instead of constants of the program, and are reported.
CAPTURE_BYTES = 1 << 16

#: The arrays that traces hold, by the identity of the arrays closed over, so that traces of one array share one.
_held: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def closed_over(jaxpr: Jaxpr, consts: Sequence[Any]) -> Iterator[Any]:
    """The constants that a trace closed over, and the constants of the compiled functions that it calls."""
    yield from consts
    for equation in jaxpr.eqns:
        if equation.primitive.name in CALLS:
            yield from closed_over(*closed_parts(equation.params[CALLS[equation.primitive.name]]))


def is_large(constant: Any) -> bool:
    """Whether a closed-over array is large enough to become an input."""
    return is_array_type(jax.typeof(constant)) and array_type_of(constant).size_bytes >= CAPTURE_BYTES


def captured(constant: Any) -> jax.Array:
    """The array that a trace keeps for a closed-over one: it shares its memory, or is a copy if that may change."""
    if not isinstance(constant, jax.Array):
        return jnp.array(constant, copy=True)
    number = id(constant)
    found = _held.get(number)
    if found is None:
        shared = same_buffers(constant)
        found = _held[number] = jnp.copy(constant) if shared is None else shared
        weakref.finalize(constant, _held.pop, number, None).atexit = False
    return found
