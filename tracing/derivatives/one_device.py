"""Values on several devices, moved to one device so that JAX can compute with all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def on_one_device(values: Sequence[Any]) -> list[Any]:
    """Move all values to the devices of the one that is on most devices; no change if JAX can combine them anyway."""
    placed = [value for value in values if _is_placed(value)]
    if len({frozenset(value.sharding.device_set) for value in placed}) < 2:
        return list(values)
    widest = max(placed, key=lambda value: len(value.sharding.device_set)).sharding
    sharding: Sharding = NamedSharding(widest.mesh, PartitionSpec()) if isinstance(widest, NamedSharding) else widest
    return [
        jax.device_put(value, sharding)
        if _is_placed(value) and value.sharding.device_set != widest.device_set
        else value
        for value in values
    ]


def _is_placed(value: Any) -> bool:
    return isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer) and value.committed
