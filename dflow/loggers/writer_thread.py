"""The thread of a logger, which waits for values and writes them, so that no step waits for either.

Invariants: calls run one at a time, in the order of `put`; a call that raises ends no other call.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

#: Most calls that wait, so that memory is bounded; with as many, `put` waits until the thread takes one.
MOST_WAITING = 1000
#: Longest time that something written stays in this process, in s. A killed process loses no more than that.
SYNC_S = 1.0


class WriterThread:
    """Runs calls in a thread; `sync` is called at most `SYNC_S` after a call, `failed` with what a call raised."""

    def __init__(self, name: str, sync: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._sync, self._failed = sync, failed
        #: Whether the last call found no room.
        self._is_stuck = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None], timeout_s: float) -> bool:
        """Run `call` after those before it; return False if there is no room for it within the time.

        After that, further calls get no time until there is room again.
        """
        try:
            self._calls.put(call, timeout=0 if self._is_stuck else timeout_s)
        except queue.Full:
            self._is_stuck = True
            return False
        self._is_stuck = False
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all calls have run and are synced; return whether that was so within the time."""
        done = threading.Event()
        until = time.monotonic() + timeout_s

        def last() -> None:
            self._try(self._sync)  # so that a failure is known before the caller goes on
            done.set()

        try:
            self._calls.put(last, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(max(0.0, until - time.monotonic()))

    def close(self, timeout_s: float) -> bool:
        """End the thread after all calls; return whether it ended within the time."""
        try:
            self._calls.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due_s: float | None = None  # the time of the next sync; None if there is nothing to sync
        while True:
            try:
                call = self._calls.get(timeout=None if due_s is None else max(0.0, due_s - time.monotonic()))
            except queue.Empty:
                call = self._sync
            if call is None:
                return
            self._try(call)
            if call == self._sync:
                due_s = None
            elif due_s is None:
                due_s = time.monotonic() + SYNC_S
            elif time.monotonic() >= due_s:
                self._try(self._sync)
                due_s = None

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed(error)
