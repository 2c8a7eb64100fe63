"""Memory for what is received, used again once the array made from it is gone.

Why: a fresh buffer costs a page fault for every 4 KiB the first time it is written, which is two to ten times as long
as receiving into it. Steps receive values of the same sizes again and again.

Invariants: memory is handed out again only when nothing refers to it any more, which the interpreter says by a
finalizer. A finalizer may run on any thread at any moment, even on one that holds the lock here, so it never waits for
that. What lies idle is at most `idle_bytes`, except for what finalizers brought while the lock was taken.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from dflow.distributed.codec import ALIGNMENT_BYTES

_GRAIN_BYTES = 1 << 14

_Storage = npt.NDArray[np.uint8]


class BufferPool:
    """Hands out aligned buffers; any thread may ask."""

    def __init__(self, idle_bytes: int) -> None:
        self._most_idle = idle_bytes
        self._lock = threading.Lock()
        self._returned: deque[_Storage] = deque()
        # Oldest first, by rounded size and overall.
        self._idle: dict[int, deque[_Storage]] = {}
        self._idle_order: deque[_Storage] = deque()
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """How much memory waits to be used again."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def take(self, size_bytes: int) -> memoryview:
        """A writable buffer that starts at a multiple of `ALIGNMENT_BYTES`, with anything in it.

        raises  MemoryError
        """
        rounded = -(-max(size_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
        with self._lock:
            self._collect()
            storage = self._reuse(rounded)
        if storage is None:
            storage = np.empty(rounded + ALIGNMENT_BYTES, np.uint8)
        offset = -storage.ctypes.data % ALIGNMENT_BYTES
        lent = storage[offset : offset + size_bytes]
        weakref.finalize(lent, self._give_back, storage).atexit = False
        return lent.data

    def _give_back(self, storage: _Storage) -> None:
        self._returned.append(storage)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        while self._returned:
            storage = self._returned.popleft()
            self._idle.setdefault(storage.size - ALIGNMENT_BYTES, deque()).append(storage)
            self._idle_order.append(storage)
            self._idle_bytes += storage.size
        while self._idle_bytes > self._most_idle:
            self._drop(self._idle_order[0])

    def _reuse(self, rounded: int) -> _Storage | None:
        waiting = self._idle.get(rounded)
        if not waiting:
            return None
        storage = waiting[-1]
        self._drop(storage)
        return storage

    def _drop(self, storage: _Storage) -> None:
        """Count a storage as idle no longer."""
        size = storage.size - ALIGNMENT_BYTES
        self._idle[size] = deque(one for one in self._idle[size] if one is not storage)
        if not self._idle[size]:
            del self._idle[size]
        self._idle_order = deque(one for one in self._idle_order if one is not storage)
        self._idle_bytes -= storage.size


#: The pool of this process. As much as a step's largest values, of which a process seldom holds more at a time.
RECEIVED = BufferPool(idle_bytes=1 << 30)
