"""`dflow.data.numpy_batches`: the batches of a loader of PyTorch, TensorFlow or others as NumPy arrays, not copied.

No library is imported here: a tensor is recognised by the module of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflow.input.column_options import NAMES, ColumnOptions
from dflow.input.column_values import is_typed_column
from dflow.input.columns import columns_of
from dflow.tracing.column_tables import is_table, library_of, refuse_table
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: Each batch has different categories, so one code would mean different names in two batches.
_OPTIONS = ColumnOptions(categories=NAMES)


def numpy_batches(loader: Iterable[Any]) -> NumpyBatches:
    """Return an iterable over a loader's batches as pytrees of NumPy arrays, for steps and queues.

    loader  yields pytrees: a PyTorch DataLoader, `tf.data.Dataset`, Grain's or Hugging Face's dataset, or any iterable;
            or tables of pandas, polars or Arrow, as `pyarrow.parquet.ParquetFile.iter_batches` does

    A tensor in the memory of this process becomes an array of the same memory, also of bfloat16 and 8-bit floats; one
    on another device is copied. A list becomes a tuple, whose entries a strategy passes as the arguments of the step,
    and a list of strings or bytes an array of these objects. A table becomes a dict of arrays by name, as by `batches`,
    and a Series an array. Other leaves stay as they are. The result has the `len()` of the loader, and if that is
    indexed by numbers, the batch of a number.

    Raises InputError if `loader` is no iterable, or one table; and during iteration for a sparse or ragged tensor, and
    for a column with missing values, other than floats.
    """
    refuse_table("numpy_batches", loader, "give dflow.data.batches(data, size), which takes its rows")
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InputError(
            f"numpy_batches: expected an iterable, got a {type(loader).__name__}",
            "give it a loader; a single batch goes in a list",
        )
    return NumpyBatches(loader)


@dataclass(frozen=True, eq=False)
class NumpyBatches:
    """The result of `numpy_batches`; each iteration over it begins one over the loader."""

    loader: Any

    def __iter__(self) -> Iterator[Any]:
        return map(_converted, self.loader)

    def __len__(self) -> int:
        """Return the loader's number of batches. Raises TypeError if it has none."""
        return len(self.loader)

    def __getitem__(self, number: int) -> Any:
        """Return the batch of a number. Raises InputError if the loader is not indexed by numbers."""
        if not hasattr(self.loader, "__getitem__"):
            raise InputError(
                f"a batch by its number: expected an indexed loader, got a {type(self.loader).__name__}",
                "iterate over it, or make batches of the dataset: dflow.data.batches(dataset, size)",
                at=caller(),
            )
        return _converted(self.loader[number])


def _converted(value: Any, path: tuple[Any, ...] = ()) -> Any:
    if isinstance(value, Mapping):
        return {key: _converted(inner, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return np.array(value, dtype=object)
        parts = [_converted(inner, (*path, position)) for position, inner in enumerate(value)]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if (is_table(value) or is_typed_column(value)) and (columns := columns_of(value, path, _OPTIONS)) is not None:
        return columns.rows(np.arange(columns.count))
    return as_array(value) if library_of(type(value)) in ("torch", "tensorflow") else value
