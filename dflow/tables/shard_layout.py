"""The division of an array over shards: which shard has which rows, or columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import VariableError
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.rows.slices import AxisSlice, have_each_once

#: The divisions: `rows` gives each shard neighbouring rows, `modulo` gives row r to shard r % shards, `columns` gives
#: each shard neighbouring columns of all rows.
DIVISIONS = ("rows", "modulo", "columns")


@dataclass(frozen=True)
class ShardLayout:
    """The division of an array of `shape` over `shards`, `by` one of `DIVISIONS`.

    Rows and columns are divided as evenly as they can be; the first shards have one more.
    raises  VariableError for an unknown division, a shape without the dimension to divide, and more shards than it has
    """

    shape: tuple[int, ...]
    shards: int
    by: str = "rows"

    def __post_init__(self) -> None:
        if self.by not in DIVISIONS:
            remedy = did_you_mean(str(self.by), DIVISIONS, f"the divisions are {', '.join(DIVISIONS)}")
            raise VariableError(f"by: expected a division of the array, got {self.by!r}", remedy)
        if len(self.shape) <= self.axis:
            raise VariableError(
                f"a sharded variable by {self.by}: expected an array of {self.axis + 1} or more dimensions, got the "
                f"shape {self.shape}",
                "make a dflow.Variable of it",
            )
        if not 1 <= self.shards <= max(1, self.size):
            raise VariableError(
                f"shards of an array of {self.shape} by {self.by}: expected 1 to {self.size}, got {self.shards}",
                "give fewer shards",
            )
        check_cover(self)

    @property
    def axis(self) -> int:
        """The dimension that is divided."""
        return int(self.by == "columns")

    @property
    def size(self) -> int:
        """Number of rows, or columns, that are divided."""
        return self.shape[self.axis]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The number of rows (columns) before each shard, if those of the first shard come first; and of all."""
        least, more = divmod(self.size, self.shards)
        return tuple(shard * least + min(shard, more) for shard in range(self.shards + 1))

    def part(self, shard: int) -> AxisSlice:
        """The part of the array that a shard has."""
        first, end = self.bounds[shard : shard + 2]
        if self.by == "modulo":
            return AxisSlice(self.axis, shard, end - first, self.shards)
        return AxisSlice(self.axis, first, end - first)

    def places(self, rows: Any) -> Any:
        """The number of each row (column) in the order of the shards; `rows` are integers from 0 to `size` - 1."""
        if self.by != "modulo" or self.shards == 1:
            return rows
        return jnp.asarray(self.bounds, jnp.int32)[rows % self.shards] + rows // self.shards

    def joined(self, shards: Sequence[Any], axis: int | None = None) -> jax.Array:
        """One array of those of the shards, divided along `axis`."""
        axis = self.axis if axis is None else axis
        whole: jax.Array = shards[0] if len(shards) == 1 else jnp.concatenate(shards, axis)
        if self.by != "modulo" or self.shards == 1:
            return whole
        return jnp.take(whole, self.places(jnp.arange(self.size)), axis)


def check_cover(layout: ShardLayout) -> None:
    """Raise VariableError unless each row (column) is in exactly one shard."""
    parts = [layout.part(shard) for shard in range(layout.shards)]
    if not have_each_once(parts, layout.size):
        raise VariableError(f"the shards {parts} do not have each of {layout.size} {layout.by} once")


def shards_for(shape: Sequence[int], dtype: Any, by: str, most_bytes: int) -> int:
    """The least number of shards that have at most `most_bytes` each. Raises VariableError if there is none."""
    axis = int(by == "columns")
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    each = size_bytes // max(1, shape[axis])
    if each > most_bytes or most_bytes < 1:
        raise VariableError(
            f"max_shard_bytes: expected at least {each}, the bytes of one of the {by} of an array of {tuple(shape)}, "
            f"got {most_bytes}",
            "give a larger limit",
        )
    rows_each: int = max(1, most_bytes // max(1, each))
    return max(1, -(-shape[axis] // rows_each))
