"""One deadline for each of many waits that all have the same timeout.

Why: thousands of receives may wait concurrently, and most end long before their deadline, so a wait starts no timer.
Invariant: since all have the same timeout, the oldest wait is the next to expire, so a dict in order of insertion is
the queue, and one timer, for the oldest, is enough. `expire` is called once for each key, unless that is discarded or
the clock is closed first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dflow.lowering.queues.timers import Clock

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """Calls `expire` with each key added `timeout_s` ago and not discarded, one after another, when `clock` calls."""

    def __init__(self, timeout_s: float, expire: Callable[[Key], None], clock: Clock) -> None:
        self.timeout_s = timeout_s
        self._expire = expire
        self._clock = clock
        self._lock = threading.Lock()
        self._ends_at: dict[Key, float] = {}
        self._has_timer = False

    def __len__(self) -> int:
        return len(self._ends_at)

    def add(self, key: Key) -> None:
        """Start the timeout of `key`."""
        with self._lock:
            self._ends_at[key] = self._clock.now_s + self.timeout_s
            if not self._has_timer:
                self._start_timer()

    def discard(self, key: Key) -> None:
        """End the timeout of `key`, whose wait has ended; does nothing if it is unknown."""
        with self._lock:
            self._ends_at.pop(key, None)

    def oldest(self) -> Key | None:
        """Return the key added first; None when there is none."""
        with self._lock:
            return next(iter(self._ends_at), None)

    def _start_timer(self) -> None:
        ends_at = next(iter(self._ends_at.values()), None)
        self._has_timer = False
        if ends_at is not None:
            self._clock.after(ends_at - self._clock.now_s, self._expire_oldest)
            self._has_timer = True

    def _expire_oldest(self) -> None:
        with self._lock:
            key = next(iter(self._ends_at), None)
            if key is not None and self._ends_at[key] <= self._clock.now_s:
                del self._ends_at[key]
            else:  # the key that the timer was started for was discarded
                key = None
            self._start_timer()
        if key is not None:
            self._expire(key)
