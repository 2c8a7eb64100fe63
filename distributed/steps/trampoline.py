"""Running short callbacks on the thread that submits them, one after another.

Why: passing a callback of a few microseconds to another thread costs more than the callback. Invariant: a callback that
is submitted by another, on the same thread, runs after that one and never within it, so that chains of steps which
feed each other use no more stack than one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class _Queue(threading.local):
    work: deque[Callable[[], None]] | None = None


_QUEUE = _Queue()


def run_soon(work: Callable[[], None]) -> None:
    """Run `work` now, or when the callback that runs on this thread has returned."""
    if _QUEUE.work is not None:
        _QUEUE.work.append(work)
        return
    queue = _QUEUE.work = deque([work])
    try:
        _drain(queue)
    finally:
        _QUEUE.work = None


def _drain(queue: deque[Callable[[], None]]) -> None:
    """Run all queued callbacks, even if one raises; then raise its error."""
    while queue:
        try:
            queue.popleft()()
        except BaseException:
            _drain(queue)
            raise
