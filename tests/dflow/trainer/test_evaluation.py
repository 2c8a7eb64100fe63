"""`dflow.evaluate` in one process and on a cluster, and a trainer's decisions while the coordinator is away."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import dflow
from dflow.distributed import Async
from dflow.distributed.client.coordinator_client import AGREE_S, CoordinatorClient
from dflow.distributed.cluster.cluster import Cluster
from dflow.distributed.task.checkpoint_messages import CaptureVariables, EndCapture, EndShare, ReadCapture
from dflow.distributed.task.task_checkpoints import TaskCheckpoints
from dflow.distributed.wire.codec import decode_arrays
from dflow.distributed.wire.messages.coordination import DecideOnce, ElectOnce
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import DeadlineExceeded
from dflow.tracing.ir.types import ArrayType
from dflow.trainer.shared_decisions import KNOWN_S, SharedDecisions
from tests.distributed.task_parts import handled, part_of, without_server
from tests.distributed.waiting import DEADLINE_S, until

X = np.random.default_rng(0).normal(size=(25, 3)).astype(np.float32)


def test_an_uneven_last_batch_counts_by_its_examples() -> None:
    w = dflow.Variable(jnp.arange(3.0))

    @dflow.jit
    def step(x: Any) -> Any:
        errors = (x @ w) ** 2
        return {"loss": jnp.mean(errors), "each": errors, "large": errors > 1}

    found = dflow.evaluate(step, dflow.data.batches(X, 10))
    errors = (X @ np.arange(3.0)) ** 2
    assert found == {
        "loss": pytest.approx(errors.mean(), rel=1e-6),
        "each": pytest.approx(errors.mean(), rel=1e-6),
        "large": (errors > 1).mean(),
        "examples": 25,
    }


def test_a_step_may_count_its_examples_and_take_several_arguments() -> None:
    def step(x: Any, mask: Any) -> Any:
        return {"loss": jnp.sum(x * mask) / jnp.sum(mask), "examples": jnp.sum(mask)}

    batches = [(jnp.array([1.0, 2.0, 9.0]), jnp.array([1, 1, 0])), (jnp.array([6.0, 9.0, 9.0]), jnp.array([1, 0, 0]))]
    assert dflow.evaluate(step, batches) == {"loss": 3.0, "examples": 3.0}
    masked = jnp.full(3, 5.0), jnp.array([0, 0, 0])  # its mean is NaN, and counts nothing
    assert dflow.evaluate(step, [*batches, masked]) == {"loss": 3.0, "examples": 3.0}


def test_a_single_result_is_the_loss_and_batches_may_come_by_number_alone() -> None:
    class Squares:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> Any:
            if number not in range(3):
                raise AssertionError(number)
            return np.full(2, number**2, np.float32)

    assert dflow.evaluate(jnp.mean, Squares()) == {"loss": pytest.approx(5 / 3), "examples": 6.0}


def test_training_between_the_batches_changes_nothing() -> None:
    w = dflow.Variable(jnp.ones(3))
    train = dflow.jit(lambda: w.assign_add(jnp.ones(3)))

    def batches() -> Iterator[Any]:
        for rows in np.split(X, 5):
            yield rows
            train()

    train()
    found = dflow.evaluate(lambda x: jnp.mean(x @ w), batches())
    assert found["loss"] == pytest.approx((X @ np.full(3, 2.0)).mean(), rel=1e-6)
    assert (w.read() == 7).all()
    assert dflow.evaluate(lambda x: jnp.mean(x @ w), [X])["loss"] == pytest.approx((X @ np.full(3, 7.0)).mean(), 1e-6)


def test_a_second_evaluation_traces_nothing() -> None:
    traces = []

    class Model:
        def __init__(self, scale: float) -> None:
            self.w = dflow.Variable(scale)

        def mean(self, x: Any) -> Any:
            traces.append(x.shape)
            return jnp.mean(x) * self.w

    one, other = Model(1.0), Model(2.0)
    losses = [dflow.evaluate(model.mean, dflow.data.batches(X, 10))["loss"] for model in (one, other, one, other)]
    assert traces == [(10, 3), (5, 3)] * 2
    assert losses == [pytest.approx(scale * X.mean(), rel=1e-5) for scale in (1, 2, 1, 2)]


def refused(step: Any, batches: Any, text: str) -> None:
    with pytest.raises(dflow.TrainingError, match=rf"(?s){text}.*test_evaluation.py:\d+\n  \w") as error:
        dflow.evaluate(step, batches)
    assert str(error.value).startswith("evaluate: ")


def test_what_an_evaluation_cannot_count_is_refused() -> None:
    count, queue = (
        dflow.Variable(0, name="count"),
        dflow.FIFOQueue(1, jax.ShapeDtypeStruct((), jnp.float32), name="queue"),
    )
    key = dflow.Generator(0, name="noise")

    def by_size(x: Any) -> Any:
        return {"loss": jnp.mean(x)} if len(x) == 10 else {"error": jnp.mean(x)}

    def writes(x: Any) -> Any:
        count.assign_add(1)
        return jnp.mean(x)

    data = dflow.data.batches(X, 10)
    refused(writes, data, "only reads variables, got one that changes 'count'")
    refused(lambda x: jax.random.normal(key.split(), (10,)), data, "one that changes 'noise")
    refused(lambda x: queue.dequeue(), data, "one that changes 'queue'")
    refused(lambda x: jnp.sum(x > 0), data, r"loss: expected a float scalar.* got i32\[\]\n")
    refused(lambda x: x, data, r"loss: expected a float scalar.* got f32\[10,3\]\n")
    refused(lambda x: x[:4, 0], data, r"got f32\[4\]\n")
    refused(
        lambda x: {"loss": x[:, 0], "examples": jnp.float32(4)}, data, r"without 'examples' an array.* got f32\[10\]\n"
    )
    refused(lambda x: jnp.mean(x) + 1j, data, r"got c64\[\]\n")
    refused(lambda x, y: jnp.mean(x), [(X, X[:4])], r"one length, its number of examples, got \[4, 25\]")
    refused(lambda x: x, [1.0], r"number of examples, got \[\]")
    refused(by_size, data, r"got \['loss'\] of \[\] for the first and \['error'\]")
    refused(jnp.mean, [], "at least one example, got none")
    assert int(count.read()) == 0


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


@jax.tree_util.register_dataclass
@dataclass
class Average:
    """A metric as clu and metrax have them, with a setting among its arrays."""

    total: Any
    count: Any
    scale: Any = 2

    def merge(self, other: Any) -> Any:
        return Average(self.total + other.total, self.count + other.count, self.scale)

    def compute(self) -> Any:
        value = jnp.asarray(self.total) / self.count
        return {"mean": value, "scaled": [value * part for part in range(self.scale)]}


@jax.tree_util.register_dataclass
@dataclass
class Largest:
    value: Any

    def merge(self, other: Any) -> Any:
        return Largest(jnp.maximum(self.value, other.value))

    def compute(self) -> Any:
        return self.value


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
        means = {"rows": rows, "seen": self.v[0].read(), "difference": self.v[0] - self.v[1]}
        return means | {"auc": dflow.metrics.auc(rows, rows % 2), "kept": Average(rows.sum(), rows.size)}

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


ROWS = np.repeat(np.arange(COUNT), 1 + np.arange(COUNT) % 3)
AUC = roc_auc_score(ROWS % 2, ROWS)


def is_right(found: dict[str, float], seen: float) -> bool:
    names, mean = ("rows", "auc", "kept/mean", "kept/scaled/0", "kept/scaled/1"), ROWS.mean()
    assert [found.pop(name) for name in names] == pytest.approx([mean, AUC, mean, 0, mean])
    return found == {"seen": seen, "difference": 0.0, "examples": len(ROWS)}


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
                dflow.evaluate(other.step, [ROWS_OF_X] * 3, cluster=other.cluster, name="e")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one.evaluated(Batches(failing))
    third = Program(workers[2])
    third.train(1.0)
    assert is_right(third.evaluated(Batches()), 1.0)


ROWS_OF_X = np.zeros(1, np.float32)


def test_what_tasks_cannot_share_is_refused(workers: list[Cluster]) -> None:
    mine = dflow.Variable(1.0, name="mine")
    with pytest.raises(dflow.TrainingError, match=r"(?s)got 'mine' of this process.*within cluster.parameter_servers"):
        dflow.evaluate(lambda x: x * mine, [ROWS_OF_X], cluster=workers[0], name="a")
    with pytest.raises(dflow.TrainingError, match=r"(?s)taken by number, got a generator.*give a list"):
        dflow.evaluate(lambda x: x, (x for x in [ROWS_OF_X]), cluster=workers[0], name="b")
    with pytest.raises(dflow.TrainingError, match=r"(?s)expected cluster= and name= together, got cluster= alone"):
        dflow.evaluate(lambda x: x, [ROWS_OF_X], cluster=workers[0])
    shared, text = (
        Program(workers[0]),
        r"(?s)m: expected a merge that adds .* makes 1000 of 3 and 1000 .*f32.*metrics.Sums",
    )
    with pytest.raises(dflow.TrainingError, match=text):
        dflow.evaluate(lambda x: {"m": Largest(x * shared.v[0])}, [ROWS_OF_X], cluster=workers[0], name="d")
    assert dflow.evaluate(lambda x: x, [ROWS_OF_X], cluster=workers[0], name="c") == {"loss": 0.0, "examples": 1.0}


def test_a_standalone_process_evaluates_all_itself() -> None:
    mine = dflow.Variable(1.0, name="mine")
    for _ in range(2):
        found = dflow.evaluate(lambda x: x + mine, [ROWS_OF_X, ROWS_OF_X], cluster=dflow.connect(), name="a")
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


class Away:
    """A cluster whose coordinator is away for longer than any request waits; it keeps the timeouts."""

    is_standalone = False

    def __init__(self) -> None:
        self.timeouts_s: list[float | None] = []

    def decide(self, what: str, value: str | None, timeout_s: float | None = None) -> str | None:
        self.timeouts_s.append(timeout_s)
        raise DeadlineExceeded("the coordinator did not answer")


def test_an_optional_look_finds_nothing_while_the_coordinator_is_away() -> None:
    cluster = Away()
    decisions = SharedDecisions(cast(Any, cluster), "run", is_together=False)
    assert decisions.known_reason("after step 5") == ""
    with pytest.raises(DeadlineExceeded):
        decisions.reason("after step 5", "nan")
    assert cluster.timeouts_s == [KNOWN_S, None]


@pytest.mark.parametrize("message", [DecideOnce("end", "", "nan"), ElectOnce("saver", "")])
def test_a_question_that_a_worker_cannot_go_on_without_waits_through_a_restart(message: Any) -> None:
    class Session:
        def ask(self, message: Any, timeout_s: float) -> float:
            return timeout_s

    client = CoordinatorClient.__new__(CoordinatorClient)
    client.task, client.session = "/job:worker/task:0", cast(Any, Session())
    assert client.ask(message) == AGREE_S
