"""`dflow.data.feed`: an iterable's elements into a queue, in one process and on tasks, by threads that end with it."""

from __future__ import annotations

import gc
import itertools
import math
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.data import batches, feed
from dflow.distributed.cluster.cluster import Cluster
from dflow.input import feeding
from dflow.lowering.queues.queue_producer import HeldQueueProducer
from dflow.testing import MemoryCluster, memory_cluster
from dflow.tracing.errors import StepCancelled
from tests.distributed.waiting import until

WAIT_S = 60.0
I32 = jax.ShapeDtypeStruct((), jnp.int32)


def _queue(capacity: int = 4, spec: Any = I32) -> dflow.FIFOQueue:
    return dflow.FIFOQueue(capacity, spec, name="q")


def _rest(queue: Any) -> list[Any]:
    """Take elements until the queue is closed."""
    taken = []
    while True:
        try:
            taken.append(jax.tree.map(np.asarray, queue.dequeue(timeout_s=WAIT_S)))
        except dflow.QueueClosed:
            return taken


def test_all_of_an_iterable_comes_out_in_order_and_then_the_queue_is_closed() -> None:
    queue = _queue()
    running = feed(range(50), queue)
    assert [int(number) for number in _rest(queue)] == list(range(50))
    running.join(WAIT_S)
    assert (running.count, running.error, running.is_running()) == (50, None, False)
    assert repr(running) == "<Feed of queue 'q': ended, 50 elements put in>"


def test_a_full_queue_holds_the_iterable_back() -> None:
    given = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            given.append(number)
            yield number

    queue = _queue(3)
    with feed(numbers(), queue) as running:
        until(lambda: running.count == 3 and len(given) == 4)
        queue.dequeue()
        until(lambda: running.count == 4 and len(given) == 5)
    assert len(given) == 5
    assert [int(number) for number in _rest(queue)] == [1, 2, 3]


def _failing(count: int) -> Iterator[int]:
    yield from range(count)
    raise ValueError("no such file")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_error_of_the_iterable_is_raised_at_the_dequeue(compiled: bool) -> None:
    queue = _queue(8)
    running = feed(_failing(3), queue)

    def taken() -> Any:
        return queue.dequeue()

    take = dflow.jit(taken) if compiled else taken
    assert [int(take()) for _ in range(3)] == [0, 1, 2]
    line = _failing.__code__.co_firstlineno + 2
    says = (
        r"(?s)queue 'q' cannot give 1 element, because what feeds it failed; it holds 0 of at most 8\n  at .*\n"
        rf"  it raised ValueError: no such file\n  at .*test_feeding.py:{line}\n  it is fed\n  at .*test_feeding.py:\d+"
    )
    with pytest.raises(dflow.FeedError, match=says) as caught:
        take()
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(dflow.FeedError):
        queue.enqueue(1)
    running.join(WAIT_S)
    assert isinstance(running.error, ValueError)
    assert "failed, 3 elements put in" in repr(running)


def test_who_waits_for_an_element_is_told_of_the_error() -> None:
    queue, go_on = _queue(), threading.Event()

    def late() -> Iterator[int]:
        assert go_on.wait(WAIT_S)
        raise OSError("disk gone")
        yield 1

    feed(late(), queue)
    threading.Timer(0.01, go_on.set).start()
    with pytest.raises(dflow.FeedError, match="it raised OSError: disk gone"):
        queue.dequeue(timeout_s=WAIT_S)


def test_an_element_of_another_type_is_an_error_at_the_dequeue() -> None:
    queue = _queue()
    feed([1, np.ones(3)], queue)
    assert int(queue.dequeue()) == 1
    with pytest.raises(dflow.FeedError, match=r"queue 'q' holds i32\[\] but feed was given f64\[3\]"):
        queue.dequeue()


def test_a_cancelled_enqueue_is_no_end_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = _queue()

    def cancelled(producer: Any, number: int, element: Any, on_results: Any) -> Any:
        on_results(StepCancelled("ps:0 returns to snapshot 3"))
        return lambda error: None

    monkeypatch.setattr(HeldQueueProducer, "enqueue", cancelled)
    with feed(range(3), queue), pytest.raises(dflow.FeedError, match="ps:0 returns to snapshot 3"):
        queue.dequeue(timeout_s=WAIT_S)


def test_a_feed_of_the_same_name_leaves_out_what_was_put_in() -> None:
    queue = _queue(20)
    feed(range(3), queue, name="data", close=False).join(WAIT_S)
    feed(range(5), queue, name="data", close=False).join(WAIT_S)
    feed(range(2), queue).join(WAIT_S)
    assert [int(queue.dequeue(timeout_s=WAIT_S)) for _ in range(7)] == [0, 1, 2, 3, 4, 0, 1]


def test_two_running_feeds_of_one_name_are_refused() -> None:
    queue = _queue(1)
    refused = pytest.raises(dflow.InputError, match="name='data', which a running feed of queue")
    with feed(itertools.count(), queue, name="data"), refused:
        feed(range(3), queue, name="data")


def test_several_threads_map_at_the_same_time_and_lose_nothing() -> None:
    queue, together = _queue(200), threading.Barrier(4, timeout=WAIT_S)

    def squared(number: int) -> int:
        if number < 4:
            together.wait()
        return number * number

    def numbers() -> Iterator[int]:
        # A generator raises ValueError when two threads use it.
        yield from range(100)

    running = feed(numbers(), queue, threads=4, map=squared)
    assert sorted(int(number) for number in _rest(queue)) == [number * number for number in range(100)]
    running.join(WAIT_S)


def test_what_came_before_an_error_of_one_of_several_threads_is_put_in() -> None:
    queue = _queue(200)

    def odd(number: int) -> int:
        if number == 50:
            raise KeyError("fifty")
        return number

    running = feed(range(100), queue, threads=3, map=odd)
    running.join(WAIT_S)
    taken = [int(queue.dequeue()) for _ in range(running.count)]
    assert set(range(50)) <= set(taken)
    with pytest.raises(dflow.FeedError, match="it raised KeyError: 'fifty'"):
        queue.dequeue()


def _stopped(running: Any, queue: dflow.FIFOQueue) -> None:
    running.stop()


def _closed(running: Any, queue: dflow.FIFOQueue) -> None:
    queue.close(cancel_pending=True)


def _reset(running: Any, queue: dflow.FIFOQueue) -> None:
    dflow.reset_container("input")


def _refused(running: Any, queue: dflow.FIFOQueue) -> None:
    with pytest.raises(dflow.FeedError):  # after the elements before the one that `map` refuses
        list(iter(lambda: queue.dequeue(timeout_s=WAIT_S), None))


@pytest.mark.parametrize("end", [_stopped, _closed, _reset, _refused])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_end_ends_the_threads_and_runs_the_generators_finally(end: Any, threads: int) -> None:
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    def few(number: int) -> int:
        return [*range(4 + threads)][number] if end is _refused else number

    with dflow.container("input"):
        queue = _queue()
    running = feed(numbers(), queue, map=few, threads=threads)
    until(lambda: running.count == 4)
    end(running, queue)
    running.join(WAIT_S)
    assert (ended, running.is_running()) == ([True], False)
    if end is _stopped:
        assert (running.error, len(_rest(queue))) == (None, 4)
    elif end is _reset:
        with pytest.raises(dflow.QueueError, match="container 'input' was reset"):
            queue.dequeue()
    elif end is _refused:
        assert isinstance(running.error, IndexError)


def test_an_interrupt_of_who_consumes_ends_the_threads() -> None:
    queue = _queue()
    running = feed(itertools.count(), queue)
    with pytest.raises(KeyboardInterrupt), running:
        raise KeyboardInterrupt
    assert not running.is_running()


def test_a_queue_that_nobody_has_any_more_ends_its_feed() -> None:
    queue = _queue()
    gone = weakref.ref(queue)
    running = feed(itertools.count(), queue)
    until(lambda: running.count == 4)
    del queue
    gc.collect()
    until(lambda: gone() is None)  # the feed's thread holds the queue while it converts an element
    running.join(WAIT_S)


def test_several_feeds_share_a_queue_that_none_of_them_closes() -> None:
    queue = _queue(20)
    for first in (0, 10):
        feed(range(first, first + 5), queue, close=False).join(WAIT_S)
    assert [int(queue.dequeue()) for _ in range(10)] == [*range(5), *range(10, 15)]
    queue.enqueue(1)


def test_join_says_what_the_threads_wait_for() -> None:
    queue = _queue()
    with feed(itertools.count(), queue) as running:
        until(lambda: running.count == 4 and running._waiting)
        says = r"(?s)1 of 1 threads of the feed of queue 'q' have not ended within 0\.01 s; they wait for room.*stop"
        with pytest.raises(dflow.DeadlineExceeded, match=says):
            running.join(0.01)


def test_the_end_may_be_waited_for_without_end() -> None:
    queue = _queue()
    running = feed(range(3), queue)
    running.join(math.inf)
    assert running.count == queue.size() == 3


def test_lists_stand_for_tuples_and_foreign_tensors_for_arrays() -> None:
    class Tensor:
        """A tensor with the interface of PyTorch's and TensorFlow's."""

        def __init__(self, values: Any) -> None:
            self.values = values

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.asarray(self.values, dtype=dtype)

    class Loader:
        """A DataLoader that yields lists of tensors."""

        def __iter__(self) -> Iterator[Any]:
            return ([Tensor(np.full((2, 3), n, np.float64)), Tensor(np.arange(2))] for n in range(3))

    spec = (jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
    queue = _queue(4, spec)
    feed(Loader(), queue)
    assert [(float(x[0, 0]), y.tolist()) for x, y in _rest(queue)] == [(0.0, [0, 1]), (1.0, [0, 1]), (2.0, [0, 1])]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: feed([1], [2]), r"feed was given a list\n  at .*\n  give it a queue"),  # type: ignore[arg-type]
        (lambda: feed(3, _queue()), "feed was given a int, which is no iterable"),  # type: ignore[arg-type]
        (lambda: feed([3], _queue(), threads=0), "threads=0"),
        (lambda: batches([1], 0), "the size 0"),
        (lambda: batches([1], 2, epochs=0), "epochs=0"),
        (lambda: batches([1], 2, shuffle=-1), "shuffle=-1"),
        (
            lambda: batches(iter([1]), 2, shuffle=True),
            "shuffle=True for a list_iterator, whose elements come one by one",
        ),
        (lambda: batches(iter([1]), 2, epochs=2), "epochs=2 for a list_iterator, which can be gone through once"),
        (lambda: batches(3, 2), "expected arrays or an iterable, got a int"),
        (lambda: batches((np.ones(3), np.ones(4)), 2), "one number of rows, got column 0: 3, column 1: 4"),
        (lambda: batches(np.ones(()), 2), "expected rows, got one value"),
    ],
)
def test_what_cannot_be_used_is_refused(call: Any, says: str) -> None:
    with pytest.raises(dflow.InputError, match=says):
        call()


def test_a_process_that_ends_waits_no_longer_for_many_slow_feeds_than_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    release, now = threading.Event(), 0.0

    def slow() -> Iterator[int]:
        release.wait(WAIT_S)
        yield 0

    def join(thread: threading.Thread, timeout: float) -> None:
        nonlocal now
        now += timeout

    queues = [_queue() for _ in range(3)]
    feeds = [feed(slow(), queue, threads=2) for queue in queues]
    with monkeypatch.context() as patched:
        patched.setattr(feeding, "time", SimpleNamespace(monotonic=lambda: now))
        patched.setattr(threading.Thread, "join", join)
        feeding._stop_all()
    release.set()
    for running in feeds:
        running.join(WAIT_S)
    assert now == pytest.approx(feeding._EXIT_S)


@pytest.fixture
def memory() -> Iterator[MemoryCluster]:
    with memory_cluster(ps=1, workers=2) as cluster:
        yield cluster


@pytest.fixture
def workers(memory: MemoryCluster) -> Iterator[tuple[Cluster, Cluster]]:
    with closing(memory.worker(0)) as one, closing(memory.worker(1)) as other:
        yield one, other


def fifo(worker: Cluster, capacity: int = 4, spec: Any = I32) -> dflow.FIFOQueue:
    with worker.parameter_servers():
        return dflow.FIFOQueue(capacity, spec, name="q")


def test_another_worker_takes_all_that_one_feeds(workers: tuple[Cluster, Cluster]) -> None:
    spec = {"n": I32, "x": jax.ShapeDtypeStruct((2,), jnp.float32)}
    fed, other = (fifo(worker, spec=spec) for worker in workers)
    running = feed(({"n": n, "x": np.full(2, n, np.float32)} for n in range(20)), fed)
    taken = [jax.tree.map(np.asarray, other.dequeue(timeout_s=WAIT_S)) for _ in range(20)]
    assert [int(element["n"]) for element in taken] == list(range(20))
    np.testing.assert_array_equal([element["x"][1] for element in taken], range(20))
    with pytest.raises(dflow.QueueClosed, match="is closed and cannot give 1 element"):
        other.dequeue(timeout_s=WAIT_S)
    running.join(WAIT_S)
    assert (running.count, running.error) == (20, None)


def test_a_feed_of_the_same_name_goes_on_where_the_last_one_ended(workers: tuple[Cluster, Cluster]) -> None:
    queue, other = (fifo(worker, capacity=30) for worker in workers)
    feed(range(3), queue, name="data", close=False).join(WAIT_S)
    queue.dequeue(timeout_s=WAIT_S)
    again = feed(range(7), queue, threads=3, name="data", close=False)
    again.join(WAIT_S)
    assert again.count == 4
    # Another name, no name, and another worker are other feeds.
    for more in (feed([10], queue, name="more", close=False), feed([11], queue, close=False)):
        more.join(WAIT_S)
    feed([12], other, name="data").join(WAIT_S)
    taken = [int(queue.dequeue(timeout_s=WAIT_S)) for _ in range(9)]
    assert (taken[:2], sorted(taken)) == ([1, 2], [1, 2, 3, 4, 5, 6, 10, 11, 12])


def test_two_workers_feed_one_queue_by_feeds_of_one_name_at_once(workers: tuple[Cluster, Cluster]) -> None:
    queues = [fifo(worker, capacity=1) for worker in workers]
    feeds = [feed(range(3), queue, name="data", close=False) for queue in queues]
    assert sorted(int(queues[0].dequeue(timeout_s=WAIT_S)) for _ in range(6)) == [0, 0, 1, 1, 2, 2]
    for one in feeds:
        one.join(WAIT_S)


def test_a_feed_without_a_name_leaves_no_record(memory: MemoryCluster, workers: tuple[Cluster, Cluster]) -> None:
    queue = fifo(workers[0], capacity=30)
    feed(range(3), queue, close=False).join(WAIT_S)
    feed(range(3), queue, name="data", close=False).join(WAIT_S)
    held: Any = next(iter(memory.tasks.values())).server.store.resource("q")
    assert [*held.held.machine.fed] == ["data of /job:worker/task:0"]


def test_an_error_reaches_whoever_dequeues_with_its_text_and_lines(workers: tuple[Cluster, Cluster]) -> None:
    fed, other = map(fifo, workers)

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("no such file")

    running = feed(failing(), fed)
    assert int(other.dequeue(timeout_s=WAIT_S)) == 1
    says = (
        r"/job:ps/task:0: queue 'q' cannot give 1 element, because what feeds it failed; it holds 0 of at most 4\n"
        r"  at .*\n"
        r"  it raised ValueError: no such file\n  at .*test_feeding.py:\d+\n"
        r"  it is fed\n  at .*test_feeding.py:\d+$"
    )
    with pytest.raises(dflow.FeedError, match=says):
        other.dequeue(timeout_s=WAIT_S)
    with pytest.raises(dflow.FeedError, match="it raised ValueError: no such file"):
        dflow.jit(fed.dequeue)()
    with pytest.raises(dflow.FeedError):
        other.enqueue(2)
    running.join(WAIT_S)
    assert isinstance(running.error, ValueError)


def test_an_error_with_a_long_text_closes_the_queue_too(workers: tuple[Cluster, Cluster]) -> None:
    fed, other = map(fifo, workers)

    def failing() -> Iterator[int]:
        raise ValueError("long" * 1_000_000)
        yield 1

    feed(failing(), fed)
    with pytest.raises(dflow.FeedError, match="it raised ValueError: longlong"):
        other.dequeue(timeout_s=WAIT_S)


@pytest.mark.parametrize("end", ["stopped", "closed elsewhere", "dropped"])
def test_a_feed_that_waits_for_room_ends(workers: tuple[Cluster, Cluster], end: str) -> None:
    fed, other = map(fifo, workers)
    running = feed(itertools.count(), fed, threads=2)
    until(lambda: running.count == 4 and len(running._waiting) == 2)
    if end == "stopped":
        running.stop()
    elif end == "closed elsewhere":
        other.close(cancel_pending=True)
    else:
        del fed
        gc.collect()
    running.join(WAIT_S)
    assert (running.count, running.error) == (4, None)


def test_a_lost_task_ends_the_feed_with_an_error_that_names_it(
    memory: MemoryCluster, workers: tuple[Cluster, Cluster]
) -> None:
    queue, going_on = fifo(workers[0], capacity=1), threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        assert going_on.wait(WAIT_S)
        yield from itertools.count()

    running = feed(numbers(), queue)
    until(lambda: running.count == 1)
    memory.tasks["ps:0"].close()
    going_on.set()
    running.join(WAIT_S)
    assert isinstance(running.error, dflow.TaskLost)
    # Which of the two is known first differs: its connection has ended, or the roster says that it left.
    assert re.match(r"ps:0 was lost|/job:ps/task:0 (at \S+ )?has left", str(running.error))


def test_a_device_for_elements_that_travel_is_refused(workers: tuple[Cluster, Cluster]) -> None:
    with pytest.raises(dflow.InputError, match=r"device=.*whose elements are sent to its task(.|\n)*leave device out"):
        feed([1], fifo(workers[0]), device=jax.devices()[0])
