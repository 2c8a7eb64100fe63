"""A cache of rows of one table: an array with room for a fixed number of rows, and a dict from id to position.

A row is evicted by CLOCK: a hand goes over the positions, and takes the first one that was not used since it last came
by. Invariant: a row that is returned is no older than `max_age_s`, and is that of its id; thread-safe.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class RowCache:
    """At most `capacity` rows of this shape and dtype.

    max_age_s  longest time that a row is returned after it was asked for at its table
    """

    def __init__(self, capacity: int, shape: Sequence[int], dtype: Any, max_age_s: float) -> None:
        self._max_age_s, self._lock = max_age_s, threading.Lock()
        self._rows = np.zeros((capacity, *shape), dtype)
        self._ids = np.zeros(capacity, np.int64)
        #: Of a position without a row, since ever.
        self._asked_s = np.full(capacity, -np.inf)
        self._was_used = np.zeros(capacity, bool)
        self._positions: dict[int, int] = {}
        self._hand = 0

    def __len__(self) -> int:
        return len(self._positions)

    def oldest_s(self, now_s: float) -> float:
        """Return the age of the oldest row that may be returned, in s; 0 if there is none."""
        with self._lock:
            ages = now_s - self._asked_s[self._asked_s > -np.inf]
            return float(ages[ages <= self._max_age_s].max(initial=0))

    def clear(self) -> None:
        """Drop all rows."""
        with self._lock:
            self._positions.clear()
            self._asked_s[:] = -np.inf
            self._was_used[:] = False

    def find(self, ids: npt.NDArray[Any], now_s: float) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return the rows of ids, and whether each is here; the others are zero."""
        rows = np.zeros((len(ids), *self._rows.shape[1:]), self._rows.dtype)
        with self._lock:
            found = map(self._positions.get, ids.tolist(), itertools.repeat(-1))
            positions = np.fromiter(found, np.int64, len(ids))
            is_here = positions >= 0
            is_here[is_here] = now_s - self._asked_s[positions[is_here]] <= self._max_age_s
            self._was_used[positions[is_here]] = True
            rows[is_here] = self._rows[positions[is_here]]
        return rows, is_here

    def add(self, ids: npt.NDArray[Any], rows: npt.NDArray[Any], asked_s: float) -> None:
        """Keep rows that their table was asked for at `asked_s`; no id is twice among them. The first ones stay out."""
        with self._lock:
            kept = ids[-len(self._ids) :] if len(self._ids) else ids[:0]
            positions = np.fromiter(map(self._position_for, kept.tolist()), np.int64, len(kept))
            self._rows[positions] = rows[len(ids) - len(kept) :]
            self._asked_s[positions] = asked_s

    def _position_for(self, id: int) -> int:
        """Return the position of an id, which takes that of another one if it has none."""
        if (known := self._positions.get(id)) is not None:
            self._was_used[known] = True
            return known
        while self._was_used[self._hand]:
            self._was_used[self._hand] = False
            self._hand = (self._hand + 1) % len(self._ids)
        position, self._hand = self._hand, (self._hand + 1) % len(self._ids)
        if self._positions.get(evicted := int(self._ids[position])) == position:
            del self._positions[evicted]
        self._ids[position], self._positions[id], self._was_used[position] = id, position, True
        return position
