"""Variables on a task that a scope names, and spread over the devices of their task."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task.variable_layout import on_devices
from dflow.distributed.wire.messages.variables import VariableLayout
from dflow.lowering.files.array_files import read_arrays
from dflow.testing import MemoryCluster
from dflow.tracing.errors import DeviceError
from tests.distributed.processes import Spawned


def rows_over(count: int) -> NamedSharding:
    return NamedSharding(AbstractMesh((count,), ("d",), axis_types=(AxisType.Auto,)), PartitionSpec("d"))


def test_a_scope_says_which_task_holds_a_variable(worker: Cluster) -> None:
    with worker.parameter_servers():
        for index in (1, 0):
            with dflow.device(f"ps:{index}"):
                v = dflow.Variable(1.0, name=f"on {index}")
                beside = dflow.Variable(2.0, name=f"beside {index}", near=v)
            assert v.device == beside.device == f"/job:ps/task:{index}"


@pytest.mark.parametrize(
    ("scope", "text"),
    [
        ("ps:7", "is none of the tasks there: /job:ps/task:0,"),
        ("cpu:0", "name a task, such as ps:0"),
        ("ps:0/cpu:0", "name a task, such as ps:0"),
    ],
)
def test_a_scope_without_a_task_of_the_job_is_refused(worker: Cluster, scope: str, text: str) -> None:
    with pytest.raises(DeviceError, match=text) as caught, worker.parameter_servers(), dflow.device(scope):
        dflow.Variable(1.0, name="v")
    assert re.search(r"variable 'v' .*\n  at .*test_variable_layouts.py:\d+", str(caught.value))


def test_a_variable_is_spread_over_the_devices_of_its_task(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        table = dflow.Variable(lambda: jnp.arange(8.0).reshape(4, 2), name="table", sharding=rows_over(1))
    np.testing.assert_array_equal(table, np.arange(8.0).reshape(4, 2))
    place = memory.tasks["ps:0"].server.store.sharding("table")
    assert isinstance(place, NamedSharding)
    assert place.spec == PartitionSpec("d")
    assert table.sharding is None


def test_more_devices_than_the_task_has_are_refused(worker: Cluster) -> None:
    count = jax.local_device_count() + 1
    says = rf"(?s)'table' is spread over {count} devices, and its task has {count - 1}.*test_variable_layouts.py"
    with pytest.raises(DeviceError, match=says), worker.parameter_servers():
        dflow.Variable(jnp.zeros(2 * count), name="table", sharding=rows_over(count))
    with pytest.raises(DeviceError, match="spread over 0 devices"):
        on_devices(VariableLayout((("d", 0),), (("d",),)), "table")


@pytest.mark.parametrize(
    "sharding",
    [
        SingleDeviceSharding(jax.devices()[0]),
        NamedSharding(Mesh(np.array(jax.devices()[:1]), ("d",)), PartitionSpec("d")),
        NamedSharding(AbstractMesh((1,), ("d",), axis_types=(AxisType.Explicit,)), PartitionSpec("d")),
    ],
)
def test_a_sharding_over_devices_of_this_process_is_refused(worker: Cluster, sharding: jax.sharding.Sharding) -> None:
    says = r"(?s)'v' .*not over the devices of another task\n  at .*test_variable_layouts.py:\d+\n  give .*AbstractMesh"
    with worker.parameter_servers(), pytest.raises(DeviceError, match=says):
        dflow.Variable(jnp.zeros(2), name="v", sharding=sharding)


#: A process of one device uses a table on a task of four, with an optimizer, in steps and outside of them.
SPREAD = """
import contextlib
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
import dflow

mesh = AbstractMesh((4,), ("d",), axis_types=(AxisType.Auto,))

def program(place, **options):
    with place:
        table = dflow.Variable(lambda: jnp.arange(64.0).reshape(16, 4), name="table", **options)
        bias = dflow.Variable(jnp.zeros(4), name="bias")
        optimizer = dflow.Optimizer(optax.adam(0.1), [table, bias], name="adam")

    @dflow.jit
    def step(x):
        loss, gradients = dflow.value_and_grad(lambda: jnp.mean((x @ table + bias) ** 2), [table, bias])()
        optimizer.apply(gradients)
        return loss, table.gather(jnp.array([3, 15]))

    return table, step

cluster = dflow.connect()
spread, step = program(cluster.parameter_servers(), sharding=NamedSharding(mesh, PartitionSpec("d")))
with cluster.parameter_servers():
    momentum = dflow.Variable(lambda: jnp.zeros((16, 4)), name="momentum", near=spread)
whole, plain = program(contextlib.nullcontext())
for number in range(3):
    x = jnp.full((2, 16), 0.1 * number)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-5), step(x), plain(x))
np.testing.assert_allclose(spread.read(), whole.read(), rtol=1e-5)
dflow.save("saved", {"table": spread, "momentum": momentum})
saved = np.asarray(spread)
spread.assign(jnp.zeros((16, 4)))
spread.assign_add(jnp.ones((16, 4)))
assert float(spread.read().sum()) == 64
dflow.restore("saved", {"table": spread, "momentum": momentum})
np.testing.assert_array_equal(spread, saved)
cluster.report("devices", jax.local_device_count())
cluster.close()
"""


def test_a_task_of_several_devices_spreads_a_table_over_them(tmp_path: Path) -> None:
    (tmp_path / "spread.py").write_text(SPREAD)
    words = "-m dflow launch --all-tables --ps 1 --workers 1 --env ps:0:JAX_NUM_CPU_DEVICES=4 spread.py"
    with Spawned(*words.split(), cwd=tmp_path) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert re.search(r"\n devices +1 ", output), output
    # A part of the table is written for each device; the slots beside it are spread like it.
    for name in ("table", "momentum"):
        assert len([*(tmp_path / "saved" / name).glob("c*")]) == 4
        assert read_arrays(tmp_path / "saved").types[name].shape == (16, 4)
