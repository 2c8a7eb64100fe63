"""Routing of ids to the shards that have their buckets, and of the rows back to the caller.

As in `routing`, of equal ids one is sent. Each shard gets an array with room for all ids, in the order of their first
use in the batch, and only the first ones of the array are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tables.routing import Route, cells_of
from dflow.tracing.ir.each_once import representatives
from dflow.tracing.ir.id_hash import mixed
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.running_sums import running_sums
from dflow.tracing.wide_ids import WideIds


def route_ids(bounds: Sequence[int], ids: WideIds, *, each_once: bool = True) -> Route:
    """The route of ids, u32[n] each part, over shards; `bounds` has the number of buckets before each, and of all.

    In place of row numbers it has ids, u32[n, 2]: upper and lower bits; past the counts they are zero.
    With a symbolic n, as in an export, each shard has room for all ids; unless `each_once`, it is asked for all.
    """
    [count] = ids.low.shape
    bucket, limits = bucket_of(ids.high, ids.low, bounds[-1]), np.asarray(bounds, np.int32)
    shards, number = range(len(bounds) - 1), jnp.arange(count, dtype=jnp.int32)
    if not isinstance(count, int):
        return _of_any_size(len(bounds) - 1, ids, (bucket[:, None] >= limits[1:]).sum(1, dtype=jnp.int32), each_once)
    shard_of = jnp.searchsorted(limits[1:], bucket, side="right", method="compare_all").astype(jnp.int32)
    equal = representatives(ids.low, upper=ids.high)
    is_first = equal == number
    cells, counts = cells_of(shard_of, is_first, [count for _ in shards])
    asked = jnp.zeros((len(shards) * count, 2), jnp.uint32)
    asked = asked.at[jnp.where(is_first, cells, len(asked))].set(jnp.stack([ids.high, ids.low], 1), mode="drop")
    routed = [first_rows(each, counts[shard]) for shard, each in enumerate(jnp.split(asked, len(shards)))]
    return Route(routed, counts, cells[equal])


def _of_any_size(shards: int, ids: WideIds, shard_of: Any, each_once: bool) -> Route:
    """The route of a symbolic number of ids, which JAX cannot split by shard: an export sends nothing."""
    [count] = ids.low.shape
    number, both = jnp.arange(count, dtype=jnp.int32), jnp.stack([ids.high, ids.low], 1)
    if not each_once:
        every = [jnp.int32(count) for _ in range(shards)]
        return Route([both for _ in every], every, shard_of * jnp.int32(count) + number)
    equal = representatives(ids.low, upper=ids.high)
    masks = [(equal == number) & (shard_of == shard) for shard in range(shards)]
    ranks = [running_sums(mask) - 1 for mask in masks]
    rows = [
        jnp.zeros_like(both).at[jnp.where(mask, rank, jnp.int32(count))].set(both, mode="drop")
        for mask, rank in zip(masks, ranks, strict=True)
    ]
    rank = sum(jnp.where(mask, one, 0) for mask, one in zip(masks, ranks, strict=True))
    return Route(rows, [mask.sum(dtype=jnp.int32) for mask in masks], (shard_of * jnp.int32(count) + rank)[equal])


def bucket_of(high: Any, low: Any, buckets: int) -> Any:
    """The bucket of ids, i32[...], from 0 to `buckets` - 1."""
    return (mixed(high, low) % np.uint32(buckets)).astype(jnp.int32)
