"""Conversion of arrays to elements of a queue, and back.

Batches are split and stacked in host memory, since the elements of a batch may come from several producers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.queues.channel import Sent
from dflow.lowering.values.computed import wait_until_computed
from dflow.lowering.values.host_values import stays_on_host
from dflow.tracing.ir.types import ArrayType


def rows_of(operands: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the elements that an `enqueue_many` of these arrays puts in."""
    wait_until_computed(operands)
    on_host = [np.array(operand) for operand in operands]
    # With the dots a row of a vector is an array of no dimensions, not a NumPy scalar.
    return [tuple(array[row, ...] for array in on_host) for row in range(len(on_host[0]))]


def batch_of(rows: Sequence[Any], type: ArrayType, count: int) -> Sent:
    """Return `count` rows, padded to the largest size in each dimension; missing rows are zeros."""
    arrays = [np.asarray(row) for row in rows]
    shapes = [array.shape for array in arrays] or [tuple(dim or 0 for dim in type.shape)]
    largest = tuple(max(dims) for dims in zip(*shapes, strict=True))
    if len(arrays) == count and all(shape == largest for shape in shapes) and arrays:
        return given(np.stack(arrays))
    batch = np.zeros((count, *largest), type.dtype)
    for number, array in enumerate(arrays):
        place: Any = (number, *(slice(size) for size in array.shape))
        batch[place] = array
    return given(batch)


def given(array: Any) -> Sent:
    """Return an array of an element as a dequeue gives it."""
    return array if isinstance(array, jax.Array) or stays_on_host(array) else jnp.asarray(array)
