"""Saved arrays to read: a folder of arrays, a checkpoint of Orbax, or a file of safetensors."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.lowering.files.object_path import Location
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice


@dataclass(frozen=True)
class SavedArrays(ABC):
    """An opened folder or file: the types of its arrays by name, and the metadata that was written beside them.

    `id`  differs between any two that were ever at this path
    """

    path: Location
    id: str
    types: Mapping[str, ArrayType]
    metadata: Mapping[str, Any]

    @abstractmethod
    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the named arrays, each as a JAX array of its sharding, or as a NumPy array where that is None."""

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        """Yield parts of the named arrays, in order; here each array is read whole."""
        for name, parts in itertools.groupby(wanted, key=lambda one: one[0]):
            [(_, whole)] = self.each({name: None})
            yield from (np.array(part.of(whole)) for _, part in parts)

    def rows(self, name: str, whole: AxisSlice, most_bytes: int) -> Iterator[tuple[int, Any]]:
        """Yield a part of an array in pieces of at most `most_bytes`, each with its first index in the part.

        A part of all rows, and one row of more bytes, are one piece.
        """
        type = self.types[name]
        row_bytes = type.size_bytes // max(1, type.shape[0])
        rows = max(1, most_bytes // max(1, row_bytes)) if whole.axis == 0 else whole.size
        starts = range(0, whole.size, rows) if whole.axis == 0 else (0,)
        sizes = [min(rows, whole.size - start) for start in starts]
        first = [whole.start + start * whole.step for start in starts]
        parts = [whole._replace(start=start, size=size) for start, size in zip(first, sizes, strict=True)]
        yield from zip(starts, self.parts([(name, part) for part in parts]), strict=True)

    @abstractmethod
    def is_replaced(self) -> bool:
        """Return whether another one, or none, is at the path by now."""
