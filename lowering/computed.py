"""Waiting for a device, by threads that others rely on.

Why: a thread that reads the connections of a process runs what is quick of a plan, and what it takes may still be
computed by something that is not. Such a thread says once what to do before it waits, and whatever waits does it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any


class _OfThread(threading.local):
    before_waiting: Callable[[], None] | None = None


_OF_THREAD = _OfThread()


def before_waiting(call: Callable[[], None]) -> None:
    """Have `call` called by this thread each time it is about to wait for values to be computed."""
    _OF_THREAD.before_waiting = call


def wait_until_computed(values: Iterable[Any]) -> None:
    """Wait until those of the values that are JAX arrays are computed; raises what computing them did."""
    for value in values:
        # Not by its class: who reads connections may be a coordinator, which starts in half the time without JAX.
        is_ready = getattr(value, "is_ready", None)
        if is_ready is not None and not is_ready():
            if _OF_THREAD.before_waiting is not None:
                _OF_THREAD.before_waiting()
            value.block_until_ready()
