"""Small values that stay in NumPy's hands between the items of a plan.

Why: an XLA program takes a NumPy array in less time than it takes to make a JAX array of one, and what comes over the
network or out of a queue is often a few numbers. What leaves a plan is a JAX array.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: A value of more than this is a JAX array, which shares the memory of what it was made of.
SMALL_BYTES = 1 << 14
#: Of NumPy's own dtypes, those that JAX leaves as they are, whether it uses 64 bits or not.
_DTYPES = frozenset(
    map(np.dtype, ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"))
)


def stays_on_host(value: Any) -> bool:
    """Whether a value is left as it is."""
    return isinstance(value, np.ndarray) and value.nbytes <= SMALL_BYTES and value.dtype in _DTYPES


def on_device(values: Iterable[Any]) -> tuple[jax.Array, ...]:
    """The values, with JAX arrays in the place of NumPy's."""
    return tuple(jnp.asarray(value) if isinstance(value, np.ndarray) else value for value in values)
