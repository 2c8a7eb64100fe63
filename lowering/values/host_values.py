"""Small values that stay NumPy arrays between the items of a plan.

Why: passing a NumPy array to an XLA program takes less time than converting it to a JAX array, and values from the
network or from queues are often a few numbers. The results of a plan are JAX arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

#: A larger value is converted to a JAX array, which shares the memory of the NumPy array. The conversion takes as long
#: as the copy of this many bytes that a program makes of a NumPy array.
SMALL_BYTES = 1 << 17
#: The NumPy dtypes that JAX leaves as they are, with `jax_enable_x64` or without.
_DTYPES = frozenset(
    map(np.dtype, ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64"))
)


def stays_on_host(value: Any) -> bool:
    """Whether a value stays a NumPy array between the items of a plan."""
    return isinstance(value, np.ndarray) and may_stay_on_host(value.dtype, value.nbytes)


def may_stay_on_host(dtype: np.dtype[Any], size_bytes: int) -> bool:
    """Whether a NumPy array of this dtype and size stays one between the items of a plan."""
    return size_bytes <= SMALL_BYTES and dtype in _DTYPES


def on_device(values: Iterable[Any]) -> tuple[jax.Array, ...]:
    """Return the values, with NumPy arrays converted to JAX arrays."""
    return tuple(jnp.asarray(value) if isinstance(value, np.ndarray) else value for value in values)
