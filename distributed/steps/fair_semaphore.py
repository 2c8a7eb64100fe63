"""A semaphore that tasks acquire one after another, to compile the programs that they sent.

Why: a compilation takes all of a core, for up to minutes, and gigabytes of memory. Each of 64 workers may register
plans at the same time, and one of them a hundred.

Invariants: at most `limit` holders. When one releases the semaphore, the next holder is of the task that has waited
longest since it last acquired it. So before a task compiles, each other task compiles at most one program for each
holder. It is held only to compile: threads that need a program which another thread compiles wait without it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager

from dflow.tracing.errors import DeadlineExceeded, DflowError

#: Longest wait to compile a program, and for a program that another thread compiles, in s.
COMPILE_TIMEOUT_S = 600.0


class FairSemaphore:
    """A semaphore with at most `limit` holders, by default one for each core of this process; thread-safe."""

    def __init__(self, limit: int | None = None) -> None:
        self._lock = threading.Lock()
        self._free = limit or len(os.sched_getaffinity(0))
        #: The waits of each task, with the task that acquires next at the front.
        self._waiting: dict[str, deque[Future[None]]] = {}
        self._closed: DflowError | None = None

    @contextmanager
    def held_for(self, task: str) -> Iterator[None]:
        """Wait for the semaphore and acquire it for `task`; release it when the context ends.

        raises  DeadlineExceeded after `COMPILE_TIMEOUT_S`; the error that was given to `close`
        """
        self._acquire(task)
        try:
            yield
        finally:
            self._release()

    def close(self, error: DflowError) -> None:
        """Fail the present waits and all later acquisitions with `error`."""
        with self._lock:
            self._closed = error
            for waits in self._waiting.values():
                for wait in waits:
                    wait.set_exception(error)
            self._waiting.clear()

    def _acquire(self, task: str) -> None:
        wait: Future[None] = Future()
        with self._lock:
            if self._closed is not None:
                raise self._closed
            if self._free:
                self._free -= 1
                return
            self._waiting.setdefault(task, deque()).append(wait)
        try:
            wait.result(COMPILE_TIMEOUT_S)
        except FutureTimeoutError:  # or the error given to `close`, which `wait` has then
            if self._withdraw(task, wait):
                text = f"other programs were compiled for {COMPILE_TIMEOUT_S:g} s before one of {task}"
                raise DeadlineExceeded(text) from None
            wait.result()
        except BaseException:
            if not self._withdraw(task, wait) and wait.exception() is None:  # acquired, but the caller will not know
                self._release()
            raise

    def _withdraw(self, task: str, wait: Future[None]) -> bool:
        """Remove a wait; return False if it has ended before."""
        with self._lock:
            if wait.done():
                return False
            self._waiting[task].remove(wait)
            if not self._waiting[task]:
                del self._waiting[task]
            return True

    def _release(self) -> None:
        with self._lock:
            if not self._waiting:
                self._free += 1
                return
            task = next(iter(self._waiting))
            waits = self._waiting.pop(task)
            waits.popleft().set_result(None)
            if waits:
                self._waiting[task] = waits  # at the end
