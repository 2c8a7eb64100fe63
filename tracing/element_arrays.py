"""One leaf of an element or of a batch as a NumPy array, also a tensor of PyTorch or TensorFlow.

No library is imported that is not in use: a tensor is recognised by the module of its class.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.column_tables import is_table, library_of
from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: Libraries whose tensors and columns are taken as arrays.
_LIBRARIES = frozenset(("torch", "tensorflow", "pandas", "polars", "pyarrow"))
#: Names of the types of columns of integers; NumPy has NaN for values of these that are missing.
_INTEGERS = re.compile(r"u?int\d", re.IGNORECASE)
#: PyTorch's dtypes that its `numpy()` refuses: the integers of the same size to view them as.
_VIEWED = {1: "uint8", 2: "int16"}


def plain_array(value: Any, what: str) -> Any:
    """Return a tensor or column of another library as a NumPy array, and any other value, also a table, as it is.

    Raises InputError as `as_array`.
    """
    kind = type(value)
    if kind.__module__ == "builtins" or library_of(kind) not in _LIBRARIES or callable(value) or is_table(value):
        return value
    return as_array(value, what)


def as_array(leaf: Any, what: str = "a batch") -> Any:
    """Return a NumPy array of a tensor or a sequence of numbers, of the same memory where that is possible.

    A string or bytes is an array of dtype object: NumPy's own dtypes for them lose zeros at the end.

    Raises InputError, with `what` as the noun for the value, for a sparse or ragged tensor, a column of integers where
    some are missing, a table, and objects that NumPy cannot convert to numbers.
    """
    library = library_of(type(leaf))
    if library == "torch":
        return _of_torch(leaf.detach().cpu(), what)
    if library == "tensorflow" and not hasattr(leaf, "__array__"):
        raise _not_dense(what, leaf, "make it dense first: dataset.map(tf.sparse.to_dense), or tensor.to_tensor()")
    if isinstance(leaf, str | bytes):
        return np.array(leaf, dtype=object)
    if is_table(leaf):
        raise _no_element(leaf, "give one table of all rows; dflow.data.numpy_batches takes tables that are batches")
    values = np.asarray(leaf)
    if values.dtype == object and not isinstance(leaf, np.ndarray) and not _is_of_texts(values):
        raise _no_element(leaf, "convert it first, for instance a scalar of Arrow by its as_py()")
    if values is not leaf:
        refuse_missing_integers(leaf, values, lambda: what)
    return values


def refuse_missing_integers(column: Any, values: np.ndarray[Any, Any], what: Callable[[], str]) -> None:
    """Raise InputError if NumPy made floats of a column of integers, which it does where some are missing."""
    if values.dtype.kind != "f" or not _INTEGERS.match(_type_name(column)):
        return
    first = tuple(map(int, np.argwhere(np.isnan(values))[0]))
    raise InputError(
        f"{what()}: expected a value in each row, got a column of integers where some are missing, as at {first}",
        "leave their rows out, or fill them, such as by column.fillna(-1) in pandas",
        at=caller(),
    )


def _type_name(column: Any) -> str:
    return str(getattr(column, "dtype", getattr(column, "type", "")))


def _is_of_texts(values: Any) -> bool:
    return all(isinstance(value, str | bytes) for value in values.flat)


def _no_element(leaf: Any, remedy: str) -> InputError:
    kind = type(leaf).__name__
    return InputError(f"an element: expected numbers, arrays or strings, got a {kind}", remedy, at=caller())


def _of_torch(tensor: Any, what: str) -> np.ndarray[Any, Any]:
    import torch  # it is there: this is one of its tensors

    if tensor.layout != torch.strided:
        raise _not_dense(what, tensor, "make it dense first: tensor.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        bits = tensor.view(getattr(torch, _VIEWED[tensor.element_size()]))
        return np.asarray(bits.numpy()).view(jnp.dtype(name))
    return np.asarray(tensor.numpy())


def _not_dense(what: str, tensor: Any, remedy: str) -> InputError:
    return InputError(f"{what}: expected dense tensors, got a {type(tensor).__name__}", remedy, at=caller())
