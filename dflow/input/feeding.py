"""`dflow.data.feed`: threads that move the elements of an iterable into a queue.

Invariants: every element that the iterable yields before it ends, fails or is stopped is enqueued, unless the queue
closes first; the last thread to end closes the queue, unless `close=False`; no thread keeps the queue alive.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, cast

import jax
import numpy as np

from dflow.lowering.state_backend import StateBackend
from dflow.lowering.values.index_set import IndexSet
from dflow.tracing.argument_ids import is_list_of_strings, with_string_ids
from dflow.tracing.column_tables import refuse_table
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import DeadlineExceeded, DflowError, InputError, QueueClosed, StepCancelled
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.path_names import leaf_names
from dflow.tracing.source import Loc, at, caller
from dflow.tracing.state.queues import Queue
from dflow.tracing.state.resources import Variable, is_variable

#: Leaf types passed to the queue unchanged; all others are converted to NumPy arrays.
_TAKEN = (jax.Array, np.ndarray, np.generic, Variable, bool, int, float, complex)

#: Longest wait for the threads of all feeds at process exit, in s: the end of a queue may wait for a snapshot.
_EXIT_S = 6.0

#: Longest wait for the threads on leaving a `with` block, in s.
_LEAVE_S = 60.0

LOGGER = logging.getLogger("dflow")

_numbers = itertools.count()
_running: weakref.WeakSet[Feed] = weakref.WeakSet()


@suggests_keywords
def feed(
    iterable: Iterable[Any],
    queue: Queue,
    *,
    threads: int = 1,
    map: Callable[[Any], Any] | None = None,
    device: Any = None,
    close: bool = True,
    name: str | None = None,
) -> Feed:
    """Start threads that put the elements of `iterable` into `queue`; return their handle.

    iterable  yields pytrees of arrays in the queue's structure (a list may stand for a tuple): a generator, a PyTorch
              DataLoader, a dataset of Grain or tf.data, `dflow.data.batches`; it may be infinite
    threads   number of threads, at least 1. Only one calls the iterable at any moment, so it need not be thread-safe.
              With one thread, the order is kept
    map       function from an element to the element to enqueue; the threads call it concurrently
    device    device or sharding to put the arrays on; None means JAX's default. For a queue of this process
    close     whether to close the queue at the end of the data; pass False when other producers use the queue too
    name      a name that no other feed of this queue by this task has. The elements that a feed of this name has put in
              are then left out: when a worker is started again, or a job resumed, the feed goes on where the state of
              the queue is. The iterable must yield the same elements in the same order each time; other data, or a
              second epoch, needs another name

    The arrays are on the device before they are dequeued. The threads work ahead up to the queue's capacity and wait
    while it is full. An error of the iterable or of `map`, or an element that does not fit the queue, always closes the
    queue: consumers get the elements enqueued before it and then FeedError, with the error as its cause. The feed stops
    when the queue is closed or collected.

    The threads may also feed a queue of a cluster, from any of its workers. The arrays travel to the queue's task, and
    FeedError has the text of the error, not its object, in the processes that dequeue.

    Raises InputError if `iterable` is not iterable, `queue` is not a queue, `threads` is not an integer of at least 1,
    `device` is passed for a queue of a cluster, or a running feed of the queue has the `name`.
    """
    loc = caller()
    given: Any = queue
    if not isinstance(given, Queue):
        raise InputError(f"feed was given a {type(given).__name__}", "give it a queue, after the iterable", at=loc)
    if device is not None and not _backend(queue).is_local:
        raise InputError(
            f"feed was given device={device!r} and {queue.title}, whose elements are sent to its task",
            "leave device out",
            at=loc,
        )
    refuse_table("feed", iterable, "give dflow.data.batches(data, size, drop_remainder=True), for a queue of batches")
    count: Any = threads
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"feed was given threads={threads!r}", "give a whole number, from 1", at=loc)
    try:
        elements = iter(iterable)
    except TypeError:
        raise InputError(
            f"feed was given a {type(iterable).__name__}, which is no iterable",
            "call what makes one, or give dflow.data.batches(arrays, size)",
            at=loc,
        ) from None
    if name is not None and any(feed.is_named(name, queue) for feed in list(_running)):
        raise InputError(
            f"feed was given name={name!r}, which a running feed of {queue.title} has", "give it another name", at=loc
        )
    return Feed(elements, queue, threads, map, device, close, name, loc)


class Feed:
    """The running threads of a `feed` call. As a context manager, it stops and joins them on exit.

    `count`  number of elements enqueued
    `error`  the first error of the iterable, of `map` or of an element that does not fit the queue; or None
    """

    def __init__(
        self,
        elements: Iterator[Any],
        queue: Queue,
        threads: int,
        map: Callable[[Any], Any] | None,
        device: Any,
        close: bool,
        name: str | None,
        loc: Loc | None,
    ) -> None:
        self._elements, self._map, self._device, self._close = elements, map, device, close
        self._title, self._where, self._name = queue.title, at(loc), name
        self._producer, self._queue = _backend(queue).producer(queue, self._where, name), weakref.ref(queue)
        self._tree, self._home = jax.tree_util.tree_structure(queue.spec), queue.home
        #: Held while a thread takes the next element from the iterable.
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        #: Over: no more elements are taken. Stopped: pending enqueues are cancelled too.
        self._is_over, self._is_stopped = False, False
        self.error: BaseException | None = None
        self.count = 0
        self._numbered = zip(itertools.count(), elements, strict=False)
        #: Numbers of the elements that an earlier feed of this name has put in; None until a thread has asked.
        self._fed: IndexSet | None = IndexSet() if name is None else None
        self._waiting: set[Callable[[BaseException], None]] = set()
        self._left = threads
        number = next(_numbers)
        self._threads = [
            threading.Thread(target=self._run, name=f"dflow-feed-{number}-{index} of {queue.name}", daemon=True)
            for index in range(threads)
        ]
        _running.add(self)
        weakref.finalize(queue, _stop_soon, weakref.ref(self)).atexit = False
        for thread in self._threads:
            thread.start()

    def is_named(self, name: str, queue: Queue) -> bool:
        return self._name == name and self._title == queue.title and self._home == queue.home

    def is_running(self) -> bool:
        """Whether at least one thread is still running."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Take no more elements and cancel pending enqueues; the queue closes unless `feed` was passed `close=False`.

        Returns immediately, without waiting for a call into the iterable that is in progress; see `join`.
        """
        with self._lock:
            self._is_over = self._is_stopped = True
            waiting = list(self._waiting)
        for cancel in waiting:
            cancel(StepCancelled(f"the feed of {self._title} was stopped"))

    def join(self, timeout_s: float = 600.0) -> None:
        """Wait up to `timeout_s` seconds for all threads to end: at the end of the data, an error or `stop`.

        Raises DeadlineExceeded, naming what the threads wait for. Does not raise the iterable's error, which consumers
        of the queue get; it is also in `error`.
        """
        if alive := _join(self._threads, timeout_s):
            with self._lock:
                what = "for room in the queue" if self._waiting else "for the iterable or in map"
            raise DeadlineExceeded(
                f"{len(alive)} of {len(self._threads)} threads of the feed of {self._title} have not ended within "
                f"{timeout_s:g} s; they wait {what}{self._where}",
                "call stop(), or see what the iterable waits for",
            )

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join(_LEAVE_S)

    def __repr__(self) -> str:
        state = "running" if self.is_running() else "ended" if self.error is None else "failed"
        return f"<Feed of {self._title}: {state}, {self.count} elements put in>"

    def _run(self) -> None:
        try:
            while self._feed_one():
                pass
        except BaseException as error:
            with self._lock:
                self._is_over, self.error = True, self.error or error
        finally:
            self._end()

    def _feed_one(self) -> bool:
        with self._turn:
            if self._is_over:
                return False
            try:
                if self._fed is None:
                    self._fed = self._producer.fed()
                number, element = next(self._numbered)
                while number in self._fed and not self._is_over:
                    number, element = next(self._numbered)
            except BaseException as error:
                # Never call an iterator again after it has ended or failed.
                self._is_over = True
                if isinstance(error, StopIteration):
                    return False
                raise
        arrays = self._arrays(element if self._map is None else self._map(element))
        return arrays is not None and self._put(number, arrays)

    def _arrays(self, element: Any) -> list[Any] | None:
        """Return the arrays of an element as the queue stores them, or None if the queue was collected."""
        queue = self._queue()
        if queue is None:
            return None
        arrays = queue.fitting("feed", _in_structure(element, self._tree))
        return arrays if self._device is None else [jax.device_put(array, self._device) for array in arrays]

    def _put(self, number: int, arrays: list[Any]) -> bool:
        failures = 0
        while isinstance(answer := self._answer(number, arrays), BaseException):
            if self._is_stopped or isinstance(answer, QueueClosed):
                self._is_over = True
                return False
            failures += 1
            if not self._producer.is_recovered(answer, failures):
                raise answer
        with self._lock:
            self.count += 1
        return True

    def _answer(self, number: int, arrays: list[Any]) -> Any:
        """Put an element in; return an error, or another value when it is in."""
        # `SimpleQueue.put` is atomic, even when the consumer that frees room is interrupted while calling it.
        done: SimpleQueue[Any] = SimpleQueue()
        try:
            cancel = self._producer.enqueue(number, arrays, done.put)
        except DflowError as error:
            return error
        with self._lock:
            self._waiting.add(cancel)
            is_stopped = self._is_stopped
        if is_stopped:
            cancel(StepCancelled("stopped"))
        answer = done.get()
        with self._lock:
            self._waiting.discard(cancel)
        return answer

    def _end(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        _running.discard(self)
        self._close_elements()
        try:
            if self.error is not None:
                self._producer.fail(self.error)
            elif self._close:
                self._producer.close()
            self._producer.forget()
        except DflowError:
            # The queue's container was reset, or its task is lost; users of the queue get that error themselves.
            LOGGER.debug("%s was gone before its feed ended", self._title, exc_info=True)

    def _close_elements(self) -> None:
        """Run the `finally` blocks of a generator that has not ended."""
        if isinstance(self._elements, Generator):
            try:
                self._elements.close()
            except BaseException as error:
                self.error = self.error or error


def _backend(queue: Queue) -> StateBackend:
    return cast(StateBackend, queue.home)


def _in_structure(element: Any, wanted: Any) -> Any:
    """Return the element with arrays as leaves; its lists become tuples where the expected structure has tuples."""
    element = with_string_ids(element, lambda: leaf_names("feed: element", element, is_list_of_strings))
    leaves, tree = jax.tree_util.tree_flatten(element, is_leaf=is_variable)
    arrays = [leaf if isinstance(leaf, _TAKEN) else as_array(leaf) for leaf in leaves]
    if tree != wanted and _tuples(tree) == _tuples(wanted):
        tree = wanted
    return jax.tree_util.tree_unflatten(tree, arrays)


@cache
def _tuples(tree: Any) -> Any:
    """Return the structure with every list replaced by a tuple."""

    def plain(part: Any) -> Any:
        if type(part) in (list, tuple):
            return tuple(map(plain, part))
        return {key: plain(inner) for key, inner in part.items()} if type(part) is dict else part

    return jax.tree_util.tree_structure(plain(jax.tree_util.tree_unflatten(tree, [0] * tree.num_leaves)))


def _stop_soon(feed: weakref.ref[Feed]) -> None:
    """Stop the feed of a collected queue, on a new thread: the collecting thread may hold the queue's lock."""
    running = feed()
    if running is not None and running.is_running():
        threading.Thread(target=running.stop, daemon=True).start()


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
    return [thread for thread in threads if thread.is_alive()]


@atexit.register
def _stop_all() -> None:
    # A thread that runs JAX during interpreter shutdown may crash the process.
    feeds = list(_running)
    for running in feeds:
        running.stop()
    _join([thread for running in feeds for thread in running._threads], _EXIT_S)
