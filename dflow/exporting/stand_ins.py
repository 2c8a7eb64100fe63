"""Variables of an export that stand for others in fewer bits: they have no values of their own.

A value is computed from that of the other variable when it is read. When it is saved, the process that holds the other
one computes and writes it: a task the int8 weights of its part of a table, so that no process needs the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflow.lowering.files.array_files import write_parts
from dflow.lowering.files.narrowed_weights import narrowed, narrowed_type
from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.whole_arrays import whole_here
from dflow.lowering.local import LocalHome
from dflow.lowering.state_backend import NONE, SavedVariables, WriteCaptured
from dflow.tracing.errors import VariableError
from dflow.tracing.state.context import ValueLocation
from dflow.tracing.state.initial_value import Initial, TypedInitial
from dflow.tracing.state.resources import Variable


class FewerBits(TypedInitial):
    """The present value of a variable in fewer bits."""

    def __init__(self, variable: Variable, narrowing: Narrowing) -> None:
        self.variable, self.narrowing = variable, narrowing
        self.type = narrowed_type(variable.type, narrowing)

    def __call__(self) -> jax.Array:
        value = np.asarray(whole_here(self.variable.read()))
        return jnp.asarray(narrowed(self.variable.name, value, self.narrowing))


class StandIns(LocalHome):
    """The home of variables whose initial values are `FewerBits`, computed at each read."""

    def __init__(self) -> None:
        super().__init__()
        #: By the key of a variable.
        self.initials: dict[str, FewerBits] = {}

    def create(self, variable: Variable, initial: Initial, near: Variable | None) -> ValueLocation:
        assert isinstance(initial, FewerBits)
        self.initials[variable.name] = initial
        return ValueLocation(None, variable.name)

    def read(self, variable: Variable) -> jax.Array:
        return self.initials[variable.key]()

    def read_together(self, variables: Sequence[Variable]) -> list[jax.Array]:
        return [*map(self.read, variables)]

    def gather(self, variable: Variable, indices: Any) -> jax.Array:
        rows: jax.Array = self.read(variable)[indices]
        return rows

    def update(self, variable: Variable, kind: str, *operands: Any) -> None:
        other = self.initials[variable.key].variable.name
        raise VariableError(
            f"variable {variable.name!r} of an export stands for {other!r}, and cannot be written", "write the other"
        )

    @contextmanager
    def capturing(
        self, variables: SavedVariables, narrowings: Mapping[str, Narrowing] = NONE
    ) -> Iterator[WriteCaptured]:
        values = {name: self.read(held) for name, [held] in variables.items()}

        def write(folder: Location, paths: Mapping[str, str]) -> None:
            write_parts(folder, values, paths)

        yield write
