"""Other libraries read the safetensors files that dflow writes: of all dtypes, and of tables in shards on tasks."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

import dflow
from dflow.testing import memory_cluster

pytestmark = pytest.mark.once

DTYPES = ["bool", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "int32"]


def test_pytorch_reads_every_dtype_and_writes_it_back(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    read = pytest.importorskip("safetensors.torch")
    # Three elements each, so that most arrays begin at an odd byte.
    weights = dflow.variables({dtype: jnp.array([0, 1, 3]).astype(dtype) for dtype in DTYPES})
    path = tmp_path / "weights.safetensors"
    dflow.save(path, weights)
    tensors = read.load_file(path)
    for dtype, variable in weights.items():
        assert str(tensors[dtype].dtype) == f"torch.{dtype}"
        np.testing.assert_array_equal(tensors[dtype].float().numpy(), variable.read().astype("f4"))
    changed = {name: (tensor.float() * 0 + 1).to(tensor.dtype) for name, tensor in tensors.items()}
    assert isinstance(changed["bool"], torch.Tensor)
    read.save_file(changed, tmp_path / "changed.safetensors", {"format": "pt"})
    assert len(dflow.restore(tmp_path / "changed.safetensors", weights).restored) == len(DTYPES)
    assert all((variable.read() == 1).all() for variable in weights.values())


def test_a_table_in_shards_on_tasks_is_one_array_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "table.safetensors"
    whole = np.arange(14.0, dtype="f4").reshape(7, 2)
    with memory_cluster(ps=2) as memory:
        cluster = memory.worker()
        with cluster.parameter_servers():
            table = dflow.ShardedVariable(jnp.asarray(whole), by="modulo", name="table")
        dflow.save(path, table, metadata={"format": "pt", "epoch": "3"})
        np.testing.assert_array_equal(safetensors.numpy.load_file(path)["table"], whole)
        safetensors.numpy.save_file({"table": whole + 1}, path)
        assert dflow.restore(path, table).restored == ("table",)
        np.testing.assert_array_equal(table.read(), whole + 1)
        safetensors.numpy.save_file({"table": whole[:5]}, path)
        with pytest.raises(dflow.CheckpointError, match=r"changed .*table .*f32\[5,2\] .*f32\[7,2\]"):
            dflow.restore(path, table)
        cluster.close()


def test_the_metadata_is_that_of_the_format(tmp_path: Path) -> None:
    path, state = tmp_path / "weights.safetensors", {"g": dflow.Generator(1, name="g")}
    dflow.save(path, state, metadata={"format": "pt", "epoch": "3"})
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata().items() >= {"format": "pt", "epoch": "3"}.items()
    assert dflow.restore(path, state).restored == ("g",)
    with pytest.raises(dflow.CheckpointError, match=r"expected None for a path without .safetensors, got {'a': 'b'}"):
        dflow.save(tmp_path / "folder", state, metadata={"a": "b"})
    with pytest.raises(dflow.CheckpointError, match=r"expected a dict of texts by names .* got {'epoch': 3}"):
        dflow.save(path, state, metadata={"epoch": 3}, overwrite=True)  # type: ignore[dict-item]
