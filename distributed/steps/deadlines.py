"""One deadline for each of many waits that all have the same timeout.

Why: thousands of receives may wait concurrently, and a timer thread for each would cost more than the step; so would
waking one thread for each.
Invariant: since all have the same timeout, the oldest wait is the next to expire, so a dict in order of insertion is
the queue; `expire` is called once for each key, unless that is discarded or `close` is called first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, TypeVar

LOGGER = logging.getLogger("dflow")

Key = TypeVar("Key", bound=Hashable)
_Key = TypeVar("_Key", bound=Hashable, contravariant=True)


class EndOfWaits(Protocol[_Key]):
    """The part of `Deadlines` that a channel uses; a simulator has one on a simulated clock."""

    timeout_s: float

    def add(self, key: _Key) -> None:
        """Start the timeout of `key`."""
        ...

    def discard(self, key: _Key) -> None:
        """End the timeout of `key`, whose wait has ended."""
        ...

    def close(self) -> None:
        """Stop all timeouts: nothing expires any more."""
        ...


#: Makes the deadlines of a channel from the timeout of each wait, in s, and the callback for an expired one.
MakeDeadlines = Callable[[float, Callable[[Any], None]], EndOfWaits[Any]]


class Deadlines(Generic[Key]):
    """Calls `expire`, on one background thread, with each key added `timeout_s` ago and not discarded."""

    def __init__(self, timeout_s: float, expire: Callable[[Key], None]) -> None:
        self.timeout_s = timeout_s
        self._expire = expire
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ends_at: dict[Key, float] = {}
        self._is_closed = False
        self._is_idle = False
        threading.Thread(target=self._watch, name="dflow deadlines", daemon=True).start()

    def add(self, key: Key) -> None:
        """Start the timeout of `key`."""
        with self._lock:
            self._ends_at[key] = time.monotonic() + self.timeout_s
            if self._is_idle:
                self._is_idle = False
                self._changed.notify()

    def discard(self, key: Key) -> None:
        """End the timeout of `key`, whose wait has ended; does nothing if it is unknown."""
        with self._lock:
            self._ends_at.pop(key, None)

    def close(self) -> None:
        """Stop all timeouts: nothing expires any more."""
        with self._lock:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        while (key := self._next_expired()) is not None:
            try:
                self._expire(key)
            except Exception:  # without this thread no later wait would end
                LOGGER.exception("the end of a wait has failed")

    def _next_expired(self) -> Key | None:
        """Wait for the next key to expire; None once closed.

        A discarded key does not wake this thread, which then finds a later key when it wakes.
        """
        with self._lock:
            while not self._is_closed:
                key = next(iter(self._ends_at), None)
                if key is None:
                    self._is_idle = True
                    self._changed.wait()
                elif (left_s := self._ends_at[key] - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    del self._ends_at[key]
                    return key
        return None
