"""Variables and optimizers on the tasks of a cluster: used as those of one process, with errors at the user's lines."""

from __future__ import annotations

import gc
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
from dflow.tracing.errors import (
    DeviceError,
    GraphTypeError,
    VariableError,
    VariableShapeError,
)
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
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_wrong_value_for_a_remote_variable(worker: Cluster, value: Any, text: str, traced: bool) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(2), name="v")

    def write(x: Any) -> None:
        v.assign(x)

    with pytest.raises(VariableShapeError, match=text) as caught:
        (dflow.jit(write) if traced else write)(value)
    assert line_of(caught.value, __file__) == "v.assign(x)"


def test_one_name_with_two_types_is_refused_from_one_worker_and_from_two(memory: MemoryCluster) -> None:
    first, second = memory.worker(0), memory.worker(1)
    with closing(first), closing(second):
        with first.parameter_servers():
            dflow.Variable(zeros(2), name="taken")
        for cluster in (first, second):
            with (
                pytest.raises(VariableError, match=r"variable 'taken' is float32\[2\] and was asked") as caught,
                cluster.parameter_servers(),
            ):
                dflow.Variable(zeros(3), name="taken")
            assert "float32[3]" in str(caught.value)
            assert line_of(caught.value, __file__) == 'dflow.Variable(zeros(3), name="taken")'
            with cluster.parameter_servers():
                dflow.Variable(zeros(2), name="taken")


def test_a_job_without_tasks(worker: Cluster) -> None:
    text = "job 'gpu', which has no task that is live or expected"
    with pytest.raises(DeviceError, match=text) as caught, worker.parameter_servers("gpu"):
        dflow.Variable(zeros(2), name="v")
    assert line_of(caught.value, __file__) == 'dflow.Variable(zeros(2), name="v")'


def test_a_variable_on_a_task_is_made_among_the_parameter_servers() -> None:
    with dflow.device("ps:1"), pytest.raises(DeviceError, match=r"made under dflow.device\('ps:1'\), but in this"):
        dflow.Variable(zeros(2), name="v")


def test_gradients_that_do_not_fit_are_refused_before_any_step(worker: Cluster) -> None:
    with worker.parameter_servers():
        model = dflow.variables({"a": zeros(2), "b": zeros(3)}, prefix="fit/")
        optimizer = dflow.Optimizer(optax.sgd(0.1), model, name="fit/sgd")

    @dflow.jit
    def step() -> None:
        optimizer.apply({"a": jnp.ones(2)})

    with pytest.raises(GraphTypeError, match="the gradients have the structure") as caught:
        step()
    assert line_of(caught.value, __file__) == 'optimizer.apply({"a": jnp.ones(2)})'


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


def test_an_asynchronous_step_may_write_variables_of_its_own_process_without_an_optimizer(worker: Cluster) -> None:
    with worker.parameter_servers():
        far = dflow.Variable(0.0, name="far")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [far], name="opt")
    count, key = dflow.Variable(0, name="count"), dflow.Generator(0)
    kept = dflow.Optimizer(optax.sgd(1.0), [dflow.Variable(0.0, name="unused")], name="kept")

    @dflow.jit
    def step(x: Any) -> Any:
        count.assign_add(1)
        optimizer.apply([x])
        return jax.random.uniform(key.split())

    assert len(list(dflow.distributed.Async(worker).run(step, [1.0] * 3, steps=3))) == 3
    assert (int(count), float(far), kept.name) == (3, -3.0, "kept")


def test_an_optimizer_of_the_process_made_and_dropped_in_a_run_traces_no_step_again(worker: Cluster) -> None:
    with worker.parameter_servers():
        far = dflow.Variable(0.0, name="far")
        optimizer = dflow.Optimizer(optax.sgd(1.0), [far], name="opt")
    step = dflow.jit(lambda x: optimizer.apply([x]))
    near = dflow.Variable(0.0, name="near")
    gc.collect()  # the optimizers of other tests, whose traces are refused here
    kept: list[dflow.Optimizer] = []
    for turn, _ in enumerate(dflow.distributed.Async(worker).run(step, [1.0] * 4, steps=4)):
        if turn == 0:
            kept.append(dflow.Optimizer(optax.sgd(1.0), [near], name="own"))
            kept[0].apply([1.0])
        elif turn == 2:
            kept.clear()
            gc.collect()
    assert len(step.trace_log()) == 1
    assert (float(near), float(far)) == (-1.0, -4.0)


def test_an_optimizer_traced_in_a_run_but_not_by_its_steps_is_refused_in_them(worker: Cluster) -> None:
    near = dflow.Variable(0.0, name="near")
    with worker.parameter_servers():
        far = dflow.Variable(0.0, name="far")
    compiled: list[Callable[[Any], Any]] = []

    def step(x: Any) -> None:
        far.assign_add(x)
        for fn in compiled:
            fn(x)

    run = dflow.distributed.Async(worker).run(step, [1.0] * 3, steps=3)
    next(run)
    own = dflow.Optimizer(optax.sgd(1.0), [near], name="own")
    compiled.append(dflow.jit(lambda x: own.apply([x])))
    compiled[0](1.0)
    with pytest.raises(VariableError, match="variable 'near' of 'own' lives in this process"):
        next(run)
    assert (float(near), float(far)) == (-1.0, 2.0)


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
