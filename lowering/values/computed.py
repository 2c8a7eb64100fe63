"""Waiting for computed values, on threads that other threads rely on.

Why: a thread that reads the connections of a process runs items of plans, whose inputs may still be computed by
slow ones. Such a thread registers once a function that is called before each of its waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

_OF_THREAD = threading.local()


def before_waiting(call: Callable[[], None]) -> None:
    """Register `call`, which this thread calls each time before it waits for values to be computed."""
    _OF_THREAD.before_waiting = call


def wait_until_computed(values: Iterable[Any]) -> None:
    """Wait until the JAX arrays among the values are computed. Raises the error of their computation."""
    for value in values:
        # Duck typing, without importing JAX: a coordinator, which also runs this, starts in half the time without it.
        is_ready = getattr(value, "is_ready", None)
        if is_ready is not None and not is_ready():
            getattr(_OF_THREAD, "before_waiting", lambda: None)()
            value.block_until_ready()
