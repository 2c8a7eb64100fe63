"""Steps of a worker over every task of a cluster: where they run, what they send, and how they end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.devices.task_name import short_task_name
from dflow.tracing.errors import DeadlineExceeded, DeviceError, RemoteError, TaskLost, VariableError
from tests.distributed.waiting import until
from tests.user_line import line_of

DEADLINE_S = 60.0


def zeros(*shape: int) -> Callable[[], jax.Array]:
    return lambda: jnp.zeros(shape)


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


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("/job:ps/task:7", r"placed on /job:ps/task:7, but no task offers it(.|\n)*ps:0, ps:1"),
        ("ps:1/cpu:0", r"a task chooses among its devices itself(.|\n)*name the task alone, ps:1$"),
    ],
)
def test_a_device_that_no_task_offers_is_refused_at_its_line(worker: Cluster, place: str, text: str) -> None:
    @dflow.jit
    def f(x: Any) -> Any:
        with dflow.device(place):
            return x * 2

    with pytest.raises(DeviceError, match=text) as caught:
        f(1.0)
    assert line_of(caught.value, __file__) == "return x * 2"


def test_variables_of_two_clusters_in_one_function(worker: Cluster) -> None:
    with worker.parameter_servers():
        here = dflow.Variable(zeros(2), name="here")
    with memory_cluster() as other, closing(other.worker(0)) as elsewhere:
        with elsewhere.parameter_servers():
            there = dflow.Variable(zeros(2), name="there")
        with pytest.raises(VariableError, match="variables of 2 clusters"):
            dflow.jit(lambda: here.read() + there.read())()


def one_variable(worker: Cluster) -> tuple[dflow.Variable, Callable[[Any], Any]]:
    """A variable on one of the tasks, and a step over it."""
    with worker.parameter_servers():
        v = dflow.Variable(zeros(3), name="v")

    @dflow.jit
    def step(x: Any) -> Any:
        v.assign_add(x)
        return v.read()

    return v, step


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

    channel = sender.server.channel
    intact, channel.of_parts = channel.of_parts, channel.of_parts._replace(send=fail)
    with pytest.raises(RemoteError, match=rf"{sender.server.name}(.|\n)*no second"):
        step(jnp.ones(3))
    channel.of_parts = intact
    # The waiting task answers in order, so this answer shows that it has handled the cancellation.
    np.testing.assert_array_equal(made[0], [1, 1, 1])
    assert waiting.server.statistics().running == 0
    np.testing.assert_array_equal(step(jnp.ones(3)), [2, 2, 2])
