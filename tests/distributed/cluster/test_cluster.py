"""A worker's view of a cluster in this process: it joins, trains, and uses variables and optimizers on tasks."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.coordinator.membership import FINISHED
from dflow.distributed.coordinator_role import make_coordinator
from dflow.distributed.task_role import join_cluster
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import (
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    RemoteError,
    VariableError,
    VariableShapeError,
)
from dflow.tracing.ir.updates import KINDS
from tests.distributed.waiting import DEADLINE_S, until
from tests.user_line import line_of

SOON = ClusterSettings(join_timeout_s=0.2, request_timeout_s=30.0, step_timeout_s=30.0)


def zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


@pytest.mark.parametrize("is_lost", [False, True], ids=["finish", "lost"])
def test_a_task_of_another_job_iterates_until_all_workers_have_ended(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    with (
        memory_cluster(ps=1, workers=2) as memory,
        closing(memory.worker(0)) as first,
        closing(memory.worker(1)) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        place = memory.coordinator.address, memory.network
        with closing(join_cluster(*place, job="evaluator", index=0, store=Store(), address="")) as evaluator:
            loop, once = evaluator.while_running(), evaluator.while_running(every_s=0.0 if is_lost else math.inf)
            assert next(loop) is next(once) is False
            first.close()
            assert not next(loop)
            end = pool.submit(next, once)
            second.coordinator.leave("killed" if is_lost else FINISHED)
            assert end.result(DEADLINE_S) is not is_lost
            if is_lost:
                until(lambda: evaluator.tasks == ("/job:ps/task:0", evaluator.task))
                assert not next(loop)  # it may be started again
                monkeypatch.setenv("DFLOW_RESTARTED", "ps,worker")
                assert not next(loop)
                monkeypatch.setenv("DFLOW_RESTARTED", "none")
            assert [*loop][-1]
            assert [*evaluator.while_running(every_s=DEADLINE_S)] == [True]
            with pytest.raises(ConfigError, match="a job other than 'evaluator', got 'wroker'; the jobs are ps, work"):
                evaluator.while_running("wroker")
    assert [*dflow.connect().while_running()] == [True]


def test_variables_are_spread_and_slots_are_with_what_they_belong_to(worker: Cluster) -> None:
    with worker.parameter_servers():
        model = dflow.variables({name: zeros(100) for name in "abcd"}, prefix="spread/")
        optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="spread/adam")
    assert {variable.device for variable in model.values()} == {"/job:ps/task:0", "/job:ps/task:1"}
    for name, variable in model.items():
        assert optimizer.slots[0].mu[name].device == optimizer.slots[0].nu[name].device == variable.device


def test_gradients_travel_and_the_state_of_the_optimizer_stays(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        model = dflow.variables({name: zeros(100) for name in "abcd"}, prefix="stay/")
        optimizer = dflow.Optimizer(optax.adam(1e-3), model, name="stay/adam")

    @dflow.jit
    def step() -> None:
        optimizer.apply(dflow.grad(lambda: sum((v.read() - 1) @ v.read() for v in model.values()), model)())

    step()
    servers = [worker.server, *(task.server for task in memory.tasks.values())]
    large = [sent for server in servers for sent in server.traffic() if sent.size_bytes > 99]
    gradients = [sent for sent in large if sent.source == worker.task]
    values = [sent for sent in large if sent.source != worker.task]
    assert {sent.edge for sent in gradients} == {"grad/stay/a+1", "grad/stay/b+1"}
    assert {sent.edge for sent in values} == {"stay/a+1", "stay/b+1"}
    # Two arrays of 400 bytes; the second one is aligned to 64 bytes.
    assert {(sent.values, sent.size_bytes) for sent in large} == {(2, 448 + 400)}


@pytest.mark.parametrize("layout", ["whole", "every second column", "by columns", "rows backwards"])
def test_a_numpy_argument_has_the_value_that_it_had_at_the_call(worker: Cluster, layout: str) -> None:
    with worker.parameter_servers():
        total = dflow.Variable(lambda: jnp.zeros((8, 2)), name="total")

    @dflow.jit
    def step(x: Any, slow: Any) -> Any:
        total.assign_add(x)
        for _ in range(4):
            slow = slow @ slow
        return x, x + 0 * slow.sum()

    slow = jnp.eye(600)
    for _ in range(2):  # the first call compiles
        batch = aligned_zeros(8, 4)
        batch[...] = np.arange(32).reshape(8, 4)
        views = {
            "whole": batch.reshape(16, 2)[:8],
            "every second column": batch[:, ::2],
            "by columns": batch.reshape(4, 8)[:2].T,
            "rows backwards": batch[::-1, :2],
        }
        given = np.array(views[layout])
        total.assign(jnp.zeros((8, 2)))
        results = step(views[layout], slow)
        batch[...] = -1  # while the program runs
        for result in (*results, total.read()):
            np.testing.assert_array_equal(result, given)


def aligned_zeros(*shape: int) -> Any:
    """Return float32 zeros that a program on a CPU takes without a copy."""
    size_bytes = 4 * int(np.prod(shape))
    memory = np.zeros(size_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size_bytes].view(np.float32).reshape(shape)


def test_a_coordinator_nobody_answers_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at nowhere could not be reached within 0\.2 s"):
        join_cluster("nowhere", MemoryNetwork(), job="worker", index=0, store=Store(), settings=SOON, address="")


def test_a_parameter_task_that_never_comes_is_named() -> None:
    network = MemoryNetwork()
    coordinator = make_coordinator(network, "", {"ps": 2, "worker": 1})
    with closing(coordinator), pytest.raises(DeadlineExceeded, match=r"2 are missing: ps:0, ps:1") as caught:
        join_cluster(coordinator.address, network, job="worker", index=0, store=Store(), settings=SOON, address="")
    assert "waited 0.2 s" in str(caught.value)


@pytest.mark.parametrize(("job", "meant"), [("wroker", "'worker'"), ("worker", ""), ("evaluator", ""), ("worker2", "")])
def test_a_job_that_looks_misspelt_is_said_to(
    memory: MemoryCluster, worker: Cluster, job: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(DeadlineExceeded):  # worker:1 is expected as well
        address = memory.coordinator.address
        join_cluster(address, memory.network, job=job, index=1, store=Store(), settings=SOON, address="").close()
    texts = [record.getMessage() for record in caplog.records if "meant?" in record.getMessage()]
    expected = [f"/job:{job}/task:1 has joined as the first of job {job!r}, was {meant} meant?"] if meant else []
    assert texts == expected


def test_a_second_worker_of_one_number_is_refused(memory: MemoryCluster, worker: Cluster) -> None:
    with pytest.raises(RemoteError, match="worker:0"):
        memory.worker(0)
    assert "/job:worker/task:0" in worker.tasks


def test_a_part_is_made_once_and_closed_before_those_that_it_was_made_of() -> None:
    cluster, closed = dflow.connect(), list[str]()

    class First:
        def __init__(self, cluster: Cluster) -> None:
            self.cluster = cluster

        def close(self) -> None:
            closed.append(type(self).__name__)

    class Second(First):
        def __init__(self, cluster: Cluster) -> None:
            self.first = cluster.part(First)

    second = cluster.part(Second)
    assert cluster.part(Second) is second
    assert cluster.part(First) is second.first
    cluster.close()
    cluster.close()
    assert closed == ["Second", "First"]


# Variables and optimizers on the tasks of a cluster: used as those of one process, with errors at the user's lines.


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
