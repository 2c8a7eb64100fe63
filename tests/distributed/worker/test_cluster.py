"""A worker's view of a cluster, with every task in this process: results of one process, and errors that name the
task.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed.coordinator.coordinator import Coordinator
from dflow.distributed.task.stock_task import StockTask
from dflow.distributed.transport.memory import MemoryNetwork
from dflow.distributed.transport.sockets import SocketTransport
from dflow.distributed.worker.cluster import Cluster, ClusterSettings
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import (
    DeadlineExceeded,
    DeviceError,
    GraphTypeError,
    RemoteError,
    TaskLost,
    VariableError,
    VariableShapeError,
)
from dflow.tracing.ir.updates import KINDS
from tests.distributed.waiting import until

HERE = Path(__file__).name
DEADLINE_S = 60.0
SOON = ClusterSettings(join_timeout_s=0.2, request_timeout_s=30.0, step_timeout_s=30.0)


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def worker(memory: MemoryCluster) -> Iterator[Cluster]:
    with closing(memory.worker(0)) as joined:
        yield joined


def line_of(error: BaseException) -> str:
    """Return the line of this file in the message."""
    lines = [line for line in str(error).splitlines() if line.strip().startswith("at ") and HERE in line]
    assert lines, error
    return Path(__file__).read_text().splitlines()[int(lines[0].rpartition(":")[2]) - 1].strip()


# Results of one process.


def normal(seed: int, *shape: int) -> Callable[[], jax.Array]:
    return lambda: jax.random.normal(jax.random.key(seed), shape) / np.sqrt(np.prod(shape[:-1]))


def zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": lambda: {
        "hidden": {"kernel": normal(0, 64, 16), "bias": zeros(16)},
        "logits": {"kernel": normal(1, 16, 10), "bias": zeros(10)},
    },
    "convnet": lambda: {
        "conv": {"kernel": normal(0, 3, 3, 1, 4), "bias": zeros(4)},
        "logits": {"kernel": normal(1, 64, 10), "bias": zeros(10)},
    },
}
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "clipped adamw": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10))
    ),
}


def predict(params: Any, images: Any) -> Any:
    x = images
    if "conv" in params:
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, params["conv"]["kernel"], (2, 2), "SAME", dimension_numbers=numbers)
        x = jax.nn.relu(x + params["conv"]["bias"])
    x = x.reshape(x.shape[0], -1)
    if "hidden" in params:
        x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["logits"]["kernel"] + params["logits"]["bias"]


def train(cluster: Cluster, model_name: str, transformation: str, steps: int = 6) -> tuple[Any, Any, Any]:
    """Train on fixed batches; return the weights, the optimizer's state and the losses."""
    name = f"{model_name} {transformation}"
    with cluster.parameter_servers():
        model = dflow.variables(MODELS[model_name](), prefix=f"{name}/")
        optimizer = dflow.Optimizer(TRANSFORMATIONS[transformation](), model, name=f"{name}/opt")

    @dflow.jit
    def step(images: Any, labels: Any) -> Any:
        def loss() -> Any:
            logits = predict(dflow.read(model), images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = dflow.value_and_grad(loss, model)()
        optimizer.apply(gradients)
        return {"loss": value}

    order = np.random.default_rng(0)
    batches = [
        (order.normal(size=(8, 8, 8, 1)).astype(np.float32), order.integers(0, 10, 8).astype(np.int32))
        for _ in range(steps)
    ]
    run = dflow.distributed.Async(cluster).run(step, batches, steps=steps, name=name)
    losses = [float(metrics["loss"]) for metrics in run]
    assert len(losses) == steps
    return jax.device_get(dflow.read(model)), jax.device_get(dflow.read(optimizer.slots)), losses


@pytest.mark.parametrize(
    ("model", "transformation"),
    [("convnet", "sgd"), ("mlp", "momentum"), ("convnet", "clipped adamw"), ("mlp", "clipped adamw")],
)
def test_one_worker_trains_as_a_process_alone(worker: Cluster, model: str, transformation: str) -> None:
    there, alone = train(worker, model, transformation), train(dflow.connect(), model, transformation)
    assert jax.tree.structure(there) == jax.tree.structure(alone)
    for got, wanted in zip(jax.tree.leaves(there), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


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
    large = {(sent.edge, sent.source[5:7]) for server in servers for sent in server.traffic() if sent.size_bytes > 99}
    gradients = {(f"grad/stay/{name}", "wo") for name in "abcd"}
    assert gradients <= large
    assert {edge for edge, _ in large - gradients} <= {variable.name for variable in model.values()}


def test_the_variables_of_a_cluster_are_used_as_any_other(worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(3), name="v")
        key = dflow.Variable(lambda: jnp.ones(2, jnp.bfloat16), name="half")
    v.assign(jnp.arange(3.0))
    v.assign_add(jnp.ones(3))
    v.assign_add(jnp.ones(3))
    np.testing.assert_array_equal(v, [2, 3, 4])
    assert float(v[1] + v @ v) == 32.0
    assert key.read().dtype == jnp.bfloat16
    before = v.read()
    v.assign(jnp.zeros(3))
    np.testing.assert_array_equal(before, [2, 3, 4])


def test_an_add_outside_of_any_function_is_one_update_on_the_task(memory: MemoryCluster, worker: Cluster) -> None:
    v, _ = one_variable(worker)
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]

    def refuse(*_: Any) -> None:
        raise AssertionError("another worker's update may come between a read and a write")

    task.server.store.write = refuse  # type: ignore[method-assign]
    v.assign_add(jnp.ones(3))
    v.assign_add(jnp.ones(3))
    np.testing.assert_array_equal(v, [2, 2, 2])


def test_the_first_to_ask_creates_and_the_others_get(memory: MemoryCluster) -> None:
    def start(index: int) -> float:
        with closing(memory.worker(index)) as cluster, cluster.parameter_servers():
            ready.wait(DEADLINE_S)
            v = dflow.Variable(jnp.float32(index), name="first")
            ready.wait(DEADLINE_S)
            return float(v)

    ready = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        seen = [future.result(DEADLINE_S) for future in [pool.submit(start, index) for index in range(3)]]
    assert len(set(seen)) == 1


def test_workers_that_add_at_once_lose_nothing(memory: MemoryCluster) -> None:
    def work(index: int) -> int:
        with closing(memory.worker(index)) as cluster:
            with cluster.parameter_servers():
                count, other = (dflow.Variable(zeros(), name=name) for name in ("count", "other"))

            @dflow.jit
            def step(x: Any) -> Any:
                count.assign_add(x)
                other.assign_add(2 * x)
                return count.read()

            run = dflow.distributed.Async(cluster).run(step, iter(lambda: (jnp.float32(1.0),), 0), steps=60, name="add")
            done = sum(1 for _ in run)
            ends.wait(DEADLINE_S)
            totals.append((float(count), float(other)))
            return done

    ends, totals = threading.Barrier(3), list[tuple[float, float]]()
    with ThreadPoolExecutor(3) as pool:
        done = [future.result(DEADLINE_S) for future in [pool.submit(work, index) for index in range(3)]]
    assert sum(done) == 60
    assert totals == [(60.0, 120.0)] * 3


def test_a_step_leaves_nothing_behind(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(3), name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.read()

    for _ in range(5):
        step(jnp.ones(3))
    for task in memory.tasks.values():
        held = task.server.statistics()
        assert (held.running, held.rendezvous.waiters, held.rendezvous.values) == (0, 0, 0)


# Missing tasks.


def test_the_plans_of_functions_that_are_gone_are_released_on_every_task(
    memory: MemoryCluster, worker: Cluster
) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(jnp.zeros(3), name="w")
    servers = [worker.server, *(task.server for task in memory.tasks.values())]

    def train(number: int) -> None:
        @dflow.jit
        def step(x: Any) -> None:
            w.assign_add(number * x)

        step(jnp.ones(3))

    for number in range(8):
        train(number)
        gc.collect()
    until(lambda: max(server.statistics().plans for server in servers) <= 2)
    np.testing.assert_array_equal(w.read(), [28, 28, 28])


def test_a_coordinator_nobody_answers_for() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at nowhere could not be reached within 0\.2 s"):
        Cluster("nowhere", MemoryNetwork(), job="worker", index=0, store=Store(), settings=SOON, address="")


def test_an_address_nobody_answers_at_over_tcp() -> None:
    with pytest.raises(DeadlineExceeded, match=r"the coordinator at 127\.0\.0\.1:1 could not be reached within 0\.2 s"):
        dflow.connect("127.0.0.1:1", index=0, settings=SOON)


def test_a_parameter_task_that_never_comes_is_named() -> None:
    network = MemoryNetwork()
    coordinator = Coordinator(network, "", {"ps": 2, "worker": 1})
    with closing(coordinator), pytest.raises(DeadlineExceeded, match=r"2 are missing: ps:0, ps:1") as caught:
        Cluster(coordinator.address, network, job="worker", index=0, store=Store(), settings=SOON, address="")
    assert "waited 0.2 s" in str(caught.value)


@pytest.mark.parametrize(("job", "meant"), [("wroker", "'worker'"), ("worker", ""), ("evaluator", ""), ("worker2", "")])
def test_a_job_that_looks_misspelt_is_said_to(
    memory: MemoryCluster, worker: Cluster, job: str, meant: str, caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(DeadlineExceeded):  # worker:1 is expected as well
        address = memory.coordinator.address
        Cluster(address, memory.network, job=job, index=1, store=Store(), settings=SOON, address="").close()
    texts = [record.getMessage() for record in caplog.records if "meant?" in record.getMessage()]
    expected = [f"/job:{job}/task:1 has joined as the first of job {job!r}, was {meant} meant?"] if meant else []
    assert texts == expected


def test_a_second_worker_of_one_number_is_refused(memory: MemoryCluster, worker: Cluster) -> None:
    with pytest.raises(RemoteError, match="worker:0"):
        memory.worker(0)
    assert "/job:worker/task:0" in worker.tasks


# Wrong arguments.


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
    assert line_of(caught.value) == "v.assign(x)"


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
            assert line_of(caught.value) == 'dflow.Variable(zeros(3), name="taken")'
            with cluster.parameter_servers():
                dflow.Variable(zeros(2), name="taken")


def test_a_job_without_tasks(worker: Cluster) -> None:
    text = "job 'gpu', which has no task that is live or expected"
    with pytest.raises(DeviceError, match=text) as caught, worker.parameter_servers("gpu"):
        dflow.Variable(zeros(2), name="v")
    assert line_of(caught.value) == 'dflow.Variable(zeros(2), name="v")'


def test_a_device_that_no_task_offers_lists_the_tasks(worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(zeros(2), name="v")

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("/job:ps/task:7"):
            return x * v.read()

    with pytest.raises(DeviceError, match="placed on /job:ps/task:7, but no task offers it") as caught:
        f(jnp.ones(2))
    assert "ps:0, ps:1" in str(caught.value)
    assert line_of(caught.value) == "return x * v.read()"


def test_a_device_scope_runs_its_ops_there(worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(lambda: jnp.arange(4.0), name="v")

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("ps:1"):
            product = v.read() * x
        return product.sum()

    assert float(f(jnp.ones(4))) == 6.0


def test_a_device_scope_needs_no_variable_to_reach_a_task(memory: MemoryCluster, worker: Cluster) -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("ps:1"):
            y = x * 2
        return y + 1

    np.testing.assert_array_equal(f(jnp.arange(3.0)), [1, 3, 5])
    sent = {(edge.source, edge.destination) for edge in worker.traffic()}
    assert ("/job:worker/task:0", "/job:ps/task:1") in sent
    worker.close()
    with pytest.raises(DeviceError, match="placed on /job:ps/task:1, but no task offers it; the tasks are localhost:0"):
        dflow.jit(lambda x: f(x) * 2)(jnp.arange(3.0))


def test_a_device_of_the_callers_own_task(worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(lambda: jnp.arange(4.0), name="v")
    with dflow.device("cpu:0"):
        mine = dflow.Variable(jnp.ones(4), name="mine")

    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("cpu:0"):
            y = v.read() * x
        with dflow.device("ps:1"):
            z = y + 1
        mine.assign_add(z)
        v.assign_add(y)
        return z

    for times in (1, 2):
        np.testing.assert_array_equal(f(jnp.ones(4)), np.arange(4) * 2 ** (times - 1) + 1)
    np.testing.assert_array_equal(v, np.arange(4) * 4)
    np.testing.assert_array_equal(mine, np.arange(4) * 3 + 3)


def test_a_task_chooses_among_its_devices_itself(worker: Cluster) -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device("ps:1/cpu:0"):
            return x * 2

    with pytest.raises(DeviceError, match="a task chooses among its devices itself") as caught:
        f(1.0)
    assert line_of(caught.value) == "return x * 2"
    assert str(caught.value).endswith("name the task alone, ps:1")


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
    assert line_of(caught.value) == 'optimizer.apply({"a": jnp.ones(2)})'


def test_variables_of_two_blocks_and_of_this_process_in_one_function(worker: Cluster) -> None:
    with worker.parameter_servers():
        first = dflow.Variable(zeros(2), name="first")
    with worker.parameter_servers():
        second = dflow.Variable(zeros(2), name="second")
    mine = dflow.Variable(jnp.ones(2), name="mine")

    @dflow.jit
    def step() -> Any:
        first.assign_add(jnp.ones(2))
        second.assign(first.read() * 2)
        mine.assign_add(second.read())
        return mine.read()

    np.testing.assert_array_equal(step(), [3, 3])
    np.testing.assert_array_equal(step(), [7, 7])
    np.testing.assert_array_equal(mine, [7, 7])


def test_a_variable_needs_a_name_among_the_parameter_servers(worker: Cluster) -> None:
    with (
        worker.parameter_servers(),
        pytest.raises(VariableError, match=r"of f32\[2\] is created .* without a name(.|\n)*name='...'") as caught,
    ):
        dflow.Variable(jnp.zeros(2))
    assert line_of(caught.value) == "dflow.Variable(jnp.zeros(2))"


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


@pytest.mark.parametrize("traced", [False, True])
def test_functions_of_jax_and_optax_take_variables_on_tasks(worker: Cluster, traced: bool) -> None:
    values = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    with worker.parameter_servers():
        tree = dflow.variables(values)

    def figures(tree: Any) -> Any:
        clipped = jax.tree.map(lambda p: jnp.where(p > 0, jax.nn.relu(p), 0.0), tree)
        return (
            optax.tree.norm(tree),
            jax.lax.dot(tree["a"], tree["a"]),
            jax.grad(lambda p: (p["a"] ** 2).sum())(tree),
            clipped,
        )

    got, want = dflow.jit(figures)(tree) if traced else figures(tree), figures(values)
    jax.tree.map(np.testing.assert_allclose, got, want)
    assert dflow.jit(lambda tree: tree["a"].assign_add(values["a"]) or tree)(tree)["a"] is tree["a"]
    np.testing.assert_allclose(tree["a"], 2 * values["a"])


def test_a_second_optimizer_of_variables_on_tasks_needs_a_name(worker: Cluster) -> None:
    with worker.parameter_servers():
        w = dflow.Variable(zeros(2), name="w")
    dflow.Optimizer(optax.sgd(0.1), [w])
    with pytest.raises(VariableError, match=r"a second optimizer of variables 'w': .*(.|\n)*name='...'") as caught:
        dflow.Optimizer(optax.adam(0.1), [w])
    assert line_of(caught.value) == "dflow.Optimizer(optax.adam(0.1), [w])"
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
        assert line_of(caught.value) == 'mine = dflow.Variable(0.0, name="mine")'
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


def test_two_handles_of_one_variable_in_one_function(worker: Cluster) -> None:
    with worker.parameter_servers():
        handles = [dflow.Variable(zeros(2), name="w") for _ in range(2)]
    with pytest.warns(dflow.DuplicateNameWarning, match="variable 'w': .* both are one variable here"):
        handles[0].assign(jnp.ones(2))
    np.testing.assert_array_equal(handles[1], [1, 1])
    with pytest.raises(
        VariableError,
        match=r"uses variable 'w' by two handles, made\n  at .*\n  and\n  at .*\n.* another name or `prefix=`",
    ):
        dflow.jit(lambda: [handle.assign_add(jnp.ones(2)) for handle in handles] and None)()


def test_variables_of_two_clusters_in_one_function(worker: Cluster) -> None:
    with worker.parameter_servers():
        here = dflow.Variable(zeros(2), name="here")
    with memory_cluster() as other, closing(other.worker(0)) as elsewhere:
        with elsewhere.parameter_servers():
            there = dflow.Variable(zeros(2), name="there")
        with pytest.raises(VariableError, match="variables of 2 clusters"):
            dflow.jit(lambda: here.read() + there.read())()


# Malformed messages.


@pytest.mark.parametrize(
    "nonsense",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"\xff" * 4096, bytes(range(256)) * 16],
    ids=["http", "zeros", "ones", "counting"],
)
def test_nonsense_at_a_task_ends_its_own_connection_alone(nonsense: bytes) -> None:
    coordinator = Coordinator(SocketTransport(), "127.0.0.1:0", {"ps": 1, "worker": 1})
    task = StockTask(SocketTransport(), "/job:ps/task:0", coordinator.address)
    worker = dflow.connect(coordinator.address, index=0, settings=SOON)
    assert isinstance(worker, Cluster)
    _, step = one_variable(worker)
    step(jnp.ones(3))
    for address in (task.server.address, worker.server.address, coordinator.address):
        host, _, port = address.partition(";")[0].rpartition(":")
        stranger = socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        with stranger, contextlib.suppress(OSError):
            stranger.sendall(nonsense)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass
    np.testing.assert_array_equal(step(jnp.ones(3)), [2, 2, 2])
    for one in (worker, task, coordinator):
        one.close()


# Steps that end early.


def one_variable(worker: Cluster) -> tuple[dflow.Variable, Callable[[Any], Any]]:
    """A variable on one of the tasks, and a step over it."""
    with worker.parameter_servers():
        v = dflow.Variable(zeros(3), name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.read()

    return v, step


def test_a_step_that_fails_on_a_task_names_it_and_the_next_one_runs(memory: MemoryCluster, worker: Cluster) -> None:
    v, step = one_variable(worker)
    step(jnp.ones(3))
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
    call = task.server.store.call

    def fail(*_: Any) -> Any:
        raise FloatingPointError("the multiplier is on fire")

    task.server.store.call = fail  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="the multiplier is on fire") as caught:
        step(jnp.ones(3))
    assert task.server.name in str(caught.value)
    task.server.store.call = call  # type: ignore[method-assign]
    np.testing.assert_array_equal(step(jnp.ones(3)), [2, 2, 2])
    assert worker.server.statistics().running == 0


def test_a_lost_variable_is_named(memory: MemoryCluster, worker: Cluster) -> None:
    v, step = one_variable(worker)
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
    task.server.store.drop(v.key)
    with pytest.raises(VariableError, match="no variable 'v' is held here") as caught:
        step(jnp.ones(3))
    assert task.server.name in str(caught.value)
    with pytest.raises(VariableError, match="no variable 'v' is held here"):
        v.read()


def hold_calls(store: Store, entered: threading.Event, leave: threading.Event) -> None:
    """Make the store's next programs wait until `leave` is set."""
    call = store.call

    def held(*words: Any) -> Any:
        entered.set()
        assert leave.wait(DEADLINE_S)
        return call(*words)

    store.call = held  # type: ignore[method-assign]


def test_a_step_ends_when_every_task_has_ended_its_part(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        v, other = (dflow.Variable(zeros(3), name=name) for name in ("v", "other"))
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
    step = dflow.jit(v.assign_add)
    entered, leave = threading.Event(), threading.Event()
    hold_calls(task.server.store, entered, leave)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step, jnp.ones(3))
        assert entered.wait(DEADLINE_S)
        other.read()
        assert not running.done()
        leave.set()
        running.result(DEADLINE_S)
    np.testing.assert_array_equal(v, [1, 1, 1])


def note_connects(memory: MemoryCluster, tried: list[str]) -> None:
    """Record the addresses that this process connects to from now on."""
    connect = memory.network.connect

    def noted(address: str, **words: Any) -> Any:
        tried.append(address)
        return connect(address, **words)

    memory.network.connect = noted  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["closes", "vanishes"])
def test_a_task_that_dies_in_a_step_ends_it_with_its_name(memory: MemoryCluster, worker: Cluster, how: str) -> None:
    v, step = one_variable(worker)
    step(jnp.ones(3))
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
    entered, leave, gone = threading.Event(), threading.Event(), threading.Event()
    session = worker.coordinator.session
    session.call_on_roster(lambda roster: gone.set() if any(info.left for info in roster.tasks) else None)
    hold_calls(task.server.store, entered, leave)
    tried: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step, jnp.ones(3))
        assert entered.wait(DEADLINE_S)
        note_connects(memory, tried)
        if how == "closes":
            task.client.close("killed")
            task.server.close()
        else:
            task.server._listener.close()
        with pytest.raises(TaskLost, match=task.server.name) as caught:
            running.result(DEADLINE_S)
        if how != "closes":
            assert str(caught.value).startswith(f"{short_task_name(task.server.name)} was lost in step ")
            assert "see its output" in str(caught.value)
        assert tried == [], "nobody waits for a dead task to take a cancellation"
        task.client.close("killed")
        leave.set()
    gone.wait(DEADLINE_S)
    with pytest.raises(TaskLost, match=f"{task.server.name} has left the cluster: killed"):
        step(jnp.ones(3))


def test_a_worker_that_leaves_in_a_step_frees_the_tasks(memory: MemoryCluster) -> None:
    worker = memory.worker(0)
    v, step = one_variable(worker)
    [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
    entered, leave = threading.Event(), threading.Event()
    hold_calls(task.server.store, entered, leave)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(step, jnp.ones(3))
        assert entered.wait(DEADLINE_S)
        worker.close()
        with pytest.raises(TaskLost, match="worker/task:0 has left the cluster"):
            running.result(DEADLINE_S)
        leave.set()
    with closing(memory.worker(1)) as other:
        _, step_of_other = one_variable(other)
        step_of_other(jnp.ones(3))


@pytest.mark.parametrize("reads", [True, False])
def test_a_step_that_takes_too_long_says_what_is_missing_and_how_the_task_is(
    memory: MemoryCluster, reads: bool
) -> None:
    with closing(memory.worker(0, ClusterSettings(step_timeout_s=0.2))) as worker:
        v, step = one_variable(worker)
        [task] = [task for task in memory.tasks.values() if v.key in task.server.store]
        entered, leave = threading.Event(), threading.Event()
        hold_calls(task.server.store, entered, leave)
        who = r"ps:\d \((last heard \d\.\d s ago, .*|just joined)\)"
        late = rf"^step 1 of worker:0 did not end within 0\.2 s; still at it: {who}\n  the last events of worker:0"
        if reads:
            late = rf"^worker:0 waited 0\.2 s in step 1 of worker:0 for the value '.+', which {who} should have sent\n"
        with pytest.raises(DeadlineExceeded, match=late):
            step(jnp.ones(3)) if reads else dflow.jit(lambda: v.assign_add(jnp.ones(3)))()
        leave.set()


def test_a_failed_step_is_cancelled_on_every_task(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        made = [dflow.Variable(zeros(3), name=name) for name in "ab"]
    assert len({variable.device for variable in made}) == 2

    @dflow.jit
    def step(x: Any) -> Any:
        first, second = made
        first.assign_add(second.read() + x)
        return first.read()

    step(jnp.ones(3))
    sender = memory.tasks["ps:0" if made[1].device == "/job:ps/task:0" else "ps:1"]
    waiting = memory.tasks["ps:1" if made[1].device == "/job:ps/task:0" else "ps:0"]

    def fail(*_: Any) -> Any:
        raise FloatingPointError("no second")

    call, sender.server.store.views = sender.server.store.views, fail  # type: ignore[method-assign]
    with pytest.raises(RemoteError, match="no second"):
        step(jnp.ones(3))
    sender.server.store.views = call  # type: ignore[method-assign]
    # The waiting task answers in order, so this answer shows that it has handled the cancellation.
    np.testing.assert_array_equal(made[0], [1, 1, 1])
    assert waiting.server.statistics().running == 0
    np.testing.assert_array_equal(step(jnp.ones(3)), [2, 2, 2])


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


def test_a_lookup_sends_rows_alone(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        v = dflow.Variable(lambda: jnp.zeros((1000, 2)), name="v")
    dflow.jit(lambda i: v[i].sum())(jnp.array([1, 2, 3]))
    sent = [edge for task in memory.tasks.values() for edge in task.server.traffic()]
    assert [edge.size_bytes for edge in sent] == [24]


def test_zeros_for_variables_on_two_tasks_are_sent_to_neither(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        tables = [dflow.Variable(lambda: jnp.ones(1000), name=f"table{number}") for number in range(2)]
    assert len({table.device for table in tables}) == 2

    @dflow.jit
    def clear() -> None:
        for table in tables:
            table.assign(jnp.zeros(1000))

    clear()
    assert not any(float(table.read().sum()) for table in tables)
    assert all(edge.destination == worker.task for task in memory.tasks.values() for edge in task.server.traffic())
    assert not worker.traffic()


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
