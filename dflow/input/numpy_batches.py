"""`dflow.data.numpy_batches`: the batches of a loader of PyTorch, TensorFlow or others as NumPy arrays, not copied.

No library is imported here: a tensor is recognised by the module of its class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflow.tracing.errors import InputError
from dflow.tracing.source import caller

#: PyTorch's dtypes that its `numpy()` refuses: the integers of the same size to view them as.
_VIEWED = {1: "uint8", 2: "int16"}


def numpy_batches(loader: Iterable[Any]) -> NumpyBatches:
    """Return an iterable over a loader's batches as pytrees of NumPy arrays, for steps and queues.

    loader  yields pytrees: a PyTorch DataLoader, `tf.data.Dataset`, Grain's or Hugging Face's dataset, or any iterable

    A tensor in the memory of this process becomes an array of the same memory, also of bfloat16 and 8-bit floats; one
    on another device is copied. A list becomes a tuple, whose entries a strategy passes as the arguments of the step,
    and a list of strings or bytes an array of these objects. Other leaves stay as they are. The result has the `len()`
    of the loader, and if that is indexed by numbers, the batch of a number.

    Raises InputError if `loader` is no iterable, and during iteration for a sparse or ragged tensor.
    """
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


def as_array(leaf: Any) -> Any:
    """Return a NumPy array of a tensor or a sequence of numbers, of the same memory where that is possible.

    A string or bytes is an array of dtype object: NumPy's own dtypes for them lose zeros at the end.

    Raises InputError for a sparse or ragged tensor.
    """
    library = type(leaf).__module__.partition(".")[0]
    if library == "torch":
        return _of_torch(leaf.detach().cpu())
    if library == "tensorflow" and not hasattr(leaf, "__array__"):
        raise _not_dense(leaf, "make it dense first: dataset.map(tf.sparse.to_dense), or tensor.to_tensor()")
    return np.array(leaf, dtype=object) if isinstance(leaf, str | bytes) else np.asarray(leaf)


def _of_torch(tensor: Any) -> np.ndarray[Any, Any]:
    import torch  # it is there: this is one of its tensors

    if tensor.layout != torch.strided:
        raise _not_dense(tensor, "make it dense first: tensor.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name.startswith(("bfloat16", "float8")):
        bits = tensor.view(getattr(torch, _VIEWED[tensor.element_size()]))
        return np.asarray(bits.numpy()).view(jnp.dtype(name))
    return np.asarray(tensor.numpy())


def _not_dense(tensor: Any, remedy: str) -> InputError:
    return InputError(f"a batch: expected dense tensors, got a {type(tensor).__name__}", remedy, at=caller())


def _converted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _converted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        if value and all(isinstance(one, str | bytes) for one in value):
            return np.array(value, dtype=object)
        parts = map(_converted, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return as_array(value) if type(value).__module__.partition(".")[0] in ("torch", "tensorflow") else value
