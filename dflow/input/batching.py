"""`dflow.data.batches`: NumPy batches of arrays or of an iterable's elements, with seeded shuffling."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflow.input.column_options import CODES, ColumnOptions
from dflow.input.columns import Columns, columns_of
from dflow.input.padding import MASK, filled_up, refuse_entry
from dflow.input.reading import FileRows
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import InputError
from dflow.tracing.near_names import suggests_keywords
from dflow.tracing.source import caller

#: Largest initial buffer for one array of a batch, in bytes; larger batches double it as they fill.
_AT_ONCE_BYTES = 1 << 26

#: Immutable types, which are buffered without a copy.
_FIXED = (jax.Array, np.generic, bool, int, float, complex, str, bytes)


@suggests_keywords
def batches(
    data: Any,
    size: int,
    *,
    shuffle: bool | int = False,
    seed: int = 0,
    epochs: int | None = 1,
    drop_remainder: bool = False,
    pad: bool | str = False,
    missing: Any = None,
    categories: Any = CODES,
) -> Batches:
    """Return an iterable over batches of `size` elements: pytrees of NumPy arrays of shape (size, *element shape).

    data     columns, whose rows are the elements: an array, tensor, Series, Arrow array or dataset of HDF5 (along axis
             0), a dict or tuple of them and of lists of values, a DataFrame of pandas or polars, a table of Arrow, a
             dataset of Arrow, which is read into memory, a file of HDF5 or of NumPy's arrays, an array of records,
             files by `dflow.data.read`. A batch of a table is a dict of arrays by name. Or a list or another sequence
             of elements, such as a map-style dataset of PyTorch, Grain or Hugging Face; or any other iterable of
             elements. Each element is a pytree of arrays, tensors and numbers
    shuffle  True draws a new random order of the rows, or of a sequence, for each epoch. An integer is the size of a
             buffer that gives each next element at random; another iterable needs this form. For files it is the
             number of rows that are permuted together
    seed     seed of the order; equal seeds give equal batches
    epochs   number of passes over the data; None repeats it without end
    drop_remainder  whether to drop the last, smaller batch of an epoch; queues with fixed shapes need this
    pad      True repeats the last row of that batch until it has `size` rows, and adds to each batch a mask, bool
             (size,), which is False for these: the entry "mask" of a dict, or the one that `pad` names; a further last
             entry of a tuple; for other data a batch is the tuple (batch, mask)
    missing  values in place of missing ones: a dict by column, such as {"age": 0, "city": "unknown"}, or one value for
             data that is one column. It also takes the place of NaN and NaT in these columns
    categories  "codes" makes int32 codes of columns of categories: positions in the names, which `categories` of the
             result has by column. "names" makes the names. A dict of names by column, such as the `categories` of other
             batches, makes codes of its columns, also of strings, by these names; a value that is none of them is
             missing. In nested data a column's key, here and in `missing`, is the tuple of names that leads to it

    Batch `number` of arrays or a sequence is also `batches(...)[number]`, counted over all epochs: for
    `lambda step: data[step]` in the loop of a strategy, whose steps then use the same batches however often they are
    done.

    Each element is copied before the next is taken, so an iterable may reuse one buffer. Elements of different dtypes
    are promoted as by `numpy.result_type`. The result may be iterated several times, each time from the beginning.

    Columns keep their dtypes; strings and bytes are objects, times with a zone are UTC. Numbers of NumPy, pandas, Arrow
    and polars stay in their memory, also where that is a mapped file. Columns of HDF5, columns of Arrow and polars in
    chunks, and their strings, are read batch by batch; others are converted once.

    Raises InputError if `size` or `epochs` is not an integer of at least 1, or `data` cannot be shuffled or repeated as
    requested, or has no whole batch to repeat without end; with its name for a column of another number of rows, with
    missing values and no stated one (but floats, where they are NaN, and times, where they are NaT), with a stated one
    of another type, or of values other than numbers, strings and bytes; for a column that has the name of the mask; and
    during iteration, if elements of a batch differ in structure or shape.
    """
    return Batches(data, size, shuffle, seed, epochs, drop_remainder, pad, ColumnOptions(missing, categories))


@dataclass(frozen=True, eq=False)
class Batches:
    """The result of `batches`; each iteration over it starts from the beginning."""

    data: Any
    size: int
    shuffle: bool | int
    seed: int
    epochs: int | None
    drop_remainder: bool
    pad: bool | str
    options: ColumnOptions
    #: The orders of the rows in the epochs that `__getitem__` was asked for last.
    _ordered: dict[int, Any] = field(default_factory=dict, init=False, repr=False)
    #: The columns of the data, None if it is elements.
    _columns: Columns | FileRows | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_numbers(self)
        object.__setattr__(self, "_columns", columns_of(self.data, (), self.options))
        if self._columns is None:
            _check_elements(self)
        if isinstance(self._columns, FileRows):  # which are opened by the first batch
            _check_files(self)
            return
        if self.pad and self._columns is not None:
            refuse_entry(self._columns.tree.unflatten(self._columns.values), self._mask)
        if self.epochs is None and self.drop_remainder and self._is_indexed() and 0 < self._count() < self.size:
            raise InputError(
                f"batches without end: expected at least the {self.size} rows of a batch, got {self._count()}",
                "give a smaller size, or leave drop_remainder out",
                at=caller(),
            )

    @property
    def categories(self) -> Mapping[Any, Any]:
        """The names of each column of codes, by the column: code n of a batch is entry n. Empty without categories."""
        return dict(self._columns.categories) if isinstance(self._columns, Columns) else {}

    @property
    def _mask(self) -> str:
        return self.pad if isinstance(self.pad, str) else MASK

    def __iter__(self) -> Iterator[Any]:
        return over_epochs(self._epoch, self.epochs)

    def __getitem__(self, number: int) -> Any:
        """Return a batch by its number, the same as in an iteration.

        Raises IndexError below 0 and after the last batch; InputError unless `data` are arrays or a sequence, shuffled
        whole or not.
        """
        if not self._is_numbered():
            raise InputError(
                "a batch by its number: expected arrays or a sequence, and shuffle=True or False, got a "
                f"{type(self.data).__name__} and shuffle={self.shuffle!r}",
                "give arrays or a sequence, or iterate over the batches",
                at=caller(),
            )
        in_epoch = self._in_epoch(self._count())
        if number < 0 or not in_epoch or (self.epochs is not None and number >= self.epochs * in_epoch):
            most = "without end" if self.epochs is None and in_epoch else f"below {(self.epochs or 0) * in_epoch}"
            raise IndexError(f"a batch by its number: expected 0 or more, {most}, got {number}")
        epoch, position = divmod(number, in_epoch)
        if (order := self._ordered.get(epoch)) is None:
            order = self._order(epoch)
            # Steps of two epochs may run at the same time, on threads.
            for known in [known for known in list(self._ordered) if abs(known - epoch) > 1]:
                self._ordered.pop(known, None)
            self._ordered[epoch] = order
        return self._rows(np.asarray(order[position * self.size : (position + 1) * self.size]))

    def __len__(self) -> int:
        """Return the number of batches. Raises TypeError when it is unknown, as for `epochs=None` or a generator."""
        if self.epochs is None:
            raise TypeError("batches without end have no len()")
        return self.epochs * self._in_epoch(self._count())

    def _is_numbered(self) -> bool:
        """Whether a batch is known by its number."""
        return isinstance(self._columns, FileRows) or (self._is_indexed() and isinstance(self.shuffle, bool))

    def _is_indexed(self) -> bool:
        return self._columns is not None or is_indexed(self.data)

    def _count(self) -> int:
        return len(self.data) if self._columns is None else self._columns.count

    def _in_epoch(self, count: int) -> int:
        return count // self.size if self.drop_remainder else -(-count // self.size)

    def _epoch(self, epoch: int) -> Iterator[Any]:
        order = self._order(epoch)
        if self._columns is None:
            elements = self._elements(order) if self.shuffle is True else iter(self.data)
            if not isinstance(self.shuffle, bool):
                elements = drawn(map(own, elements), int(self.shuffle), np.random.default_rng((self.seed, epoch)))
            yield from self._stacked(elements)
            return
        if self._is_numbered():
            for first in range(0, self._in_epoch(len(order)) * self.size, self.size):
                yield self._rows(np.asarray(order[first : first + self.size]))
            return
        rows = drawn(order, self.shuffle, np.random.default_rng((self.seed, epoch)))
        while group := list(itertools.islice(rows, self.size)):
            if len(group) == self.size or not self.drop_remainder:
                yield self._rows(np.asarray(group))

    def _order(self, epoch: int) -> Any:
        """Return the order of the rows in an epoch, but for that of a buffer; of elements one after another, none."""
        seed = self.seed, epoch
        if isinstance(self._columns, FileRows):
            return self._columns.order(self.size, int(self.shuffle), seed)
        if not self._is_indexed():
            return ()
        count = self._count()
        return np.random.default_rng(seed).permutation(count) if self.shuffle is True else range(count)

    def _rows(self, indices: Any) -> Any:
        if self._columns is None:
            return next(self._stacked(self._elements(indices)))
        return self._filled_up(self._columns.rows(indices), len(indices))

    def _filled_up(self, batch: Any, count: int) -> Any:
        return filled_up(batch, count, self.size, self._mask) if self.pad else batch

    def _elements(self, indices: Iterable[int]) -> Iterator[Any]:
        return (self.data[int(index)] for index in indices)

    def _stacked(self, elements: Iterator[Any]) -> Iterator[Any]:
        for first in elements:
            count, batch = stacked(first, itertools.islice(elements, self.size - 1), self.size)
            if count == self.size or not self.drop_remainder:
                yield self._filled_up(batch, count)


def drawn(elements: Iterable[Any], size: int, random: np.random.Generator) -> Iterator[Any]:
    """Yield the elements in random order, each drawn from a buffer of `size` elements that is then refilled."""
    buffer: list[Any] = []
    for element in elements:
        if len(buffer) < size:
            buffer.append(element)
            continue
        position = int(random.integers(size))
        chosen, buffer[position] = buffer[position], element
        yield chosen
    yield from (buffer[position] for position in random.permutation(len(buffer)))


def stacked(first: Any, others: Iterable[Any], size: int) -> tuple[int, Any]:
    """Return the number of elements, at most `size`, and them stacked along a new first axis.

    Each element is copied before the next is taken, which may reuse its memory. Raises InputError if its structure or
    shapes differ from those of the first.
    """
    leaves: list[Any]
    tree: Any
    leaves, tree = jax.tree_util.tree_flatten(first)
    columns = [
        np.empty((min(size, max(1, _AT_ONCE_BYTES // max(1, row.nbytes))), *row.shape), row.dtype)
        for row in map(as_array, leaves)
    ]
    count = 0
    for element in itertools.chain([first], others):
        try:
            leaves = tree.flatten_up_to(element)
        except ValueError as error:
            raise InputError(f"an element differs from the first of its batch: {error}", at=caller()) from None
        for position, leaf in enumerate(leaves):
            row, column = as_array(leaf), columns[position]
            if row.shape != column.shape[1:]:
                raise InputError(
                    f"an element has an array of the shape {row.shape} where the first of its batch has "
                    f"{column.shape[1:]}",
                    "pad them to one shape, or feed them to a PaddingFIFOQueue",
                )
            if row.dtype != column.dtype:
                column = columns[position] = column.astype(np.result_type(column.dtype, row.dtype))
            if count == len(column):
                column = columns[position] = np.concatenate([column, np.empty_like(column)])
            column[count, ...] = row  # else an object array without axes would be kept as such
        count += 1
    return count, tree.unflatten([column[:count] for column in columns])


def own(element: Any) -> Any:
    """Return the element with copies of the arrays that its producer could overwrite."""
    leaves, tree = jax.tree_util.tree_flatten(element)
    return jax.tree_util.tree_unflatten(
        tree, [leaf if isinstance(leaf, _FIXED) else np.array(as_array(leaf)) for leaf in leaves]
    )


def over_epochs(batches_of: Callable[[int], Iterator[Any]], epochs: int | None) -> Iterator[Any]:
    """Yield the batches of each epoch by its number; of None without end, unless an epoch is empty."""
    for epoch in itertools.count() if epochs is None else range(epochs):
        is_empty = True
        for batch in batches_of(epoch):
            is_empty = False
            yield batch
        if is_empty:  # with None the loop would never yield or return
            return


def is_indexed(data: Any) -> bool:
    """Whether `data` has an element for each number below its length."""
    # Those of PyTorch inherit a `__getitem__` that raises.
    is_stream = any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)
    has_elements = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has_elements and not is_stream and not isinstance(data, Mapping)


def _check_numbers(made: Batches) -> None:
    if not is_count(made.size):
        raise InputError(f"batches was given the size {made.size!r}", "give a whole number, from 1")
    if made.epochs is not None and not is_count(made.epochs):
        raise InputError(f"batches was given epochs={made.epochs!r}", "give a whole number, or None for no end")
    if made.pad and made.drop_remainder:
        raise InputError(
            "batches: expected pad or drop_remainder, got both",
            "leave one out: with drop_remainder=True all batches are full",
            at=caller(),
        )
    if not isinstance(made.shuffle, bool) and not is_count(made.shuffle):
        raise InputError(f"batches was given shuffle={made.shuffle!r}", "give True, False or a buffer's size")


def _check_files(made: Batches) -> None:
    if made.shuffle is True:
        raise InputError(
            f"batches was given shuffle=True for {made.data!r}, which need not fit into memory",
            "give the number of rows that are permuted together, shuffle=100_000",
        )


def _check_elements(made: Batches) -> None:
    kind = type(made.data).__name__
    if not hasattr(made.data, "__iter__") and not hasattr(made.data, "__getitem__"):
        raise InputError(f"batches: expected arrays or an iterable, got a {kind}", "give arrays, a list or a dataset")
    if made.shuffle is True and not is_indexed(made.data):
        raise InputError(
            f"batches was given shuffle=True for a {kind}, whose elements come one by one",
            "give the size of the buffer to shuffle in, shuffle=1000",
        )
    if made.epochs != 1 and iter(made.data) is made.data:
        raise InputError(
            f"batches was given epochs={made.epochs} for a {kind}, which can be gone through once",
            "give what makes a new iterator each time, such as a list or a dataset",
        )


def is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1
