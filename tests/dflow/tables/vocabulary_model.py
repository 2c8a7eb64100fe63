"""The meaning of a table with a vocabulary, in Python: dicts of ids, one id after the other, and rows in NumPy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RATE, EPSILON = 0.1, 1e-7


def murmur3(id: int) -> int:
    """The published hash MurmurHash3_x86_32 of the 8 bytes of an id, least byte first."""
    value = 0
    for word in (id & 0xFFFFFFFF, id >> 32 & 0xFFFFFFFF):
        word = rotated(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        value = (rotated(value ^ word, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    return finished(value ^ 8)


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & 0xFFFFFFFF


def finished(value: int) -> int:
    """The last part of the hash."""
    value = (value ^ value >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    value = (value ^ value >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return value ^ value >> 16


@dataclass
class Entry:
    """An id with a row: the row, the updates of its last use, and the number of updates that used it."""

    row: int
    seen: int
    uses: int = 1


@dataclass
class VocabularyModel:
    """A table of some buckets, of `size` ids each, trained by Adagrad with the gradient 1 for each use of a row."""

    buckets: int
    size: int
    evict: str
    admit_after: int
    initial: np.ndarray[Any, Any]
    expire_after: int | None = None
    entries: dict[int, Entry] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    sightings: Counter[tuple[int, int]] = field(default_factory=Counter)
    updates: int = 1

    def __post_init__(self) -> None:
        self.rows, self.slots = self.initial.copy(), np.full_like(self.initial, 0.1)

    def bucket(self, id: int) -> int:
        return murmur3(id) % self.buckets

    def row(self, id: int) -> int:
        """The row of an id: its own, or the one of its bucket."""
        shared = self.bucket(id) * (self.size + 1) + self.size
        return self.entries[id].row if id in self.entries else shared

    def owners(self) -> dict[int, int]:
        """The rows that ids own, by id."""
        return {id: entry.row for id, entry in self.entries.items()}

    def step(self, ids: list[int]) -> list[int]:
        """Train with ids; return the rows that they were looked up in."""
        looked_up = [self.row(id) for id in ids]
        self.updates += 1
        for row, times in Counter(looked_up).items():
            self.slots[row] += np.float32(times) ** 2
            self.rows[row] -= RATE * times / np.sqrt(self.slots[row] + EPSILON)
        new = [id for id in dict.fromkeys(ids) if not self._noted(id)]
        new = [id for id in new if self.admit_after == 1 or self._sighted(new).get(id)]
        for id in new:
            self._admit(id)
        self._expire()
        return looked_up

    def _expire(self) -> None:
        if self.expire_after is not None:
            first = self.updates - self.expire_after
            self.entries = {id: entry for id, entry in self.entries.items() if entry.seen > first}

    def _noted(self, id: int) -> bool:
        entry = self.entries.get(id)
        self.counts["shared" if entry is None else "found"] += 1
        if entry is not None:
            entry.seen, entry.uses = self.updates, entry.uses + 1
        return entry is not None

    def _counter(self, id: int) -> tuple[int, int]:
        return self.bucket(id), finished(murmur3(id)) % self.size

    def _sighted(self, new: list[int]) -> dict[int, bool]:
        """Count the new ids of an update, once; return which of them have been used often enough."""
        if self._counted != self.updates:
            self._counted = self.updates
            self.sightings.update(set(map(self._counter, new)))
            self._often = {id: self.sightings[self._counter(id)] >= self.admit_after for id in new}
        return self._often

    _counted = 0

    def _admit(self, id: int) -> None:
        first = self.bucket(id) * (self.size + 1)
        owners = {entry.row: other for other, entry in self.entries.items()}
        free = [row for row in range(first, first + self.size) if row not in owners]
        taken = [owners[row] for row in range(first, first + self.size) if row in owners]
        idle = [other for other in taken if self.entries[other].seen < self.updates]
        if not free and not idle:
            self.counts["overflowed"] += 1
            return
        if not free:
            score = (lambda entry: entry.uses) if self.evict == "lfu" else (lambda entry: entry.seen)
            evicted = min(idle, key=lambda other: (score(self.entries[other]), self.entries[other].row))
            free = [self.entries.pop(evicted).row]
            self.counts["evicted"] += 1
        self.counts["admitted"] += 1
        self.sightings[self._counter(id)] = 0
        self.entries[id] = Entry(free[0], self.updates)
        self.rows[free[0]], self.slots[free[0]] = self.initial[free[0]], 0.1
