"""`dflow.data.statistics`: statistics of each column of a data set in one pass, by one process or by several.

Invariant: the rows are divided into pieces by their numbers alone. So a piece has the same statistics in each process,
and a piece whose task died is measured again by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from dflow.distributed.cluster.cluster import Cluster
from dflow.input.batching import Batches, is_indexed
from dflow.input.column_options import NAMES, ColumnOptions, key_of, missing_of
from dflow.input.columns import Columns, columns_of
from dflow.input.numpy_batches import NumpyBatches
from dflow.input.reading import FileRows
from dflow.statistics.column_statistics import ColumnStatistics, kind_of
from dflow.statistics.shared_parts import Measurements, merged_parts
from dflow.tracing.errors import InputError
from dflow.tracing.near_names import did_you_mean, suggests_keywords
from dflow.tracing.source import caller

#: Rows that are measured together.
_PIECE = 1 << 16


@suggests_keywords
def statistics(
    data: Any,
    *,
    vocabularies: Sequence[Hashable] = (),
    sample: int = 1 << 18,
    distinct: int = 1 << 20,
    cluster: Cluster | None = None,
    name: str | None = None,
) -> Statistics:
    """Return the statistics of each column of a data set, in one pass over its rows.

    data          a frame or other columns, as for `dflow.data.batches`, also with missing values; the result of
                  `batches`, whose rows are taken once and as it converts them, but for categories, which are names; or
                  an iterable of batches, each a pytree of arrays with a row for each example
    vocabularies  columns of integers whose values are counted too; those of strings and bytes are
    sample        largest number of values of a column that are kept for quantiles, 8 bytes each
    distinct      largest number of distinct values of a column that are counted. Of more the counts are too low, each
                  by at most the column's `count_error`, which is at most the number of values / `distinct`
    cluster, name the result of `dflow.connect()`, and a name that is the same on every worker and new for each call:
                  then the workers share the rows, each takes parts of them, those of a worker that dies are measured by
                  others, and all get the same result. `data` is then the same on each worker, and has columns or
                  batches by number. The parts stay on the parameter tasks, so a restarted worker gets the result too

    Raises InputError for a column without numbers, times, strings or bytes, for `vocabularies` that are no columns, for
    batches that differ in their columns, and, with `cluster`, for batches without numbers and for a name that this
    process has used before; DeviceError for a cluster
    without parameter tasks; and what the iterable raises.
    """
    if (cluster is None) != (name is None):
        raise InputError(
            f"statistics: expected cluster= and name= together, got {'name' if cluster is None else 'cluster'}= alone",
            'give both, for instance name="clicks", or none of them',
            at=caller(),
        )
    if cluster is not None and name is not None:
        cluster.part(Measurements).begin(name)
    source = _source(data)
    measure = _Measurement(frozenset(vocabularies), sample, distinct)
    if cluster is None or name is None or cluster.is_standalone:
        for number, piece in enumerate(source.all() if source.count is None else map(source.of, range(source.count))):
            measure.add(number, piece)
        return _result(measure.named(), measure.keys, vocabularies)
    if source.count is None:
        raise InputError(
            f"statistics: expected columns or batches by number to share, got a {type(data).__name__}",
            "give dflow.data.batches(data, size) of columns or a sequence, or leave cluster= and name= out",
            at=caller(),
        )

    def part(numbers: Iterable[int]) -> dict[str, ColumnStatistics]:
        mine = _Measurement(measure.vocabularies, sample, distinct)
        for number in numbers:
            mine.add(number, source.of(number))
        return mine.named()

    keys = source.of(0)[0] if source.count else []
    return _result(merged_parts(cluster, f"statistics {name}", source.count, part), keys, vocabularies)


def _result(
    columns: Mapping[str, ColumnStatistics], keys: Sequence[Any], vocabularies: Sequence[Hashable]
) -> Statistics:
    if unknown := [one for one in vocabularies if one not in keys]:
        raise InputError(
            f"statistics: vocabularies: expected names of columns, got {unknown[0]!r}",
            did_you_mean(str(unknown[0]), map(str, keys), f"the columns are {', '.join(map(repr, keys))}"),
            at=caller(),
        )
    return Statistics({key: columns[str(position)] for position, key in enumerate(keys)})


class Statistics(Mapping[Any, ColumnStatistics]):
    """Statistics of the columns of a data set, by the column's name; in nested data by the tuple of names to it."""

    def __init__(self, columns: Mapping[Any, ColumnStatistics]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, key: Any) -> ColumnStatistics:
        found: ColumnStatistics | None = self._columns.get(key)
        if found is None:
            known = ", ".join(map(repr, self._columns))
            raise KeyError(f"statistics: {key!r}: {did_you_mean(str(key), map(str, self._columns), known)}")
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return "\n".join(f"{key}: {column!r}" for key, column in self._columns.items()) or "no columns"


#: The keys of columns, and their values for some rows, masked where they are missing.
_Rows = tuple[Sequence[Any], Sequence[Any]]


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a data set: `count` of them by number, `of`; or `all`, one after another, and a count of None."""

    count: int | None
    of: Callable[[int], _Rows]
    all: Callable[[], Iterable[_Rows]]


def _source(data: Any) -> _Pieces:
    options = ColumnOptions(categories=NAMES, keeps_missing=True)
    if isinstance(data, Batches):
        categories = data.options.categories if isinstance(data.options.categories, Mapping) else NAMES
        options = replace(data.options, categories=categories, keeps_missing=True)
        columns = columns_of(data.data, (), options)
        if not isinstance(columns, Columns):
            data = Batches(data.data, data.size, False, 0, 1, False, False, data.options)
    else:
        if hasattr(data, "boundaries"):
            raise InputError(
                "statistics: expected rows, got batches of padded sequences, whose padding would be counted",
                "give the data that they are of",
                at=caller(),
            )
        columns = None if isinstance(data, list) else columns_of(data, (), options)
        if isinstance(columns, FileRows):
            data = Batches(data, _PIECE, False, 0, 1, False, False, ColumnOptions())
    if isinstance(columns, Columns):
        return _of_columns(columns)

    def of_batch(batch: Any) -> _Rows:
        found = columns_of(batch, (), ColumnOptions(categories=NAMES, keeps_missing=True))
        if not isinstance(found, Columns):
            raise InputError(
                f"statistics: expected batches of arrays, got a {type(batch).__name__}",
                "give dflow.data.batches(data, size) for a data set of elements",
                at=caller(),
            )
        return _keys(found), [column[np.arange(found.count)] for column in found.values]

    counted = data.data if isinstance(data, Batches) else data.loader if isinstance(data, NumpyBatches) else data
    count = len(data) if isinstance(counted, FileRows) or is_indexed(counted) else None
    return _Pieces(count, lambda number: of_batch(data[number]), lambda: map(of_batch, data))


def _of_columns(columns: Columns) -> _Pieces:
    keys = _keys(columns)

    def of(number: int) -> _Rows:
        rows = np.arange(number * _PIECE, min((number + 1) * _PIECE, columns.count))
        return keys, [column[rows] for column in columns.values]

    return _Pieces(max(1, -(-columns.count // _PIECE)), of, lambda: ())


def _keys(columns: Columns) -> list[Any]:
    tree = columns.tree.unflatten(range(len(columns.values)))
    return [key_of(tuple(map(_part, path))) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _part(part: Any) -> Any:
    return getattr(part, "key", getattr(part, "idx", getattr(part, "name", None)))


class _Measurement:
    """The statistics of the pieces that were added."""

    def __init__(self, vocabularies: frozenset[Any], sample: int, distinct: int) -> None:
        self.vocabularies, self._sample, self._distinct = vocabularies, sample, distinct
        self._columns: dict[Any, ColumnStatistics] = {}

    def add(self, number: int, piece: _Rows) -> None:
        """Add the rows of piece `number`."""
        keys, arrays = piece
        if self._columns and list(self._columns) != list(keys):
            raise InputError(
                f"statistics: expected batches of the same columns, got {list(self._columns)} and {list(keys)}",
                "give each batch the same entries",
                at=caller(),
            )
        for position, (key, array) in enumerate(zip(keys, arrays, strict=True)):
            places = np.random.default_rng((number, position)).random(len(array))
            missing, values = missing_of(array), np.ma.getdata(array)
            self._column(key, values, missing).add(values, missing, places)

    def _column(self, key: Any, values: Any, missing: Any) -> ColumnStatistics:
        known = self._columns.get(key)
        if values.dtype.kind in "OSU":
            present = {type(value) for value in values[~missing].ravel()[:1]}
            kind = "bytes" if any(issubclass(one, bytes) for one in present) else "string"
            kind = known.kind if known is not None and not present else kind
        else:
            kind = kind_of(values.dtype, f"column {key!r}")
        if known is None:
            counts = kind in ("string", "bytes") or key in self.vocabularies
            known = ColumnStatistics(kind=kind, sample=self._sample, distinct=self._distinct, counts_values=counts)
            self._columns[key] = known
        elif known.kind != kind:
            raise InputError(
                f"statistics: column {key!r}: expected {known.kind}s in each batch, got {kind}s",
                "convert the column to one type",
                at=caller(),
            )
        return known

    @property
    def keys(self) -> list[Any]:
        return list(self._columns)

    def named(self) -> dict[str, ColumnStatistics]:
        """Return the statistics of the rows that were added, by the position of the column."""
        for column in self._columns.values():
            column.finish()
        return {str(position): column for position, column in enumerate(self._columns.values())}
