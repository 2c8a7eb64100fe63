"""The order of the rows of files in one epoch: blocks in random order, then rows in random order within windows.

A file is read block by block; a row group of Parquet is a block. Batch `b` of an epoch belongs to part
`b % parts`. A part is a contiguous piece of the blocks in their order, so that no two parts share a block, except for
those at their ends; each window of a part is permuted.

Invariants: each row is in one batch of the epoch; a batch depends on the files, the seed and its number alone, not on
the batches that were asked for before.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

#: Number of windows whose order is kept: several workers may ask for batches at different positions.
_WINDOWS = 8


class BlockOrder:
    """The rows of blocks of these sizes in the order of one epoch; thread-safe.

    rows     number of rows of each block; row numbers count through the blocks in their given order
    size     number of rows in a batch
    window   number of rows of a part that are permuted together; 0 leaves blocks and rows in their order
    parts    number of parts, at least 1
    seed     seed of the order
    on_next  called with the blocks of a window and with those of the next one of its part, when its rows are asked for
    """

    def __init__(
        self,
        rows: Any,
        size: int,
        window: int,
        parts: int,
        seed: Sequence[int],
        on_next: Callable[[Sequence[int], Sequence[int]], None],
    ) -> None:
        count = len(rows)
        blocks = np.random.default_rng(seed).permutation(count) if window else np.arange(count)
        self._blocks, self._size, self._parts, self._seed, self._on_next = blocks, size, parts, tuple(seed), on_next
        #: The first row of each block, by its number; and the first position of each block in this order.
        self._first = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        self._position = np.concatenate([[0], np.cumsum(np.asarray(rows, np.int64)[blocks])])
        self._count = int(self._first[-1])
        self._is_permuted, self._window = bool(window), max(size, window)
        in_epoch = -(-self._count // size)
        each = np.array([size * len(range(part, in_epoch, parts)) for part in range(parts)], np.int64)
        if in_epoch:
            each[(in_epoch - 1) % parts] -= size * in_epoch - self._count
        #: The first position of each part.
        self._part = np.concatenate([[0], np.cumsum(each)])
        self._known: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, of: slice) -> Any:
        """Return the rows of one batch, whose first position in the epoch is a multiple of `size`, i64[rows]."""
        number = of.start // self._size
        part, start = number % self._parts, number // self._parts * self._size
        in_part = int(self._part[part + 1] - self._part[part])
        stop = min(start + self._size, in_part)
        windows = range(start // self._window, (stop - 1) // self._window + 1)
        pieces = []
        for window in windows:
            first = window * self._window
            pieces.append(self._rows(part, window)[max(start, first) - first : stop - first])
        return np.concatenate(pieces)

    def _rows(self, part: int, window: int) -> Any:
        """Return the rows of one window of a part in their order."""
        with self._lock:
            rows = self._known.pop((part, window), None)
            if rows is None:
                rows = self._drawn(part, window)
            self._known[part, window] = rows
            while len(self._known) > _WINDOWS:
                self._known.popitem(last=False)
        self._on_next(self._blocks_of(part, window), self._blocks_of(part, window + 1))
        return rows

    def _range(self, part: int, window: int) -> tuple[int, int]:
        """Return the first position of a window, and the one after its last; equal ones after the end of the part."""
        first, stop = int(self._part[part]), int(self._part[part + 1])
        return min(first + window * self._window, stop), min(first + (window + 1) * self._window, stop)

    def _blocks_of(self, part: int, window: int) -> list[int]:
        first, stop = self._range(part, window)
        if first == stop:
            return []
        inside = range(
            int(np.searchsorted(self._position, first, "right")) - 1, int(np.searchsorted(self._position, stop, "left"))
        )
        return [int(self._blocks[one]) for one in inside]

    def _drawn(self, part: int, window: int) -> Any:
        first, stop = self._range(part, window)
        positions = np.arange(first, stop)
        if self._is_permuted:
            positions = np.random.default_rng((*self._seed, part, window)).permutation(positions)
        inside = np.searchsorted(self._position, positions, "right") - 1
        return self._first[self._blocks[inside]] + positions - self._position[inside]
