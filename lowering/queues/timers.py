"""Clocks: the time, and delayed calls, which one thread of each clock makes.

Why: every wait has a deadline, and most waits end long before it. So starting and stopping a timer is cheap: it starts
no thread, as `threading.Timer` does, and wakes the timer thread only if that would sleep too long. Stopped timers are
removed when they are more than half of all.

Calls that do not block share the clock of the process, by `start_timer`. What may block has a clock of its own: the
session with the coordinator, and the deadlines of a task. A simulator gives each of them a simulated clock.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

from dflow.tracing.context_values import within

LOGGER = logging.getLogger("dflow")

#: Longest sleep of the thread, in s: the system's wait functions refuse an infinite timeout.
_LONGEST_S = 3600.0


class Stoppable(Protocol):
    """A delayed call."""

    def stop(self) -> None:
        """Prevent the call."""


class Clock(Protocol):
    """The time, and calls at a later time."""

    @property
    def now_s(self) -> float:
        """Seconds since an arbitrary moment."""

    def after(self, delay_s: float, call: Callable[[], None]) -> Stoppable:
        """Call `call` once, after `delay_s` seconds; never, if the delay is infinite."""

    def close(self) -> None:
        """Make no more calls."""


class Timer:
    """A delayed call. `stop` may be called from any thread, also after the call."""

    def __init__(self, timers: Timers, call: Callable[[], None]) -> None:
        self._timers = timers
        self.call: Callable[[], None] | None = call

    def stop(self) -> None:
        """Prevent the call; one that runs now is not stopped."""
        self._timers.forget(self)


class Timers:
    """A clock with one thread, which the first timer starts. A call that blocks delays the later ones."""

    def __init__(self, name: str = "dflow timers") -> None:
        self._name = name
        self._is_closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Monotonic time at which the thread wakes up without a notification; in the past while it runs.
        self._sleeps_until = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._serials = itertools.count()
        self._stopped = 0
        self._thread: threading.Thread | None = None

    @property
    def now_s(self) -> float:
        """The monotonic time."""
        return time.monotonic()

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Call `call` once, after `delay_s` seconds; never, if the delay is infinite."""
        timer = Timer(self, call)
        ends_at = time.monotonic() + delay_s
        with self._lock:
            if self._is_closed:
                return timer
            heapq.heappush(self._heap, (ends_at, next(self._serials), timer))
            if self._thread is None or not self._thread.is_alive():
                # There is no thread yet, or the system refused to start it.
                self._thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
                self._thread.start()
            if ends_at < self._sleeps_until:
                self._sleeps_until = 0.0
                self._changed.notify()
        return timer

    def forget(self, timer: Timer) -> None:
        """Stop a timer, if its call has not begun."""
        with self._lock:
            if timer.call is None:
                return
            timer.call = None
            self._stopped += 1
            if self._stopped > len(self._heap) // 2:
                self._heap = [entry for entry in self._heap if entry[2].call is not None]
                heapq.heapify(self._heap)
                self._stopped = 0

    def close(self) -> None:
        """Make no more calls, and end the thread."""
        with self._lock:
            self._is_closed = True
            self._heap.clear()
            self._changed.notify()

    def __len__(self) -> int:
        return len(self._heap)

    def _watch(self) -> None:
        while (call := self._next_call()) is not None:
            try:
                call()
            except BaseException:
                LOGGER.exception("what was to be done at a deadline failed; the other deadlines stand")

    def _next_call(self) -> Callable[[], None] | None:
        with self._lock:
            while not self._is_closed:
                now = time.monotonic()
                left_s = min(self._heap[0][0] - now if self._heap else _LONGEST_S, _LONGEST_S)
                if left_s > 0:
                    self._sleeps_until = now + left_s
                    self._changed.wait(left_s)
                    continue
                timer = heapq.heappop(self._heap)[2]
                if timer.call is None:
                    self._stopped -= 1
                    continue
                call, timer.call = timer.call, None
                return call
        return None


#: The clock of this process.
TIMERS = Timers()


StartTimer = Callable[[float, Callable[[], None]], Stoppable]

_started_by: ContextVar[StartTimer | None] = ContextVar("timers", default=None)


def start_timer(delay_s: float, call: Callable[[], None]) -> Stoppable:
    """Call `call` once, after `delay_s` seconds; see `Timers.after`."""
    return (_started_by.get() or TIMERS.after)(delay_s, call)


def timers_started_by(start: StartTimer) -> AbstractContextManager[None]:
    """Context manager: inside it, `start_timer` calls `start` instead of the timers of this process."""
    return within(_started_by, start)
