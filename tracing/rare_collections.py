"""Fewer collections of garbage while a function is traced and planned.

Why: a trace of hundreds of variables makes a million objects that stay. CPython then visits all objects of the process
again and again to find garbage, which takes up to a fifth of the first call. Invariant: the collector's earlier
thresholds are restored when the last thread is done, unless the user has changed them meanwhile.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ContextDecorator

#: Objects made, less those freed, between two collections of the youngest: bounds the memory that garbage takes.
YOUNG_OBJECTS = 100_000


class _RareCollections(ContextDecorator):
    """The collector's thresholds, raised while threads are inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before = self._during = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = gc.get_threshold()
                if 0 < self._before[0] < YOUNG_OBJECTS:
                    gc.set_threshold(YOUNG_OBJECTS)
                self._during = gc.get_threshold()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and gc.get_threshold() == self._during:
                gc.set_threshold(*self._before)


#: Collects garbage once in `YOUNG_OBJECTS` objects while inside; a collector that is off or rarer stays as it is.
rare_collections = _RareCollections()
