"""Saved arrays to read: a folder of arrays, a checkpoint of Orbax or TensorFlow, or a file of another library."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.lowering.files.object_path import Location
from dflow.lowering.files.whole_arrays import placed
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

    @property
    def axes(self) -> Mapping[str, tuple[int, ...]]:
        """The arrays that are read transposed, each with the order of its stored dimensions."""
        return {}

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


@dataclass(frozen=True)
class TransposedArrays(SavedArrays):
    """Saved arrays, with the arrays named in `_order` transposed to that order of dimensions."""

    _stored: SavedArrays
    _order: Mapping[str, tuple[int, ...]]

    @property
    def axes(self) -> Mapping[str, tuple[int, ...]]:
        return self._order

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        read = {name: None if name in self._order else sharding for name, sharding in shardings.items()}
        for name, value in self._stored.each(read):
            turned = self._turned(name, value)
            is_read = name not in self._order or shardings[name] is None
            yield name, turned if is_read else placed(jnp.array(turned), shardings[name])

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        stored = [
            (name, part._replace(axis=self._order[name][part.axis]) if name in self._order else part)
            for name, part in wanted
        ]
        for (name, _), value in zip(wanted, self._stored.parts(stored), strict=True):
            yield self._turned(name, value)

    def is_replaced(self) -> bool:
        stored = self._stored
        return stored.is_replaced()

    def _turned(self, name: str, value: Any) -> Any:
        return np.ascontiguousarray(np.transpose(value, self._order[name])) if name in self._order else value


def transposed(files: SavedArrays, axes: Mapping[str, tuple[int, ...]]) -> SavedArrays:
    """Return saved arrays, with those in `axes` transposed as by `numpy.transpose`; the orders fit their arrays."""
    if not axes:
        return files
    types = dict(files.types)
    for name, order in axes.items():
        types[name] = replace(types[name], shape=tuple(types[name].shape[axis] for axis in order))
    return TransposedArrays(files.path, files.id, types, files.metadata, files, axes)
