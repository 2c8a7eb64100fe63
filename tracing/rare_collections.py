"""Fewer collections of garbage while a function is traced and planned.

Why: a trace of hundreds of variables makes a million objects that stay. CPython then visits all objects of the process
again and again to find garbage, which takes up to a fifth of the first call. Invariant: what the collector was set to
before is set again when the last thread is done, unless the user has changed it meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects made, less those freed, between two collections of the youngest: bounds the memory that garbage takes.
YOUNG_OBJECTS = 100_000

_lock = threading.Lock()
_inside = 0
_before = _during = gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage once in `YOUNG_OBJECTS` objects inside; a collector that is off or rarer stays as it is."""
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside, _before, _during
    with _lock:
        _inside += 1
        if _inside == 1:
            _before = _during = gc.get_threshold()
            if 0 < _before[0] < YOUNG_OBJECTS:
                gc.set_threshold(YOUNG_OBJECTS)
                _during = gc.get_threshold()


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0 and gc.get_threshold() == _during:
            gc.set_threshold(*_before)
