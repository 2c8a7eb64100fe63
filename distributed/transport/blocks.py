"""Allocation of blocks in a shared memory: first fit, so that few pages are ever touched.

Invariants: blocks do not overlap and lie within `size_bytes`; each starts at a multiple of `GRAIN_BYTES`; adjacent gaps
are merged. This code only counts: it touches no memory and never waits. It is not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort

#: The size of a page, so that two values never share one.
GRAIN_BYTES = 4096


class Blocks:
    """The blocks of a memory of `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        self._gaps: list[tuple[int, int]] = [(0, size_bytes // GRAIN_BYTES * GRAIN_BYTES)]
        self._taken: dict[int, int] = {}

    @property
    def taken_bytes(self) -> int:
        """Total size of the blocks in use."""
        return sum(self._taken.values())

    def take(self, size_bytes: int) -> int | None:
        """Allocate a block; return its offset, or None if no gap is large enough."""
        wanted = -(-max(size_bytes, 1) // GRAIN_BYTES) * GRAIN_BYTES
        for index, (offset, length) in enumerate(self._gaps):
            if length >= wanted:
                if length == wanted:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (offset + wanted, length - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def give_back(self, offset: int) -> None:
        """Free the block at `offset`."""
        length = self._taken.pop(offset)
        at = bisect_left(self._gaps, (offset, 0))
        if at < len(self._gaps) and self._gaps[at][0] == offset + length:
            length += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == offset:
            before, size = self._gaps.pop(at - 1)
            offset, length = before, size + length
        insort(self._gaps, (offset, length))
