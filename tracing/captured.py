"""Closed-over arrays, as a trace keeps them: with the values of the moment of the trace, whatever becomes of theirs.

A NumPy array may be written to afterwards, and an array of JAX deleted or donated; what a function closed over when it
was traced is a constant of it all the same.
"""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp

#: The copies in use, by the identity of the arrays they are of, so that traces of one array share one.
_copies: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()


def captured(constant: Any) -> jax.Array:
    """A copy of a closed-over array that is its trace's own."""
    if not isinstance(constant, jax.Array):
        return jnp.array(constant, copy=True)
    number = id(constant)
    found = _copies.get(number)
    if found is None:
        found = _copies[number] = jnp.copy(constant)
        weakref.finalize(constant, _copies.pop, number, None).atexit = False
    return found
