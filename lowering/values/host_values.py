"""Values that stay NumPy arrays between the items of a plan.

Why: a program on a CPU takes an aligned NumPy array without a copy, in less than 1 us. A conversion to a JAX array
takes 50 to 100 us, whatever the size. Other devices copy the array for each program that takes it, so a large one is
converted once. The results of a plan are JAX arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax import jit as jax_jit

from dflow.lowering.values.computed import wait_until_computed

#: Larger arrays are converted if programs would copy them: those of the user's program, which may be unaligned, and all
#: for devices other than CPUs. The conversion takes as long as the copy of this many bytes.
SMALL_BYTES = 1 << 17
#: The NumPy dtypes that JAX leaves as they are, with `jax_enable_x64` or without.
_NAMES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "float32", "complex64")
_DTYPES = frozenset(map(np.dtype, (*_NAMES, ml_dtypes.bfloat16)))

#: Returns a copy, also of a NumPy array, in less than half the time that `jnp.copy` takes for a small array.
device_copy = jax_jit(jnp.copy)


def has_own_memory() -> bool:
    """Whether the devices that programs run on have a memory of their own, as GPUs do."""
    return jax.default_backend() != "cpu"


def may_stay_on_host(dtype: np.dtype[Any], size_bytes: int) -> bool:
    """Whether an aligned NumPy array of this dtype and size stays one between the items of a plan."""
    return dtype in _DTYPES and (size_bytes <= SMALL_BYTES or not has_own_memory())


def stays_on_host(value: Any) -> bool:
    """Whether a value of the program stays a NumPy array between the items of a plan."""
    return isinstance(value, np.ndarray) and value.nbytes <= SMALL_BYTES and value.dtype in _DTYPES


def as_operand(value: Any) -> jax.Array | npt.NDArray[Any]:
    """Return a value of the program as a plan takes it: a JAX array, or a NumPy array that stays one."""
    operand: jax.Array = value if isinstance(value, jax.Array) or stays_on_host(value) else jnp.asarray(value)
    return operand


def as_argument(value: Any) -> jax.Array | npt.NDArray[Any]:
    """As `as_operand`, for an array of the caller, which may change it while a program that takes it still runs."""
    return np.array(value) if stays_on_host(value) else as_operand(value)


def counted_rows(value: Any, count: Any) -> list[npt.NDArray[Any]]:
    """Return the first `count` rows of an array, of a value of one; waits until both are computed."""
    wait_until_computed((value, count))
    return [np.asarray(value)[: int(count)]]


def on_device(values: Iterable[Any]) -> tuple[jax.Array, ...]:
    """Return the values, with NumPy arrays converted to JAX arrays."""
    return tuple([_converted(value) if isinstance(value, np.ndarray) else value for value in values])


def _converted(value: np.ndarray[Any, Any]) -> jax.Array:
    if value.nbytes <= SMALL_BYTES:
        return jnp.asarray(value)
    shared: jax.Array = jax.device_put(value, may_alias=True)
    return shared
