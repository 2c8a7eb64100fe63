"""An array that several variables divide, on one task or several, written to one location.

Why: tasks that write to one chunk need a store with conditional writes, which not every store has. So each chunk is
written by one task, which asks the others for their elements. The chunks are about as large as the parts, or
smaller, so that a task has most elements of its chunks, unless neighbouring rows are on different tasks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from dflow.lowering.files.mapped_chunks import rows_of_whole_pages
from dflow.lowering.files.zarr import stored_type
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice

#: Largest size of a chunk in bytes.
_CHUNK_BYTES = 64 << 20

#: The first index and the end, along each dimension.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class DividedArray:
    """The chunks of an array that one process writes.

    `type`   type of the whole
    `parts`  the indices that each variable has, in an order that is the same in every process; each index once
    `here`   numbers of the parts whose chunks this process writes
    `piece`  returns the elements within some bounds of the part of a number, with the dtype that is stored
    """

    type: ArrayType
    parts: Sequence[AxisSlice]
    here: Collection[int]
    piece: Callable[[int, Bounds], npt.NDArray[Any]]

    #: Whether other processes may write other chunks.
    is_shared: ClassVar[bool] = True

    def chunk_shape(self) -> tuple[int, ...]:
        """Return the shape of the largest part if its rows were neighbours, cut along its first dimensions."""
        dtype, whole = stored_type(self.type)
        chunk = [max(1, size) for size in whole]
        axis = self.parts[0].axis
        chunk[axis] = -(-chunk[axis] // len(self.parts))
        for dim, size in enumerate(chunk):
            rows = max(1, _CHUNK_BYTES // (dtype.itemsize * math.prod(chunk[dim + 1 :])))
            chunk[dim] = -(-size // -(-size // rows))
            if rows >= size:
                break
        row_bytes = dtype.itemsize * math.prod(chunk[1:])
        chunk[0] = min(max(1, whole[0]), rows_of_whole_pages(chunk[0], row_bytes, dtype.itemsize * math.prod(whole)))
        return tuple(chunk)

    def pieces(self) -> Iterator[tuple[Any, npt.NDArray[Any]]]:
        """Yield the chunks that this process writes, and their indices."""
        _, shape = stored_type(self.type)
        grid = [
            [(first, min(first + size, end)) for first in range(0, end, size)]
            for size, end in zip(self.chunk_shape(), shape, strict=True)
        ]
        axis = self.parts[0].axis
        for number, along in enumerate(grid[axis]):
            if self._writer(number, len(grid[axis]), along) in self.here:
                for bounds in itertools.product(*grid[:axis], [along], *grid[axis + 1 :]):
                    yield tuple(itertools.starmap(slice, bounds)), self._chunk(bounds)

    def _writer(self, number: int, count: int, along: tuple[int, int]) -> int:
        """Return the number of the part whose process writes the chunks of these indices, the `number`-th of `count`.

        If parts have neighbouring indices, it is the one that has the index in the middle: of uneven parts too, few
        elements come from other processes.
        """
        if self.parts[0].step != 1:
            return number * len(self.parts) // count
        middle = sum(along) // 2
        return next(
            position for position, part in enumerate(self.parts) if part.start <= middle < part.start + part.size
        )

    def _chunk(self, bounds: Bounds) -> npt.NDArray[Any]:
        axis = self.parts[0].axis
        first, end = bounds[axis]
        chunk = None
        for number, part in enumerate(self.parts):
            inner = part.before(first), part.before(end)
            if inner[0] == inner[1]:
                continue
            piece = self.piece(number, (*bounds[:axis], inner, *bounds[axis + 1 :]))
            count = inner[1] - inner[0]
            if count == end - first:
                return piece
            if chunk is None:
                chunk = np.empty([stop - start for start, stop in bounds], piece.dtype)
            chunk[AxisSlice(axis, part.start + part.step * inner[0] - first, count, part.step).slices] = piece
        assert chunk is not None  # each index is in a part
        return chunk
