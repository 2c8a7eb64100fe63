"""The event queue of a simulation, with a clock that jumps from event to event.

Invariants: time never goes back; the seed orders events of equal times; the same seed and the same calls give the same
order on any machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class PendingEvent:
    """A pending event, which can be stopped."""

    __slots__ = ("_queue", "call", "is_routine")

    def __init__(self, queue: EventQueue, call: Callable[[], None], is_routine: bool) -> None:
        self._queue = queue
        self.call: Callable[[], None] | None = call
        self.is_routine = is_routine

    def stop(self) -> None:
        """Cancel the event; without effect if it has happened."""
        self.take()

    def take(self) -> Callable[[], None] | None:
        """Return the event's callback and cancel the event; None if it has happened or was stopped."""
        call, self.call = self.call, None
        if call is not None and not self.is_routine:
            self._queue.awaited -= 1
        return call


class EventQueue:
    """The events of one simulation. `now_s` is the time, in s since its start, `handled` the number of past events.

    `awaited` is the number of pending events that are not routine. Routine events, such as heartbeats, repeat for ever.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.handled = 0
        self.awaited = 0
        self._ties = random.Random(seed)
        self._serials = itertools.count()
        self._heap: list[tuple[float, float, int, PendingEvent]] = []

    def at(self, at_s: float, call: Callable[[], None], *, is_routine: bool = False) -> PendingEvent:
        """Schedule `call` at `at_s`, or now if that is past."""
        timer = PendingEvent(self, call, is_routine)
        self.awaited += not is_routine
        now_s = self.now_s
        heapq.heappush(self._heap, (at_s if at_s > now_s else now_s, self._ties.random(), next(self._serials), timer))
        return timer

    def after(self, delay_s: float, call: Callable[[], None], *, is_routine: bool = False) -> PendingEvent:
        """Schedule `call` after `delay_s`."""
        return self.at(self.now_s + delay_s, call, is_routine=is_routine)

    def step(self, until_s: float) -> bool:
        """Run the next event; if there is none up to `until_s`, set the clock to that and return False."""
        while self._heap and self._heap[0][0] <= until_s:
            at_s, _, _, timer = heapq.heappop(self._heap)
            call = timer.take()
            if call is None:
                continue
            self.now_s = at_s
            self.handled += 1
            call()
            return True
        self.now_s = max(self.now_s, until_s)
        return False
