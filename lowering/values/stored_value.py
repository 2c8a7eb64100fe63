"""The initial value of a variable that is an array in a folder, or a part of one: read where the variable lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from dflow.lowering.files.array_files import read_arrays
from dflow.lowering.files.object_path import Location
from dflow.lowering.values.first_value import Unshared
from dflow.tracing.errors import CheckpointError
from dflow.tracing.ir.types import ArrayType
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.state.initial_value import TypedInitial


@dataclass(frozen=True)
class StoredValue(TypedInitial):
    """The array `name` in the folder `path`, or its part at `indices`; `id` is that of the folder.

    A large one is memory of its files if the device can use it: its pages are read as they are used, and shared with
    other processes. Raises CheckpointError if the folder is another one by now, or damaged.
    """

    path: Location
    id: str
    name: str
    indices: AxisSlice | None
    type: ArrayType

    def __call__(self) -> Any:
        """Return the value."""
        files = read_arrays(self.path)
        if files.id != self.id:
            raise CheckpointError(
                f"{self.path} has other arrays here than where the variables were made",
                "give a folder that all tasks see under this path",
            )
        mapped = files.mapped([self.name])
        value = mapped[self.name] if mapped else files.read({self.name: None})[self.name]
        # Not by `jnp.asarray`: it copies, where `device_put` uses the memory of an aligned array.
        return Unshared(jax.device_put(value if self.indices is None else self.indices.of(value)))
