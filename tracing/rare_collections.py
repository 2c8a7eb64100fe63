"""Fewer collections of garbage while a function is traced and planned.

Why: a trace of hundreds of variables makes a million objects that stay. CPython then visits all objects of the process
again and again to find garbage, which takes up to a fifth of the first call. Invariant: the collector's earlier
thresholds are restored when the last thread is done, unless the user has changed them meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects made, less those freed, between two collections of the youngest: bounds the memory that garbage takes.
YOUNG_OBJECTS = 100_000

_Thresholds = tuple[int, int, int]
_lock = threading.Lock()
#: The thresholds before the first thread came, once for each thread inside.
_before: list[_Thresholds] = []


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage once in `YOUNG_OBJECTS` objects while inside; a collector that is off or rarer stays as it is."""
    with _lock:
        before = _before[0] if _before else gc.get_threshold()
        _before.append(before)
        if len(_before) == 1:
            gc.set_threshold(*_raised(before))
    try:
        yield
    finally:
        with _lock:
            _before.pop()
            if not _before and gc.get_threshold() == _raised(before):
                gc.set_threshold(*before)


def _raised(before: _Thresholds) -> _Thresholds:
    return (YOUNG_OBJECTS, *before[1:]) if 0 < before[0] < YOUNG_OBJECTS else before
