"""Forms of a column other than one NumPy array: rows converted when they are taken, codes, and lists of any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class LazyColumn:
    """A column that stays where it is, such as in a file: only the rows of a batch are read and converted.

    may_miss  whether some of its values can be missing
    """

    def __init__(self, take: Callable[[Any], Any], shape: tuple[int, ...], may_miss: bool = False) -> None:
        self._take, self.shape, self.may_miss = take, shape, may_miss

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Any:
        """Return the rows of these numbers as a NumPy array."""
        return self._take(np.asarray(rows))


@dataclass(frozen=True)
class CategoryCodes:
    """A column of categories: the position in `names` of each value, as an array or a `LazyColumn`."""

    codes: Any
    names: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.codes),)


class RaggedColumn:
    """A column whose rows are arrays of several lengths: all of them one after another, and the length of each."""

    def __init__(self, flat: Any, lengths: Any) -> None:
        self.flat, self.lengths = flat, lengths.astype(np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self.shape: tuple[int, ...] = (len(lengths),)

    def __len__(self) -> int:
        return len(self.lengths)

    def padded(self, rows: Any, length: int, value: Any) -> Any:
        """Return these rows, each padded at its end with `value` to one length: (rows, length, *rest)."""
        places = np.arange(length)
        is_there = places < self.lengths[rows][:, None]
        filled = np.full((len(rows), length, *self.flat.shape[1:]), value, self.flat.dtype)
        filled[is_there] = self.flat[(self._starts[rows][:, None] + places)[is_there]]
        return filled


def masked(values: Any, missing: Any) -> Any:
    """Return the values as a masked array if some rows are missing."""
    if not missing.any():
        return values
    mask = np.broadcast_to(missing.reshape(-1, *[1] * (values.ndim - 1)), values.shape)
    return np.ma.MaskedArray(values, mask)
