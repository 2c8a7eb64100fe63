"""Saved arrays to read: a folder of arrays, a checkpoint of Orbax, or a file of safetensors."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflow.lowering.files.array_files import ArrayFiles, read_arrays
from dflow.lowering.files.locations import location_of
from dflow.lowering.files.object_path import Location, ObjectPath
from dflow.lowering.files.orbax_checkpoint import is_orbax, read_orbax
from dflow.lowering.files.safetensors_file import SUFFIX, SafetensorsFile, read_safetensors
from dflow.tracing.errors import NoCheckpoint
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice


class SavedArrays(Protocol):
    """An opened folder or file: the types of its arrays by name, and its metadata."""

    @property
    def path(self) -> Location:
        """Where it is."""

    @property
    def id(self) -> str:
        """A text that differs between any two that were ever at this path."""

    @property
    def types(self) -> Mapping[str, ArrayType]:
        """The types of the arrays."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What was written beside the arrays."""

    def each(self, shardings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the named arrays, each as a JAX array of its sharding, or as a NumPy array where that is None."""

    def is_replaced(self) -> bool:
        """Return whether another one, or none, is at the path by now."""


def read_parts(files: SavedArrays, wanted: Sequence[tuple[str, AxisSlice]]) -> Iterator[Any]:
    """Yield parts of the named arrays, in order; of a checkpoint that Orbax wrote, each array is read whole."""
    if isinstance(files, ArrayFiles | SafetensorsFile):
        yield from files.parts(wanted)
        return
    for name, parts in itertools.groupby(wanted, key=lambda one: one[0]):
        [(_, whole)] = files.each({name: None})
        yield from (np.array(part.of(whole)) for _, part in parts)


def open_arrays(path: Location | str) -> SavedArrays:
    """Open the folder, or the file whose name ends in `.safetensors`; a str may be a URL.

    Raises as `location_of`, `read_arrays` and `read_orbax` do.
    """
    location = location_of(path) if isinstance(path, str) else path
    if isinstance(location, ObjectPath):
        return read_arrays(location)
    if location.name.endswith(SUFFIX) and not location.is_dir():
        return read_safetensors(location)
    try:
        return read_arrays(location)
    except NoCheckpoint:
        location = Path(os.path.realpath(location))
        if not is_orbax(location):
            raise
    return read_orbax(location)
