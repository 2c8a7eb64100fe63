"""A pool of buffers for received payloads, each reused after the array made from it is freed.

Why: the first write to a fresh buffer costs a page fault for every 4 KiB, two to ten times the time of receiving into
it. Steps receive values of the same sizes repeatedly.

Invariants: a buffer is reused only when nothing refers to it any more, as its finalizer reports. A finalizer may run on
any thread at any time, even on one that holds the pool's lock, so it never waits for that lock. At most `idle_bytes`
are idle, besides the buffers that finalizers returned while the lock was held.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

from dflow.lowering.values.alignment import ALIGNMENT_BYTES

_GRAIN_BYTES = 1 << 14

_Storage = npt.NDArray[np.uint8]


class BufferPool:
    """A pool of aligned buffers; thread-safe. It keeps at most `idle_bytes` of unused ones."""

    def __init__(self, idle_bytes: int) -> None:
        self._most_idle = idle_bytes
        self._lock = threading.Lock()
        self._returned: deque[_Storage] = deque()
        #: The idle storages, oldest first, and their total size.
        self._idle: list[_Storage] = []
        self.idle_bytes = 0

    def take(self, size_bytes: int) -> memoryview:
        """Return a writable, uninitialised buffer that starts at a multiple of `ALIGNMENT_BYTES`.

        raises  MemoryError
        """
        rounded = -(-max(size_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES + ALIGNMENT_BYTES
        with self._lock:
            self._collect()
            storage = self._reuse(rounded)
        if storage is None:
            storage = np.empty(rounded, np.uint8)
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
            self._idle.append(self._returned.popleft())
            self.idle_bytes += self._idle[-1].size
        while self.idle_bytes > self._most_idle:
            self.idle_bytes -= self._idle.pop(0).size

    def _reuse(self, size_bytes: int) -> _Storage | None:
        """Remove and return the newest idle storage of this size; the newest is likely to be in the cache."""
        for index in range(len(self._idle) - 1, -1, -1):
            if self._idle[index].size == size_bytes:
                self.idle_bytes -= size_bytes
                return self._idle.pop(index)
        return None


#: The pool of this process. Its limit is about the size of a step's largest values; a process seldom holds more.
RECEIVED = BufferPool(idle_bytes=1 << 30)
