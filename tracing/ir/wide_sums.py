"""Sums of floats of fewer than 32 bits: computed in float32, and rounded once.

A running sum of ones stays at 256 in bfloat16, and at 2,048 in float16. So every sum that dflow makes itself is
computed in `sum_dtype`, and its result is rounded to the dtype of its destination.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.each_once import representatives


def sum_dtype(dtype: Any) -> Any:
    """The dtype for sums of numbers of `dtype`: at least float32 for floats, else `dtype`."""
    return np.dtype(np.float32) if is_narrow(dtype) else dtype


def is_narrow(dtype: Any) -> bool:
    """Whether a dtype is a float of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.dtype(dtype).itemsize < np.dtype(np.float32).itemsize


def summed_at(positions: Any, rows: Any, size: int) -> Any:
    """An array of `size` rows: at each position the sum of the rows for it, elsewhere zero.

    positions  i32[k]; a row for a position past the end is left out
    rows       [k, ...]
    """
    wide = jnp.zeros((size, *rows.shape[1:]), sum_dtype(rows.dtype))
    return wide.at[positions].add(rows.astype(wide.dtype), mode="drop").astype(rows.dtype)


def each_position_once(indices: Any, rows: Any, size: int) -> tuple[Any, Any]:
    """The positions, i32[k], and rows, [k, ...], of an update of `size` rows, with each position once.

    indices  integers of any shape; a negative one counts from the end
    rows     [*indices.shape, ...]; those for one index are summed

    The positions of the entries left over, and of indices without a row, are past the end.
    """
    last = np.iinfo(np.int32).max
    least = 0 if jnp.issubdtype(indices.dtype, jnp.unsignedinteger) else -last
    is_wide = indices.dtype.itemsize > 4 or indices.dtype == np.uint32
    flat = (jnp.clip(indices, least, last) if is_wide else indices).reshape(-1).astype(jnp.int32)
    flat = jnp.where(flat < 0, flat + size, flat)
    is_row = (flat >= 0) & (flat < size)
    first = representatives(flat, is_row)
    sums = summed_at(first, rows.reshape(-1, *rows.shape[indices.ndim :]), flat.size)
    return jnp.where(is_row & (first == jnp.arange(flat.size)), flat, size), sums
