"""Routing of row numbers to the shards that have the rows, and of the rows back to the caller.

Of equal numbers one is sent, to the shard that has the row. Each shard gets an array with room for the most that there
may be, and only the first ones are sent (`first_rows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dflow.tables.shard_layout import ShardLayout
from dflow.tracing.ir.each_once import representatives
from dflow.tracing.ir.wide_sums import summed_at
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.running_sums import running_sums

#: With more shards, sorting by shard takes a CPU less time than counting for each shard.
MOST_COUNTED = 8


class Route(NamedTuple):
    """The rows that each shard is asked for, each once.

    rows       by shard, i32[room]: row numbers in the shard; those past `counts` are past the end
    counts     by shard, i32[]
    positions  i32[n]: of each number given, the position of its row in all shards' concatenated arrays; for a number
               without a row it is past the end
    """

    rows: Sequence[Any]
    counts: Sequence[Any]
    positions: Any


def route(layout: ShardLayout, numbers: Any) -> Route:
    """The route of row numbers, i32[n]; a negative one, or one past the end, has no row."""
    size, [count] = layout.shape[0], numbers.shape
    divided = layout.shards if layout.axis == 0 else 1
    bounds = np.asarray(layout.bounds if divided > 1 else (0, size), np.int32)
    sizes = np.diff(bounds)
    rooms = np.minimum(sizes, count)
    is_row = (numbers >= 0) & (numbers < size)
    inside = jnp.where(is_row, numbers, 0)
    positions = layout.positions(inside) if divided > 1 else inside
    shard_of = jnp.searchsorted(bounds[1:], positions, side="right", method="compare_all").astype(jnp.int32)
    equal = representatives(inside, is_row)
    is_first = is_row & (equal == jnp.arange(count))
    cells, counts = cells_of(shard_of, is_first, rooms)
    none = int(rooms.sum())
    asked = jnp.asarray(np.repeat(sizes, rooms))
    asked = asked.at[jnp.where(is_first, cells, none)].set(positions - jnp.asarray(bounds)[shard_of], mode="drop")
    rows = [
        first_rows(each, counts[shard], fill=int(sizes[shard]))
        for shard, each in enumerate(jnp.split(asked, np.cumsum(rooms)[:-1]))
    ]
    return Route(rows, counts, jnp.where(is_row, cells[equal], none))


def cells_of(shard_of: Any, is_first: Any, rooms: Any) -> tuple[Any, list[Any]]:
    """The cell of each element in the concatenated arrays of all shards, i32[n], and the number of elements of each.

    shard_of  i32[n], the shard that the element goes to
    is_first  bool[n], a mask of the elements that count; they keep their order within a shard
    rooms     the size of the array of each shard
    """
    ranks, counts = _ranks(shard_of, is_first, len(rooms))
    room_before = jnp.asarray(np.cumsum([0, *rooms[:-1]]).astype(np.int32))
    # One value for each shard: it is sent once, with the row numbers.
    return room_before[shard_of] + ranks, [counts[shard] for shard in range(len(rooms))]


def rows_of_each_shard(layout: ShardLayout, numbers: Any) -> list[tuple[Any, Any]]:
    """By shard, a row number in it for each of the numbers, i32[n], and whether it has that row.

    For a row that it does not have the number is past its end. This is for any n, also a symbolic one, and asks each
    shard for as many rows.
    """
    if layout.axis == 1:
        return [(numbers, jnp.ones(numbers.shape, bool))] * layout.shards
    positions, bounds = layout.positions(numbers), layout.bounds
    owned = [(positions >= first) & (positions < end) for first, end in itertools.pairwise(bounds)]
    return [
        (jnp.where(is_own, positions - first, end - first), is_own)
        for is_own, (first, end) in zip(owned, itertools.pairwise(bounds), strict=True)
    ]


def _ranks(shard_of: Any, is_first: Any, shards: int) -> tuple[Any, Any]:
    """For each number that is the first of its kind, how many before it go to its shard: i32[n]; and i32[shards]."""
    [count] = shard_of.shape
    if shards > MOST_COUNTED and shards * count < np.iinfo(np.int32).max:
        # One array has them by shard, and in their order in each shard.
        ordered = jnp.sort(jnp.where(is_first, shard_of * count + jnp.arange(count), shards * count))
        starts = jnp.searchsorted(ordered, jnp.arange(shards + 1) * count).astype(jnp.int32)
        positions = jnp.zeros(count, jnp.int32).at[jnp.where(ordered < shards * count, ordered % count, count)]
        return positions.set(jnp.arange(count), mode="drop") - starts[shard_of], starts[1:] - starts[:-1]
    is_of = is_first[:, None] & (shard_of[:, None] == jnp.arange(shards))
    so_far = running_sums(is_of)
    counts = so_far[-1] if count else jnp.zeros(shards, jnp.int32)
    return jnp.take_along_axis(so_far, shard_of[:, None], 1)[:, 0] - 1, counts


def _least(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return False
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.bool_):
        return True
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max


#: By kind of an update by rows: the rows that change nothing, and how rows of one number are combined.
_COMBINED: Mapping[str, tuple[Callable[[Any], Any], str]] = {
    "scatter_update": (lambda dtype: 0, "set"),
    "scatter_add": (lambda dtype: 0, "add"),
    "scatter_sub": (lambda dtype: 0, "add"),
    "scatter_mul": (lambda dtype: 1, "multiply"),
    "scatter_max": (_least, "max"),
    "scatter_min": (_most, "min"),
}


def combined(kind: str, way: Route, rows: Any) -> list[Any]:
    """By shard, the rows of an update: those for one number combined, [room, ...]."""
    neutral, method = _COMBINED[kind]
    rooms = [each.shape[0] for each in way.rows]
    if method == "add":
        whole = summed_at(way.positions, rows, sum(rooms))
    else:
        whole = jnp.full((sum(rooms), *rows.shape[1:]), neutral(rows.dtype), rows.dtype)
        whole = getattr(whole.at[way.positions], method)(rows, mode="drop")
    cuts = np.cumsum(rooms)[:-1]
    return [first_rows(each, count) for each, count in zip(jnp.split(whole, cuts), way.counts, strict=True)]
