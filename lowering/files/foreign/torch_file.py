"""A file that `torch.save` wrote, read by PyTorch itself, which runs no code of it (`weights_only=True`).

The names are the keys of its dicts and the indices of its lists, joined by `/`; the names of a state dict have dots.
Values that are no tensors, such as an epoch, are left out. The format has no checksums of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy.typing as npt

from dflow.lowering.files.foreign.foreign_arrays import ForeignArrays, damaged, id_of_file, missing, starts_with
from dflow.tracing.element_arrays import as_array
from dflow.tracing.errors import CheckpointError, InputError
from dflow.tracing.ir.types import ArrayType

_KIND = "a file of PyTorch"


@dataclass(frozen=True)
class TorchFile(ForeignArrays):
    """An opened file; `_tensors` are views of it."""

    _tensors: Mapping[str, Any]

    def value(self, name: str) -> npt.NDArray[Any]:
        try:
            found: npt.NDArray[Any] = as_array(self._tensors[name], f"tensor {name!r} of {self.path}")
        except (InputError, RuntimeError, TypeError) as error:
            raise damaged(self.path, f"a dense tensor {name!r}", error) from error
        return found


def read_torch(path: Path) -> TorchFile:
    """Open a file.

    Raises CheckpointError without PyTorch, and for a tensor of a dtype that JAX does not have; DamagedCheckpoint for a
    file that PyTorch cannot read, or that needs more than tensors and plain containers.
    """
    try:
        import torch
    except ImportError as error:
        raise missing(path, _KIND, "torch", error, "pip install torch, or save it as safetensors") from error
    try:
        id = id_of_file(path)
        # Only an archive can be mapped: an old version of PyTorch wrote a stream.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=starts_with(path, b"PK"))
    except Exception as error:  # the library raises errors of many classes
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"{path}: expected {_KIND} with tensors in dicts and lists, got: {first[:300]}",
            "save the tensors alone, by torch.save(model.state_dict(), path)",
        ) from error
    tensors = dict(_tensors(content, ()))
    return TorchFile(path, id, {name: _type(path, name, tensor) for name, tensor in tensors.items()}, {}, tensors)


def _tensors(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, (*keys, str(key)))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _tensors(inner, (*keys, str(index)))
    elif hasattr(value, "untyped_storage"):
        yield "/".join(keys) or "tensor", value


def _type(path: Path, name: str, tensor: Any) -> ArrayType:
    dtype = str(tensor.dtype).removeprefix("torch.")
    try:
        return ArrayType(jnp.dtype(dtype), tuple(tensor.shape))
    except TypeError:
        raise CheckpointError(
            f"{path}: tensor {name!r}: expected a dtype that JAX has, got {tensor.dtype}",
            "convert it in PyTorch, for instance by tensor.dequantize()",
        ) from None
