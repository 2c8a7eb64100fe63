"""Routing of row numbers to the shards that have the rows, and of the rows back to the caller.

The numbers are deduplicated and sorted by shard, so those of one shard are a slice. Each shard gets an array with room
for the most that there may be, and only the first ones are sent (`first_rows`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.shard_layout import ShardLayout
from dflow.tracing.primitives.first_rows import first_rows


class Route(NamedTuple):
    """The rows that each shard is asked for, each once.

    rows     by shard, i32[room]: row numbers in the shard; those past `counts` are past the end
    counts   by shard, i32[]
    places   i32[n]: of each number given, the place of its row in the concatenated arrays of all shards; for a number
             without a row it is past the end
    """

    rows: Sequence[Any]
    counts: Sequence[Any]
    places: Any


def route(layout: ShardLayout, numbers: Any) -> Route:
    """The route of row numbers, i32[n]; a negative one, or one past the end, has no row."""
    size, [count] = layout.shape[0], numbers.shape
    divided = layout.shards if layout.axis == 0 else 1
    bounds = layout.bounds if divided > 1 else (0, size)
    ranges = [*itertools.pairwise(bounds)]
    rooms = [min(count, end - first) for first, end in ranges]
    is_row = (numbers >= 0) & (numbers < size)
    places = jnp.where(is_row, layout.places(jnp.where(is_row, numbers, 0)) if divided > 1 else numbers, size)
    ascending = jnp.sort(places)
    is_first = jnp.concatenate([jnp.ones(1, bool), ascending[1:] != ascending[:-1]])
    room = count + max(rooms)
    # Not `jnp.cumsum`, which JAX 0.12 exports as an op that it cannot read back.
    ranks = jax.lax.associative_scan(jnp.add, is_first.astype(jnp.int32))
    each_once = jnp.full(room, size, jnp.int32)
    each_once = each_once.at[jnp.where(is_first, ranks - 1, room)].set(ascending, mode="drop")
    starts = jnp.searchsorted(each_once, np.asarray(bounds, np.int32)).astype(jnp.int32)
    # One value for each shard: it is sent once, with the row numbers.
    counts = [starts[shard + 1] - starts[shard] for shard in range(len(ranges))]
    rows = [
        first_rows(jax.lax.dynamic_slice(each_once, [starts[shard]], [room]) - first, counts[shard], fill=end - first)
        for shard, (room, (first, end)) in enumerate(zip(rooms, ranges, strict=True))
    ]
    room_before = np.cumsum([0, *rooms]).astype(np.int32)
    shifts = jnp.concatenate([room_before[:-1] - starts[:-1], jnp.full(1, sum(rooms), jnp.int32)])
    found = jnp.searchsorted(each_once, places).astype(jnp.int32)
    shard_of = jnp.searchsorted(np.asarray(bounds[1:], np.int32), places, side="right")
    return Route(rows, counts, found + shifts[shard_of])


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
    whole = jnp.full((sum(rooms), *rows.shape[1:]), neutral(rows.dtype), rows.dtype)
    whole = getattr(whole.at[way.places], method)(rows, mode="drop")
    cuts = np.cumsum(rooms)[:-1]
    return [first_rows(each, count) for each, count in zip(jnp.split(whole, cuts), way.counts, strict=True)]
