"""Simulated replacements of a task's threads: a pool that runs one call at a time, and deadlines."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from dflow.distributed.simulation.events import EventQueue, Timer
from dflow.distributed.simulation.network import Process
from dflow.distributed.steps.deadlines import MakeDeadlines

Result = TypeVar("Result")


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


class SimulatedDeadlines:
    """Simulated `deadlines.Deadlines`. `still_waits` is called with a key that `expire` did not discard."""

    def __init__(
        self,
        events: EventQueue,
        process: Process,
        still_waits: Callable[[Hashable], None],
        timeout_s: float,
        expire: Callable[[Hashable], None],
    ) -> None:
        self.timeout_s = timeout_s
        self._events = events
        self._process = process
        self._still_waits = still_waits
        self._expire = expire
        self._timers: dict[Hashable, Timer] = {}

    def add(self, key: Hashable) -> None:
        """Start the time-out of `key`."""
        self._timers[key] = self._events.after(self.timeout_s, partial(self._process.post, partial(self._over, key)))

    def discard(self, key: Hashable) -> None:
        """Stop the time-out of `key`, whose wait has ended."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.stop()

    def close(self) -> None:
        """Stop all time-outs."""
        for key in list(self._timers):
            self.discard(key)

    def _over(self, key: Hashable) -> None:
        if key in self._timers:
            self._expire(key)
        if key in self._timers:
            self._still_waits(key)


def deadlines_of(events: EventQueue, process: Process, still_waits: Callable[[Hashable], None]) -> MakeDeadlines:
    """Return the factory of deadlines for a task in `process`."""
    return partial(SimulatedDeadlines, events, process, still_waits)
