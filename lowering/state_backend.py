"""What keeps state and runs steps over it: this process, or the tasks of a cluster.

Whatever is built on state (saving, restoring, exporting, running parts of a graph) is written once, against this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import jax

from dflow.lowering.files.narrowing import Narrowing
from dflow.lowering.files.object_path import Location
from dflow.lowering.files.saved_arrays import SavedArrays
from dflow.lowering.passes.base import Observer
from dflow.lowering.queues.queue_producer import QueueProducer
from dflow.tracing.errors import InternalError
from dflow.tracing.jaxprs.trace import Traced
from dflow.tracing.rows.axis_slice import AxisSlice
from dflow.tracing.state.context import Home
from dflow.tracing.state.queues import Queue
from dflow.tracing.state.resources import Variable

#: Runs a step on the leaves of its arguments; gives the leaves of its result.
Runner = Callable[[Sequence[Any]], Sequence[Any]]

#: Writes captured values into a folder prepared by `make_paths`, which returned the second argument.
WriteCaptured = Callable[[Location, Mapping[str, str]], None]


#: No array is written in fewer bits.
NONE: Mapping[str, Narrowing] = {}

#: The variables of saved arrays, by array name: one, or the variables that divide the array, by their indices.
SavedVariables = Mapping[str, Sequence[Variable]]


def indices_of(variable: Variable) -> AxisSlice:
    """Return the indices of the part that a variable has of an array."""
    if variable.part is None:
        raise InternalError(f"variable {variable.name!r} has no part of an array")
    return variable.part.indices


class LoweredStep(NamedTuple):
    """A step lowered to StableHLO.

    `programs`  the programs; on a cluster, those of the tasks' partitions
    `compile`   takes compiler options; returns the step's runner and the compiled programs, or None in place of the
                latter if each of several tasks compiles its own
    """

    programs: Sequence[Any]
    compile: Callable[[dict[str, Any] | None], tuple[Runner, Sequence[jax.stages.Compiled] | None]]


class Lowerable(Protocol):
    """A step whose graph has been through the passes, in this process or on a cluster."""

    def lower(self, platforms: tuple[str, ...] | None = None) -> LoweredStep:
        """Lower the programs, for `platforms` if not None, else for this process's devices."""


class StateBackend(Home, Protocol):
    """A home of variables that can be saved, restored and used by compiled steps.

    All variables passed to a method live here. "At one moment" holds for each task of a cluster separately: between
    the moments of two tasks, steps may run.
    """

    #: Whether all that lives here is in this process.
    is_local: bool
    #: Whether this process is the one that saves what lives here: worker 0 on a cluster.
    is_saver: bool

    def lower(self, traced: Traced, *, check: bool, observe: Observer | None) -> Lowerable:
        """Take a traced function whose variables live here, or in this process, through the passes."""

    def runner(self, traced: Traced, *, check: bool, observe: Observer | None) -> Runner:
        """Lower and compile a traced function whose variables live here, or in this process."""

    def producer(self, queue: Queue, where: str, name: str | None) -> QueueProducer:
        """Return the producing side of a queue that lives here; `where` is the user's line that feeds it.

        name  the same for a producer that goes on with the elements of an earlier one of this task; None for no other
        """

    def read_together(self, variables: Sequence[Variable]) -> list[jax.Array]:
        """Return the values at one moment. They stay valid; the caller must not donate them."""

    def at_one_moment(self, variables: Sequence[Variable]) -> AbstractContextManager[list[jax.Array]]:
        """Return the values as `read_together` does, but also on a cluster at one moment of all its tasks."""

    def capturing(
        self, variables: SavedVariables, narrowings: Mapping[str, Narrowing] = NONE
    ) -> AbstractContextManager[WriteCaptured]:
        """Take the values at one moment, on entry; the context gives a function that writes them into a folder.

        Of an array in `narrowings`, which is of one variable, it writes fewer bits. Steps may run meanwhile, and the
        function and the exit may be on another thread.
        The function raises CheckpointError for an array that cannot be written.
        """

    def restoring(self, files: SavedArrays, variables: SavedVariables) -> AbstractContextManager[Callable[[], None]]:
        """Read and check the arrays of the variables; the context gives a function that sets them all.

        Unless that function is called, the variables keep their values. Raises CheckpointError on entry for an array
        that is missing or damaged.
        """
