"""Routing of ids to the shards that have their buckets, and of the rows back to the caller.

The ids are deduplicated and sorted by bucket, so those of one shard are a slice, and those of one bucket are
neighbours. As in `routing`, each shard gets an array with room for all ids, and only the first ones are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.tables.routing import Route
from dflow.tracing.primitives.first_rows import first_rows
from dflow.tracing.primitives.running_sums import running_sums
from dflow.tracing.wide_ids import WideIds, mixed


def route_ids(bounds: Sequence[int], ids: WideIds) -> Route:
    """The route of ids, u32[n] each part, over shards; `bounds` has the number of buckets before each, and of all.

    In place of row numbers it has ids, u32[n, 2]: upper and lower bits, those of one bucket next to each other; past
    the counts they are zero. With a symbolic n, as in an export, each shard is asked for all ids.
    """
    [count] = ids.low.shape
    bucket, limits = bucket_of(ids.high, ids.low, bounds[-1]), np.asarray(bounds, np.int32)
    shards, number = range(len(bounds) - 1), jnp.arange(count, dtype=jnp.int32)
    if not isinstance(count, int):  # JAX has no scan over such a size, and an export sends nothing
        shard_of = (bucket[:, None] >= limits[1:]).sum(1, dtype=jnp.int32)
        each = jnp.stack([ids.high, ids.low], 1)
        return Route([each for _ in shards], [jnp.int32(count) for _ in shards], shard_of * jnp.int32(count) + number)
    bucket, high, low, number = jax.lax.sort((bucket, ids.high, ids.low, number), num_keys=3)
    is_same = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    ranks = running_sums(jnp.concatenate([jnp.ones(1, jnp.int32), 1 - is_same])) - 1
    # A second id of a rank is the same id.
    sorted_ids = jnp.zeros((2 * count, 2), jnp.uint32).at[ranks].set(jnp.stack([high, low], 1))
    its_bucket = jnp.full(count, bounds[-1], jnp.int32).at[ranks].set(bucket)
    starts = jnp.searchsorted(its_bucket, limits).astype(jnp.int32)
    shard_of = jnp.searchsorted(limits[1:], bucket, side="right")
    counts = [starts[shard + 1] - starts[shard] for shard in shards]
    routed = [
        first_rows(jax.lax.dynamic_slice(sorted_ids, (starts[shard], np.int32(0)), (count, 2)), counts[shard])
        for shard in shards
    ]
    positions = ranks + (np.arange(len(bounds) - 1, dtype=np.int32) * count - starts[:-1])[shard_of]
    return Route(routed, counts, jnp.zeros(count, jnp.int32).at[number].set(positions))


def bucket_of(high: Any, low: Any, buckets: int) -> Any:
    """The bucket of ids, i32[...], from 0 to `buckets` - 1."""
    return (mixed(high, low) % np.uint32(buckets)).astype(jnp.int32)
