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

from dflow.distributed.wire.codec import ALIGNMENT_BYTES

_GRAIN_BYTES = 1 << 14

_Storage = npt.NDArray[np.uint8]


class BufferPool:
    """A pool of aligned buffers; thread-safe. It keeps at most `idle_bytes` of unused ones."""

    def __init__(self, idle_bytes: int) -> None:
        self._most_idle = idle_bytes
        self._lock = threading.Lock()
        self._returned: deque[_Storage] = deque()
        # The idle storages, oldest first: by their usable size, and all together.
        self._idle: dict[int, deque[_Storage]] = {}
        self._idle_order: deque[_Storage] = deque()
        self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Size of the unused buffers."""
        with self._lock:
            self._collect()
            return self._idle_bytes

    def take(self, size_bytes: int) -> memoryview:
        """Return a writable, uninitialised buffer that starts at a multiple of `ALIGNMENT_BYTES`.

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
        """Remove a storage from the idle ones."""
        size = storage.size - ALIGNMENT_BYTES
        self._idle[size] = deque(one for one in self._idle[size] if one is not storage)
        if not self._idle[size]:
            del self._idle[size]
        self._idle_order = deque(one for one in self._idle_order if one is not storage)
        self._idle_bytes -= storage.size


#: The pool of this process. Its limit is about the size of a step's largest values; a process seldom holds more.
RECEIVED = BufferPool(idle_bytes=1 << 30)
