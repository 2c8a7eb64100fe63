"""Feeding of queues that live on tasks: the same elements, errors and ends as in one process."""

from __future__ import annotations

import gc
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflow
from dflow.data import feed
from dflow.distributed.cluster.cluster import Cluster
from dflow.testing import MemoryCluster, memory_cluster
from tests.distributed.waiting import until

WAIT_S = 60.0
I32 = jax.ShapeDtypeStruct((), jnp.int32)


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
        r"  it raised ValueError: no such file\n  at .*test_feeding_on_a_cluster.py:\d+\n"
        r"  it is fed\n  at .*test_feeding_on_a_cluster.py:\d+$"
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
