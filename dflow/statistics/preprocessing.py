"""Layers made of statistics: normalisation, and the positions of names in a vocabulary, with variables for both.

The variables are saved, exported and restored as others are, and no optimizer has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.statistics.column_statistics import ColumnStatistics
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller
from dflow.tracing.state.resources import Variable
from dflow.tracing.wide_ids import WideIds, wide_ids


class Normalization:
    """Shifts and scales a column to the mean 0 and the deviation 1, by its statistics; as Keras's layer of this name.

    `variables`  "mean" and "deviation", f32 with the shape of a row, for `dflow.save` and the like; created where the
                 surrounding context says, such as `strategy.variables()`
    """

    def __init__(self, statistics: ColumnStatistics, *, name: str) -> None:
        """Make the variables `name`/mean and `name`/deviation. Raises InputError for a column without a mean."""
        if statistics.mean is None:
            raise InputError(
                f"Normalization {name!r}: expected statistics of numbers, got those of {statistics.kind}s",
                "give those of a column of numbers: statistics(data)[name]",
                at=caller(),
            )
        mean = np.asarray(statistics.mean, np.float32)
        deviation = np.asarray(statistics.deviation, np.float32)
        self.variables: Mapping[str, Variable] = {
            "mean": Variable(lambda: jnp.asarray(mean), name=f"{name}/mean", trainable=False),
            "deviation": Variable(lambda: jnp.asarray(deviation), name=f"{name}/deviation", trainable=False),
        }

    def __call__(self, values: Any) -> jax.Array:
        """Return (values - mean) / deviation as f32; a column of one value becomes 0."""
        deviation = self.variables["deviation"].read()
        shifted = jnp.asarray(values, jnp.float32) - self.variables["mean"].read()
        scaled: jax.Array = shifted / jnp.where(deviation > 0, deviation, 1)
        return scaled


class StringLookup:
    """Gives strings, or integers of 64 bits, their positions in a vocabulary, for an `Embedding` of `len(lookup)` rows.

    Position 0 is for all others; the first value has 1. As Keras's layer of this name it also works in an export, whose
    callers then give names.

    `names`      the vocabulary
    `variables`  "high", "low" and "position", the hashes of the names in order, and their positions. A step that reads
                 them from another task receives 12 bytes for each name: for a large vocabulary use a table with one,
                 `dflow.Embedding(..., vocabulary=dflow.Vocabulary())`
    """

    def __init__(self, vocabulary: Iterable[Any], *, name: str) -> None:
        """Make the variables `name`/high and so on. Raises InputError for an empty vocabulary, or a name twice."""
        self.names = list(vocabulary)
        if not self.names:
            raise InputError(f"StringLookup {name!r}: expected names, got none", "give the vocabulary", at=caller())
        ids = wide_ids(self.names)
        both = np.asarray(ids.high, np.uint64) << np.uint64(32) | np.asarray(ids.low, np.uint64)
        order = np.argsort(both, kind="stable")
        if (same := np.flatnonzero(np.diff(both[order]) == 0)).size:
            one, other = (self.names[order[same[0] + step]] for step in (0, 1))
            raise InputError(
                f"StringLookup {name!r}: expected each name once, got {one!r} and {other!r}, which have one hash",
                "leave one of them out",
                at=caller(),
            )
        columns = {"high": ids.high[order], "low": ids.low[order], "position": (order + 1).astype(np.int32)}
        self.variables: Mapping[str, Variable] = {
            part: Variable(_constant(column), name=f"{name}/{part}", trainable=False)
            for part, column in columns.items()
        }

    def __len__(self) -> int:
        """Number of positions: that of the names and one."""
        return len(self.names) + 1

    def __call__(self, ids: Any) -> jax.Array:
        """Return positions, i32 with the shape of `ids`: strings or integers, also as arguments of traced code."""
        ids = ids if isinstance(ids, WideIds) else wide_ids(ids)
        high, low, position = (self.variables[part].read() for part in ("high", "low", "position"))
        wanted_high, wanted_low = jnp.asarray(ids.high), jnp.asarray(ids.low)
        first = jnp.zeros(ids.shape, jnp.int32)
        end = jnp.full(ids.shape, len(self.names), jnp.int32)
        for _ in range(len(self.names).bit_length()):
            middle = jnp.minimum((first + end) // 2, len(self.names) - 1)
            is_same = high[middle] == wanted_high
            is_before = (high[middle] < wanted_high) | (is_same & (low[middle] < wanted_low))
            first, end = jnp.where(is_before, middle + 1, first), jnp.where(is_before, end, middle)
        place = jnp.minimum(first, len(self.names) - 1)
        found: jax.Array = jnp.where((high[place] == wanted_high) & (low[place] == wanted_low), position[place], 0)
        return found


def _constant(column: Any) -> Any:
    return lambda: jnp.asarray(column)
