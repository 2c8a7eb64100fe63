"""Simulated replacements of a task's threads: a pool that runs one call at a time, a clock, and a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from tests.simulation.blocking_program import CURRENT, end_wait
from tests.simulation.events import EventQueue, PendingEvent
from tests.simulation.network import Process

Result = TypeVar("Result")

#: Longest wait for a lock.
LOCK_S = 600.0


class RoutineClock:
    """A clock of a process. A simulation does not wait for its timers at the end: heartbeats, for one, never stop."""

    def __init__(self, events: EventQueue, process: Process) -> None:
        self._events, self._process = events, process

    @property
    def now_s(self) -> float:
        """The simulated time."""
        return self._events.now_s

    def after(self, delay_s: float, call: Callable[[], None]) -> PendingEvent:
        """Post `call` in the process after `delay_s`."""
        return self._events.after(delay_s, partial(self._process.post, call), is_routine=True)

    def close(self) -> None:
        """Do nothing: timers of a process that has ended have no effect."""


class SimulatedTime:
    """Stands for the module `time` in code that programs call."""

    def __init__(self, events: EventQueue) -> None:
        self._events = events

    def monotonic(self) -> float:
        """The simulated time."""
        return self._events.now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        """Have the program that calls this wait."""
        CURRENT.get().sleep(seconds)


class SimulatedLock:
    """A lock of the programs of one process: the simulation goes on while a program waits for it."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> None:
        while self._is_held:
            released: Future[None] = Future()
            self._waiting.append(released)
            CURRENT.get().wait("a lock", LOCK_S, released)
        self._is_held = True

    def __exit__(self, *error: object) -> None:
        self._is_held = False
        if self._waiting:
            end_wait(self._waiting.popleft(), None)


class SimulatedPool(Executor):
    """Runs submitted calls in a simulated process, after the callbacks already posted there."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._is_shut = False

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        """See `Executor.submit`."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Result] = Future()
        self._process.post(partial(_run, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls."""
        self._is_shut = True


def _run(future: Future[Result], fn: Callable[[], Result]) -> None:
    try:
        future.set_result(fn())
    except BaseException as error:
        future.set_exception(error)
        if not isinstance(error, Exception):
            raise
