"""Calls that come later, from one thread of the process.

Why: a wait of each kind has a deadline, and most end long before it. Starting and stopping a timer is therefore cheap:
no thread is started for it, nor woken unless it would sleep too long. A stopped timer is forgotten when half of those
kept are stopped.

What waits starts its timer by `start_timer`, so that a simulator can run it on a clock of its own.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

LOGGER = logging.getLogger("dflow")

#: How long the thread waits at most until it looks again, in s: no system waits without end for a number.
_LONGEST_S = 3600.0


class Timer:
    """A call to come. `stop` may be called from any thread, also when the call has been made."""

    def __init__(self, timers: Timers, call: Callable[[], None]) -> None:
        self._timers = timers
        self.call: Callable[[], None] | None = call

    def stop(self) -> None:
        """Let the call not come; one that runs now is not stopped."""
        self._timers.forget(self)


class Timers:
    """Timers with one thread, started by the first of them. Calls must not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: Until when the thread sleeps, unless it is woken; in the past while it does not.
        self._sleeps_until = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._serials = itertools.count()
        self._stopped = 0
        self._thread: threading.Thread | None = None

    def start(self, delay_s: float, call: Callable[[], None]) -> Timer:
        """Have `call` called once, in `delay_s`; an infinite delay has it never called."""
        timer = Timer(self, call)
        ends_at = time.monotonic() + delay_s
        with self._lock:
            heapq.heappush(self._heap, (ends_at, next(self._serials), timer))
            if self._thread is None or not self._thread.is_alive():
                # None, or one that the system refused to start.
                self._thread = threading.Thread(target=self._watch, name="dflow timers", daemon=True)
                self._thread.start()
            if ends_at < self._sleeps_until:
                self._sleeps_until = 0.0
                self._changed.notify()
        return timer

    def forget(self, timer: Timer) -> None:
        """Stop a timer."""
        with self._lock:
            if timer.call is None:
                return
            timer.call = None
            self._stopped += 1
            if self._stopped > len(self._heap) // 2:
                self._heap = [entry for entry in self._heap if entry[2].call is not None]
                heapq.heapify(self._heap)
                self._stopped = 0

    def __len__(self) -> int:
        return len(self._heap)

    def _watch(self) -> None:
        while True:
            call = self._next_call()
            try:
                call()
            except BaseException:
                LOGGER.exception("what was to be done at a deadline failed; the other deadlines stand")

    def _next_call(self) -> Callable[[], None]:
        with self._lock:
            while True:
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


#: The timers of this process.
TIMERS = Timers()


class Stoppable(Protocol):
    """A call to come."""

    def stop(self) -> None:
        """Let it not come."""
        ...


StartTimer = Callable[[float, Callable[[], None]], Stoppable]

_started_by: ContextVar[StartTimer | None] = ContextVar("timers", default=None)


def start_timer(delay_s: float, call: Callable[[], None]) -> Stoppable:
    """Have `call` called once, in `delay_s`; see `Timers.start`."""
    return (_started_by.get() or TIMERS.start)(delay_s, call)


@contextmanager
def timers_started_by(start: StartTimer) -> Iterator[None]:
    """What runs inside gets its timers from `start`, and not those of this process."""
    token = _started_by.set(start)
    try:
        yield
    finally:
        _started_by.reset(token)
