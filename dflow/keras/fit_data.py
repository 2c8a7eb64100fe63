"""The data of `fit` and `evaluate` as batches by number, and the part of a batch that a worker trains on.

Which examples a batch has depends on its number alone: not on the worker that takes it, nor on the batches taken
before. So a step that is done again uses the same examples, and each worker finds its own part.
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import keras
import numpy as np
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    GeneratorDataAdapter,
    PyDatasetAdapter,
    get_data_adapter,
    is_grain_dataset,
)

from dflow.input.columns import columns_of
from dflow.tracing.column_tables import is_of
from dflow.tracing.errors import TrainingError
from dflow.tracing.jax_frontend import keeps_64_bits

#: Batches of an iterator that are kept for steps that are done again.
_KEPT = 4
#: Returns the same text on all workers: that of the first worker that gives one for a subject.
Agree = Callable[[str, str], str]


@dataclass(frozen=True)
class FitBatches:
    """Batches by number, counted over all passes: tuples (x, y, sample_weight) of NumPy arrays and None.

    take      returns the batch of a number; raises IndexError after the last one
    per_pass  number of batches of a pass over the data; None if it is unknown or there is no end
    finish    called with the number of passes, when a training has ended
    items     the `keras.utils.PyDataset` of the batches, whose `on_epoch_begin` and `on_epoch_end` are called
    """

    take: Callable[[int], Any]
    per_pass: int | None
    finish: Callable[[int], None] = lambda passes: None
    items: keras.utils.PyDataset | None = None

    def begin_epoch(self) -> None:
        """Tell a PyDataset that an epoch begins."""
        if self.items is not None:
            self.items.on_epoch_begin()

    def end_epoch(self) -> None:
        """Tell a PyDataset that an epoch has ended."""
        if self.items is not None:
            self.items.on_epoch_end()

    def __len__(self) -> int:
        return self.per_pass or 0

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.take(number)

    def limited(self, steps: int | None, what: str) -> FitBatches:
        """Return the first `steps` batches of one pass, by default all. Raises TrainingError if it has no known end.

        what  the argument that gives the steps, for errors
        """
        if steps is None and self.per_pass is None:
            raise TrainingError(
                f"{what}: expected a number of steps for data without a known length, got None",
                f"give {what}=, or data with a length, such as arrays or a keras.utils.PyDataset",
            )
        if steps is None:
            return self
        return replace(self, per_pass=steps if self.per_pass is None else min(steps, self.per_pass))


def fit_batches(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: Any = None,
    agree: Agree = lambda what, mine: mine,
    skipped: int = 0,
) -> FitBatches:
    """Return data in any form that Keras takes, or a table of Arrow, as batches by number.

    The arguments are those of `keras.Model.fit`. `agree` gives all workers one order; `skipped` orders are drawn
    before the first. Raises Keras's errors for data that do not fit together.
    """
    given = map(plain, (x, y, sample_weight))
    adapter = get_data_adapter(*given, batch_size, steps, shuffle, class_weight)
    if isinstance(adapter, ArrayDataAdapter):
        return _of_arrays(adapter, shuffle, agree, skipped)
    if isinstance(adapter, PyDatasetAdapter):
        return _of_items(adapter, shuffle, agree, skipped)
    if is_grain_dataset(x) and hasattr(x, "__getitem__"):
        count = len(x) if len(x) < sys.maxsize else None  # a repeated one has no end
        return FitBatches(lambda number: _batch(x[number if count is None else number % count]), count)
    stream = _Stream(adapter.get_numpy_iterator, is_once=isinstance(adapter, GeneratorDataAdapter))
    return FitBatches(stream.take, adapter.num_batches)


def part_of(batch: Any, index: int, parts: int) -> tuple[Any, np.float32 | None]:
    """Return part `index` of the rows of a batch, and the weight of its mean in that over the parts.

    The weight is None for parts of one size. Parts without a row have the first row, with weight 0.
    """
    if parts == 1:
        return batch, None
    count = rows_of(batch)
    first, end = index * count // parts, (index + 1) * count // parts
    weight = None if count % parts == 0 else np.float32((end - first) * parts / count)
    first, end = (first, end) if first < end else (0, 1)
    return jax.tree_util.tree_map(lambda array: array[first:end] if np.ndim(array) else array, batch), weight


def rows_of(batch: Any) -> int:
    """Return the number of examples of a batch."""
    return next(len(leaf) for leaf in jax.tree_util.tree_leaves(batch) if np.ndim(leaf))


def _of_arrays(adapter: Any, shuffle: bool | str, agree: Agree, skipped: int) -> FitBatches:
    arrays = jax.tree_util.tree_map(_array, adapter._inputs)
    count, size, per_pass = adapter._num_samples, adapter.batch_size, adapter.num_batches

    def permutation(drawn: np.random.RandomState) -> Any:
        if shuffle == "batch":
            return np.concatenate([drawn.permutation(min(size, count - at)) + at for at in range(0, count, size)])
        return drawn.permutation(count)

    orders = _Orders(_NumpyState(), permutation, agree, skipped) if shuffle else None

    def take(number: int) -> Any:
        number, position = divmod(number, per_pass)
        at = slice(position * size, (position + 1) * size)
        rows = at if orders is None else orders.of(number)[at]
        return _batch(jax.tree_util.tree_map(lambda array: array[rows], arrays))

    return FitBatches(take, per_pass, orders.finish if orders is not None else lambda passes: None)


def _of_items(adapter: Any, shuffle: bool | str, agree: Agree, skipped: int) -> FitBatches:
    items, count = adapter.py_dataset, adapter.num_batches

    def shuffled(drawn: random.Random) -> list[int]:
        order = [*range(count)]
        drawn.shuffle(order)
        return order

    orders = _Orders(_PythonState(), shuffled, agree, skipped) if shuffle and count is not None else None

    def take(number: int) -> Any:
        if count is not None:
            number, position = divmod(number, count)
            number = position if orders is None else orders.of(number)[position]
        return _batch(adapter._standardize_batch(items[number]))

    return FitBatches(take, count, orders.finish if orders is not None else lambda passes: None, items)


class _NumpyState:
    """The state of the process's NumPy generator, which Keras uses to shuffle arrays."""

    def __init__(self) -> None:
        self.drawn, self.of_process = np.random.RandomState(), np.random

    @staticmethod
    def get(generator: Any) -> list[Any]:
        kind, keys, *rest = generator.get_state()
        return [kind, keys.tolist(), *rest]

    @staticmethod
    def set(generator: Any, state: list[Any]) -> None:
        generator.set_state((state[0], np.asarray(state[1], np.uint32), *state[2:]))


class _PythonState:
    """The state of the process's Python generator, which Keras uses to shuffle a PyDataset."""

    def __init__(self) -> None:
        self.drawn, self.of_process = random.Random(), random

    @staticmethod
    def get(generator: Any) -> list[Any]:
        return [*generator.getstate()]

    @staticmethod
    def set(generator: Any, state: list[Any]) -> None:
        generator.setstate((state[0], tuple(state[1]), state[2]))


class _Orders:
    """The orders that Keras would draw for the passes, equal on all workers. Any pass may be asked for at any time."""

    def __init__(self, kind: Any, draw: Callable[[Any], Any], agree: Agree, skipped: int) -> None:
        self._kind, self._draw, self._skipped = kind, draw, skipped
        #: The states before each order that was drawn.
        self._states = [json.loads(agree("the order of the data", json.dumps(kind.get(kind.of_process))))]
        self._newest: tuple[int, Any] = -1, None

    def of(self, number: int) -> Any:
        """Return the order of the pass of this number."""
        if self._newest[0] != number:
            self._advance(number + self._skipped)
            self._kind.set(self._kind.drawn, self._states[number + self._skipped])
            self._newest = number, self._draw(self._kind.drawn)
        return self._newest[1]

    def finish(self, passes: int) -> None:
        """Leave the process's generator as Keras leaves it after this number of passes."""
        self._advance(passes + self._skipped)
        self._kind.set(self._kind.of_process, self._states[passes + self._skipped])

    def _advance(self, number: int) -> None:
        while len(self._states) <= number:
            self._kind.set(self._kind.drawn, self._states[-1])
            self._draw(self._kind.drawn)
            self._states.append(self._kind.get(self._kind.drawn))


class _Stream:
    """Batches of an iterator by number; an earlier one than those kept begins a dataset again.

    is_once  whether the iterator cannot be begun again, as a generator: then its batches end, and TrainingError is
             raised for an earlier one
    """

    def __init__(self, start: Callable[[], Any], *, is_once: bool) -> None:
        self._start, self._is_once = start, is_once
        self._rest: Iterator[Any] = iter(start())
        self._next, self._kept = 0, deque[Any](maxlen=_KEPT)

    def take(self, number: int) -> Any:
        """Return the batch of this number."""
        if number < self._next - len(self._kept):
            if self._is_once:
                raise TrainingError(
                    f"fit: expected data that gives batch {number} again, for a step that is done again, got a "
                    f"generator, which is at batch {self._next}",
                    "give arrays, a keras.utils.PyDataset or a dataset of Grain, whose batches have numbers",
                )
            self._rest, self._next = iter(self._start()), 0
            self._kept.clear()
        while self._next <= number:
            self._kept.append(self._following())
            self._next += 1
        return _batch(self._kept[number - self._next])

    def _following(self) -> Any:
        for batch in self._rest:
            return batch
        if not self._is_once:  # the next pass
            self._rest = iter(self._start())
            for batch in self._rest:
                return batch
        raise IndexError(f"batch {self._next} of data that has ended")


def plain(given: Any) -> Any:
    """Return Arrow's tables as dicts of arrays, and its columns as arrays; other data as they are."""
    is_arrow = is_of(given, "pyarrow", "Table", "RecordBatch", "Array", "ChunkedArray")
    found = columns_of(given) if is_arrow else None
    return given if found is None else found.rows(slice(None))


def _batch(found: Any) -> tuple[Any, Any, Any]:
    x, y, sample_weight = jax.tree_util.tree_map(_array, tuple(keras.utils.unpack_x_y_sample_weight(found)))
    return x, y, sample_weight


def _array(given: Any) -> Any:
    """Return an array of NumPy, with floats of 64 bits as Keras's `floatx`, as JAX would make them."""
    array = np.asarray(given)
    if array.dtype == np.float64 and not keeps_64_bits():
        return array.astype(keras.config.floatx())
    if array.dtype == object and not np.ndim(array):
        raise TrainingError(
            f"fit: expected arrays of numbers, got a {type(given).__name__}", "give its dense form, such as x.toarray()"
        )
    return array
