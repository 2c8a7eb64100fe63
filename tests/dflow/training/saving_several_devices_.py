"""Sharded arrays are written by shard, and read into any sharding.

`test_several_devices.py` runs this with eight devices.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import zarr
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import dflow
from dflow.lowering.files.array_files import read_arrays
from tests.lowering.files.written_arrays import write_arrays


def test_a_sharded_array_is_written_by_shard_and_read_into_any_sharding(tmp_path: Path) -> None:
    devices = np.array(jax.devices())
    values = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    places = {
        "rows": NamedSharding(Mesh(devices, "d"), PartitionSpec("d")),
        "columns": NamedSharding(Mesh(devices[:2], "d"), PartitionSpec(None, "d")),
        "both": NamedSharding(Mesh(devices[:4].reshape(2, 2), ("a", "b")), PartitionSpec("a", "b")),
        "whole": NamedSharding(Mesh(devices, "d"), PartitionSpec()),
    }
    write_arrays(tmp_path / "c", {name: jax.device_put(values, place) for name, place in places.items()})
    group = zarr.open_group(tmp_path / "c", mode="r")
    assert {name: group[name].chunks for name in places} == {
        "rows": (1, 6),
        "columns": (8, 3),
        "both": (4, 3),
        "whole": (8, 6),
    }
    for place in places.values():
        for array in read_arrays(tmp_path / "c").read(dict.fromkeys(places, place)).values():
            assert array.sharding == place
            np.testing.assert_array_equal(array, values)


def test_a_variable_keeps_the_sharding_it_has_whatever_that_of_the_saved_one(tmp_path: Path) -> None:
    values = np.arange(48.0, dtype=np.float32).reshape(8, 6)
    devices = np.array(jax.devices())
    places = [
        NamedSharding(Mesh(devices, "d"), PartitionSpec("d")),
        NamedSharding(Mesh(devices[:2], "d"), PartitionSpec(None, "d")),
        SingleDeviceSharding(devices[3]),
    ]
    saved = dflow.Variable(jax.device_put(values, places[0]), name="v")
    dflow.save(tmp_path / "c", saved)
    for place in places:
        v = dflow.Variable(jax.device_put(jnp.zeros_like(values), place), name="v")
        dflow.restore(tmp_path / "c", v)
        assert v.read().sharding == place
        np.testing.assert_array_equal(v.read(), values)
        dflow.jit(lambda v=v: v.assign_add(jnp.ones_like(v)))()
        np.testing.assert_array_equal(v.read(), values + 1)
    free = dflow.Variable(jnp.zeros_like(values), name="v")
    dflow.restore(tmp_path / "c", free)
    assert not free.read().committed
    np.testing.assert_array_equal(free.read(), values)
