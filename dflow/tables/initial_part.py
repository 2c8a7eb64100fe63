"""The initial value of a shard: a part of the whole's, computed in blocks of rows if it is large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dflow.lowering.programs.initial_ops import InitialOps
from dflow.tracing.jax_frontend import equations_within
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.rows.slices import sliced, sliced_at

#: Size of a block in bytes. An initialiser computes arrays of a few times this size beside the value.
BLOCK_BYTES = 32 << 20


def initial_part(initial: Callable[[], Any], part: AxisSlice, row_bytes: int, name: str | None) -> Any:
    """The initialiser of a part of the array of `initial`, with the bits of the whole; `row_bytes` is a row's size.

    A part larger than two blocks is computed block by block, unless the initialiser has an op that needs the whole.
    """
    rows = max(1, BLOCK_BYTES // max(1, row_bytes))
    if part.axis != 0 or part.size <= 2 * rows:
        return sliced(initial, part)
    block = sliced_at(initial, part._replace(size=rows))

    def at(start: Any) -> Any:
        return block(start * part.step)

    if largest(at) > 4 * rows * row_bytes:
        return sliced(initial, part)
    # The last block repeats rows of the one before it, so that all have one size and share their programs.
    starts = [*range(0, part.size - rows, rows), part.size - rows]
    return InitialOps(at, name, starts)


def largest(block: Callable[[Any], Any]) -> int:
    """The size in bytes of the largest array that a block's program computes."""
    jaxpr = jax.make_jaxpr(block)(np.int32(0)).jaxpr
    avals = (var.aval for equation in equations_within(jaxpr) for var in equation.outvars)
    return max((aval.size * aval.dtype.itemsize for aval in avals), default=0)
