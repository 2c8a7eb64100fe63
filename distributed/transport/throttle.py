"""Saying the same kind of thing only so often, so that a stranger who knocks for ever does not fill the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Lets `burst` things be said in each `period_s`, and counts the rest. Any thread may ask.

    `clock`  seconds since any moment
    """

    def __init__(self, burst: int = 10, period_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._period_s = period_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._said = 0
        self._unsaid = 0

    def ask(self) -> str | None:
        """What to add to the text, such as how many were left out before it; None when it is to be left out."""
        with self._lock:
            now_s = self._clock()
            if now_s - self._began_s >= self._period_s:
                self._began_s, self._said = now_s, 0
            if self._said >= self._burst:
                self._unsaid += 1
                return None
            self._said += 1
            unsaid, self._unsaid = self._unsaid, 0
        return f" ({unsaid} more like it were not logged)" if unsaid else ""
