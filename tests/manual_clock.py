"""A clock that advances by hand, where a process has `lowering.queues.timers.Timers`."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.events import EventQueue, PendingEvent


class ManualClock:
    """The time stands still, and no call is made, between two calls of `advance`."""

    def __init__(self) -> None:
        self.is_closed = False
        self._events = EventQueue(seed=0)

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return self._events.now_s

    def after(self, delay_s: float, call: Callable[[], None]) -> PendingEvent:
        """Make the call when the clock has advanced by `delay_s`."""
        return self._events.after(delay_s, call)

    def close(self) -> None:
        """Make no more calls."""
        self.is_closed = True

    def advance(self, seconds: float) -> None:
        """Let time pass, and make the calls that become due, in this thread."""
        until_s = self.now_s + seconds
        while not self.is_closed and self._events.step(until_s):
            pass
