"""The division of an array over shards: which shard has which rows, or columns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import VariableError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.near_names import did_you_mean
from dflow.tracing.rows.axis_slice import AxisSlice

#: The divisions: `rows` gives each shard neighbouring rows, `modulo` gives row r to shard r % shards, `columns` gives
#: each shard neighbouring columns of all rows.
DIVISIONS = ("rows", "modulo", "columns")

#: Number of times that the search for the least limit of a shard's traffic halves its range.
_HALVINGS = 50


@dataclass(frozen=True)
class ShardLayout:
    """The division of an array of `shape` over `shards`, `by` one of `DIVISIONS`.

    Rows and columns are divided as evenly as they can be; the first shards have one more. With `cuts`, neighbouring
    rows are divided unevenly: `cuts` has the number of the row after each shard's last one.
    raises  VariableError for an unknown division, a shape without the dimension to divide, and more shards than it has
    """

    shape: tuple[int, ...]
    shards: int
    by: str = "rows"
    cuts: tuple[int, ...] = ()

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
        if self.cuts:
            return (0, *self.cuts)
        least, more = divmod(self.size, self.shards)
        return tuple(shard * least + min(shard, more) for shard in range(self.shards + 1))

    def part(self, shard: int) -> AxisSlice:
        """The part of the array that a shard has."""
        first, end = self.bounds[shard : shard + 2]
        if self.by == "modulo":
            return AxisSlice(self.axis, shard, end - first, self.shards)
        return AxisSlice(self.axis, first, end - first)

    def positions(self, rows: Any) -> Any:
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
        return jnp.take(whole, self.positions(jnp.arange(self.size)), axis)


def chosen_layout(
    type: ArrayType,
    spread: int,
    shards: int | None,
    by: str,
    max_shard_bytes: int | None,
    traffic: Any,
    near: ShardLayout | None,
    together: int = 1,
) -> ShardLayout:
    """The division that arguments of `ShardedVariable` ask for, over `spread` shards if they leave the number open.

    raises  VariableError for arguments that contradict each other, and for a division that the array does not have
    """
    if [shards, max_shard_bytes, near].count(None) < (2 if traffic is None else 1):
        raise VariableError(
            "a sharded variable: expected one of shards, max_shard_bytes and near, got more", "leave the others out"
        )
    if traffic is not None and (near is not None or by != "rows"):
        other = f"by={by!r}" if near is None else "near"
        raise VariableError(f"traffic: expected a division by rows, got {other}", "leave one of the two out")
    if together > 1 and (near is not None or by != "rows" or traffic is not None or type.shape[0] % together):
        raise VariableError(
            f"together={together}: expected a division by rows that have this divisor, without traffic and near, got "
            f"{type.shape} by {by}",
            "leave the others out",
        )
    if near is not None:
        layout = ShardLayout(type.shape, near.shards, near.by)
        if layout.size != near.size:
            raise VariableError(
                f"near: expected a sharded variable with {layout.size} {layout.by}, got {near.shape}",
                "leave it out, or give one that is divided alike",
            )
        return replace(layout, cuts=near.cuts)
    if max_shard_bytes is not None and traffic is None:
        shards = shards_for(type.shape, type.dtype, by, max_shard_bytes)
    elif shards is None:
        divided = type.shape[by == "columns" :][:1] or (1,)
        shards = max(1, min(spread, divided[0] // together))
    layout = ShardLayout(type.shape, shards, by)
    if together > 1:
        units = ShardLayout((layout.size // together,), shards)
        return replace(layout, cuts=tuple(bound * together for bound in units.bounds[1:]))
    if traffic is None or not layout.size:
        return layout
    row_bytes = max(1, type.size_bytes // layout.size)
    most_rows = layout.size if max_shard_bytes is None else max_shard_bytes // row_bytes
    return replace(layout, cuts=traffic_cuts(traffic, layout.size, shards, most_rows))


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


def traffic_cuts(traffic: Any, rows: int, shards: int, most_rows: int) -> tuple[int, ...]:
    """The `cuts` with which the most used shard is used least.

    traffic    [rows]: how often each row was looked up, at least 0; all zero counts as even use
    most_rows  most rows of a shard
    raises     VariableError for other traffic, and for more rows than the shards may have
    """
    counts = np.asarray(traffic)
    is_countable = counts.dtype.kind in "iuf" and counts.shape == (rows,)
    if not is_countable or not (np.isfinite(counts) & (counts >= 0)).all():
        raise VariableError(
            f"traffic: expected the number of lookups of each of {rows} rows, at least 0, got {counts.dtype} of "
            f"{counts.shape}",
            "count them: np.bincount(ids, minlength=rows)",
        )
    if shards * most_rows < rows:
        raise VariableError(
            f"max_shard_bytes: expected room for {rows} rows in {shards} shards, got room for {most_rows} in each",
            "give a larger limit, or more shards",
        )
    before = np.concatenate([[0.0], np.cumsum(counts if counts.any() else np.ones(rows), dtype=np.float64)])

    def within(limit: float) -> list[int]:
        """The cuts of shards that are filled up to a limit, each with at least one row."""
        cuts = [0]
        for others in reversed(range(shards)):
            end = int(np.searchsorted(before, before[cuts[-1]] + limit, side="right")) - 1
            cuts.append(max(cuts[-1] + 1, min(end, cuts[-1] + most_rows, rows - others)))
        return cuts[1:]

    least, most = 0.0, float(before[-1])
    for _ in range(_HALVINGS):
        limit = (least + most) / 2
        least, most = (least, limit) if within(limit)[-1] == rows else (limit, most)
    return tuple(within(most))
