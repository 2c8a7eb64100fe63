"""Variables and optimizers on the tasks of a cluster: used as those of one process, with errors at the user's lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeviceError, VariableError, VariableShapeError
from dflow.tracing.ir.updates import KINDS
from tests.user_line import line_of


def zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


def test_an_add_outside_of_any_function_is_one_update_on_the_task(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(3), name="v")
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]

    def refuse(*_: Any) -> None:
        raise AssertionError("another worker's update may come between a read and a write")

    task.server.store.write = refuse  # type: ignore[method-assign]
    v.assign_add(jnp.ones(3))
    v.assign_add(jnp.ones(3))
    np.testing.assert_array_equal(v, [2, 2, 2])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.ones(3, np.float32), r"variable 'v' holds f32\[2\] but assign was given f32\[3\]"),
        (np.ones(2, np.int32), r"variable 'v' holds f32\[2\] but assign was given i32\[2\]"),
    ],
)
def test_a_wrong_value_for_a_remote_variable(worker: Cluster, value: Any, text: str) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(2), name="v")

    with pytest.raises(VariableShapeError, match=text) as caught:
        v.assign(value)
    assert line_of(caught.value, __file__) == "v.assign(value)"


def test_a_variable_on_a_task_is_made_among_the_parameter_servers() -> None:
    with dflow.device("ps:1"), pytest.raises(DeviceError, match=r"made under dflow.device\('ps:1'\), but in this"):
        dflow.Variable(zeros(2), name="v")


def test_a_variable_needs_a_name_among_the_parameter_servers(worker: Cluster) -> None:
    with (
        worker.parameter_servers(),
        pytest.raises(VariableError, match=r"of f32\[2\] is created .* without a name(.|\n)*name='...'") as caught,
    ):
        dflow.Variable(jnp.zeros(2))
    assert line_of(caught.value, __file__) == "dflow.Variable(jnp.zeros(2))"


def test_an_optimizer_without_a_name_shares_its_slots_between_processes() -> None:
    with memory_cluster(workers=2) as cluster, closing(cluster.worker(0)) as one, closing(cluster.worker(1)) as other:
        made = []
        for worker in (one, other):
            with worker.parameter_servers():
                w = dflow.Variable(zeros(2), name="w")
            made.append(dflow.Optimizer(optax.sgd(1.0, momentum=0.5), [w]))
        assert made[0].name == made[1].name
        for optimizer in made:
            dflow.jit(lambda optimizer=optimizer: optimizer.apply([jnp.ones(2)]))()
        np.testing.assert_allclose(made[0].variables[0], [-2.5, -2.5])  # the second moves by 1 + 0.5


def test_a_second_optimizer_of_variables_on_tasks_needs_a_name(worker: Cluster) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(zeros(2), name="w")
    dflow.Optimizer(optax.sgd(0.1), [w])
    with pytest.raises(VariableError, match=r"a second optimizer of variables 'w': .*(.|\n)*name='...'") as caught:
        dflow.Optimizer(optax.adam(0.1), [w])
    assert line_of(caught.value, __file__) == "dflow.Optimizer(optax.adam(0.1), [w])"
    assert dflow.Optimizer(optax.adam(0.1), [w], name="adam").name == "adam"


def test_an_asynchronous_step_that_trains_variables_of_its_own_process_is_refused(worker: Cluster) -> None:
    mine = dflow.Variable(0.0, name="mine")
    own = dflow.Optimizer(optax.sgd(1.0), [mine], name="own")
    compiled = dflow.jit(lambda x: own.apply([x]))
    compiled(1.0)
    text = "variable 'mine' of 'own' lives in this process, so that the other workers would train variables"
    for step in (compiled, lambda x: [compiled(x)], lambda x: own.apply([x])):
        with pytest.raises(VariableError, match=text) as caught:
            list(dflow.distributed.Async(worker).run(step, [1.0], steps=1, name=str(id(step))))
        assert line_of(caught.value, __file__) == 'mine = dflow.Variable(0.0, name="mine")'
        assert float(mine) == -1.0
    list(dflow.distributed.Async(dflow.connect()).run(compiled, [1.0], steps=1))
    compiled(1.0)
    assert float(mine) == -3.0


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_every_update_and_lookup_of_a_remote_variable(worker: Cluster, traced: bool) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(lambda: jnp.arange(6.0).reshape(3, 2), name="v")
    alone = dflow.Variable(jnp.arange(6.0).reshape(3, 2))
    indices, rows = jnp.array([2, 0, 2]), jnp.array([[1.0, 2.0], [3.0, -4.0], [0.5, 9.0]])
    # An optimizer's update, which is not a method of a variable; `test_rounded_add` tests it.
    for kind in [kind for kind in KINDS if kind != "assign_add_rounded"]:
        for variable in (v, alone):
            update = getattr(variable, kind)
            (dflow.jit(update) if traced else update)(*([rows] if not KINDS[kind].by_rows else [indices[:2], rows[:2]]))
        np.testing.assert_array_equal(v.read(), alone.read(), err_msg=kind)
    np.testing.assert_array_equal((dflow.jit(v.gather) if traced else v.gather)(indices), alone.read()[indices])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_a_remote_variable_of_any_other_dtype(worker: Cluster, dtype: str) -> None:
    ones = jnp.ones((3, 2), dtype)
    with worker.parameter_servers():
        v = dflow.Variable(lambda: jnp.zeros((3, 2), dtype), name="v")
    v.assign(ones)
    v.scatter_update(jnp.array([0]), jnp.zeros((1, 2), dtype))
    got = dflow.jit(lambda: (v.read(), v.gather(jnp.array([1]))))()
    assert got[0].dtype == got[1].dtype == v.read().dtype == v.dtype
    np.testing.assert_array_equal(np.asarray(got[0], np.complex64)[:, 0], [0, 1, 1])
