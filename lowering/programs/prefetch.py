"""Lookups in tables that no cache holds: the processor fetches all rows at a time instead of one after the other.

XLA for the CPU copies a row of at most 64 elements by a load and a store for each. The processor looks only some
hundreds of instructions ahead, which is a row or two, so it waits for memory at nearly every row. Here a program first
reads one element of each cache line of all rows, by so few instructions that many lines are on their way at a time, and
then copies rows that are in a cache. A step over tables of 400 MB takes half the time (`benchmarks/embedding.py`).
Shorter rows gain nothing, and longer ones, which XLA copies by vector instructions, would lose by it.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.ir.types import array_type_of

CACHE_LINE_BYTES = 64
#: A smaller table may be in the second-level cache of a core.
LEAST_TABLE_BYTES = 4 << 20
#: Elements in a row that XLA copies one by one, and that are enough for a gain.
ROW_ELEMENTS = range(32, 65)


def prefetched(table: Any, indices: Any) -> Any:
    """Return `indices`. On the CPU, if it pays, first read their rows of `table`, to bring them into the cache."""
    if not _pays(table, indices):
        return indices
    return jax.lax.platform_dependent(table, indices, cpu=_after_a_read, default=lambda _, indices: indices)


def _pays(table: Any, indices: Any) -> bool:
    row_bytes = math.prod(table.shape[1:]) * table.dtype.itemsize
    return (
        jnp.issubdtype(table.dtype, np.number)
        and indices.dtype in (np.int32, np.int64)  # narrower ones have no room for the number of rows
        and array_type_of(table).sharding is None  # a shard is a table of another size
        and math.prod(table.shape[1:]) in ROW_ELEMENTS
        and row_bytes > CACHE_LINE_BYTES
        and table.shape[0] * row_bytes >= LEAST_TABLE_BYTES
    )


def _after_a_read(table: Any, indices: Any) -> Any:
    rows = table.reshape(table.shape[0], -1)
    lines = np.arange(0, rows.shape[1], CACHE_LINE_BYTES // table.dtype.itemsize)
    read = rows.at[indices[..., None], lines].get(mode="clip")
    # XLA would drop a read that nothing depends on. It does not see that the last row is the greater of these two.
    last = jnp.maximum(table.shape[0] - 1, jnp.any(read != 0).astype(indices.dtype))
    return jnp.minimum(indices, last)
