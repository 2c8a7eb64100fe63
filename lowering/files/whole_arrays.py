"""Arrays over the devices of several processes: created without messages between them, and read in one of them.

A process has the whole of an array if the devices of other processes only have copies of the parts on its own devices.
A variable that is replicated on all devices is an example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from dflow.tracing.errors import DeviceError
from dflow.tracing.ir.types import key_implementation


def is_whole_in_each(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether each process that has devices of the sharding has the whole of an array of this shape."""
    if sharding.is_fully_addressable or sharding.is_fully_replicated:
        return True
    found: dict[int, set[Any]] = defaultdict(set)
    indices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in indices.items():
        found[device.process_index].add(bounds_of(index))
    return len({frozenset(bounds) for bounds in found.values()}) == 1


def is_whole_here(value: Any) -> bool:
    """Whether this process has the whole of an array."""
    return not isinstance(value, jax.Array) or is_whole_in_each(value.sharding, value.shape)


def whole_here(value: Any) -> Any:
    """Return an array that this process has the whole of as an array of this process alone."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if value.is_fully_replicated:
        return value.addressable_data(0)
    whole = np.empty(value.shape, value.dtype)
    for shard in each_once(value.addressable_shards):
        whole[shard.index] = shard.data
    return whole


def each_once(shards: Iterable[Any]) -> Iterable[Any]:
    """Return one of the shards of each part."""
    return {bounds_of(shard.index): shard for shard in shards}.values()


def own_copy(value: Any, sharding: Any = None) -> jax.Array:
    """Return a JAX array that shares no memory with `value`, with a sharding if given."""
    # `device_put` aliases aligned memory, even with may_alias=False.
    return jnp.array(value, copy=True, device=sharding)


def spread(shape: tuple[int, ...], sharding: Any, piece_at: Callable[[Any], Any]) -> jax.Array:
    """Return a JAX array of this sharding, of copies of the pieces at the indices of this process's devices."""
    indices = sharding.addressable_devices_indices_map(shape)
    # Copies: a program may overwrite a JAX array's buffer, and a piece may serve several devices.
    parts = [
        own_copy(piece_at(index), SingleDeviceSharding(device, memory_kind=sharding.memory_kind))
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def placed(value: Any, sharding: Sharding) -> jax.Array:
    """Return an array of this process with a sharding, also of devices of other processes, which do the same.

    `jax.device_put` would wait for them.
    """
    is_shared = isinstance(value, jax.Array) and not value.is_fully_addressable
    if sharding.is_fully_addressable or is_shared:
        moved: jax.Array = jax.device_put(value, sharding)
        return moved
    value = value if hasattr(value, "dtype") else jnp.asarray(value)
    if not jnp.issubdtype(value.dtype, jax.dtypes.extended):
        host = np.asarray(value)
        return spread(host.shape, sharding, host.__getitem__)
    if not isinstance(sharding, NamedSharding):
        raise DeviceError(
            f"keys: expected a NamedSharding over several processes, got {sharding}", "give jax.sharding.NamedSharding"
        )
    data = np.asarray(jax.random.key_data(value))
    of_data = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *[None] * (data.ndim - len(sharding.spec))))
    keys: jax.Array = jax.random.wrap_key_data(
        spread(data.shape, of_data, data.__getitem__), impl=key_implementation(value.dtype)
    )
    return keys


def bounds_of(index: tuple[slice, ...] | None) -> tuple[Any, ...]:
    return tuple((part.start, part.stop) for part in index or ())
