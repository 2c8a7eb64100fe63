"""The steps of an asynchronous run that begin on the parameter tasks before the run calls them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import dflow
from dflow.distributed.asynchronous.async_ import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.cluster.cluster_steps import ClusterSteps
from dflow.testing import MemoryCluster
from tests.distributed.training.sync_programs import nothing_is_left
from tests.distributed.waiting import until

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("no_pause_is_long")]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []
    run = ClusterSteps._run

    def noted(self: ClusterSteps, step: Any, handles: Any, feeds: Any, begun: Any, loop: Any) -> Any:
        found.append(begun is not None)
        return run(self, step, handles, feeds, begun, loop)

    monkeypatch.setattr(ClusterSteps, "_run", noted)
    return found


def counters(cluster: Cluster) -> tuple[list[dflow.Variable], Callable[[Any], Any]]:
    """Two variables on different tasks; a step adds its argument to each, and returns the values that it read."""
    with cluster.parameter_servers():
        variables = []
        for index in range(2):
            with dflow.device(f"ps:{index}"):
                variables.append(dflow.Variable(lambda: jnp.float32(0), name=f"v{index}"))

    @dflow.jit
    def step(x: Any) -> Any:
        values = [v.read() for v in variables]
        for v, value in zip(variables, values, strict=True):
            v.assign_add(x + 0 * value)
        return values

    return variables, step


def read_by(run: Iterator[Any]) -> list[list[float]]:
    return [[float(value) for value in values] for values in run]


def test_each_step_reads_what_the_one_before_wrote(memory: MemoryCluster, worker: Cluster, begun: list[bool]) -> None:
    variables, step = counters(worker)
    found = read_by(Async(worker).run(step, itertools.repeat(1.0), steps=50))
    assert found == [[float(number)] * 2 for number in range(50)]
    # The first iteration shows what the step is, and the second begins the third.
    assert begun == [False] * 2 + [True] * 48
    assert [float(v.read()) for v in variables] == [50.0, 50.0]
    until(lambda: nothing_is_left(memory, worker))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_with_prefetch_a_step_lacks_the_newest_updates(worker: Cluster, begun: list[bool], prefetch: int) -> None:
    variables, step = counters(worker)
    found = read_by(Async(worker, prefetch=prefetch).run(step, itertools.repeat(1.0), steps=30))
    settled = 3 + prefetch
    assert found[settled:] == [[float(number - prefetch)] * 2 for number in range(settled, 30)]
    assert sum(begun) == 28
    assert [float(v.read()) for v in variables] == [30.0, 30.0]


def leave(run: Iterator[Any]) -> None:
    run.close()  # type: ignore[attr-defined]


def fail(run: Iterator[Any]) -> None:
    with pytest.raises(ZeroDivisionError):
        next(run)


@pytest.mark.parametrize("end", [leave, fail])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_step_that_is_never_called_leaves_no_trace(
    memory: MemoryCluster, worker: Cluster, end: Callable[[Iterator[Any]], None], prefetch: int
) -> None:
    with worker.parameter_servers():
        model = [dflow.Variable(lambda: jnp.ones(3), name=f"w{number}") for number in range(3)]
        optimizer = dflow.Optimizer(optax.adam(0.1), model, name="adam")

    @dflow.jit
    def update(x: Any) -> Any:
        value, gradients = dflow.value_and_grad(lambda: sum((v.read() * x).sum() for v in model), model)()
        optimizer.apply(gradients)
        return value

    def step(x: float) -> Any:
        return update(1 / x)

    def count() -> int:
        return int(optimizer.slots[0].count.read())

    run = Async(worker, prefetch=prefetch).run(step, itertools.chain([1.0] * 6, itertools.repeat(0.0)), steps=1000)
    for _ in range(6):
        next(run)
    end(run)
    assert count() == 6
    until(lambda: nothing_is_left(memory, worker))
    # The state is whole: training goes on.
    list(Async(worker).run(step, [1.0] * 4, steps=4))
    assert count() == 10


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_write_between_two_steps_is_seen_by_the_next(worker: Cluster, prefetch: int) -> None:
    variables, step = counters(worker)
    found = []
    for number, values in enumerate(Async(worker, prefetch=prefetch).run(step, itertools.repeat(1.0), steps=12)):
        found.append([float(value) for value in values])
        if number == 5:
            variables[0].assign(100.0)
        if number == 8:
            variables[1].assign_add(1000.0)
    assert found[6][0] == 100.0
    assert found[9][1] == 1009.0
    assert [float(v.read()) for v in variables] == [106.0, 1012.0]


def test_an_element_of_a_queue_is_taken_when_the_step_is_called(worker: Cluster, begun: list[bool]) -> None:
    with worker.parameter_servers():
        queue = dflow.FIFOQueue(20, jnp.float32(0), name="queue")
        total = dflow.Variable(lambda: jnp.float32(0), name="total")
    queue.enqueue_many(jnp.arange(20.0))

    @dflow.jit
    def step() -> Any:
        total.assign_add(1.0)
        return queue.dequeue(), total.read()

    run = Async(worker).run(step, itertools.repeat(()), steps=100)
    found = [(float(element), float(count)) for element, count in itertools.islice(run, 8)]
    leave(run)
    assert found == [(float(number), number + 1.0) for number in range(8)]
    assert sum(begun) == 6
    assert (float(queue.dequeue()), float(total.read())) == (8.0, 8.0)


def test_a_write_before_an_enqueue_is_seen_after_the_dequeue(memory: MemoryCluster, worker: Cluster) -> None:
    with worker.parameter_servers():
        rate = dflow.Variable(lambda: jnp.float32(0), name="rate")
        total = dflow.Variable(lambda: jnp.float32(0), name="total")
        queue = dflow.FIFOQueue(2, jnp.float32(0), name="queue")

    @dflow.jit
    def update(x: Any) -> Any:
        seen = rate.read()
        total.assign_add(x * seen)
        return seen

    def chief() -> None:
        with closing(memory.worker(1)) as other, other.parameter_servers():
            same = dflow.Variable(lambda: jnp.float32(0), name="rate")
            tokens = dflow.FIFOQueue(2, jnp.float32(0), name="queue")
            for number in range(1, 13):
                same.assign(float(number))
                tokens.enqueue(float(number))

    def step(x: float) -> Any:
        return float(queue.dequeue()), float(update(x))

    thread = threading.Thread(target=chief)
    thread.start()
    for token, seen in Async(worker).run(step, itertools.repeat(1.0), steps=12):
        assert seen >= token
    thread.join()


def test_a_prefetch_without_effect_is_reported(
    worker: Cluster, begun: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    _, step = counters(worker)
    with caplog.at_level(logging.WARNING, "dflow"):
        found = read_by(Async(worker, prefetch=1).run(lambda x: (step(x), step(x))[1], [1.0] * 4, steps=4))
    assert found == [[1.0] * 2, [3.0] * 2, [5.0] * 2, [7.0] * 2], "the two calls of a step see each other"
    assert not any(begun)
    (message,) = (record.getMessage() for record in caplog.records if "prefetch" in record.getMessage())
    assert message == "prefetch=1 has no effect: an iteration calls several functions"
