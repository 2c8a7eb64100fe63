"""What files of other libraries share: each gives one array by name, as a view of its file where that is possible.

A file may come from anywhere. Invariant: a file that cannot be read is a CheckpointError that names it.
"""

from __future__ import annotations

import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dflow.lowering.files.regular_file import regular_size, remedy_of
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.files.whole_arrays import placed
from dflow.tracing.errors import CheckpointError, DamagedCheckpoint
from dflow.tracing.rows.axis_slice import AxisSlice

#: Most bytes of the start of a file that its id is made of.
_MOST = 1 << 20


@dataclass(frozen=True)
class ForeignArrays(SavedArrays):
    """An opened file; `path` is the file that tells whether it was replaced."""

    path: Path

    @abstractmethod
    def value(self, name: str) -> npt.NDArray[Any]:
        """Return an array; pages of it may be read when they are used. Raises CheckpointError if it is damaged."""

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for name, sharding in shardings.items():
            value = self.value(name)
            yield name, np.array(value) if sharding is None else placed(jnp.array(value), sharding)

    def parts(self, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
        for name, part in wanted:
            yield np.array(part.of(self.value(name)))

    def is_replaced(self) -> bool:
        try:
            return id_of_file(self.path) != self.id
        except OSError:
            return True


def id_of_file(path: Path) -> str:
    """Return what tells a file from others at its path. Raises OSError if it is missing, a link, a pipe or a device."""
    size = regular_size(path)
    with open(path, "rb") as file:
        return f"{size}-{os.fstat(file.fileno()).st_mtime_ns}-{zlib.crc32(file.read(_MOST))}"


def starts_with(path: Path, first: bytes) -> bool:
    """Return whether a file begins with these bytes. Raises OSError if it is missing, a link, a pipe or a device."""
    regular_size(path)
    with open(path, "rb") as file:
        return file.read(len(first)) == first


def damaged(path: Path, kind: str, error: object) -> DamagedCheckpoint:
    """Return the error for a file that is none of its kind, such as "a file of PyTorch"."""
    remedy = remedy_of(error, "take another copy") if isinstance(error, BaseException) else "take another copy"
    return DamagedCheckpoint(f"{path}: expected {kind}, got: {str(error)[:300]}", remedy)


def missing(path: Path, kind: str, package: str, error: ImportError, remedy: str) -> CheckpointError:
    """Return the error for a file whose library is not installed."""
    return CheckpointError(f"{path} is {kind}: expected the package {package}, got: {error}", remedy)
