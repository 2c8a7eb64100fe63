"""`dflow.data.bucket_by_sequence_length`: batches of sequences of like length, padded to one of a few lengths.

Invariants: each element is in one batch of an epoch. A batch has one of as many shapes as there are boundaries. The
batches of rows or of a sequence are determined by the seed and the epoch, so a batch is also found by its number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dflow.calls.trace_log import expect_sizes
from dflow.input.batching import drawn, is_count, is_indexed, over_epochs, own, stacked
from dflow.input.column_forms import LazyColumn, RaggedColumn
from dflow.input.column_options import CODES, ColumnOptions, key_of
from dflow.input.columns import Columns, columns_of
from dflow.input.padding import MASK, filled_up, with_entries
from dflow.input.reading import FileRows
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import InputError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller

#: Name of the entry with the lengths in batches that are dicts.
LENGTH = "length"


@suggests_keywords
def bucket_by_sequence_length(
    data: Any,
    sequences: Hashable | Sequence[Hashable],
    boundaries: Sequence[int],
    size: int,
    *,
    padding: Any = 0,
    shuffle: bool | int = False,
    seed: int = 0,
    epochs: int | None = 1,
    drop_remainder: bool = False,
    missing: Any = None,
    categories: Any = CODES,
) -> BucketedBatches:
    """Return an iterable over batches of `size` elements of similar length, with sequences padded at their ends.

    data        as for `dflow.data.batches`: columns, also of lists of several lengths, a sequence, or another iterable
    sequences   the columns, or entries of an element, that are padded: a name, a position in a tuple, () if an element
                is one array, or a list of these. An element's length is that of the longest of them, along axis 0
    boundaries  lengths of padded sequences, increasing. An element is padded to the smallest that is at least
                its length, so the batches have as many shapes as there are boundaries
    padding     the value at the ends: one, or a dict by sequence
    drop_remainder  whether to drop the batches of an epoch that do not fill up; by default their last element is
                repeated
    shuffle, seed, epochs, missing, categories  as for `dflow.data.batches`

    A dict gets two more entries: "length", int32 (size,), the length of each element, and, without `drop_remainder`,
    "mask", bool (size,), which is False where the last element is repeated. They are the last two entries of a tuple,
    and for other data a batch is the tuple of it and them.

    A batch is returned when it is full, and the partly filled batches at the end of the epoch. If the data are rows or
    a sequence, the result has `len()` and batches by number; for that each element of a sequence is read once.

    Raises InputError for an element longer than the last boundary, with its number; for a sequence that the data does
    not have; and as `dflow.data.batches`.
    """
    names = sequences if isinstance(sequences, list) else [sequences]
    bounds = _checked_boundaries(boundaries)
    for what, value in (("size", size), *([] if epochs is None else [("epochs", epochs)])):
        if not is_count(value):
            raise InputError(f"bucket_by_sequence_length: expected a whole number for {what}, from 1, got {value!r}")
    options = ColumnOptions(missing, categories, keeps_ragged=True)
    return BucketedBatches(data, tuple(names), bounds, size, padding, shuffle, seed, epochs, drop_remainder, options)


@dataclass(frozen=True, eq=False)
class BucketedBatches:
    """The result of `bucket_by_sequence_length`; each iteration over it starts from the beginning."""

    data: Any
    sequences: tuple[Any, ...]
    boundaries: Any
    size: int
    padding: Any
    shuffle: bool | int
    seed: int
    epochs: int | None
    drop_remainder: bool
    options: ColumnOptions
    _rows: _BucketRows | None = field(default=None, init=False, repr=False)
    #: The batches of the epochs that were asked for last: the bucket of each, and its rows.
    _plans: dict[int, list[tuple[int, Any]]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        expect_sizes(self.size, self.boundaries)
        columns = columns_of(self.data, (), self.options)
        if isinstance(columns, FileRows):
            raise InputError(
                "bucket_by_sequence_length: expected lists in memory, got rows of files, whose lists have one length",
                "state the lengths, dflow.data.read(paths, lengths={name: length}), and use dflow.data.batches",
                at=caller(),
            )
        if columns is not None:
            object.__setattr__(self, "_rows", _ColumnRows(columns, self))
        elif is_indexed(self.data):
            object.__setattr__(self, "_rows", _ElementRows(self))
        if self._rows is None and (self.shuffle is True or (self.epochs != 1 and iter(self.data) is self.data)):
            raise InputError(
                f"bucket_by_sequence_length: expected rows or a sequence for shuffle=True or several epochs, got a "
                f"{type(self.data).__name__}, whose elements come one by one",
                "give the size of a buffer to shuffle in, shuffle=1000, and one epoch",
                at=caller(),
            )
        if self._rows is not None and not isinstance(self.shuffle, bool):
            raise InputError(
                f"bucket_by_sequence_length: expected shuffle=True or False for rows, got {self.shuffle!r}",
                "give True, which shuffles all of them",
                at=caller(),
            )

    @property
    def categories(self) -> Mapping[Any, Any]:
        """The names of each column of codes, as for `Batches`."""
        return self._rows.categories if self._rows is not None else {}

    def __iter__(self) -> Iterator[Any]:
        return over_epochs(self._epoch, self.epochs)

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError when it is unknown."""
        if self.epochs is None or self._rows is None:
            raise TypeError("batches without end, or of elements that come one by one, have no len()")
        return self.epochs * self._in_epoch

    def __getitem__(self, number: int) -> Any:
        """Return a batch by its number, counted over all epochs. Raises IndexError after the last."""
        if self._rows is None:
            raise InputError(
                f"a batch by its number: expected rows or a sequence, got a {type(self.data).__name__}",
                "give a list or a frame, or iterate over the batches",
                at=caller(),
            )
        count = self._in_epoch
        if number < 0 or not count or (self.epochs is not None and number >= self.epochs * count):
            raise IndexError(f"a batch by its number: expected 0 or more and an existing one, got {number}")
        epoch, position = divmod(number, count)
        return self._batch(*self._plan(epoch)[position])

    def bucket_of(self, length: int, number: int) -> int:
        """Return the bucket of an element. Raises InputError with its number if it is too long."""
        if length > self.boundaries[-1]:
            raise InputError(
                f"bucket_by_sequence_length: element {number}: expected a length of at most {self.boundaries[-1]}, the "
                f"last boundary, got {length}",
                "give a larger boundary, or cut or leave out what is longer",
                at=caller(),
            )
        return int(np.searchsorted(self.boundaries, length))

    def padding_of(self, key: Any) -> Any:
        """Return the value at the ends of a sequence."""
        return self.padding.get(key, 0) if isinstance(self.padding, Mapping) else self.padding

    def padded(self, element: Any, bucket: int) -> Any:
        """Return an element of a stream or a sequence with its sequences padded."""
        boundary = int(self.boundaries[bucket])

        def of_leaf(path: Any, leaf: Any) -> Any:
            array = as_array(leaf)
            if (key := _key(path)) not in self.sequences:
                return np.array(array)  # an iterable may reuse its memory
            # NumPy makes floats of a list without values.
            dtype = array.dtype if array.size or not isinstance(leaf, list) else np.asarray(self.padding_of(key)).dtype
            filled = np.full((boundary, *array.shape[1:]), self.padding_of(key), dtype)
            filled[: len(array)] = array
            return filled

        return jax.tree_util.tree_map_with_path(of_leaf, element, is_leaf=_is_list)

    def length_of(self, element: Any) -> int:
        """Return the length of an element. Raises InputError if it lacks a sequence."""
        leaves = jax.tree_util.tree_flatten_with_path(element, is_leaf=_is_list)[0]
        lengths = {_key(path): len(leaf) for path, leaf in leaves if _key(path) in self.sequences}
        self.check_found(lengths, [_key(path) for path, _ in leaves])
        return max(lengths.values())

    def check_found(self, found: Iterable[Any], known: Sequence[Any]) -> None:
        """Raise InputError unless all sequences are found."""
        if lacking := [key for key in self.sequences if key not in set(found)]:
            raise InputError(
                f"bucket_by_sequence_length: sequences: expected entries of the data, got {lacking[0]!r}",
                f"its entries are {', '.join(map(repr, known[:20]))}",
                at=caller(),
            )

    def finished(self, batch: Any, lengths: Any) -> Any:
        """Return a batch of full size, with its lengths and its mask."""
        batch = with_entries(batch, {LENGTH: np.asarray(lengths, np.int32)})
        return batch if self.drop_remainder else filled_up(batch, len(lengths), self.size, MASK)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        if self._rows is not None:
            yield from (self._batch(bucket, rows) for bucket, rows in self._plan(epoch))
            return
        elements: Iterator[Any] = iter(self.data)
        if not isinstance(self.shuffle, bool):
            elements = drawn(map(own, elements), self.shuffle, np.random.default_rng((self.seed, epoch)))
        yield from self._streamed(elements)

    def _streamed(self, elements: Iterator[Any]) -> Iterator[Any]:
        waiting: list[list[tuple[Any, int]]] = [[] for _ in self.boundaries]
        for number, element in enumerate(elements):
            length = self.length_of(element)
            bucket = self.bucket_of(length, number)
            waiting[bucket].append((self.padded(element, bucket), length))
            if len(waiting[bucket]) == self.size:
                yield self._of_elements(waiting[bucket])
                waiting[bucket] = []
        if not self.drop_remainder:
            yield from (self._of_elements(rest) for rest in waiting if rest)

    def _of_elements(self, padded: Sequence[tuple[Any, int]]) -> Any:
        _, batch = stacked(padded[0][0], (element for element, _ in padded[1:]), self.size)
        return self.finished(batch, [length for _, length in padded])

    @cached_property
    def _in_epoch(self) -> int:
        counts = np.bincount(self._buckets, minlength=len(self.boundaries))
        return int((counts // self.size if self.drop_remainder else -(-counts // self.size)).sum())

    @cached_property
    def _buckets(self) -> Any:
        assert self._rows is not None
        return np.searchsorted(self.boundaries, self._rows.lengths)

    def _plan(self, epoch: int) -> list[tuple[int, Any]]:
        """Return the bucket and the rows of each batch of an epoch, in the order that they fill up."""
        if (plan := self._plans.get(epoch)) is not None:
            return plan
        buckets = self._buckets
        order = np.arange(len(buckets))
        if self.shuffle is True:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(buckets))
        found: list[tuple[int, int, Any]] = []
        for bucket in range(len(self.boundaries)):
            places = np.flatnonzero(buckets[order] == bucket)
            for start in range(0, len(places), self.size):
                group = places[start : start + self.size]
                if len(group) == self.size or not self.drop_remainder:
                    found.append((group[-1] if len(group) == self.size else len(order) + bucket, bucket, order[group]))
        plan = [(bucket, rows) for _, bucket, rows in sorted(found, key=lambda one: one[0])]
        # Steps of two epochs may run at the same time, on threads.
        for known in [known for known in list(self._plans) if abs(known - epoch) > 1]:
            self._plans.pop(known, None)
        self._plans[epoch] = plan
        return plan

    def _batch(self, bucket: int, rows: Any) -> Any:
        assert self._rows is not None
        return self.finished(self._rows.batch(rows, bucket), self._rows.lengths[rows])


class _BucketRows(ABC):
    """Rows of columns or elements of a sequence, with the length of each."""

    lengths: Any
    categories: Mapping[Any, Any]

    @abstractmethod
    def batch(self, rows: Any, bucket: int) -> Any:
        """Return these rows as a batch, with sequences padded to the boundary of the bucket."""

    def check(self, batches: BucketedBatches) -> None:
        for number in np.flatnonzero(self.lengths > batches.boundaries[-1])[:1]:
            batches.bucket_of(int(self.lengths[number]), int(number))


class _ColumnRows(_BucketRows):
    def __init__(self, columns: Columns, batches: BucketedBatches) -> None:
        self._columns, self._batches, self.categories = columns, batches, columns.categories
        tree = columns.tree.unflatten(range(len(columns.values)))
        self._keys = [_key(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        batches.check_found(self._keys, self._keys)
        lengths = []
        self._values: list[Any] = []
        for key, column in zip(self._keys, columns.values, strict=True):
            column = _as_ragged(column, key) if key in batches.sequences else column
            if key not in batches.sequences and isinstance(column, RaggedColumn):
                raise InputError(
                    f"bucket_by_sequence_length: column {key!r}: expected rows of one shape, got lists of several "
                    "lengths",
                    f"name it among the sequences: [{', '.join(map(repr, (*batches.sequences, key)))}]",
                    at=caller(),
                )
            self._values.append(column)
            if isinstance(column, RaggedColumn):
                lengths.append(column.lengths)
        self.lengths = np.max(lengths, axis=0)
        self.check(batches)

    def batch(self, rows: Any, bucket: int) -> Any:
        boundary = int(self._batches.boundaries[bucket])
        return self._columns.tree.unflatten(
            [
                column.padded(rows, boundary, self._batches.padding_of(key))
                if isinstance(column, RaggedColumn)
                else column[rows]
                for key, column in zip(self._keys, self._values, strict=True)
            ]
        )


class _ElementRows(_BucketRows):
    def __init__(self, batches: BucketedBatches) -> None:
        self._batches, self.categories = batches, {}
        self.lengths = np.array([batches.length_of(batches.data[row]) for row in range(len(batches.data))], np.int64)
        self.check(batches)

    def batch(self, rows: Any, bucket: int) -> Any:
        elements = (self._batches.padded(self._batches.data[int(row)], bucket) for row in rows)
        return stacked(next(elements), elements, len(rows))[1]


def _as_ragged(column: Any, key: Any) -> RaggedColumn:
    if isinstance(column, LazyColumn):
        column = column[np.arange(len(column))]
    if isinstance(column, np.ndarray) and column.ndim > 1:
        return RaggedColumn(column.reshape(-1, *column.shape[2:]), np.full(len(column), column.shape[1]))
    if not isinstance(column, RaggedColumn):
        raise InputError(
            f"bucket_by_sequence_length: column {key!r}: expected sequences, got one value in each row",
            "leave it out of the sequences",
            at=caller(),
        )
    return column


def _key(path: Any) -> Any:
    return key_of(tuple(getattr(part, "key", getattr(part, "idx", getattr(part, "name", None))) for part in path))


def _is_list(value: Any) -> bool:
    """Return whether a part of an element is a list of numbers or strings, which is one sequence."""
    return isinstance(value, list) and all(isinstance(one, str | bytes | int | float | np.generic) for one in value)


def _checked_boundaries(boundaries: Sequence[int]) -> Any:
    bounds = list(boundaries)
    if not bounds or not all(map(is_count, bounds)) or sorted(set(bounds)) != bounds:
        raise InputError(
            f"bucket_by_sequence_length: boundaries: expected increasing whole numbers, from 1, got {boundaries!r}",
            "give the lengths of padded sequences, such as [16, 64, 256]",
            at=caller(),
        )
    return np.array(bounds)
