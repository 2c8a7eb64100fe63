"""What strangers bring about, in the log.

Why: it is said only so often, so that they do not fill the log, and on one line each, so that they do not forge it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_LOGGED = 1000


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


def on_one_line(text: str) -> str:
    """The text with what cannot be printed escaped, and cut."""
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:MAX_LOGGED])
    return shown if len(text) <= MAX_LOGGED else f"{shown} ... ({len(text) - MAX_LOGGED} more characters)"
