"""Work done on the thread that brings it, one piece after another.

Why: handing a piece of a few microseconds to another thread costs more than the piece. Invariant: a piece that is
brought by another, on the same thread, is done after that one and never within it, so that chains of steps which feed
each other use no more stack than one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class _Queue(threading.local):
    work: deque[Callable[[], None]] | None = None


_QUEUE = _Queue()


def run_soon(work: Callable[[], None]) -> None:
    """Do `work` now, or on return to the outermost call of this on the thread."""
    if _QUEUE.work is not None:
        _QUEUE.work.append(work)
        return
    queue = _QUEUE.work = deque([work])
    try:
        _drain(queue)
    finally:
        _QUEUE.work = None


def _drain(queue: deque[Callable[[], None]]) -> None:
    """Do all there is, whatever one of them raises."""
    while queue:
        try:
            queue.popleft()()
        except BaseException:
            _drain(queue)
            raise
