"""Statistics of one column, from parts that are merged in any order: moments, a sample for quantiles, a vocabulary.

Invariants: the count, the minimum, the maximum, the sample and, up to its limit, the vocabulary are the same for any
division of the rows; mean and deviation are but for rounding, by the method of Chan et al. A value has its place in the
sample by its row, so that the sample of a whole is that of its parts.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.source import caller


class ColumnStatistics(msgspec.Struct):
    """Statistics of one column; those of a column of arrays have the shape of one row, from the fourth line on.

    `rows`       number of rows, the rows without a value included
    `kind`       "number", "time", "string" or "bytes"
    `sample`     largest number of values that are kept for quantiles: up to it they are exact
    `distinct`   largest number of distinct values that are counted: up to it the counts are exact
    `count`      number of values, without the missing ones
    `mean`       None for strings and times
    `minimum`    None for strings, and without values
    `maximum`    as `minimum`
    `count_error`  bound on the error of a count of the vocabulary, which is never too high
    """

    rows: int = 0
    kind: str = "number"
    sample: int = 1 << 18
    distinct: int = 1 << 20
    counts_values: bool = False
    count: Any = 0
    mean: Any = None
    squares: Any = None
    minimum: Any = None
    maximum: Any = None
    count_error: int = 0
    #: The values of the sample, one row each, and the places that decided which rows are in the sample.
    values: Any = None
    places: Any = None
    counts: Counter[Any] = msgspec.field(default_factory=Counter)

    @property
    def missing(self) -> Any:
        """Number of missing values: NaN, NaT, None and nulls."""
        return self.rows - self.count

    @property
    def deviation(self) -> Any:
        """The standard deviation of the values, with their count as the divisor; None for strings and times."""
        return None if self.squares is None else np.sqrt(self.squares / np.maximum(self.count, 1))[()]

    @property
    def is_exact(self) -> bool:
        """Whether quantiles are exact: the sample has all values."""
        return self.values is None or self.rows <= self._limit

    def quantile(self, share: Any) -> Any:
        """Return quantiles, f64 with the shape of `share` (0 to 1) and that of a row, interpolated as `numpy.quantile`.

        They are exact up to `sample` values. Of more they are those of a uniform sample: the share of the values below
        is off by at most 0.5 / sqrt(`sample`) in the standard deviation, which is 0.1% by default. Raises InputError
        for strings, times and without values.
        """
        if self.values is None or not np.all(self.count):
            raise InputError(
                f"quantile: expected a column of numbers with values, got one of {self.kind}s, {self.count} of them",
                "see statistics(data)[name].count",
                at=caller(),
            )
        return np.nanquantile(self.values, share, axis=0)

    def vocabulary(self, size: int | None = None, *, at_least: int = 1) -> list[Any]:
        """Return the values from the most frequent on, equal counts in the order of values.

        size      largest number of values; None for all
        at_least  smallest count of a value
        raises    InputError for a column whose values were not counted
        """
        if not self.counts_values:
            raise InputError(
                f"vocabulary: expected a column whose values were counted, got one of {self.kind}s",
                "name it: dflow.data.statistics(data, vocabularies=[name])",
                at=caller(),
            )
        ranked = sorted(self.counts.items(), key=lambda one: (-one[1], one[0]))
        return [value for value, count in ranked[:size] if count >= at_least]

    @property
    def _limit(self) -> int:
        """Largest number of rows in the sample."""
        width = 1 if self.values is None else max(1, int(np.prod(self.values.shape[1:])))
        return max(1, self.sample // width)

    def add(self, values: Any, missing: Any, places: Any) -> None:
        """Add rows: their values, whether each is missing, and random numbers of the rows."""
        part = ColumnStatistics(
            rows=len(values), kind=self.kind, sample=self.sample, distinct=self.distinct,
            counts_values=self.counts_values,
        )  # fmt: skip
        if self.counts_values:
            part.counts = Counter(values[~missing].ravel().tolist())
        if self.kind in ("string", "bytes"):
            part.count = int((~missing).sum())
        elif len(values):
            part._measure(values, missing, places)
        self.merge(part)

    def _measure(self, values: Any, missing: Any, places: Any) -> None:
        there = ~missing
        self.count = there.sum(axis=0)
        lowest, highest = _ends(values.dtype)
        if values[there].size:
            self.minimum = np.where(there, values, highest).min(axis=0)
            self.maximum = np.where(there, values, lowest).max(axis=0)
        if self.kind == "time":
            return
        numbers = np.where(there, values, 0).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            self.mean = numbers.sum(axis=0) / np.maximum(self.count, 1)
            self.squares = (np.where(there, numbers - self.mean, 0) ** 2).sum(axis=0)
        is_row = there.reshape(len(values), -1).any(axis=1)
        self.values, self.places = np.where(there, numbers, np.nan)[is_row], places[is_row]

    def merge(self, other: ColumnStatistics) -> None:
        """Add the rows that `other` is of."""
        self.rows += other.rows
        if other.mean is not None:
            self._merge_moments(other)
        self.count = self.count + other.count
        for name, least in (("minimum", np.minimum), ("maximum", np.maximum)):
            mine, its = getattr(self, name), getattr(other, name)
            setattr(self, name, its if mine is None else mine if its is None else least(mine, its))
        self._merge_counts(other)
        if other.values is not None:
            self.values = other.values if self.values is None else np.concatenate([self.values, other.values])
            self.places = other.places if self.places is None else np.concatenate([self.places, other.places])
            self._trim(2 * self._limit)

    def _merge_moments(self, other: ColumnStatistics) -> None:
        """Add moments as Chan, Golub and LeVeque (1979) do."""
        if self.mean is None:
            self.mean, self.squares = other.mean, other.squares
            return
        total = np.maximum(self.count + other.count, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = other.mean - self.mean
            self.mean = self.mean + apart * (other.count / total)
            self.squares = self.squares + other.squares + apart**2 * (self.count * (other.count / total))

    def _merge_counts(self, other: ColumnStatistics) -> None:
        """Add counts; of too many values those of the rarest are dropped (Misra and Gries)."""
        self.counts.update(other.counts)
        self.count_error += other.count_error
        if len(self.counts) <= 2 * self.distinct:
            return
        self._drop_rare()

    def _drop_rare(self) -> None:
        if len(self.counts) > self.distinct:
            least = sorted(self.counts.values(), reverse=True)[self.distinct]
            self.count_error += least
            self.counts = Counter({value: count - least for value, count in self.counts.items() if count > least})

    def _trim(self, most: int) -> None:
        """Keep of more than `most` rows of the sample those with the smallest places, up to the limit."""
        if len(self.places) > most:
            kept = np.argpartition(self.places, self._limit)[: self._limit]
            self.values, self.places = self.values[kept], self.places[kept]

    def finish(self) -> None:
        """Bring the sample and the vocabulary to their limits."""
        if self.places is not None:
            self._trim(self._limit)
        self._drop_rare()

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in ("count", "missing", "mean", "deviation", "minimum", "maximum")}
        texts = [f"{name} {_short(value)}" for name, value in shown.items() if value is not None]
        if self.counts_values:
            texts.append(f"{len(self.counts)} distinct")
        return f"<{self.kind}: {', '.join(texts)}>"


def kind_of(dtype: Any, name: str) -> str:
    """Return the kind of a column of numbers or times. Raises InputError for complex numbers."""
    if dtype.kind == "c":
        raise InputError(
            f"statistics: {name}: expected real numbers, got {dtype}", "give its real and imaginary parts", at=caller()
        )
    return "time" if dtype.kind in "mM" else "number"


def _ends(dtype: Any) -> tuple[Any, Any]:
    """Return a value below all others of a dtype, and one above."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind in "mM":
        return (np.array(end, np.int64).view(dtype)[()] for end in (-(2**63) + 1, 2**63 - 1))  # type: ignore[return-value]
    return -np.inf, np.inf


def _short(value: Any) -> str:
    if np.shape(value):
        return f"{np.shape(value)}"
    return f"{value:.6g}" if isinstance(value, float | np.floating) else str(value)


def encoded(parts: Mapping[str, ColumnStatistics]) -> bytes:
    """Return statistics as bytes, for another process."""
    return msgspec.msgpack.encode({name: _fields(part) for name, part in parts.items()}, enc_hook=_array_fields)


def decoded(data: bytes) -> dict[str, ColumnStatistics]:
    """Return the statistics of `encoded`."""
    read: dict[str, dict[str, Any]] = msgspec.msgpack.decode(data)
    return {name: _column(fields) for name, fields in read.items()}


def _column(fields: dict[str, Any]) -> ColumnStatistics:
    made = {name: _array(value) if isinstance(value, dict) else value for name, value in fields.items()}
    return ColumnStatistics(**made | {"counts": Counter(dict(fields["counts"]))})


def _fields(part: ColumnStatistics) -> dict[str, Any]:
    made = {name: getattr(part, name) for name in part.__struct_fields__}
    return made | {"counts": list(part.counts.items())}


@functools.singledispatch
def _array_fields(value: Any) -> Any:
    array = np.asarray(value)
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _array(fields: Mapping[str, Any]) -> Any:
    array = np.frombuffer(fields["data"], np.dtype(fields["dtype"])).reshape(fields["shape"])
    return array[()] if not fields["shape"] else array
