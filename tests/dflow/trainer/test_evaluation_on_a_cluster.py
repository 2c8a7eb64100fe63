"""`dflow.evaluate` on a cluster: values of one moment while workers train, and batches that tasks share."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.distributed import Async
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task.checkpoint_messages import CaptureVariables, EndCapture, EndShare, ReadCapture
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.distributed.wire.codec import decode_arrays
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.ir.types import ArrayType
from tests.distributed.task_parts import handled, part_of, without_server
from tests.distributed.waiting import DEADLINE_S, until

COUNT = 24


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=2, workers=3) as cluster:
        yield cluster


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[list[Cluster]]:
    with ThreadPoolExecutor(3) as pool:
        joined = list(pool.map(memory.worker, range(3)))
    yield joined
    for one in joined:
        one.close()
    assert is_freed(memory)


def is_freed(memory: MemoryCluster) -> bool:
    held = [part_of(task.server, TaskCheckpoints) for task in memory.tasks.values()]
    return not any(one._shared or one._captured for one in held)


class Program:
    """A variable on each parameter task, which training counts up together, and an evaluation of both."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.v = cluster, []
        with cluster.parameter_servers():
            for index in range(2):
                with dflow.device(f"ps:{index}"):
                    self.v.append(dflow.Variable(lambda: jnp.zeros(()), name=f"v{index}"))

    def train(self, x: Any) -> None:
        for variable in self.v:
            variable.assign_add(x)

    def step(self, rows: Any) -> Any:
        return {"rows": rows, "seen": self.v[0].read(), "difference": self.v[0] - self.v[1]}

    def evaluated(self, batches: Any, name: str = "e") -> dict[str, float]:
        return dflow.evaluate(self.step, batches, cluster=self.cluster, name=name)


class Batches:
    """Batches by number; `before(call)` is called before the `call`th of them is given, from 0 on."""

    def __init__(self, before: Callable[[int], None] = lambda call: None) -> None:
        self._before, self._calls = before, itertools.count()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Any:
        self._before(next(self._calls))
        return np.full(1 + number % 3, number, np.float32)


EXAMPLES = sum(1 + number % 3 for number in range(COUNT))
MEAN = sum(number * (1 + number % 3) for number in range(COUNT)) / EXAMPLES


def is_right(found: dict[str, float], seen: float) -> bool:
    assert found.pop("rows") == pytest.approx(MEAN, rel=1e-12)
    return found == {"seen": seen, "difference": 0.0, "examples": EXAMPLES}


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_values_are_of_one_moment_of_all_tasks_while_training_goes_on(
    memory: MemoryCluster, workers: list[Cluster], is_shared: bool
) -> None:
    one, other = map(Program, workers[:2])
    step, has_ended = dflow.jit(other.train), threading.Event()

    def train() -> None:
        steps = Async(workers[1]).run(step, itertools.repeat(1.0), steps=10**6, name="training")
        for _ in steps:
            if has_ended.is_set():
                break

    seen: list[float] = []

    def trained_more(call: int) -> None:
        seen.append(float(one.v[0].read()))
        until(lambda: float(one.v[0].read()) > seen[-1])

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(train)
        try:
            batches = Batches(trained_more)
            found = one.evaluated(batches) if is_shared else dflow.evaluate(one.step, batches)
        finally:
            has_ended.set()
        running.result(DEADLINE_S)
    assert is_right(found, found["seen"])
    assert is_freed(memory)
    assert found["seen"] == int(found["seen"])
    assert seen[0] < found["seen"] <= seen[1]  # of the first batch


def test_each_example_counts_once_though_the_worker_with_the_capture_dies(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    """Worker 0 captures the values and dies; worker 2, which joins after that, reads them too."""
    programs = [*map(Program, workers)]
    programs[0].train(3.0)
    captured, read, joined = threading.Event(), threading.Event(), threading.Event()

    def first(call: int) -> None:
        if call == 1:
            captured.set()
            assert read.wait(DEADLINE_S)
            workers[0].coordinator.close("killed")

    def second(call: int) -> None:
        if call == 1:
            read.set()
            until(lambda: workers[0].task not in workers[1].tasks)
            programs[1].train(1.0)
            joined.set()
            assert has_third.wait(DEADLINE_S)

    has_third = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        dying = pool.submit(programs[0].evaluated, Batches(first))
        assert captured.wait(DEADLINE_S)
        staying = pool.submit(programs[1].evaluated, Batches(second))
        assert joined.wait(DEADLINE_S)
        late = pool.submit(programs[2].evaluated, Batches(lambda call: has_third.set() if call == 1 else None))
        results = [one.result(DEADLINE_S) for one in (staying, late)]
        with pytest.raises(dflow.DflowError):
            dying.result(DEADLINE_S)
    assert results[0] == results[1]
    assert is_right(results[0], 3.0)
    # The result remains, for tasks that come to this evaluation later.
    programs[2].train(1.0)
    workers[0].close()
    workers[0] = memory.worker()
    programs[0] = Program(workers[0])
    assert is_right(programs[0].evaluated(Batches()), 3.0)
    assert is_right(programs[0].evaluated(Batches(), "next"), 5.0)
    with pytest.raises(dflow.TrainingError, match=r"(?s)'next': expected a new name.*put the number of the step into"):
        programs[0].evaluated(Batches(), "next")


def test_values_lost_with_all_their_tasks_are_not_mixed_with_newer_ones(
    memory: MemoryCluster, workers: list[Cluster]
) -> None:
    one, other = map(Program, workers[:2])

    def dying(call: int) -> None:
        if call == COUNT // 2:
            workers[0].coordinator.close("killed")

    with pytest.raises(dflow.DflowError):
        one.evaluated(Batches(dying))
    until(lambda: workers[0].task not in workers[1].tasks)
    other.train(1.0)
    assert is_right(other.evaluated(Batches()), 1.0)  # again, from the first batch on
    status = memory.coordinator.status()
    assert (status.steps_done, status.steps_total, status.workers) == (0, 0, ())


def test_an_error_of_the_step_frees_the_batches_and_the_capture(workers: list[Cluster]) -> None:
    one, other = map(Program, workers[:2])

    def failing(call: int) -> None:
        if call == 1:
            with pytest.raises(dflow.DflowError, match=r"it has 24 steps and worker:1 asks for 3"):
                dflow.evaluate(other.step, [X] * 3, cluster=other.cluster, name="e")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one.evaluated(Batches(failing))
    third = Program(workers[2])
    third.train(1.0)
    assert is_right(third.evaluated(Batches()), 1.0)


X = np.zeros(1, np.float32)


def test_what_tasks_cannot_share_is_refused(workers: list[Cluster]) -> None:
    mine = dflow.Variable(1.0, name="mine")
    with pytest.raises(dflow.TrainingError, match=r"(?s)got 'mine' of this process.*within cluster.parameter_servers"):
        dflow.evaluate(lambda x: x * mine, [X], cluster=workers[0], name="a")
    with pytest.raises(dflow.TrainingError, match=r"(?s)taken by number, got a generator.*give a list"):
        dflow.evaluate(lambda x: x, (x for x in [X]), cluster=workers[0], name="b")
    with pytest.raises(dflow.TrainingError, match=r"(?s)expected cluster= and name= together, got cluster= alone"):
        dflow.evaluate(lambda x: x, [X], cluster=workers[0])
    assert dflow.evaluate(lambda x: x, [X], cluster=workers[0], name="c") == {"loss": 0.0, "examples": 1.0}


def test_a_standalone_process_evaluates_all_itself() -> None:
    mine = dflow.Variable(1.0, name="mine")
    for _ in range(2):
        found = dflow.evaluate(lambda x: x + mine, [X, X], cluster=dflow.connect(), name="a")
        assert found == {"loss": 1.0, "examples": 2.0}


def test_a_shared_capture_is_freed_with_its_last_user() -> None:
    store, left = Store(), set[str]()
    store.create("w", ArrayType(jnp.float32.dtype, (2,)), lambda: jnp.ones(2))
    checkpoints = without_server(TaskCheckpoints, left.__contains__, name="/job:ps/task:0", store=store)
    a, b, c = (f"/job:worker/task:{index}" for index in range(3))
    assert handled(checkpoints, ReadCapture(a, "e", ("w",)))[0].origin == ""
    handled(checkpoints, CaptureVariables(a, 5, ("w",)))
    handled(checkpoints, EndCapture(a, 5, "e"))
    with pytest.raises(dflow.TaskLost, match="ps:0 has not captured what worker:0 shares"):
        handled(checkpoints, EndCapture(a, 5, "e"))
    store.update("w", "assign_add", jnp.ones(2))
    left.add(c)
    for reader in (b, c):
        found, data = handled(checkpoints, ReadCapture(reader, "e", ("w",)))
        assert (found.origin, found.number) == (a, 5)
        [value] = decode_arrays(found.arrays, memoryview(b"".join(getattr(data, "parts", [data]))))
        assert (np.asarray(value) == 1).all()
    checkpoints.left(a)
    assert checkpoints._shared["e"].users == {b}
    handled(checkpoints, EndShare(b, "e"))
    assert not checkpoints._shared
