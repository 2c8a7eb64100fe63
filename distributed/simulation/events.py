"""What happens when: a clock that is moved by hand from event to event.

Invariants: time never goes back; of events at the same time the seed says which is first; the same seed and the same
calls give the same order on any machine.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable


class Timer:
    """An event to come, which may be stopped."""

    __slots__ = ("_queue", "call", "is_routine")

    def __init__(self, queue: EventQueue, call: Callable[[], None], is_routine: bool) -> None:
        self._queue = queue
        self.call: Callable[[], None] | None = call
        self.is_routine = is_routine

    def stop(self) -> None:
        """Let it not happen; nothing if it has."""
        self.take()

    def take(self) -> Callable[[], None] | None:
        """What is to happen, which then does not happen otherwise; None if it has, or was stopped."""
        call, self.call = self.call, None
        if call is not None and not self.is_routine:
            self._queue.awaited -= 1
        return call


class EventQueue:
    """The events of one simulation. `now_s` is the time, in s since its start.

    `awaited` is how many are to come that are not routine, as heartbeats are, which come for ever.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.handled = 0
        self.awaited = 0
        self._ties = random.Random(seed)
        self._serials = itertools.count()
        self._heap: list[tuple[float, float, int, Timer]] = []

    def at(self, at_s: float, call: Callable[[], None], *, is_routine: bool = False) -> Timer:
        """Have `call` called at `at_s`, or now if that is over."""
        timer = Timer(self, call, is_routine)
        self.awaited += not is_routine
        now_s = self.now_s
        heapq.heappush(self._heap, (at_s if at_s > now_s else now_s, self._ties.random(), next(self._serials), timer))
        return timer

    def after(self, delay_s: float, call: Callable[[], None], *, is_routine: bool = False) -> Timer:
        """Have `call` called in `delay_s`."""
        return self.at(self.now_s + delay_s, call, is_routine=is_routine)

    def step(self, until_s: float) -> bool:
        """Let the next event happen; false, with the clock at `until_s`, when there is none before it."""
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
