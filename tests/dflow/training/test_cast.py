"""`restore(..., cast=True)`: arrays of another dtype are converted, or refused where a number would be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.testing import memory_cluster

pytestmark = pytest.mark.filterwarnings("ignore::dflow.tracing.primitives.namesakes.DuplicateNameWarning")

DTYPES = ["bool", "int8", "uint8", "int32", "uint32", "float16", "bfloat16", "float32", "float8_e4m3fn", "complex64"]
RANKS = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}


def rank(dtype: str) -> int:
    return 2 if "float" in dtype else RANKS[np.dtype(dtype).kind]


def test_each_pair_of_dtypes_is_converted_or_refused(tmp_path: Path) -> None:
    for saved in DTYPES:
        value = jnp.array([0, 1, 1]).astype(saved)
        path = tmp_path / f"{saved}.safetensors"
        dflow.save(path, {"w": dflow.Variable(value)})
        for held in DTYPES:
            variable = {"w": dflow.Variable(jnp.zeros(3, held))}
            if saved != held:
                with pytest.raises(dflow.CheckpointError, match="changed"):
                    dflow.restore(path, variable)
            if rank(saved) > rank(held):
                with pytest.raises(dflow.CheckpointError, match="changed"):
                    dflow.restore(path, variable, cast=True)
                continue
            report = dflow.restore(path, variable, cast=True)
            assert list(report.converted) == (["w"] if saved != held else [])
            np.testing.assert_array_equal(np.asarray(variable["w"].read()), np.array([0, 1, 1]).astype(held))


@pytest.mark.parametrize(
    ("value", "held", "says"),
    [
        (np.float32([1, 1e6]), "float16", r"array 'w': expected numbers that float16 holds, got 1000000.0 at \(1,\)"),
        (np.int32([1, 300]), "int8", r"expected numbers that int8 holds, got 300 at \(1,\)"),
        (np.int32([-1]), "uint32", r"expected numbers that uint32 holds, got -1 at \(0,\)"),
        (np.float32([np.nan, np.inf]), "float16", ""),
    ],
)
def test_a_number_that_would_be_lost_is_an_error(value: Any, held: str, says: str, tmp_path: Path) -> None:
    dflow.save(tmp_path / "c", {"w": dflow.Variable(value)})
    variable = {"w": dflow.Variable(jnp.zeros(value.shape, held))}
    if says:
        with pytest.raises(dflow.CheckpointError, match=says):
            dflow.restore(tmp_path / "c", variable, cast=True)
        assert not np.asarray(variable["w"].read()).any()
    else:
        dflow.restore(tmp_path / "c", variable, cast=True)
        np.testing.assert_array_equal(np.asarray(variable["w"].read()), value.astype(held))


def test_shards_on_tasks_are_converted(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float16).reshape(6, 2)
    dflow.save(tmp_path / "c.safetensors", {"w": dflow.Variable(rows)})
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            table = dflow.ShardedVariable(lambda: jnp.zeros((6, 2)), name="w")
        with pytest.raises(dflow.CheckpointError, match="where dtypes differ alone, give cast=True"):
            dflow.restore(tmp_path / "c.safetensors", table)
        dflow.restore(tmp_path / "c.safetensors", table, cast=True)
        np.testing.assert_array_equal(table.read(), rows)
        cluster.close()


def test_the_remedy_for_a_transposed_array_works(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    dflow.save(tmp_path / "c.safetensors", {"w": dflow.Variable(weight)})
    variable = dflow.Variable(jnp.zeros((3, 2)))
    with pytest.raises(dflow.CheckpointError, match=r"where arrays are transposed, .* transpose={'w': \(1, 0\)}"):
        dflow.restore(tmp_path / "c.safetensors", {"w": variable})
    dflow.restore(tmp_path / "c.safetensors", {"w": variable}, transpose={"w": (1, 0)})
    np.testing.assert_array_equal(variable.read(), weight.T)
