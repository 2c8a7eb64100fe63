"""What keeps state and runs steps over it: this process, or the tasks of a cluster.

Whatever is built on state (saving, restoring, exporting, running parts of a graph) is written once, against this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import jax

from dflow.lowering.array_files import ArrayFiles
from dflow.lowering.passes.base import Observer
from dflow.tracing.context import Home
from dflow.tracing.resources import Variable
from dflow.tracing.trace import Traced

#: Runs a step on the leaves of its arguments; gives the leaves of its result.
Runner = Callable[[Sequence[Any]], Sequence[Any]]


class StateBackend(Home, Protocol):
    """A home of variables that can be saved, restored and used by compiled steps.

    The variables that a method is given all live here. What is of one moment in one process is of one moment on each
    task of a cluster; between two tasks there may be steps.
    """

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Lower and compile a traced function whose variables live here, or in this process."""
        ...

    def snapshot(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """The values, as of one moment; they stay valid, and are not the caller's to donate."""
        ...

    def save(self, folder: Path, variables: Mapping[str, Variable], places: Mapping[str, str]) -> None:
        """Write the values, as of one moment, into a folder from `make_places`; the variables are given by array name.

        Raises CheckpointError when a place of theirs cannot be written.
        """
        ...

    def restoring(
        self, files: ArrayFiles, variables: Mapping[str, Variable]
    ) -> AbstractContextManager[Callable[[], None]]:
        """Read and check the arrays of the variables, given by array name; what is entered sets them all.

        Unless it is called, the variables stay as they are. Raises CheckpointError for an array that is missing or
        damaged, before any variable is set.
        """
        ...
