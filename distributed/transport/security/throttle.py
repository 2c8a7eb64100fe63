"""Logging of events that unauthenticated peers cause.

Why: they must not fill the log, so its rate is limited, nor forge entries, so each event is one line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

MAX_LOGGED = 1000


class Throttle:
    """Allows `burst` entries in each `period_s`, and counts the entries left out; thread-safe.

    `clock`  returns seconds since an arbitrary time
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
        """Return the text to append to an entry (the number of entries left out before it), or None to leave it out."""
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
    """Escape the unprintable characters of a text, and cut it after `MAX_LOGGED` characters."""
    shown = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text[:MAX_LOGGED])
    return shown if len(text) <= MAX_LOGGED else f"{shown} ... ({len(text) - MAX_LOGGED} more characters)"
