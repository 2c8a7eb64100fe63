"""Deadlines of many waits that all have the same timeout.

Why: thousands of receives may wait concurrently, and most end long before their deadline. So a wait starts no timer,
and its end costs nothing here: one timer looks at the waits that are pending when the oldest of them may expire.
Invariants: while a wait that has begun is pending, the timer runs. A wait does not expire before its time is over, and
expires once, unless it ends or the clock is closed first; again only if `expire` could not end it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from dflow.lowering.queues.timers import Clock

LOGGER = logging.getLogger("dflow")

Wait = TypeVar("Wait")


class Deadlines(Generic[Wait]):
    """Calls `expire` with each wait that is still pending `timeout_s` after it began, the oldest first.

    pending  returns a pair for each wait that has not ended: the time when it expires, and the wait; called with `lock`
    expire   ends a wait; called without `lock`, and again later if the wait goes on. Its errors are logged
    """

    def __init__(
        self,
        timeout_s: float,
        pending: Callable[[], Iterable[tuple[float, Wait]]],
        expire: Callable[[Wait], None],
        clock: Clock,
        lock: threading.Lock,
    ) -> None:
        self.timeout_s = timeout_s
        self._pending, self._expire = pending, expire
        self._clock, self._lock = clock, lock
        self._has_timer = False
        #: Time of the newest look: `expire` was called with the waits that expire until then.
        self._looked_s = -math.inf

    def begin(self) -> float:
        """Return the time, by the clock, when a wait that begins now expires; start the timer if it does not run.

        The caller has the lock, and adds the wait.
        """
        if not self._has_timer:
            self._has_timer = True
            self._clock.after(self.timeout_s, self._look)
        return self._clock.now_s + self.timeout_s

    def overdue(self) -> int:
        """Return the number of waits that go on after they expired, or that the timer misses. The caller has the lock.

        It is 0 whenever no call of `expire` is in progress.
        """
        until_s = self._looked_s if self._has_timer else math.inf
        return sum(ends_s <= until_s for ends_s, _ in self._pending())

    def _look(self) -> None:
        with self._lock:
            now_s = self._looked_s = self._clock.now_s
            waits = sorted(self._pending(), key=lambda wait: wait[0])
            later = [ends_s for ends_s, _ in waits if ends_s > now_s]
            # Also after waits that expire now: if one could not be ended, it expires again.
            self._has_timer = bool(waits)
            if waits:
                self._clock.after(later[0] - now_s if later else self.timeout_s, self._look)
        for ends_s, wait in waits:
            if ends_s <= now_s:
                try:
                    self._expire(wait)
                except Exception:
                    LOGGER.exception("the end of a wait that took %g s failed", self.timeout_s)
