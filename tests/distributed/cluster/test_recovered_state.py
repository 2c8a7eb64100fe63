"""Training goes on after parameter tasks were started again: the numbers are those of an undisturbed run."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dflow
from dflow.distributed import Async, Sync
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.outgoing_requests import OutgoingRequests
from dflow.distributed.synchronous import sync
from dflow.tracing.errors import TaskLost
from tests.distributed.cluster.tasks_with_snapshots import Tasks
from tests.distributed.counting_script import COUNTERS, REPORT
from tests.distributed.processes import Spawned
from tests.distributed.waiting import until

pytestmark = pytest.mark.once


@pytest.fixture
def tasks(tmp_path: Path) -> Iterator[Tasks]:
    running = Tasks(tmp_path, every_s=0.05)
    yield running
    running.close()


def model(cluster: Any) -> tuple[Any, Any]:
    """A model with Adam and a generator, and its step; on one process if `cluster` is standalone."""
    with cluster.parameter_servers():
        w = dflow.Variable(lambda: jnp.arange(6.0).reshape(3, 2), name="w")
        b = dflow.Variable(lambda: jnp.zeros(2), name="b")
        optimizer = dflow.Optimizer(optax.adam(0.1), [w, b], name="adam")
        noise = dflow.Generator(0, name="noise")
        count = dflow.Variable(0, name="count")

    @dflow.jit
    def step(x: jax.Array) -> jax.Array:
        count.assign_add(1)
        moved = x + jax.random.normal(noise.split(), x.shape)
        loss: jax.Array
        loss, gradients = dflow.value_and_grad(lambda: jnp.mean((moved @ w + b) ** 2), [w, b])()
        optimizer.apply(gradients)
        return loss

    return {"w": w, "b": b, "adam": optimizer, "noise": noise, "count": count}, step


def values(state: Any) -> list[Any]:
    found = dflow.read([state["w"], state["b"], state["count"], state["adam"].slots])
    return [np.asarray(value) for value in jax.tree.leaves(found)]


X = jnp.ones((4, 3))
STEPS = 60


def number_of_batch(number: int) -> float:
    """A number that tells the batches of steps apart."""
    return 1.0 + number * 7 % 10 / 10


def test_the_result_is_that_of_one_process_to_which_nothing_happened(tasks: Tasks) -> None:
    state, step = model(tasks.worker)

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if number in (20, 40):
                tasks.await_snapshot(15)  # the end of the first claim
                tasks.start_again(number // 40)
            yield X

    done = sum(1 for _ in Async(tasks.worker).run(step, batches(), steps=STEPS, name="run"))
    assert done >= STEPS
    assert int(state["count"].read()) == STEPS
    assert tasks.worker.epoch == 2
    alone, alone_step = model(dflow.connect())
    for _ in range(STEPS):
        alone_step(X)
    for one, other in zip(values(state), values(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lookahead", [False, True])
def test_each_batch_of_a_function_is_used_once(tasks: Tasks, lookahead: bool) -> None:
    with tasks.worker.parameter_servers():
        used = []
        for index in range(2):
            with dflow.device(f"ps:{index}"):
                used.append(dflow.Variable(lambda: jnp.zeros(STEPS), name=f"used{index}"))
    kills = [(20, 0), (40, 1)]

    def batch(number: int) -> Any:
        if kills and kills[0][0] == number:
            tasks.await_snapshot(15)
            tasks.start_again(kills.pop(0)[1])
        return jnp.int32(number)

    @dflow.jit
    def step(number: jax.Array) -> None:
        for variable in used:
            variable.scatter_add(number[None], jnp.ones(1))

    for _ in Async(tasks.worker, lookahead=lookahead).run(step, batch, steps=STEPS, name="run"):
        pass
    assert tasks.worker.epoch == 2
    for variable in used:
        np.testing.assert_array_equal(variable.read(), np.ones(STEPS))


def pair(cluster: Any) -> tuple[Any, Any]:
    """A variable on each parameter task, with momentum, and a step that trains both."""
    made = []
    with cluster.parameter_servers():
        for index in range(2):
            with nullcontext() if cluster.task.startswith("/job:localhost") else dflow.device(f"ps:{index}"):
                made.append(dflow.Variable(lambda: jnp.arange(3.0) / 10, name=f"w{index}"))
        optimizer = dflow.Optimizer(optax.sgd(0.01, momentum=0.9), made, name="sgd")

    @dflow.jit
    def step(x: jax.Array) -> None:
        optimizer.apply(dflow.grad(lambda: jnp.sum((made[0] * made[1] + x) ** 2), made)())

    return made, step


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_synchronous_rounds_go_on_from_the_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    monkeypatch.setattr(sync, "REPORT_S", 0.0)
    tasks = Tasks(tmp_path, every_s=0.05, workers=2)

    def train(cluster: Cluster) -> Any:
        made, step = pair(cluster)
        kills = [(10, order[0]), (30, order[1])] if cluster.index == 0 else []

        def batch(number: int) -> Any:
            assert number % 2 == cluster.index
            if kills and kills[0][0] == number // 2:
                tasks.await_snapshot(5)
                tasks.start_again(kills.pop(0)[1])
            return number_of_batch(number) * jnp.ones(3)

        for _ in Sync(cluster).run(step, batch, steps=STEPS, name="run"):
            pass
        return [np.asarray(variable.read()) for variable in made]

    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(train, tasks.workers))
    finally:
        tasks.close()
    assert tasks.worker.epoch == 2
    made, step = pair(dflow.connect())
    for number in range(0, 2 * STEPS, 2):
        step((number_of_batch(number) + number_of_batch(number + 1)) / 2 * jnp.ones(3))
    for one in found:
        for value, variable in zip(one, made, strict=True):
            np.testing.assert_allclose(value, np.asarray(variable.read()), rtol=1e-5)


def test_other_functions_of_the_program_use_the_restored_state(tasks: Tasks) -> None:
    state, step = model(tasks.worker)
    total = dflow.jit(lambda: state["w"].read().sum() + state["b"].read().sum())
    for _ in Async(tasks.worker).run(step, itertools.repeat(X), steps=5, name="first"):
        pass
    before = float(total())
    tasks.await_snapshot(5)
    tasks.start_again(0)
    tasks.start_again(1)
    tasks.worker.await_recovery()
    assert float(total()) == before
    state["b"].assign(jnp.zeros(2))
    assert float(state["b"].read().sum()) == 0.0


def queue_on_ps_0(tasks: Tasks) -> tuple[Any, Any]:
    """A queue on ps:0, and the number of elements taken out of it, on ps:1."""
    with tasks.worker.parameter_servers():
        with dflow.device("ps:0"):
            queue = dflow.FIFOQueue(4, jnp.int32(0), name="queue")
        with dflow.device("ps:1"):
            total = dflow.Variable(0, name="total")
    return queue, total


def test_the_feed_of_a_queue_goes_on_after_its_task_was_started_again(tasks: Tasks) -> None:
    queue, total = queue_on_ps_0(tasks)

    @dflow.jit
    def step(number: jax.Array) -> None:
        total.assign_add(1 + 0 * queue.dequeue())

    def batches() -> Iterator[Any]:
        for number in itertools.count():
            if number == 20:
                tasks.await_snapshot(15)
                tasks.start_again(0)
            yield jnp.int32(number)

    with dflow.data.feed(itertools.repeat(np.int32(1)), queue) as feed:
        for _ in Async(tasks.worker).run(step, batches(), steps=STEPS, name="run"):
            pass
        assert feed.is_running()
    assert tasks.worker.epoch == 1
    assert int(total.read()) == STEPS


def test_an_element_whose_answer_was_lost_is_put_in_once(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    start, numbers = OutgoingRequests.start_step, itertools.count()

    def start_step(
        requests: OutgoingRequests, task: str, message: Any, payload: Any, on_reply: Callable[[Any], None]
    ) -> Any:
        is_lost = next(numbers) in (1, 2)

        def on_other_reply(reply: Any) -> None:
            on_reply(TaskLost("the connection to ps:0 has broken") if is_lost else reply)

        return start(requests, task, message, payload, on_other_reply)

    monkeypatch.setattr(OutgoingRequests, "start_step", start_step)
    queue, _ = queue_on_ps_0(tasks)
    fed = dflow.data.feed(map(np.int32, range(3)), queue)
    fed.join()
    assert (fed.count, fed.error) == (3, None)
    assert next(numbers) == 5  # the second element was sent three times
    assert [int(queue.dequeue()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(dflow.QueueClosed):
        queue.dequeue()


def test_a_queue_whose_data_has_ended_gives_its_last_elements_again(tasks: Tasks) -> None:
    queue, _ = queue_on_ps_0(tasks)
    dflow.data.feed(map(np.int32, range(3)), queue).join()
    for index in range(2):
        tasks.start_again(index)
    tasks.worker.await_recovery()
    assert [int(queue.dequeue()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(dflow.QueueClosed):
        queue.dequeue()


def test_restored_values_are_not_lost_with_a_task(tasks: Tasks, tmp_path: Path) -> None:
    with tasks.worker.parameter_servers():
        table = dflow.Variable(jnp.zeros(3), name="table")
    dflow.save(tmp_path / "saved", {"table": table})
    table.assign(jnp.ones(3))
    tasks.await_snapshot(0)
    dflow.restore(tmp_path / "saved", {"table": table})
    for index in range(2):
        tasks.start_again(index)
    tasks.worker.await_recovery()
    np.testing.assert_array_equal(table.read(), np.zeros(3))


def test_a_worker_that_starts_during_a_return_waits_for_its_variables(tmp_path: Path) -> None:
    tasks = Tasks(tmp_path, every_s=0.05, workers=2)

    def weights(cluster: Cluster) -> Any:
        with cluster.parameter_servers():
            return [dflow.Variable(lambda: jnp.zeros(3), name=f"w{index}") for index in range(4)]

    try:
        for index, variable in enumerate(weights(tasks.workers[0])):
            variable.assign(jnp.full(3, index))
        tasks.await_new_snapshot()
        with ThreadPoolExecutor(1) as pool:
            # The return waits for this step.
            with tasks.workers[0].server.gate.step(60.0):
                tasks.start_again(0)
                until(lambda: tasks.coordinator._state._recovery._is_returning)
                made = pool.submit(weights, tasks.workers[1])
                until(lambda: bool(tasks.coordinator._state._recovery._waits._asks) or made.done())
            found = made.result(60)
        for index, variable in enumerate(found):
            np.testing.assert_array_equal(variable.read(), np.full(3, index))
    finally:
        tasks.close()


@pytest.mark.parametrize("is_during", [True, False])
def test_a_worker_takes_part_in_rounds_that_began_before_a_return(tmp_path: Path, is_during: bool) -> None:
    tasks = Tasks(tmp_path, every_s=0.05, workers=2)
    try:
        with tasks.workers[0].parameter_servers():
            dflow.Variable(lambda: jnp.zeros(3), name="w").assign(jnp.ones(3))
        assert tasks.workers[0].take_part("run", "ps") is not None
        tasks.await_new_snapshot()
        with ThreadPoolExecutor(1) as pool:
            # The return waits for this step.
            with tasks.workers[0].server.gate.step(60.0):
                tasks.start_again(0)
                tasks.start_again(1)
                if is_during:
                    part = pool.submit(tasks.workers[1].take_part, "run", "ps")
                    until(lambda: bool(tasks.coordinator._state._recovery._waits._asks) or part.done())
            tasks.workers[0].await_recovery()
            if not is_during:
                part = pool.submit(tasks.workers[1].take_part, "run", "ps")
            assert part.result(60) is not None
    finally:
        tasks.close()


def test_a_function_that_is_first_called_while_a_task_is_away_waits_for_it(tasks: Tasks) -> None:
    made, _ = pair(tasks.worker)
    tasks.await_new_snapshot()
    total = dflow.jit(lambda: made[0].read().sum() + made[1].read().sum())
    tasks.ps[1].close()
    with ThreadPoolExecutor(1) as pool:
        called = pool.submit(total)
        until(lambda: bool(tasks.coordinator._state._recovery._waits._asks) or called.done())
        tasks.ps[1] = tasks.start(1)
        assert float(called.result(60)) == pytest.approx(0.6)


def test_without_snapshots_the_error_is_the_one_of_the_step(tmp_path: Path) -> None:
    tasks = Tasks(tmp_path, every_s=0.0)
    try:
        _, step = model(tasks.worker)

        def batches() -> Iterator[Any]:
            yield X
            tasks.start_again(0)
            yield from itertools.repeat(X)

        with pytest.raises(dflow.TaskLost, match=r"ps:0 has been started again without them|ps/task:0 has left"):
            list(Async(tasks.worker).run(step, batches(), steps=STEPS, name="run"))
    finally:
        tasks.close()
    assert not [*tmp_path.glob("*/*")]


#: Worker 0 kills each parameter task once, when both have a part of a snapshot that is newer than its last steps.
SCRIPT = (
    COUNTERS
    + """
import os, signal, time
from pathlib import Path
def pid_of(index):
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{entry}/cmdline").read_text().split("\\0")
            parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getppid() and "task" in words and words[words.index("--index") + 1] == index:
            return int(entry)

def newest():
    return min(max(map(int, filter(str.isdigit, os.listdir(f"snapshots/ps-{index}"))), default=0) for index in range(2))

def batches():
    for number in range(10**6):
        if cluster.index == 0 and number in (50, 150):
            seen, until = newest(), time.monotonic() + 60
            while newest() <= seen and time.monotonic() < until:
                yield jnp.float32(1.0)
            os.kill(pid_of(str(number // 100)), signal.SIGKILL)
        yield jnp.float32(1.0)

for _ in dflow.distributed.Async(cluster).run(step, batches(), steps=3000):
    pass
"""
    + REPORT
)


@pytest.mark.long
def test_killed_parameter_tasks_are_started_again_and_no_step_is_lost_or_repeated(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--restart", "ps=on-failure", "--snapshots", "snapshots", "--snapshot-every", "0.5", "train.py"]
    with Spawned(
        "-m", "dflow", "launch", "--all-tables", "--ps", "2", "--workers", "2", *words, cwd=tmp_path
    ) as launched:
        status, output = launched.finish()
    assert status == 0, output
    assert "Steps: 3000 of 3000" in output
    for index in range(2):
        assert f"ps:{index} ended: killed by SIGKILL; it is started again" in output
    assert len(re.findall(r"ps:0, ps:1 returned to snapshot \d+; \d+ steps are done again", output)) == 2, output
    assert re.search(r"\n count +3000 ", output), output
    assert re.search(r"\n other +3000 ", output), output
