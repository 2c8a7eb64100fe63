"""`dflow.data.feed`: threads that put what an iterable gives into a queue.

Invariants: every element that the iterable gave before it ended, failed or was stopped is put in, or the queue is
closed; the thread that ends last closes the queue; no thread keeps the queue alive.
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
from typing import Any

import jax
import numpy as np

from dflow.homes import LOCAL
from dflow.lowering.queue_ops import HeldQueue
from dflow.lowering.resource_use import ResourceUse
from dflow.tracing.errors import DeadlineExceeded, DflowError, InputError, QueueClosed, StepCancelled
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.queues import Queue
from dflow.tracing.resources import Variable, is_variable
from dflow.tracing.source import Loc, at, caller

#: An enqueue may wait so long for room, in s: until it is stopped.
_FOREVER_S = 1e8

#: What queues take as it is; all else is made a NumPy array.
_TAKEN = (jax.Array, np.ndarray, np.generic, Variable, bool, int, float, complex)

#: How long the process waits for the threads of all feeds when it ends, in s.
_EXIT_S = 2.0

#: How long leaving a `with` block waits for the threads, in s.
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
) -> Feed:
    """Put the elements of `iterable` into `queue`, from threads of their own; what runs them is returned.

    iterable  gives pytrees of arrays in the queue's structure (a list may stand for a tuple): a generator, a
              DataLoader of PyTorch, a dataset of Grain or tf.data, `dflow.data.batches`; it may be without end
    threads   how many; they take turns at the iterable, so it need not be thread-safe. With one, order is kept
    map       a function of an element that gives what is put in; the threads run it at the same time
    device    the device or sharding to put the arrays on; given none, JAX's default
    close     whether the queue is closed at the end of the data; say no when others feed it too

    Elements are on the device by the time they are taken, up to the queue's capacity ahead; when it is full, the
    threads wait. An error of the iterable or of `map` closes the queue: who takes more than what came before it gets
    FeedError, with that error as its cause. It stops when the queue is closed, or nobody has it any more.

    Raises InputError for what is no iterable, no queue of this process, or no number of threads.
    """
    loc = caller()
    given: Any = queue
    if not isinstance(given, Queue) or given.home is not LOCAL:
        what = f"{given!r}, which lives on {given.device}" if isinstance(given, Queue) else f"a {type(given).__name__}"
        raise InputError(f"feed was given {what}{at(loc)}\n  give it a queue of this process, after the iterable")
    count: Any = threads
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InputError(f"feed was given threads={threads!r}{at(loc)}\n  give a whole number, from 1")
    try:
        elements = iter(iterable)
    except TypeError:
        raise InputError(
            f"feed was given a {type(iterable).__name__}, which is no iterable{at(loc)}\n"
            "  call what makes one, or give dflow.data.batches(arrays, size)"
        ) from None
    return Feed(elements, queue, threads, map, device, close, loc)


class Feed:
    """What `feed` gives: the threads that put elements into a queue. As a context it stops them at the end."""

    def __init__(
        self,
        elements: Iterator[Any],
        queue: Queue,
        threads: int,
        map: Callable[[Any], Any] | None,
        device: Any,
        close: bool,
        loc: Loc | None,
    ) -> None:
        self._elements, self._map, self._device, self._close = elements, map, device, close
        held = LOCAL.store.resource(queue.key)
        assert isinstance(held, HeldQueue)
        self._held, self._queue = held, weakref.ref(queue)
        self._tree = jax.tree_util.tree_structure(queue.spec)
        self._title, self._where = queue.title, at(loc)
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        #: Nothing more is taken from the iterable, and nothing more is put in.
        self._is_over, self._is_stopped = False, False
        self._error: BaseException | None = None
        self._count = 0
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

    @property
    def count(self) -> int:
        """How many elements have been put in."""
        return self._count

    @property
    def error(self) -> BaseException | None:
        """What the iterable or `map` raised, if it did."""
        return self._error

    def is_running(self) -> bool:
        """Whether a thread still runs."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Take nothing more from the iterable and put nothing more in; as at the end of the data, the queue is closed.

        It returns at once: `join` waits until the iterable has given what it was asked for.
        """
        with self._lock:
            self._is_over = self._is_stopped = True
            waiting = list(self._waiting)
        for cancel in waiting:
            cancel(StepCancelled(f"the feed of {self._title} was stopped"))

    def join(self, timeout_s: float = 600.0) -> None:
        """Wait until the threads have ended: the data is all in, or has failed, or the feed was stopped.

        Raises DeadlineExceeded, which says what they wait for. An error of the iterable is raised to who dequeues; it
        is in `error`.
        """
        if alive := _join(self._threads, timeout_s):
            with self._lock:
                what = "for room in the queue" if self._waiting else "for the iterable or in map"
            raise DeadlineExceeded(
                f"{len(alive)} of {len(self._threads)} threads of the feed of {self._title} have not ended within "
                f"{timeout_s:g} s; they wait {what}{self._where}\n  call stop(), or see what the iterable waits for"
            )

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.join(_LEAVE_S)

    def __repr__(self) -> str:
        state = "running" if self.is_running() else "ended" if self._error is None else "failed"
        return f"<Feed of {self._title}: {state}, {self._count} elements put in>"

    def _run(self) -> None:
        try:
            while self._feed_one():
                pass
        except BaseException as error:
            with self._lock:
                self._is_over, self._error = True, self._error or error
        finally:
            self._end()

    def _feed_one(self) -> bool:
        with self._turn:
            if self._is_over:
                return False
            try:
                element = next(self._elements)
            except StopIteration:
                self._is_over = True
                return False
            except BaseException:
                # Nobody asks again what has failed.
                self._is_over = True
                raise
        return self._put(self._arrays(element if self._map is None else self._map(element)))

    def _arrays(self, element: Any) -> list[Any] | None:
        """The arrays of an element as the queue holds them; None when there is no queue any more."""
        queue = self._queue()
        if queue is None:
            return None
        arrays = queue.fitting("feed", _in_structure(element, self._tree))
        return arrays if self._device is None else [jax.device_put(array, self._device) for array in arrays]

    def _put(self, arrays: list[Any] | None) -> bool:
        if arrays is None:
            return False
        # Its `put` is one step, whoever is interrupted that makes room.
        done: SimpleQueue[Any] = SimpleQueue()
        use = ResourceUse("queue.enqueue", timeout_s=_FOREVER_S, where=self._where)
        cancel = self._held.start(use, arrays, done.put)
        with self._lock:
            self._waiting.add(cancel)
            is_stopped = self._is_stopped
        if is_stopped:
            cancel(StepCancelled("stopped"))
        answer = done.get()
        with self._lock:
            self._waiting.discard(cancel)
            self._count += not isinstance(answer, BaseException)
        if isinstance(answer, QueueClosed | StepCancelled):
            self._is_over = True
            return False
        if isinstance(answer, BaseException):
            raise answer
        return True

    def _end(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        _running.discard(self)
        self._close_elements()
        try:
            if self._error is not None:
                self._held.shared.fail(self._error, self._where)
            elif self._close:
                self._held.shared.close()
        except DflowError:
            # The queue's container was reset, and who uses the queue is told so.
            LOGGER.debug("%s was gone before its feed ended", self._title)

    def _close_elements(self) -> None:
        """Have a generator that has not ended run its `finally`."""
        if isinstance(self._elements, Generator):
            try:
                self._elements.close()
            except BaseException as error:
                self._error = self._error or error


def _in_structure(element: Any, wanted: Any) -> Any:
    """The element with arrays for leaves; in the wanted structure where it has lists in the place of tuples alone."""
    leaves, tree = jax.tree_util.tree_flatten(element, is_leaf=is_variable)
    arrays = [leaf if isinstance(leaf, _TAKEN) else np.asarray(leaf) for leaf in leaves]
    if tree != wanted and _tuples(tree) == _tuples(wanted):
        tree = wanted
    return jax.tree_util.tree_unflatten(tree, arrays)


@cache
def _tuples(tree: Any) -> Any:
    """The structure with tuples in the place of lists."""

    def plain(part: Any) -> Any:
        if type(part) in (list, tuple):
            return tuple(map(plain, part))
        return {key: plain(inner) for key, inner in part.items()} if type(part) is dict else part

    return jax.tree_util.tree_structure(plain(jax.tree_util.tree_unflatten(tree, [0] * tree.num_leaves)))


def _stop_soon(feed: weakref.ref[Feed]) -> None:
    """Stop a feed whose queue nobody has any more; not on this thread, which may have the queue's lock."""
    running = feed()
    if running is not None and running.is_running():
        threading.Thread(target=running.stop, daemon=True).start()


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> list[threading.Thread]:
    """Wait until the threads have ended; those that have not in time."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX))
    return [thread for thread in threads if thread.is_alive()]


@atexit.register
def _stop_all() -> None:
    # A thread that runs JAX while the interpreter goes down may crash it.
    feeds = list(_running)
    for running in feeds:
        running.stop()
    _join([thread for running in feeds for thread in running._threads], _EXIT_S)
