"""Queues and accumulators on the tasks of a cluster, with every task in this process."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dflow
from dflow.distributed.cluster.cluster import Cluster, ClusterSettings
from dflow.distributed.task.task_resources import TaskResources
from dflow.distributed.wire.codec import decode_message, encode_message
from dflow.distributed.wire.messages.resources import CallResource, CreateResource
from dflow.lowering.queues.channel import StepId
from dflow.lowering.state.store import Store
from dflow.testing import MemoryCluster
from dflow.tracing.errors import (
    AccumulatorError,
    DeadlineExceeded,
    DflowError,
    QueueClosed,
    QueueError,
    VariableError,
    WireError,
)
from dflow.tracing.ir.accumulator_settings import AccumulatorSettings, Reduction
from dflow.tracing.ir.queue_settings import QueueKind, QueueSettings
from dflow.tracing.ir.resource_op import ResourceOp
from tests.distributed.waiting import until
from tests.effort import examples

DEADLINE_S = 60.0
SOON = ClusterSettings(join_timeout_s=10.0, request_timeout_s=30.0, step_timeout_s=30.0)
F32, I32 = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.int32))


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[tuple[Cluster, Cluster]]:
    with closing(memory.worker(0, SOON)) as one, closing(memory.worker(1, SOON)) as other:
        yield one, other


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(48) as pool:
        yield pool


def fifo(worker: Cluster, name: str = "q", capacity: int = 4, spec: Any = F32) -> dflow.FIFOQueue:
    with worker.parameter_servers():
        return dflow.FIFOQueue(capacity, spec, name=name)


def waiting_at(memory: MemoryCluster, name: str) -> int:
    """Number of ops that wait for a queue or an accumulator, on any task."""
    found = 0
    for task in memory.tasks.values():
        with contextlib.suppress(DflowError):
            held: Any = task.server.store.resource(name)
            found += len(getattr(held.held, "shared", held.held)._waiters)
    return found


# Created once, found by name.


@pytest.mark.parametrize("traced", [False, True])
def test_every_kind_of_queue_works_from_another_task(workers: tuple[Cluster, Cluster], traced: bool) -> None:
    with workers[0].parameter_servers():
        shuffled = dflow.RandomShuffleQueue(8, 2, I32, seed=3, name="shuffled")
        ranked = dflow.PriorityQueue(8, (jax.ShapeDtypeStruct((), jnp.int32), F32), name="ranked")
        plain = dflow.FIFOQueue(8, F32, name="plain")

    def fill() -> Any:
        shuffled.enqueue_many(jnp.arange(5))
        ranked.enqueue_many((jnp.array([3, 1, 2]), jnp.array([30.0, 10.0, 20.0])))
        plain.enqueue_many(jnp.arange(3.0))
        shuffled.close()
        return (
            shuffled.dequeue_many(5),
            ranked.dequeue_many(3)[1],
            plain.dequeue_up_to(3),
            (plain.size(), shuffled.is_closed(), plain.is_closed()),
        )

    drawn, by_rank, (rows, count), (left, *closed) = (dflow.jit(fill) if traced else fill)()
    assert sorted(np.asarray(drawn).tolist()) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(by_rank, [10, 20, 30])
    np.testing.assert_array_equal(rows, [0, 1, 2])
    assert (int(count), int(left), [*map(bool, closed)]) == (3, 0, [True, False])


def test_an_accumulator_averages_what_workers_give_it(workers: tuple[Cluster, Cluster]) -> None:
    made = []
    for worker in workers:
        with worker.parameter_servers():
            rows = dflow.RowGradient(jnp.zeros(3, jnp.int32), jnp.zeros((3, 2)), (10, 2))
            made.append(dflow.ConditionalAccumulator({"b": jnp.zeros(2), "rows": rows}, name="gradients"))

    @dflow.jit
    def give(number: int, scale: Any) -> Any:
        row = dflow.RowGradient(jnp.array([1, 4]), scale * jnp.ones((2, 2)), (10, 2))
        return made[number].apply({"b": scale * jnp.ones(2), "rows": row}, 0)

    give_other = dflow.jit(lambda scale: give.fn(1, scale))
    assert bool(dflow.jit(lambda scale: give.fn(0, scale))(1.0))
    assert bool(give_other(3.0))
    mean = made[0].take(2)
    np.testing.assert_array_equal(mean["b"], [2, 2])
    np.testing.assert_array_equal(mean["rows"].dense()[1], [2, 2])
    assert not bool(give_other(1.0))
    assert (int(made[0].step), int(made[0].dropped()), int(made[1].count())) == (1, 1, 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: dflow.FIFOQueue(5, F32, name="q"), "capacity 4 and was asked for as fifo queue<f32.*capacity 5"),
        (lambda: dflow.FIFOQueue(4, I32, name="q"), "is fifo queue<f32.*and was asked for as fifo queue<i32"),
        (lambda: dflow.RandomShuffleQueue(4, 1, F32, name="q"), "asked for as shuffle queue.*1 held back"),
        (lambda: dflow.ConditionalAccumulator(F32, name="q"), "asked for as accumulator<f32"),
        (lambda: dflow.Variable(0.0, name="q"), "queue 'q' is fifo queue.*and was asked for as float32"),
        (lambda: dflow.FIFOQueue(4, F32), "without a name, and other processes find it by its name"),
    ],
)
def test_another_thing_of_one_name_is_refused(
    workers: tuple[Cluster, Cluster], make: Callable[[], Any], text: str
) -> None:
    fifo(workers[0])
    with (
        pytest.raises((QueueError, AccumulatorError, VariableError), match=text) as got,
        workers[1].parameter_servers(),
    ):
        make()
    assert "test_cluster_resources.py" in str(got.value)


# Waits.


@pytest.mark.parametrize("traced", [False, True])
def test_a_closed_queue_and_a_deadline_say_so_with_the_line(workers: tuple[Cluster, Cluster], traced: bool) -> None:
    queue = fifo(workers[0])
    wrap: Any = dflow.jit if traced else lambda f: f
    with pytest.raises(DeadlineExceeded, match=r"queue 'q' could not give 1 element within 0.01 s.*\n.*resources.py"):
        wrap(lambda: queue.dequeue(timeout_s=0.01))()
    queue.enqueue(1.0)
    wrap(queue.close)()
    assert float(queue.dequeue()) == 1.0
    with pytest.raises(QueueClosed, match=r"queue 'q' is closed and cannot give 1 element(.|\n)*resources.py"):
        wrap(lambda: queue.dequeue() + 1)()


@pytest.mark.parametrize("traced", [False, True])
def test_the_element_that_a_dead_worker_waited_for_is_not_lost(
    memory: MemoryCluster, workers: tuple[Cluster, Cluster], pool: ThreadPoolExecutor, traced: bool
) -> None:
    one, _ = workers
    queue = fifo(one)
    doomed = memory.worker(2, SOON)
    theirs = fifo(doomed)
    wait = pool.submit(dflow.jit(theirs.dequeue) if traced else theirs.dequeue)
    until(lambda: waiting_at(memory, "q") == 1)
    doomed.close()
    with pytest.raises(DflowError):
        wait.result(DEADLINE_S)
    until(lambda: waiting_at(memory, "q") == 0)
    queue.enqueue(5.0)
    assert float(queue.dequeue()) == 5.0


def test_a_wait_that_is_given_up_here_is_given_up_on_the_task(
    memory: MemoryCluster, workers: tuple[Cluster, Cluster]
) -> None:
    queue = fifo(workers[0])

    def message(step: StepId) -> CallResource:
        return CallResource(queue.key, ResourceOp("queue.dequeue"), step.origin, step.number)

    with pytest.raises(DeadlineExceeded):
        workers[0].requests.ask_step(str(queue.device), message, b"", 0.05 - SOON.request_timeout_s)
    until(lambda: waiting_at(memory, "q") == 0)
    queue.enqueue(1.0)
    assert int(queue.size()) == 1


def test_more_waits_than_a_task_has_threads_leave_it_free(
    memory: MemoryCluster, workers: tuple[Cluster, Cluster], pool: ThreadPoolExecutor
) -> None:
    one, other = (fifo(worker, capacity=40) for worker in workers)
    step = dflow.jit(one.dequeue)
    waits: list[Future[Any]] = [pool.submit(step if number % 2 else one.dequeue) for number in range(40)]
    until(lambda: waiting_at(memory, "q") == 40)
    other.enqueue_many(jnp.arange(40.0))
    assert sorted(float(wait.result(DEADLINE_S)) for wait in waits) == list(range(40))


# Containers.


def test_a_container_is_reset_on_every_task(
    memory: MemoryCluster, workers: tuple[Cluster, Cluster], pool: ThreadPoolExecutor
) -> None:
    one, other = workers
    with dflow.container("run1"), one.parameter_servers():
        queue = dflow.FIFOQueue(4, F32, name="q")
        weight = dflow.Variable(jnp.ones(2), name="w")
    with dflow.container("run1"), other.parameter_servers():
        theirs = dflow.FIFOQueue(4, F32, name="q")
    assert queue.name == "run1/q"
    wait = pool.submit(theirs.dequeue)
    until(lambda: waiting_at(memory, "run1/q") == 1)
    dflow.reset_container("run1")
    with pytest.raises(QueueError, match="queue 'run1/q' is gone: container 'run1' was reset"):
        wait.result(DEADLINE_S)
    with pytest.raises(QueueError, match="is gone"):
        queue.size()
    with pytest.raises(VariableError, match="variable 'run1/w' is gone: container 'run1' was reset"):
        weight.read()
    with dflow.container("run1"), one.parameter_servers():
        again = dflow.FIFOQueue(2, I32, name="q")
        anew = dflow.Variable(jnp.zeros(3), name="w")
    again.enqueue(1)
    assert int(again.size()) == 1
    assert anew.read().shape == (3,)
    dflow.reset_container("run1")


# Messages of peers.


def created(resources: TaskResources, name: str = "q", **fields: Any) -> str:
    message = CreateResource(name, "queue<f32[2], i32[]>", QueueSettings(QueueKind.FIFO, 4))
    for field, value in fields.items():
        message = CreateResource(**{**{f: getattr(message, f) for f in message.__struct_fields__}, field: value})
    resources.create(message)
    return name


@pytest.mark.parametrize(
    "fields",
    [
        {"handle": "queue<f32[2]"},
        {"handle": "queue<f32[,,]>"},
        {"handle": "queue<key<fry>[]>"},
        {"handle": "f32[2]"},
        {"handle": "ref<f32[2]>"},
        {"handle": "queue<>"},
        {"handle": "accumulator<f32[2]>"},
        {"name": ""},
        {"name": "n" * 5000},
        {"settings": QueueSettings(QueueKind.FIFO, 0)},
        {"settings": QueueSettings(QueueKind.FIFO, 1 << 40)},
        {"settings": QueueSettings(QueueKind.SHUFFLE, 4, 4)},
        {"settings": QueueSettings(QueueKind.PRIORITY, 4)},
        {"settings": AccumulatorSettings(Reduction.MEAN)},
        {"handle": "accumulator<f32[2]>", "settings": AccumulatorSettings(Reduction.MEAN, limit=0)},
        {"handle": "accumulator<i32[2]>", "settings": AccumulatorSettings(Reduction.MEAN)},
        {"handle": "accumulator<f32[?]>", "settings": AccumulatorSettings(Reduction.SUM)},
        {"handle": "accumulator<2 rows of f32[]>", "settings": AccumulatorSettings(Reduction.SUM)},
        {"handle": "accumulator<>", "settings": AccumulatorSettings(Reduction.SUM)},
    ],
)
def test_what_is_no_queue_and_no_accumulator_is_not_created(fields: dict[str, Any]) -> None:
    store = Store()
    with pytest.raises(WireError):
        created(TaskResources("/job:ps/task:0", store), **fields)
    with pytest.raises(DflowError, match="there are none"):
        store.resource("q")


def test_a_kind_of_queue_and_a_reduction_that_do_not_exist_are_no_message() -> None:
    for legal in (QueueSettings(QueueKind.FIFO, 4), AccumulatorSettings(Reduction.MEAN)):
        sent = bytes(encode_message(CreateResource("q", "queue<f32[2]>", legal)))
        with pytest.raises(WireError, match="are no message of this protocol"):
            decode_message(sent.replace(b"fifo", b"lifo").replace(b"mean", b"mode"))


@pytest.mark.parametrize(
    ("key", "op"),
    [
        ("q", ResourceOp("queue.peek")),
        ("q", ResourceOp("accumulator.take", count=1)),
        ("q", ResourceOp("queue.dequeue_many", count=-1)),
        ("q", ResourceOp("queue.dequeue_many", count=1 << 40)),
        ("q", ResourceOp("queue.dequeue", timeout_s=float("nan"))),
        ("q", ResourceOp("queue.dequeue", line="x" * 5000)),
        ("q", ResourceOp("queue.enqueue")),
        ("other", ResourceOp("queue.size")),
    ],
)
def test_an_op_that_does_not_fit_is_refused(key: str, op: ResourceOp) -> None:
    resources = TaskResources("/job:ps/task:0", Store())
    created(resources)
    with pytest.raises(DflowError):
        resources.executable(CallResource(key, op, "o", 1))


@settings(max_examples=examples(100), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    op=st.sampled_from(["enqueue", "enqueue_many", "dequeue", "dequeue_many", "dequeue_up_to", "size", "close"]),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3),
    dtypes=st.lists(st.sampled_from(["float32", "int32", "bool"]), min_size=3, max_size=3),
    count=st.integers(-1, 3),
)
def test_operands_of_any_types_are_taken_or_refused_before_they_reach_the_queue(
    op: str, shapes: list[list[int]], dtypes: list[str], count: int
) -> None:
    store = Store()
    resources = TaskResources("/job:ps/task:0", store)
    created(resources)
    operands = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, itertools.cycle(dtypes), strict=False)]
    answers: list[Any] = []
    with contextlib.suppress(DflowError):
        store.resource("q").start(ResourceOp(f"queue.{op}", count, 0.0), operands, answers.append)
    held: Any = store.resource("q")
    for element in held.held.contents():
        assert [(array.shape, array.dtype.name) for array in element] == [((2,), "float32"), ((), "int32")]
