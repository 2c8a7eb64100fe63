"""`dflow.data`: iterables fed into queues by threads, and batches of arrays and iterables."""

from __future__ import annotations

import gc
import itertools
import math
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dflow
from dflow.data import batches, feed
from dflow.input import batching, feeding
from tests.effort import examples

WAIT_S = 60.0
I32 = jax.ShapeDtypeStruct((), jnp.int32)
F32 = jax.ShapeDtypeStruct((), jnp.float32)


def _queue(capacity: int = 4, spec: Any = I32) -> dflow.FIFOQueue:
    return dflow.FIFOQueue(capacity, spec, name="q")


def _rest(queue: Any) -> list[Any]:
    """What can be taken until the queue is closed."""
    taken = []
    while True:
        try:
            taken.append(jax.tree.map(np.asarray, queue.dequeue(timeout_s=WAIT_S)))
        except dflow.QueueClosed:
            return taken


def _until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


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
        _until(lambda: running.count == 3 and len(given) == 4)
        queue.dequeue()
        _until(lambda: running.count == 4 and len(given) == 5)
    assert len(given) == 5
    assert [int(number) for number in _rest(queue)] == [1, 2, 3]


def test_a_traced_function_takes_what_is_fed() -> None:
    queue = _queue(8, {"x": jax.ShapeDtypeStruct((2,), jnp.float32), "n": I32})
    total = dflow.Variable(jnp.zeros(2), name="fed_total")

    @dflow.jit
    def step() -> jax.Array:
        element = queue.dequeue()
        total.assign_add(element["x"])
        return element["n"]

    with feed(({"x": np.full(2, n), "n": n} for n in range(10)), queue, map=_halved):
        assert [int(step()) for _ in range(10)] == list(range(10))
        with pytest.raises(dflow.QueueClosed):
            step()
    assert total.read().tolist() == [22.5] * 2


def _halved(element: Any) -> Any:
    return {**element, "x": element["x"] / 2}


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
        rf"  it raised ValueError: no such file\n  at .*test_data.py:{line}\n  it is fed\n  at .*test_data.py:\d+"
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


def test_several_threads_map_at_the_same_time_and_lose_nothing() -> None:
    queue, together = _queue(200), threading.Barrier(4, timeout=WAIT_S)

    def squared(number: int) -> int:
        if number < 4:
            together.wait()
        return number * number

    def numbers() -> Iterator[int]:
        # A generator raises ValueError when two threads are in it.
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


def test_stopping_ends_the_threads_and_runs_the_generators_finally() -> None:
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    queue = _queue(2)
    running = feed(numbers(), queue, threads=3)
    _until(lambda: running.count == 2)
    running.stop()
    running.join(WAIT_S)
    assert ended == [True]
    assert len(_rest(queue)) == 2
    assert not running.is_running()


def test_an_interrupt_of_who_consumes_ends_the_threads() -> None:
    queue = _queue()
    running = feed(itertools.count(), queue)
    with pytest.raises(KeyboardInterrupt), running:
        raise KeyboardInterrupt
    assert not running.is_running()


def _closing(queue: dflow.FIFOQueue) -> None:
    queue.close(cancel_pending=True)


def _resetting(queue: dflow.FIFOQueue) -> None:
    dflow.reset_container("input")


@pytest.mark.parametrize("end", [_closing, _resetting])
def test_ending_the_queue_ends_the_feed_and_runs_the_generators_finally(end: Any) -> None:
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    with dflow.container("input"):
        queue = _queue()
    running = feed(numbers(), queue)
    _until(lambda: running.count == 4)
    end(queue)
    running.join(WAIT_S)
    assert ended == [True]
    assert running.error is None or isinstance(running.error, dflow.DflowError)


def test_an_error_of_map_runs_the_generators_finally() -> None:
    ended = []

    def numbers() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            ended.append(True)

    queue = _queue()
    running = feed(numbers(), queue, map=lambda number: [].pop())
    running.join(WAIT_S)
    with pytest.raises(dflow.FeedError):
        queue.dequeue()
    assert ended == [True]
    assert isinstance(running.error, IndexError)


def test_a_queue_that_nobody_has_any_more_ends_its_feed() -> None:
    queue = _queue()
    gone = weakref.ref(queue)
    running = feed(itertools.count(), queue)
    _until(lambda: running.count == 4)
    del queue
    gc.collect()
    _until(lambda: gone() is None)  # the feed's thread has it while it converts an element
    running.join(WAIT_S)


def test_resetting_the_container_of_a_queue_ends_its_feed() -> None:
    with dflow.container("input"):
        queue = _queue()
    running = feed(itertools.count(), queue)
    dflow.reset_container("input")
    running.join(WAIT_S)
    with pytest.raises(dflow.QueueError, match="container 'input' was reset"):
        queue.dequeue()


def test_several_feeds_share_a_queue_that_none_of_them_closes() -> None:
    queue = _queue(20)
    for first in (0, 10):
        feed(range(first, first + 5), queue, close=False).join(WAIT_S)
    assert [int(queue.dequeue()) for _ in range(10)] == [*range(5), *range(10, 15)]
    queue.enqueue(1)


def test_join_says_what_the_threads_wait_for() -> None:
    queue = _queue()
    with feed(itertools.count(), queue) as running:
        _until(lambda: running.count == 4 and running._waiting)
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
        """As a tensor of PyTorch or TensorFlow is seen."""

        def __init__(self, values: Any) -> None:
            self.values = values

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.asarray(self.values, dtype=dtype)

    class Loader:
        """A DataLoader gives lists of tensors."""

        def __iter__(self) -> Iterator[Any]:
            return ([Tensor(np.full((2, 3), n, np.float64)), Tensor(np.arange(2))] for n in range(3))

    spec = (jax.ShapeDtypeStruct((2, 3), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32))
    queue = _queue(4, spec)
    feed(Loader(), queue)
    assert [(float(x[0, 0]), y.tolist()) for x, y in _rest(queue)] == [(0.0, [0, 1]), (1.0, [0, 1]), (2.0, [0, 1])]


def test_a_torch_data_loader_is_fed() -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6)), batch_size=3
    )
    queue = _queue(4, (jax.ShapeDtypeStruct((3, 2), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)))
    feed(loader, queue)
    assert [y.tolist() for _, y in _rest(queue)] == [[0, 1, 2], [3, 4, 5]]


def test_a_grain_dataset_is_fed() -> None:
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(10).map(lambda number: {"n": number}).batch(4).to_iter_dataset()
    queue = _queue(4, {"n": jax.ShapeDtypeStruct((4,), jnp.int32)})
    with feed(itertools.islice(dataset, 2), queue):
        assert [element["n"].tolist() for element in _rest(queue)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_arrays_are_put_on_the_device_that_is_given() -> None:
    device, queue = jax.devices()[-1], _queue()
    feed(range(3), queue, device=device)
    assert queue.dequeue().devices() == {device}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: feed([1], [2]), r"feed was given a list\n  at .*\n  give it a queue"),  # type: ignore[arg-type]
        (lambda: feed(3, _queue()), "feed was given a int, which is no iterable"),  # type: ignore[arg-type]
        (lambda: feed([3], _queue(), threads=0), "threads=0"),
        (lambda: batches([1], 0), "the size 0"),
        (lambda: batches([1], 2, epochs=0), "epochs=0"),
        (lambda: batches([1], 2, shuffle=-1), "shuffle=-1"),
        (lambda: batches([1], 2, shuffle=True), "shuffle=True for a list, whose elements come one by one"),
        (lambda: batches(iter([1]), 2, epochs=2), "epochs=2 for a list_iterator, which can be gone through once"),
        (lambda: batches(3, 2), "expected arrays or an iterable, got a int"),
        (lambda: batches((np.ones(3), np.ones(4)), 2), "different numbers of rows: 3, 4"),
        (lambda: batches(np.ones(()), 2), r"none \(a scalar\)"),
    ],
)
def test_what_cannot_be_used_is_refused(call: Any, says: str) -> None:
    with pytest.raises(dflow.InputError, match=says):
        call()


def test_a_process_ends_though_a_feed_runs() -> None:
    script = """
import itertools, jax, jax.numpy as jnp, dflow
queue = dflow.FIFOQueue(2, jax.ShapeDtypeStruct((), jnp.int32))
running = dflow.data.feed(itertools.count(), queue)
print(int(queue.dequeue()))
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr


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


def _rows(made: Any) -> list[int]:
    return [int(number) for batch in made for number in batch]


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(0, 20),
    size=st.integers(1, 7),
    shuffle=st.one_of(st.just(False), st.integers(1, 30)),
    epochs=st.integers(1, 3),
    drop=st.booleans(),
    arrays=st.booleans(),
    seed=st.integers(0, 3),
)
def test_batches_hold_each_element_once_an_epoch(
    count: int, size: int, shuffle: Any, epochs: int, drop: bool, arrays: bool, seed: int
) -> None:
    data: Any = np.arange(count) if arrays else list(range(count))
    options: dict[str, Any] = {"shuffle": shuffle, "epochs": epochs, "drop_remainder": drop, "seed": seed}
    made = batches(data, size, **options)
    found = [batch.tolist() for batch in made]
    assert [batch.tolist() for batch in made] == found
    assert len(made) == len(found)
    kept = count // size * size if drop else count
    of_epoch = [size] * (kept // size) + ([kept % size] if kept % size else [])
    assert [len(batch) for batch in found] == of_epoch * epochs
    for epoch in range(epochs):
        rows = [row for batch in found[epoch * len(of_epoch) : (epoch + 1) * len(of_epoch)] for row in batch]
        assert set(rows) <= set(range(count))
        assert len(set(rows)) == kept
        if not shuffle:
            assert rows == list(range(kept))
        elif not drop:
            # An element comes out at most a buffer's length before its turn.
            assert all(row < place + int(shuffle) + 1 for place, row in enumerate(rows))


def test_rows_of_arrays_stay_together_and_each_epoch_has_an_order_of_its_own() -> None:
    data = {"x": np.arange(20), "y": -np.arange(20)}
    made = list(batches(data, 5, shuffle=True, epochs=2, seed=1))
    assert all((batch["x"] == -batch["y"]).all() for batch in made)
    first, second = (np.concatenate([batch["x"] for batch in made[at : at + 4]]).tolist() for at in (0, 4))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    other = np.concatenate([batch["x"] for batch in batches(data, 5, shuffle=True, seed=2)]).tolist()
    assert other != first


def test_every_order_of_a_shuffle_comes_up() -> None:
    seen = Counter(tuple(_rows(batches(range(3), 3, shuffle=3, seed=seed))) for seed in range(200))
    assert len(seen) == 6


def test_iterables_without_end_and_epochs_without_end_are_batched() -> None:
    assert [batch.tolist() for batch in itertools.islice(batches(itertools.count(), 2), 2)] == [[0, 1], [2, 3]]
    forever = batches([1, 2, 3], 2, epochs=None)
    assert [batch.tolist() for batch in itertools.islice(forever, 4)] == [[1, 2], [3], [1, 2], [3]]
    assert list(batches([], 2, epochs=None)) == []
    with pytest.raises(TypeError, match="without end"):
        len(forever)


def test_elements_that_are_trees_are_stacked_leaf_by_leaf() -> None:
    (batch,) = batches([{"x": np.ones(2) * n, "y": n} for n in range(3)], 3)
    assert batch["x"].shape == (3, 2)
    assert batch["y"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shuffle", [False, 3, 8])
def test_an_iterable_may_give_one_buffer_again_and_again(shuffle: int | bool) -> None:
    class Foreign:
        """A tensor of another library, which NumPy looks at without a copy."""

        def __init__(self, memory: Any) -> None:
            self.memory = memory

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return np.array(self.memory, dtype, copy=copy)

    def rows() -> Iterator[Any]:
        row, tensor = np.zeros(2, np.float32), Foreign(np.zeros(1))
        for number in range(8):
            row[:] = number
            tensor.memory[:] = number
            yield {"row": row, "tensor": tensor, "number": number}

    made = list(batches(rows(), 3, shuffle=shuffle))
    numbers = [batch["number"].tolist() for batch in made]
    assert [batch["row"][:, 1].tolist() for batch in made] == numbers
    assert [batch["tensor"][:, 0].tolist() for batch in made] == numbers
    assert sorted(itertools.chain(*numbers)) == list(range(8))
    assert shuffle or numbers == [[0, 1, 2], [3, 4, 5], [6, 7]]


@given(st.lists(st.sampled_from([1, 2.5, True, np.int8(3), np.float32(4), 5j]), min_size=1), st.integers(1, 9))
@settings(deadline=None, max_examples=examples(100))
def test_a_batch_is_what_stacking_its_elements_gives(elements: list[Any], size: int) -> None:
    for batch, start in zip(batches(elements, size), range(0, len(elements), size), strict=True):
        stacked = np.stack([np.asarray(element) for element in elements[start : start + size]])
        assert batch.dtype == stacked.dtype
        np.testing.assert_array_equal(batch, stacked)


def test_a_batch_that_would_be_larger_than_its_data_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_AT_ONCE_BYTES", 64)
    (batch,) = batches((np.full(4, number) for number in range(9)), 10**15)
    assert batch[:, 3].tolist() == list(range(9))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ((np.zeros(3),), r"of the shape \(3,\) where the first of its batch has \(2,\)"),
        ((np.zeros(2), 1), "differs from the first of its batch"),
    ],
)
def test_elements_that_do_not_stack_are_refused(second: Any, says: str) -> None:
    with pytest.raises(dflow.InputError, match=says):
        list(batches([(np.zeros(2),), second], 2))


def test_batches_are_fed() -> None:
    queue = _queue(4, {"x": jax.ShapeDtypeStruct((4, 2), jnp.float32)})
    feed(batches({"x": np.arange(20.0).reshape(10, 2)}, 4, epochs=2, drop_remainder=True), queue)
    assert len(_rest(queue)) == 4
