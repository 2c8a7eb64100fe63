"""Exports in a process of several devices: `test_several_devices.py` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dflow

MESH = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
ROWS = NamedSharding(MESH, PartitionSpec("d"))
X = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_where_state_lies_is_no_part_of_an_export(tmp_path: Path) -> None:
    spread = dflow.Variable(jnp.ones((4, 2)), name="spread", sharding=ROWS)
    with dflow.device("cpu:3"):
        aside = dflow.Variable(jnp.ones(2), name="aside")

    def step(x: Any) -> Any:
        spread.assign_add(x)
        aside.assign_add(spread.read().sum(0))
        return spread.read()

    there = dflow.load(dflow.export(step, X).save(tmp_path / "made"), prefix="loaded/")
    np.testing.assert_array_equal(there(X), 1 + X)
    np.testing.assert_array_equal(there.variables["aside"], 1 + (1 + X).sum(0))
    assert there.variables["spread"].read().devices() == {jax.devices()[0]}


def test_a_program_for_several_devices_is_refused_by_the_op_or_the_option_that_asks_for_them() -> None:
    mapped = jax.shard_map(jnp.sin, mesh=MESH, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
    with pytest.raises(dflow.ExportError, match=r"call cannot be exported: shard_map spreads over 2 devices \(d: 2\)"):
        dflow.export({"call": (lambda x: mapped(x), X)})  # noqa: PLW0108 -- its line is what is told
    constrained = {"call": (lambda x: jax.lax.with_sharding_constraint(x, ROWS), X)}
    with pytest.raises(dflow.ExportError, match="sharding_constraint spreads over 2 devices"):
        dflow.export(constrained)
    for jit in (jax.jit, dflow.jit):
        with pytest.raises(dflow.ExportError, match="call has shardings over 2 devices, and an export is for one"):
            dflow.export({"call": (jit(lambda x: x * 2, in_shardings=ROWS), X)})

    def aside(x: Any) -> Any:
        with dflow.device("cpu:1"):
            return x * 2

    with pytest.raises(dflow.ExportError, match="aside cannot be exported: mul is placed on cpu:1"):
        dflow.export(aside, X)
