"""Waits on threads that other threads rely on, such as waits for values to be computed.

Why: a thread that reads the connections of a process runs items of plans, whose inputs may still be computed by
slow ones. Such a thread registers once a function that is called before each of its waits. That function wakes another
thread, which takes longer than most small programs run; so the thread first looks for a moment whether they end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

#: Time to look for a value that is being computed, in s: about the cost of waking another thread.
SPIN_S = 1e-4
_OF_THREAD = threading.local()


def before_waiting(call: Callable[[], None]) -> None:
    """Register `call`, which this thread calls each time before it waits."""
    _OF_THREAD.before_waiting = call


def about_to_wait() -> None:
    """Call what this thread has registered by `before_waiting`, if anything."""
    getattr(_OF_THREAD, "before_waiting", lambda: None)()


def wait_until_computed(values: Iterable[Any]) -> None:
    """Wait until the JAX arrays among the values are computed. Raises the error of their computation."""
    for value in values:
        # Duck typing, without importing JAX: a coordinator, which also runs this, starts in half the time without it.
        is_ready = getattr(value, "is_ready", None)
        if is_ready is not None and not is_ready():
            if hasattr(_OF_THREAD, "before_waiting") and not _is_ready_soon(is_ready):
                about_to_wait()
            value.block_until_ready()


def _is_ready_soon(is_ready: Callable[[], bool]) -> bool:
    """Look for at most `SPIN_S` whether a value is computed, and let other threads of the machine run."""
    ends_s = time.perf_counter() + SPIN_S
    while time.perf_counter() < ends_s:
        time.sleep(0)  # for the threads of this process
        os.sched_yield()  # and of others
        if is_ready():
            return True
    return False
