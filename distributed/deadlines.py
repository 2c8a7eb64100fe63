"""One deadline for each of many waits that all last equally long.

Why: thousands of receives may wait at a time, and a timer thread for each would cost more than the step; so would
waking one for each.
Invariant: since all last equally long, the oldest wait is the next to expire, so a dict in order of insertion is
the queue; `expire` is called once for each key that is neither discarded nor overtaken by `close`.
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
    """What a channel needs of `Deadlines`; a simulator has one on a clock of its own."""

    timeout_s: float

    def add(self, key: _Key) -> None:
        """Start the time of `key`."""
        ...

    def discard(self, key: _Key) -> None:
        """The wait for `key` has ended."""
        ...

    def close(self) -> None:
        """Let nothing expire any more."""
        ...


#: Makes the deadlines of a channel, from how long each wait lasts and what to do with one that is over.
MakeDeadlines = Callable[[float, Callable[[Any], None]], EndOfWaits[Any]]


class Deadlines(Generic[Key]):
    """Calls `expire` with each key that was added `timeout_s` ago and not discarded, from a thread of its own."""

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
        """Start the time of `key`."""
        with self._lock:
            self._ends_at[key] = time.monotonic() + self.timeout_s
            if self._is_idle:
                self._is_idle = False
                self._changed.notify()

    def discard(self, key: Key) -> None:
        """The wait for `key` has ended; nothing happens if it is unknown."""
        with self._lock:
            self._ends_at.pop(key, None)

    def close(self) -> None:
        """Let nothing expire any more."""
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

        Who sleeps until one key's time is not woken when that wait ends, and finds another key, whose time is later.
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
