"""Blocks of files that threads read ahead, and that stay in memory for the batches that use them next.

Invariant: of the blocks in memory, all are of the windows that batches asked for last, or of the next ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from dflow.tracing.errors import DeadlineExceeded

#: Number of threads that read.
_THREADS = 2
#: Longest wait for a block, in s.
_READ_S = 600.0


class BlockCache:
    """Reads blocks by number with `read`, on threads, and keeps those of the newest windows; thread-safe."""

    def __init__(self, read: Callable[[int], Any], windows: int) -> None:
        self._read, self._most = read, windows
        self._lock = threading.Lock()
        self._blocks: dict[int, Future[Any]] = {}
        #: The blocks of the newest windows, each with those of the window after it.
        self._windows: list[tuple[int, ...]] = []
        self._pool: ThreadPoolExecutor | None = None

    def expect(self, blocks: Sequence[int], next_blocks: Sequence[int]) -> None:
        """Begin to read the blocks of a window and of the next one; forget those of old windows."""
        window = (*blocks, *next_blocks)
        with self._lock:
            if self._windows and self._windows[-1] == window:
                return
            if window in self._windows:
                self._windows.remove(window)
            self._windows = [*self._windows, window][-self._most :]
            kept = {block for known in self._windows for block in known}
            for block in [block for block in self._blocks if block not in kept]:
                del self._blocks[block]
            for block in window:
                self._begun(block)

    def get(self, block: int) -> Any:
        """Return a block. Raises the error of reading it; the next call reads again. DeadlineExceeded after 600 s."""
        with self._lock:
            reading = self._begun(block)
        if not reading.done() and wait([reading], _READ_S).not_done:
            raise DeadlineExceeded(
                f"read: expected block {block} within {_READ_S:g} s, got none", "see whether its disk answers"
            )
        try:
            return reading.result()
        except BaseException:
            with self._lock:
                if self._blocks.get(block) is reading:
                    del self._blocks[block]
            raise

    def _begun(self, block: int) -> Future[Any]:
        if block not in self._blocks:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dflow-read")
            self._blocks[block] = self._pool.submit(self._read, block)
        return self._blocks[block]
